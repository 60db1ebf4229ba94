"""The status of a process's training loop, which the launcher reads: steps done, loss, tokens per second."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Lock
from time import monotonic, perf_counter
from typing import Any


class LoopStatus:
    """How far the training loop of this process is.

    `shardc.progress` and `saved.step` both write here, in any order: a row of the one is computed some steps after the
    other is called. The number of steps goes back only when a loop begins, and a figure stays until that of a later
    step is known. Nobody waits for a device.

    Args:
      note: called with a text for each step that is known to be done.

    Attributes:
      facts: `step` (how many are done), `loss`, `tokens` (a second), `saved` (the last checkpoint), as far as known.
      steps: the first and the last number of steps that was seen in this loop, each with a time of `perf_counter`.
    """

    def __init__(self, note: Callable[[str], object] = lambda text: None) -> None:
        self.facts: dict[str, float] = {}
        self.steps: list[tuple[int, float]] = []
        self._note = note
        self._lock = Lock()
        self._start = 0
        self._newest: dict[str, int] = {}
        """The steps that were done when each fact was so."""
        self._losses: deque[tuple[int, Any]] = deque()
        """Losses that may not be computed yet."""
        self._called: float | None = None
        self._is_measured = False
        """Whether `shardc.progress` measures the rate, on the devices."""

    def begin(self, start: int) -> None:
        """Record that a loop begins, or goes on from a checkpoint, after so many steps."""
        with self._lock:
            self.facts = {name: x for name, x in self.facts.items() if name == "saved"}
            self._start, self._newest, self._called, self._is_measured = start, {}, None, False
            self._losses.clear()
            self.steps = []

    def step(self, done: int, loss: Any = None, tokens: float | None = None) -> None:
        """Record a step.

        Args:
          done: the number of steps that are done.
          loss: its loss, a number or an array of one element, computed or not.
          tokens: how many it has taken. The rate since the call before counts if no other is measured.
        """
        with self._lock:
            now = monotonic()
            rate = None if tokens is None or self._called is None else float(tokens) / max(now - self._called, 1e-9)
            self._called = now
            if loss is not None:
                self._losses.append((done, loss))
            while self._losses and _is_known(self._losses[0][1]):
                of, loss = self._losses.popleft()
                if not _is_lost(loss):
                    self._take(of, loss=float(loss))
            self._take(done, step=done, tokens=None if self._is_measured else rate)

    def measured(self, done: int, loss: float | None, rate: float | None) -> None:
        """Record the figures of a step that is computed; `rate`: tokens per second."""
        with self._lock:
            self._is_measured |= rate is not None
            self._take(done, step=done, loss=loss, tokens=rate)

    def saved(self, step: int) -> None:
        """Record the number of the last complete checkpoint. The launcher takes new hosts then."""
        with self._lock:
            self.facts = {**self.facts, "saved": step}

    def _take(self, done: int, **figures: float | None) -> None:
        new = {name: x for name, x in figures.items() if x is not None and done >= self._newest.get(name, self._start)}
        if "step" in new and new["step"] != self.facts.get("step"):
            self.steps = [*self.steps[:1], (done, perf_counter())]
            self._note(f"step {done} is done")
        self._newest |= dict.fromkeys(new, done)
        self.facts = {**self.facts, **new}  # another thread reads it


def _is_known(loss: Any) -> bool:
    return not hasattr(loss, "is_ready") or _is_lost(loss) or loss.is_ready()


def _is_lost(loss: Any) -> bool:
    """Whether the value of an array cannot be read here: it lives in another process, or its buffer is gone."""
    return hasattr(loss, "is_ready") and (
        loss.is_deleted() or not (loss.is_fully_addressable or loss.is_fully_replicated)
    )
