"""Rewrites that the search decides about: a program is planned with and without each, and the cheaper plan is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from shardc.ir.program import Program
from shardc.passes.trace.share_loops import share_loops
from shardc.plan.request import Request


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A pass that changes what can be planned.

    Attributes:
      name: of the pass.
      programs: those that it makes of a request's program; none where it does not apply. The second argument is
        `Program.shared` of a saved plan, None without one.
    """

    name: str
    programs: Callable[[Request, Sequence[int] | None], Iterator[Program]]


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


def _shared_loops(request: Request, known: Sequence[int] | None) -> Iterator[Program]:
    """Each loop over split rows shared among the devices that the pins split its rows over, and among all."""
    pins, program, mesh = [a.pin for a in request.arguments], request.program, request.mesh
    made = share_loops(program, pins, mesh, request.replicate, known)
    if made is program:
        return
    yield made
    everywhere = [mesh.size if n > 1 else 1 for n in made.shared]
    if known is None and everywhere != list(made.shared):
        yield share_loops(program, pins, mesh, request.replicate, everywhere)


REWRITES: Final = (Rewrite("share_loops", _shared_loops),)


def rewrites_of(program: Program) -> tuple[str, ...]:
    """The rewrites that made a program, in their order."""
    names = [r.name for r in REWRITES]
    return tuple(name for name, _ in program.passed if name in names)


def rewritten(request: Request, names: Sequence[str], shared: Sequence[int]) -> Request:
    """The request of a saved plan: its program by the rewrites that were taken, and their `Program.shared`."""
    for rewrite in REWRITES:
        if rewrite.name in names:
            request = replace(request, program=next(rewrite.programs(request, shared), request.program))
    return request
