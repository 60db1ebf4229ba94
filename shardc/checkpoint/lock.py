"""The lock of a directory that a run writes checkpoints to.

It is a lock of the system on a file in the directory, which ends with its process, however that ends: a run that was
killed holds none. Other hosts see it where the file system has locks that all its hosts share, as NFS version 4 does.

An object store has no locks that end with their process. There the run that comes last writes its name: the one before
finds so, and may not write any more.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import platform
import secrets
import threading
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep, strftime
from typing import Final

from shardc.checkpoint.objects import ObjectPath
from shardc.errors import CheckpointError

NAME: Final = ".lock"
"""The name of the file."""
_HELD: Final = (errno.EACCES, errno.EAGAIN)
_log: Final = logging.getLogger("shardc")


class DirectoryLock:
    """The lock of a directory, held by this process or not.

    Args:
      directory: where the file lies.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / NAME
        self._file = -1

    @property
    def is_held(self) -> bool:
        """Whether this object holds the lock."""
        return self._file >= 0

    def take(self, seconds: float) -> None:
        """Take the lock, or wait for it so long: a process that was killed frees it a little later.

        Raises:
          CheckpointError: another run holds it. The error names its host and process.
          OSError: the file cannot be made.
        """
        until = monotonic() + seconds
        while not self._try():
            if monotonic() > until:
                raise CheckpointError(
                    f"shardc.checkpoints: another run writes to {self._path.parent}: {self._holder()}. End it, or give "
                    "this run a directory of its own."
                )
            sleep(0.1)

    def check(self) -> None:
        """Nothing: nobody takes a lock that is held."""

    def free(self) -> None:
        """Free the lock, if it is held."""
        with _taking:
            if self.is_held:
                _mine.discard(_identity(os.fstat(self._file)))
                with suppress(OSError):  # while it is held: who opens the file now finds out that it is gone
                    self._path.unlink()
                os.close(self._file)
                self._file = -1

    def _holder(self) -> str:
        """The text that the holder has written; it may have ended since."""
        with _taking, suppress(OSError):
            if _identity(self._path.stat()) in _mine:
                return "this process itself, in another `with`"
            if text := self._path.read_text("utf-8", "replace").strip():
                return text
        return "its process is not known"

    def _try(self) -> bool:
        with _taking:
            if self._path.exists() and _identity(self._path.stat()) in _mine:
                return False  # to open and close it would free it: such locks are those of a process
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in _HELD:
                    os.close(file)
                    return False
                _log.warning("%s has no locks (%s): another run in it is not noticed", self._path.parent, error)
            identity = _identity(os.fstat(file))
            if not self._path.exists() or _identity(self._path.stat()) != identity:
                os.close(file)  # who held it has removed it meanwhile
                return False
            self._file = file
            _mine.add(identity)
            os.ftruncate(file, 0)
            os.pwrite(file, _who().encode(), 0)
            return True


class ObjectLock:
    """The name of the run that writes to a directory on an object store: of the last one that has begun to.

    Args:
      directory: where it stands.
    """

    def __init__(self, directory: ObjectPath) -> None:
        self._path = directory / NAME
        self._mine = ""

    @property
    def is_held(self) -> bool:
        """Whether this object has taken it; another run may have it by now, as `check` says."""
        return bool(self._mine)

    def take(self, seconds: float) -> None:
        """Take it, from whoever has it."""
        del seconds
        self._mine = f"{_who()} ({secrets.token_hex(8)})"
        self._path.write_text(self._mine)

    def check(self) -> None:
        """Make sure that this run may write.

        Raises:
          CheckpointError: another run has begun to write.
        """
        if self.is_held and (holder := self._holder()) != self._mine:
            raise CheckpointError(
                f"shardc.checkpoints: another run writes to {self._path.parent} now: {holder.partition(' (')[0]}. This "
                "one may not any more. End one of them, or give it a directory of its own."
            )

    def free(self) -> None:
        """Free it, if this run still has it."""
        with suppress(OSError):  # what is left is taken by the next run
            if self.is_held and self._holder() == self._mine:
                self._path.unlink()
        self._mine = ""

    def _holder(self) -> str:
        return self._path.read_text() if self._path.exists() else "its process is not known"


def _who() -> str:
    return f"process {os.getpid()} on host {platform.node()}, since {strftime('%F %T')}"


_taking: Final = threading.Lock()
_mine: Final = set[tuple[int, int]]()
"""The files whose locks this process holds."""


def _identity(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino
