"""How many steps an actor may have launched that have not finished."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from time import perf_counter
from typing import Any


class LaunchWindow:
    """At most `size` launched, unfinished steps: before one more, the oldest is waited for.

    Of the values that a step gives only weak references are held, so that a register is free when its consumer has
    run. A step whose values are all gone counts as finished; one that gave tokens, which are held, never does.
    """

    def __init__(
        self, size: int, wait: Callable[[list[Any]], object], finished: Callable[[Any], bool] | None = None
    ) -> None:
        self._size = size
        self._wait = wait
        self._finished = finished
        self._launched: deque[tuple[tuple[Hashable, str], list[weakref.ref[Any]], list[Any]]] = deque()
        self._times: deque[float] = deque()

    @property
    def oldest(self) -> tuple[Hashable, str]:
        """Label and source of the step that `make_room` waits for."""
        return self._launched[0][0]

    @property
    def since(self) -> float:
        """When that one was launched."""
        return self._times[0] if self._times else 0.0

    def __len__(self) -> int:
        return len(self._launched)

    @property
    def full(self) -> bool:
        return len(self._launched) >= self._size

    @property
    def may_go_on(self) -> bool:
        """Whether `make_room` would not have to wait, as far as that is known."""
        tokens = self._launched[0][2]
        return self._finished is not None and bool(tokens) and all(map(self._finished, tokens))

    def make_room(self) -> None:
        """Waits for the oldest step. Raises what `wait` raises: then that step has failed."""
        _, values, tokens = self._launched[0]
        alive = tokens or [v for v in (ref() for ref in values) if v is not None]
        if alive:
            self._wait(alive)
        self._drop()

    def _drop(self) -> None:
        self._launched.popleft()
        self._times.popleft()

    def drain(self) -> tuple[tuple[Hashable, str], BaseException] | None:
        """Waits for all steps, however they end. Gives the first that failed, and its error."""
        first: tuple[tuple[Hashable, str], BaseException] | None = None
        while self._launched:
            who = self.oldest
            try:
                self.make_room()
            except BaseException as error:  # noqa: BLE001 - those after it are waited for all the same
                self._drop()
                first = first or (who, error)
        return first

    def add(self, who: tuple[Hashable, str], values: Iterable[Any], tokens: list[Any]) -> None:
        self._launched.append((who, [] if tokens else list(_weak(values)), tokens))
        self._times.append(perf_counter())


def _weak(values: Iterable[Any]) -> Iterator[weakref.ref[Any]]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _weak(value)
        else:
            try:
                yield weakref.ref(value)
            except TypeError:  # numbers, None and other values that nothing needs to be waited for
                continue
