"""Cuts the plan of a stage into the plans of its tasks.

    stage plan: before; loop(F_s, B_s); after   -->   load, F, B (or I and W), update 0, update 1, ...

Every value has its placement by now, so a task is a part of the boxed program: what it reads from other tasks are its
inputs, what others read of it its outputs. A boxing between two tasks belongs to the one that makes the value if it
makes it smaller, else to the one that reads it.

What a task reads comes from three places: *residents* of the stage (arguments, what `load` made, the sums), *messages*
of other stages, and the *stash* of an earlier task of the same microbatch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr, Var, bodies_of
from shardc.ir.box import Boxed, box_p
from shardc.ir.program import Program
from shardc.ir.transfer import receive_p, send_p, transfer_number
from shardc.ir.walk import local_bytes
from shardc.pipeline.cut.advance_sums import advance_sums
from shardc.pipeline.cut.cut_stages import StageProgram
from shardc.plan.plan import PlacedProgram, SpmdPlan
from shardc.sbp.placement import REPLICATED, Placement, S

INDEX: Var = compat.fresh_var(compat.shaped_array((), np.dtype("int32")))
"""Which microbatch a task computes: an input of the tasks that read the batch."""


@dataclass(frozen=True)
class StageTask:
    """One task of a stage, and where its values come from and go.

    Attributes:
      position: of a task of the loop; -1 for `load`; the level, counted from 0, of an update.
      plan: the program on the stage's mesh; None if there is nothing to compute.
      inputs, outputs: the variable of each input and output of the program.
      received: numbers of the crossings whose values arrive at this task, and their variables.
      sent: numbers of the crossings that it feeds, and the variable of each.
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
      load: before the loop; makes the sums' first values.
      loop: by position.
      updates: after the loop, by level.
      stash: (from position, to position): the variables that the one leaves for the other.
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
      stage, plan: what it computes, and where its values live.
      shared: of its arguments those that another stage of the same rank reads: no task may take their buffers.
    """
    return _Splitter(stage, plan, shared).run()


class _Splitter:
    def __init__(self, stage: StageProgram, plan: SpmdPlan, shared: Collection[int]) -> None:
        self.stage, self.plan, self.mesh, self.shared = stage, plan, plan.mesh, shared
        self.placements: dict[Var, Placement] = {**plan.boxed.placements, INDEX: REPLICATED}
        self.jaxpr: Jaxpr = plan.boxed.jaxpr
        self.arguments: list[Var] = list(self.jaxpr.invars)
        found = [i for i, e in enumerate(self.jaxpr.eqns) if e.primitive.name == "scan" and _is_loop(e, stage)]
        self.scan: Eqn | None = self.jaxpr.eqns[found[0]] if found else None
        self.at = found[0] if found else 0

    def run(self) -> StageTasks:
        loop, stash = self._loop() if self.scan is not None else ({}, {})
        load = self._load()
        updates = self._updates()
        return StageTasks(load, loop, updates, stash, tuple(self.arguments), tuple(self.jaxpr.outvars))

    def _task(
        self, name: str, position: int, eqns: Sequence[Eqn], outputs: Iterable[Atom], *,
        received: Sequence[tuple[int, Var]] = (), sent: Sequence[tuple[int, Var]] = (),
        kept: Sequence[tuple[Var, Var]] = (), ties: Mapping[Var, Var] | None = None,
    ) -> StageTask:  # fmt: skip
        """A task of these equations; its inputs are what they read and do not make."""
        made = {v for e in eqns for v in e.outvars}
        read = dict.fromkeys(a for e in eqns for a in e.invars if not compat.is_literal(a) and a not in made)
        outs = list(dict.fromkeys(v for v in outputs if not compat.is_literal(v) and v in made))
        inputs = list(read)
        if not eqns:
            return StageTask(position, None, (), (), tuple(received), tuple(sent), tuple(kept))
        jaxpr = compat.new_jaxpr(inputs, outs, eqns, self.jaxpr)
        program = Program(
            f"{self.stage.program.name}.{name}", jaxpr, tuple(f"{name}/in/{i}" for i in range(len(inputs))),
            tuple(f"{name}/out/{i}" for i in range(len(outs))), (), None, None,
        )  # fmt: skip
        numbers = {v: i for i, v in enumerate(inputs)}
        taken = [numbers.get((ties or {}).get(v, v)) if v in (ties or {}) else None for v in outs]
        plan = PlacedProgram(
            program, self.mesh, Boxed(jaxpr, self.placements), tuple(self.placements[v] for v in inputs),
            tuple(self.placements[v] for v in outs), tuple(taken),
        )  # fmt: skip
        return StageTask(position, plan, tuple(inputs), tuple(outs), tuple(received), tuple(sent), tuple(kept))

    # -- the loop

    def _loop(self) -> tuple[dict[int, StageTask], dict[tuple[int, int], tuple[Var, ...]]]:
        scan = self.scan
        assert scan is not None
        view = compat.scan_of(scan)
        body, consts, carries = view.body, view.consts, view.carries
        operand = dict(zip(body.invars, scan.invars, strict=True))
        where = self._positions(body)
        made: dict[Var, int] = {}
        received: dict[int, list[tuple[int, Var]]] = {}
        parts: dict[int, list[Eqn]] = {}
        for eqn, positions in zip(body.eqns, where, strict=True):
            for p in positions:
                if eqn.primitive is receive_p:
                    received.setdefault(p, []).append((transfer_number(eqn), eqn.outvars[0]))
                else:
                    parts.setdefault(p, []).append(eqn)
                for v in eqn.outvars:
                    made.setdefault(v, p)
        sums = dict(zip(body.invars[consts : consts + carries], scan.outvars[:carries], strict=True))
        stacks = {v: operand[v] for v in body.invars[consts + carries :]}
        names: dict[Var, Atom] = {v: operand[v] for v in body.invars[:consts]}
        names |= sums
        stash: dict[tuple[int, int], dict[Var, None]] = {}
        outputs: dict[int, dict[Atom, None]] = {}
        sent: dict[int, list[tuple[int, Var]]] = {}
        positions = sorted(set(parts) | set(received))
        for p in positions:
            own = {v for e in parts.get(p, ()) for v in e.outvars}
            for eqn in parts.get(p, ()):
                for a in eqn.invars:
                    if not compat.is_literal(a) and a in made and a not in own and made[a] != p:
                        stash.setdefault((made[a], p), {})[a] = None
                        outputs.setdefault(made[a], {})[a] = None
                if eqn.primitive is send_p:
                    value = eqn.invars[0]
                    sent.setdefault(p, []).append((transfer_number(eqn), value))
                    outputs.setdefault(p, {})[value] = None
        kept: dict[int, list[tuple[Var, Var]]] = {}
        for after, total in zip(body.outvars[:carries], scan.outvars[:carries], strict=True):
            p = made[after]
            kept.setdefault(p, []).append((total, after))
            outputs.setdefault(p, {})[after] = None
        extra: dict[int, list[Eqn]] = {}
        for y, buffer in zip(body.outvars[carries:], scan.outvars[carries:], strict=True):
            p = min(positions) if compat.is_literal(y) or y not in made else made[y]
            eqns, after = self._put(y, buffer)
            extra.setdefault(p, []).extend(eqns)
            kept.setdefault(p, []).append((buffer, after))
            outputs.setdefault(p, {})[after] = None
        tasks: dict[int, StageTask] = {}
        for p in positions:
            eqns = [e for e in parts.get(p, ()) if e.primitive is not send_p] + extra.get(p, [])
            read = {a for e in eqns for a in e.invars if not compat.is_literal(a)}
            takes = [e for v, stack in stacks.items() if v in read for e in self._take(v, stack)]
            ties = {after: total for total, after in kept.get(p, ())}
            eqns = advance_sums(takes + [_renamed(e, names) for e in eqns], set(ties))
            tasks[p] = self._task(
                f"task{p}", p, eqns, outputs.get(p, {}), received=received.get(p, ()), sent=sent.get(p, ()),
                kept=kept.get(p, ()), ties=ties,
            )  # fmt: skip
        return tasks, {k: tuple(v) for k, v in stash.items()}

    def _positions(self, body: Jaxpr) -> list[list[int]]:
        """Of each equation of the boxed body; a boxing of something that is there all the time may have several."""
        known = self.stage.position
        readers: dict[Var, set[int]] = {}
        found: list[list[int]] = []
        made: dict[Var, int] = {}
        for eqn in body.eqns:  # where a value is made; a boxing's is that of its operand
            p = known.get(eqn.outvars[0], None) if eqn.outvars else None
            if p is None:
                p = next((made[a] for a in eqn.invars if not compat.is_literal(a) and a in made), None)
            if p is not None:
                made |= dict.fromkeys(eqn.outvars, p)
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
        """The position of an equation that makes nothing, such as a print: when the last of what it reads is there."""
        known = [made[a] for a in eqn.invars if not compat.is_literal(a) and a in made]
        return max(known, default=min(made.values()))

    def _bytes(self, v: Var) -> int:
        return local_bytes(v, self.placements[v], self.mesh.sizes)

    def _take(self, v: Var, stack: Var) -> list[Eqn]:
        """`v = stack[index]`."""
        piece = compat.fresh_var(stack.aval.update(shape=(1, *v.aval.shape)))
        self.placements[piece] = _shifted(self.placements[v])
        return [compat.slice_at_eqn(stack, INDEX, piece), compat.squeeze_eqn(piece, v)]

    def _put(self, y: Atom, buffer: Var) -> tuple[list[Eqn], Var]:
        """`after = buffer with buffer[index] = y`."""
        row = compat.fresh_var(buffer.aval.update(shape=(1, *y.aval.shape)))
        after = compat.fresh_var(buffer.aval)
        self.placements[row] = self.placements[after] = self.placements[buffer]
        return [compat.unsqueeze_eqn(y, row), compat.put_at_eqn(buffer, row, INDEX, after)], after

    # -- before and after it

    def _load(self) -> StageTask:
        """What the loop wants, and the first values of its sums and stacks."""
        eqns: list[Eqn] = []
        self.loaded: set[int] = set()
        kept: list[tuple[Var, Var]] = []
        if self.scan is not None:
            scan, view = self.scan, compat.scan_of(self.scan)
            needed = {a for a in scan.invars if not compat.is_literal(a)}
            for i in range(self.at - 1, -1, -1):
                eqn = self.jaxpr.eqns[i]
                if any(v in needed for v in eqn.outvars):
                    self.loaded.add(i)
                    needed |= {a for a in eqn.invars if not compat.is_literal(a)}
            eqns = [self.jaxpr.eqns[i] for i in sorted(self.loaded)]
            made = {v for e in eqns for v in e.outvars}
            readers = Counter(a for e in self.jaxpr.eqns for a in e.invars if not compat.is_literal(a))
            readers.update(a for a in self.jaxpr.outvars if not compat.is_literal(a))
            for start, total in zip(scan.invars[view.consts : view.rows_at], scan.outvars, strict=False):
                if not compat.is_literal(start) and start in made and readers[start] == 1:
                    kept.append((total, start))
                    continue
                fresh = compat.fresh_var(total.aval)
                self.placements[fresh] = self.placements[total]
                if compat.is_literal(start):
                    eqns.append(compat.full_eqn(start.val, fresh))
                else:
                    eqns.append(compat.copy_eqn(start, fresh))
                kept.append((total, fresh))
            for buffer in scan.outvars[view.carries :]:
                fresh = compat.fresh_var(buffer.aval)
                self.placements[fresh] = self.placements[buffer]
                eqns.append(compat.full_eqn(0, fresh))
                kept.append((buffer, fresh))
            kept += [(v, v) for e in self._after() for v in e.invars if not compat.is_literal(v) and v in made]
            read = (*scan.invars[: view.consts], *scan.invars[view.rows_at :], *self.jaxpr.outvars)
            kept += [(a, a) for a in read if not compat.is_literal(a) and a in made]
            kept = list(dict.fromkeys(kept))
        return self._task("load", -1, eqns, [v for _, v in kept], kept=kept)

    def _after(self) -> list[Eqn]:
        return [e for i, e in enumerate(self.jaxpr.eqns) if e is not self.scan and i not in self.loaded]

    def _levels(self) -> list[tuple[Eqn, int]]:
        """What follows the loop, each equation as late as its readers allow, unless another stage waits for it."""
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
        """What follows the loop, in as many tasks as it takes for others to answer."""
        received: dict[int, list[tuple[int, Var]]] = {}
        parts: dict[int, list[Eqn]] = {}
        for eqn, at in self._levels():
            if eqn.primitive is receive_p:
                received.setdefault(at, []).append((transfer_number(eqn), eqn.outvars[0]))
            else:
                parts.setdefault(at, []).append(eqn)
        results = {a for a in self.jaxpr.outvars if not compat.is_literal(a)}
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
            tasks[at] = self._task(
                f"update{at or ''}", at, eqns, [*order, *(v for _, v in sent)], received=received.get(at, ()),
                sent=sent, kept=[(v, v) for v in order], ties=mine,
            )  # fmt: skip
        return tasks

    def _reused(self, outputs: Sequence[Var], spare: Sequence[Var]) -> dict[Var, Var]:
        """For outputs of an update the sums whose buffers they can take, which nobody reads any more."""
        left: dict[tuple[tuple[int, ...], np.dtype, Placement], list[Var]] = {}
        for v in spare:
            left.setdefault((v.aval.shape, v.aval.dtype, self.placements[v]), []).append(v)
        found: dict[Var, Var] = {}
        for out in outputs:
            if alike := left.get((out.aval.shape, out.aval.dtype, self.placements[out])):
                found[out] = alike.pop(0)
        return found


def _is_loop(eqn: Eqn, stage: StageProgram) -> bool:
    return any(v in stage.position for e in bodies_of(eqn)[0].eqns for v in e.outvars)


def _renamed(eqn: Eqn, names: Mapping[Var, Atom]) -> Eqn:
    return eqn.replace(invars=[a if compat.is_literal(a) else names.get(a, a) for a in eqn.invars])


def _shifted(placement: Placement) -> Placement:
    """With one more leading dimension."""
    return Placement([(a, S(s.dim + 1) if isinstance(s, S) else s) for a, s in placement.items()])
