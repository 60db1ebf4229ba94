"""What a boxed program costs: its collectives, and where its time goes. Read off the program itself.

Heavy operations and collectives are priced one by one, as where placements are chosen. What light operations read and
write is priced for all of them together, as XLA fuses them (`traffic`), and late reductions hide behind computing
(`overlap`): neither adds up over equations, so neither is known to the search.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, cast

from shardc import compat
from shardc.compat import Eqn, Jaxpr, Var
from shardc.mesh import MeshView
from shardc.passes.canonicalize import NESTED
from shardc.passes.collective import KINDS, Collective, Kind, Moves
from shardc.passes.constrain import pin_of
from shardc.passes.insert_boxing import Boxed, box_p
from shardc.passes.memory import all_eqns, bodies_of, bytes_of, local_bytes
from shardc.passes.overlap import hidden_seconds, late_values
from shardc.passes.problem import itemsize_of, operation_of, setting_of, work_dtype
from shardc.passes.traffic import fused_bytes
from shardc.passes.transfer import is_transfer
from shardc.passes.unit import is_unit, unit_moves
from shardc.sbp.boxing import Boxing, find_boxing
from shardc.sbp.cost import RingTime, compute_seconds, memory_seconds
from shardc.sbp.piece import internal_steps, sent_cost
from shardc.sbp.placement import REPLICATED, Placement
from shardc.sbp.ring import Ring, ring_of, ring_price
from shardc.sbp.signature import Rule, Setting, find_rule, shared_by


@dataclass(frozen=True)
class Time:
    """Seconds of one call, by what they go to. `hidden` of them are covered by computing.

    Attributes:
      compute: operations that the matrix units bound.
      memory: reading and writing: operations that the memory bounds, and what is between operations.
      all_reduce, all_gather, reduce_scatter, all_to_all, permute: collectives of each kind.
      hidden: of the collectives, what runs while the program computes: reductions that only the optimizer and the
        results read, and pieces that go around while others are multiplied.
      launch: of a pipeline, by what its shortest tasks take longer than they compute, as the host has to launch them.
      wait: of a pipeline, for other ranks and for what they send.
    """

    compute: float = 0.0
    memory: float = 0.0
    all_reduce: float = 0.0
    all_gather: float = 0.0
    reduce_scatter: float = 0.0
    all_to_all: float = 0.0
    permute: float = 0.0
    hidden: float = 0.0
    launch: float = 0.0
    wait: float = 0.0

    @property
    def computing(self) -> float:
        return self.compute + self.memory

    @property
    def moving(self) -> float:
        """All collectives, the hidden part too."""
        return sum(getattr(self, kind) for kind in KINDS)

    @property
    def total(self) -> float:
        return self.computing + self.moving - self.hidden + self.launch + self.wait

    def __add__(self, other: Time) -> Time:
        return Time(*map(operator.add, self._parts(), other._parts()))

    def __mul__(self, times: float) -> Time:
        return Time(*(a * times for a in self._parts()))

    def _parts(self) -> tuple[float, ...]:
        return _PARTS(self)


_PARTS: Final = operator.attrgetter(*(f.name for f in fields(Time)))


@dataclass(frozen=True)
class Tally:
    """Of one call: the collectives in the order of the program, where its time goes, and `added`: the seconds of its
    equations one by one, as the search adds them up."""

    collectives: tuple[Collective, ...]
    time: Time
    added: float


def short_aval(aval: Any) -> str:
    """`f32[8,128]`."""
    return aval.str_short(short_dtypes=True)


def tally(boxed: Boxed, mesh: MeshView) -> Tally:
    """The cost of a boxed program."""
    found = _Tallier(boxed, mesh)
    time = found.scope(boxed.jaxpr, 1, [True] * len(boxed.jaxpr.outvars))
    return Tally(tuple(found.collectives), time, found.added)


def alone_seconds(eqns: Sequence[Eqn], results: Sequence[Var], boxed: Boxed, mesh: MeshView) -> float:
    """What some equations of a boxed program take by themselves.

    Args:
      results: what others read of what they make.
    """
    made = {v for e in eqns for v in e.outvars}
    given = dict.fromkeys(a for e in eqns for a in e.invars if not compat.is_literal(a) and a not in made)
    alone = compat.new_jaxpr(list(given), list(results), eqns, boxed.jaxpr)
    return tally(replace(boxed, jaxpr=alone), mesh).time.total


@dataclass
class _Tallier:
    boxed: Boxed
    mesh: MeshView
    collectives: list[Collective] = field(default_factory=list[Collective])
    heavy: dict[int, bool] = field(default_factory=dict[int, bool])
    """By id of an equation whether it is heavy."""
    rules: dict[int, Rule] = field(default_factory=dict[int, Rule])
    boxings: dict[int, Boxing] = field(default_factory=dict[int, Boxing])
    """Of operations and of boxings, by id of the equation."""
    sizes: dict[Var, int] = field(default_factory=dict[Var, int])
    """Bytes that a device holds of a value."""
    added: float = 0.0

    def scope(self, jaxpr: Jaxpr, trips: int, late_results: Sequence[bool]) -> Time:
        """The time of one execution of a jaxpr that runs `trips` times."""
        late = late_values(jaxpr, late_results, self.is_heavy)
        times = [self.equation(eqn, trips, late) for eqn in jaxpr.eqns]
        of = {id(eqn): t for eqn, t in zip(jaxpr.eqns, times, strict=True)}
        hidden = hidden_seconds(
            jaxpr, late,
            lambda eqn: of[id(eqn)].moving if self.is_reducing(eqn) else 0.0,
            lambda eqn: of[id(eqn)].computing - (0.0 if eqn.primitive.name in NESTED else of[id(eqn)].hidden),
        )  # fmt: skip
        light = fused_bytes(jaxpr, self.is_light, _is_same, self.held)
        return sum(times, Time(memory=memory_seconds(light, self.mesh), hidden=hidden))

    @property
    def placements(self) -> Mapping[Var, Placement]:
        return self.boxed.placements

    def held(self, var: Var) -> int:
        if var not in self.sizes:
            self.sizes[var] = local_bytes(var, self.placements[var], self.mesh.sizes)
        return self.sizes[var]

    def rule(self, eqn: Eqn) -> Rule:
        if id(eqn) not in self.rules:
            self.rules[id(eqn)] = self.boxed.rules.get(id(eqn)) or _rule_of(eqn)
        return self.rules[id(eqn)]

    def boxing(self, eqn: Eqn) -> Boxing:
        if id(eqn) not in self.boxings:
            aval, params = eqn.invars[0].aval, eqn.params
            found = find_boxing(tuple(aval.shape), itemsize_of(aval), params["src"], params["dst"], self.mesh)
            self.boxings[id(eqn)] = found
        return self.boxings[id(eqn)]

    def is_reducing(self, eqn: Eqn) -> bool:
        return eqn.primitive is box_p and any(
            s.is_collective and s.src.partial_axes != s.dst.partial_axes for s in self.boxing(eqn).steps
        )

    def is_heavy(self, eqn: Eqn) -> bool:
        if id(eqn) not in self.heavy:
            if eqn.primitive.name in NESTED:
                found = any(map(self.is_heavy, (e for body in bodies_of(eqn) for e in body.eqns)))
            else:
                own = eqn.primitive is box_p or _is_same(eqn) or is_transfer(eqn)
                found = is_unit(eqn) or (not own and self.rule(eqn).flops > 0)
            self.heavy[id(eqn)] = found
        return self.heavy[id(eqn)]

    def is_light(self, eqn: Eqn) -> bool:
        if eqn.primitive is box_p:
            return not any(s.is_collective for s in self.boxing(eqn).steps)
        return eqn.primitive.name not in NESTED and not self.is_heavy(eqn) and not is_transfer(eqn)

    def equation(self, eqn: Eqn, trips: int, late: Collection[Var]) -> Time:
        """The time of one execution, but for what light operations read and write."""
        if eqn.primitive.name in NESTED:
            return self.nested(eqn, trips, [v in late for v in eqn.outvars])
        if eqn.primitive is box_p:
            return self.add(_moves(eqn, self.boxing(eqn), trips), trips)
        if is_unit(eqn):
            return self.unit(eqn.params["jaxpr"], trips)
        if _is_same(eqn) or is_transfer(eqn):
            return Time()
        rule, inside = self.rule(eqn), Time()
        if rule.terms is not None or rule.crossing:
            setting = setting_of(eqn, self.placements, self.mesh.sizes)
            if (ring := ring_of(rule, setting)) is not None:
                return self.around(eqn, ring, setting, trips)
            inside = self.add(_inside(eqn, rule, setting, trips, self.mesh), trips)
        memory = sum(self.held(a) for a in (*eqn.invars, *eqn.outvars) if not compat.is_literal(a))
        seconds = _seconds(eqn, rule, memory, self.placements, self.mesh)
        self.added += seconds * trips
        if not self.is_heavy(eqn):
            return inside
        reading = memory_seconds(memory, self.mesh)
        return inside + (Time(memory=seconds) if seconds <= reading else Time(compute=seconds))

    def around(self, eqn: Eqn, ring: Ring, setting: Setting, trips: int) -> Time:
        """The time of a product whose pieces go around: what of its permutes its arithmetic covers is hidden."""
        rule = self.rule(eqn)
        port, steps = ring.port(rule), internal_steps(rule, setting)
        each = sent_cost(steps[0], self.mesh).bytes
        src, dst = str(setting.port(port)[1]), f"{eqn.primitive.name}'s ring"
        if ring.operand is None:
            src, dst = dst, src
        count = len(steps) * trips
        self.collectives.append(
            Collective(
                "permute", (ring.axis,), each * count, count, compat.source_line(eqn),
                short_aval(setting.port(port)[0]), src, dst,
            )
        )  # fmt: skip
        time = _ring_seconds(eqn, ring, rule, setting, self.placements, self.mesh)
        self.added += time.total * trips
        return Time(compute=time.computing, permute=time.moving, hidden=time.computing + time.moving - time.total)

    def unit(self, body: Jaxpr, trips: int) -> Time:
        begin = len(self.collectives)
        time = sum((self.in_unit(e, n, trips) for e, n in _weighted(body, 1)), Time())
        if any(e.primitive.name == "while" for e in all_eqns(body)):
            self.per_iteration(begin)
        return time

    def per_iteration(self, begin: int) -> None:
        """Says of the collectives from number `begin` on that they are in a `while`."""
        self.collectives[begin:] = [replace(c, per_iteration=True) for c in self.collectives[begin:]]

    def in_unit(self, eqn: Eqn, times: int, trips: int) -> Time:
        moves = unit_moves(eqn, trips * times, self.mesh)
        seconds = 0.0 if moves.collectives else whole_seconds(eqn, self.mesh)
        self.added += seconds * times * trips
        return (self.add(moves, times * trips) + Time(compute=seconds)) * times

    def nested(self, eqn: Eqn, trips: int, late: list[bool]) -> Time:
        """A loop's body as often as it runs, of a `while` once; of a `cond` the branch that takes longest."""
        length = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        results = late
        if eqn.primitive.name == "scan":  # what is carried is read by the next step
            results = [False] * eqn.params["num_carry"] + late[eqn.params["num_carry"] :]
        found: list[Time] = []
        begin = len(self.collectives)
        for body in bodies_of(eqn):
            fits = eqn.primitive.name != "while" and len(body.outvars) == len(results)
            found.append(self.scope(body, trips * length, results if fits else [False] * len(body.outvars)))
        if eqn.primitive.name == "while":
            self.per_iteration(begin)
        if eqn.primitive.name == "cond":
            return max(found, key=lambda t: t.total)
        return sum(found, Time()) * length

    def add(self, moves: Moves, trips: int) -> Time:
        self.collectives += moves.collectives
        time = Time(**moves.seconds)
        self.added += time.moving * trips
        return time


def _is_same(eqn: Eqn) -> bool:
    return pin_of(eqn) is not None


def _weighted(jaxpr: Jaxpr, trips: int) -> Iterator[tuple[Eqn, int]]:
    """Equations with how often they run; a nested one stands for its bodies."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in NESTED:
            inner = trips * eqn.params["length"] if eqn.primitive.name == "scan" else trips
            for body in bodies_of(eqn):
                yield from _weighted(body, inner)
        else:
            yield eqn, trips


def _moves(eqn: Eqn, boxing: Boxing, trips: int) -> Moves:
    """The collectives of one boxing, and the seconds of one execution."""
    aval, src, dst = eqn.invars[0].aval, eqn.params["src"], eqn.params["dst"]
    seconds: dict[Kind, float] = {}
    found: list[Collective] = []
    for step, price in zip(boxing.steps, boxing.prices, strict=True):
        if step.is_collective and price.bytes:  # an empty value is not sent
            kind = cast(Kind, step.kind)
            seconds[kind] = seconds.get(kind, 0.0) + price.seconds
            found.append(
                Collective(
                    kind, step.axes, price.bytes * trips, trips, eqn.params["source"], short_aval(aval), str(src),
                    str(dst),
                )
            )
    return Moves(found, seconds)  # fmt: skip


def _inside(eqn: Eqn, rule: Rule, setting: Setting, trips: int, mesh: MeshView) -> Moves:
    """The collectives that an operation needs itself, and the seconds of one execution."""
    op, operands = setting.op, setting.operands
    found: list[Collective] = []
    seconds: dict[Kind, float] = {}
    for s in internal_steps(rule, setting):
        cost = sent_cost(s, mesh)
        if cost.bytes:
            seconds[s.kind] = seconds.get(s.kind, 0.0) + cost.seconds
            found.append(
                Collective(
                    s.kind, s.axes, cost.bytes * trips, trips, compat.source_line(eqn),
                    compat.short_text(s.shape, s.dtype),
                    f"{op.name}'s pieces" if s.operand is None else str(operands[s.operand]),
                    "one another" if s.operand is None else f"{op.name}'s window",
                )
            )
    return Moves(found, seconds)  # fmt: skip


def _ring_seconds(
    eqn: Eqn, ring: Ring, rule: Rule, setting: Setting, placements: Mapping[Var, Placement], mesh: MeshView
) -> RingTime:
    """What one execution of it takes."""
    counts = _counts(rule, eqn, placements, mesh, ring)
    flops = rule.flops / shared_by(rule.sizes(setting.op), counts)
    atoms = (*eqn.invars, *eqn.outvars)
    held = [
        local_bytes(a, p, mesh.sizes) for a, p in zip(atoms, (*setting.operands, *setting.results), strict=True)
    ]
    return RingTime(*map(float, ring_price(ring, rule, setting.op, held, flops, mesh)))


def _rule_of(eqn: Eqn) -> Rule:
    return find_rule(operation_of(eqn))


def _seconds(eqn: Eqn, rule: Rule, memory: int, placements: Mapping[Var, Placement], mesh: MeshView) -> float:
    """Seconds that a device computes in one execution of an operation that reads and writes so many bytes."""
    if not rule.flops:
        return compute_seconds(0.0, memory, mesh)
    shared = shared_by(rule.sizes(operation_of(eqn)), _counts(rule, eqn, placements, mesh))
    return compute_seconds(rule.flops / shared, memory, mesh, work_dtype(eqn))


def whole_seconds(eqn: Eqn, mesh: MeshView) -> float:
    """Seconds that one device alone computes in one execution of an equation, its bodies included."""
    if is_transfer(eqn) or pin_of(eqn) is not None:
        return 0.0
    if eqn.primitive.name not in NESTED:
        atoms = [a for a in (*eqn.invars, *eqn.outvars) if not compat.is_literal(a)]
        whole = dict.fromkeys(atoms, REPLICATED)
        return _seconds(eqn, _rule_of(eqn), sum(map(bytes_of, atoms)), whole, mesh)
    trips = eqn.params["length"] if eqn.primitive.name == "scan" else 1
    return sum(
        n * whole_seconds(e, mesh) for body in bodies_of(eqn) for e, n in _weighted(body, trips)
    )


def _counts(
    rule: Rule, eqn: Eqn, placements: Mapping[Var, Placement], mesh: MeshView, ring: Ring | None = None
) -> dict[str, int]:
    """The number of devices that share the work along each factor of an operation: all that split it, but those that
    its pieces go around."""
    counts: dict[str, int] = {}
    for factors, atom in zip((*rule.operands, *rule.results), (*eqn.invars, *eqn.outvars), strict=True):
        splits = {} if compat.is_literal(atom) else placements[atom].splits
        for dim, axes in splits.items():
            if factor := factors[dim]:
                around = ring.axis if ring is not None and factor == ring.factor else None
                counts[factor] = math.prod(mesh.sizes[a] for a in axes if a != around)
    return counts
