"""The messages between stages of different processes as bytes.

A message holds the values that cross from one stage to another. If a value has the same placement on both meshes, each
process gets the pieces of its own devices; else it gets all pieces, and puts the logical value in place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from shardc import compat
from shardc.arrays.fetch import of_words, words
from shardc.arrays.pieces import assemble, on_host, pack, piece_numbers, pieces_of_process
from shardc.execute.stage_io import StageArray
from shardc.machine.devices import me, process_of
from shardc.runtime.transport.link import Packed
from shardc.sbp.layout import physical_shape, to_logical
from shardc.sbp.signature import is_extended


@dataclass(frozen=True)
class StageEdge:
    """The way of one value from a stage to another.

    Attributes:
      given, taken: the array on either stage.
      aval: shape, dtype and weak type of the logical value.
    """

    given: StageArray
    taken: StageArray
    aval: Any

    @cached_property
    def is_copy(self) -> bool:
        """Whether each device gets what one device of the other stage has."""
        given, taken = self.given, self.taken
        return dict(given.mesh.shape) == dict(taken.mesh.shape) and given.placement == taken.placement

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the sent physical array; of keys that of their words."""
        physical = physical_shape(self.given.shape, self.given.placement, self.given.sizes)
        return (*physical, *compat.words_of_keys(self.aval.dtype)) if is_extended(self.aval.dtype) else physical

    @cached_property
    def dtype(self) -> Any:
        return np.dtype(np.uint32) if is_extended(self.aval.dtype) else self.aval.dtype

    @cached_property
    def mine(self) -> frozenset[int]:
        """The pieces that this process sends: of those that several processes have, the first one sends them."""
        _, numbers = piece_numbers(self.given.sharding, self.shape)
        first: dict[int, int] = {}
        for number, device in zip(numbers, self.given.mesh.devices.flat, strict=True):
            first[number] = min(first.get(number, process_of(device)), process_of(device))
        return frozenset(n for n, process in first.items() if process == me())

    def wanted_by(self, peer: int) -> frozenset[int]:
        """The pieces that this process sends to another one."""
        if not self.is_copy:
            return self.mine
        return self.mine & pieces_of_process(self.taken.sharding, self.shape, peer)

    def pack(self, x: jax.Array, peer: int) -> tuple[list[int], list[memoryview]]:
        """The pieces that this process sends to another one: numbers and bytes. Waits for the device."""
        return pack(x, self.given.sharding, self.wanted_by(peer))

    def enter(self, pieces: Mapping[int, Any]) -> Any:
        """The array on the taking stage."""
        if self.is_copy:
            x = of_words(assemble(pieces, self.taken.sharding, self.shape, self.dtype), self.aval.dtype)
        else:
            assert not is_extended(self.aval.dtype)
            whole = on_host(pieces, self.given.sharding, self.shape, self.dtype)
            x = self.taken.enter(to_logical(whole, self.given.shape, self.given.placement, self.given.sizes))
        return compat.as_aval(x, self.aval) if getattr(self.aval, "weak_type", False) else x


class StageCodec:
    """The codec of a pipeline's network (`shardc.runtime.distributed_network.Codec`).

    Args:
      edges: the values of each channel between processes; empty for other channels.
      wide: whether numbers of 64 bits are on. The threads that decode lack this setting.
    """

    def __init__(self, edges: Sequence[Sequence[StageEdge]], wide: bool) -> None:
        self._edges, self._wide = edges, wide

    def is_ready(self, value: Any) -> bool:
        arrays: list[Any] = list(map(words, value))
        return all(x.is_ready() for x in arrays)

    def pack(self, channel: int, peer: int, value: Any) -> Packed:
        numbers: list[list[int]] = []
        buffers: list[memoryview] = []
        for edge, x in zip(self._edges[channel], value, strict=True):
            held, found = edge.pack(x, peer)
            numbers.append(held)
            buffers += found
        return json.dumps(numbers).encode(), buffers

    def unpack(self, channel: int, parts: Mapping[int, Packed]) -> Any:
        edges = self._edges[channel]
        pieces: list[dict[int, Any]] = [{} for _ in edges]
        for about, buffers in parts.values():
            rest = iter(buffers)
            for found, numbers in zip(pieces, json.loads(about), strict=True):
                found |= {n: next(rest) for n in numbers}
        with jax.enable_x64(self._wide):
            return tuple(c.enter(found) for c, found in zip(edges, pieces, strict=True))


Copy = Callable[[tuple[Any, ...]], tuple[Any, ...]]


def copies_of(places: Sequence[int]) -> Copy:
    """A function that copies the values at these places: a later step may take their buffers before they are sent."""
    chosen = frozenset(places)
    return lambda values: tuple(x.copy() if i in chosen else x for i, x in enumerate(values))
