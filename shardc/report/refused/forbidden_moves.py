"""The texts of the errors for what `forbid=` says may not move, and moves all the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from shardc.errors import ForbiddenMoveError, all_offenders
from shardc.ir.collective import Collective
from shardc.passes.audit.audit import Audit, FoundCollective
from shardc.passes.place.problem import Node
from shardc.pipeline.plan import PlanView
from shardc.plan.counterfactual import Counterfactual
from shardc.plan.forbid import Forbidden, forbid_text, is_forbidden
from shardc.plan.plan import SpmdPlan
from shardc.report.explain_why import is_from_user, pin_text, source_of
from shardc.report.tables import MOST, Key, bytes_text, fold_paths, fold_rows, placement_text, times_text


def refuse_planned(plan: PlanView, forbidden: Forbidden, where: str) -> None:
    """Check a plan.

    Raises:
      ForbiddenMoveError: it moves what is forbidden. The error says what, at which lines, and which pins ask for it.
    """
    rows: list[tuple[Key, str, Collective]] = [
        ((c.kind, c.axes, c.value, c.src, c.dst), c.source or "an argument or result", c)
        for _, c in plan.moves if is_forbidden(forbidden, c.kind, plan.mesh.whole_names(c.axes))
    ]  # fmt: skip
    if not rows:
        return
    lines = [_planned_line(fold_paths(sources), found) for _, sources, found in fold_rows(rows)]
    text = f"forbid={forbid_text(forbidden)} cannot be kept: the nearest plan that was found moves"
    parts = [part for _, part in plan.parts if _moves(part, forbidden)]
    moved = all_offenders(f"{where}, mesh {plan.mesh}: {text}", _first(lines))
    raise ForbiddenMoveError("\n".join([moved, *(_asking_pins(part, forbidden) for part in parts)]))


def refuse_compiled(audit: Audit, forbidden: Forbidden, where: str) -> None:
    """Check a compiled program.

    Raises:
      ForbiddenMoveError: it runs a collective that is forbidden, and that is in no plan.
    """
    lines = [
        _compiled_line(c)
        for c in dict.fromkeys((*audit.found, *audit.compiler_added))
        if c.bytes and is_forbidden(forbidden, c.kind, c.crosses)
    ]
    if lines:
        text = f"{where}: the plan keeps forbid={forbid_text(forbidden)}, but what XLA made of it does not. It runs"
        mend = "The program was not run. This is a fault of XLA or of shardc: please report it."
        raise ForbiddenMoveError(f"{all_offenders(text, _first(lines))}\n{mend}")


def _first(lines: Sequence[str]) -> list[str]:
    return [*lines[:MOST], *[f"and {len(lines) - MOST} more"] * (len(lines) > MOST)]


def _planned_line(source: str, found: Sequence[Collective]) -> str:
    c, count = found[0], sum(f.count for f in found)
    way = f", {placement_text(c.src)} -> {placement_text(c.dst)}" if c.src != c.dst else ""
    if not c.is_known:
        what = f"{c.value} at {source}, of which shardc does not know what it moves, over {', '.join(c.axes)}"
        return times_text(what, count)
    sent = bytes_text(sum(f.bytes for f in found))
    return times_text(f"{c.kind} over {', '.join(c.axes)} of {c.value}{way}, {sent}, at {source}", count)


def _compiled_line(c: FoundCollective) -> str:
    at = c.source or f"%{c.name}"
    return times_text(f"{c.kind} over {', '.join(c.crosses)} of {c.value}, {bytes_text(c.bytes)}, at {at}", c.count)


def _moves(plan: SpmdPlan, forbidden: Forbidden) -> bool:
    return any(is_forbidden(forbidden, c.kind, plan.mesh.whole_names(c.axes)) for _, c in plan.moves)


def _asking_pins(plan: SpmdPlan, forbidden: Forbidden) -> str:
    """The user's pins without which a program keeps what is forbidden, as text; or the arguments that were passed in a
    placement without which it does."""
    asked = Counterfactual(plan)
    pins = {n: pin for n, pin in asked.pins.items() if pin.fixed != frozenset()}
    by_user: list[tuple[Key, str, Node]] = [((), source_of(n, p), n) for n, p in pins.items() if is_from_user(n, p)]
    passed: list[tuple[Key, str, Node]] = [
        ((), n.path, n) for n, p in pins.items() if n in asked.problem.sources and not is_from_user(n, p)
    ]
    for rows, one, all_of_them in (
        (by_user, "It can be kept if one of these pins is left open (AUTO):", _ALL_PINS),
        (passed, "It can be kept if one of these arguments is passed in another placement:", _ALL_PASSED),
    ):
        if rows and not _moves(asked.without([n for _, _, n in rows]).plan, forbidden):
            lines: list[str] = []
            for _, names, nodes in fold_rows(rows):
                if not _moves(asked.without(nodes).plan, forbidden):
                    at = ", ".join(dict.fromkeys(pin_text(asked.pins[n], asked.plan.mesh) for n in nodes))
                    lines.append(times_text(f"{fold_paths(names)} at {at}", len(names)))
            return all_offenders(one, _first(lines)) if lines else all_of_them
    return "It is not for the pins: the computation asks for it, or a result that has to be whole. Forbid less."


_ALL_PINS: Final = "The pins together ask for it, no single one does: leave several open (AUTO), or forbid less."
_ALL_PASSED: Final = (
    "The placements in which arguments were passed ask for it together, no single one does: pass them from the host, "
    "or forbid less."
)
