"""Cuts a program with a loop over microbatches into one program for each stage.

    args -> before -> loop(body) -> after -> results
        -->  stage s: its args -> its part of before -> loop(F_s, B_s) -> its part of after -> its results

A value that crosses stages is a `send` on one and a `receive` on the other. Each stage's program is planned on the
stage's mesh like any other program; its tasks are cut out of the plan (`split_tasks`).

Before and after the loop an equation is computed where its large inputs are: gradients come from the loop on the stage
that made them, and the update of a parameter follows its gradient. A value that depends only on arguments is computed
on every stage that reads it. A scalar computed from scalars of several stages is computed on the lowest of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr, Var
from shardc.errors import PipelineError, all_offenders
from shardc.ir.boundary import MARKS
from shardc.ir.eqns import add_eqn, full_eqn
from shardc.ir.loop import Carry, Loop
from shardc.ir.program import Program
from shardc.ir.transfer import receive_p, send_p
from shardc.ir.walk import renamed, with_atoms
from shardc.pipeline.cut.cut_loop import (
    PlacedBody,
    boundary_lines,
    find_loop,
    place_body,
)
from shardc.pipeline.cut.find_homes import find_homes, largest
from shardc.pipeline.cut.keep_state import keep_state
from shardc.pipeline.cut.recompute_forward import recompute_forward
from shardc.pipeline.cut.regroup import regroup
from shardc.pipeline.cut.split_backward import split_backward
from shardc.pipeline.cut.split_nested import split_nested
from shardc.pipeline.schedule.action import TaskId
from shardc.plan.borders import match_donated
from shardc.plan.request import Argument


@dataclass(frozen=True)
class Crossing:
    """A value that goes from one stage to another.

    Attributes:
      number: the number of its send and its receive.
      aval: its type.
      sent, received: the tasks that send and receive it: both in the loop, or both after it.
      line: the source line of the equation that makes it.
    """

    number: int
    aval: object
    sent: TaskId
    received: TaskId
    line: str


@dataclass(frozen=True)
class StageProgram:
    """The program of one stage.

    Attributes:
      stage: the stage.
      program: the program, with sends and receives, and a scan over microbatches.
      arguments, results: numbers of its inputs and results in the whole program.
      tasks: for each value that the loop's body makes or receives, the task that does; for each value received after
        the loop, the update that takes it.
    """

    stage: int
    program: Program
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    tasks: Mapping[Var, TaskId]


@dataclass(frozen=True)
class Cut:
    """A program cut into stages.

    Attributes:
      stages: their programs.
      homes: for each input of the whole program the stage where it lives between calls: the lowest one that uses it. An
        input that is only read for its own new value lives with the largest value in the same equations.
      crossings: the values that go from stage to stage, by number.
      loop: the loop over microbatches.
      body: its body with a task for each equation.
    """

    stages: tuple[StageProgram, ...]
    homes: tuple[int, ...]
    crossings: tuple[Crossing, ...]
    loop: Loop
    body: PlacedBody


def cut_stages(
    program: Program, stages: int, where: str, *, recompute: Collection[int] = (), split: bool = False
) -> Cut:
    """Cut a program at its stage boundaries.

    Args:
      program: the program, traced with its marks.
      stages: the number of stages.
      where: the function, for errors.
      recompute: the stages that recompute their forward in their backward.
      split: whether the gradients of weights are tasks of their own.

    Raises:
      PipelineError: it has no loop over microbatches, or its boundaries do not make this number of stages.
    """
    loop = find_loop(program, where)
    body = place_body(loop, stages, where)
    idle = _idle(body)
    if idle:
        lines = boundary_lines(loop)
        raise PipelineError(
            all_offenders(
                f"{where}: stages without work",
                [f"stage {s}: nothing is computed {_between(s, stages, lines)}; remove one boundary." for s in idle],
            )
        )
    body = recompute_forward(body, recompute)
    if split:
        body = split_backward(body)
    body = keep_state(body, where)
    return _Assembler(program, loop, body).run()


def _idle(body: PlacedBody) -> list[int]:
    """The stages without work of their own: they only add up values of other stages, or zeros."""
    sums = {c.after for c in body.carries}
    working = {
        p.stage
        for p, e in body.eqns
        if not sums.issuperset(e.outvars) and not all(compat.is_literal(a) for a in e.invars)
    }
    return [s for s in range(body.stages) if s not in working]


def _between(stage: int, stages: int, lines: Sequence[str]) -> str:
    """The boundaries before and after a stage, as text for an error."""
    if stage == 0:
        return f"before the boundary at {lines[0]}" if lines else "there"
    if stage == stages - 1:
        return f"after the boundary at {lines[stage - 1]}"
    return f"between the boundaries at {lines[stage - 1]} and {lines[stage]}"


@dataclass
class _Assembler:
    program: Program
    loop: Loop
    body: PlacedBody
    crossings: list[Crossing] = field(default_factory=list[Crossing])
    tasks: list[dict[Var, TaskId]] = field(init=False)

    def __post_init__(self) -> None:
        self.count = self.body.stages
        self.tasks = [{} for _ in range(self.count)]

    def run(self) -> Cut:
        self._split_body()
        self._spread()
        stages = tuple(self._assemble(s) for s in range(self.count))
        return Cut(stages, tuple(self.homes), tuple(self.crossings), self.loop, self.body)

    # -- the loop

    def _split_body(self) -> None:
        """Make `self.scans`: the scan of each stage, with its sends and receives."""
        n = self.count
        copies: dict[Var, list[TaskId]] = {}
        for p, eqn in self.body.eqns:
            for v in eqn.outvars:
                copies.setdefault(v, []).append(p)
        names = self._copy_names(copies)
        gives, eqns = self._loop_crossings(copies)
        for p, eqn in self.body.eqns:
            stage = p.stage
            mine = {v: names[p, v] for v in eqn.invars if not compat.is_literal(v) and (p, v) in names}
            made = [names[p, v] for v in eqn.outvars]
            eqns[stage].append(with_atoms(eqn, mine).replace(outvars=made))
            self.tasks[stage] |= dict.fromkeys(made, p)
            for v in eqn.outvars:
                for number in gives.get(v, ()):
                    out = compat.fresh_var(v.aval)
                    eqns[stage].append(_send(v, out, number, eqn))
                    self.tasks[stage][out] = p
        self.zeros: list[list[Eqn]] = [[] for _ in range(n)]
        self.sums: list[Eqn] = []
        self.scans: list[Eqn | None] = []
        self.made_in: dict[Var, int] = {}
        ends = self._ends()
        for s in range(n):
            self.scans.append(self._scan(s, eqns[s], ends))

    def _copy_names(self, copies: Mapping[Var, Sequence[TaskId]]) -> dict[tuple[TaskId, Var], Var]:
        """The variable of each value in each task: a fresh one if a stage computes the value twice."""
        names: dict[tuple[TaskId, Var], Var] = {}
        for v, at in copies.items():
            for i, p in enumerate(at):
                twice = any(q.stage == p.stage for q in at[:i])
                names[p, v] = compat.fresh_var(v.aval) if twice else v
        return names

    def _loop_crossings(self, copies: Mapping[Var, Sequence[TaskId]]) -> tuple[dict[Var, list[int]], list[list[Eqn]]]:
        """The numbers of the crossings of each value in the loop, and the receives of each stage."""
        n = self.count
        inputs = {*self.loop.operands, *(p.before for p in self.body.carries)}
        takes: dict[tuple[Var, int], TaskId] = {}  # value and stage: the first task that reads it there
        for p, eqn in self.body.eqns:
            for v in eqn.invars:
                there = compat.is_literal(v) or v in inputs or p in copies[v]
                if not there and copies[v][0].stage != p.stage:
                    key = v, p.stage
                    takes[key] = min(takes.get(key, p), p)
        gives: dict[Var, list[int]] = {}
        received: list[list[Eqn]] = [[] for _ in range(n)]
        for (v, stage), p in takes.items():
            q = copies[v][0]
            if self.body.fused and stage == n - 1 and q.kind == "F":
                p = TaskId(stage, "F")  # the fused stage's forward only takes its input in
            line = next(compat.source_line(e) for _, e in self.body.eqns if v in e.outvars)
            number = self._cross(v, q, p, line)
            gives.setdefault(v, []).append(number)
            received[stage].append(_receive(v, number))
            self.tasks[stage][v] = p
        return gives, received

    def _ends(self) -> dict[Var, Var]:
        """The result of each part of a carry, by its value before a microbatch. Sums of parts go to `self.sums`."""
        ends: dict[Var, Var] = {}
        for c in self.loop.carries:
            parts = [p.before for p in self.body.carries if p.carry is c]
            if len(parts) < 2:
                ends |= dict.fromkeys(parts, c.end)
                continue
            ends |= {v: compat.fresh_var(c.end.aval) for v in parts}
            so_far = ends[parts[0]]
            for part in parts[1:]:
                after = c.end if part is parts[-1] else compat.fresh_var(c.end.aval)
                self.sums.append(add_eqn(so_far, ends[part], after, self.loop.eqn))
                so_far = after
        return ends

    def _scan(self, stage: int, eqns: list[Eqn], ends: Mapping[Var, Var]) -> Eqn | None:
        if not eqns:
            return None
        loop = self.loop
        carries: list[Carry] = []
        for part in self.body.carries:
            if part.task.stage == stage:
                start = part.carry.start
                if part.before is not part.carry.before:
                    start = compat.fresh_var(part.before.aval)
                    self.zeros[stage].append(full_eqn(0, start))
                carries.append(Carry(part.before, part.after, start, ends[part.before]))
        ys = zip(loop.stacks, self.body.ys, strict=True)
        mine = replace(loop, carries=carries, stacks={v: y for v, (y, p) in ys if p.stage == stage})
        self.made_in |= dict.fromkeys(mine.results, stage)
        return mine.reading(eqns).equation()

    def _cross(self, v: Var, sent: TaskId, received: TaskId, line: str) -> int:
        """Add a crossing. Returns its number."""
        number = len(self.crossings)
        self.crossings.append(Crossing(number, v.aval, sent, received, line))
        return number

    # -- before and after the loop

    def _spread(self) -> None:
        """Find the stages of the equations outside of the loop and of results, and the homes of arguments."""
        jaxpr = self.program.jaxpr
        names: dict[Var, Atom] = {}
        outer: list[Eqn] = []
        for eqn in jaxpr.eqns:
            if eqn is self.loop.eqn:
                outer.append(eqn)
                outer += self.sums
            elif eqn.primitive in MARKS:
                names[eqn.outvars[0]] = eqn.invars[0]
            else:
                outer.append(with_atoms(eqn, names))
        self.scans = [s if s is None else with_atoms(s, names) for s in self.scans]
        self.outvars = renamed(jaxpr.outvars, names)
        inputs, ahead = jaxpr.invars, self._ahead(outer)
        self.anchors, self.outer = dict(self.made_in), [*split_nested(ahead, {}, {}), self.loop.eqn]
        known = {v: min(stages) for v, stages in self._uses({}).items() if v not in self.made_in}
        around = [e for e in outer if e is not self.loop.eqn]
        belongs = find_homes(around, {**known, **self.made_in})
        first = set(ahead)
        behind = split_nested([e for e in around if e not in first], self.anchors, belongs)
        self.outer += regroup(behind, self.anchors, self.outvars)
        uses = self._uses({})
        homes = [min(uses[v]) if uses.get(v) else belongs.get(v, 0) for v in inputs]
        at = {**belongs, **dict(zip(inputs, homes, strict=True)), **self.anchors}
        for eqn in around:  # the rest: scalars computed from arguments
            top = largest(eqn.invars, at)
            at |= {} if top is None else {v: top for v in eqn.outvars if v not in at}
        replaced = match_donated(self.program, [Argument(donated=True)] * len(inputs))
        self.result_stage = [
            homes[tie] if tie is not None else 0 if compat.is_literal(a) else at.get(a, 0)
            for a, tie in zip(self.outvars, replaced, strict=True)
        ]
        wanted: dict[Var, set[int]] = {}
        for a, s in zip(self.outvars, self.result_stage, strict=True):
            if not compat.is_literal(a):
                wanted.setdefault(a, set()).add(s)
        self.uses = self._uses(wanted)
        self.homes = [
            h if h in (found := self.uses.get(v, {h})) else min(found) for v, h in zip(inputs, homes, strict=True)
        ]

    def _ahead(self, outer: Sequence[Eqn]) -> list[Eqn]:
        """The equations that the loop needs, in order."""
        needed = {a for s in self.scans if s is not None for a in s.invars if not compat.is_literal(a)}
        found: list[Eqn] = []
        for eqn in reversed(outer):
            if eqn is not self.loop.eqn and not needed.isdisjoint(eqn.outvars):
                needed.update(compat.variables(eqn.invars))
                found.append(eqn)
        return found[::-1]

    def _uses(self, wanted: Mapping[Var, set[int]]) -> dict[Var, set[int]]:
        """The stages that read each variable, given the stages on which results are wanted."""
        uses = {v: set(stages) for v, stages in wanted.items()}
        results = set(compat.variables(self.outvars))
        for eqn in reversed(self.outer):
            if eqn is self.loop.eqn:
                for s, scan in enumerate(self.scans):
                    for a in () if scan is None else (*scan.invars, *(z for e in self.zeros[s] for z in e.invars)):
                        if not compat.is_literal(a):
                            uses.setdefault(a, set()).add(s)
                continue
            for s in self._stages_of(eqn, uses, results):
                for a in eqn.invars:
                    if not compat.is_literal(a):
                        uses.setdefault(a, set()).add(s)
        return uses

    def _stages_of(self, eqn: Eqn, uses: Mapping[Var, set[int]], results: set[Var]) -> set[int]:
        anchored = {self.anchors[v] for v in eqn.outvars if v in self.anchors}
        if anchored:
            live = eqn.effects or any(v in results or uses.get(v) for v in eqn.outvars)
            return anchored if live else set()
        found = set[int]().union(*(uses.get(v, ()) for v in eqn.outvars))
        return found or ({0} if eqn.effects else set())

    # -- one stage's program

    def _assemble(self, stage: int) -> StageProgram:
        if not hasattr(self, "built"):
            self._build()
        inputs = self.program.jaxpr.invars
        read = {a for e in self.built[stage] for a in compat.variables(e.invars)}
        results = [i for i, s in enumerate(self.result_stage) if s == stage]
        outvars = [self.outvars[i] for i in results]
        read |= set(compat.variables(outvars))
        arguments = [i for i, v in enumerate(inputs) if v in read]
        jaxpr: Jaxpr = compat.new_jaxpr([inputs[i] for i in arguments], outvars, self.built[stage], self.program.jaxpr)
        program = Program(
            f"{self.program.name}.stage{stage}",
            jaxpr,
            tuple(self.program.in_paths[i] for i in arguments),
            tuple(self.program.out_paths[i] for i in results),
            (),
            None,
            None,
            passed=(("cut_stages", jaxpr),),
        )
        return StageProgram(stage, program, tuple(arguments), tuple(results), self.tasks[stage])

    def _build(self) -> None:
        """Make `self.built`, the equations of every stage with sends and receives, and the levels of their values."""
        n = self.count
        results = set(compat.variables(self.outvars))
        self.built: list[list[Eqn]] = [[] for _ in range(n)]
        self.levels: list[dict[Var, int]] = [{} for _ in range(n)]
        self.home: dict[Var, int] = {}
        self.send_at: dict[tuple[Var, int], int] = {}  # the place of a value's send: behind its equation
        self.lines: dict[Var, str] = {}
        for eqn in self.outer:
            if eqn is self.loop.eqn:
                for s, scan in enumerate(self.scans):
                    if scan is not None:
                        self.built[s] += self.zeros[s]
                        self._append(scan, s, 0, anchored=True)
                continue
            for s in sorted(self._stages_of(eqn, self.uses, results)):
                level = max([self._fetch(a, s) for a in eqn.invars], default=0)
                self._append(eqn, s, level, anchored=any(v in self.anchors for v in eqn.outvars))
        for a, s in zip(self.outvars, self.result_stage, strict=True):
            self._fetch(a, s)

    def _append(self, eqn: Eqn, stage: int, level: int, *, anchored: bool) -> None:
        """Add an equation to a stage. The results of an anchored one are sent to other stages from there."""
        self.built[stage].append(eqn)
        self.levels[stage] |= dict.fromkeys(eqn.outvars, level)
        if anchored:
            self.home |= dict.fromkeys(eqn.outvars, stage)
            self.send_at |= {(v, stage): len(self.built[stage]) for v in eqn.outvars}
            self.lines |= dict.fromkeys(eqn.outvars, compat.source_line(eqn))

    def _fetch(self, a: Atom, stage: int) -> int:
        """Send a value to a stage if it is not there. Returns its level there."""
        if compat.is_literal(a) or a in self.levels[stage] or a not in self.home:
            return 0 if compat.is_literal(a) else self.levels[stage].get(a, 0)
        source, at = self.home[a], self.send_at
        sent = self.levels[source][a]
        received = self.tasks[stage][a] = TaskId(stage, "update", sent + 1)
        number = self._cross(a, TaskId(source, "update", sent), received, self.lines.get(a, ""))
        self.built[source].insert(at[a, source], _send(a, compat.fresh_var(a.aval), number, None))
        for key, place in list(at.items()):
            if key[1] == source and place >= at[a, source] and key != (a, source):
                at[key] = place + 1
        self.built[stage].append(_receive(a, number))
        self.levels[stage][a] = sent + 1
        return sent + 1


def _send(v: Var, out: Var, number: int, like: Eqn | None) -> Eqn:
    return compat.new_eqn([v], [out], send_p, {"number": number, "pin": None}, like, {compat.TRANSFER})


def _receive(v: Var, number: int) -> Eqn:
    return compat.new_eqn([], [v], receive_p, {"number": number, "pin": None, "aval": v.aval}, None, {compat.TRANSFER})
