"""The leaves of a state as they are stored: logical arrays of types that every reader of zarr has."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

import jax
import numpy as np
from numpy.typing import NDArray

from shardc.arrays.placed import PlacedArray, StackedArray, is_placed
from shardc.arrays.remote_array import Arrival, RemoteArray, home_of
from shardc.checkpoint.manifest import VALUES, RowBlock, StoredLeaf
from shardc.errors import CheckpointError, all_offenders
from shardc.passes.trace.trace import leaves_by_path, path_text
from shardc.sbp.layout import bits_of
from shardc.sbp.signature import is_extended

ARRAYS: Final = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


def is_remote(x: object) -> bool:
    """Whether a leaf is an array of other processes, which write it."""
    return bool(home_of(x))


def arrives(x: Any) -> bool:
    """Whether an array lives in another island and its value, which is small, is sent to this one."""
    return isinstance(x, RemoteArray) and x.arriving is not None


def arrived(x: RemoteArray, value: NDArray[Any]) -> RemoteArray:
    """A copy of the remote array with the value that this island has received."""
    return RemoteArray(x.aval, x.placement, x.mesh, Arrival(lambda: value))


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree with their paths; of equal paths all but the first get a number."""
    seen: dict[str, int] = {}
    found: list[tuple[str, Any]] = []
    for path, x in leaves_by_path(tree):
        text = path_text(path)
        seen[text] = seen.get(text, 0) + 1
        found.append((text if seen[text] == 1 else f"{text}#{seen[text]}", x))
    return found


def described(path: str, x: Any, blocks: Sequence[RowBlock] = ()) -> StoredLeaf:
    """The entry of a leaf in the manifest."""
    if isinstance(x, ARRAYS) or is_placed(x):
        weak = bool(getattr(x, "weak_type", False))
        return StoredLeaf(path, "array", dtype_text(x.dtype), tuple(x.shape), weak, "", tuple(blocks))
    name = type(x).__name__
    if type(x) in (bool, int, float, complex, str):
        return StoredLeaf(path, "value", name, value=repr(x) if name in ("float", "complex") else str(x))
    return StoredLeaf(path, "static", name)


def value_of(leaf: StoredLeaf) -> Any:
    """The number or string of a leaf that stands in the manifest."""
    return VALUES[leaf.dtype](leaf.value)


def dtype_text(dtype: Any) -> str:
    return str(dtype if is_extended(dtype) else np.dtype(dtype).newbyteorder("="))


def check_savable(pairs: Sequence[tuple[str, Any]]) -> None:
    """Raise CheckpointError for arrays of types that cannot be stored: objects, strings, dates, records."""
    wrong = [f"{path}: {type(x).__name__} of {x.dtype}" for path, x in pairs if isinstance(x, ARRAYS) and not _known(x)]
    if wrong:
        raise CheckpointError(
            all_offenders("Arrays of these types cannot be saved; keep them as numbers, or out of the state:", wrong)
        )


def homes_beside(pairs: Sequence[tuple[str, Any]], island: Collection[int]) -> dict[str, list[int]]:
    """The processes that have arrays which are not here, but in other processes of this island, by the names of the
    stored arrays.

    Args:
      pairs: the leaves with their paths.
      island: the processes that share this one's JAX runtime.
    """
    parts = [
        (block_name(n, i), part)
        for n, (_, x) in enumerate(pairs)
        for i, part in (enumerate(x.pieces) if isinstance(x, StackedArray) else [(None, x)])
    ]
    homes = {name: home_of(x) for name, x in parts}
    return {name: home for name, home in homes.items() if home and set(home) <= set(island)}


def block_name(number: int, piece: int | None) -> str:
    """The name of the stored array of a leaf, or of a piece of it."""
    return str(number) if piece is None else f"{number}.{piece}"


def _known(x: Any) -> bool:
    if is_extended(x.dtype):
        return True
    number = jax.dtypes.issubdtype(x.dtype, np.number)
    wide = 16 if jax.dtypes.issubdtype(x.dtype, np.complexfloating) else 8
    return x.dtype == np.bool_ or (number and x.dtype.itemsize <= wide)


def blocks_of(number: int, x: Any) -> list[tuple[RowBlock, Any]]:
    """The arrays in which this owner stores a leaf, with their rows: one, or one for each piece of a stacked array.

    Args:
      number: of the leaf, for names.
    """
    if not (isinstance(x, ARRAYS) or is_placed(x)) or 0 in x.shape or is_remote(x):
        return []
    if not isinstance(x, StackedArray):
        return [(RowBlock(block_name(number, None), 0, x.shape[0] if x.shape else 1), x)]
    found: list[tuple[RowBlock, Any]] = []
    at = 0
    for i, piece in enumerate(x.pieces):
        rows = piece.shape[0]
        if rows and not is_remote(piece):
            found.append((RowBlock(block_name(number, i), at, at + rows), piece))
        at += rows
    return found


def encode(x: Any) -> Any:
    """The logical value of a leaf in a type that zarr has. A jax.Array stays on its devices."""
    if isinstance(x, np.ndarray | np.generic):
        return _encode_host(np.array(x, x.dtype.newbyteorder("=")))  # a copy: its owner may write to it
    x = _plain(x)
    if is_extended(x.dtype):
        return encode(jax.random.key_data(x))
    if x.is_fully_addressable and jax.process_count() > 1:  # equal in all processes; orbax takes such from the host
        return encode(np.asarray(x))
    wide = stored_dtype(x.dtype)
    if wide == x.dtype:
        return x
    return jax.lax.bitcast_convert_type(x, wide) if wide == np.uint8 and _is_float(x.dtype) else x.astype(wide)


def _plain(x: Any) -> jax.Array:
    """The logical value of an array, as a jax.Array of JAX's own."""
    if not isinstance(x, PlacedArray):
        return x
    return x.physical if tuple(x.physical.shape) == x.shape else x.read()


def _encode_host(x: NDArray[Any]) -> NDArray[Any]:
    wide = stored_dtype(x.dtype)
    if wide == x.dtype:
        return x
    return x.view(wide) if wide == np.uint8 and _is_float(x.dtype) else x.astype(wide)


def _is_float(dtype: Any) -> bool:
    return bool(jax.dtypes.issubdtype(dtype, np.floating))


def stored_dtype(dtype: Any) -> np.dtype[Any]:
    """The type in which elements are stored: those below a byte as wider numbers, floats of a byte as their bits."""
    dtype = np.dtype(dtype)
    if not jax.dtypes.issubdtype(dtype, np.number):
        return dtype
    bits = bits_of(dtype) if not jax.dtypes.issubdtype(dtype, np.complexfloating) else 8 * dtype.itemsize
    if _is_float(dtype):
        return dtype if bits > 8 else np.dtype(np.uint8 if bits == 8 else np.float16)
    if bits < 8:
        return np.dtype(np.int8 if jax.dtypes.issubdtype(dtype, np.signedinteger) else np.uint8)
    return dtype


def decode(x: NDArray[Any], dtype: str) -> NDArray[Any]:
    """The elements of a stored array; of random keys their words."""
    if dtype.startswith("key<"):
        return x
    wanted = np.dtype(dtype)
    if x.dtype == wanted:
        return x
    return x.view(wanted) if wanted.itemsize == 1 and bits_of(wanted) == 8 else x.astype(wanted)
