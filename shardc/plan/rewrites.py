"""Rewrites that the search decides about: a program is planned with and without each, and the cheaper plan is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from shardc.ir.program import Program
from shardc.passes.trace.chain_transforms import chain_transforms
from shardc.passes.trace.share_loops import share_loops
from shardc.passes.trace.windows.compose_windows import compose_windows
from shardc.plan.request import Request
from shardc.sbp.placement import Pin, Placement


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


def _composed_windows(request: Request, _: Sequence[int] | None) -> Iterator[Program]:
    """Slices, padding, joins and writes of one array as windows of it."""
    made = compose_windows(request.program)
    if made is not request.program:
        yield made


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


def _chained_transforms(request: Request, _: Sequence[int] | None) -> Iterator[Program]:
    """All transforms of several dimensions in chains of transforms of one."""
    made = chain_transforms(request.program, [a.pin for a in request.arguments])
    if made is not request.program:
        yield made


REWRITES: Final = (
    Rewrite("compose_windows", _composed_windows),
    Rewrite("chain_transforms", _chained_transforms),
    Rewrite("share_loops", _shared_loops),
)


def rewrites_of(program: Program) -> tuple[str, ...]:
    """The rewrites that made a program, in their order."""
    names = [r.name for r in REWRITES]
    return tuple(name for name, _ in program.passed if name in names)


def rewritten(
    request: Request, names: Sequence[str], shared: Sequence[int], pinned: Mapping[str, Placement]
) -> Request:  # fmt: skip
    """The request of a saved plan: its program by the rewrites that were taken.

    Args:
      names: of the rewrites.
      shared: `Program.shared`.
      pinned: the placements of the arguments that were pinned when they were taken, by path.
    """
    paths = zip(request.program.in_paths, request.arguments, strict=False)
    arguments = [replace(a, pin=Pin(pinned[path]) if path in pinned else None) for path, a in paths]
    asked = replace(request, arguments=arguments)
    for rewrite in REWRITES:
        if rewrite.name in names:
            asked = replace(asked, program=next(rewrite.programs(asked, shared), asked.program))
    return replace(request, program=asked.program)
