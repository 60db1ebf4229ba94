"""Passes as text: the list of them, and the program after one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from shardc.compat import Jaxpr
from shardc.errors import ArgumentError, did_you_mean
from shardc.passes import PASSES
from shardc.pipeline.plan import MpmdPlan, PlanView
from shardc.report.tables import Section, report_text

Passed: TypeAlias = Sequence[tuple[str, Jaxpr]]
"""Names of passes, and the program that each gave."""


def passes_text(width: int | None = None) -> str:
    """The passes in their order: what each takes and gives, an example, and where it is; folded to a width."""
    rows = [(p.name, p.of, p.takes, p.gives, p.module) for p in PASSES]
    return report_text(
        (
            Section(f"{len(PASSES)} passes, in their order", ("pass", "of", "takes", "gives", "module"), rows),
            Section("Before --> after", lines=[f"{p.name}: {p.example}" for p in PASSES]),
        ),
        width,
    )


def programs_after(plan: PlanView, name: str) -> str:
    """The program of a plan after a pass; where there is one for each stage or task of a pipeline, all of them.

    Raises:
      ArgumentError: no such pass ran on it.
    """
    found: dict[str, Passed] = {}
    if isinstance(plan, MpmdPlan):
        found[""] = plan.pieces.program.passed
    for number, part in plan.parts:
        which = f"stage {number}" if isinstance(plan, MpmdPlan) else ""
        found[which] = [*part.program.passed, ("insert_boxing", part.all_on_device.jaxpr)]
        if part.offloaded is not None:
            found[which] = [*found[which], ("offload", part.boxed.jaxpr)]
    for stage in plan.stages if isinstance(plan, MpmdPlan) else ():
        for task in stage.tasks.all.values():
            if task.plan is not None:
                found[task.plan.program.name] = [("split_tasks", task.plan.boxed.jaxpr)]
    return _one(found, name)


def _one(passed: Mapping[str, Passed], name: str) -> str:
    """The last program that the pass gave, for each of several programs."""
    last = {what: dict(programs)[name] for what, programs in passed.items() if name in dict(programs)}
    if not last:
        ran = list(dict.fromkeys(n for programs in passed.values() for n, _ in programs))
        known = "it did not run on this plan" if name in {p.name for p in PASSES} else "there is no such pass"
        raise ArgumentError(f"after={name!r}: {known}.{did_you_mean(name, ran)} Those that ran are {', '.join(ran)}.")
    return "\n\n".join(
        f"# {what} after {name}".replace("#  after", "# After") + f"\n{jaxpr}" for what, jaxpr in last.items()
    )
