"""Primitives that join ranges of one array: a rotation, the edges that padding repeats, and their gradients.

join_ranges x       =  zeros, but result[at : at + stop - start] = x[start:stop] along `dim` for each range
conv_of_ranges x k  =  conv_general_dilated (join_ranges x) k
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from shardc import compat
from shardc.sbp.signature import Joined, Ranges

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

conv_of_ranges_p = Primitive("conv_of_ranges")
"""Its parameters are those of a convolution, and `joined`: (size, ranges) of each spatial dimension, None if it is as
it is. An array with wrapped or repeated padding is cut elsewhere than the array itself: one window reads both."""


def _convolve(x: Any, kernel: Any, *, joined: Joined, **params: Any) -> Any:
    for dim, one in zip(params["dimension_numbers"].lhs_spec[2:], joined, strict=True):
        if one is not None:
            x = join_ranges_p.bind(x, dim=dim, size=one[0], ranges=one[1])
    return lax.conv_general_dilated_p.bind(x, kernel, **params)


def _type_of_convolution(x: Any, kernel: Any, **params: Any) -> Any:
    avals = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, kernel))
    made = jax.eval_shape(lambda x, kernel: _convolve(x, kernel, **params), *avals)
    return compat.shaped_array(made.shape, made.dtype)


conv_of_ranges_p.def_impl(_convolve)
conv_of_ranges_p.def_abstract_eval(_type_of_convolution)
mlir.register_lowering(conv_of_ranges_p, mlir.lower_fun(_convolve, multiple_results=False))
