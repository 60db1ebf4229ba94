"""Results that nobody pinned and that would be cheaper uneven.

A result that is left open is a plain jax.Array, and JAX has no uneven splits. What that costs is said.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from shardc.ir.collective import known_bytes
from shardc.machine.mesh import MeshView
from shardc.passes.place.insert_boxing import insert_boxing
from shardc.passes.place.place import Placer
from shardc.passes.place.problem import Node
from shardc.plan.borders import problem_of
from shardc.plan.plan import SpmdPlan, UnevenResults
from shardc.sbp.placement import is_even

LARGE: Final = 10**6
"""Bytes that a device sends in one call, up to which nothing is looked for."""
WORTH: Final = 0.2
"""The part of the time that uneven results have to save, if they do not save most of the bytes."""


def uneven_results(plan: SpmdPlan) -> UnevenResults | None:
    """The best plan with uneven results; None if the results of this one cost little."""
    if known_bytes(plan.collectives) <= LARGE or plan.unlimited is not None:
        return None
    problem, mesh = problem_of(plan.request, plan.ties), plan.mesh
    open_ = [n for n in problem.sinks if n.kind == "sink" and n.plain and _may_be_uneven(n, mesh)]
    if not open_:
        return None
    for n in open_:
        n.uneven = True
    placer = Placer(problem, mesh)
    placed = placer.placed(placer.tables.best(proved=False))
    outputs = tuple(placed.ports[n][0] for n in problem.sinks)
    avals = plan.program.out_avals
    pins = tuple(
        (path, p)
        for path, aval, p in zip(plan.program.out_paths, avals, outputs, strict=True)
        if not is_even(aval.shape, p, mesh.sizes)
    )
    boxed = insert_boxing(problem, placed, mesh)
    inputs = tuple(placed.ports[n][-1] for n in problem.sources)
    other = replace(plan, boxed=boxed, inputs=inputs, outputs=outputs)
    limit = plan.request.limit
    fits = limit is None or other.memory.peak <= limit
    before, after = known_bytes(plan.collectives), known_bytes(other.collectives)
    most = 1.0 if 2 * after < before else 1 - WORTH
    if not pins or not fits or other.seconds > most * plan.seconds:
        return None
    return UnevenResults(pins, other.seconds, after)


def _may_be_uneven(n: Node, mesh: MeshView) -> bool:
    """Whether some axis splits a dimension unevenly and leaves every device a part of it."""
    value = n.operands[0]
    return value is not None and any(d > k > 1 and d % k for d in value.shape for k in mesh.sizes.values())
