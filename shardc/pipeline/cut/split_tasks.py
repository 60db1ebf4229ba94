"""Cuts the plan of a stage into the plans of its tasks.

    stage plan: before; loop(F_s, B_s); after   -->   load, F, B (or I and W), update 0, update 1, ...

Every value already has a placement, so a task is a part of the boxed program. The values that it reads from other tasks
are its inputs, those that other tasks read are its outputs. A boxing between two tasks belongs to the task that makes
the value if it makes the value smaller, otherwise to the task that reads it.

A task reads three kinds of values: *residents* of the stage (arguments, results of `load`, sums), *messages* of other
stages, and the *stash* of an earlier task of the same microbatch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr, Var
from shardc.ir.box import Boxed, box_p
from shardc.ir.eqns import copy_eqn, full_eqn, put_at_eqn, slice_at_eqn, squeeze_eqn, unsqueeze_eqn
from shardc.ir.nested import bodies_of, scan_of
from shardc.ir.program import Program
from shardc.ir.transfer import receive_p, send_p, transfer_number
from shardc.ir.walk import local_bytes, reads_of, with_atoms
from shardc.pipeline.cut.advance_sums import advance_sums
from shardc.pipeline.cut.cut_stages import StageProgram
from shardc.plan.plan import PlacedProgram, SpmdPlan
from shardc.sbp.placement import REPLICATED, Placement, S

INDEX: Var = compat.fresh_var(compat.shaped_array((), np.dtype("int32")))
"""The number of the microbatch: an input of the tasks that read the batch."""


@dataclass(frozen=True)
class StageTask:
    """One task of a stage, with the sources and targets of its values.

    Attributes:
      position: the position of a task of the loop; -1 for `load`; the level, counted from 0, of an update.
      plan: the program on the stage's mesh; None if there is nothing to compute.
      inputs, outputs: the variable of each input and output of the program.
      received: numbers and variables of the crossings whose values arrive at this task.
      sent: numbers and variables of the crossings that it sends.
      kept: for each resident that it replaces or makes, the output that is its new value.
    """

    position: int
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
      load: the task before the loop; it also makes the first values of sums.
      loop: the tasks of the loop, by position.
      updates: the tasks after the loop, by level.
      stash: by (from position, to position), the variables that one task keeps for the other.
      arguments, results: the residents that are the stage's inputs, and those that are its results.
    """

    load: StageTask
    loop: Mapping[int, StageTask]
    updates: Mapping[int, StageTask]
    stash: Mapping[tuple[int, int], tuple[Var, ...]]
    arguments: tuple[Var, ...]
    results: tuple[Atom, ...]


def split_tasks(stage: StageProgram, plan: SpmdPlan, shared: Collection[int] = ()) -> StageTasks:
    """The tasks of a planned stage.

    Args:
      stage, plan: its program and plan.
      shared: numbers of the arguments that another stage of the same rank reads too: no task may reuse their buffers.
    """
    return _TaskSplitter(stage, plan, shared).run()


@dataclass(frozen=True)
class _Ends:
    """The values that a task exchanges, as in `StageTask`.

    Attributes:
      received, sent, kept: as in `StageTask`.
      ties: for outputs that reuse a resident's buffer, the resident.
    """

    received: Sequence[tuple[int, Var]] = ()
    sent: Sequence[tuple[int, Var]] = ()
    kept: Sequence[tuple[Var, Var]] = ()
    ties: Mapping[Var, Var] = field(default_factory=dict[Var, Var])


@dataclass
class _LoopPart:
    """The equations and exchanged values of one task of the loop, while they are collected.

    Attributes:
      eqns: its equations, without receives.
      received, sent, kept: as in `StageTask`.
      outputs: the values that others read, in order.
      puts: equations that write rows of stacked results.
    """

    eqns: list[Eqn] = field(default_factory=list[Eqn])
    received: list[tuple[int, Var]] = field(default_factory=list[tuple[int, Var]])
    sent: list[tuple[int, Var]] = field(default_factory=list[tuple[int, Var]])
    kept: list[tuple[Var, Var]] = field(default_factory=list[tuple[Var, Var]])
    outputs: dict[Atom, None] = field(default_factory=dict[Atom, None])
    puts: list[Eqn] = field(default_factory=list[Eqn])


class _TaskSplitter:
    def __init__(self, stage: StageProgram, plan: SpmdPlan, shared: Collection[int]) -> None:
        self.stage, self.plan, self.mesh, self.shared = stage, plan, plan.mesh, shared
        self.placements: dict[Var, Placement] = {**plan.boxed.placements, INDEX: REPLICATED}
        self.jaxpr: Jaxpr = plan.boxed.jaxpr
        self.arguments: list[Var] = list(self.jaxpr.invars)
        found = [i for i, e in enumerate(self.jaxpr.eqns) if e.primitive.name == "scan" and is_loop(e, stage)]
        self.scan: Eqn | None = self.jaxpr.eqns[found[0]] if found else None
        self.at = found[0] if found else 0

    def run(self) -> StageTasks:
        loop, stash = self._loop() if self.scan is not None else ({}, {})
        load = self._load()
        updates = self._updates()
        return StageTasks(load, loop, updates, stash, tuple(self.arguments), tuple(self.jaxpr.outvars))

    def _task(self, name: str, position: int, eqns: Sequence[Eqn], outputs: Iterable[Atom], ends: _Ends) -> StageTask:
        """The task of these equations. Its inputs are the values that they read and do not make."""
        made = {v for e in eqns for v in e.outvars}
        read = dict.fromkeys(a for e in eqns for a in e.invars if not compat.is_literal(a) and a not in made)
        outs = list(dict.fromkeys(v for v in outputs if not compat.is_literal(v) and v in made))
        inputs = list(read)
        received, sent, kept = tuple(ends.received), tuple(ends.sent), tuple(ends.kept)
        if not eqns:
            return StageTask(position, None, (), (), received, sent, kept)
        jaxpr = compat.new_jaxpr(inputs, outs, eqns, self.jaxpr)
        program = Program(
            f"{self.stage.program.name}.{name}", jaxpr, tuple(f"{name}/in/{i}" for i in range(len(inputs))),
            tuple(f"{name}/out/{i}" for i in range(len(outs))), (), None, None,
        )  # fmt: skip
        numbers = {v: i for i, v in enumerate(inputs)}
        taken = [numbers.get(ends.ties[v]) if v in ends.ties else None for v in outs]
        plan = PlacedProgram(
            program, self.mesh, Boxed(jaxpr, self.placements), tuple(self.placements[v] for v in inputs),
            tuple(self.placements[v] for v in outs), tuple(taken),
        )  # fmt: skip
        return StageTask(position, plan, tuple(inputs), tuple(outs), received, sent, kept)

    # -- the loop

    def _loop(self) -> tuple[dict[int, StageTask], dict[tuple[int, int], tuple[Var, ...]]]:
        assert self.scan is not None
        made, parts = self._parts(scan_of(self.scan).body)
        stash = self._exchanged(made, parts)
        self._keep(made, parts)
        return {p: self._loop_task(p, parts[p]) for p in parts}, stash

    def _parts(self, body: Jaxpr) -> tuple[dict[Var, int], dict[int, _LoopPart]]:
        """The position that makes each value, and the equations and receives of each position, in order."""
        made: dict[Var, int] = {}
        parts: dict[int, _LoopPart] = {}
        for eqn, positions in zip(body.eqns, self._positions(body), strict=True):
            for p in positions:
                part = parts.setdefault(p, _LoopPart())
                if eqn.primitive is receive_p:
                    part.received.append((transfer_number(eqn), eqn.outvars[0]))
                else:
                    part.eqns.append(eqn)
                for v in eqn.outvars:
                    made.setdefault(v, p)
        return made, {p: parts[p] for p in sorted(parts)}

    def _exchanged(
        self, made: Mapping[Var, int], parts: Mapping[int, _LoopPart]
    ) -> dict[tuple[int, int], tuple[Var, ...]]:
        """The stash between tasks. Adds the values that tasks send or keep for others to their outputs."""
        stash: dict[tuple[int, int], dict[Var, None]] = {}
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

    def _keep(self, made: Mapping[Var, int], parts: Mapping[int, _LoopPart]) -> None:
        """Add the new values of sums and stacked results to the tasks that make them."""
        assert self.scan is not None
        scan, view = self.scan, scan_of(self.scan)
        outvars, carries = view.body.outvars, view.carries
        for after, total in zip(outvars[:carries], scan.outvars[:carries], strict=True):
            part = parts[made[after]]
            part.kept.append((total, after))
            part.outputs[after] = None
        for y, buffer in zip(outvars[carries:], scan.outvars[carries:], strict=True):
            part = parts[min(parts) if compat.is_literal(y) or y not in made else made[y]]
            eqns, after = self._put(y, buffer)
            part.puts += eqns
            part.kept.append((buffer, after))
            part.outputs[after] = None

    def _loop_task(self, position: int, part: _LoopPart) -> StageTask:
        assert self.scan is not None
        scan, view = self.scan, scan_of(self.scan)
        operand = dict(zip(view.body.invars, scan.invars, strict=True))
        consts, sums, rows = _sections(view.body.invars, view.consts, view.carries)
        names: dict[Var, Atom] = {v: operand[v] for v in consts}
        names |= zip(sums, scan.outvars[: view.carries], strict=True)
        eqns = [e for e in part.eqns if e.primitive is not send_p] + part.puts
        read = {a for e in eqns for a in compat.variables(e.invars)}
        takes = [e for v in rows if v in read for e in self._take(v, operand[v])]
        ties = {after: total for total, after in part.kept}
        eqns = advance_sums(takes + [with_atoms(e, names) for e in eqns], set(ties))
        ends = _Ends(part.received, part.sent, part.kept, ties)
        return self._task(f"task{position}", position, eqns, part.outputs, ends)

    def _made_at(self, body: Jaxpr) -> dict[Var, int]:
        """The position that makes each value; for a boxing the position of its operand."""
        made: dict[Var, int] = {}
        for eqn in body.eqns:
            p = self.stage.position.get(eqn.outvars[0], None) if eqn.outvars else None
            if p is None:
                p = next((made[a] for a in eqn.invars if not compat.is_literal(a) and a in made), None)
            if p is not None:
                made |= dict.fromkeys(eqn.outvars, p)
        return made

    def _positions(self, body: Jaxpr) -> list[list[int]]:
        """The positions of each equation of the boxed body. A boxing of a value that is available everywhere may have
        several."""
        readers: dict[Var, set[int]] = {}
        found: list[list[int]] = []
        made = self._made_at(body)
        for eqn in reversed(body.eqns):
            at = made.get(eqn.outvars[0]) if eqn.outvars else self._effect(eqn, made)
            read = readers.get(eqn.outvars[0], set()) if eqn.primitive is box_p else set[int]()
            if eqn.primitive is not box_p:
                assert at is not None, eqn
                positions = [at]
            elif not read:
                positions = [at if at is not None else min(made.values())]
            elif at is None:
                positions = sorted(read)
            elif self._bytes(eqn.outvars[0]) < self._bytes(eqn.invars[0]):
                positions = [at]
            else:
                positions = [min(read)]
            for a in eqn.invars:
                if not compat.is_literal(a):
                    readers.setdefault(a, set()).update(positions)
            found.append(positions)
        found.reverse()
        return found

    def _effect(self, eqn: Eqn, made: Mapping[Var, int]) -> int:
        """The position of an equation without results, such as a print: the last one of its operands."""
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
        if self.scan is not None:
            scan, view = self.scan, scan_of(self.scan)
            needed = set(compat.variables(scan.invars))
            for i in range(self.at - 1, -1, -1):
                eqn = self.jaxpr.eqns[i]
                if any(v in needed for v in eqn.outvars):
                    self.loaded.add(i)
                    needed |= set(compat.variables(eqn.invars))
            eqns = [self.jaxpr.eqns[i] for i in sorted(self.loaded)]
            made = {v for e in eqns for v in e.outvars}
            readers = reads_of(self.jaxpr.eqns, self.jaxpr.outvars)
            for start, total in zip(scan.invars[view.consts : view.rows_at], scan.outvars, strict=False):
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
            for buffer in scan.outvars[view.carries :]:
                fresh = compat.fresh_var(buffer.aval)
                self.placements[fresh] = self.placements[buffer]
                eqns.append(full_eqn(0, fresh))
                kept.append((buffer, fresh))
            kept += [(v, v) for e in self._after() for v in e.invars if not compat.is_literal(v) and v in made]
            read = (*scan.invars[: view.consts], *scan.invars[view.rows_at :], *self.jaxpr.outvars)
            kept += [(a, a) for a in read if not compat.is_literal(a) and a in made]
            kept = list(dict.fromkeys(kept))
        return self._task("load", -1, eqns, [v for _, v in kept], _Ends(kept=kept))

    def _after(self) -> list[Eqn]:
        return [e for i, e in enumerate(self.jaxpr.eqns) if e is not self.scan and i not in self.loaded]

    def _levels(self) -> list[tuple[Eqn, int]]:
        """The equations after the loop with their levels: as late as readers allow, unless another stage waits."""
        eqns = self._after()
        level: dict[Var, int] = {}
        for eqn in eqns:
            at = max((level.get(a, 0) for a in eqn.invars if not compat.is_literal(a)), default=0)
            level |= dict.fromkeys(eqn.outvars, self.stage.level[eqn.outvars[0]] if eqn.primitive is receive_p else at)
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

    def _updates(self) -> dict[int, StageTask]:
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
        spare = [v for v in self.scan.outvars if v not in results | sent_too] if self.scan is not None else []
        tasks: dict[int, StageTask] = {}
        for at in sorted(set(parts) | set(received)):
            eqns = [e for e in parts.get(at, ()) if e.primitive is not send_p]
            made = {v for e in eqns for v in e.outvars}
            sent = [(transfer_number(e), e.invars[0]) for e in parts.get(at, ()) if e.primitive is send_p]
            order = [v for e in eqns for v in e.outvars if v in results or last_read.get(v, at) > at]
            mine = {
                out: a for out, a in ties.items() if out in made and last_read.get(a, 0) <= at and a not in results
            }  # fmt: skip
            mine |= self._reused([v for v in order if v not in mine], [v for v in spare if last_read.get(v) == at])
            ends = _Ends(received.get(at, ()), sent, [(v, v) for v in order], mine)
            tasks[at] = self._task(f"update{at or ''}", at, eqns, [*order, *(v for _, v in sent)], ends)
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


def _sections(invars: Sequence[Var], consts: int, carries: int) -> tuple[Sequence[Var], Sequence[Var], Sequence[Var]]:
    """The constants, carries and rows among the inputs of a scan's body."""
    rows = consts + carries
    return invars[:consts], invars[consts:rows], invars[rows:]


def is_loop(eqn: Eqn, stage: StageProgram) -> bool:
    """Whether a scan of a stage's program is its loop over microbatches."""
    return any(v in stage.position for e in bodies_of(eqn)[0].eqns for v in e.outvars)


def _shifted(placement: Placement) -> Placement:
    """The placement of a value with one more leading dimension."""
    return Placement([(a, S(s.dim + 1) if isinstance(s, S) else s) for a, s in placement.items()])
