"""Moves of values between nodes: from mesh to mesh, from a mesh to the host and back.

A move is launched and never waited for, so that it runs beside what its giver does next. JAX's `device_put` waits for
values whose pieces are other ones on the other mesh; such values are gathered on the giver's mesh first, and sent whole
or in pieces from one device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardc.arrays.frozen import read_only
from shardc.arrays.place import Place
from shardc.arrays.placed import as_jax, is_placed, put_leaf
from shardc.dataflow.network import Edge, HandedLeaf
from shardc.dataflow.work import LeafPlace
from shardc.execute.ways import Way, Ways
from shardc.machine.mesh import border
from shardc.sbp.signature import is_extended

LeafMove = Callable[[Any], Any]


def mover(edge: Edge) -> Callable[[tuple[Any, ...]], tuple[Any, ...]] | None:
    """The function that moves a message of a channel; None if all its values stay where they are."""
    each = [_leaf_mover(edge, m) for m in edge.moves]
    if all(move is None for move in each):
        return None

    def move(values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(x if to is None else to(x) for x, to in zip(values, each, strict=True))

    return move


def _leaf_mover(edge: Edge, move: HandedLeaf) -> LeafMove | None:
    there = edge.places(move)[1]
    if edge.stays(move):
        return copied if move.copied else None
    if there.mesh is None:
        return _to_host_copied if move.copied else _to_host
    aval = edge.giver.results[move.output]
    if there.placement is None:  # a pipeline puts it on its stages
        return np.asarray
    to = to_place(there, aval)
    if edge.places(move)[0].mesh is None and edge.takes_over(move):
        return lambda x: to(copied(x) if isinstance(x, jax.Array) else x)  # a user's array may lie there already
    return (lambda x: to(copied(x))) if move.copied else to


def ways_of(edge: Edge, giver_process: int | None, taker_process: int | None, wide: bool) -> Ways:
    """The ways of the values of an edge.

    Args:
      edge: the edge.
      giver_process, taker_process: the processes of its ends, for what lies on the host there; None: each process has
        it.
      wide: whether numbers of 64 bits are on.
    """
    found: list[Way] = []
    for m in edge.moves:
        here, there = edge.places(m)
        aval = edge.giver.results[m.output]
        given = Place(aval, here.mesh, here.placement, giver_process if here.placement is None else None)
        taken = Place(aval, there.mesh, there.placement, taker_process if there.placement is None else None)
        link = border(*(None if p.on_host else p.mesh for p in (given, taken)))
        found.append(Way(given, taken, link, m.copied))
    return Ways(found, wide)


def to_place(place: LeafPlace, aval: Any) -> LeafMove:
    """The function that puts a leaf in place, from wherever it is."""
    mesh, placement = place.mesh, place.placement
    assert isinstance(mesh, Mesh)
    if placement is None:
        return stay
    sharding = place.sharding(aval)
    if sharding is None:
        return lambda x: put_leaf(x, mesh, placement)

    def move(x: Any) -> Any:
        if not isinstance(x, jax.Array) or set(x.sharding.device_set) == sharding.device_set:
            return put_leaf(x, mesh, placement)
        if is_placed(x):
            return jax.device_put(_one_copy(x.to_jax()), sharding)
        if x.sharding.is_fully_replicated:
            return jax.device_put(_one_copy(x), sharding)
        if _alike(x, sharding):
            return jax.device_put(x, sharding)
        return jax.device_put(_one_copy(_gathered(x)), sharding)

    return move


def stay(x: Any) -> Any:
    return x


def _one_copy(x: jax.Array) -> jax.Array:
    """A whole copy of a replicated array, on one device."""
    return x if len(x.sharding.device_set) == 1 else x.addressable_data(0)


def _alike(x: jax.Array, to: NamedSharding) -> bool:
    """Whether the pieces of an array are those of another sharding, device by device."""
    here = x.sharding
    return (
        isinstance(here, NamedSharding) and here.spec == to.spec and dict(here.mesh.shape) == dict(to.mesh.shape)
    )  # fmt: skip


def _gathered(x: jax.Array) -> jax.Array:
    here = x.sharding
    if not isinstance(here, NamedSharding):
        return jax.numpy.asarray(np.asarray(x))
    return _gatherer(here.mesh)(x)


@lru_cache(maxsize=256)
def _gatherer(mesh: Any) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))


def copied(x: Any) -> Any:
    """A copy that nobody overwrites."""
    return x.copy() if isinstance(x, jax.Array | np.ndarray) else x


def _to_host(x: Any) -> Any:
    """Begin the copy to the host; whoever reads the value waits for it."""
    if isinstance(x, jax.Array):
        x.copy_to_host_async()
    return x


def _to_host_copied(x: Any) -> Any:
    return _to_host(copied(x))


def on_host(leaves: Sequence[Any]) -> list[Any]:
    """Leaves as NumPy arrays that cannot be written to; random keys, which NumPy has no type for, stay."""
    return [read_only(_numpy(x)) for x in leaves]


def _numpy(x: Any) -> Any:
    if not isinstance(x, jax.Array) or is_extended(x.dtype):
        return x
    return np.asarray(as_jax(x))
