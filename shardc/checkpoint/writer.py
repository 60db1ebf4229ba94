"""The writer of one owner: a checkpoint after the other, beside the run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from shardc.checkpoint.orbax import Saver
from shardc.errors import CheckpointError

_log: Final = logging.getLogger("shardc")


class Writer:
    """Writes one checkpoint at a time in a thread of its own.

    Args:
      seconds: for one checkpoint, after which it fails.
    """

    def __init__(self, seconds: float) -> None:
        self._saver = Saver(seconds)
        self._thread: threading.Thread | None = None
        self._failed: CheckpointError | None = None

    def start(self, step: int, folder: Path, arrays: Mapping[str, Any], finish: Callable[[], None]) -> None:
        """Begin to write. Returns when the arrays are copied to the host.

        Args:
          step: of the checkpoint, for errors.
          folder: of this owner. It appears when all its files are written.
          finish: called, in the thread of the writer, when it is there.

        Raises:
          CheckpointError: this checkpoint, or the one before, cannot be written.
        """
        self.wait()
        self.check()
        try:
            if arrays:  # else `finish` makes the folder
                self._saver.start(folder, arrays)
        except Exception as error:
            raise _not_written(step, folder, error) from error
        self._thread = threading.Thread(
            target=self._write, args=(step, folder, finish), name=f"shardc checkpoint {step}", daemon=True
        )
        self._thread.start()

    def _write(self, step: int, folder: Path, finish: Callable[[], None]) -> None:
        try:
            self._saver.wait()
            finish()
        except Exception as error:  # noqa: BLE001 - `check` raises it in the thread of the run
            self._failed = _not_written(step, folder, error)
            self._failed.__cause__ = error

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until nothing is being written. Whether it came to that in `seconds`."""
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
        """Wait for the last checkpoint, but not for ever, and log its error: another error is already on its way."""
        if not self.wait(seconds):
            _log.warning("a checkpoint was still being written after %g s; it may stay incomplete", seconds)
            return
        failed, self._failed = self._failed, None
        if failed is not None:
            _log.warning("%s", failed)

    def close(self) -> None:
        if self._thread is None:
            self._saver.close()


def _not_written(step: int, folder: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"The checkpoint of step {step} could not be written to {folder}: {_text(error)}")


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
