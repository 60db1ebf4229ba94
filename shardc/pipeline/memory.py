"""The memory of a pipeline, found by following every rank's steps with the values that they read, make and drop.

A device's memory is taken when a task is launched and given back when the last reference goes, so what a rank holds
depends on its own steps, whose order is fixed, and on how far the others run ahead of it, which registers bound. The
account has each message there as early as any timing can bring it (`earliest_arrivals`): it holds for every run, and
the simulated times only say when. The one thing that follows them is `leaving`: how long a value that was sent stays
for the link's sake, as long as the link is as fast as the topology says.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from shardc import compat
from shardc.compat import Atom, Var
from shardc.ir.walk import short_aval
from shardc.passes.estimate.backend import backend_of
from shardc.passes.estimate.memory import estimate_memory
from shardc.passes.estimate.sizes import piece_bytes
from shardc.pipeline.cut.split_tasks import StageTask
from shardc.pipeline.place_stages import Stage
from shardc.pipeline.rank_memory import KINDS, Holding, PipelineMemory, RankMemory
from shardc.pipeline.schedule.action import Action, TaskId
from shardc.pipeline.schedule.message_lifetimes import earliest_arrivals
from shardc.pipeline.schedule.simulate import LinkCost, Timeline
from shardc.pipeline.stage_network import StageNetwork
from shardc.pipeline.step_values import SentValue, StepValues, step_values
from shardc.plan.names import ValueName
from shardc.runtime.actor import Message
from shardc.sbp.placement import REPLICATED

_ORDER = list(KINDS)


@dataclass(frozen=True, eq=False)
class SimulatedCall:
    """A call of a pipeline, as far as memory depends on it.

    Attributes:
      built: the actors, their channels and the values that these carry.
      stages: the planned stages.
      homes: the stage on which each argument of the whole program lives.
      timeline: the simulated call, of a network with the registers that the call will have.
      link: as for `simulate`.
      working_of: bytes that live inside a task besides its inputs and outputs.
    """

    built: StageNetwork
    stages: Sequence[Stage]
    homes: Sequence[int]
    timeline: Timeline
    link: LinkCost
    working_of: Callable[[StageTask], int]

    def memory(self, capacities: Sequence[int]) -> PipelineMemory:
        """The memory of every rank, given the bytes of a device of each."""
        return PipelineMemory(tuple(_Rank(self, r).run(c) for r, c in enumerate(capacities)))

    @cached_property
    def values(self) -> Mapping[Hashable, StepValues]:
        return step_values(self.built, self.stages)

    @cached_property
    def arrivals(self) -> list[list[list[Message]]]:
        return earliest_arrivals(self.timeline)

    @cached_property
    def moved(self) -> dict[Message, float]:
        return _moved(self.timeline, self.link)

    @cached_property
    def working(self) -> dict[TaskId, int]:
        return {i: self.working_of(t) for i, t in self.built.tasks.items()}

    @cached_property
    def donated(self) -> dict[TaskId, Mapping[int, int]]:
        """For each task the inputs whose buffers its results take."""
        return {i: {} if t.plan is None else t.plan.donations for i, t in self.built.tasks.items()}

    @cached_property
    def results(self) -> list[set[Var]]:
        """The residents of each stage that are results."""
        return [set(compat.variables(s.tasks.results)) for s in self.stages]

    @cached_property
    def _sizes(self) -> dict[tuple[int, Var], int]:
        return {}

    def size(self, stage: int, atom: Atom) -> int:
        """Bytes that a device of a stage allots for a value."""
        mesh = self.stages[stage].mesh
        backend = backend_of(mesh.topology.backend)
        if compat.is_literal(atom):
            return piece_bytes(atom.aval, REPLICATED, {}, backend)
        if (stage, atom) not in self._sizes:
            placement = self.stages[stage].tasks.placements[atom]
            self._sizes[stage, atom] = piece_bytes(atom.aval, placement, mesh.sizes, backend)
        return self._sizes[stage, atom]

    def name(self, stage: int, v: Var) -> ValueName:
        """The name of a value; of one that another stage sends that which it has there."""
        here = self.stages[stage]
        name = here.names[v]
        if v in self.results[stage] and name.kind != "argument":
            return ValueName("result", here.program.program.out_paths[here.tasks.results.index(v)], name.line)
        for route in self.built.channel_values:
            if route is not None and route.target == stage != route.source and v in route.taken:
                return self.name(route.source, route.given[route.taken.index(v)])
        return name


def working_bytes(task: StageTask) -> int:
    """Bytes that live inside a task besides its inputs and outputs: an estimate, in program order (`estimate_memory`).

    The exception are tasks of many independent products, such as W: XLA:CPU begins them all at once, which takes more,
    and is not counted. `PipelineExecutable.memory` has XLA's own figures.
    """
    if task.plan is None:
        return 0
    boxed, mesh = task.plan.boxed, task.plan.mesh
    backend = backend_of(mesh.topology.backend)
    return estimate_memory(boxed.jaxpr, boxed.placements, mesh.sizes, set(task.outputs), backend=backend).temporaries


class _HeldValue:
    """The memory of one value, and how many hold it for each reason."""

    __slots__ = ("bytes", "holds", "kind", "since", "stage", "var")

    def __init__(self, stage: int, var: Var, size: int) -> None:
        self.stage, self.var, self.bytes = stage, var, size
        self.holds: dict[str, int] = {}
        self.kind = ""
        self.since = 0


class _Entry(NamedTuple):
    buffer: _HeldValue
    kind: str
    since: int
    until: int


class _Ledger:
    """When each buffer was there, and for what. Time is counted in half steps: 2k while step k runs, 2k + 1 after."""

    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self._open: dict[int, _HeldValue] = {}

    def hold(self, buffer: _HeldValue, kind: str, at: int) -> None:
        buffer.holds[kind] = buffer.holds.get(kind, 0) + 1
        self._open[id(buffer)] = buffer
        self._turn(buffer, at)

    def release(self, buffer: _HeldValue, kind: str, at: int) -> None:
        buffer.holds[kind] -= 1
        if not buffer.holds[kind]:
            del buffer.holds[kind]
            self._turn(buffer, at)

    def _turn(self, buffer: _HeldValue, at: int) -> None:
        kind = min(buffer.holds, key=_ORDER.index, default="")
        if kind == buffer.kind:
            return
        if buffer.kind and buffer.since < at:
            self.entries.append(_Entry(buffer, buffer.kind, buffer.since, at))
        buffer.kind, buffer.since = kind, at
        if not kind:
            del self._open[id(buffer)]

    def end(self, at: int) -> None:
        self.entries += [_Entry(b, b.kind, b.since, at) for b in self._open.values()]
        self._open.clear()


class _Rank:
    """The account of one rank."""

    def __init__(self, call: SimulatedCall, rank: int) -> None:
        self.call, self.number = call, rank
        self.steps = call.timeline.network.actors[rank]
        self.starts, self.ends = call.timeline.starts[rank], call.timeline.ends[rank]
        self.stages = [s.number for s in call.stages if s.rank == rank]
        self.ledger = _Ledger()
        self.residents: dict[tuple[int, Var], _HeldValue] = {}
        self.inbox: dict[Message, list[tuple[_HeldValue, str]]] = {}
        self.leaving: dict[int, list[_HeldValue]] = {}  # by the half step at which they are gone

    def run(self, capacity: int) -> RankMemory:
        self.enter()
        for k, step in enumerate(self.steps):
            self.leave(2 * k)
            for message in self.call.arrivals[self.number][k]:
                self.arrive(message, 2 * k)
            values = self.call.values.get(step.label)
            if values is not None:
                self.step(k, values)
            for message in step.takes:
                for buffer, kind in self.inbox.pop(message, ()):
                    self.ledger.release(buffer, kind, 2 * k + 1)
            self.leave(2 * k + 1)
        self.ledger.end(2 * len(self.steps))
        return self.summary(capacity)

    def enter(self) -> None:
        """The arguments, before the first step; the caller holds those that live here as long as the call runs."""
        entered: dict[tuple[int, object], _HeldValue] = {}
        for stage in self.stages:
            for i, v in zip(
                self.call.stages[stage].program.arguments, self.call.stages[stage].tasks.arguments, strict=True
            ):
                key = i, self.call.stages[stage].tasks.placements[v]
                if key not in entered:
                    entered[key] = _HeldValue(stage, v, self.call.size(stage, v))
                if self.call.homes[i] == stage:
                    self.ledger.hold(entered[key], "arguments", 0)
                self.ledger.hold(entered[key], "copies", 0)
                self.residents[stage, v] = entered[key]

    def arrive(self, message: Message, at: int) -> None:
        """Takes in a message of another rank."""
        route = self.call.built.channel_values[message[0]]
        self.inbox[message] = []
        if route is None:
            return
        for v in route.taken:
            buffer = _HeldValue(route.target, v, self.call.size(route.target, v))
            self.ledger.hold(buffer, "registers", at)
            self.inbox[message].append((buffer, "registers"))

    def step(self, k: int, values: StepValues) -> None:
        call, task, step = self.call, values.task, self.steps[k]
        stage = task.id.stage
        taken = [[b for b, _ in self.inbox.get(m, ())] for m in step.takes]

        def read(v: Var, place: tuple[int, int] | None) -> _HeldValue:
            return self.residents[stage, v] if place is None else taken[place[0]][place[1]]

        for v, place in values.incoming:
            self.keep(stage, v, read(v, place), 2 * k)
        donated = call.donated[task.id]
        made = [
            read(*values.inputs[donated[o]]) if o in donated else _HeldValue(stage, v, call.size(stage, v))
            for o, v in enumerate(task.outputs)
        ]
        for resident, output, v in values.kept:
            self.keep(stage, resident, self.residents[stage, v] if output is None else made[output], 2 * k)
        for message, give in zip(step.gives, values.gives, strict=True):
            buffers = [read(g.var, g.spot) if g.output is None else made[g.output] for g in give]
            self.give(k, message, give, buffers)
        for v in values.drops:
            if (stage, v) in self.residents:
                self.ledger.release(self.residents.pop((stage, v)), self.word(stage, v), 2 * k + 1)

    def word(self, stage: int, v: Var) -> str:
        """The kind of memory that a resident is."""
        if v in self.call.results[stage]:
            return "results"
        return "copies" if v in self.call.stages[stage].tasks.arguments else "sums"

    def keep(self, stage: int, v: Var, buffer: _HeldValue, at: int) -> None:
        """A resident gets a value; the one that it had is read by the step and goes after it."""
        word = self.word(stage, v)
        self.ledger.hold(buffer, word, at)
        before = self.residents.get((stage, v))
        if before is not None:
            self.ledger.release(before, word, at if before is buffer else at + 1)
        self.residents[stage, v] = buffer

    def give(self, k: int, message: Message, give: Sequence[SentValue], buffers: Sequence[_HeldValue]) -> None:
        call = self.call
        route = call.built.channel_values[message[0]]
        if route is None:
            return
        if call.stages[route.target].rank != self.number:
            gone = max(2 * k + 1, bisect_left(self.times, call.moved[message]))
            for buffer in buffers:
                self.ledger.hold(buffer, "leaving", 2 * k)
                self.leaving.setdefault(gone, []).append(buffer)
            return
        word = "stash" if route.source == route.target else "registers"
        source, target = (call.stages[n].tasks.placements for n in (route.source, route.target))
        kept: list[tuple[_HeldValue, str]] = []
        for g, v, buffer in zip(give, route.taken, buffers, strict=True):
            same = source[g.var] == target[v]
            mine = buffer if same else _HeldValue(route.target, v, call.size(route.target, v))
            self.ledger.hold(mine, word, 2 * k)
            kept.append((mine, word))
        self.inbox[message] = kept

    def leave(self, at: int) -> None:
        """Releases the values that have left by now."""
        for buffer in self.leaving.pop(at, ()):
            self.ledger.release(buffer, "leaving", at)

    @cached_property
    def times(self) -> tuple[float, ...]:
        return tuple(t for ends in zip(self.starts, self.ends, strict=True) for t in ends)

    def summary(self, capacity: int) -> RankMemory:
        call, last = self.call, 2 * len(self.steps)
        changes = {kind: [0] * (last + 1) for kind in KINDS}

        def add(kind: str, size: int, since: int, until: int) -> None:
            changes[kind][since] += size
            changes[kind][until] -= size

        for buffer, kind, since, until in self.ledger.entries:
            add(kind, buffer.bytes, since, until)
        numbers = {s.label.microbatch for s in self.steps if isinstance(s.label, Action)}
        add("sums", 4 * len(numbers), 0, last)  # which microbatch: an input of tasks
        for k, step in enumerate(self.steps):
            values = call.values.get(step.label)
            add("working", 0 if values is None else call.working[values.task.id], 2 * k, 2 * k + 1)
        results = [(s, a) for s in self.stages for a in call.stages[s].tasks.results]
        add("results", sum(call.size(s, a) for s, a in results if compat.is_literal(a)), last - 1, last)
        parts = {kind: tuple(accumulate(row[:-1])) for kind, row in changes.items()}
        total = [sum(sizes) for sizes in zip(*parts.values(), strict=True)]
        peak = total.index(max(total))
        return RankMemory(
            self.number, capacity, self.times, parts, tuple(s.label for s in self.steps),
            sum(call.size(s, v) for s in self.stages for v in call.stages[s].tasks.arguments),
            sum(call.size(s, a) for s, a in results), self.holdings(peak),
        )  # fmt: skip

    def holdings(self, at: int) -> tuple[Holding, ...]:
        found: dict[tuple[str, int, Var], list[int]] = {}
        for buffer, kind, since, until in self.ledger.entries:
            if since <= at < until:
                found.setdefault((kind, buffer.stage, buffer.var), []).append(buffer.bytes)
        rows = [
            Holding(kind, stage, str(name), name.line, short_aval(v.aval), sum(sizes), len(sizes))
            for (kind, stage, v), sizes in found.items()
            for name in [self.call.name(stage, v)]
        ]
        return tuple(sorted(rows, key=lambda h: -h.bytes))


def _moved(timeline: Timeline, link: LinkCost) -> dict[Message, float]:
    """When each message between actors has left its giver: what two actors exchange goes one after the other."""
    net = timeline.network
    seconds = [link(c)[1] if c.source != c.target else 0.0 for c in net.channels]
    moved: dict[Message, float] = {}
    for steps, ends in zip(net.actors, timeline.ends, strict=True):
        free: dict[int, float] = {}
        for step, end in zip(steps, ends, strict=True):
            for message in step.gives:
                target = net.channels[message[0]].target
                free[target] = moved[message] = max(end, free.get(target, 0.0)) + seconds[message[0]]
    return moved
