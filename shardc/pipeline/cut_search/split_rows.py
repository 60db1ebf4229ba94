"""Splits equations on stacked values, whose dimension 0 counts layers, into equations on some rows.

    c = add a b            -->  c[0:3] = add a[0:3] b[0:3]; c[3:5] = add a[3:5] b[3:5]
    n = reduce_sum[0 1] a  -->  n0 = reduce_sum[0 1] a[0:3]; n1 = reduce_sum[0 1] a[3:5]; n = add n0 n1

The factors of an equation's rule decide which form applies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax

from shardc import compat
from shardc.compat import Atom, Eqn, Var
from shardc.ir.nested import NESTED
from shardc.ir.walk import operation_of
from shardc.sbp.placement import ReduceOp
from shardc.sbp.signature import Rule, bind_same, find_rule

SHAPES: Final = {"broadcast_in_dim": "shape", "reshape": "new_sizes"}
"""Operations that have the shape of their result as a parameter."""


@dataclass(frozen=True)
class RowUse:
    """How an equation uses the rows of its operands.

    Attributes:
      stacked: for each operand, whether its dimension 0 is the rows; other operands are read whole.
      op: None: each row of the results comes from the same row of the operands. Otherwise the results are this
        reduction over all rows.
    """

    stacked: tuple[bool, ...]
    op: ReduceOp | None


def row_use(eqn: Eqn) -> RowUse | None:
    """How an equation uses the rows of its values; None if it cannot be split by rows."""
    if eqn.primitive.name in NESTED or eqn.effects:
        return None
    rule = find_rule(operation_of(eqn))
    if rule.local is not bind_same and eqn.primitive.name not in SHAPES:
        return None
    kept = {factors[0] for factors in rule.results if factors}
    if len(kept) == 1 and all(rule.results) and (use := _use(rule, next(iter(kept)), None)) is not None:
        return use if _fits(eqn, use) else None
    for factor, op in rule.reduced.items():
        if op is not None and (use := _use(rule, factor, op)) is not None and _fits(eqn, use):
            return use
    return None


def _use(rule: Rule, factor: str | None, op: ReduceOp | None) -> RowUse | None:
    """The use of rows that are this factor; None if it is not the first dimension, or if it may not be split."""
    if factor is None or factor in rule.granule or factor in rule.crossing:
        return None
    sides = (*rule.operands, *rule.results)
    if any(factor in factors[1:] for factors in sides) or (op is not None and any(factor in f for f in rule.results)):
        return None
    stacked = tuple(factors[:1] == (factor,) for factors in rule.operands)
    return RowUse(stacked, op) if op is None or any(stacked) else None


def _fits(eqn: Eqn, use: RowUse) -> bool:
    """Whether the equation is valid for one row."""
    outs = [_with_rows(v.aval, 1) if use.op is None else v.aval for v in eqn.outvars]
    ins = [
        jax.ShapeDtypeStruct((1, *a.aval.shape[1:]) if stacked else a.aval.shape, a.aval.dtype)
        for a, stacked in zip(eqn.invars, use.stacked, strict=True)
    ]
    try:
        found = jax.eval_shape(compat.bind_with(eqn.primitive, _params(eqn, use, 1)), *ins)
    except (TypeError, ValueError):
        return False
    return [(v.shape, v.dtype) for v in found] == [(a.shape, a.dtype) for a in outs]


def rows_of(v: Var, count: int) -> Var:
    """A fresh variable for `count` rows of a stacked one."""
    return compat.fresh_var(_with_rows(v.aval, count))


def piece_eqn(eqn: Eqn, use: RowUse, count: int, operands: Sequence[Atom]) -> Eqn:
    """The equation for `count` rows of given operands; its results are fresh variables."""
    outs = [rows_of(v, count) if use.op is None else compat.fresh_var(v.aval) for v in eqn.outvars]
    return eqn.replace(invars=list(operands), outvars=outs, params=_params(eqn, use, count))


def _params(eqn: Eqn, use: RowUse, count: int) -> dict[str, Any]:
    name = SHAPES.get(eqn.primitive.name)
    if name is None or use.op is not None:
        return eqn.params
    return {**eqn.params, name: (count, *eqn.params[name][1:])}


def _with_rows(aval: Any, count: int) -> Any:
    return aval.update(shape=(count, *aval.shape[1:]))
