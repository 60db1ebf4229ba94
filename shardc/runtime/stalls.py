"""Stalls: actors that have waited long for others. They are found by polling, so that a step has no cost."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from shardc.runtime.worker import Worker


@dataclass(frozen=True)
class Stall:
    """An actor that waits.

    Attributes:
      actor: its number.
      label: its next step.
      awaited: the actors that it waits for.
      seconds: how long it has waited at least.
    """

    actor: int
    label: Hashable
    awaited: tuple[int, ...]
    seconds: float


class StallWatch:
    """Finds stalls among the threads of an executor.

    Args:
      workers: the threads.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers
        self._seen: list[tuple[Any, float]] = [((0, 0), 0.0)] * len(workers)

    def look(self) -> list[Stall]:
        """The actors of threads that were idle at the last call too, and have run no step since."""
        now, found = monotonic(), list[Stall]()
        for i, worker in enumerate(self._workers):
            state = worker.fired, worker.done, worker.idle
            before, since = self._seen[i]
            if not worker.idle or state != before:
                self._seen[i] = state, now
                continue
            found += [Stall(actor, label, tuple(awaited), now - since) for actor, label, awaited in worker.stuck()]
        return found
