"""Emits collectives, inside shard_map: the steps of boxings, and those inside operations. The only place that does so.

Uneven splits: a group of axes that splits a block of K elements into nested pieces of c elements holds n*c >= K of
them, with padding between. `_unblock` drops that padding after a gather, `_block` inserts it before a scatter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardc.sbp.boxing import Shape, piece_of
from shardc.sbp.cost import BoxingStep
from shardc.sbp.layout import bits_of
from shardc.sbp.placement import AxisSizes, Placement, S, block_sizes, local_shape
from shardc.sbp.signature import Neutral, neutral_value

_NEUTRAL: Final[dict[str, Neutral]] = {"sum": "zero", "max": "lowest", "min": "highest"}


def _block(x: jax.Array, dim: int, counts: Sequence[int]) -> jax.Array:
    """Dimension `dim`, one block, in the layout of the pieces of nested splits: padding after each short piece."""
    sizes = block_sizes(x.shape[dim], counts)
    lead = x.shape[:dim]
    for depth, n in enumerate(counts):
        at = dim + depth
        x = _pad_to(x, at, n * sizes[depth + 1])
        x = x.reshape(*x.shape[:at], n, sizes[depth + 1], *x.shape[at + 1 :])
    return x.reshape(*lead, math.prod(counts) * sizes[-1], *x.shape[dim + len(counts) + 1 :])


def _unblock(x: jax.Array, dim: int, size: int, counts: Sequence[int]) -> jax.Array:
    """The inverse of `_block`, for a block of `size` elements."""
    sizes = block_sizes(size, counts)
    x = x.reshape(*x.shape[:dim], *counts, sizes[-1], *x.shape[dim + 1 :])
    for depth in reversed(range(len(counts))):
        at = dim + depth
        x = x.reshape(*x.shape[:at], counts[depth] * sizes[depth + 1], *x.shape[at + 2 :])
        x = lax.slice_in_dim(x, 0, sizes[depth], axis=at)
    return x


def _pad_to(x: jax.Array, dim: int, size: int) -> jax.Array:
    if x.shape[dim] == size:
        return x
    widths = [(0, size - x.shape[dim] if d == dim else 0, 0) for d in range(x.ndim)]
    return lax.pad(x, np.zeros((), x.dtype), widths)


class _Emitter:
    """The context of a step: logical shape, mesh, and this device's coordinates."""

    def __init__(self, step: BoxingStep, shape: Shape, sizes: AxisSizes, index: Callable[[str], Any]) -> None:
        self.step, self.shape, self.sizes, self.index = step, shape, sizes, index
        self.axes = step.axes
        self.counts = [sizes[a] for a in step.axes]

    def dim_of(self, placement: Placement) -> int:
        """The dimension that the step's axes split in `placement`."""
        sbp = placement[self.axes[0]]
        assert isinstance(sbp, S)
        return sbp.dim

    def block_size(self, placement: Placement, dim: int) -> int:
        """Size of the block of `dim` that the step's axes cut in `placement`."""
        return local_shape(self.shape, placement.without(self.axes), self.sizes)[dim]

    def linear_index(self) -> Any:
        at: Any = 0
        for axis, n in zip(self.axes, self.counts, strict=True):
            at = at * n + self.index(axis)
        return at


def _all_gather(e: _Emitter, x: jax.Array) -> jax.Array:
    dim = e.dim_of(e.step.src)
    x = lax.all_gather(x, e.axes, axis=dim, tiled=True)
    return _unblock(x, dim, e.block_size(e.step.src, dim), e.counts)


def _all_reduce(e: _Emitter, x: jax.Array) -> jax.Array:
    op = str(e.step.src.partial_op)
    if op == "sum":
        return lax.psum(_number(x), e.axes).astype(x.dtype)
    reduce = lax.pmax if op == "max" else lax.pmin
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return reduce(_number(x), e.axes).astype(x.dtype)
    infinity = neutral_value(_NEUTRAL["min" if op == "max" else "max"], x.dtype)
    if x.dtype.itemsize < 4:  # no library reduces integers of 16 bits: NaN becomes infinity
        return reduce(jnp.where(jnp.isnan(x), infinity, x), e.axes)
    return _from_order(reduce(_in_order(x, op), e.axes), x.dtype)


def _in_order(x: jax.Array, op: str) -> jax.Array:
    """Floats as integers of their order, with NaN above all (or below, for a minimum): all-reduces lose NaN."""
    info = jnp.iinfo(f"int{8 * x.dtype.itemsize}")
    bits = lax.bitcast_convert_type(x, info.dtype)
    return jnp.where(jnp.isnan(x), info.max if op == "max" else info.min, _turn_negative(bits))


def _from_order(x: jax.Array, dtype: Any) -> jax.Array:
    found = lax.bitcast_convert_type(_turn_negative(x), dtype)
    return jnp.where(jnp.isnan(found), jnp.asarray(jnp.nan, dtype), found)  # a NaN with a sign would sort first


def _turn_negative(bits: jax.Array) -> jax.Array:
    """All bits but the sign of negative numbers inverted: integers in the order of the floats, and back."""
    return jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)


def _number(x: jax.Array) -> jax.Array:
    """Booleans as numbers: JAX cannot reduce booleans. No value is a P(sum) of booleans, but a path may fill with
    False."""
    return x.astype(np.uint8) if x.dtype == np.bool_ else x


def _reduce_scatter(e: _Emitter, x: jax.Array) -> jax.Array:
    dim = e.dim_of(e.step.dst)
    blocks = _number(_block(x, dim, e.counts))
    return lax.psum_scatter(blocks, e.axes, scatter_dimension=dim, tiled=True).astype(x.dtype)


def _all_to_all(e: _Emitter, x: jax.Array) -> jax.Array:
    new = e.dim_of(e.step.dst)
    x = _block(x, new, e.counts)
    if e.step.src.partial_op in ("max", "min") and e.step.dst.partial_axes != e.step.src.partial_axes:
        n = math.prod(e.counts)
        x = x.reshape(*x.shape[:new], n, x.shape[new] // n, *x.shape[new + 1 :])
        x = lax.all_to_all(x, e.axes, split_axis=new, concat_axis=new, tiled=True)
        return x.max(new) if e.step.src.partial_op == "max" else x.min(new)
    old = e.dim_of(e.step.src)
    x = lax.all_to_all(x, e.axes, split_axis=new, concat_axis=old, tiled=True)
    return _unblock(x, old, e.block_size(e.step.src, old), e.counts)


def _slice(e: _Emitter, x: jax.Array) -> jax.Array:
    dim = e.dim_of(e.step.dst)
    x = _block(x, dim, e.counts)
    size = x.shape[dim] // math.prod(e.counts)
    return lax.dynamic_slice_in_dim(x, e.linear_index() * size, size, axis=dim)


def _keep(e: _Emitter, x: jax.Array) -> jax.Array:
    op = e.step.dst.partial_op
    if op != "sum":  # max and min are idempotent
        return x
    return jnp.where(e.linear_index() == 0, x, np.zeros((), x.dtype))


def _fill(e: _Emitter, x: jax.Array) -> jax.Array:
    dim, op = e.dim_of(e.step.src), e.step.dst.partial_op
    assert op is not None
    shape = (*x.shape[:dim], math.prod(e.counts) * x.shape[dim], *x.shape[dim + 1 :])
    whole = jnp.full(shape, neutral_value(_NEUTRAL[op], x.dtype), x.dtype)
    whole = lax.dynamic_update_slice_in_dim(whole, x, e.linear_index() * x.shape[dim], axis=dim)
    return _unblock(whole, dim, e.block_size(e.step.src, dim), e.counts)


def permute_pairs(step: BoxingStep, shape: Shape, sizes: AxisSizes) -> list[tuple[int, int]]:
    """(source, target) for each device of the group, as positions along `step.axes`; devices keep their own piece if
    they can."""
    counts = [sizes[a] for a in step.axes]
    coords = [dict(zip(step.axes, map(int, c), strict=True)) for c in np.ndindex(*counts)]

    def key(placement: Placement, at: dict[str, int]) -> tuple[tuple[int, int], ...]:
        return tuple(piece_of(size, placement.axes_of(d), sizes, at) for d, size in enumerate(shape))

    sources = {i: key(step.src, at) for i, at in enumerate(coords)}
    wanted = {i: key(step.dst, at) for i, at in enumerate(coords)}
    pairs = [(i, i) for i in wanted if sources[i] == wanted[i]]
    left: dict[object, list[int]] = {}
    for i, held in sources.items():
        if held != wanted[i]:
            left.setdefault(held, []).append(i)
    pairs += [(left[want].pop(0), i) for i, want in wanted.items() if sources[i] != want]
    return sorted(pairs, key=lambda pair: pair[1])


def _permute(e: _Emitter, x: jax.Array) -> jax.Array:
    return lax.ppermute(x, e.axes, permute_pairs(e.step, e.shape, e.sizes))


_EMIT: Final[dict[str, Callable[[_Emitter, jax.Array], jax.Array]]] = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "permute": _permute,
    "slice": _slice,
    "keep": _keep,
    "fill": _fill,
}


def emit_step(step: BoxingStep, x: Any, shape: Shape, sizes: AxisSizes, index: Callable[[str], Any]) -> Any:
    """The piece after `step` from the piece before it; `shape` is logical. Runs inside shard_map."""
    if 0 in shape:  # nothing to move, and XLA refuses to scatter it
        return jnp.zeros(local_shape(shape, step.dst, sizes), x.dtype)
    emitter = _Emitter(step, shape, sizes, index)
    return _in_bytes(lambda x: _EMIT[step.kind](emitter, x), x)


def _in_bytes(send: Callable[[Any], Any], x: Any) -> Any:
    """`send(x)`, with elements of less than four bits as bytes, as the plan counts them: XLA:CPU gathers these out of
    bounds."""
    if bits_of(x.dtype) >= 4:
        return send(x)
    unsigned = jnp.issubdtype(x.dtype, jnp.unsignedinteger)
    return send(x.astype(np.uint8 if unsigned else np.int8)).astype(x.dtype)


class MeshWire:
    """The collectives inside operations, on a mesh of `sizes`; empty arrays are not sent."""

    def __init__(self, sizes: AxisSizes) -> None:
        self.sizes = sizes

    def all_gather(self, x: Any, axes: tuple[str, ...]) -> Any:
        x = jnp.asarray(x)
        if not x.size:
            return jnp.zeros((self._count(axes), *x.shape), x.dtype)
        return _in_bytes(lambda x: lax.all_gather(x, axes), x)

    def all_to_all(self, x: Any, axes: tuple[str, ...]) -> Any:
        return _in_bytes(lambda x: lax.all_to_all(x, axes, 0, 0, tiled=True), x)

    def permute(self, x: Any, axes: tuple[str, ...], pairs: Sequence[tuple[int, int]]) -> Any:
        if not x.size:
            return x
        in_order = tuple(
            a for a in self.sizes if a in axes
        )  # JAX numbers devices in this order, however axes are named
        number = np.arange(self._count(axes)).reshape([self.sizes[a] for a in in_order])
        number = number.transpose([in_order.index(a) for a in axes]).ravel()
        return lax.ppermute(x, in_order, [(int(number[s]), int(number[t])) for s, t in pairs])

    def _count(self, axes: Sequence[str]) -> int:
        return math.prod(self.sizes[a] for a in axes)
