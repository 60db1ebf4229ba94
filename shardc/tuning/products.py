"""The products of plans by the pieces that each device multiplies.

Plans with equal pieces split the work alike, whatever the axes of their meshes are called.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from shardc import compat
from shardc.api import AnyPlan
from shardc.compat import Var
from shardc.ir.walk import executions, operation_of, short_aval
from shardc.sbp.placement import AxisSizes, Placement, local_shape
from shardc.sbp.signature import find_rule

ALIKE: Final = 0.95
"""The share of equal pieces in the operations of two plans above which they split the work alike: a light product may
be split otherwise, or recomputed."""


def pieces_of(plan: AnyPlan) -> Counter[str]:
    """Operations of the products, convolutions and the like of all stages, by the types and shapes of their pieces."""
    found: Counter[str] = Counter()
    for _, part in plan.parts:
        at, sizes = part.boxed.placements, part.mesh.sizes
        for eqn, times in executions(part.boxed.jaxpr):
            if flops := find_rule(operation_of(eqn)).flops:
                reads = _pieces(compat.variables(eqn.invars), at, sizes)
                found[f"{eqn.primitive} of {reads} to {_pieces(eqn.outvars, at, sizes)}"] += int(times * flops)
    return found


def _pieces(values: Iterable[Var], at: Mapping[Var, Placement], sizes: AxisSizes) -> str:
    return ", ".join(short_aval(v.aval.update(shape=local_shape(v.aval.shape, at[v], sizes))) for v in values)


def split_alike(plans: Sequence[Counter[str]]) -> list[list[int]]:
    """The groups of two or more plans, by number, that split the work as the first of the group does."""
    groups: list[list[int]] = []
    for i, pieces in enumerate(plans):
        group = next((g for g in groups if _shared(plans[g[0]], pieces) > ALIKE), None)
        if group is None:
            groups.append([i])
        else:
            group.append(i)
    return [g for g in groups if len(g) > 1]


def _shared(a: Counter[str], b: Counter[str]) -> float:
    most = max(a.total(), b.total())
    return (a & b).total() / most if most else 0.0
