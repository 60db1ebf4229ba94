"""Warnings about a plan that is about to run: costs that are large and easy to avoid."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardc import compat
from shardc.compat import Eqn
from shardc.ir.walk import bytes_of, local_bytes
from shardc.passes.trace.canonicalize import EVERY
from shardc.passes.trace.pins import code_text
from shardc.plan.borders import match_donated
from shardc.report.tables import bytes_text, number_text, seconds_text

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
    return [*_without_rule(plan, where, replicate), *_not_donated(plan, where), *uneven]


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
    news = [compat.is_literal(v) or v in made for v in program.jaxpr.outvars]
    ties = match_donated(program, [replace(a, donated=True) for a in given])
    back, new = set(ties), {tie for tie, is_new in zip(ties, news, strict=True) if is_new}
    leaves: dict[str, list[int]] = {}
    for i, path in enumerate(program.in_paths[:count]):
        leaves.setdefault(path.partition("/")[0], []).append(i)
    state = {
        name: sum(local_bytes(program.jaxpr.invars[i], plan.inputs[i], plan.mesh.sizes) for i in own if i in new)
        for name, own in leaves.items()
        if len(own) > 1 and back.issuperset(own) and not any(given[i].donated for i in own)
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
        f"sends {bytes_text(found.bytes)} instead of {bytes_text(plan.bytes_per_device)}, and gives a "
        "shardc.PlacedArray there."
    ]
