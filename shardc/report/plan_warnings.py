"""Warnings about a plan that is about to run: costs that are large and easy to avoid."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any, Final

from shardc import compat
from shardc.compat import Eqn
from shardc.ir.walk import itemsize_of
from shardc.passes.trace.canonicalize import EVERY
from shardc.pipeline.plan import MpmdPlan
from shardc.plan.borders import match_donated
from shardc.plan.plan import SpmdPlan
from shardc.report.explain import uneven_notes
from shardc.report.tables import bytes_text
from shardc.sbp.placement import local_shape

LARGE: Final = 10**6
"""Bytes from which on a cost is worth a warning. Sending less, or holding it twice, costs little."""


def warnings_of(plan: SpmdPlan | MpmdPlan, where: str, replicate: Collection[str] = ()) -> list[str]:
    """The texts of the warnings.

    Args:
      plan: the plan.
      where: the function and its line.
      replicate: primitives that the user wants replicated.
    """
    uneven = [f"{where}: {text}" for p in plan.programs for text in uneven_notes(p)]
    return [*_without_rule(plan, where, replicate), *_not_donated(plan, where), *uneven]


def _without_rule(plan: SpmdPlan | MpmdPlan, where: str, replicate: Collection[str]) -> Iterator[str]:
    parts = plan.programs
    largest: dict[str, tuple[int, Eqn]] = {}
    for eqn in (e for p in parts if p.mesh.size > 1 for e in p.without_rule):
        size = max(sum(map(_bytes, side)) for side in (eqn.invars, eqn.outvars))
        name = eqn.primitive.name
        if name not in replicate and EVERY not in replicate and size > largest.get(name, (LARGE, None))[0]:
            largest[name] = size, eqn
    for name, (size, eqn) in largest.items():
        yield (
            f"{where}: {name} at {compat.source_line(eqn)} has no sharding rule, so every device computes all of it, "
            f"{bytes_text(size)}, and its operands are gathered. Declare how it may be split with shardc.signature, or "
            f'accept this with replicate="{name}".'
        )


def _bytes(atom: Any) -> int:
    return math.prod(atom.aval.shape) * itemsize_of(atom.aval)


def _not_donated(plan: SpmdPlan | MpmdPlan, where: str) -> Iterator[str]:
    """A warning about arguments that are returned updated, with all their leaves, and not donated."""
    program, count = plan.program, len(plan.program.given_avals)
    given = plan.arguments[:count]
    made = set(compat.variables(program.jaxpr.outvars)) - set(program.jaxpr.invars)
    news = [compat.is_literal(v) or v in made for v in program.jaxpr.outvars]
    ties = match_donated(program, [replace(a, donated=True) for a in given])
    back, new = set(ties), {tie for tie, is_new in zip(ties, news, strict=True) if is_new}
    leaves: dict[str, list[int]] = {}
    for i, path in enumerate(program.in_paths[:count]):
        leaves.setdefault(path.partition("/")[0], []).append(i)
    state = {
        name: sum(_on_a_device(plan, i) for i in own if i in new)
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


def _on_a_device(plan: SpmdPlan | MpmdPlan, i: int) -> int:
    aval = plan.program.in_avals[i]
    return math.prod(local_shape(tuple(aval.shape), plan.inputs[i], plan.mesh.sizes)) * itemsize_of(aval)
