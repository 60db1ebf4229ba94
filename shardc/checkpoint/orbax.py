"""The only file that knows orbax and tensorstore: arrays to a folder, written beside the run, and read in pieces.

orbax reads whole arrays, or the shards of a jax.sharding; the piece of an uneven placement or of a pipeline's stage is
neither. So arrays are read by tensorstore, in which orbax writes them: zarr arrays in one OCDBT database, by name.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardc.arrays.pieces import Index
from shardc.errors import CheckpointError


def module(name: str) -> Any:
    """A module that comes with orbax.

    Raises:
      CheckpointError: orbax is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CheckpointError(
            f'shardc.checkpoints needs orbax: pip install "shardc[checkpoints]" ({error}).'
        ) from error


class Saver:
    """Saves mappings from names to arrays, each into a folder, one after the other.

    Args:
      seconds: for one save, after which it fails.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    @cached_property
    def _checkpointer(self) -> Any:
        ocp = module("orbax.checkpoint")
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False)
        # Folders are made at once: orbax announces later ones by numbers that all savers of a process share.
        options = ocp.AsyncOptions(timeout_secs=int(self._seconds), create_directories_asynchronously=False)
        return ocp.AsyncCheckpointer(handler, async_options=options)

    def start(self, folder: Path, arrays: Mapping[str, Any]) -> None:
        """Copy the arrays to the host, and begin to write them. The folder appears when all is written."""
        args = module("orbax.checkpoint").args.PyTreeSave(dict(arrays))
        self._checkpointer.save(folder, args=args)

    def wait(self) -> None:
        """Wait until all is written, and raise the error of the writer."""
        self._checkpointer.wait_until_finished()

    def close(self) -> None:
        if "_checkpointer" in vars(self):
            self._checkpointer.close()


@lru_cache(maxsize=4096)
def _opening(folder: Path, name: str) -> Any:
    database = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}, "path": f"{name}/"}
    return module("tensorstore").open({"driver": "zarr", "kvstore": database}, open=True, read=True)


def read(folder: Path, name: str, index: Index) -> NDArray[Any]:
    """A piece of a stored array; dimensions behind those of the index are read whole.

    Raises:
      CheckpointError: it cannot be read.
    """
    try:
        store = _opening(folder, name).result()
        return np.asarray(store[tuple(slice(*pair) for pair in index)].read().result())
    except (ValueError, OSError, IndexError) as error:
        raise CheckpointError(f"{folder}: the array {name} cannot be read: {error}") from error


def forget() -> None:
    """Close what is open for reading."""
    _opening.cache_clear()


def joined(pieces: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Pieces that follow one another in dimension 0 as one array."""
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
