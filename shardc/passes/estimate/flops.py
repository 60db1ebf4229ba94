"""The floating-point operations of a program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from shardc.compat import Jaxpr
from shardc.ir.walk import executions, operation_of, work_dtype
from shardc.machine.mesh import MeshView
from shardc.sbp.signature import find_rule


def flops_by_type(jaxpr: Jaxpr) -> Counter[str]:
    """Floating-point operations of the products, convolutions, factorizations and the like, by the type that they
    compute in. Those of the whole values, each loop with all its rounds; light operations are not counted."""
    found: Counter[str] = Counter()
    for eqn, times in executions(jaxpr):
        if flops := find_rule(operation_of(eqn)).flops:
            found[str(work_dtype(eqn))] += int(times * flops)
    return found


def least_seconds(flops: Mapping[str, int], meshes: Sequence[MeshView]) -> float:
    """Seconds that all devices of these meshes take for so many operations at the rates of their data sheets."""
    return sum(n / sum(m.size * m.topology.peak_in(dtype) for m in meshes) for dtype, n in flops.items())
