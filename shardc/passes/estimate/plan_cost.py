"""The cost of a boxed program: its collectives, and the seconds of one call by what they go to.

Heavy operations and collectives are priced one by one, as where placements are chosen. The bytes of light operations
are priced together, as XLA fuses them (`traffic`), and collectives overlap with computation (`overlap`): neither is a
sum over equations, so the search knows neither.
"""

from __future__ import annotations

import math
import operator
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, cast

from shardc import compat
from shardc.compat import Eqn, Jaxpr, Var
from shardc.ir.box import Boxed, box_p, boxing_of
from shardc.ir.collective import Branch, Collective, Moves
from shardc.ir.constrain import pin_of
from shardc.ir.host_callback import runs_once
from shardc.ir.memory_move import MemorySpace, is_memory_move
from shardc.ir.nested import NESTED, bodies_of, trips_of
from shardc.ir.transfer import is_transfer
from shardc.ir.user_collectives import is_half, kernel_moves, user_moves
from shardc.ir.user_shard_map import is_unit, unit_body
from shardc.ir.walk import (
    all_eqns,
    bytes_of,
    executions,
    itemsize_of,
    local_bytes,
    operation_of,
    setting_of,
    short_aval,
    work_dtype,
)  # fmt: skip
from shardc.machine.mesh import MeshView
from shardc.passes.estimate.backend import backend_of
from shardc.passes.estimate.combine import Started, combinations
from shardc.passes.estimate.overlap import Overlap, hidden_beside
from shardc.passes.estimate.traffic import FusedGroup, accumulations, fused_groups, in_products
from shardc.sbp.boxing import Boxing
from shardc.sbp.cost import (
    COLLECTIVES,
    FEMTO,
    HIDING,
    CollectiveKind,
    RingTime,
    element_seconds,
    group_of,
    heavy_seconds,
    light_seconds,
    memory_seconds,
)
from shardc.sbp.piece import Sent, around_time, internal_steps, sent_cost
from shardc.sbp.placement import REPLICATED, AxisSizes, Placement
from shardc.sbp.ring import Ring, ring_of, ring_price
from shardc.sbp.signature import Rule, Setting, find_rule, gathered, has_rule, shared_by
from shardc.sbp.sub_axes import in_whole_axes


@dataclass(frozen=True)
class Time:
    """Seconds of one call, by what they go to. `overlapped` of them do not add to the total.

    Attributes:
      compute: operations bound by the matrix units.
      memory: operations bound by memory, and light operations.
      all_reduce, all_gather, reduce_scatter, all_to_all, permute: collectives of each kind.
      overlapped: the part of the collectives that overlaps with computation.
      launch: the time by which programs take longer than their devices compute, for the host to launch them.
      wait: of a pipeline, for other ranks and for their messages.
      host: moving values to and from the memory of the host. It is taken to overlap with nothing.
      overlapped_reductions: the part of `overlapped` that is reductions, most of them of gradients.
      overlapped_rings: the part of it that is pieces that go around a ring while others are multiplied. The rest is
        gathers and the like.
      recompute: the part of `compute` and `memory` in which heavy operations compute what was computed before: for
        `jax.checkpoint`, or because the plan does not keep it.
    """

    compute: float = 0.0
    memory: float = 0.0
    all_reduce: float = 0.0
    all_gather: float = 0.0
    reduce_scatter: float = 0.0
    all_to_all: float = 0.0
    permute: float = 0.0
    overlapped: float = 0.0
    launch: float = 0.0
    wait: float = 0.0
    host: float = 0.0
    overlapped_reductions: float = 0.0
    overlapped_rings: float = 0.0
    recompute: float = 0.0

    @property
    def computing(self) -> float:
        """`compute` and `memory`."""
        return self.compute + self.memory

    @property
    def moving(self) -> float:
        """All collectives, with the overlapped part."""
        return sum(getattr(self, kind) for kind in COLLECTIVES)

    @property
    def total(self) -> float:
        """All of it, what overlaps counted once."""
        return self.computing + self.moving - self.overlapped + self.launch + self.wait + self.host

    def __add__(self, other: Time) -> Time:
        return Time(*map(operator.add, self._parts(), other._parts()))

    def __mul__(self, times: float) -> Time:
        return Time(*(a * times for a in self._parts()))

    def _parts(self) -> tuple[float, ...]:
        return _PARTS(self)


_PARTS: Final = operator.attrgetter(*(f.name for f in fields(Time)))


@dataclass(frozen=True, slots=True)
class HostMove:
    """A move of a value between a device's memory and its host's.

    Attributes:
      to: "host" or "device".
      value: dtype and logical shape of the value, as `f32[8,128]`.
      bytes: moved per device in one call.
      count: executions in one call.
      source: the path of the argument, or the line of user code that made the value.
    """

    to: MemorySpace
    value: str
    bytes: int
    count: int
    source: str


@dataclass(frozen=True)
class PlanCost:
    """The cost of one call.

    Attributes:
      collectives: in the order of the program.
      time: where the time goes.
      added: the sum of the seconds of single equations, as the search adds them up.
      host_moves: in the order of the program.
    """

    collectives: tuple[Collective, ...]
    time: Time
    added: float
    host_moves: tuple[HostMove, ...] = ()


@dataclass(slots=True)
class EquationCost:
    """The cost of one equation in one call, over all its executions. That of one with bodies is in theirs.

    Attributes:
      time: the time of light operations that are fused is shared out among them by the bytes that each touches: no one
        of them has a cost of its own. Nothing is subtracted for boxings that overlap.
      collectives: as in the plan.
      hidden: seconds of a boxing that overlap with computing.
    """

    time: Time
    collectives: Sequence[Collective]
    hidden: float = 0.0


def equation_costs(boxed: Boxed, mesh: MeshView) -> dict[Eqn, EquationCost]:
    """The parts of `plan_cost` by equation. Their seconds add up to its time, with what overlaps."""
    found = _CostWalk(boxed, mesh, {})
    found.scope(boxed.jaxpr, 1)
    assert found.each is not None
    return found.each


def undivided_seconds(jaxpr: Jaxpr, mesh: MeshView) -> dict[Eqn, float]:
    """Seconds of each equation of a jaxpr in one execution of it, its bodies included, if one device computes all of
    it: parts of what `plan_cost` would say, where light operations are fused."""
    costs = equation_costs(Boxed(jaxpr, defaultdict(lambda: REPLICATED)), mesh)
    inside = {eqn: [eqn, *(e for body in bodies_of(eqn) for e in all_eqns(body))] for eqn in jaxpr.eqns}
    return {eqn: sum(costs[e].time.total for e in eqns if e in costs) for eqn, eqns in inside.items()}


def plan_cost(boxed: Boxed, mesh: MeshView) -> PlanCost:
    """The cost of a boxed program."""
    found = _CostWalk(boxed, mesh)
    time = found.scope(boxed.jaxpr, 1)
    return PlanCost(tuple(found.collectives), time, found.added, tuple(found.host_moves))


def overlaps_of(boxed: Boxed, mesh: MeshView) -> list[Overlap]:
    """The collectives that `Time.overlapped` counts on, in the order of the program; their `hidden` add up to it."""
    found = _CostWalk(boxed, mesh, {})
    found.scope(boxed.jaxpr, 1)
    return found.overlaps


def host_seconds(moved: int, mesh: MeshView) -> float:
    """Seconds to move so many bytes between a device's memory and its host's."""
    return moved / mesh.topology.host_bandwidth


def instructions(boxed: Boxed, mesh: MeshView) -> Counter[CollectiveKind]:
    """The number of instructions that the compiler makes of the boxings, for the kinds that it combines; those of a
    loop's body count once."""
    walk, kinds = _CostWalk(boxed, mesh), dict(mesh.topology.combined)
    found: Counter[CollectiveKind] = Counter()
    waiting = [boxed.jaxpr]
    while waiting:
        jaxpr = waiting.pop()
        found.update(some[0].kind for some in combinations(jaxpr, walk.started(jaxpr.eqns), kinds))
        waiting += [body for eqn in jaxpr.eqns for body in bodies_of(eqn)]
    return found


def alone_seconds(eqns: Sequence[Eqn], results: Sequence[Var], boxed: Boxed, mesh: MeshView) -> float:
    """Seconds of some equations of a boxed program by themselves.

    Args:
      results: their results that others read.
    """
    made = {v for e in eqns for v in e.outvars}
    given = dict.fromkeys(a for e in eqns for a in e.invars if not compat.is_literal(a) and a not in made)
    alone = compat.new_jaxpr(list(given), list(results), eqns, boxed.jaxpr)
    return plan_cost(replace(boxed, jaxpr=alone), mesh).time.total


class _LocalBytes(dict[Var, int]):
    """Bytes of each value on a device; computed once for values of one type and placement, when first asked for."""

    def __init__(self, placements: Mapping[Var, Placement], sizes: AxisSizes) -> None:
        super().__init__()
        self._placements, self._sizes = placements, sizes
        self._alike: dict[tuple[Any, int], int] = {}

    def __missing__(self, var: Var) -> int:
        placement = self._placements[var]
        alike = var.aval, id(placement)
        found = self._alike.get(alike)
        if found is None:
            found = self._alike[alike] = local_bytes(var, placement, self._sizes)
        self[var] = found
        return found


@dataclass(frozen=True)
class _Price:
    """The cost of one execution of an equation; equal equations share it.

    Attributes:
      moves: its collectives, without a source.
      time: where its time goes, without the bytes of light operations.
      added: seconds, one after the other as the search adds them up.
      around: the pieces that go around a ring beside its computation, without a source.
    """

    moves: Sequence[Collective]
    time: Time
    added: tuple[float, ...]
    around: Overlap | None = None

    @classmethod
    def of(cls, moves: Moves) -> _Price:
        time = Time(**moves.seconds)
        return cls(moves.collectives, time, (time.moving,))


class _CostWalk:
    """The walk that sums the cost of a program.

    Attributes:
      held: bytes of a value on a device.
      heavy: whether an equation is heavy, by its id.
      rules: of operations, by equation.
      boxings: by the value's aval, both placements, and the number of values that share a start.
      prices: of operations and of boxings, by what determines them.
      each: the cost of each equation, if that is asked for.
      overlaps: what is hidden beside what, if the costs of equations are asked for.
      sums: by product that adds to what a loop carries, the sum.
      inside: the light equations that are part of these products.
    """

    def __init__(self, boxed: Boxed, mesh: MeshView, each: dict[Eqn, EquationCost] | None = None) -> None:
        self.boxed, self.mesh, self.placements, self.each = boxed, mesh, boxed.placements, each
        self.collectives: list[Collective] = []
        self.host_moves: list[HostMove] = []
        self.added = 0.0
        self.held = _LocalBytes(boxed.placements, mesh.sizes)
        self.heavy: dict[Eqn, bool] = {}
        self.rules: dict[Eqn, Rule] = {}
        self.boxings: dict[tuple[Any, Placement, Placement, int], Boxing] = {}
        self.prices: dict[Hashable, _Price] = {}
        self.overlaps: list[Overlap] = []
        self.sums: dict[Eqn, Var] = {}
        self.inside: set[Eqn] = set()
        backend = backend_of(mesh.topology.backend)
        over, self.narrow = backend.accumulates_over, backend.multiplies_in
        for eqn, parts in accumulations(boxed.jaxpr, over).items():
            if ring_of(self.rule(eqn), setting_of(eqn, self.placements, mesh.sizes)) is None:
                self.sums[eqn] = parts[0].outvars[0]
                self.inside.update(parts)

    def scope(self, jaxpr: Jaxpr, trips: int) -> Time:
        """The time of one execution of a jaxpr that runs `trips` times."""
        plain = {eqn for eqn in jaxpr.eqns if self.is_plain(eqn)}
        others = [eqn for eqn in jaxpr.eqns if eqn not in plain]
        times: dict[Eqn, Time] = {}
        for eqn in jaxpr.eqns:
            if not has_rule(eqn.primitive.name) and not is_unit(eqn):
                self.collectives += kernel_moves(eqn, trips, self.mesh)
            if eqn in plain:
                self.added += light_seconds(self.touched(eqn), self.mesh) * trips
            else:
                begin = len(self.collectives)
                time = self.equation(eqn, trips)
                times[eqn] = replace(time, recompute=time.computing) if compat.is_recomputed(eqn) else time
                if self.each is not None and eqn.primitive.name not in NESTED:
                    self.each[eqn] = EquationCost(Time(), self.collectives[begin:])
        together = list(combinations(jaxpr, self.started(others), dict(self.mesh.topology.combined)))
        for s in (s for found in together for s in found[:-1]):
            time = times[s.eqn]
            times[s.eqn] = replace(time, **{s.kind: getattr(time, s.kind) - s.seconds})
        self.accumulate(times)
        hidden = self.overlapped(jaxpr, times, together, trips) if self.mesh.topology.overlaps else Time()
        light = plain.union([eqn for eqn in others if self.is_light(eqn)])
        same, narrowing = {eqn for eqn in others if _is_same(eqn)}, in_products(jaxpr, self.narrow)
        groups = fused_groups(jaxpr, light - self.inside, same, self.held, narrowing)
        fused = [max(memory_seconds(g.bytes, self.mesh), sum(map(self.arithmetic, g.eqns))) for g in groups]
        if self.each is not None:
            self.share_out(times, light, zip(groups, fused, strict=True), trips)
        return sum(times.values(), hidden + Time(memory=sum(fused)))

    def accumulate(self, times: dict[Eqn, Time]) -> None:
        """Let the products of a scope that add to what a loop carries read it, where that takes longer."""
        for eqn in self.sums.keys() & times.keys():
            least = memory_seconds(self.touched(eqn) + self.held[self.sums[eqn]], self.mesh)
            times[eqn] += Time(memory=max(0.0, least - times[eqn].computing))

    def overlapped(
        self, jaxpr: Jaxpr, times: Mapping[Eqn, Time], together: Iterable[Sequence[Started]], trips: int
    ) -> Time:
        """The part of a scope's collectives that overlaps with what its other equations compute.

        Args:
          times: of one execution of each equation that is not plain.
          together: collectives that are combined.
        """
        alone = {eqn: time.moving for eqn, time in times.items() if eqn.primitive is box_p and time.moving}
        sending: list[tuple[Collection[Eqn], float]] = []
        for found in together:
            eqns = {s.eqn for s in found}
            if len(eqns) > 1:
                sending.append((eqns, sum(alone.pop(eqn, 0.0) for eqn in eqns)))
        sending += [([eqn], seconds) for eqn, seconds in alone.items()]
        computing = {eqn: time.computing - time.overlapped for eqn, time in times.items()}
        hidden = reductions = 0.0
        for (eqns, seconds), beside in zip(sending, hidden_beside(jaxpr, sending, computing), strict=True):
            if not beside:
                continue
            could, share = sum(beside.values()), self.share(times, eqns)
            hidden += could * share
            if any(map(self.is_reducing, eqns)):
                reductions += could * share
            if self.each is not None and share:
                self.list_overlap(times, eqns, beside, seconds, share, trips)
        return Time(overlapped=hidden, overlapped_reductions=reductions)

    def share(self, times: Mapping[Eqn, Time], eqns: Iterable[Eqn]) -> float:
        """The share of what could be hidden of collectives that the machine's compiler hides."""
        machine, parts = self.mesh.topology, Counter[str]()
        for eqn in eqns:
            for kind in COLLECTIVES:
                parts[kind] += getattr(times[eqn], kind)
        return sum(seconds * machine.overlap(kind) for kind, seconds in parts.items()) / parts.total()

    def list_overlap(
        self, times: Mapping[Eqn, Time], eqns: Collection[Eqn], beside: Mapping[Eqn, float], seconds: float,
        share: float, trips: int,
    ) -> None:  # fmt: skip
        """Add collectives that go on beside computation to `overlaps`."""
        assert self.each is not None
        for eqn in eqns:
            part = times[eqn].moving / seconds
            self.each[eqn].hidden += sum(beside.values()) * share * trips * part
        moves = [c for eqn in eqns for c in self.each[eqn].collectives]
        kind = max(COLLECTIVES, key=lambda kind: sum(getattr(times[eqn], kind) for eqn in eqns))
        largest = max(moves, key=lambda c: (c.kind == kind, c.bytes))
        work = max(beside, key=beside.__getitem__)
        others = f" and {len(moves) - 1} more" if len(moves) > 1 else ""
        self.overlaps.append(
            Overlap(
                kind, largest.axes, largest.value + others, largest.source, _work_text(work),
                sum(c.bytes for c in moves), seconds * trips, sum(beside.values()) * trips, share,
            )
        )  # fmt: skip

    def share_out(
        self, times: Mapping[Eqn, Time], light: Iterable[Eqn], fused: Iterable[tuple[FusedGroup, float]], trips: int
    ) -> None:
        """Add the seconds of each equation of a scope to its cost. `fused`: groups of light ones with their seconds."""
        assert self.each is not None
        for eqn, time in times.items():
            if eqn.primitive.name not in NESTED:
                self.each[eqn].time += time * trips
        for eqn in light:
            self.each.setdefault(eqn, EquationCost(Time(), ()))
        for group, seconds in fused:
            touched = [self.touched(eqn) for eqn in group.eqns]
            whole = sum(touched)
            for eqn, size in zip(group.eqns, touched, strict=True):
                self.each[eqn].time += Time(memory=seconds * trips * (size / whole if whole else 0.0))

    def arithmetic(self, eqn: Eqn) -> float:
        """Seconds that the vector units compute in one execution of a light operation."""
        if eqn.primitive.name in _PARTICULAR:
            return 0.0
        if not (each := element_seconds(self.rule(eqn).kind, self.mesh.topology)):
            return 0.0
        return each * max(self.held[a] / itemsize_of(a.aval) for a in (*compat.variables(eqn.invars), *eqn.outvars))

    def touched(self, eqn: Eqn) -> int:
        """Bytes that an operation reads and writes."""
        held = self.held
        return sum([held[a] for a in eqn.invars if not compat.is_literal(a)]) + sum([held[v] for v in eqn.outvars])

    def rule(self, eqn: Eqn) -> Rule:
        if eqn not in self.rules:
            self.rules[eqn] = self.boxed.rules.get(eqn) or _rule_of(eqn)
        return self.rules[eqn]

    def boxing(self, eqn: Eqn) -> Boxing:
        params = eqn.params
        alike = eqn.invars[0].aval, params["src"], params["dst"], params["shared"]
        if alike not in self.boxings:
            self.boxings[alike] = boxing_of(eqn, self.mesh)
        return self.boxings[alike]

    def started(self, eqns: Sequence[Eqn]) -> Iterator[Started]:
        """The collectives of boxings that the compiler may combine with others."""
        kinds = dict(self.mesh.topology.combined)
        for eqn in eqns if kinds else ():
            if eqn.primitive is not box_p:
                continue
            boxing = self.boxing(eqn)
            made = self.held[eqn.outvars[0]]
            size = max([made, *(self.held[v] for v in compat.variables(eqn.invars[:1]))])
            for step, price in zip(boxing.steps, boxing.prices, strict=True):
                if step.kind in kinds and price.bytes:
                    alike = step.axes, eqn.outvars[0].aval.dtype, step.src.partial_op
                    seconds = group_of(self.mesh, step.axes).latency[step.kind] / FEMTO
                    most = made if step.kind == "reduce_scatter" else size
                    yield Started(eqn, cast(CollectiveKind, step.kind), alike, most, seconds)

    def is_reducing(self, eqn: Eqn) -> bool:
        return eqn.primitive is box_p and any(
            s.is_collective and s.src.partial_axes != s.dst.partial_axes for s in self.boxing(eqn).steps
        )

    def is_plain(self, eqn: Eqn) -> bool:
        """Whether it is a light operation without collectives: it costs only the memory that it touches."""
        if eqn.primitive.name in _PARTICULAR:
            return False
        rule = self.boxed.rules.get(eqn) or self.rule(eqn)
        return not (rule.is_heavy or rule.windows or rule.exchanged or rule.terms)

    def is_heavy(self, eqn: Eqn) -> bool:
        if eqn not in self.heavy:
            if eqn.primitive.name in NESTED:
                found = any(map(self.is_heavy, (e for body in bodies_of(eqn) for e in body.eqns)))
            else:
                own = eqn.primitive is box_p or _is_same(eqn) or is_transfer(eqn) or is_memory_move(eqn)
                found = is_unit(eqn) or (not own and self.rule(eqn).is_heavy)
            self.heavy[eqn] = found
        return self.heavy[eqn]

    def is_light(self, eqn: Eqn) -> bool:
        if eqn.primitive is box_p:
            return not any(s.is_collective for s in self.boxing(eqn).steps)
        alone = is_transfer(eqn) or is_memory_move(eqn)
        return eqn.primitive.name not in NESTED and not self.is_heavy(eqn) and not alone

    def equation(self, eqn: Eqn, trips: int) -> Time:
        """The time of one execution, without the bytes of light operations."""
        if eqn.primitive.name in NESTED:
            return self.nested(eqn, trips)
        if eqn.primitive is box_p:
            return self.take(self.price(eqn), eqn.params["source"], trips)
        if is_unit(eqn):
            return self.unit(unit_body(eqn), trips)
        if is_memory_move(eqn):
            return self.memory_move(eqn, trips)
        if _is_same(eqn) or is_transfer(eqn):
            return Time()
        price, source = self.price(eqn), compat.source_line(eqn)
        if self.each is not None and (o := price.around):
            self.overlaps.append(
                replace(
                    o, source=source, beside=_work_text(eqn), bytes=o.bytes * trips, seconds=o.seconds * trips,
                    could=o.could * trips,
                )
            )  # fmt: skip
        return self.take(price, source, trips)

    def memory_move(self, eqn: Eqn, trips: int) -> Time:
        """The time of one execution of a move between a device's memory and its host's."""
        moved = self.held[eqn.outvars[0]]
        seconds = host_seconds(moved, self.mesh)
        self.added += seconds * trips
        to, source, value = eqn.params["to"], eqn.params["source"], short_aval(eqn.outvars[0].aval)
        self.host_moves.append(HostMove(to, value, moved * trips, trips, source))
        return Time(host=seconds)

    def take(self, price: _Price, source: str, trips: int) -> Time:
        """Add the collectives and the added seconds of `trips` executions to the walk's totals. Returns the time of one
        execution."""
        self.collectives += [
            replace(m, bytes=m.bytes * trips, count=m.count * trips, source=source) for m in price.moves
        ]
        for seconds in price.added:
            self.added += seconds * trips
        return price.time

    def price(self, eqn: Eqn) -> _Price:
        """The price of an operation or a boxing."""
        rule = None if eqn.primitive is box_p else id(self.rule(eqn))
        atoms = (*eqn.invars, *eqn.outvars)
        lie = tuple(None if compat.is_literal(a) else self.placements[a] for a in atoms)
        alike = rule, eqn.primitive, tuple(a.aval for a in atoms), lie, eqn.params["shared"] if rule is None else 1
        if alike not in self.prices:
            self.prices[alike] = self.box(eqn) if rule is None else self.operation(eqn)
        return self.prices[alike]

    def box(self, eqn: Eqn) -> _Price:
        boxing = self.boxing(eqn)
        return replace(_Price.of(_moves(eqn, boxing, self.mesh)), added=(boxing.seconds,))

    def operation(self, eqn: Eqn) -> _Price:
        rule, inside, setting = self.rule(eqn), _Price((), Time(), ()), None
        if rule.terms is not None or rule.crossing:
            setting = setting_of(eqn, self.placements, self.mesh.sizes)
            if (ring := ring_of(rule, setting)) is not None:
                return self.ring(eqn, ring, setting)
            inside = _Price.of(_inside(internal_steps(rule, setting), setting, self.mesh))
        memory = self.touched(eqn)
        seconds, moved = _seconds(eqn, rule, memory, self.placements, self.mesh), 0.0
        if setting is not None and rule.moved is not None:
            moved = float(memory_seconds(rule.moved(setting), self.mesh))
        if setting is not None and rule.around:
            inside = self.beside(inside, rule, setting, seconds + moved)
        inside = replace(inside, time=inside.time + Time(memory=moved), added=(*inside.added, seconds + moved))
        if not rule.is_heavy:
            return inside
        bound = seconds <= max(rule.passes, 1.0) * memory_seconds(memory, self.mesh)
        return replace(inside, time=inside.time + (Time(memory=seconds) if bound else Time(compute=seconds)))

    def ring(self, eqn: Eqn, ring: Ring, setting: Setting) -> _Price:
        """The price of a product whose pieces go around; its permutes overlap with its arithmetic."""
        rule = self.rule(eqn)
        port, steps = ring.port(rule), internal_steps(rule, setting)
        each = sent_cost(steps[0], self.mesh).bytes
        src, dst = str(setting.port(port)[1]), f"{eqn.primitive.name}'s ring"
        if ring.operand is None:
            src, dst = dst, src
        value, count = short_aval(setting.port(port)[0]), len(steps)
        moves = Collective("permute", (ring.axis,), each * count, count, "", value, src, dst)
        time = _ring_seconds(eqn, ring, rule, setting, self.placements, self.mesh)
        overlapped = time.computing + time.moving - time.total
        parts = Time(compute=time.computing, permute=time.moving, overlapped=overlapped, overlapped_rings=overlapped)
        return _Price((moves,), parts, (time.total,), self.overlap([moves], time.moving, overlapped))

    def beside(self, price: _Price, rule: Rule, setting: Setting, computing: float) -> _Price:
        """The price of an operation's own collectives, some of which overlap with what it computes."""
        around = [s for s in internal_steps(rule, setting) if s.beside]
        if (time := around_time(around, computing, self.mesh)) is None:
            return price
        hidden = time.computing + time.moving - time.total
        parts = Time(permute=time.moving, overlapped=hidden, overlapped_rings=hidden)
        listed = self.overlap(_inside(around, setting, self.mesh).collectives, time.moving, hidden)
        return replace(price, time=price.time + parts, added=(*price.added, time.moving - hidden), around=listed)

    def overlap(self, moves: Sequence[Collective], seconds: float, hidden: float) -> Overlap | None:
        """Pieces that go around, for `Plan.overlaps`; None if nothing of it is hidden."""
        if not hidden:
            return None
        share = min(self.mesh.topology.overlap("ring"), 1 - HIDING)
        bytes_ = sum(m.bytes for m in moves)
        return Overlap("ring", moves[0].axes, moves[0].value, "", "", bytes_, seconds, hidden / share, share)

    def unit(self, body: Jaxpr, trips: int) -> Time:
        begin = len(self.collectives)
        time = sum((self.in_unit(e, n, trips) for e, n in executions(body)), Time())
        if loops := [e for e in all_eqns(body) if e.primitive.name == "while"]:
            self.per_iteration(begin, 1, not all(map(compat.rounds_of, loops)))
        return time

    def per_iteration(self, begin: int, trips: int, one_round: bool) -> None:
        """Marks the collectives from number `begin` on as executed in a `while`.

        Args:
          trips: its expected number of iterations.
          one_round: nothing says how many there are.
        """
        self.collectives[begin:] = [
            replace(c, per_iteration=True, trips=c.trips * trips, one_round=c.one_round or one_round)
            for c in self.collectives[begin:]
        ]

    def in_unit(self, eqn: Eqn, times: int, trips: int) -> Time:
        moves = user_moves(eqn, trips * times, self.mesh)
        sends = is_half(eqn) or any(c.is_known for c in moves.collectives)
        seconds = 0.0 if sends else whole_seconds(eqn, self.mesh)
        self.added += seconds * times * trips
        return (self.add(moves, times * trips) + Time(compute=seconds)) * times

    def nested(self, eqn: Eqn, trips: int) -> Time:
        """The time of a loop's body times its iterations (expected ones of a `while`), or of the slowest branch of a
        `cond`, or of the one that is expected to run."""
        length, expected = trips_of(eqn), compat.is_expected(eqn)
        found: list[Time] = []
        begin, listed = len(self.collectives), [len(self.overlaps)]
        for body in bodies_of(eqn):
            first, added = len(self.collectives), self.added
            found.append(self.scope(body, trips * length))
            listed.append(len(self.overlaps))
            if expected:
                last = len(found) == len(bodies_of(eqn))
                branch: Branch = "expected" if last else "other"
                self.collectives[first:] = [replace(c, branch=branch) for c in self.collectives[first:]]
                self.added = self.added if last else added
        if eqn.primitive.name == "while":
            self.per_iteration(begin, length, compat.rounds_of(eqn) is None)
        if eqn.primitive.name == "cond":
            dearest = len(found) - 1 if expected else max(range(len(found)), key=lambda k: found[k].total)
            self.overlaps[listed[0] :] = self.overlaps[listed[dearest] : listed[dearest + 1]]
            for e in (e for k, body in enumerate(bodies_of(eqn)) if k != dearest for e in all_eqns(body)):
                if self.each is not None and e in self.each:
                    self.each[e].time, self.each[e].hidden = Time(), 0.0
            return found[dearest]
        return sum(found, Time()) * length

    def add(self, moves: Moves, trips: int) -> Time:
        self.collectives += moves.collectives
        time = Time(**moves.seconds)
        self.added += time.moving * trips
        return time


_PARTICULAR: Final = frozenset((
    "box", "constrain", "memory_move", "receive", "send", "shard_map", "sharding_constraint", *NESTED,
))  # fmt: skip
"""Primitives that cost more than their rule says."""


def _work_text(eqn: Eqn) -> str:
    return f"{eqn.primitive.name} {compat.source_line(eqn)}".strip()


def _is_same(eqn: Eqn) -> bool:
    return pin_of(eqn) is not None


def _moves(eqn: Eqn, boxing: Boxing, mesh: MeshView) -> Moves:
    """The collectives of one boxing, and the seconds of one execution, each with a start of its own."""
    aval, src, dst = eqn.invars[0].aval, eqn.params["src"], eqn.params["dst"]
    seconds: dict[CollectiveKind, float] = {}
    found: list[Collective] = []
    there, here = (str(in_whole_axes(p, mesh)) for p in (src, dst))
    for step, price in zip(boxing.steps, boxing.prices, strict=True):
        if step.is_collective and price.bytes:  # an empty value is not sent
            kind = cast(CollectiveKind, step.kind)
            alone = (price.wire + group_of(mesh, step.axes).latency[kind]) / FEMTO
            seconds[kind] = seconds.get(kind, 0.0) + alone
            found.append(Collective(kind, mesh.joined(step.axes), price.bytes, 1, "", short_aval(aval), there, here))
    return Moves(found, seconds)


def _inside(sent: Sequence[Sent], setting: Setting, mesh: MeshView) -> Moves:
    """The internal collectives of an operation, and the seconds of those that it waits for in one execution."""
    op, operands = setting.op, setting.operands
    found: list[Collective] = []
    seconds: dict[CollectiveKind, float] = {}
    around = Counter(s for s in sent if s.beside)
    for s, times in (*((s, 1) for s in sent if not s.beside), *around.items()):
        cost = sent_cost(s, mesh)
        if cost.bytes:
            if not s.beside:
                seconds[s.kind] = seconds.get(s.kind, 0.0) + cost.seconds * times
            found.append(
                Collective(
                    s.kind,
                    mesh.joined(s.axes),
                    cost.bytes * times,
                    times,
                    "",
                    compat.short_text(s.shape, s.dtype),
                    f"{op.name}'s pieces" if s.operand is None else str(in_whole_axes(operands[s.operand], mesh)),
                    f"{op.name}'s ring" if s.beside else "one another" if s.operand is None else f"{op.name}'s window",
                )
            )
    return Moves(found, seconds)  # fmt: skip


def _ring_seconds(
    eqn: Eqn, ring: Ring, rule: Rule, setting: Setting, placements: Mapping[Var, Placement], mesh: MeshView
) -> RingTime:
    """Seconds of one execution of a product whose pieces go around."""
    counts = _counts(rule, eqn, placements, mesh, ring)
    flops = rule.flops / shared_by(rule, setting.op, counts)
    atoms = (*eqn.invars, *eqn.outvars)
    held = [local_bytes(a, p, mesh.sizes) for a, p in zip(atoms, (*setting.operands, *setting.results), strict=True)]
    return RingTime(*map(float, ring_price(ring, rule, setting.op, held, flops, mesh)))


def _rule_of(eqn: Eqn) -> Rule:
    op = operation_of(eqn)
    return gathered(op) if runs_once(eqn) else find_rule(op)


def _seconds(eqn: Eqn, rule: Rule, memory: int, placements: Mapping[Var, Placement], mesh: MeshView) -> float:
    """Seconds that a device computes in one execution of an operation that reads and writes `memory` bytes."""
    if not rule.is_heavy:
        return light_seconds(memory, mesh)
    flops = device_flops(eqn, rule, placements, mesh)
    return float(heavy_seconds(flops, memory, mesh, work_dtype(eqn), rule.passes, rule.kind))


def device_flops(eqn: Eqn, rule: Rule, placements: Mapping[Var, Placement], mesh: MeshView) -> float:
    """Floating-point operations of a device in one execution of an operation."""
    if not rule.flops:
        return 0.0
    return rule.flops / shared_by(rule, operation_of(eqn), _counts(rule, eqn, placements, mesh))


def whole_seconds(eqn: Eqn, mesh: MeshView) -> float:
    """Seconds that one device alone computes in one execution of an equation, its bodies included."""
    if is_transfer(eqn) or pin_of(eqn) is not None:
        return 0.0
    if eqn.primitive.name not in NESTED:
        atoms = [a for a in (*eqn.invars, *eqn.outvars) if not compat.is_literal(a)]
        whole, rule = dict.fromkeys(atoms, REPLICATED), _rule_of(eqn)
        each = element_seconds(rule.kind, mesh.topology)
        arithmetic = each * max((bytes_of(a) / itemsize_of(a.aval) for a in atoms), default=0) if each else 0.0
        return arithmetic + _seconds(eqn, rule, sum(map(bytes_of, atoms)), whole, mesh)
    trips = trips_of(eqn)
    return sum(n * whole_seconds(e, mesh) for body in bodies_of(eqn) for e, n in executions(body, trips))


def _counts(
    rule: Rule, eqn: Eqn, placements: Mapping[Var, Placement], mesh: MeshView, ring: Ring | None = None
) -> dict[str, int]:
    """The number of devices that share the work along each factor of an operation: those that split it, but those of
    its ring."""
    found: dict[str, tuple[str, ...]] = {}
    for factors, atom in zip((*rule.operands, *rule.results), (*eqn.invars, *eqn.outvars), strict=True):
        splits = {} if compat.is_literal(atom) else placements[atom].splits
        found |= {f: axes for dim, axes in splits.items() if (f := factors[dim])}
    around = {f: found.get(other, ()) for f, other in rule.around.items()}
    if ring is not None:
        around[ring.factor] = (ring.axis,)
    return {f: math.prod(mesh.sizes[a] for a in axes if a not in around.get(f, ())) for f, axes in found.items()}
