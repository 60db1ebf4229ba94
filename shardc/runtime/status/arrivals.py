"""Arrivals of a process at the calls that it makes with others, for those who compare processes."""

from __future__ import annotations

from time import time
from typing import Final

_MOST: Final = 32
"""The most arrivals that are kept."""
_SECONDS: Final = 10.0
"""The time that the kept arrivals reach back, where calls are that quick."""


class Arrivals:
    """The times of the newest calls of one name. Of quick ones each 2nd, 4th, 8th ... counts: processes keep the same
    numbers, whenever they are asked."""

    def __init__(self) -> None:
        self._name = ""
        self._stride = 1
        self._kept: list[tuple[int, float]] = []

    def add(self, name: str, number: int) -> None:
        """Add a call that is made now."""
        if name != self._name:
            self._name, self._stride, self._kept = name, 1, []
        if number % self._stride:
            return
        now = time()
        if self._kept and now - self._kept[-1][1] > _SECONDS:
            self._stride = 1  # calls have become slow
        self._kept.append((number, now))
        if len(self._kept) > _MOST:
            if now - self._kept[0][1] < _SECONDS:
                self._stride *= 2
                self._kept = [pair for pair in self._kept if pair[0] % self._stride == 0]
            else:
                self._kept = self._kept[1:]

    def newest(self) -> tuple[str, list[tuple[int, float]]] | None:
        """The name of the calls, and the kept ones: number and time."""
        return (self._name, self._kept) if self._kept else None
