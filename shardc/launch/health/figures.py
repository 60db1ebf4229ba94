"""The figures of a run while it goes on. A file of JSON, numbers for Prometheus and the status line show them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardc.launch.health.goodput import Goodput
from shardc.launch.health.stragglers import Slowest, Stragglers


@dataclass(frozen=True)
class RunFigures:
    """The figures of a run. None: not known, or not known yet.

    Attributes:
      processes: how many run now.
      restarts: how often lost processes were started again.
      step, loss, tokens_per_second: of the training loop, as `shardc.progress` and `saved.step` say them.
      goodput: the part of the time that went into steps that counted.
      last_step_age: seconds since the number of steps has changed.
      checkpoint, last_checkpoint_age: the step of the last complete checkpoint, and how long ago it was seen first.
      slowest: the process that the others wait for.
    """

    processes: int
    restarts: int
    step: int | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    goodput: float | None = None
    last_step_age: float | None = None
    checkpoint: int | None = None
    last_checkpoint_age: float | None = None
    slowest: Slowest | None = None


class RunHealth:
    """Follows the figures of a run.

    Args:
      now: seconds of a clock, when the run begins.
    """

    def __init__(self, now: float) -> None:
        self.goodput = Goodput(now)
        self._stragglers = Stragglers()
        self._loop: dict[str, Any] = {}
        """The newest facts of the loop. They stay while its processes are away."""
        self._since: dict[str, tuple[Any, float]] = {}
        """For the step and the checkpoint the value, and since when it is this one."""

    def look(
        self, now: float, heard: Mapping[int, tuple[str, float]], epoch: int, processes: int, restarts: int
    ) -> tuple[RunFigures, Mapping[int, Mapping[str, Any]]]:
        """Look at the newest signs of life. Returns the figures, and what each process says.

        Args:
          now: seconds of the clock.
          heard: for each process the text of its last sign of life, and how many seconds ago that came.
          epoch, processes, restarts: of the run.
        """
        said = {p: _facts_of(text) for p, (text, _) in sorted(heard.items()) if text and p >= 0}
        first = said.get(0, {})
        if "steps" in first:
            for step, at in first["steps"]:
                self.goodput.see(at, first["epoch"], step)
        found = {name: _first(said, name) for name in ("step", "loss", "tokens", "saved")}
        loop = self._loop = {name: self._loop.get(name) if x is None else x for name, x in found.items()}
        figures = RunFigures(
            processes, restarts, loop["step"], loop["loss"], loop["tokens"], self.goodput.share(now),
            self._age("step", loop["step"], now), loop["saved"], self._age("saved", loop["saved"], now),
            self._stragglers.look(said, {p: age for p, (_, age) in heard.items()}, epoch),
        )  # fmt: skip
        return figures, said

    def _age(self, name: str, value: Any, now: float) -> float | None:
        """Seconds since a value has changed. One that is away for a while, as after a loss, has not."""
        before, since = self._since.get(name, (None, now))
        if value is not None and value != before:
            since = now
            self._since[name] = value, now
        return None if name not in self._since else now - since


def _facts_of(text: str) -> dict[str, Any]:
    """The facts that a process reports; if that failed, its error as the fact `fault`."""
    try:
        return json.loads(text)
    except ValueError:
        return {"fault": text}


def _first(said: Mapping[int, Mapping[str, Any]], name: str) -> Any:
    """The fact as reported by the lowest process that has it."""
    return next((facts[name] for facts in said.values() if name in facts), None)
