"""Tools to walk programs and to read their equations."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np

from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr, Var
from shardc.ir.nested import NESTED, bodies_of, trips_of
from shardc.sbp.placement import REPLICATED, AxisSizes, Placement, local_shape
from shardc.sbp.signature import Operation, Setting


def bytes_of(var: Var) -> int:
    """Bytes of a whole value."""
    return math.prod(var.aval.shape) * itemsize_of(var.aval)


def renamed(atoms: Iterable[Atom], names: Mapping[Var, Atom]) -> list[Atom]:
    return [a if compat.is_literal(a) else names.get(a, a) for a in atoms]


def with_atoms(eqn: Eqn, names: Mapping[Var, Atom]) -> Eqn:
    """`eqn` with its operands renamed; `eqn` itself if none has another name."""
    same = names.keys().isdisjoint(compat.variables(eqn.invars))
    return eqn if same else eqn.replace(invars=renamed(eqn.invars, names))


def reads_of(eqns: Iterable[compat.Eqn], outvars: Iterable[compat.Atom] = ()) -> Counter[Var]:
    """How often each variable is read by equations, and as a result."""
    return Counter(a for atoms in (*(e.invars for e in eqns), outvars) for a in atoms if not compat.is_literal(a))


def all_eqns(jaxpr: Jaxpr) -> list[compat.Eqn]:
    """The equations of a jaxpr and of its nested bodies, in order."""
    found: list[compat.Eqn] = []
    for eqn in jaxpr.eqns:
        found.append(eqn)
        for body in bodies_of(eqn):
            found += all_eqns(body)
    return found


def executions(jaxpr: Jaxpr, times: int = 1) -> Iterator[tuple[Eqn, int]]:
    """The equations that are not nested, in order, and how often each runs: `times`, in loops as `trips_of` says."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name not in NESTED:
            yield eqn, times
        for body in bodies_of(eqn):
            yield from executions(body, times * trips_of(eqn))


def itemsize_of(aval: Any) -> int:
    """Bytes of one element; for a PRNG key, of its words (`jax.random.key_data`)."""
    dtype = aval.dtype
    try:
        return int(np.dtype(dtype).itemsize)
    except TypeError:
        return int(dtype.itemsize)


def operation_of(eqn: Eqn) -> Operation:
    """The equation as a rule sees it."""
    return Operation(
        eqn.primitive.name, tuple(v.aval for v in eqn.invars), tuple(v.aval for v in eqn.outvars), eqn.params
    )


def setting_of(eqn: Eqn, placements: Mapping[Var, Placement], sizes: AxisSizes) -> Setting:
    """The equation as a rule sees it, with the placements of its operands and results."""
    operands, results = (
        tuple(REPLICATED if compat.is_literal(a) else placements[a] for a in side) for side in (eqn.invars, eqn.outvars)
    )
    return Setting(operation_of(eqn), operands, results, {a: n for a, n in sizes.items() if n > 1})


def work_dtype(eqn: Eqn) -> Any:
    """The type that an operation computes in: that of its first operand, or of its result if it has none."""
    return next((a.aval.dtype for a in (*eqn.invars, *eqn.outvars)), np.dtype(np.float32))


def short_aval(aval: Any) -> str:
    """`f32[8,128]`."""
    return aval.str_short(short_dtypes=True)


def is_narrow_copy(eqn: Eqn) -> bool:
    """Whether an equation makes a copy of a value in the type in which the machine multiplies: it has no line of the
    user's."""
    return eqn.primitive.name == "convert_element_type" and not compat.source_line(eqn)


ADDITIONS: Final = frozenset(("add", "add_any"))


LINEAR: Final = frozenset(
    (
        "convert_element_type",
        "transpose",
        "reshape",
        "squeeze",
        "expand_dims",
        "broadcast_in_dim",
        "neg",
        "copy",
        "copy_p",
    )
)
"""Linear operations of one operand, which are done to each term instead of to the sum."""


def local_bytes(var: Var, placement: Placement, sizes: AxisSizes) -> int:
    return math.prod(local_shape(var.aval.shape, placement, sizes)) * itemsize_of(var.aval)
