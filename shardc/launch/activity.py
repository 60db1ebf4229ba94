"""The activity of a process, as the system knows it. One that computes with Python's lock gives no sign of life."""

from __future__ import annotations

import os
from pathlib import Path
from time import monotonic
from typing import Final

COMPUTES: Final = "computes"
STOPPED: Final = "stopped"
_LEAST: Final = 0.05
"""The part of the time that a process has to use a processor for, if its main thread waits. Threads that only wait for
Python's lock use less."""
_TICKS: Final = os.sysconf("SC_CLK_TCK")


class Activity:
    """The activity of a process from one look to the next one.

    Args:
      pid: of a process that its parent has not waited for.
    """

    def __init__(self, pid: int) -> None:
        self._path = Path(f"/proc/{pid}/stat")
        self._ticks, self._at = 0, monotonic()

    def look(self) -> str:
        """COMPUTES if it has used a processor since the last look, or waits for a disk; STOPPED by a signal; empty if
        it is idle, or if this system has no /proc."""
        try:
            state, *fields = self._path.read_text().rpartition(")")[2].split()
        except OSError:
            return ""
        ticks, at = int(fields[10]) + int(fields[11]), monotonic()  # in user code, in the system
        used, seconds = (ticks - self._ticks) / _TICKS, at - self._at
        self._ticks, self._at = ticks, at
        if state == "T":
            return STOPPED
        return COMPUTES if state in "RD" or used > _LEAST * seconds else ""  # R: also where too many want a processor
