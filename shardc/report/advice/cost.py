"""The costs of a plan as data: what takes how much of a call, why, and what would change it by how much."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from shardc.report.tables import bytes_text, percent_text, seconds_text

SMALL: Final = 0.01
"""The part of a cost from which on a change is worth a line, and an operation is named."""

Bound: TypeAlias = Literal["", "about", "at least", "at most"]


@dataclass(frozen=True)
class Change:
    """A change that would lower a cost.

    Attributes:
      what: is changed.
      saves: seconds of a call; below 0: it takes longer; None: unknown.
      bound: whether it saves no less, or no more, than that.
      memory: bytes more at the peak of a device.
    """

    what: str
    saves: float | None
    bound: Bound = ""
    memory: int = 0

    def __str__(self) -> str:
        if self.saves is None:
            return f"{self.what}: unknown."
        size = seconds_text(abs(self.saves))
        if size == "0 s":
            how = "a call takes as long"
        elif self.saves < 0:
            how = f"a call takes {size} longer"
        else:
            how = f"{self.bound} {size} less a call".lstrip()
        more = f", and {bytes_text(abs(self.memory))} {'more' if self.memory > 0 else 'less'} memory" * bool(
            self.memory
        )
        return f"{self.what}: {how}{more}."

    def is_worth_a_line(self, seconds: float) -> bool:
        """Whether it changes a cost of so many seconds by much, or by what nobody knows."""
        return self.saves is None or self.saves <= 0 or self.saves > SMALL * seconds


@dataclass(frozen=True)
class Words:
    """The words of a cost.

    Attributes:
      what: takes the time.
      why: it does.
      changes: that would lower it.
    """

    what: str
    why: str
    changes: tuple[Change, ...]


@dataclass(frozen=True)
class Cost(Words):
    """One of the largest costs of a plan.

    Attributes:
      seconds: of a call that it takes; what overlaps with computing is not counted.
      share: of the call.
    """

    seconds: float
    share: float

    @property
    def figure(self) -> str:
        """`1.06 ms (13%)`."""
        return f"{seconds_text(self.seconds)} ({percent_text(self.share)})"

    def __str__(self) -> str:
        return f"{self.figure}: {self.what}. {self.why}".rstrip()


def searched(name: str) -> Change:
    """The best other placement of a value that somebody pinned."""
    return Change(f"The best other placement, which plan.explain(why={name!r}) searches for", None)
