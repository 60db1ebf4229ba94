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
from dataclasses import dataclass, field

from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr, Var
from shardc.errors import PipelineError, all_offenders
from shardc.ir.boundary import MARKS
from shardc.ir.eqns import add_eqn, full_eqn
from shardc.ir.nested import scan_params
from shardc.ir.program import Program
from shardc.ir.transfer import receive_p, send_p
from shardc.ir.walk import renamed, with_atoms
from shardc.pipeline.cut.cut_loop import (
    MicrobatchLoop,
    PlacedBody,
    boundary_lines,
    find_loop,
    place_body,
    stage_of,
)
from shardc.pipeline.cut.find_homes import find_homes, largest
from shardc.pipeline.cut.keep_state import keep_state
from shardc.pipeline.cut.recompute_forward import recompute_forward
from shardc.pipeline.cut.regroup import regroup
from shardc.pipeline.cut.split_backward import split_backward
from shardc.pipeline.cut.split_nested import split_nested
from shardc.plan.borders import match_donated
from shardc.plan.request import Argument


@dataclass(frozen=True)
class Crossing:
    """A value that goes from one stage to another.

    Attributes:
      number: the number of its send and its receive.
      aval: its type.
      source, target: the stages.
      sent, received: the positions of the tasks in the loop, or their levels after it.
      in_loop: whether it is sent for each microbatch, or once.
      line: the source line of the equation that makes it.
    """

    number: int
    aval: object
    source: int
    target: int
    sent: int
    received: int
    in_loop: bool
    line: str


@dataclass(frozen=True)
class StageProgram:
    """The program of one stage.

    Attributes:
      stage: the stage.
      program: the program, with sends and receives, and a scan over microbatches.
      arguments, results: numbers of its inputs and results in the whole program.
      position: for each value that the loop's body makes or receives, the position of the task that does.
      level: for each value received after the loop, the level of the update task that takes it.
    """

    stage: int
    program: Program
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    position: Mapping[Var, int]
    level: Mapping[Var, int]


@dataclass(frozen=True)
class Cut:
    """A program cut into stages.

    Attributes:
      stages: their programs.
      homes: for each input of the whole program the stage where it lives between calls: the lowest one that uses it. An
        input that is only read for its own new value lives with the largest value in the same equations.
      crossings: the values that go from stage to stage, by number.
      loop: the loop over microbatches.
      body: its body with a position for each equation.
    """

    stages: tuple[StageProgram, ...]
    homes: tuple[int, ...]
    crossings: tuple[Crossing, ...]
    loop: MicrobatchLoop
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
        stage_of(p, body.stages)
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
    loop: MicrobatchLoop
    body: PlacedBody
    crossings: list[Crossing] = field(default_factory=list[Crossing])
    positions: list[dict[Var, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.count = self.body.stages
        self.positions = [{} for _ in range(self.count)]

    def run(self) -> Cut:
        self._split_body()
        self._spread()
        stages = tuple(self._assemble(s) for s in range(self.count))
        return Cut(stages, tuple(self.homes), tuple(self.crossings), self.loop, self.body)

    # -- the loop

    def _split_body(self) -> None:
        """Make `self.scans`: the scan of each stage, with its sends and receives."""
        n = self.count
        copies: dict[Var, list[int]] = {}
        for p, eqn in self.body.eqns:
            for v in eqn.outvars:
                copies.setdefault(v, []).append(p)
        names = self._copy_names(copies)
        gives, eqns = self._loop_crossings(copies)
        for p, eqn in self.body.eqns:
            stage = stage_of(p, n)
            mine = {v: names[p, v] for v in eqn.invars if not compat.is_literal(v) and (p, v) in names}
            made = [names[p, v] for v in eqn.outvars]
            eqns[stage].append(with_atoms(eqn, mine).replace(outvars=made))
            self.positions[stage] |= dict.fromkeys(made, p)
            for v in eqn.outvars:
                for number in gives.get(v, ()):
                    out = compat.fresh_var(v.aval)
                    eqns[stage].append(_send(v, out, number, eqn))
                    self.positions[stage][out] = p
        self.zeros: list[list[Eqn]] = [[] for _ in range(n)]
        self.sums: list[Eqn] = []
        self.scans: list[Eqn | None] = []
        self.made_in: dict[Var, int] = {}
        outs = self._carry_results()
        for s in range(n):
            self.scans.append(self._scan(s, eqns[s], outs))

    def _copy_names(self, copies: Mapping[Var, Sequence[int]]) -> dict[tuple[int, Var], Var]:
        """The variable of each value at each position: a fresh one if a stage computes the value twice."""
        n = self.count
        names: dict[tuple[int, Var], Var] = {}
        for v, at in copies.items():
            for i, p in enumerate(at):
                twice = any(stage_of(q, n) == stage_of(p, n) for q in at[:i])
                names[p, v] = compat.fresh_var(v.aval) if twice else v
        return names

    def _loop_crossings(self, copies: Mapping[Var, Sequence[int]]) -> tuple[dict[Var, list[int]], list[list[Eqn]]]:
        """The numbers of the crossings of each value in the loop, and the receives of each stage."""
        n = self.count
        inputs = {*self.loop.body.invars, *(p.before for p in self.body.carries)}
        takes: dict[tuple[Var, int], int] = {}  # value and stage: the first position that reads it there
        for p, eqn in self.body.eqns:
            for v in eqn.invars:
                there = compat.is_literal(v) or v in inputs or p in copies[v]
                if not there and stage_of(copies[v][0], n) != stage_of(p, n):
                    key = v, stage_of(p, n)
                    takes[key] = min(takes.get(key, p), p)
        gives: dict[Var, list[int]] = {}
        received: list[list[Eqn]] = [[] for _ in range(n)]
        for (v, stage), p in takes.items():
            q = copies[v][0]
            if self.body.fused and stage == n - 1 and q < n - 1:
                p = n - 1  # the fused stage's forward only takes its input in
            line = next(compat.source_line(e) for _, e in self.body.eqns if v in e.outvars)
            number = self._cross(v, (stage_of(q, n), q), (stage, p), in_loop=True, line=line)
            gives.setdefault(v, []).append(number)
            received[stage].append(_receive(v, number))
            self.positions[stage][v] = p
        return gives, received

    def _carry_results(self) -> dict[int, list[Var]]:
        """For each carry, the outer variables of its parts. The additions of several parts go to `self.sums`."""
        outs: dict[int, list[Var]] = {}
        for j in range(self.loop.carries):
            parts = [p for p in self.body.carries if p.number == j]
            total = self.loop.eqn.outvars[j]
            if len(parts) < 2:
                outs[j] = [total]
                continue
            outs[j] = [compat.fresh_var(total.aval) for _ in parts]
            so_far: Var = outs[j][0]
            for i, part in enumerate(outs[j][1:], 2):
                after = total if i == len(parts) else compat.fresh_var(total.aval)
                self.sums.append(add_eqn(so_far, part, after, self.loop.eqn))
                so_far = after
        return outs

    def _scan(self, stage: int, eqns: list[Eqn], outs: Mapping[int, list[Var]]) -> Eqn | None:
        loop, body, n = self.loop, self.loop.body, self.count
        mine = [(i, p) for i, p in enumerate(self.body.carries) if stage_of(p.position, n) == stage]
        ys = [(k, y) for k, (y, p) in enumerate(self.body.ys) if stage_of(p, n) == stage]
        read = {a for e in eqns for a in compat.variables(e.invars)}
        read |= {a for a in (*(p.after for _, p in mine), *(y for _, y in ys)) if not compat.is_literal(a)}
        operands = dict(zip(body.invars, loop.eqn.invars, strict=True))
        consts = [v for v in body.invars[: loop.consts] if v in read]
        xs = [v for v in body.invars[loop.consts + loop.carries :] if v in read]
        if not eqns:
            return None
        starts: list[Atom] = []
        results: list[Var] = []
        for i, part in mine:
            if part.before in operands:
                starts.append(operands[part.before])
            else:
                zero = compat.fresh_var(part.before.aval)
                self.zeros[stage].append(full_eqn(0, zero))
                starts.append(zero)
            nth = sum(1 for q in self.body.carries[:i] if q.number == part.number)
            results.append(outs[part.number][nth])
        results += [loop.eqn.outvars[loop.carries + k] for k, _ in ys]
        inner = compat.new_jaxpr(
            [*consts, *(p.before for _, p in mine), *xs],
            [*(p.after for _, p in mine), *(y for _, y in ys)], eqns, body,
        )  # fmt: skip
        invars = [*(operands[v] for v in consts), *starts, *(operands[v] for v in xs)]
        params = scan_params(loop.eqn, inner, len(consts), len(mine))
        self.made_in |= dict.fromkeys(results, stage)
        return loop.eqn.replace(invars=invars, outvars=results, params=params, effects=inner.effects)

    def _cross(self, v: Var, sent: tuple[int, int], received: tuple[int, int], *, in_loop: bool, line: str) -> int:
        """Add a crossing. Returns its number.

        Args:
          v: the value.
          sent, received: stage and position, or stage and level after the loop.
          in_loop, line: as in `Crossing`.
        """
        number, (source, at), (target, then) = len(self.crossings), sent, received
        self.crossings.append(Crossing(number, v.aval, source, target, at, then, in_loop, line))
        return number

    # -- before and after the loop

    def _spread(self) -> None:
        """Find the stages of the equations outside of the loop and of results, and the homes of arguments."""
        jaxpr = self.program.jaxpr
        names: dict[Var, Atom] = {}
        outer: list[Eqn] = []
        for i, eqn in enumerate(jaxpr.eqns):
            if i == self.loop.index:
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
        return StageProgram(stage, program, tuple(arguments), tuple(results), self.positions[stage], self.levels[stage])

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
        number = self._cross(a, (source, sent), (stage, sent + 1), in_loop=False, line=self.lines.get(a, ""))
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
