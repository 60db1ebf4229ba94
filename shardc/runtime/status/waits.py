"""Waits of a process: for whom it waits, for what and since when. It says them with each sign of life."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from time import monotonic
from typing import Any, Final

from shardc.runtime.calls import processes_text

SCRIPT: Final = ""
"""The script of a process, among what waits and what is awaited. Actors have names of their own: `3f/0`."""
_SHOWN: Final = 1.0
"""Seconds after which a wait is shown."""


@dataclass(frozen=True)
class Wait:
    """A wait.

    Attributes:
      awaited: what it waits for: each time a process, and an actor or its script.
      why: the purpose: `at step, call 3`, `rank 0 before 2B3`.
      seconds: how long it has lasted at least.
      who: the actor that waits, or the script. A name that nobody waits for is one of its own: it keeps no other.
    """

    awaited: tuple[tuple[int, str], ...]
    why: str
    seconds: float
    who: str = SCRIPT

    def to_json(self) -> list[Any]:
        return [self.who, self.awaited, self.why, round(self.seconds, 3)]

    @classmethod
    def from_json(cls, said: Sequence[Any]) -> Wait:
        who, awaited, why, seconds = said
        return cls(tuple((int(p), str(what)) for p, what in awaited), why, float(seconds), who)


class Waits:
    """The waits of one process.

    Attributes:
      networks: for each network, by its number, a function that gives the waits of its actors here. Called before each
        sign of life.
    """

    def __init__(self) -> None:
        self.networks: dict[int, Callable[[], Sequence[Wait]]] = {}
        self._open: dict[int, tuple[tuple[int, ...], str, str, float]] = {}
        self._numbers = count()

    @contextmanager
    def during(self, processes: Sequence[int], why: str, who: str = SCRIPT) -> Generator[None]:
        """A context in which this process waits for the scripts of others."""
        number = next(self._numbers)
        self._open[number] = tuple(processes), why, who, monotonic()
        try:
            yield
        finally:
            del self._open[number]

    def now(self) -> list[Wait]:
        """The waits at this moment."""
        at = monotonic()
        found = [
            Wait(tuple((p, SCRIPT) for p in processes), why, at - began, who)
            for processes, why, who, began in list(self._open.values())
        ]
        return found + [wait for waits in list(self.networks.values()) for wait in waits()]


def longest_text(waits: Sequence[Wait], me: int) -> str:
    """The longest wait of process `me` for others: `process 1 (rank 0 before 2B3, 4 s)`. Empty if none is long."""
    others = [(w, p) for w in waits if w.seconds >= _SHOWN and (p := sorted({q for q, _ in w.awaited} - {me}))]
    if not others:
        return ""
    wait, processes = max(others, key=lambda pair: pair[0].seconds)
    return f"{processes_text(processes)} ({wait.why}, {wait.seconds:.0f} s)"
