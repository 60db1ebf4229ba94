"""Memory of a plan, per device: what the pieces of a boxed program need while it runs.

An estimate from above in the order of the program: XLA may reorder, fuse and reuse, and adds its own scratch memory.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from shardc import compat
from shardc.compat import Jaxpr, Var
from shardc.passes.canonicalize import NESTED
from shardc.passes.problem import itemsize_of
from shardc.sbp.placement import REPLICATED, AxisSizes, Placement, local_shape


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes per device. `peak` is arguments, results and the most that lives between them at one time."""

    arguments: int
    results: int
    temporaries: int

    @property
    def peak(self) -> int:
        return self.arguments + self.temporaries


def bytes_of(var: Var) -> int:
    """Bytes of a whole value."""
    return math.prod(var.aval.shape) * itemsize_of(var.aval)


def local_bytes(var: Var, placement: Placement, sizes: AxisSizes) -> int:
    return math.prod(local_shape(var.aval.shape, placement, sizes)) * itemsize_of(var.aval)


def estimate_memory(
    jaxpr: Jaxpr, placements: Mapping[Var, Placement], sizes: AxisSizes, aside: Collection[Var] = ()
) -> Memory:
    """Peak by liveness: every value lives from its equation to its last reader.

    Args:
      jaxpr: boxed.
      placements: of its values.
      sizes: of the mesh's axes.
      aside: values that are counted elsewhere.
    """

    def size(var: Var) -> int:
        return 0 if var in aside else local_bytes(var, placements[var], sizes)

    def peak(body: Jaxpr) -> int:
        last: dict[Var, int] = {}
        for i, eqn in enumerate(body.eqns):
            last |= {v: i for v in eqn.invars if not compat.is_literal(v)}
        last |= {v: len(body.eqns) for v in body.outvars if not compat.is_literal(v)}
        inputs = set(body.invars)
        live = most = 0
        for i, eqn in enumerate(body.eqns):
            live += sum(size(v) for v in eqn.outvars)
            most = max(most, live + max((peak(b) for b in bodies_of(eqn)), default=0))
            ends = {v for v in (*eqn.invars, *eqn.outvars) if not compat.is_literal(v) and last.get(v, i) == i}
            live -= sum(size(v) for v in ends if v not in inputs)
        return most

    arguments = sum(size(v) for v in jaxpr.invars)
    results = sum(size(v) for v in jaxpr.outvars if not compat.is_literal(v))
    return Memory(arguments, results, peak(jaxpr))


def working_bytes(eqn: compat.Eqn) -> int:
    """Bytes of what an equation makes, and of the most that lives in its bodies, on one device that holds all."""
    whole: Mapping[Var, Placement] = defaultdict(lambda: REPLICATED)
    inside = max((estimate_memory(body, whole, {}).temporaries for body in bodies_of(eqn)), default=0)
    return sum(bytes_of(v) for v in eqn.outvars) + inside


def bodies_of(eqn: compat.Eqn) -> list[Jaxpr]:
    """The nested jaxprs of an equation."""
    found: list[Jaxpr] = []
    for key in NESTED.get(eqn.primitive.name, ()):
        body = eqn.params[key]
        found += [getattr(b, "jaxpr", b) for b in (body if isinstance(body, tuple) else (body,))]
    return found


def all_eqns(jaxpr: Jaxpr) -> list[compat.Eqn]:
    """The equations of a jaxpr and of its nested bodies, in order."""
    found: list[compat.Eqn] = []
    for eqn in jaxpr.eqns:
        found.append(eqn)
        for body in bodies_of(eqn):
            found += all_eqns(body)
    return found
