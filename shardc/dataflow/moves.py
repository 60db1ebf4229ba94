"""The values of messages between nodes: how they leave the giver, and how the taker has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from shardc.arrays.frozen import read_only
from shardc.arrays.place import Place
from shardc.arrays.placed import as_jax
from shardc.arrays.remote_array import Arrival, RemoteArray
from shardc.dataflow.network import Edge
from shardc.execute.ways import Way, Ways
from shardc.sbp.signature import is_extended

LeafMove = Callable[[Any], Any]


class EnteredValues(tuple[Any, ...]):
    """The values of a message from before the first round: they lie where they are taken."""

    __slots__ = ()


def ways_of(edge: Edge, giver_process: int | None, taker_process: int | None, wide: bool) -> Ways:
    """The ways of a channel's messages.

    Args:
      edge: the channel's.
      giver_process, taker_process: the processes of its nodes, which have values on the host; None: all is here.
      wide: whether numbers of 64 bits are on.
    """

    def known(w: Way) -> Way:
        if w.given.mesh is not None and w.given.mesh == w.taken.mesh:
            return w
        given = replace(w.given, process=giver_process) if w.given.on_host else w.given
        taken = replace(w.taken, process=taker_process) if w.taken.on_host else w.taken
        return replace(w, given=given, taken=taken)

    return Ways([known(edge.way(m)) for m in edge.moves], wide)


def giving(ways: Ways, near: bool) -> LeafMove:
    """The function that the giver's thread calls with a message. It launches and does not wait, so that the move runs
    beside what the giver does next.

    Args:
      ways: of the message.
      near: whether each process hands the message to itself: then it is moved; else it is readied for links.
    """
    if near and ways.stay:
        return stay
    enter = [
        stay if w.stays or w.given.on_host or not w.given.is_here else w.given.enter for w in ways.ways
    ]  # fmt: skip
    move = ways.move if near else ways.leave
    return lambda values: move([to(x) for to, x in zip(enter, values, strict=True)])


def taking(edge: Edge, ways: Ways, arrive: LeafMove) -> LeafMove:
    """The function that makes of a message the leaves that the taking node has.

    Args:
      edge, ways: of the channel.
      arrive: as `ways.arrive`, under the taker's locks.
    """
    leave = [_leaving(w.taken, edge.stays(m)) for w, m in zip(ways.ways, edge.moves, strict=True)]

    def taken(values: Any) -> Sequence[Any]:
        if isinstance(values, EnteredValues):
            return values
        return [to(x) for to, x in zip(leave, arrive(values) if ways.finishes else values, strict=True)]

    return taken if ways.finishes or any(to is not stay for to in leave) else stay


def _leaving(place: Place, stays: bool) -> LeafMove:
    if not place.is_here:
        return lambda _: elsewhere(place)
    if place.mesh is None or stays or (place.is_plain and not place.on_host):
        return stay
    return _value if place.on_host else place.leave


def entered(place: Place, x: Any) -> Any:
    """A leaf in place, from wherever it is; one that is taken whole as it is."""
    return x if place.on_host else place.leave(place.enter(x)) if place.is_here else elsewhere(place)


def elsewhere(place: Place, arrival: Arrival | None = None) -> RemoteArray:
    """An array on a mesh of other processes."""
    return RemoteArray(place.aval, place.at, place.device_mesh, arrival)


def stay(x: Any) -> Any:
    return x


def copied(x: Any) -> Any:
    """A copy that nobody overwrites."""
    return x.copy() if isinstance(x, jax.Array | np.ndarray) else x


def on_host(leaves: Sequence[Any]) -> list[Any]:
    """Leaves as NumPy arrays that cannot be written to; random keys, which NumPy has no type for, stay."""
    return [_value(x) for x in leaves]


def _value(x: Any) -> Any:
    if not isinstance(x, jax.Array) or is_extended(x.dtype):
        return read_only(x)
    return read_only(np.asarray(as_jax(x)))
