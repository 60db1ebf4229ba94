"""The only file that knows orbax: arrays to a folder, written beside the run, and read in pieces.

orbax reads whole arrays, or the shards of a jax.sharding; the piece of an uneven placement or of a pipeline's stage is
neither. So arrays are read by tensorstore, in which orbax writes them: zarr arrays in one OCDBT database, by name.

orbax cannot write to S3, and makes one database of the files of all processes at the end. So tensorstore alone writes
to an object store: zarr arrays in chunks with checksums, each chunk an object that one process writes.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from shardc.checkpoint.manifest import DamagedError
from shardc.checkpoint.objects import AnyPath, ObjectPath, context, module
from shardc.errors import CheckpointError
from shardc.sbp.way import Index

_log: Final = logging.getLogger("shardc")


CHUNK: Final = 64 << 20
"""Bytes of an object at most, as far as shards can be cut."""
READ: Final = 4 << 20
"""Bytes at most of what can only be read whole, a chunk in a file or a part of an object: orbax's guide finds no cost
above 1 MB, and tensorstore cuts float32 so by itself. One device's array is read by eight with nothing read twice."""
_LOST: Final = ("NOT_FOUND", "FAILED_PRECONDITION", "DATA_LOSS", "INVALID_ARGUMENT", "OUT_OF_RANGE")
"""How the errors of tensorstore begin that another try would not mend."""


class OwnersPart(NamedTuple):
    """The part of a checkpoint that an owner writes.

    Attributes:
      folder: of this owner. It appears when all its files are written; without arrays the caller has to make it.
      arrays: by name.
      processes: the numbers in JAX of the processes that write it; None: all of the runtime.
    """

    folder: AnyPath
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
        in_bucket = [p for p in savers if isinstance(p.folder, ObjectPath)]
        alone = [p for p in savers if p not in in_bucket and p.processes is not None and len(p.processes) == 1]
        together = [p for p in savers if p not in alone and p not in in_bucket]

        def failed(error: Exception) -> CheckpointError:
            text = f"The checkpoint of step {step} could not be written to {folder}: {type(error).__name__}: {error}"
            made = CheckpointError(text)
            made.__cause__ = error
            return made

        def write() -> None:
            try:
                for folder, arrays in copied:
                    _write_chunks(folder, arrays)
                for part in alone:
                    _write_alone(part)
                for part in together:
                    self._checkpointer(part.processes).wait_until_finished()
                finish()
            except Exception as error:  # noqa: BLE001 - `check` raises it in the thread of the run
                self._failed = failed(error)

        try:
            copied = [(p.folder, _on_host(p)) for p in in_bucket]
            for part in together:
                ocp, arrays = module("orbax.checkpoint"), dict(part.arrays)
                cut = dict.fromkeys(arrays, ocp.SaveArgs(chunk_byte_size=READ))
                args = ocp.args.PyTreeSave(arrays, save_args=cut)
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


def _store(folder: AnyPath, name: str) -> dict[str, Any]:
    if isinstance(folder, ObjectPath):
        strict = {"fill_missing_data_reads": False, "store_data_equal_to_fill_value": True}
        return {"driver": "zarr3", "kvstore": (folder / name).spec, **strict}
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


class _Shards(NamedTuple):
    """The pieces of an array that this process writes, on the host, with the metadata of the array."""

    metadata: dict[str, Any]
    pieces: list[tuple[Any, NDArray[Any]]]


_BYTES: Final = {"name": "bytes", "configuration": {"endian": "little"}}


def _on_host(part: OwnersPart) -> dict[str, _Shards]:
    """The arrays of a part, copied to the host: of each shard the first copy. What is on the host of all processes is
    written by the first."""
    is_first = jax.process_index() == min(part.processes or {0})

    def shards(x: Any) -> _Shards:
        if isinstance(x, jax.Array):
            block = x.sharding.shard_shape(x.shape)
            pieces = [(s.index, np.array(s.data)) for s in x.addressable_shards if s.replica_id == 0]
        else:
            block, pieces = x.shape, [((), x)] if is_first else []
        chunk = chunk_shape(x.shape, block, x.dtype.itemsize)
        grid = {"name": "regular", "configuration": {"chunk_shape": chunk}}
        codecs = [_BYTES, {"name": "zstd"}, {"name": "crc32c"}]
        if (part := part_shape(chunk, x.dtype.itemsize)) != chunk:
            about = {"chunk_shape": part, "codecs": codecs, "index_codecs": [_BYTES, {"name": "crc32c"}]}
            codecs = [{"name": "sharding_indexed", "configuration": about}]
        metadata = {"shape": x.shape, "data_type": str(np.dtype(x.dtype)), "chunk_grid": grid, "codecs": codecs}
        return _Shards(metadata, pieces)

    return {name: shards(x) for name, x in part.arrays.items()}


def chunk_shape(shape: Sequence[int], shard: Sequence[int], itemsize: int) -> list[int]:
    """The shape of a chunk: a shard cut to at most CHUNK bytes, so that no chunk lies in two shards. A sharded
    dimension that no near number divides is not cut."""
    block = list(shard)
    for at, n in enumerate(shard):
        wanted = -(-math.prod(block) * itemsize // CHUNK)
        known = range(min(wanted, n), min(2 * wanted, n) + 1)
        block[at] = -(-n // next((k for k in known if n % k == 0 or n == shape[at]), 1))
    return block


def part_shape(chunk: Sequence[int], itemsize: int) -> list[int]:
    """The shape of the parts of a chunk that can be read alone: its longest even dimension is halved until they have at
    most READ bytes."""
    part = list(chunk)
    while math.prod(part) * itemsize > READ and (even := [n for n in part if n % 2 == 0]):
        part[part.index(max(even))] //= 2
    return part


def _write_chunks(folder: AnyPath, arrays: Mapping[str, _Shards]) -> None:
    opened = [
        module("tensorstore").open(
            {**_store(folder, name), "metadata": x.metadata}, create=True, open=True, context=context()
        )
        for name, x in arrays.items()
    ]
    pairs = zip(opened, arrays.values(), strict=True)
    for writing in [made.result()[index].write(value) for made, x in pairs for index, value in x.pieces]:
        writing.result()


@lru_cache(maxsize=4096)
def _opening(folder: AnyPath, name: str) -> Any:
    return module("tensorstore").open(_store(folder, name), open=True, read=True, context=context())


def read(folder: AnyPath, name: str, index: Index) -> NDArray[Any]:
    """A piece of a stored array; dimensions behind those of the index are read whole.

    Raises:
      DamagedError: it cannot be read.
      CheckpointError: it cannot be read now: the object store does not answer, or refuses.
    """
    try:
        store = _opening(folder, name).result()
        return np.asarray(store[tuple(slice(*pair) for pair in index)].read().result())
    except (ValueError, OSError, IndexError) as error:
        is_lost = not isinstance(folder, ObjectPath) or str(error).startswith(_LOST)
        kind = DamagedError if is_lost else CheckpointError
        raise kind(f"{folder}: the array {name} cannot be read: {error}") from error


_MARKS: Final = ("_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt", "ocdbt.process_0")


def is_written_by_orbax(folder: AnyPath) -> bool:
    """Whether something of a folder that orbax has written is there."""
    return any((folder / name).exists() for name in _MARKS)


def forget() -> None:
    """Close what is open for reading."""
    _opening.cache_clear()


def joined(pieces: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Pieces that follow one another in dimension 0 as one array."""
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
