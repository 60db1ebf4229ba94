"""Cuts the plan of a stage into the plans of its tasks.

    stage plan: before; loop(F_s, B_s); after   -->   load, F, B (or I and W), update 0, update 1, ...

Every value already has a placement, so a task is a part of the boxed program. The values that it reads from other tasks
are its inputs, those that other tasks read are its outputs. A boxing between two tasks belongs to the task that makes
the value if it makes the value smaller, otherwise to the task that reads it.

A task reads three kinds of values: *residents* of the stage (arguments, results of `load`, sums), *messages* of other
stages, and the *stash* of an earlier task of the same microbatch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr, Var
from shardc.ir.box import Boxed, box_p
from shardc.ir.eqns import copy_eqn, full_eqn, put_at_eqn, slice_at_eqn, squeeze_eqn, unsqueeze_eqn
from shardc.ir.loop import Loop
from shardc.ir.nested import bodies_of
from shardc.ir.program import Program
from shardc.ir.transfer import receive_p, send_p, transfer_number
from shardc.ir.walk import local_bytes, reads_of, with_atoms
from shardc.pipeline.cut.advance_sums import advance_sums
from shardc.pipeline.cut.cut_stages import StageProgram
from shardc.pipeline.schedule.action import TaskId
from shardc.plan.plan import PlacedProgram, SpmdPlan
from shardc.sbp.placement import REPLICATED, Placement, S

INDEX: Var = compat.fresh_var(compat.shaped_array((), np.dtype("int32")))
"""The number of the microbatch: an input of the tasks that read the batch."""


@dataclass(frozen=True)
class StageTask:
    """One task of a stage, with the sources and targets of its values.

    Attributes:
      id: its identity.
      plan: the program on the stage's mesh; None if there is nothing to compute.
      inputs, outputs: the variable of each input and output of the program.
      received: numbers and variables of the crossings whose values arrive at this task.
      sent: numbers and variables of the crossings that it sends.
      kept: for each resident that it replaces or makes, the output that is its new value.
    """

    id: TaskId
    plan: PlacedProgram | None
    inputs: tuple[Var, ...]
    outputs: tuple[Var, ...]
    received: tuple[tuple[int, Var], ...]
    sent: tuple[tuple[int, Var], ...]
    kept: tuple[tuple[Var, Var], ...]


@dataclass(frozen=True)
class StageTasks:
    """The tasks of a stage.

    Attributes:
      all: the tasks in order: `load`, which also makes the first values of sums; those of the loop; the updates.
      stash: by (giver, taker), the variables that one task keeps for the other.
      arguments, results: the residents that are the stage's inputs, and those that are its results.
      placements: the placement of every value.
    """

    all: Mapping[TaskId, StageTask]
    stash: Mapping[tuple[TaskId, TaskId], tuple[Var, ...]]
    arguments: tuple[Var, ...]
    results: tuple[Atom, ...]
    placements: Mapping[Var, Placement]


def split_tasks(stage: StageProgram, plan: SpmdPlan, shared: Collection[int] = ()) -> StageTasks:
    """The tasks of a planned stage.

    Args:
      stage, plan: its program and plan.
      shared: numbers of the arguments that another stage of the same rank reads too: no task may reuse their buffers.
    """
    return _TaskSplitter(stage, plan, shared).run()


@dataclass
class _TaskPart:
    """The equations and exchanged values of one task, while they are collected.

    Attributes:
      eqns: its equations, without receives.
      received, sent, kept: as in `StageTask`.
      outputs: the values that others read, in order.
      ties: for outputs that reuse a resident's buffer, the resident.
    """

    eqns: list[Eqn] = field(default_factory=list[Eqn])
    received: list[tuple[int, Var]] = field(default_factory=list[tuple[int, Var]])
    sent: list[tuple[int, Var]] = field(default_factory=list[tuple[int, Var]])
    kept: list[tuple[Var, Var]] = field(default_factory=list[tuple[Var, Var]])
    outputs: dict[Atom, None] = field(default_factory=dict[Atom, None])
    ties: dict[Var, Var] = field(default_factory=dict[Var, Var])


class _TaskSplitter:
    def __init__(self, stage: StageProgram, plan: SpmdPlan, shared: Collection[int]) -> None:
        self.stage, self.plan, self.mesh, self.shared = stage, plan, plan.mesh, shared
        self.placements: dict[Var, Placement] = {**plan.boxed.placements, INDEX: REPLICATED}
        self.jaxpr: Jaxpr = plan.boxed.jaxpr
        self.arguments: list[Var] = list(self.jaxpr.invars)
        found = [i for i, e in enumerate(self.jaxpr.eqns) if e.primitive.name == "scan" and is_loop(e, stage)]
        self.loop: Loop | None = Loop.of(self.jaxpr.eqns[found[0]]) if found else None
        self.at = found[0] if found else 0

    def run(self) -> StageTasks:
        loop, stash = ([], {}) if self.loop is None else self._loop(self.loop)
        tasks = [self._load(), *loop, *self._updates()]
        arguments, results = tuple(self.arguments), tuple(self.jaxpr.outvars)
        return StageTasks({t.id: t for t in tasks}, stash, arguments, results, self.placements)

    def _task(self, id: TaskId, part: _TaskPart) -> StageTask:
        """The task of a part. Its inputs are the values that its equations read and do not make."""
        eqns, ties, name = part.eqns, part.ties, id.word
        made = {v for e in eqns for v in e.outvars}
        read = dict.fromkeys(a for e in eqns for a in e.invars if not compat.is_literal(a) and a not in made)
        outs = [v for v in part.outputs if not compat.is_literal(v) and v in made]
        inputs = list(read)
        received, sent, kept = tuple(part.received), tuple(part.sent), tuple(part.kept)
        if not eqns:
            return StageTask(id, None, (), (), received, sent, kept)
        jaxpr = compat.new_jaxpr(inputs, outs, eqns, self.jaxpr)
        program = Program(
            f"{self.stage.program.name}.{name}", jaxpr, tuple(f"{name}/in/{i}" for i in range(len(inputs))),
            tuple(f"{name}/out/{i}" for i in range(len(outs))), (), None, None,
        )  # fmt: skip
        numbers = {v: i for i, v in enumerate(inputs)}
        taken = [numbers.get(ties[v]) if v in ties else None for v in outs]
        plan = PlacedProgram(
            program, self.mesh, Boxed(jaxpr, self.placements), tuple(self.placements[v] for v in inputs),
            tuple(self.placements[v] for v in outs), tuple(taken),
        )  # fmt: skip
        return StageTask(id, plan, tuple(inputs), tuple(outs), received, sent, kept)

    # -- the loop

    def _loop(self, loop: Loop) -> tuple[list[StageTask], dict[tuple[TaskId, TaskId], tuple[Var, ...]]]:
        made, parts = self._parts(loop.eqns)
        stash = self._exchanged(made, parts)
        puts = self._keep(loop, made, parts)
        return [self._loop_task(loop, p, part, puts.get(p, ())) for p, part in parts.items()], stash

    def _parts(self, eqns: Sequence[Eqn]) -> tuple[dict[Var, TaskId], dict[TaskId, _TaskPart]]:
        """The task that makes each value, and the equations and receives of each task, in order."""
        made: dict[Var, TaskId] = {}
        parts: dict[TaskId, _TaskPart] = {}
        for eqn, tasks in zip(eqns, self._tasks(eqns), strict=True):
            for p in tasks:
                part = parts.setdefault(p, _TaskPart())
                if eqn.primitive is receive_p:
                    part.received.append((transfer_number(eqn), eqn.outvars[0]))
                else:
                    part.eqns.append(eqn)
                for v in eqn.outvars:
                    made.setdefault(v, p)
        return made, {p: parts[p] for p in sorted(parts)}

    def _exchanged(
        self, made: Mapping[Var, TaskId], parts: Mapping[TaskId, _TaskPart]
    ) -> dict[tuple[TaskId, TaskId], tuple[Var, ...]]:
        """The stash between tasks. Adds the values that tasks send or keep for others to their outputs."""
        stash: dict[tuple[TaskId, TaskId], dict[Var, None]] = {}
        for p, part in parts.items():
            own = {v for e in part.eqns for v in e.outvars}
            for eqn in part.eqns:
                for a in eqn.invars:
                    if not compat.is_literal(a) and a in made and a not in own and made[a] != p:
                        stash.setdefault((made[a], p), {})[a] = None
                        parts[made[a]].outputs[a] = None
                if eqn.primitive is send_p:
                    value = eqn.invars[0]
                    part.sent.append((transfer_number(eqn), value))
                    part.outputs[value] = None
        return {k: tuple(v) for k, v in stash.items()}

    def _keep(
        self, loop: Loop, made: Mapping[Var, TaskId], parts: Mapping[TaskId, _TaskPart]
    ) -> dict[TaskId, list[Eqn]]:
        """Add the new values of sums and stacked results to the tasks that make them. Returns the equations that write
        rows of stacked results."""
        puts: dict[TaskId, list[Eqn]] = {}
        for c in loop.carries:
            part = parts[made[c.after]]
            part.kept.append((c.end, c.after))
            part.outputs[c.after] = None
        for buffer, y in loop.stacks.items():
            p = min(parts) if compat.is_literal(y) or y not in made else made[y]
            eqns, after = self._put(y, buffer)
            puts.setdefault(p, []).extend(eqns)
            parts[p].kept.append((buffer, after))
            parts[p].outputs[after] = None
        return puts

    def _loop_task(self, loop: Loop, id: TaskId, part: _TaskPart, puts: Sequence[Eqn]) -> StageTask:
        names: dict[Var, Atom] = {**loop.consts, **{c.before: c.end for c in loop.carries}}
        eqns = [*(e for e in part.eqns if e.primitive is not send_p), *puts]
        read = {a for e in eqns for a in compat.variables(e.invars)}
        takes = [e for v, stack in loop.rows.items() if v in read for e in self._take(v, stack)]
        ties = {after: total for total, after in part.kept}
        eqns = advance_sums(takes + [with_atoms(e, names) for e in eqns], set(ties))
        return self._task(id, replace(part, eqns=eqns, ties=ties))

    def _made_at(self, eqns: Sequence[Eqn]) -> dict[Var, TaskId]:
        """The task that makes each value; for a boxing the task of its operand."""
        made: dict[Var, TaskId] = {}
        for eqn in eqns:
            p = self.stage.tasks.get(eqn.outvars[0]) if eqn.outvars else None
            if p is None:
                p = next((made[a] for a in eqn.invars if not compat.is_literal(a) and a in made), None)
            if p is not None:
                made |= dict.fromkeys(eqn.outvars, p)
        return made

    def _tasks(self, eqns: Sequence[Eqn]) -> list[list[TaskId]]:
        """The tasks of each equation of the boxed body. A boxing of a value that is available everywhere may have
        several."""
        readers: dict[Var, set[TaskId]] = {}
        found: list[list[TaskId]] = []
        made = self._made_at(eqns)
        for eqn in reversed(eqns):
            at = made.get(eqn.outvars[0]) if eqn.outvars else self._effect(eqn, made)
            read = readers.get(eqn.outvars[0], set()) if eqn.primitive is box_p else set[TaskId]()
            if eqn.primitive is not box_p:
                assert at is not None, eqn
                tasks = [at]
            elif not read:
                tasks = [at if at is not None else min(made.values())]
            elif at is None:
                tasks = sorted(read)
            elif self._bytes(eqn.outvars[0]) < self._bytes(eqn.invars[0]):
                tasks = [at]
            else:
                tasks = [min(read)]
            for a in eqn.invars:
                if not compat.is_literal(a):
                    readers.setdefault(a, set()).update(tasks)
            found.append(tasks)
        found.reverse()
        return found

    def _effect(self, eqn: Eqn, made: Mapping[Var, TaskId]) -> TaskId:
        """The task of an equation without results, such as a print: the last one of its operands."""
        known = [made[a] for a in eqn.invars if not compat.is_literal(a) and a in made]
        return max(known, default=min(made.values()))

    def _bytes(self, v: Var) -> int:
        return local_bytes(v, self.placements[v], self.mesh.sizes)

    def _take(self, v: Var, stack: Var) -> list[Eqn]:
        """`v = stack[index]`."""
        piece = compat.fresh_var(stack.aval.update(shape=(1, *v.aval.shape)))
        self.placements[piece] = _shifted(self.placements[v])
        return [slice_at_eqn(stack, INDEX, piece), squeeze_eqn(piece, v)]

    def _put(self, y: Atom, buffer: Var) -> tuple[list[Eqn], Var]:
        """`after = buffer with buffer[index] = y`."""
        row = compat.fresh_var(buffer.aval.update(shape=(1, *y.aval.shape)))
        after = compat.fresh_var(buffer.aval)
        self.placements[row] = self.placements[after] = self.placements[buffer]
        return [unsqueeze_eqn(y, row), put_at_eqn(buffer, row, INDEX, after)], after

    # -- before and after it

    def _load(self) -> StageTask:
        """The task `load`: it computes what the loop reads, and the first values of its sums and stacks."""
        eqns: list[Eqn] = []
        self.loaded: set[int] = set()
        kept: list[tuple[Var, Var]] = []
        if (loop := self.loop) is not None:
            needed = set(compat.variables(loop.eqn.invars))
            for i in range(self.at - 1, -1, -1):
                eqn = self.jaxpr.eqns[i]
                if any(v in needed for v in eqn.outvars):
                    self.loaded.add(i)
                    needed |= set(compat.variables(eqn.invars))
            eqns = [self.jaxpr.eqns[i] for i in sorted(self.loaded)]
            made = {v for e in eqns for v in e.outvars}
            readers = reads_of(self.jaxpr.eqns, self.jaxpr.outvars)
            for start, total in ((c.start, c.end) for c in loop.carries):
                if not compat.is_literal(start) and start in made and readers[start] == 1:
                    kept.append((total, start))
                    continue
                fresh = compat.fresh_var(total.aval)
                self.placements[fresh] = self.placements[total]
                if compat.is_literal(start):
                    eqns.append(full_eqn(start.val, fresh))
                else:
                    eqns.append(copy_eqn(start, fresh))
                kept.append((total, fresh))
            for buffer in loop.stacks:
                fresh = compat.fresh_var(buffer.aval)
                self.placements[fresh] = self.placements[buffer]
                eqns.append(full_eqn(0, fresh))
                kept.append((buffer, fresh))
            kept += [(v, v) for e in self._after() for v in e.invars if not compat.is_literal(v) and v in made]
            read = (*loop.consts.values(), *loop.rows.values(), *self.jaxpr.outvars)
            kept += [(a, a) for a in read if not compat.is_literal(a) and a in made]
            kept = list(dict.fromkeys(kept))
        return self._task(
            TaskId(self.stage.stage, "load"), _TaskPart(eqns, kept=kept, outputs=dict.fromkeys(v for _, v in kept))
        )

    def _after(self) -> list[Eqn]:
        scan = None if self.loop is None else self.loop.eqn
        return [e for i, e in enumerate(self.jaxpr.eqns) if e is not scan and i not in self.loaded]

    def _levels(self) -> list[tuple[Eqn, int]]:
        """The equations after the loop with their levels: as late as readers allow, unless another stage waits."""
        eqns = self._after()
        level: dict[Var, int] = {}
        for eqn in eqns:
            at = max((level.get(a, 0) for a in eqn.invars if not compat.is_literal(a)), default=0)
            level |= dict.fromkeys(
                eqn.outvars, self.stage.tasks[eqn.outvars[0]].level if eqn.primitive is receive_p else at
            )
        readers: dict[Var, int] = {}
        found: list[tuple[Eqn, int]] = []
        for eqn in reversed(eqns):
            made = eqn.outvars[:1] or [a for a in eqn.invars if not compat.is_literal(a)]
            at = max((level.get(v, 0) for v in made), default=0)
            if eqn.primitive not in (receive_p, send_p):
                at = min((readers[v] for v in eqn.outvars if v in readers), default=at)
            for a in eqn.invars:
                if not compat.is_literal(a):
                    readers[a] = min(at, readers.get(a, at))
            found.append((eqn, at))
        return found[::-1]

    def _updates(self) -> list[StageTask]:
        """The tasks after the loop: a new one begins wherever the stage has to wait for a message of another stage."""
        received: dict[int, list[tuple[int, Var]]] = {}
        parts: dict[int, list[Eqn]] = {}
        for eqn, at in self._levels():
            if eqn.primitive is receive_p:
                received.setdefault(at, []).append((transfer_number(eqn), eqn.outvars[0]))
            else:
                parts.setdefault(at, []).append(eqn)
        results = set(compat.variables(self.jaxpr.outvars))
        last_read: dict[Var, int] = {}
        for at, eqns in parts.items():
            for eqn in eqns:
                last_read |= {a: max(at, last_read.get(a, 0)) for a in eqn.invars if not compat.is_literal(a)}
        ties = {
            out: self.arguments[tie]
            for out, tie in zip(self.jaxpr.outvars, self.plan.ties, strict=True)
            if tie is not None and tie not in self.shared and not compat.is_literal(out)
        }
        sent_too = {e.invars[0] for eqns in parts.values() for e in eqns if e.primitive is send_p}
        spare = [v for v in (self.loop.results if self.loop else ()) if v not in results | sent_too]
        tasks: list[StageTask] = []
        for at in sorted(set(parts) | set(received)):
            eqns = [e for e in parts.get(at, ()) if e.primitive is not send_p]
            made = {v for e in eqns for v in e.outvars}
            sent = [(transfer_number(e), e.invars[0]) for e in parts.get(at, ()) if e.primitive is send_p]
            order = [v for e in eqns for v in e.outvars if v in results or last_read.get(v, at) > at]
            mine = {
                out: a for out, a in ties.items() if out in made and last_read.get(a, 0) <= at and a not in results
            }  # fmt: skip
            mine |= self._reused([v for v in order if v not in mine], [v for v in spare if last_read.get(v) == at])
            outputs = dict.fromkeys([*order, *(v for _, v in sent)])
            part = _TaskPart(eqns, received.get(at, []), sent, [(v, v) for v in order], outputs, mine)
            tasks.append(self._task(TaskId(self.stage.stage, "update", at), part))
        return tasks

    def _reused(self, outputs: Sequence[Var], spare: Sequence[Var]) -> dict[Var, Var]:
        """For outputs of an update, the sums whose buffers they can reuse because nobody reads them any more."""
        left: dict[tuple[tuple[int, ...], np.dtype, Placement], list[Var]] = {}
        for v in spare:
            left.setdefault((v.aval.shape, v.aval.dtype, self.placements[v]), []).append(v)
        found: dict[Var, Var] = {}
        for out in outputs:
            if alike := left.get((out.aval.shape, out.aval.dtype, self.placements[out])):
                found[out] = alike.pop(0)
        return found


def is_loop(eqn: Eqn, stage: StageProgram) -> bool:
    """Whether a scan of a stage's program is its loop over microbatches."""
    return any(v in stage.tasks for e in bodies_of(eqn)[0].eqns for v in e.outvars)


def _shifted(placement: Placement) -> Placement:
    """The placement of a value with one more leading dimension."""
    return Placement([(a, S(s.dim + 1) if isinstance(s, S) else s) for a, s in placement.items()])
