"""What light operations read and write, when XLA has fused them: less than each of them alone.

A light operation is computed where its result is read. So of a chain of them nothing is written but what something else
reads: a heavy operation, a collective, a loop, the caller. And nothing is read but what was not made by a light one; a
value that several of them read is read once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shardc import compat
from shardc.compat import Eqn, Jaxpr, Var

PARTLY_READ = frozenset(("gather", "slice", "dynamic_slice", "box"))
"""Operations that read of their first operand as much as they give, if that is less."""
UPDATES = {"dynamic_update_slice": 1, "scatter": 2, "scatter-add": 2}
"""Operations that change a part of their first operand in place, and the number of the operand that is put there."""


def fused_bytes(
    jaxpr: Jaxpr, light: Callable[[Eqn], bool], same: Callable[[Eqn], bool], size: Callable[[Var], int]
) -> int:
    """Bytes that the light operations of a jaxpr, without those of nested ones, read and write in one execution.

    Args:
      light: whether an equation is light.
      same: whether its result is its operand.
      size: bytes that a device holds of a value.
    """
    root: dict[Var, Var] = {}
    written: dict[Var, int] = {}  # what light operations make
    for eqn in jaxpr.eqns:
        operands = [root.get(v, v) for v in _variables(eqn.invars)]
        if same(eqn) and len(operands) == 1:
            root[eqn.outvars[0]] = operands[0]
        elif light(eqn):
            update = eqn.invars[UPDATES[eqn.primitive.name]] if eqn.primitive.name in UPDATES else None
            put = size(update) if update is not None and not compat.is_literal(update) else None
            written |= {v: size(v) if put is None else put for v in eqn.outvars}
    read: dict[Var, int] = {}
    wanted: set[Var] = set()
    for eqn in jaxpr.eqns:
        operands = [root.get(v, v) for v in _variables(eqn.invars)]
        if same(eqn):
            continue
        if not light(eqn):
            wanted |= written.keys() & set(operands)
            continue
        given = sum(size(v) for v in eqn.outvars)
        for k, v in enumerate(operands):
            if v in written or (k == 0 and eqn.primitive.name in UPDATES):
                continue
            most = min(size(v), given) if k == 0 and eqn.primitive.name in PARTLY_READ else size(v)
            read[v] = max(read.get(v, 0), most)
    wanted |= written.keys() & {root.get(v, v) for v in _variables(jaxpr.outvars)}
    return sum(read.values()) + sum(written[v] for v in wanted)


def _variables(atoms: Iterable[compat.Atom]) -> Iterable[Var]:
    return (a for a in atoms if not compat.is_literal(a))
