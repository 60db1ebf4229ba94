"""The passes that run if they are cheaper: a program is planned with and without each, and the cheaper plan is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from shardc.ir.program import Program
from shardc.passes import passes_that_run
from shardc.plan.request import Request

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RewriteTrial:
    """A rewrite that was planned.

    Attributes:
      name: of the pass.
      seconds, before: of a call with and without it; infinite where no plan was found that fits.
      taken: whether it was cheaper than what was tried before.
    """

    name: str
    seconds: float
    before: float
    taken: bool


@dataclass(frozen=True, eq=False)
class Compared(Generic[T]):
    """The best of the plans that were made of one request's program and of rewritten ones.

    Attributes:
      request: the one that the best plan is of.
      best: that plan.
      found: all plans.
      trials: the rewrites that were planned.
    """

    request: Request
    best: T
    found: tuple[T, ...]
    trials: tuple[RewriteTrial, ...] = ()


def compare(
    request: Request, plan: Callable[[Request, T | None], T | None], cost: Callable[[T], float],
    cheaper: Callable[[T, T], bool],
) -> Compared[T]:  # fmt: skip
    """The plans of a request's program and of what rewrites make of it.

    Args:
      plan: the plan of a request, given the best one so far; None for a rewritten program that cannot be planned.
      cost: the seconds of a plan.
      cheaper: whether the first of two plans is to be taken instead of the second.
    """
    first = plan(request, None)
    assert first is not None
    now = Compared(request, first, (first,))
    for rewrite in passes_that_run("if cheaper"):
        given, before = now.request, now.best
        for program in rewrite.made(given.program, given.context):
            other = replace(given, program=program)
            if (found := plan(other, before)) is None:
                continue
            taken = cheaper(found, now.best)
            trial = RewriteTrial(rewrite.name, cost(found), cost(before), taken)
            best = (other, found) if taken else (now.request, now.best)
            now = Compared(*best, (*now.found, found), (*now.trials, trial))
    return now


def rewrites_of(program: Program) -> tuple[str, ...]:
    """The rewrites that made a program, in their order: those that were cheaper, and what the machine asks for."""
    names = [*(p.name for p in passes_that_run("if cheaper")), "narrow_products"]
    return tuple(name for name, _ in program.passed if name in names)
