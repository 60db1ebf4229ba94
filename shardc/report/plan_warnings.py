"""Warnings about a plan that is about to run: costs that are large and easy to avoid."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardc import compat
from shardc.compat import Eqn
from shardc.errors import number_text
from shardc.ir.collective import known_bytes
from shardc.ir.walk import bytes_of, local_bytes
from shardc.machine.topology import outside_by_default
from shardc.passes.trace.canonicalize import EVERY
from shardc.passes.trace.pins import code_text
from shardc.pipeline.options import Pipeline
from shardc.plan.borders import match_donated
from shardc.report.tables import bytes_text, seconds_text

if TYPE_CHECKING:
    from shardc.pipeline.plan import PlanView
    from shardc.plan.plan import SpmdPlan

LARGE: Final = 10**6
"""Bytes from which on a cost is worth a warning. Sending less, or holding it twice, costs little."""


def warnings_of(plan: PlanView, where: str, replicate: Collection[str] = ()) -> list[str]:
    """The texts of the warnings.

    Args:
      plan: the plan.
      where: the function and its line.
      replicate: primitives that the user wants replicated.
    """
    uneven = [f"{where}: {text}" for _, part in plan.parts for text in uneven_notes(part)]
    return [
        *_without_rule(plan, where, replicate),
        *_not_donated(plan, where),
        *_without_pipeline(plan, where),
        *(f"{where}: {text}" for text in slow_axis_notes(plan)),
        *uneven,
    ]


def slow_axis_notes(plan: PlanView) -> list[str]:
    """A line for each axis that lies on slow links because no part of it fits into what faster ones have left."""
    machine = plan.mesh.topology
    found = [] if machine.layout else outside_by_default(machine, plan.mesh.axes)
    return [
        f"No part of axis {o.axis!r} of {o.size} devices lies within "
        f"{'a switch' if o.dim else 'an NVLink domain' if machine.backend == 'gpu' else 'a chip'} of {machine.kind}, "
        f"which has room for {o.room}: no number from 2 to {o.room} divides {o.parts}. Collectives over it take slower "
        f"links. {o.axis}={o.size // o.parts * (o.parts - 1)} has such a divisor."
        for o in found
    ]


def _without_pipeline(plan: PlanView, where: str) -> Iterator[str]:
    axis = Pipeline().axis
    if plan.program.boundary and plan.mesh.sizes.get(axis, 1) > 1:
        yield (
            f"{where}: the mesh has an axis {axis!r} and the function a stage boundary, at {plan.program.boundary}, "
            "but it is no pipeline: all devices run all stages together. With pipeline=shardc.Pipeline() the stages "
            f"run along {axis!r}, one after the other; to do without, name the axis otherwise."
        )


def _without_rule(plan: PlanView, where: str, replicate: Collection[str]) -> Iterator[str]:
    largest: dict[str, tuple[int, Eqn]] = {}
    for eqn in (e for _, part in plan.parts if part.mesh.size > 1 for e in part.without_rule):
        size = max(sum(map(bytes_of, side)) for side in (eqn.invars, eqn.outvars))
        name = eqn.primitive.name
        if name not in replicate and EVERY not in replicate and size > largest.get(name, (LARGE, None))[0]:
            largest[name] = size, eqn
    for name, (size, eqn) in largest.items():
        yield (
            f"{where}: {name} at {compat.source_line(eqn)} has no sharding rule, so every device computes all of it, "
            f"{bytes_text(size)}, and its operands are gathered. Declare how it may be split with shardc.signature, or "
            f'accept this with replicate="{name}".'
        )


def _not_donated(plan: PlanView, where: str) -> Iterator[str]:
    """A warning about arguments that the function returns updated, all leaves of them, but that are not donated."""
    program, count = plan.program, len(plan.program.given_avals)
    given = plan.request.arguments[:count]
    made = set(compat.variables(program.jaxpr.outvars)) - set(program.jaxpr.invars)
    paths = program.in_paths
    news = [compat.is_literal(v) or v in made for v in program.jaxpr.outvars]
    ties = match_donated(program, [replace(a, donated=True) for a in given])
    back, new = set(ties), {tie for tie, is_new in zip(ties, news, strict=True) if is_new}
    leaves: dict[str, list[int]] = {}
    for i, path in enumerate(paths[:count]):
        leaves.setdefault(path.partition("/")[0], []).append(i)
    # an array that is an argument has no path to go by: it is state if it alone comes back, first of several results
    bare = [i for i in back if i is not None and "/" not in paths[i]]
    first = {i for i, path in zip(ties, program.out_paths, strict=True) if path.partition("/")[0] == "0"}
    guessed = set[int]() if len(bare) == 1 and first.issuperset(bare) else set(bare)
    state = {
        name: sum(local_bytes(program.jaxpr.invars[i], plan.inputs[i], plan.mesh.sizes) for i in own if i in new)
        for name, own in leaves.items()
        if (back - guessed).issuperset(own) and not any(given[i].donated for i in own)
    }
    if sum(state.values()) > LARGE:
        names = [name for name, size in state.items() if size]
        donate = repr(names[0]) if len(names) == 1 else repr(tuple(names))
        yield (
            f"{where}: {' and '.join(names)} {'is' if len(names) == 1 else 'are'} returned as results but not donated: "
            f"during a call each device holds {'its' if len(names) == 1 else 'their'} "
            f"{bytes_text(sum(state.values()))} twice. With donate_argnames={donate} the results reuse the buffers."
        )


def uneven_notes(plan: SpmdPlan) -> list[str]:
    """A line about open results that would be cheaper as uneven splits; empty if they cost little."""
    if (found := plan.uneven) is None:
        return []
    pins = {path: dict(p.items_) for path, p in found.pins}
    code = code_text(pins[""]) if list(pins) == [""] else f"shardc.rules({code_text(pins)})"
    return [
        f"{number_text(len(pins), 'result')} left open would be split unevenly, which a plain jax.Array is not. With "
        f"out_placements={code} a call takes {seconds_text(found.seconds)} instead of {seconds_text(plan.seconds)}, "
        f"sends {bytes_text(found.bytes)} instead of {bytes_text(known_bytes(plan.collectives))}, and gives a "
        "shardc.PlacedArray there."
    ]
