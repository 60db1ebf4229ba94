"""Output of processes: what is shown, and what is kept for error messages."""

from __future__ import annotations

import logging
import os
import platform
import re
import select
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Final, TypeAlias

Take: TypeAlias = Callable[[bytes], None]
"""Consumer of a piece of output. Raises OSError if nobody reads it any more."""

_NOISE: Final = b"[Gloo] Rank"
_REST: Final = re.compile(
    rb"\d*( is connected to )?\d*( peer ranks\. )?(Expected number of connected peer ranks is : )?\d*"
)
_HELD_SECONDS: Final = 0.05
"""Seconds that an incomplete line is held back, until its end comes or it turns out not to be noise."""
_TAIL: Final = 1 << 16


class WithoutNoise:
    """Drops the lines that jaxlib writes when processes connect: `[Gloo] Rank 0 is connected to ...`.

    Several threads write them, piece by piece: then the end of a second one stands in a line of its own.
    """

    def __init__(self, take: Take) -> None:
        self._take = take
        self._at_start, self._in_noise = True, False
        self._ends = 0
        """Remainders of noise lines that have not arrived yet."""
        self.held = b""
        """The beginning of a line that may become noise."""

    def __call__(self, data: bytes) -> None:
        data, self.held = self.held + data, b""
        shown = [line for line in data.splitlines(keepends=True) if self._is_shown(line)]
        if shown:
            self._take(b"".join(shown))

    def _is_shown(self, line: bytes) -> bool:
        ends = line.endswith((b"\n", b"\r"))
        if self._at_start:
            is_rest = self._ends > 0 and _REST.fullmatch(line.rstrip(b"\r\n")) is not None
            if not ends and (_NOISE.startswith(line) or is_rest):
                self.held = line
                return False
            self._in_noise = line.startswith(_NOISE) or is_rest
        if self._in_noise:
            self._ends = max(0, self._ends + line.count(_NOISE) - ends)
        self._at_start = ends
        return not self._in_noise

    def flush(self) -> None:
        """Show what is held back."""
        if self.held:
            held, self.held, self._at_start, self._in_noise = self.held, b"", False, False
            self._take(held)


class Lines:
    """Passes on whole lines, so that those of two streams do not mix within a line."""

    def __init__(self, take: Take) -> None:
        self._take = take
        self.held = b""
        """The beginning of a line."""

    def __call__(self, data: bytes) -> None:
        whole, end, rest = data.rpartition(b"\n")
        if end:
            whole, self.held = self.held + whole + end, b""
            self._take(whole)
        self.held += rest

    def flush(self) -> None:
        """Pass on what is held back."""
        if self.held:
            held, self.held = self.held, b""
            self._take(held)


class LogFile(RotatingFileHandler):
    """A file of lines, each with its time and this host. A full one becomes `NAME.log.1`, as a container's log does
    under Kubernetes' kubelet: there are at most five of 10 MiB."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=10 << 20, backupCount=4, encoding="utf-8", errors="replace")
        self.setFormatter(logging.Formatter(f"%(asctime)s {platform.node()} %(message)s"))
        self._has_failed = False

    def _open(self) -> TextIOWrapper:
        file = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        return open(file, "a", encoding=self.encoding, errors=self.errors)

    def handleError(self, record: logging.LogRecord) -> None:
        """Say it once: the run is worth more than its log."""
        if not self._has_failed:
            self._has_failed = True
            super().handleError(record)

    def __call__(self, data: bytes) -> None:
        """Write whole lines."""
        for line in data.decode(errors="replace").splitlines():
            self.handle(logging.makeLogRecord({"msg": line}))


class Tail:
    """The last bytes of an output."""

    def __init__(self) -> None:
        self._pieces: deque[bytes] = deque()
        self._size = 0

    def __call__(self, data: bytes) -> None:
        self._pieces.append(data)
        self._size += len(data)
        while self._size - len(self._pieces[0]) >= _TAIL:
            self._size -= len(self._pieces.popleft())

    def lines(self, count: int) -> list[str]:
        text = b"".join(self._pieces).decode(errors="replace")
        return [line.rstrip("\r") for line in text.rstrip().split("\n")][-count:] if text.strip() else []


class Pump:
    """A thread that reads a file descriptor to its end and passes on the output.

    Args:
      source: the descriptor, closed at the end.
      takes: each takes every piece. An OSError of one closes the source: its writer sees a broken pipe.
      name: of the thread.
    """

    def __init__(self, source: int, takes: list[Take], name: str) -> None:
        self._source, self._takes = source, takes
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while data := self._read():
                for take in self._takes:
                    take(data)
            self._flush()
        except OSError:
            pass  # a reader that is gone: as in a shell, the writer gets a broken pipe
        finally:
            os.close(self._source)

    def _read(self) -> bytes:
        if any(isinstance(t, (Lines, WithoutNoise)) and t.held for t in self._takes):
            ready, _, _ = select.select([self._source], [], [], _HELD_SECONDS)
            if not ready:
                self._flush()
        try:
            return os.read(self._source, 1 << 16)
        except OSError:
            return b""  # so does the end of a terminal look

    def _flush(self) -> None:
        for take in self._takes:
            if isinstance(take, (Lines, WithoutNoise)):
                take.flush()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)


class Screen:
    """Standard output and error of the launcher, with a live line below if standard error is a terminal.

    Args:
      log: the file of what the launcher says itself.
    """

    def __init__(self, log: Path | None = None) -> None:
        self._log = LogFile(log) if log else None
        self._lock = threading.RLock()
        self._line = ""
        self._shown = False
        self._at_start = True
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()

    def is_terminal(self, descriptor: int) -> bool:
        with suppress(OSError):
            return os.isatty(descriptor)
        return False

    def out(self, data: bytes) -> None:
        self._write(1, data)

    def err(self, data: bytes) -> None:
        self._write(2, data)

    def say(self, text: str) -> None:
        """Print lines of the launcher itself."""
        if self._log is not None:
            self._log(text.encode(errors="replace"))
        with self._lock:
            lead = b"" if self._at_start or not self.is_terminal(2) else b"\n"
            with suppress(OSError):
                self._write(2, lead + text.encode(errors="replace") + b"\n")

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    def live(self, line: str) -> None:
        """Replace the live line; an empty text removes it."""
        with self._lock:
            if self.is_terminal(2):
                self._hide()
                self._line = line
                self._show()

    def _write(self, descriptor: int, data: bytes) -> None:
        with self._lock:
            self._hide()
            self._at_start = data.endswith(b"\n")
            write_all(descriptor, data)
            self._show()

    def _show(self) -> None:
        if self._line and self._at_start and not self._shown:
            with suppress(OSError):
                columns = os.get_terminal_size(2).columns or 80
                write_all(2, self._line[: max(0, columns - 1)].encode())
                self._shown = True

    def _hide(self) -> None:
        if self._shown:
            with suppress(OSError):
                write_all(2, b"\r\x1b[2K")
            self._shown = False


def write_all(descriptor: int, data: bytes) -> None:
    """Write all bytes to a file descriptor, also to one that does not block."""
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            select.select([], [descriptor], [])
