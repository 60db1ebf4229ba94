"""Fixes the order of additions, for results that are equal to the bit on every mesh.

    s = reduce_sum x   -->   s = in_order[of=reduce_sum] x

Every operation that rounds becomes `in_order` (`shardc.sbp.rules.in_order`). What only moves, compares or chooses
elements, and what computes in integers, is exact and stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from shardc import compat
from shardc.compat import Eqn, Jaxpr
from shardc.errors import PlacementError, all_offenders
from shardc.ir.constrain import pin_of
from shardc.ir.host_callback import runs_once
from shardc.ir.nested import NESTED, in_bodies
from shardc.ir.program import Program
from shardc.ir.transfer import is_transfer
from shardc.ir.user_shard_map import is_unit
from shardc.ir.walk import all_eqns
from shardc.passes import Context
from shardc.sbp.placement import Pin
from shardc.sbp.rules.in_order import in_order_p
from shardc.sbp.signature import family_of

_EXACT_FAMILIES: Final = ("gather", "ordering", "random", "rearrange", "slicing")
_EXACT: Final = frozenset(
    (
        "abs", "ceil", "clamp", "complex", "conj", "copy", "eq", "eq_to", "floor", "ge", "gt", "imag", "is_finite",
        "layout_constraint", "le", "le_to", "lt", "lt_to", "max", "min", "name", "ne", "neg", "nextafter", "real",
        "round", "scatter", "scatter-max", "scatter-min", "select_n", "sign", "stop_gradient", "reduce_max",
        "reduce_min", "reduce_window_max", "reduce_window_min",
    )
)  # fmt: skip
"""Operations on floats that do not round."""


def fix_order(program: Program, context: Context) -> Program:
    """The program whose operations that round are `in_order`; itself where no order is asked for.

    Raises:
      PlacementError: a shard_map of the user's computes in pieces of its own.
    """
    if not context.grain:
        return program
    units = [e for e in all_eqns(program.jaxpr) if is_unit(e)]
    if units:
        lines = [f"shard_map at {compat.source_line(e)}" for e in units]
        what = f"{program.name}: deterministic=True: what a shard_map adds up depends on its mesh"
        raise PlacementError(all_offenders(what, lines) + "\nWrite it without shard_map, or leave deterministic= out.")
    return program.after("fix_order", _fixed(program.jaxpr, context.grain))


def sums_in_parts(program: Program, arguments: Sequence[Pin | None], results: Sequence[Pin | None]) -> list[str]:
    """A line for each pin of a value of floats to a partial sum, of which no device knows the order."""
    inside = [(f"the value at {compat.source_line(e)}", pin_of(e), e.outvars[0].aval) for e in _pins(program.jaxpr)]
    ends = [
        *zip(program.in_paths, arguments, program.in_avals, strict=False),
        *zip((f"result {p}".rstrip() for p in program.out_paths), results, program.out_avals, strict=True),
    ]
    return [
        f"{path} at {pin.placement}: deterministic= leaves no partial sum; split it, or leave it open."
        for path, pin, aval in (*ends, *inside)
        if pin is not None and pin.placement.partial_op == "sum" and _is_inexact(aval)
    ]


def _pins(jaxpr: Jaxpr) -> list[Eqn]:
    return [e for e in all_eqns(jaxpr) if pin_of(e) is not None]


def _fixed(jaxpr: Jaxpr, grain: int) -> Jaxpr:
    eqns = [_fixed_eqn(e, grain) for e in jaxpr.eqns]
    return compat.new_jaxpr(jaxpr.invars, jaxpr.outvars, eqns, jaxpr)


def _fixed_eqn(eqn: Eqn, grain: int) -> Eqn:
    if eqn.primitive.name in NESTED:
        return in_bodies(eqn, lambda body: _fixed(body, grain))
    if not _rounds(eqn):
        return eqn
    return eqn.replace(primitive=in_order_p, params={**eqn.params, "of": eqn.primitive, "grain": grain})


def _rounds(eqn: Eqn) -> bool:
    name = eqn.primitive.name
    if pin_of(eqn) is not None or is_transfer(eqn) or runs_once(eqn):
        return False
    if name in _EXACT or (family_of(name) in _EXACT_FAMILIES and name != "random_gamma"):
        return False
    return any(_is_inexact(v.aval) for v in eqn.outvars)


def _is_inexact(aval: Any) -> bool:
    return isinstance(aval.dtype, np.dtype) and jnp.issubdtype(aval.dtype, np.inexact)
