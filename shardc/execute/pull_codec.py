"""Messages between stages that the receiver pulls from device to device, through JAX's transfer server.

A frame says only where the pieces are offered and under which number. The receiver pulls them at once, and goes on
while they are on their way. The server asks for no secret: a piece is safe as its number is, which is random and goes
over the link. JAX's own time limits on a pull do not fire (0.12.0.1), so only what a live link has announced is pulled.

Tested on CPU only.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from shardc import compat
from shardc.arrays.pieces import piece_numbers, words
from shardc.execute.stage_codec import StageCodec, StageEdge
from shardc.machine.devices import me, process_of
from shardc.runtime.link import Packed
from shardc.sbp.signature import is_extended

CONNECTIONS = 4
"""Sockets of a server: several large pieces are sent at the same time."""


class PullCodec:
    """A codec whose messages are pulled (`shardc.runtime.spread.Codec`).

    Args:
      edges, wide: as for `StageCodec`, which takes the channels where a value changes its placement on the way.
      host: the host that others reach this process at.
    """

    def __init__(self, edges: Sequence[Sequence[StageEdge]], wide: bool, host: str) -> None:
        self._edges, self._wide = edges, wide
        self._bytes = StageCodec(edges, wide)
        self._server = _server(host)

    def _is_pulled(self, channel: int) -> bool:
        return all(c.is_copy for c in self._edges[channel])

    def is_ready(self, value: Any) -> bool:
        return True  # what is still being computed is offered too

    def pack(self, channel: int, peer: int, value: Any) -> Packed:
        if not self._is_pulled(channel):
            return self._bytes.pack(channel, peer, value)
        numbers: list[list[int]] = []
        offered: list[Any] = []
        for edge, x in zip(self._edges[channel], value, strict=True):
            found = _pieces(words(x), edge, edge.wanted_by(peer))
            numbers.append(list(found))
            offered += found.values()
        number = secrets.randbits(62)
        self._server.await_pull(number, offered)
        return json.dumps([self._server.address(), number, numbers]).encode(), ()

    def unpack(self, channel: int, parts: Mapping[int, Packed]) -> Any:
        if not self._is_pulled(channel):
            return self._bytes.unpack(channel, parts)
        edges = self._edges[channel]
        pieces: list[dict[int, Any]] = [{} for _ in edges]
        with jax.enable_x64(self._wide):
            for about, _ in parts.values():
                address, number, numbers = json.loads(about)
                wanted = [(k, n) for k, ns in enumerate(numbers) for n in ns]
                pulled = _connection(self._server, address).pull(number, [_target(edges[k], n) for k, n in wanted])
                for (k, n), x in zip(wanted, pulled, strict=True):
                    pieces[k][n] = x
            return tuple(map(_enter, edges, pieces))


@lru_cache(maxsize=1)
def _server(host: str) -> Any:
    from jax.experimental import transfer  # noqa: PLC0415  # not in every build of jaxlib

    client = jax.local_devices()[0].client
    return transfer.start_transfer_server(client, f"{host}:0", [f"{host}:0"] * CONNECTIONS)


@lru_cache(maxsize=1024)
def _connection(server: Any, address: str) -> Any:
    return server.connect(address)


def _pieces(x: jax.Array, edge: StageEdge, wanted: frozenset[int]) -> dict[int, Any]:
    """The pieces of an array that are here and wanted, each on one device."""
    _, held = piece_numbers(edge.given.sharding, edge.shape)
    numbers = dict(zip(edge.given.mesh.devices.flat, held, strict=True))
    found: dict[int, Any] = {}
    for shard in x.addressable_shards:
        number = numbers[shard.device]
        if number in wanted:
            found.setdefault(number, shard.data)
    return found


def _holders(edge: StageEdge) -> list[tuple[Any, int]]:
    """The devices of this process on the taking mesh, and the piece that each takes."""
    _, held = piece_numbers(edge.taken.sharding, edge.shape)
    devices = zip(edge.taken.mesh.devices.flat, held, strict=True)
    return [(d, n) for d, n in devices if process_of(d) == me()]


def _target(edge: StageEdge, number: int) -> jax.ShapeDtypeStruct:
    """The type of a piece, on the first device that takes it."""
    index, _ = piece_numbers(edge.taken.sharding, edge.shape)
    device = next(d for d, n in _holders(edge) if n == number)
    shape = tuple(b - a for a, b in index[number])
    return jax.ShapeDtypeStruct(shape, edge.dtype, sharding=SingleDeviceSharding(device))


def _enter(edge: StageEdge, pieces: Mapping[int, Any]) -> Any:
    """The array on the taking stage."""
    held = [jax.device_put(pieces[n], d) for d, n in _holders(edge)]
    x = jax.make_array_from_single_device_arrays(edge.shape, edge.taken.sharding, held)
    x = compat.keys_of_words(x, edge.aval.dtype) if is_extended(edge.aval.dtype) else x
    return compat.as_aval(x, edge.aval) if getattr(edge.aval, "weak_type", False) else x
