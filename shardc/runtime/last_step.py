"""The step at which the processes of a run save and end, because somebody has asked it to end soon.

The launcher asks all processes. Each one answers how many steps its loop has begun, and begins no further one before it
knows the largest answer: the first step after that one is the last, in all of them.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any


class LastStep:
    """The last step of this process.

    A process may have several loops that save, one in another. Their steps are counted together, as they are begun in
    the same order in all processes, and the process ends when each of them has saved.

    Args:
      changed: is notified when the process has to stop.
      stopped: whether it has to.

    Attributes:
      is_asked: whether somebody has asked the run to end.
    """

    def __init__(self, changed: threading.Condition | None = None, stopped: Callable[[], bool] = lambda: False) -> None:
        self._changed, self._stopped = changed or threading.Condition(), stopped
        self.is_asked = False
        self._open: set[int] = set()
        self._saved: set[int] = set()
        self._begun = 0
        self._after: int | None = None
        self._is_over = False

    def open(self, loop: object) -> None:
        """Count the steps of a loop, until it is closed."""
        with self._changed:
            self._open.add(id(loop))

    def close(self, loop: object, failed: bool = False) -> None:
        """Count them no more. `failed`: whether an error has ended the loop."""
        del failed
        with self._changed:
            self._open.discard(id(loop))
            self._saved.discard(id(loop))

    def ask(self) -> int | None:
        """Ask the process to end soon. Returns how many steps it has begun; None if no loop is open. The next step
        waits for `end_after`."""
        with self._changed:
            self.is_asked = True
            return self._begun if self._open else None

    def end_after(self, steps: int) -> None:
        """End at the first step after so many."""
        with self._changed:
            self._after = steps
            self._changed.notify_all()

    def begins(self) -> bool:
        """Count a step that begins. Returns whether its loop saves it and ends."""
        with self._changed:
            if self.is_asked:
                self._changed.wait_for(lambda: self._after is not None or self._stopped())
            self._begun += 1
            return self._after is not None and self._begun > self._after

    def saved(self, loop: object) -> bool:
        """Note that a loop has saved its last step. Returns whether all have."""
        with self._changed:
            self._saved.add(id(loop))
            self._is_over = self._open <= self._saved
            return self._is_over

    def begin_epoch(self) -> None:
        """Count the steps anew: other processes were started again."""
        with self._changed:
            self._begun, self._after = 0, None
            self._saved.clear()


class LastStepAlone(LastStep):
    """The last step of a process that no launcher has started. While a loop is open SIGTERM asks it to end, unless the
    script handles this signal itself; a second one ends it at once."""

    def open(self, loop: object) -> None:
        if not self._open:
            self.is_asked = self._is_over = False
            self.begin_epoch()
        handled = signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        if not handled and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._hear)
        super().open(loop)

    def close(self, loop: object, failed: bool = False) -> None:
        super().close(loop)
        if self._open or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) == self._hear:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self.is_asked and not self._is_over and not failed:
            signal.raise_signal(signal.SIGTERM)  # the loop has ended well before its next step

    def _hear(self, *_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.end_after(self.ask() or 0)
