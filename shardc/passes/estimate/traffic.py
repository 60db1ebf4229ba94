"""What light operations read and write, when XLA has fused them: less than each of them alone.

A light operation is computed where its result is read. So of a chain of them nothing is written but what something else
reads: a heavy operation, a collective, a loop, the caller. And nothing is read but what was not made by a light one; a
value that several of them read is read once.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from shardc import compat
from shardc.compat import Jaxpr, Var

PARTLY_READ = frozenset(("gather", "slice", "dynamic_slice", "box"))
"""Operations that read of their first operand as much as they give, if that is less."""
UPDATES = {"dynamic_update_slice": 1, "scatter": 2, "scatter-add": 2}
"""Operations that change a part of their first operand in place, and the number of the operand that is put there."""


def fused_bytes(jaxpr: Jaxpr, light: Set[int], same: Set[int], held: Mapping[Var, int]) -> int:
    """Bytes that the light operations of a jaxpr, without those of nested ones, read and write in one execution.

    Args:
      light: ids of the equations that are light.
      same: ids of those of them whose result is their operand.
      held: bytes that a device holds of a value.
    """
    root: dict[Var, Var] = {}
    written: dict[Var, int] = {}  # what light operations make
    read: dict[Var, int] = {}
    wanted: set[Var] = set()

    for eqn in jaxpr.eqns:
        operands = [root.get(a, a) for a in eqn.invars if not compat.is_literal(a)]
        if id(eqn) not in light:
            wanted.update([v for v in operands if v in written])
            continue
        if id(eqn) in same and operands:
            root[eqn.outvars[0]] = operands[0]
            continue
        name = eqn.primitive.name
        if name in PARTLY_READ and operands and operands[0] not in written:
            v = operands[0]
            read[v] = max(read.get(v, 0), min(held[v], sum(held[out] for out in eqn.outvars)))
        for v in operands[1:] if name in PARTLY_READ or name in UPDATES else operands:
            if v not in written:
                read[v] = held[v]
        put = eqn.invars[UPDATES[name]] if name in UPDATES else None
        for v in eqn.outvars:
            written[v] = held[v if put is None or compat.is_literal(put) else put]
    results = [root.get(a, a) for a in jaxpr.outvars if not compat.is_literal(a)]
    wanted.update([v for v in results if v in written])
    return sum(read.values()) + sum(written[v] for v in wanted)
