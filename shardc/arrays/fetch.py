"""The values of arrays on the host, wherever they live."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardc import compat
from shardc.arrays.placed import has_every_piece, in_bytes, is_placed, on_host
from shardc.errors import number_text
from shardc.machine.devices import meet
from shardc.machine.launch_order import in_launch_order, ordered_devices
from shardc.sbp.layout import to_logical
from shardc.sbp.signature import is_extended

_LONG: Final = 100
"""The most characters of the types of arrays that are shown."""


def values(tree: Any) -> Any:
    """The tree with NumPy arrays; `shardc.fetch` says more. Arrays that lie in other processes too are gathered by one
    program for each mesh, which all of its processes run."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_placed)
    leaves = _gathered(leaves)
    for x in leaves:
        if isinstance(x, jax.Array) and not is_extended(x.dtype) and x.is_fully_addressable:
            x.copy_to_host_async()  # start all copies before waiting for the first
    return jax.tree.unflatten(structure, [_value(x) for x in leaves])


def _gathered(leaves: Sequence[Any]) -> list[Any]:
    """The leaves; those with pieces in other processes whole on each device."""
    found = list(leaves)
    by_mesh: dict[Mesh, list[int]] = {}
    for i, x in enumerate(leaves):
        if isinstance(x, jax.Array) and not x.is_fully_addressable and not _is_here(x):
            by_mesh.setdefault(_mesh_of(x), []).append(i)
    for mesh, numbers in by_mesh.items():
        meet(mesh.devices.flat, "shardc.fetch", {"the arrays": _types_text([leaves[i] for i in numbers])})
        with compat.at_once(), jax.debug_nans(False), jax.debug_infs(False):  # a copy computes nothing
            given, gather = [_words(leaves[i]) for i in numbers], _gatherer(mesh)
            made = in_launch_order(ordered_devices(mesh), partial(gather, given))
        for i, x in zip(numbers, made, strict=True):
            found[i] = _GatheredWords(leaves[i], np.asarray(x).astype(_words(leaves[i]).dtype))
    return found


def _types_text(xs: Sequence[Any]) -> str:
    """The types of arrays, in few characters: `2 arrays, float32[8], int32[4,4]`."""
    types = ", ".join(x.aval.str_short() for x in xs)
    digest = f" ..., digest {zlib.crc32(types.encode()):08x}"
    return f"{number_text(len(xs), 'array')}, {types if len(types) <= _LONG else types[:_LONG] + digest}"


class _GatheredWords:
    """The words of an array that was gathered."""

    def __init__(self, like: Any, words: np.ndarray[Any, Any]) -> None:
        self.like, self.words = like, words

    def value(self) -> Any:
        x, words = self.like, self.words
        if is_placed(x):
            words = to_logical(words, (*x.shape, *words.shape[x.physical.ndim :]), x.placement, dict(x.mesh.shape))
        return of_words(words, x.dtype)


def _is_here(x: jax.Array) -> bool:
    return has_every_piece(x.physical if is_placed(x) else x)


def _mesh_of(x: Any) -> Mesh:
    sharding = x.physical.sharding if is_placed(x) else x.sharding
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return sharding.mesh
    devices = sorted(sharding.device_set, key=lambda d: d.id)
    return Mesh(np.asarray(devices), ("devices",))


@lru_cache(maxsize=256)
def _gatherer(mesh: Mesh) -> Any:
    return jax.jit(lambda xs: list(map(in_bytes, xs)), out_shardings=NamedSharding(mesh, PartitionSpec()))


def words(x: jax.Array) -> jax.Array:
    """The numbers that hold an array: of random keys their key data."""
    return jax.random.key_data(x) if is_extended(x.dtype) else x


def of_words(x: Any, dtype: Any) -> Any:
    """The array of this dtype that these numbers hold: the inverse of `words`."""
    return compat.keys_of_words(jax.numpy.asarray(x), dtype) if is_extended(dtype) else x


def _words(x: Any) -> jax.Array:
    """The array that holds the pieces; of keys their words."""
    return words(x.physical if is_placed(x) else x)


def _value(x: Any) -> Any:
    if isinstance(x, _GatheredWords):
        return x.value()
    if not isinstance(x, jax.Array):
        return x
    if is_placed(x):
        return x.read() if is_extended(x.dtype) else np.asarray(x)
    return of_words(on_host(words(x)), x.dtype)
