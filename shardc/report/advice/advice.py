"""The largest costs of a plan in words, each with what would change it and by how much. Texts and pages print them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from shardc.ir.collective import unknown_among
from shardc.pipeline.plan import MpmdPlan, PlanView
from shardc.report.advice import moves, waits, work
from shardc.report.advice.cost import Change, Cost, Words
from shardc.report.advice.elsewhere import Asked
from shardc.report.advice.pieces import Reason, TimePiece, by_cost, pieces_of, seconds_of
from shardc.report.tables import Section, bytes_text, seconds_text

MOST: Final = 3
"""The costs that are listed."""
LEAST: Final = 1e-3
"""The share of a call from which on a cost is listed. Smaller ones print as `less than 0.1%`."""

_WORDS: Final[Mapping[Reason, Callable[[Asked, Sequence[TimePiece]], Words]]] = {
    "argument": moves.of_argument, "result": moves.of_result, "constraint": moves.of_constraint, "sum": moves.of_sum,
    "value": moves.of_value, "window": moves.of_window, "unsplit": work.of_unsplit, "recomputed": work.of_recomputed,
    "repeated": work.of_repeated, "computing": work.of_computing, "memory": work.of_memory, "host": waits.of_host,
    "launch": waits.of_launch, "transfers": waits.of_transfers, "bubble": waits.of_bubble,
}  # fmt: skip


@dataclass(frozen=True)
class Advice:
    """The largest costs of a plan, for a report.

    Attributes:
      title: a heading.
      costs: the largest ones, the dearest first; of a pipeline those of the rank that waits least.
      rest: lines about the plan as a whole: other placements and meshes, memory, schedules, what is unknown.
    """

    title: str
    costs: Sequence[Cost]
    rest: Sequence[str]

    @property
    def section(self) -> Section:
        """It as text."""
        costs = enumerate(self.costs, 1)
        lines = [line for n, cost in costs for line in (f"{n}. {cost}", *(f"   - {c}" for c in cost.changes))]
        return Section(self.title, lines=[*lines, *self.rest])


def advice_on(plan: PlanView) -> Advice | None:
    """The largest costs of a plan; None of one that takes no time."""
    asked = Asked(plan)
    found = [pieces for pieces in by_cost(call_pieces(plan))[:MOST] if seconds_of(pieces) > LEAST * plan.seconds]
    costs = [_cost(asked, pieces) for pieces in found]
    whose = f" on rank {waits.rank_of(plan)}, which waits least" if isinstance(plan, MpmdPlan) else ""
    title = f"Largest costs of the {seconds_text(plan.seconds)} of a call{whose}, and what would change them"
    return Advice(title, costs, list(_rest(plan))) if costs else None


def _cost(asked: Asked, pieces: Sequence[TimePiece]) -> Cost:
    words, seconds = _WORDS[pieces[0].reason](asked, pieces), seconds_of(pieces)
    changes = tuple(c for c in words.changes if c.is_worth_a_line(seconds))
    return Cost(words.what, words.why, changes, seconds, seconds / asked.plan.seconds)


def call_pieces(plan: PlanView) -> list[TimePiece]:
    """The pieces of a call; of a pipeline, of the rank that waits least. They add up to `plan.seconds`."""
    found = [TimePiece("launch", (), plan.time.launch)]
    if not isinstance(plan, MpmdPlan):
        return [*pieces_of(plan), *found]
    wait, loops = plan.time.wait, plan.cut.loop.length
    for task in plan.built.tasks.values():
        stage = plan.stages[task.id.stage]
        if task.plan is not None and stage.rank == waits.rank_of(plan):
            found += pieces_of(task.plan, stage.names, loops if task.id.in_loop else 1)
    transfers = min(waits.transfer_seconds(plan), wait)
    return [*found, TimePiece("transfers", (), transfers), TimePiece("bubble", (), wait - transfers)]


def _rest(plan: PlanView) -> Iterator[str]:
    if isinstance(plan, MpmdPlan):
        yield from map(str, waits.other_schedule(plan))
    elif plan.gap is not None and plan.mesh.size > 1:
        saved = seconds_text(plan.gap * plan.seconds)
        less = "is faster" if saved == "0 s" else f"takes more than {saved} less"
        yield f"With these pins, on this mesh, no placement {less}. Other meshes: unknown; shardc tune plans them."
    if (free := plan.unlimited) is not None and free.seconds < plan.seconds:
        what = f"Memory for a peak of {bytes_text(free.peak)} on each device"
        yield str(Change(what, plan.seconds - free.seconds, "about"))
    if unknown := unknown_among(c for _, c in plan.moves):
        yield f"What moves in {', '.join(unknown)} is unknown, and not among these costs."
