"""The limit on the steps that an actor has launched and that have not finished."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeAlias

from shardc.errors import PipelineError

Launched: TypeAlias = tuple[Hashable, str, int]
"""Label, source and round of a launched step."""


@dataclass(frozen=True)
class LaunchLimit:
    """A limit on the launched, unfinished steps of one actor.

    Attributes:
      steps: the limit, at least 1.
      wait: blocks until the given values are ready (`jax.block_until_ready`).
      finished: whether a token is ready; saves the wait for a token that is. None: not known.
    """

    steps: int
    wait: Callable[[list[Any]], object]
    finished: Callable[[Any], bool] | None = None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise PipelineError(
                f"LaunchLimit: steps={self.steps}; an actor needs at least 1, as in LaunchLimit(1, wait)."
            )


class LaunchWindow:
    """The launched, unfinished steps of one actor. When the limit is reached, the oldest is waited for.

    It holds only weak references to the values that a step gives, so that a register is free as soon as its consumer
    has run. A step counts as finished when all its values are gone. Tokens are held: a step that gave tokens counts as
    finished only after a wait.
    """

    def __init__(self, limit: LaunchLimit) -> None:
        self._limit = limit
        self._launched: deque[tuple[Launched, list[weakref.ref[Any]], list[Any]]] = deque()
        self._times: deque[float] = deque()

    @property
    def oldest(self) -> Launched:
        """The step that `make_room` waits for."""
        return self._launched[0][0]

    @property
    def since(self) -> float:
        """The time at which `oldest` was launched; 0 if there is none."""
        return self._times[0] if self._times else 0.0

    def __len__(self) -> int:
        return len(self._launched)

    @property
    def full(self) -> bool:
        return len(self._launched) >= self._limit.steps

    @property
    def may_go_on(self) -> bool:
        """Whether `make_room` is known to return without a wait."""
        tokens, finished = self._launched[0][2], self._limit.finished
        return finished is not None and bool(tokens) and all(map(finished, tokens))

    def make_room(self) -> None:
        """Wait for the oldest step and drop it. An error that `wait` raises means that the step has failed."""
        _, values, tokens = self._launched[0]
        alive = tokens or [v for v in (ref() for ref in values) if v is not None]
        if alive:
            self._limit.wait(alive)
        self._drop()

    def _drop(self) -> None:
        self._launched.popleft()
        self._times.popleft()

    def drain(self) -> tuple[Launched, BaseException] | None:
        """Wait for all steps, also after an error. Returns the first step that failed, with its error."""
        first: tuple[Launched, BaseException] | None = None
        while self._launched:
            who = self.oldest
            try:
                self.make_room()
            except BaseException as error:  # noqa: BLE001 - the later steps are waited for all the same
                self._drop()
                first = first or (who, error)
        return first

    def add(self, who: Launched, values: Iterable[Any], tokens: list[Any]) -> None:
        self._launched.append((who, [] if tokens else list(_weak(values)), tokens))
        self._times.append(perf_counter())


def _weak(values: Iterable[Any]) -> Iterator[weakref.ref[Any]]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _weak(value)
        else:
            try:
                yield weakref.ref(value)
            except TypeError:  # numbers, None and other values that are ready at once
                continue
