"""Watchers of calls: `shardc explain train.py:step` waits as one for the first call of a function in a script."""

from __future__ import annotations

from typing import Any, Final, Protocol


class Watcher(Protocol):
    """Who is told of functions and flows as they are made, and of each call that is about to be planned."""

    def made(self, function: Any) -> None:
        """A function or a flow was made."""

    def called(self, function: Any, *call: Any) -> None:
        """A function is called, or asked for its plan: with its `Call`; of a flow with its state and item."""


WATCHERS: Final[list[Watcher]] = []


def notify_made(function: Any) -> None:
    for watcher in WATCHERS:
        watcher.made(function)


def notify_called(function: Any, *call: Any) -> None:
    for watcher in WATCHERS:
        watcher.called(function, *call)
