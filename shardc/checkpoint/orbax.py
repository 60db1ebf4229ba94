"""The only file that knows orbax and tensorstore: arrays to a folder, written beside the run, and read in pieces.

orbax reads whole arrays, or the shards of a jax.sharding; the piece of an uneven placement or of a pipeline's stage is
neither. So arrays are read by tensorstore, in which orbax writes them: zarr arrays in one OCDBT database, by name.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from shardc.checkpoint.manifest import DamagedError
from shardc.errors import CheckpointError
from shardc.sbp.way import Index

_log: Final = logging.getLogger("shardc")


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


class OwnersPart(NamedTuple):
    """The part of a checkpoint that an owner writes.

    Attributes:
      folder: of this owner. It appears when all its files are written; without arrays the caller has to make it.
      arrays: by name.
      processes: the numbers in JAX of the processes that write it; None: all of the runtime.
    """

    folder: Path
    arrays: Mapping[str, Any]
    processes: frozenset[int] | None = None


class Writer:
    """Writes one checkpoint at a time, beside the run.

    Args:
      seconds: for one checkpoint, after which it fails.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._thread: threading.Thread | None = None
        self._failed: CheckpointError | None = None
        self._checkpointers: dict[frozenset[int] | None, Any] = {}
        """By the processes that write."""

    def _checkpointer(self, processes: frozenset[int] | None) -> Any:
        if processes not in self._checkpointers:
            ocp = module("orbax.checkpoint")
            first = min(processes or {0})
            name = None if processes is None else "-".join(map(str, sorted(processes)))
            who = ocp.options.MultiprocessingOptions(
                primary_host=first, active_processes=None if processes is None else set(processes),
                barrier_sync_key_prefix=name,
            )  # fmt: skip
            handlers = ocp.type_handlers.create_type_handler_registry(
                (jax.Array, ocp.type_handlers.ArrayHandler(primary_host=first)),
                (np.ndarray, ocp.type_handlers.NumpyHandler()),
            )  # fmt: skip
            more = {} if processes is None else {"type_handler_registry": handlers}
            handler = ocp.PyTreeCheckpointHandler(
                use_ocdbt=True, use_zarr3=False, multiprocessing_options=who, **more
            )  # fmt: skip
            # Folders are made at once: orbax announces later ones by numbers that all savers of a process share.
            options = ocp.AsyncOptions(timeout_secs=int(self._seconds), create_directories_asynchronously=False)
            self._checkpointers[processes] = ocp.AsyncCheckpointer(
                handler, async_options=options, multiprocessing_options=who
            )  # fmt: skip
        return self._checkpointers[processes]

    def start(self, step: int, parts: Sequence[OwnersPart], finish: Callable[[], None]) -> None:
        """Begin to write. Returns when the arrays are copied to the host.

        Args:
          step: of the checkpoint, for errors.
          parts: those that this process writes, alone or with others.
          finish: called, in a thread of its own, when they are there.

        Raises:
          CheckpointError: this checkpoint, or the one before, cannot be written.
        """
        self.wait()
        self.check()

        folder, savers = parts[0].folder, [p for p in parts if p.arrays]
        alone = [p for p in savers if p.processes is not None and len(p.processes) == 1]
        together = [p for p in savers if p not in alone]

        def failed(error: Exception) -> CheckpointError:
            text = f"The checkpoint of step {step} could not be written to {folder}: {type(error).__name__}: {error}"
            made = CheckpointError(text)
            made.__cause__ = error
            return made

        def write() -> None:
            try:
                for part in alone:
                    _write_alone(part)
                for part in together:
                    self._checkpointer(part.processes).wait_until_finished()
                finish()
            except Exception as error:  # noqa: BLE001 - `check` raises it in the thread of the run
                self._failed = failed(error)

        try:
            for part in together:
                args = module("orbax.checkpoint").args.PyTreeSave(dict(part.arrays))
                self._checkpointer(part.processes).save(part.folder, args=args)
        except Exception as error:
            raise failed(error) from error
        self._thread = threading.Thread(target=write, name=f"shardc checkpoint {step}", daemon=True)
        self._thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until nothing is being written. False: something still is after `seconds`."""
        if self._thread is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    def check(self) -> None:
        """Raise the error of a checkpoint that could not be written, once."""
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def dismiss(self, seconds: float) -> None:
        """Wait for the last checkpoint, but no longer than `seconds`, and log its error: another error is already on
        its way."""
        if not self.wait(seconds):
            _log.warning("a checkpoint was still being written after %g s; it may stay incomplete", seconds)
            return
        failed, self._failed = self._failed, None
        if failed is not None:
            _log.warning("%s", failed)

    def close(self) -> None:
        if self._thread is None:
            for checkpointer in self._checkpointers.values():
                checkpointer.close()


def _store(folder: Path, name: str) -> dict[str, Any]:
    database = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}, "path": f"{name}/"}
    return {"driver": "zarr", "kvstore": database}


def _write_alone(part: OwnersPart) -> None:
    """Write arrays of this process of several: orbax writes such in process 0 alone."""
    part.folder.mkdir(exist_ok=True)
    for name, x in part.arrays.items():
        value = np.asarray(x)
        made = module("tensorstore").open(
            _store(part.folder, name), create=True, dtype=value.dtype, shape=value.shape
        )  # fmt: skip
        made.result().write(value).result()


@lru_cache(maxsize=4096)
def _opening(folder: Path, name: str) -> Any:
    return module("tensorstore").open(_store(folder, name), open=True, read=True)


def read(folder: Path, name: str, index: Index) -> NDArray[Any]:
    """A piece of a stored array; dimensions behind those of the index are read whole.

    Raises:
      DamagedError: it cannot be read.
    """
    try:
        store = _opening(folder, name).result()
        return np.asarray(store[tuple(slice(*pair) for pair in index)].read().result())
    except (ValueError, OSError, IndexError) as error:
        raise DamagedError(f"{folder}: the array {name} cannot be read: {error}") from error


_MARKS: Final = ("_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt", "ocdbt.process_0")


def is_written_by_orbax(folder: Path) -> bool:
    """Whether something of a folder that orbax has written is there."""
    return any((folder / name).exists() for name in _MARKS)


def forget() -> None:
    """Close what is open for reading."""
    _opening.cache_clear()


def joined(pieces: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Pieces that follow one another in dimension 0 as one array."""
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
