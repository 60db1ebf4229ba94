"""Folds transposes into the products that read them.

    w' = transpose[1, 0] w; y = dot_general[h 2, w' 0] h w'  -->  y = dot_general[h 2, w 1] h w

`x @ w.T` is written so, for torch's linear layers and for tied tables. A product takes its operands in any order of
dimensions, so the transposed copy need not exist, and no plan has to place it.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr, Var, bodies_of


def fold_transposes(jaxpr: Jaxpr) -> Jaxpr:
    """The canonical jaxpr with products of operands that are not transposed; the transposes themselves stay, and are
    dead if nothing else reads them."""
    eqns: list[Eqn] = []
    made: dict[Var, Eqn] = {}
    for old in jaxpr.eqns:
        eqn = old
        if bodies := bodies_of(eqn):
            folded = [fold_transposes(b) for b in bodies]
            if any(new is not body for new, body in zip(folded, bodies, strict=True)):
                eqn = eqn.replace(params=compat.with_bodies(eqn, folded))
        elif eqn.primitive.name == "dot_general":
            eqn = _folded(eqn, made)
        elif eqn.primitive.name == "transpose":
            made[eqn.outvars[0]] = eqn
        eqns.append(eqn)
    if all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True)):
        return jaxpr
    return compat.new_jaxpr(jaxpr.invars, jaxpr.outvars, eqns, jaxpr)


def _folded(eqn: Eqn, made: dict[Var, Eqn]) -> Eqn:
    contracted, batch = eqn.params["dimension_numbers"]
    sides = [_source(x, c, b, made) for x, c, b in zip(eqn.invars, contracted, batch, strict=True)]
    if all(x is old for (x, _, _), old in zip(sides, eqn.invars, strict=True)):
        return eqn
    numbers = (tuple(c for _, c, _ in sides), tuple(b for _, _, b in sides))
    return eqn.replace(invars=[x for x, _, _ in sides], params={**eqn.params, "dimension_numbers": numbers})


def _source(
    x: Atom, contracted: Sequence[int], batch: Sequence[int], made: dict[Var, Eqn]
) -> tuple[Atom, tuple[int, ...], tuple[int, ...]]:
    """An operand before its transposes, and its contracted and batch dimensions there. The others keep their order, in
    which the result has them: where a transpose changes it, the operand stays."""
    while not compat.is_literal(x) and x in made:
        order = made[x].params["permutation"]
        free = [d for d in range(len(order)) if d not in (*contracted, *batch)]
        if [order[d] for d in free] != sorted(order[d] for d in free):
            break
        contracted, batch = [order[d] for d in contracted], [order[d] for d in batch]
        (x,) = made[x].invars
    return x, tuple(contracted), tuple(batch)
