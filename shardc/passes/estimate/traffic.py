"""Bytes that light operations read and write once XLA has fused them: less than the sum over operations.

A light operation is fused into its readers. So a chain of them writes only what something else reads: a heavy
operation, a collective, a loop, the caller. It reads only what no light operation made, and each such value once.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from shardc import compat
from shardc.compat import Eqn, Jaxpr, Var

PARTLY_READ = frozenset(("gather", "slice", "dynamic_slice", "box"))
"""Operations that read at most as many bytes of their first operand as they return."""
UPDATED_OPERAND = {"dynamic_update_slice": 1, "scatter": 2, "scatter-add": 2}
"""Operations that update a part of their first operand in place, and the number of the operand that they write
there."""


def fused_bytes(jaxpr: Jaxpr, light: Set[Eqn], same: Set[Eqn], held: Mapping[Var, int]) -> int:
    """Bytes that the light operations of a jaxpr read and write in one execution, without those in nested jaxprs.

    Args:
      light: the light equations.
      same: those light equations whose result is their operand.
      held: bytes of a value on a device.
    """
    root: dict[Var, Var] = {}
    written: dict[Var, int] = {}  # results of light operations
    read: dict[Var, int] = {}
    wanted: set[Var] = set()

    for eqn in jaxpr.eqns:
        operands = [root.get(a, a) for a in eqn.invars if not compat.is_literal(a)]
        if eqn not in light:
            wanted.update([v for v in operands if v in written])
            continue
        if eqn in same and operands:
            root[eqn.outvars[0]] = operands[0]
            continue
        name = eqn.primitive.name
        if name in PARTLY_READ and operands and operands[0] not in written:
            v = operands[0]
            read[v] = max(read.get(v, 0), min(held[v], sum(held[out] for out in eqn.outvars)))
        for v in operands[1:] if name in PARTLY_READ or name in UPDATED_OPERAND else operands:
            if v not in written:
                read[v] = held[v]
        put = eqn.invars[UPDATED_OPERAND[name]] if name in UPDATED_OPERAND else None
        for v in eqn.outvars:
            written[v] = held[v if put is None or compat.is_literal(put) else put]
    results = [root.get(a, a) for a in jaxpr.outvars if not compat.is_literal(a)]
    wanted.update([v for v in results if v in written])
    return sum(read.values()) + sum(written[v] for v in wanted)
