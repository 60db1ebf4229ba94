"""Targets: what a leaf is restored as. A target says which boxes of the logical array it needs here, and is made of
them. The target of an array at a placement is its `Place`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from numpy.typing import NDArray

from shardc import compat
from shardc.arrays.place import Pieces, Place, array_of, index_of, place_of
from shardc.arrays.placed import PlacedArray, StackedArray, is_placed, leaf_aval
from shardc.calls.leaves import leaf_of
from shardc.checkpoint.leaves import ARRAYS, arrived, arrives, is_remote, value_of
from shardc.checkpoint.manifest import StoredLeaf
from shardc.errors import ArgumentError, PlacementError, all_offenders
from shardc.machine.mesh import AnyMesh, view
from shardc.passes.trace.pins import Pins
from shardc.passes.trace.trace import leaves_by_path, path_text
from shardc.sbp.way import Index


class Target(Protocol):
    """The kind of array that a leaf is restored as."""

    def needs(self) -> list[Index]:
        """The boxes of the logical array that this process needs, each once."""
        ...

    def made_of(self, pieces: Pieces) -> Any:
        """The leaf, made of these boxes."""
        ...


@dataclass(frozen=True)
class Given:
    """A leaf that is there already: it is not saved, lives elsewhere, or stands in the manifest."""

    value: Any

    def needs(self) -> list[Index]:
        return []

    def made_of(self, pieces: Pieces) -> Any:
        del pieces
        return self.value


@dataclass(frozen=True)
class Filled:
    """A scalar of a target, with a value that stands in the manifest."""

    target: Target
    value: NDArray[Any]

    def needs(self) -> list[Index]:
        return []

    def made_of(self, pieces: Pieces) -> Any:
        del pieces
        return self.target.made_of({(): self.value})


@dataclass(frozen=True)
class Whole:
    """An array that this process needs whole. `finish` makes the leaf of its value on the host."""

    place: Place
    finish: Callable[[Any], Any]

    def needs(self) -> list[Index]:
        return self.place.needs()

    def made_of(self, pieces: Pieces) -> Any:
        return self.finish(self.place.made_of(pieces))


@dataclass(frozen=True)
class Sharded:
    """A jax.Array at just this sharding: on one device, in the memory of the host, with a spec that a placement would
    write in another way. A call would compile again for another one."""

    aval: Any
    sharding: Any

    def needs(self) -> list[Index]:
        shape = tuple(self.aval.shape)
        found = self.sharding.addressable_devices_indices_map(shape).values()
        return [] if 0 in shape else list(dict.fromkeys(index_of(at or (), shape) for at in found))

    def made_of(self, pieces: Pieces) -> Any:
        plain = isinstance(self.sharding, NamedSharding) and self.sharding.memory_kind in (None, "device")
        return array_of(pieces.get, tuple(self.aval.shape), self.sharding, self.aval, one_by_one=plain)


@dataclass(frozen=True)
class Stacked:
    """A StackedArray: its pieces follow one another in dimension 0."""

    parts: tuple[Target, ...]
    starts: tuple[int, ...]

    def needs(self) -> list[Index]:
        moved = [_moved(at, start) for t, start in zip(self.parts, self.starts, strict=True) for at in t.needs()]
        return list(dict.fromkeys(moved))

    def made_of(self, pieces: Pieces) -> Any:
        def of(target: Target, start: int) -> Any:
            return _as_placed(target.made_of({at: pieces[_moved(at, start)] for at in target.needs()}))

        return StackedArray([of(t, start) for t, start in zip(self.parts, self.starts, strict=True)])


def _as_placed(x: Any) -> PlacedArray:
    if is_placed(x):
        return x
    place = place_of(x)
    assert isinstance(place.mesh, Mesh)
    return PlacedArray(x, place.shape, place.at, place.mesh)


def _moved(at: Index, rows: int) -> Index:
    (start, stop), *rest = at
    return ((start + rows, stop + rows), *rest)


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
    if is_placed(x):
        return _placed(x, saved.weak)
    if isinstance(x, Place):
        return replace(x, aval=compat.shaped_array(x.shape, x.dtype, saved.weak))
    if isinstance(x, np.ndarray | np.generic):
        place = Place(jax.ShapeDtypeStruct(x.shape, np.dtype(saved.dtype)))
        return Whole(place, lambda value: value[()] if isinstance(x, np.generic) else value)
    is_array = isinstance(x, jax.Array | jax.ShapeDtypeStruct)  # else a Python number, of which a step made an array
    aval = compat.shaped_array(*((tuple(x.shape), x.dtype) if is_array else ((), np.dtype(saved.dtype))), saved.weak)
    if is_array and getattr(x, "committed", True) and x.sharding is not None:
        return Sharded(aval, x.sharding)
    return Whole(Place(aval), lambda value: _uncommitted(value, saved.weak))


def _uncommitted(value: Any, weak: bool) -> jax.Array:
    x = jax.numpy.asarray(value)
    return compat.as_aval(x, compat.shaped_array(x.shape, x.dtype, True)) if weak else x


def _placed(x: Any, weak: bool) -> Target:
    aval = compat.shaped_array(x.shape, x.dtype, weak)
    if is_remote(x):
        return Whole(Place(aval), lambda value: arrived(x, value)) if arrives(x) else Given(x)
    if not isinstance(x, StackedArray):
        return Place(aval, x.mesh, x.placement)
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
        return x if pin is None else Place(leaf_aval(x), mesh, pin.placement)

    return jax.tree.unflatten(structure, [place(x, pin) for (_, x), pin in zip(pairs, pins.pins, strict=True)])
