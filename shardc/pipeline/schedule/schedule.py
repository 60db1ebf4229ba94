"""A schedule: the order of each rank's actions. It is pure data, without times or devices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shardc.pipeline.schedule import text
from shardc.pipeline.schedule.action import Action


@dataclass(frozen=True)
class Schedule:
    """The order of each rank's actions. Two schedules are equal if their names and orders are equal.

    `str()` draws it as a grid with a row for each rank and a column for each unit of time; `Schedule.parse` reads that
    grid. Idle cells have no meaning: a rank starts its next action when the action's inputs are there.

    Args:
      name: the name, such as "1f1b".
      rows: row r holds rank r's actions in order. They are not checked here: `check_schedule` does that.
    """

    name: str
    rows: tuple[tuple[Action, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @cached_property
    def stages(self) -> int:
        return 1 + max((a.stage for row in self.rows for a in row), default=-1)

    @cached_property
    def microbatches(self) -> int:
        return 1 + max((a.microbatch for row in self.rows for a in row), default=-1)

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """The rank of each stage; -1 for a stage without actions, the first rank for a stage on several ranks."""
        found: dict[int, int] = {}
        for rank, row in enumerate(self.rows):
            for action in row:
                found.setdefault(action.stage, rank)
        return tuple(found.get(s, -1) for s in range(self.stages))

    @property
    def chunks(self) -> int:
        """The most stages of a rank."""
        return max((self.rank_of.count(r) for r in range(self.ranks)), default=0)

    @cached_property
    def splits_backward(self) -> bool:
        """Whether any backward is split into input gradient and weight gradient."""
        return any(a.kind in "IW" for row in self.rows for a in row)

    @cached_property
    def actions(self) -> frozenset[Action]:
        return frozenset(a for row in self.rows for a in row)

    def needs(self, action: Action) -> tuple[Action, ...]:
        """The actions whose results `action` reads: F_s -> F_s+1, (B|I)_s+1 -> (B|I)_s, F_s -> (B|I)_s, I_s -> W_s."""
        stage, kind, microbatch = action
        if kind == "W":
            return (Action(stage, "I", microbatch),)
        if kind == "F":
            return (Action(stage - 1, "F", microbatch),) if stage else ()
        own = Action(stage, "F", microbatch)
        if stage + 1 == self.stages:
            return (own,)
        above = Action(stage + 1, "B", microbatch)
        return own, above if above in self.actions else above._replace(kind="I")

    @cached_property
    def columns(self) -> tuple[tuple[int, ...], ...]:
        """The column of each action in the grid: its earliest start by order and dependences, if each takes one unit.

        Actions that wait forever (a deadlock, a missing action) come after all others, in order.
        """
        columns: list[list[int]] = [[] for _ in self.rows]
        start: dict[Action, int] = {}
        moved = True
        while moved:
            moved = False
            for row, filled in zip(self.rows, columns, strict=True):
                while len(filled) < len(row) and all(n in start for n in self.needs(row[len(filled)])):
                    action = row[len(filled)]
                    soonest = max((start[n] for n in self.needs(action)), default=-1)
                    filled.append(1 + max(soonest, filled[-1] if filled else -1))
                    start.setdefault(action, filled[-1])
                    moved = True
        width = 1 + max((c for filled in columns for c in filled), default=-1)
        return tuple((*filled, *range(width, width + len(row) - len(filled)))
                     for row, filled in zip(self.rows, columns, strict=True))  # fmt: skip

    def __str__(self) -> str:
        return text.draw(self.name, self.rows, self.columns)

    @staticmethod
    def parse(grid: str) -> Schedule:
        """Parse a grid: the inverse of `str()`.

        A line is a rank; its cells are separated by blanks, commas or `|`. A leading `rank 0`, and a first line with
        the name, are optional. `.` and `-` are idle cells. torch's `(0F1;3B0)OVERLAP_F_B` is read as its parts.

        Raises:
          PipelineError: cells that are not actions; each one is named with its rank and column.
        """
        return Schedule(*text.parse(grid))

    def to_csv(self) -> str:
        """The schedule in torch.distributed.pipelining's format without communication: a row for each rank, a cell for
        each unit of time, blank if the rank is idle. The name is left out."""
        return text.to_csv(self.rows, self.columns)

    @staticmethod
    def from_csv(csv: str, name: str = "csv") -> Schedule:
        """The inverse of `to_csv`. Reads torch's compute-only files, OVERLAP_F_B cells as their parts.

        Raises:
          PipelineError: a cell is not an action, or is a communication (torch's compute_comms format).
        """
        return Schedule(name, text.from_csv(csv, name))
