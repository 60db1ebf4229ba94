"""Collectives that a plan counts on to be hidden, and what the schedule of a compiled program hides of them.

Instructions run in the order of the text. A collective goes on from its start until it takes no more time, or else its
done waits for it; collectives share the links, one after the other. One that is not a pair is waited for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

from shardc.machine.mesh import MeshView
from shardc.passes.audit.hlo import HloCollective, collectives_of
from shardc.passes.audit.hlo_groups import axes_of_groups, crossed_axes
from shardc.passes.audit.hlo_schedule import Pairs
from shardc.passes.audit.hlo_seconds import InstructionSeconds
from shardc.passes.audit.hlo_text import Instruction, Module, parse_module, trip_count
from shardc.passes.estimate.overlap import Overlap
from shardc.sbp.cost import COLLECTIVES, send_price

_Key = TypeVar("_Key")
_Class: TypeAlias = tuple[str, frozenset[str]]
"""Collectives that XLA may make of each other: their kind, and the axes that they go along."""


@dataclass(frozen=True, slots=True)
class FoundOverlap:
    """A planned overlap in a compiled program.

    Attributes:
      planned: what the plan counts on.
      hidden: seconds of one call that the schedule hides of it, at most what was planned.
      names: instructions of such collectives that wait, and their seconds in one call, the longest first.
    """

    planned: Overlap
    hidden: float
    names: tuple[tuple[str, float], ...]

    @property
    def exposed(self) -> float:
        """Seconds that are planned as hidden, and that the compiled program waits for."""
        return self.planned.hidden - self.hidden


@dataclass(frozen=True, slots=True)
class Timed:
    """A collective of a compiled program: seconds of one execution, and of these the part that is hidden."""

    op: HloCollective
    seconds: float
    hidden: float

    @property
    def times(self) -> int:
        return self.op.trips or 1


def find_overlaps(planned: Sequence[Overlap], texts: Iterable[str], mesh: MeshView) -> tuple[FoundOverlap, ...]:
    """Each planned overlap with what the schedules of compiled programs hide of it.

    Args:
      planned: the plan's.
      texts: of the optimized modules, `compiled.as_text()`.
      mesh: of the plan.

    What is found at the line of user code of a planned collective is its own; what is left there counts for others of
    its kind and axes, as XLA combines collectives.
    """
    if not planned:
        return ()
    price = _Prices(planned, mesh)
    at_line, anywhere = defaultdict[tuple[_Class, str], float](float), defaultdict[_Class, float](float)
    waiting: defaultdict[_Class, list[tuple[str, float, str]]] = defaultdict(list)
    for text in texts:
        for timed in schedule_of(parse_module(text), mesh, price):
            kind, hidden = _class_of(timed.op, mesh), timed.hidden * timed.times
            at_line[kind, timed.op.source] += hidden
            anywhere[kind] += hidden
            if (waits := (timed.seconds - timed.hidden) * timed.times) > 0:
                waiting[kind].append((timed.op.name, waits, timed.op.source))
    taken = [_take(at_line, (_planned_class(o), o.source), o.hidden) for o in planned]
    for o, own in zip(planned, taken, strict=True):
        anywhere[_planned_class(o)] -= own
    found = [own + _take(anywhere, _planned_class(o), o.hidden - own) for o, own in zip(planned, taken, strict=True)]
    return tuple(FoundOverlap(o, s, _named(waiting[_planned_class(o)], o)) for o, s in zip(planned, found, strict=True))


def _take(left: defaultdict[_Key, float], key: _Key, most: float) -> float:
    taken = max(0.0, min(left[key], most))
    left[key] -= taken
    return taken


def _named(waiting: Sequence[tuple[str, float, str]], planned: Overlap) -> tuple[tuple[str, float], ...]:
    own = [w for w in waiting if w[2] == planned.source] or waiting
    return tuple((name, seconds) for name, seconds, _ in sorted(own, key=lambda w: -w[1]))


# --- kinds and prices ------------------------------------------------------------------------------------------------

_ALIKE: Final = {"ring": "permute", "reduce_scatter": "all_reduce"}
"""XLA:TPU makes all-reduces of reduce-scatters."""


def _planned_class(o: Overlap) -> _Class:
    kind = _ALIKE.get(o.kind, o.kind)
    return kind, frozenset() if kind == "permute" else frozenset(o.axes)


def _class_of(op: HloCollective, mesh: MeshView) -> _Class:
    kind = _ALIKE.get(op.kind, op.kind)
    along = () if kind == "permute" else axes_of_groups(op.groups, mesh.sizes)
    return kind, frozenset(mesh.joined(along or ()))


class _Prices:
    """The seconds of collectives of a compiled program, by what they send: of permutes as the plan has its rings'."""

    def __init__(self, planned: Iterable[Overlap], mesh: MeshView) -> None:
        rings = [o for o in planned if o.kind == "ring"]
        self._mesh = mesh
        self._of_rings = sum(o.seconds for o in rings) / (sum(o.bytes for o in rings) or 1)

    def __call__(self, op: HloCollective) -> float:
        if op.kind == "permute" and self._of_rings:
            return op.bytes * self._of_rings
        if op.kind not in COLLECTIVES:
            return 0.0
        n = max(map(len, op.groups), default=1)
        share = {"all_reduce": n / (2 * (n - 1)), "permute": 1}.get(op.kind, 1 / (n - 1))
        axes = crossed_axes(op.groups, self._mesh.sizes)
        return send_price(op.kind, round(op.bytes * share), self._mesh, axes).seconds


# --- the schedule ----------------------------------------------------------------------------------------------------


def schedule_of(module: Module, mesh: MeshView, price: Callable[[HloCollective], float]) -> list[Timed]:
    """The collectives of a scheduled module with the seconds that its order of instructions hides.

    Args:
      module: the module.
      mesh: whose machine tells what instructions take.
      price: seconds of a collective by itself.
    """
    return _Clock(module, mesh, price).found


class _Clock:
    """Runs through the computations of a module."""

    def __init__(self, module: Module, mesh: MeshView, price: Callable[[HloCollective], float]) -> None:
        self._module, self._pairs = module, Pairs(module)
        self._seconds = InstructionSeconds(module, mesh.topology)
        self._ops: defaultdict[tuple[str, str], list[HloCollective]] = defaultdict(list)
        for op in collectives_of(module):
            self._ops[self._pairs.place_of(op)].append(op)
        self._price = price
        self._whole: dict[str, float] = {}
        self.found: list[Timed] = []
        self._of(module.entry)

    def _of(self, computation: str) -> float:
        """Seconds of one execution of a computation."""
        if computation in self._whole:
            return self._whole[computation]
        now = idle = 0.0  # seconds since its begin, and when the links are idle again
        begins: defaultdict[int, list[tuple[Sequence[HloCollective], int]]] = defaultdict(list)
        ends: defaultdict[int, list[tuple[Sequence[HloCollective], float]]] = defaultdict(list)
        for k, (name, i) in enumerate(self._module.computations[computation].items()):
            for ops, end in begins.pop(k, ()):
                idle = max(now, idle) + self._together(ops)
                ends[end].append((ops, idle))
            for ops, end in ends.pop(k, ()):
                waits = min(max(0.0, end - now), self._together(ops))
                self._note(ops, waits)
                now += waits
            ops = self._ops.get((computation, name), ())
            if ops and self._pairs.is_start(computation, name):
                begin, end = self._pairs.span(computation, name)
                begins[begin].append((ops, end))
                continue
            if ops:
                now = idle = max(now, idle) + self._together(ops)
                self._note(ops, self._together(ops))
            now += 0.0 if self._pairs.is_done(i) else self._work(computation, i)
        self._whole[computation] = now
        return now

    def _together(self, ops: Sequence[HloCollective]) -> float:
        """Seconds of collectives that one instruction runs. One that is reached from two places is listed for each."""
        return sum({(op.computation, op.name): self._price(op) for op in ops}.values())

    def _note(self, ops: Sequence[HloCollective], waits: float) -> None:
        waited = waits / (self._together(ops) or 1.0)
        self.found += [Timed(op, self._price(op), self._price(op) * (1 - waited)) for op in ops]

    def _work(self, computation: str, i: Instruction) -> float:
        inside = map(self._of, i.callees)
        match i.opcode:
            case "while":
                return sum(inside) * (trip_count(self._module, computation, i) or 1)
            case "call":
                return sum(inside)
            case "conditional":
                return max(inside, default=0.0)
            case _:
                return self._seconds(computation, i)
