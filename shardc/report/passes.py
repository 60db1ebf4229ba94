"""Passes as text: the list of them, and the program after one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from shardc.compat import Jaxpr
from shardc.errors import ArgumentError, did_you_mean
from shardc.passes import PASSES
from shardc.pipeline.plan import MpmdPlan
from shardc.plan.plan import SpmdPlan
from shardc.report.tables import make_table, section

Passed: TypeAlias = Sequence[tuple[str, Jaxpr]]
"""Names of passes, and the program that each gave."""


def passes_text() -> str:
    """The passes in their order: what each takes and gives, an example, and where it is."""
    table = make_table("pass", "of", "takes", "gives", "module")
    for p in PASSES:
        table.add_row(p.name, p.of, p.takes, p.gives, p.module)
    examples = "\n".join(f"  {p.name}: {p.example}" for p in PASSES)
    return "\n\n".join((section(f"{len(PASSES)} passes, in their order", table), f"Before --> after\n{examples}"))


def program_after(plan: SpmdPlan, name: str) -> str:
    """The program of a plan after a pass.

    Raises:
      ArgumentError: no such pass ran on it.
    """
    return _one({"": [*plan.program.passed, ("insert_boxing", plan.boxed.jaxpr)]}, name)


def programs_after(plan: MpmdPlan, name: str) -> str:
    """The program of a pipeline after a pass; where there is one for each stage or task, all of them.

    Raises:
      ArgumentError: no such pass ran on it.
    """
    found: dict[str, Passed] = {"": plan.pieces.program.passed}
    for s in plan.stages:
        of_stage = s.plan.program.passed
        found[f"stage {s.number}"] = [*of_stage, ("insert_boxing", s.plan.boxed.jaxpr)]
        for task in (s.tasks.load, *s.tasks.loop.values(), *s.tasks.updates.values()):
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
