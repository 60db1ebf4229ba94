"""Arrays as bytes, piece by piece: what one process sends of a sharded array, and another puts together.

A *piece* is what a device holds; devices that hold the same piece have the same piece number. Bytes know no weak types
and no key types: the receiver says what they are.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from shardc.arrays.fetch import words
from shardc.arrays.place import index_of
from shardc.machine.devices import process_of
from shardc.runtime.transport.link import Packed
from shardc.sbp.way import Index


@lru_cache(maxsize=4096)
def piece_numbers(sharding: NamedSharding, shape: tuple[int, ...]) -> tuple[tuple[Index, ...], tuple[int, ...]]:
    """The pieces of an array in order, and the number of the piece that each device of the mesh holds."""
    at = sharding.devices_indices_map(shape)
    held = [index_of(at[d], shape) for d in _devices(sharding)]
    pieces = tuple(dict.fromkeys(held))
    return pieces, tuple(map(pieces.index, held))


@lru_cache(maxsize=4096)
def pieces_of_process(sharding: NamedSharding, shape: tuple[int, ...], process: int) -> frozenset[int]:
    """The numbers of the pieces that a process holds."""
    _, numbers = piece_numbers(sharding, shape)
    return frozenset(n for n, d in zip(numbers, _devices(sharding), strict=True) if process_of(d) == process)


def _devices(sharding: NamedSharding) -> list[Any]:
    mesh: Any = sharding.mesh
    return mesh.devices.ravel().tolist()


def pack(x: jax.Array, sharding: NamedSharding, wanted: Collection[int]) -> tuple[list[int], list[memoryview]]:
    """Those of the `wanted` pieces of an array that are here: their numbers, and their bytes. Waits for the device."""
    x = words(x)
    _, held = piece_numbers(sharding, tuple(x.shape))
    numbers = dict(zip(_devices(sharding), held, strict=True))
    found: dict[int, memoryview] = {}
    for shard in x.addressable_shards:
        number = numbers[shard.device]
        if number in wanted and number not in found:
            found[number] = as_bytes(np.asarray(shard.data))
    return list(found), list(found.values())


def as_bytes(x: np.ndarray[Any, Any]) -> memoryview:
    """The bytes of an array, without a copy if they lie side by side."""
    return memoryview(np.ascontiguousarray(x).reshape(-1).view(np.uint8))


def from_bytes(buffer: Any, shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
    if not buffer.nbytes:  # frombuffer refuses it
        return np.empty(shape, dtype)
    return np.frombuffer(buffer, np.uint8).view(dtype).reshape(shape)


def assemble(pieces: Mapping[int, Any], sharding: NamedSharding, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """The array of these pieces. `pieces` has at least those of this process."""
    index, _ = piece_numbers(sharding, shape)
    numbers = {at: i for i, at in enumerate(index)}

    def piece(slices: Any) -> np.ndarray[Any, Any]:
        at = index_of(slices, shape)
        return from_bytes(pieces[numbers[at]], [b - a for a, b in at], dtype)

    return jax.make_array_from_callback(shape, sharding, piece)


def on_host(
    pieces: Mapping[int, Any], sharding: NamedSharding, shape: tuple[int, ...], dtype: Any
) -> np.ndarray[Any, Any]:
    """The whole array of all pieces, on the host."""
    index, _ = piece_numbers(sharding, shape)
    if len(index) == 1:
        return from_bytes(pieces[0], shape, dtype)
    whole = np.empty(shape, dtype)
    for i, at in enumerate(index):
        whole[tuple(slice(a, b) for a, b in at)] = from_bytes(pieces[i], [b - a for a, b in at], dtype)
    return whole


def pack_array(x: np.ndarray[Any, Any]) -> Packed:
    """Pack a whole array of the host, with its type."""
    x = np.asarray(x, order="C")
    return json.dumps([x.dtype.name, x.shape]).encode(), [as_bytes(x)]


def unpack_array(packed: Packed) -> np.ndarray[Any, Any]:
    """The array that `pack_array` has packed."""
    about, (buffer,) = packed
    name, shape = json.loads(about)
    return from_bytes(buffer, shape, jax.numpy.dtype(name))
