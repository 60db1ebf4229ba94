"""The primitive that joins ranges of one array: a rotation, the edges that padding repeats, and their gradients.

join_ranges x  =  zeros, but result[at : at + stop - start] = x[start:stop] along `dim` for each range
"""

from __future__ import annotations

from typing import Any

from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from shardc import compat
from shardc.sbp.signature import Ranges

join_ranges_p = Primitive("join_ranges")


def _join(x: Any, *, dim: int, size: int, ranges: Ranges) -> Any:
    parts: list[Any] = []
    end = 0
    for at, start, stop in (*ranges, (size, 0, 0)):
        if at > end:
            parts.append(lax.full_like(x, 0, shape=(*x.shape[:dim], at - end, *x.shape[dim + 1 :])))
        if stop > start:
            parts.append(lax.slice_in_dim(x, start, stop, axis=dim))
        end = at + stop - start
    return lax.concatenate(parts, dim)


def _type(x: Any, *, dim: int, size: int, ranges: Ranges) -> Any:
    return compat.shaped_array((*x.shape[:dim], size, *x.shape[dim + 1 :]), x.dtype)


def _batch(args: Any, dims: Any, *, dim: int, size: int, ranges: Ranges) -> tuple[Any, Any]:
    ((x,), (d,)) = args, dims
    return join_ranges_p.bind(x, dim=dim + (dim >= d), size=size, ranges=ranges), d


join_ranges_p.def_impl(_join)
join_ranges_p.def_abstract_eval(_type)
mlir.register_lowering(join_ranges_p, mlir.lower_fun(_join, multiple_results=False))
batching.primitive_batchers[join_ranges_p] = _batch
