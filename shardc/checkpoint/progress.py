"""The facts of a training loop for the status line of its run: step, loss, tokens per second."""

from __future__ import annotations

from time import monotonic
from typing import Any, Protocol, runtime_checkable

import jax


@runtime_checkable
class StatusLine(Protocol):
    """The part of a `Cluster` that shows a status line."""

    def say(self, **facts: Any) -> None: ...


class Progress:
    """Reports each step to the status line. Never waits for a device: a loss is shown once it is computed."""

    def __init__(self, line: Any) -> None:
        self._line = line if isinstance(line, StatusLine) else None
        self._began: float | None = None
        self._waiting: Any = None
        self._loss: float | None = None

    def step(self, step: int, loss: Any, tokens: float | None) -> None:
        """Report a step.

        Args:
          loss: a number, or an array of one element.
          tokens: the number of tokens of the step.
        """
        if self._line is None:
            return
        now = monotonic()
        rate = None if tokens is None or self._began is None else tokens / max(now - self._began, 1e-9)
        self._began = now
        self._take(self._waiting)
        self._waiting = loss
        self._take(loss)
        self._line.say(step=step, loss=self._loss, tokens=rate)

    def saved(self, step: int) -> None:
        """Report the last complete checkpoint. The launcher takes new hosts then."""
        if self._line is not None:
            self._line.say(saved=step)

    def _take(self, loss: Any) -> None:
        if loss is None:
            return
        if isinstance(loss, jax.Array) and not _is_there(loss):
            return
        self._loss = float(loss)


def _is_there(loss: Any) -> bool:
    """Whether the value of an array is in this process and computed."""
    here = loss.is_fully_addressable or loss.is_fully_replicated
    return here and not loss.is_deleted() and loss.is_ready()
