"""Folds transposes into the products that read them.

    w' = transpose[1, 0] w; y = dot_general[h 2, w' 0] h w'  -->  y = dot_general[h 2, w 1] h w

`x @ w.T` is written so, for torch's linear layers and for tied tables. A product takes its operands in any order of
dimensions, so the transposed copy need not exist, and no plan has to place it.
"""

from __future__ import annotations

from shardc import compat
from shardc.compat import Eqn, Jaxpr, Var
from shardc.ir.nested import in_bodies


def fold_transposes(jaxpr: Jaxpr) -> Jaxpr:
    """The canonical jaxpr without transposes that only products read, where these can read the operand as it is."""
    made = _folded_in(jaxpr)
    return made if made is jaxpr else compat.remove_dead(made, [True] * len(made.outvars))


def _folded_in(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr with folded transposes, which nobody reads any more."""
    eqns = [in_bodies(e, _folded_in) for e in jaxpr.eqns]
    readers: dict[Var, list[int]] = {}
    for n, eqn in enumerate(eqns):
        for v in compat.variables(eqn.invars):
            readers.setdefault(v, []).append(n)
    results = set(compat.variables(jaxpr.outvars))
    for n in reversed(range(len(eqns))):
        if (eqn := eqns[n]).primitive.name != "transpose":
            continue
        (x,), (out,) = eqn.invars, eqn.outvars
        if out in results or compat.is_literal(x):
            continue
        reading = {k: _folded(eqns[k], eqn) for k in readers.get(out, ())}
        if reading and all(new is not None for new in reading.values()):
            for k, new in reading.items():
                eqns[k] = new or eqns[k]
            readers[x] = [k for k in readers[x] if k != n] + list(reading)
    if all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True)):
        return jaxpr
    return compat.new_jaxpr(jaxpr.invars, jaxpr.outvars, eqns, jaxpr)


def _folded(eqn: Eqn, transpose: Eqn) -> Eqn | None:
    """A product that reads the operand of a transpose; None if this is no product, or if its result would have its
    dimensions in another order."""
    if eqn.primitive.name != "dot_general":
        return None
    (x,), (out,), order = transpose.invars, transpose.outvars, transpose.params["permutation"]
    contracted, batch = (list(sides) for sides in eqn.params["dimension_numbers"])
    operands = list(eqn.invars)
    for side, operand in enumerate(eqn.invars):
        if operand is out:
            free = [order[d] for d in range(len(order)) if d not in (*contracted[side], *batch[side])]
            if free != sorted(free):
                return None
            operands[side] = x
            contracted[side], batch[side] = (tuple(order[d] for d in dims) for dims in (contracted[side], batch[side]))
    return eqn.replace(invars=operands, params={**eqn.params, "dimension_numbers": (tuple(contracted), tuple(batch))})
