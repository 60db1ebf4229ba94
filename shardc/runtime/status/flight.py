"""The flight recorder of a process: its last calls and messages, in a file of fixed size that outlives the process.

    head | end of the script | end of the process | last sign of life | threads | ring of 1,000 entries

The file is mapped into memory: an entry costs no system call, and stays when the process is killed by SIGKILL.
"""

from __future__ import annotations

import errno
import json
import logging
import mmap
import os
import platform
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from time import time
from typing import Any, Final

from shardc.runtime.transport.connection import BEAT, Frame, FrameKind

_log: Final = logging.getLogger("shardc")
ENTRIES: Final = 1000
_ENTRY: Final = struct.Struct("<Qd112s")
"""Its number, counted from 1; its time; its text, in UTF-8."""
_PARTS: Final = {"head": 512, "script": 1024, "process": 512, "life": 1 << 14, "threads": 1 << 15}
"""The texts before the ring, with their bytes."""
_AT: Final = {name: sum(list(_PARTS.values())[:i]) for i, name in enumerate(_PARTS)}
_RING: Final = sum(_PARTS.values())
_SIZE: Final = _RING + ENTRIES * _ENTRY.size
_STILL: Final = 3
"""Signs of life without a new entry after which the threads are written."""
_AGAIN: Final = 10
"""Signs of life after which they are written again, if there is still none."""
_KINDS: Final = {kind: kind.name.lower() for kind in FrameKind}
_SKIPPED: Final = (FrameKind.CREDIT, FrameKind.ALIVE, FrameKind.CLOCK, FrameKind.LEAVE)
"""Kinds of frames without an entry: each message of a channel is followed by a credit."""


class FlightRecorder:
    """Records what this process does.

    Args:
      path: the file, replaced if it is there; empty: what is recorded is read by nobody.
      process: its number in the run.

    Attributes:
      channels: the names of the channels of each network, by its number.
    """

    def __init__(self, path: str = "", process: int = 0) -> None:
        self.channels: dict[int, Sequence[str]] = {}
        self._map = _mapped(path)
        self._numbers = count(1)
        self._newest, self._seen, self._still, self._is_over = 0.0, 0.0, 0, False
        host = platform.node()
        self._write("head", {"process": process, "pid": os.getpid(), "host": host, "at": time()})

    def _write(self, part: str, said: Mapping[str, Any]) -> None:
        data = json.dumps(said).encode()
        if len(data) <= _PARTS[part]:
            at = _AT[part]
            self._map[at : at + _PARTS[part]] = data.ljust(_PARTS[part], b"\0")

    def note(self, text: str) -> None:
        """Add an entry, in any thread."""
        number, now = next(self._numbers), time()
        self._newest = now
        _ENTRY.pack_into(self._map, _RING + number % ENTRIES * _ENTRY.size, number, now, text.encode())

    def frame(self, way: str, peer: int, frame: Frame) -> None:
        """Add an entry for a frame of a link that goes `to` or comes `from` another process."""
        kind, network, _, channel, key, about, buffers = frame
        if kind in _SKIPPED or not (network or kind is FrameKind.TAGGED):  # texts of calls, which are noted
            return
        if kind is FrameKind.TAGGED:
            name = about.partition(b"\0")[0].decode()
        else:
            names = self.channels.get(network, ())
            name = names[channel] if channel < len(names) else f"{network:x}/{channel}"
        size = f", {sum([b.nbytes for b in buffers])} bytes" if buffers else ""
        self.note(f"{way} {peer}: {_KINDS[kind]} {name}, {key}{size}")

    def live(self, status: str, threads: Callable[[], str]) -> None:
        """Record a sign of life.

        Args:
          status: what it says.
          threads: gives what the threads do; asked for if there was no new entry for some seconds.
        """
        if self._is_over:
            return
        self._write("life", {"at": time(), "status": status})
        moves, self._seen = self._newest != self._seen, self._newest
        self._still = 0 if moves else self._still + 1
        if self._still >= _STILL and (self._still - _STILL) % _AGAIN == 0:
            text = threads()
            self._write("threads", {"at": time(), "text": text[: _PARTS["threads"] // 2]})

    def end(self, **said: Any) -> None:
        """Record how the script has ended. What it waited for before stays."""
        self._is_over = True
        self._write("script", {"at": time(), **said})


def _mapped(path: str) -> mmap.mmap:
    """The memory of a recorder: that of its file, if there is room for it."""
    if path:
        with suppress(OSError):
            Path(path).replace(before(Path(path)))
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                if os.pwrite(descriptor, bytes(_SIZE), 0) < _SIZE:  # a hole on a full disk would kill who writes there
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return mmap.mmap(descriptor, _SIZE)
            finally:
                os.close(descriptor)
        except OSError as error:
            _log.warning("there is no flight recorder: %s: %s", path, error.strerror)
    return mmap.mmap(-1, _SIZE)


def before(path: Path) -> Path:
    """The file of the start before."""
    return path.with_suffix(f".before{path.suffix}")


def note_end(path: str, **said: Any) -> None:
    """Record, in the launcher, how the process of a file has ended."""
    data = json.dumps({"at": time(), **said}).encode()
    with suppress(OSError), Path(path).open("r+b") as file:
        file.seek(_AT["process"])
        file.write(data.ljust(_PARTS["process"], b"\0"))


# -- to read


@dataclass(frozen=True)
class Entry:
    """An entry: a call or a message, and when it was."""

    number: int
    at: float
    text: str


@dataclass(frozen=True)
class Flight:
    """What the recorder of a process has kept.

    Attributes:
      process, pid, host, began: the process, and when it began.
      script: how its script has ended, as `FlightRecorder.end` was told; empty if it has not.
      end: how the process has ended, as `note_end` was told; empty if nobody has seen it.
      lived: when it gave its last sign of life.
      status: what that said.
      threads: what its threads did, and since when it has done nothing else; empty if it went on.
      entries: the last ones, in order.
    """

    process: int
    pid: int
    host: str
    began: float
    script: Mapping[str, Any]
    end: Mapping[str, Any]
    lived: float
    status: str
    threads: str
    entries: Sequence[Entry]

    @property
    def last(self) -> float:
        """When it was last known to do something."""
        return max([self.began, self.lived, *(e.at for e in self.entries)])


def read_flight(path: Path) -> Flight:
    """Read the file of a recorder, of a process that lives or not.

    Raises:
      ValueError: it is none.
      OSError: it cannot be read.
    """
    data = path.read_bytes()
    if len(data) != _SIZE:
        raise ValueError(f"{path} is no file of a flight recorder.")

    def part(name: str) -> dict[str, Any]:
        text = data[_AT[name] : _AT[name] + _PARTS[name]].rstrip(b"\0")
        with suppress(ValueError):  # it was killed in the middle of a word
            return json.loads(text) if text else {}
        return {}

    found = [Entry(n, at, text.rstrip(b"\0").decode(errors="replace"))
             for n, at, text in _ENTRY.iter_unpack(data[_RING:]) if n]  # fmt: skip
    entries = sorted(found, key=lambda e: e.number)
    head, life, threads = part("head"), part("life"), part("threads")
    is_still = not entries or threads.get("at", 0.0) >= entries[-1].at + BEAT
    return Flight(
        head["process"], head["pid"], head["host"], head["at"], part("script"), part("process"),
        life.get("at", head["at"]), life.get("status", ""), threads.get("text", "") if is_still else "", entries,
    )  # fmt: skip
