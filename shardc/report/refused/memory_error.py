"""The text of the error for a program that does not fit: the least memory found, its largest values, and fixes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardc import compat
from shardc.compat import Var
from shardc.errors import all_offenders, number_text
from shardc.ir.program import Program
from shardc.passes.place.memory_limit import LimitResult, Trial
from shardc.plan.make import DoesNotFit
from shardc.plan.names import names_of
from shardc.plan.request import Argument
from shardc.report.tables import MOST, Key, bytes_text, fold_leaves, placement_text, seconds_text


def memory_error_text(found: DoesNotFit) -> str:
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
        text = f"With these pins its arguments alone take at least {bytes_text(fitted.arguments)}"
    else:
        text = f"The smallest plan found needs {bytes_text(least.peak)}. At its peak a device holds"
    head = f"{where}, mesh {mesh}: no plan was found that fits in {bytes_text(limit)} per device. {text}:"
    fixes = [_fixes(arguments, fitted, alone), *_with_offload(found)]
    return "\n".join([all_offenders(head, _groups(program, least, largest)), *fixes])


def _with_offload(found: DoesNotFit) -> Iterator[str]:
    """A line about the plan that fits with values on the host, if that is not allowed and there is one."""
    if (plan := found.offloaded) is not None and plan.offloaded is not None:
        yield (
            f'It fits with offload="auto": {number_text(len(plan.offloaded.names), "value")} in the memory of the '
            f"host, {bytes_text(plan.memory.host)} for each device; about {seconds_text(plan.seconds)} a call, "
            f"{seconds_text(plan.time.host)} of it to move them."
        )


def _groups(program: Program, least: Trial, largest: Sequence[tuple[Var, int]]) -> list[str]:
    """Lines with the largest values, most bytes first. Values whose names differ only in numbers share a line."""
    boxed, names = least.boxed, names_of(least.boxed, program).values
    rows: list[tuple[Key, str, int]] = []
    for v, size in largest:
        made = f", made at {names[v].line}" * bool(names[v].line)
        text = f"{compat.short_text(v.aval.shape, v.aval.dtype)} at {placement_text(boxed.placements[v])}{made}"
        rows.append(((text,), str(names[v]), size))
    found = sorted(fold_leaves(rows), key=lambda row: -sum(row[2]))
    lines = [f"{bytes_text(sum(sizes))}  {name}: {text}" for (text,), name, sizes in found[:MOST]]
    if rest := found[MOST:]:
        count = sum(len(sizes) for *_, sizes in rest)
        lines.append(f"{bytes_text(sum(sum(sizes) for *_, sizes in rest))}  in {number_text(count, 'other value')}")
    return lines


def _fixes(arguments: Sequence[Argument], fitted: LimitResult, alone: bool) -> str:
    memory = fitted.least.profile.memory
    fixes: list[str] = []
    if any(a.pin is not None for a in arguments):
        fixes.append("leave large arguments AUTO, or pin them to a split")
    if not any(a.donated for a in arguments) and memory.results > memory.arguments // 4:
        fixes.append("donate the arguments that the results replace, with donate_argnames")
    if not alone and memory.temporaries > memory.arguments:
        fixes.append("split the batch with shardc.accumulate, or put jax.checkpoint around blocks that contain loops")
    fixes.append("use a mesh of more devices")
    return (
        f"To make it fit: {'; '.join(fixes)}. If the devices have more memory, set it: "
        'shardc.make_mesh(..., hbm="95GB").'
    )
