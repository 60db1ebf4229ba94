"""Targets: what a leaf is restored as. A target says which pieces of the logical array it needs here, and is made of
them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from numpy.typing import NDArray

from shardc import compat
from shardc.arrays.pieces import Index, index_of
from shardc.arrays.placed import PlacedArray, StackedArray, is_placed, leaf_aval
from shardc.calls.leaves import leaf_of
from shardc.checkpoint.leaves import ARRAYS, arrived, arrives, is_remote, value_of
from shardc.checkpoint.manifest import StoredLeaf
from shardc.errors import ArgumentError, PlacementError, all_offenders
from shardc.machine.mesh import AnyMesh, view
from shardc.passes.trace.pins import Pins
from shardc.passes.trace.trace import leaves_by_path, path_text
from shardc.sbp.layout import is_plain, physical_shape, physical_spec
from shardc.sbp.placement import Placement, extents, local_shape
from shardc.sbp.signature import is_extended

Pieces: TypeAlias = Mapping[Index, NDArray[Any]]
"""Pieces of a logical array; of random keys their words, in one more dimension."""


class Target(Protocol):
    """The kind of array that a leaf is restored as."""

    def needs(self) -> list[Index]:
        """The pieces of the logical array that this process needs."""
        ...

    def make(self, pieces: Pieces) -> Any:
        """The leaf, made of these pieces."""
        ...


@dataclass(frozen=True)
class Given:
    """A leaf that is there already: it is not saved, lives elsewhere, or stands in the manifest."""

    value: Any

    def needs(self) -> list[Index]:
        return []

    def make(self, pieces: Pieces) -> Any:
        del pieces
        return self.value


@dataclass(frozen=True)
class Filled:
    """A scalar of a target, with a value that stands in the manifest."""

    target: Target
    value: NDArray[Any]

    def needs(self) -> list[Index]:
        return []

    def make(self, pieces: Pieces) -> Any:
        del pieces
        return self.target.make({(): self.value})


@dataclass(frozen=True)
class Whole:
    """An array that this process needs whole. `finish` makes the leaf of it."""

    shape: tuple[int, ...]
    finish: Callable[[NDArray[Any]], Any]

    def needs(self) -> list[Index]:
        return [whole(self.shape)]

    def make(self, pieces: Pieces) -> Any:
        return self.finish(pieces[whole(self.shape)])


@dataclass(frozen=True)
class Sharded:
    """A jax.Array with a sharding."""

    shape: tuple[int, ...]
    dtype: Any
    weak: bool
    sharding: Any

    def needs(self) -> list[Index]:
        found = self.sharding.addressable_devices_indices_map(self.shape).values()
        return list(dict.fromkeys(index_of(at or (), self.shape) for at in found))

    def make(self, pieces: Pieces) -> Any:
        made = by_shards(self.shape, self.dtype, self.sharding, lambda at: pieces[at])
        return finished(made, self.dtype, self.weak)


@dataclass(frozen=True)
class InPieces:
    """A PlacedArray: its pieces with their padding; of a partial sum the first device holds all."""

    shape: tuple[int, ...]
    dtype: Any
    weak: bool
    placement: Placement
    mesh: Mesh

    @property
    def _physical_shape(self) -> tuple[int, ...]:
        return physical_shape(self.shape, self.placement, dict(self.mesh.shape))

    @property
    def _sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, physical_spec(self.placement))

    def needs(self) -> list[Index]:
        found = self._sharding.addressable_devices_indices_map(self._physical_shape).values()
        needed = (self._logical(index_of(at or (), self._physical_shape)) for at in found)
        return list(dict.fromkeys(at for at in needed if at is not None))

    def _logical(self, at: Index) -> Index | None:
        """The elements of the logical array that a piece of the physical one holds; None: it holds zeros."""
        sizes = dict(self.mesh.shape)
        if self.placement.partial_axes:
            first, at = at[0][0], at[1:]
            if first and self.placement.partial_op == "sum":
                return None
        found: list[tuple[int, int]] = []
        for dim, ((start, _), local) in enumerate(zip(at, local_shape(self.shape, self.placement, sizes), strict=True)):
            pieces = extents(self.shape[dim], tuple(sizes[a] for a in self.placement.axes_of(dim)))
            offset, valid = pieces[start // local] if local else (0, 0)
            found.append((offset, offset + valid))
        return tuple(found)

    def make(self, pieces: Pieces) -> Any:
        lead = 1 if self.placement.partial_axes else 0

        def piece(at: Index) -> NDArray[Any]:
            logical = self._logical(at)
            out = zeros(at, self.dtype)
            if logical is not None:
                valid = tuple(slice(0, stop - start) for start, stop in logical)
                (out[0, ...] if lead else out)[valid] = pieces[logical]  # a view, of a scalar too
            return out

        made = by_shards(self._physical_shape, self.dtype, self._sharding, piece)
        return PlacedArray(finished(made, self.dtype, self.weak), self.shape, self.placement, self.mesh)


@dataclass(frozen=True)
class Stacked:
    """A StackedArray: its pieces follow one another in dimension 0."""

    parts: tuple[Target, ...]
    starts: tuple[int, ...]

    def needs(self) -> list[Index]:
        moved = [_moved(at, start) for t, start in zip(self.parts, self.starts, strict=True) for at in t.needs()]
        return list(dict.fromkeys(moved))

    def make(self, pieces: Pieces) -> Any:
        def of(target: Target, start: int) -> Any:
            return target.make({at: pieces[_moved(at, start)] for at in target.needs()})

        return StackedArray([of(t, start) for t, start in zip(self.parts, self.starts, strict=True)])


def _moved(at: Index, rows: int) -> Index:
    (start, stop), *rest = at
    return ((start + rows, stop + rows), *rest)


def whole(shape: Sequence[int]) -> Index:
    return tuple((0, n) for n in shape)


def by_shards(shape: tuple[int, ...], dtype: Any, sharding: Any, piece: Callable[[Index], NDArray[Any]]) -> jax.Array:
    """A jax.Array of its shards; for random keys that of their words."""
    cache: dict[Index, NDArray[Any]] = {}

    def shard(at: Any) -> NDArray[Any]:
        index = index_of(at[: len(shape)], shape)
        if index not in cache:
            cache[index] = piece(index)
        return cache[index]

    tail, stored = words_of(dtype)
    return jax.make_array_from_callback((*shape, *tail), sharding, shard, dtype=stored)


def words_of(dtype: Any) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype of the stored data of one element: for a PRNG key its words (`jax.random.key_data`), for a number
    `()` and its own dtype."""
    if not is_extended(dtype):
        return (), dtype
    words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
    return tuple(words.shape), words.dtype


def zeros(at: Index, dtype: Any) -> NDArray[Any]:
    """A NumPy array of zeros for one range of indices; for PRNG keys, zeros of their words (`words_of`)."""
    tail, stored = words_of(dtype)
    return np.zeros((*(stop - start for start, stop in at), *tail), stored)


def finished(x: jax.Array, dtype: Any, weak: bool) -> jax.Array:
    """The array with its final type: words wrapped as PRNG keys, numbers weakly typed if `weak`."""
    if is_extended(dtype):
        return jax.random.wrap_key_data(x, impl=compat.generator_of(dtype))
    return compat.as_aval(x, compat.shaped_array(x.shape, x.dtype, True)) if weak else x


@dataclass(frozen=True)
class Place:
    """A leaf that is only described: an array of this shape and type, to be placed on a mesh."""

    shape: tuple[int, ...]
    dtype: Any
    mesh: Mesh
    placement: Placement

    def target(self, weak: bool) -> Target:
        placement = self.placement.resolve(len(self.shape))
        if is_plain(self.shape, placement, dict(self.mesh.shape)):
            return Sharded(self.shape, self.dtype, weak, NamedSharding(self.mesh, physical_spec(placement)))
        return InPieces(self.shape, self.dtype, weak, placement, self.mesh)


def target_of(x: Any, saved: StoredLeaf) -> Target:
    """The target of a saved leaf, given the leaf `x` of the tree that is asked for."""
    if saved.kind == "static":
        return Given(x)
    if saved.kind == "array":
        return _array_target(x, saved)
    value = value_of(saved)
    if not isinstance(x, (*ARRAYS, Place)):
        return Given(value)
    return Filled(_array_target(x, saved), np.asarray(value, x.dtype))


def _array_target(x: Any, saved: StoredLeaf) -> Target:
    if isinstance(x, Place):
        return x.target(saved.weak)
    if is_placed(x):
        return _placed(x, saved.weak)
    if isinstance(x, np.ndarray | np.generic):
        return Whole(tuple(x.shape), lambda value: value[()] if isinstance(x, np.generic) else value)
    is_array = isinstance(x, jax.Array | jax.ShapeDtypeStruct)  # else a Python number, of which a step made an array
    shape, dtype = (tuple(x.shape), x.dtype) if is_array else ((), np.dtype(saved.dtype))
    if is_array and getattr(x, "committed", True) and x.sharding is not None:
        return Sharded(shape, dtype, saved.weak, x.sharding)
    return Whole(shape, lambda value: finished(jax.numpy.asarray(value), dtype, saved.weak))


def _placed(x: Any, weak: bool) -> Target:
    if is_remote(x):
        return Whole(x.shape, lambda value: arrived(x, value)) if arrives(x) else Given(x)
    if not isinstance(x, StackedArray):
        return InPieces(x.shape, x.dtype, weak, x.placement, x.mesh)
    starts = tuple(sum(p.shape[0] for p in x.pieces[:i]) for i in range(len(x.pieces)))
    return Stacked(tuple(_placed(p, weak) for p in x.pieces), starts)


def placed_like(tree: Any, mesh: AnyMesh, placements: Any) -> Any:
    """A tree whose arrays are only described, at placements as `shardc.put` takes them; leaves without one stay."""
    if isinstance(mesh, AbstractMesh):
        raise ArgumentError("placements= needs a mesh with devices; this one only plans (it names a topology).")
    pairs, structure = leaves_by_path(tree), jax.tree.structure(tree)
    pins = Pins("placements", [leaf_of(p := path_text(path), p, x) for path, x in pairs], view(mesh))
    pins.spread(placements, jax.tree.unflatten(structure, range(len(pairs))))
    if pins.offenders:
        raise PlacementError(all_offenders(f"placements, mesh {view(mesh)}:", pins.offenders))

    def place(x: Any, pin: Any) -> Any:
        return x if pin is None else Place(tuple(np.shape(x)), leaf_aval(x).dtype, mesh, pin.placement)

    return jax.tree.unflatten(structure, [place(x, pin) for (_, x), pin in zip(pairs, pins.pins, strict=True)])
