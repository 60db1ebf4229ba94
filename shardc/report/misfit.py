"""What is said of a program that does not fit: how much memory would do, what fills it, and what would make it less."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from shardc import compat
from shardc.compat import Var
from shardc.errors import all_offenders
from shardc.ir.box import box_p
from shardc.ir.program import Program
from shardc.ir.walk import all_eqns
from shardc.passes.place.memory_limit import LimitResult, Trial
from shardc.plan.make import Misfit
from shardc.plan.request import Argument
from shardc.report.tables import bytes_text, fold_leaves, placement_text

NAMED: Final = 8
"""How many of the largest groups of values are named."""


def misfit_text(found: Misfit) -> str:
    """The text of the error."""
    request, fitted, limit = found.request, found.fitted, found.limit
    program, mesh, arguments, where = (
        request.program,
        request.mesh,
        request.arguments,
        request.where or request.program.name,
    )
    least, alone = fitted.least, fitted.arguments > limit
    largest = least.profile.largest()
    if alone:
        largest = [(v, size) for v, size in largest if v in least.boxed.jaxpr.invars]
        said = f"Its arguments alone take at least {bytes_text(fitted.arguments)} within what is pinned"
    else:
        said = f"{bytes_text(least.peak)} would do, the least that was found. At its fullest a device then holds"
    head = f"{where}, mesh {mesh}: no placement was found that fits {bytes_text(limit)} on each device. {said}:"
    return "\n".join([all_offenders(head, _groups(program, least, largest)), _fixes(program, arguments, fitted, alone)])


def _groups(program: Program, least: Trial, largest: Sequence[tuple[Var, int]]) -> list[str]:
    """One line for values that are alike but for numbers in their names, the most bytes first."""
    boxed = least.boxed
    names = {v: _maker(e) for e in all_eqns(boxed.jaxpr) for v in e.outvars}
    names |= dict(zip(boxed.jaxpr.invars, program.in_paths, strict=True))
    rows = [
        ((compat.short_text(v.aval.shape, v.aval.dtype), placement_text(boxed.placements[v])), names.get(v, ""), size)
        for v, size in largest
    ]
    found = sorted(fold_leaves(rows), key=lambda row: -sum(row[2]))
    lines = [f"{bytes_text(sum(sizes))}  {path}: {key[0]} at {key[1]}" for key, path, sizes in found[:NAMED]]
    if rest := found[NAMED:]:
        count = sum(len(sizes) for *_, sizes in rest)
        lines.append(f"{bytes_text(sum(sum(sizes) for *_, sizes in rest))}  in {count} more")
    return lines


def _maker(eqn: compat.Eqn) -> str:
    """The primitive and the line of the user's code; of a boxing what is boxed."""
    if eqn.primitive is box_p:
        return f"boxed from {placement_text(eqn.params['src'])}: {eqn.params['source']}"
    return f"{eqn.primitive.name} ({compat.source_line(eqn)})"


def _fixes(program: Program, arguments: Sequence[Argument], fitted: LimitResult, alone: bool) -> str:
    memory = fitted.least.profile.memory
    fixes: list[str] = []
    if any(a.pin is not None for a in arguments):
        fixes.append("leave large arguments AUTO or pin them to a split")
    if not any(a.donated for a in arguments) and memory.results > memory.arguments // 4:
        fixes.append("name what the results replace in donate_argnames")
    if not alone and memory.temporaries > memory.arguments:
        fixes.append("take less at once with shardc.accumulate, or put jax.checkpoint around blocks that hold loops")
    fixes.append("use a mesh of more devices")
    return f'To make it fit: {"; ".join(fixes)}. If devices have more, say so: shardc.make_mesh(..., hbm="95GB").'
