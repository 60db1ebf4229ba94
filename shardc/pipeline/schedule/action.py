"""Tasks and actions of a pipeline: what is compiled, and what is run. An action is one task on one microbatch.

`2F0` is stage 2, forward, microbatch 0: the task `2F` on microbatch 0. A task that runs once in a call, such as
`load 2`, has no microbatch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import total_ordering
from typing import Final, NamedTuple

KINDS: Final = {"F": "forward", "B": "full backward", "I": "input gradient", "W": "weight gradient"}
"""The letters of torch.distributed.pipelining, so that schedules can be exchanged. B is I and W in one task."""

_ACTION: Final = re.compile(r"(\d{1,6})([FBIW])(\d{1,6})")
_TASKS: Final = ("load", "F", "B", "W", "update")


@total_ordering
@dataclass(frozen=True)
class TaskId:
    """The identity of a task, from the cut to the timeline: `2F`, `2B`, `2W`; once in a call `load 2`, `update 2.1`.

    Tasks are ordered as a microbatch passes them: F from the first stage to the last, B and then W from the last to the
    first; `load` comes before, updates come after, by level.

    Attributes:
      stage: the stage.
      kind: "F", "B" or "W"; "load" before the loop, "update" after it. B is the whole backward; of a stage that has a W
        it is the input gradient.
      level: of an update: how often values had to come from another stage before it.
    """

    stage: int
    kind: str
    level: int = 0

    def __str__(self) -> str:
        if self.in_loop:
            return f"{self.stage}{self.kind}"
        return f"{self.kind} {self.stage}" + (f".{self.level}" if self.level else "")

    def __lt__(self, other: TaskId) -> bool:
        return self._order < other._order

    @property
    def _order(self) -> tuple[int, int, int]:
        return _TASKS.index(self.kind), self.level, -self.stage if self.kind in "BW" else self.stage

    @property
    def in_loop(self) -> bool:
        """Whether it runs for each microbatch."""
        return self.kind in "FBW"

    @property
    def word(self) -> str:
        """The name among the tasks of its stage: `B`, `update1`."""
        return f"{self.kind}{self.level or ''}"


class Action(NamedTuple):
    """One task of one stage on one microbatch. Prints as it parses.

    Examples:
      >>> str(Action(2, "F", 0)), Action.parse("2F0")
      ('2F0', Action(stage=2, kind='F', microbatch=0))
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def task(self) -> TaskId:
        """The task that runs on the microbatch. I is task B of a stage that has a W."""
        return TaskId(self.stage, "B" if self.kind == "I" else self.kind)

    @property
    def halves(self) -> tuple[Action, ...]:
        """A full backward as input gradient and weight gradient; any other action alone."""
        return (self._replace(kind="I"), self._replace(kind="W")) if self.kind == "B" else (self,)

    @staticmethod
    def parse(text: str) -> Action:
        """Parse an action. Raises ValueError if the text is not one."""
        found = _ACTION.fullmatch(text.strip())
        if not found:
            raise ValueError(f'"{text}" is not an action; write <stage><F|B|I|W><microbatch>, such as 2F0.')
        stage, kind, microbatch = found.groups()
        return Action(int(stage), kind, int(microbatch))
