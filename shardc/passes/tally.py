"""What a boxed program costs: its collectives, and the time that it computes and moves. Read off the program itself."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from shardc import compat
from shardc.compat import Eqn, Jaxpr, Var
from shardc.mesh import MeshView
from shardc.passes.canonicalize import NESTED
from shardc.passes.collective import Collective, Kind
from shardc.passes.constrain import pin_of
from shardc.passes.insert_boxing import Boxed, box_p
from shardc.passes.memory import bodies_of
from shardc.passes.problem import itemsize_of, operation_of
from shardc.passes.transfer import is_transfer
from shardc.passes.unit import is_unit, unit_moves
from shardc.sbp.boxing import find_boxing
from shardc.sbp.cost import compute_seconds
from shardc.sbp.piece import internal_steps, sent_cost
from shardc.sbp.placement import REPLICATED, Placement, local_shape
from shardc.sbp.signature import Rule, Setting, find_rule, shared_by


@dataclass(frozen=True)
class Tally:
    """Of one call: the collectives in the order of the program, and seconds, without overlap."""

    collectives: tuple[Collective, ...]
    compute_seconds: float
    moving_seconds: float

    @property
    def seconds(self) -> float:
        return self.compute_seconds + self.moving_seconds


def short_aval(aval: Any) -> str:
    """`f32[8,128]`."""
    return aval.str_short(short_dtypes=True)


def tally(boxed: Boxed, mesh: MeshView) -> Tally:
    """The cost of a boxed program."""
    collectives: list[Collective] = []
    computing = moving = 0.0
    for eqn, trips in _weighted(boxed.jaxpr, 1):
        if eqn.primitive is box_p:
            found, seconds = _moves(eqn, trips, mesh)
            collectives += found
            moving += seconds * trips
        elif is_unit(eqn):
            for inner, n in _weighted(eqn.params["jaxpr"], trips):
                found, seconds = unit_moves(inner, n, mesh)
                collectives += found
                moving += seconds * n
                computing += n * (0.0 if found else whole_seconds(inner, mesh))
        elif pin_of(eqn) is None and not is_transfer(eqn):
            computing += trips * equation_seconds(eqn, boxed.placements, mesh)
            found, seconds = _inside(eqn, trips, boxed.placements, mesh)
            collectives += found
            moving += seconds * trips
    return Tally(tuple(collectives), computing, moving)


def _weighted(jaxpr: Jaxpr, trips: int) -> Iterator[tuple[Eqn, int]]:
    """Equations with how often they run; a nested one stands for its bodies."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in NESTED:
            inner = trips * eqn.params["length"] if eqn.primitive.name == "scan" else trips
            for body in bodies_of(eqn):
                yield from _weighted(body, inner)
        else:
            yield eqn, trips


def _moves(eqn: Eqn, trips: int, mesh: MeshView) -> tuple[list[Collective], float]:
    """The collectives of one boxing and its time for one execution."""
    aval, src, dst = eqn.invars[0].aval, eqn.params["src"], eqn.params["dst"]
    boxing = find_boxing(tuple(aval.shape), itemsize_of(aval), src, dst, mesh)
    return [
        Collective(
            cast(Kind, step.kind), step.axes, moved * trips, trips, eqn.params["source"], short_aval(aval), str(src),
            str(dst),
        )
        for step, moved in zip(boxing.steps, boxing.moved, strict=True)
        if step.is_collective and moved  # an empty value is not sent
    ], boxing.seconds  # fmt: skip


def _inside(
    eqn: Eqn, trips: int, placements: Mapping[Var, Placement], mesh: MeshView
) -> tuple[list[Collective], float]:
    """The collectives that an operation needs itself, and their time for one execution."""
    op = operation_of(eqn)
    rule = find_rule(op)
    if not rule.crossing:
        return [], 0.0
    operands, results = (
        tuple(REPLICATED if compat.is_literal(a) else placements[a] for a in side) for side in (eqn.invars, eqn.outvars)
    )
    sent = internal_steps(rule, Setting(op, operands, results, {a: n for a, n in mesh.axes if n > 1}))
    found = [
        Collective(
            s.kind, s.axes, sent_cost(s, mesh).bytes * trips, trips, compat.source_line(eqn),
            compat.short_text(s.shape, s.dtype),
            f"{op.name}'s pieces" if s.operand is None else str(operands[s.operand]),
            "one another" if s.operand is None else f"{op.name}'s window",
        )
        for s in sent
    ]  # fmt: skip
    return [c for c in found if c.bytes], sum(sent_cost(s, mesh).seconds for s in sent)


def equation_seconds(eqn: Eqn, placements: Mapping[Var, Placement], mesh: MeshView) -> float:
    """Seconds that a device computes in one execution of an operation."""
    atoms = [(a, placements[a]) for a in (*eqn.invars, *eqn.outvars) if not compat.is_literal(a)]
    memory = sum(math.prod(local_shape(a.aval.shape, p, mesh.sizes)) * itemsize_of(a.aval) for a, p in atoms)
    operation = operation_of(eqn)
    rule = find_rule(operation)
    shared = shared_by(rule.sizes(operation), _counts(rule, eqn, placements, mesh)) if rule.flops else 1.0
    return compute_seconds(rule.flops / shared, memory, mesh)


def whole_seconds(eqn: Eqn, mesh: MeshView) -> float:
    """Seconds that one device alone computes in one execution of an equation, its bodies included."""
    if is_transfer(eqn) or pin_of(eqn) is not None:
        return 0.0
    if eqn.primitive.name not in NESTED:
        atoms = (a for a in (*eqn.invars, *eqn.outvars) if not compat.is_literal(a))
        return equation_seconds(eqn, dict.fromkeys(atoms, REPLICATED), mesh)
    trips = eqn.params["length"] if eqn.primitive.name == "scan" else 1
    return sum(
        n * whole_seconds(e, mesh) for body in bodies_of(eqn) for e, n in _weighted(body, trips)
    )


def _counts(rule: Rule, eqn: Eqn, placements: Mapping[Var, Placement], mesh: MeshView) -> dict[str, int]:
    """The number of devices that split each factor of an operation."""
    counts: dict[str, int] = {}
    for factors, atom in zip((*rule.operands, *rule.results), (*eqn.invars, *eqn.outvars), strict=True):
        splits = {} if compat.is_literal(atom) else placements[atom].splits
        for dim, axes in splits.items():
            if factor := factors[dim]:
                counts[factor] = math.prod(mesh.sizes[a] for a in axes)
    return counts
