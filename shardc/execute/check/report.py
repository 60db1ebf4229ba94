"""The result of a check: the numbers of a compiled program against those of one device."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from shardc.errors import number_text
from shardc.report.tables import numbers_text, placement_text


@dataclass(frozen=True, slots=True)
class Deviation:
    """A border, or a result, at which numbers differ from those of one device by more than rounding explains.

    Attributes:
      value: the name of the value, as in `explain()`.
      source: the line of user code that made it.
      kind: of the collective at the border; "result" for a result of the program.
      after: whether the numbers after the collective are off, while those before it are right: the collective itself
        moved or summed wrongly. Else the computation before the border is wrong.
      axes: the mesh axes of the collective.
      src, dst: the placements before and after it, as text.
      round: in loops, the round, from 0 on; of nested loops one each.
      devices: the ids of the devices whose pieces are off.
      count, of: elements that are off, and elements compared, on these devices.
      error, bound: the largest difference of such an element, and how much it might have been.
    """

    value: str
    source: str
    kind: str
    after: bool
    axes: tuple[str, ...]
    src: str
    dst: str
    round: tuple[int, ...]
    devices: tuple[int, ...]
    count: int
    of: int
    error: float
    bound: float

    def __str__(self) -> str:
        line = f" ({self.source})" if self.source else ""
        if self.kind == "result":
            head = f"{self.value}{line}"
        else:
            over = f" over {', '.join(self.axes)}" if self.axes else ""
            way = f", {placement_text(self.src)} -> {placement_text(self.dst)}" if self.src or self.dst else ""
            head = f"{'after' if self.after else 'before'} the {self.kind}{over} of {self.value}{line}{way}"
        if self.round:
            head += f", round {', '.join(map(str, self.round))}"
        kind = "device" if len(self.devices) == 1 else "devices"
        return (
            f"{head}: {self.count} of {self.of} elements on {kind} {numbers_text(self.devices)} differ, "
            f"by up to {self.error:.3g} where rounding explains {self.bound:.3g}"
        )


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The result of `compiled.check(...)`. Printed, it says in a line that all is right, or what is off first.

    Attributes:
      off: what differs, in the order of the program; results of the program last.
      borders: how many collectives were compared, each of a loop once.
      results: how many results.
      unlike_alone: whether results of the program differ, but not those of the same program with the values at its
        borders as further results: the fault is gone there, so nothing says where it begins.
      open: what was not compared, in words.
      signatures: how many operations without a rule were held against the signatures that were found for them.
      flags: the flags of XLA in force: variables of the environment, and options of the compiler.
      where: the task of a pipeline; empty for a program of its own.
    """

    off: tuple[Deviation, ...]
    borders: int
    results: int
    unlike_alone: bool = False
    open: tuple[str, ...] = ()
    signatures: int = 0
    flags: tuple[tuple[str, str], ...] = ()
    where: str = ""

    @property
    def ok(self) -> bool:
        """Whether every number is that of one device, but for rounding."""
        return not self.off

    @property
    def first(self) -> Deviation | None:
        """The first border that is off, else the first result; None if all is right."""
        return next(iter(self.off), None)

    def __str__(self) -> str:
        name = f"check of {self.where}" if self.where else "check"
        compared = f"{number_text(self.borders, 'border')} and {number_text(self.results, 'result')}"
        if self.signatures:
            compared += f", {number_text(self.signatures, 'found signature')}"
        rest = [f"  not compared: {text}" for text in self.open]
        if self.first is None:
            return "\n".join([f"{name}: as on one device ({compared})", *rest])
        lines = [f"{name}: {len(self.off)} of {compared} are not as on one device; the first:", f"  {self.first}"]
        if self.unlike_alone:
            lines.append(
                "  no border is off in the program that also returns the values at its borders: the compiler fuses or "
                "orders that one in another way, and the fault is gone there"
            )
        lines += [f"  {name}={value}" for name, value in self.flags] or ["  no flags of XLA are set"]
        return "\n".join([*lines, *rest])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def __repr__(self) -> str:
        """The first line of the text."""
        first = str(self).splitlines()[0]
        return f"CheckReport({first.removeprefix('check').removeprefix(': ').strip()})"


def merged(reports: Sequence[CheckReport]) -> CheckReport:
    """The reports of a pipeline's tasks as one, in the order in which they ran."""
    off = tuple(d for r in reports for d in r.off)
    lines = tuple(dict.fromkeys(text for r in reports for text in r.open))
    flags = tuple(dict.fromkeys(f for r in reports for f in r.flags))
    bad = next((r for r in reports if r.off), None)
    return CheckReport(
        off, sum(r.borders for r in reports), sum(r.results for r in reports), bad is not None and bad.unlike_alone,
        lines, sum(r.signatures for r in reports), flags, "" if bad is None else bad.where,
    )  # fmt: skip
