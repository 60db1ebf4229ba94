"""Finds the microbatch loop of a program, and assigns each equation of its body to a stage and a task.

A microbatch passes the tasks in their order: F from the first stage to the last, then B back to the first. An equation
that depends on the output of cut k comes after this cut. An equation that depends only on the loop's inputs is computed
where it is first used, or at every use if it is cheap. A boundary inside a rematerialised block is recompute: its value
already crossed the cut in the forward pass. So the block is inlined, and each stage recomputes its own part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr, Var
from shardc.errors import PipelineError, all_offenders, number_text
from shardc.ir.boundary import END, microbatches_p, stage_boundary_p
from shardc.ir.eqns import copy_eqn
from shardc.ir.loop import Carry, Loop
from shardc.ir.nested import REMAT, bodies_of, is_recompute
from shardc.ir.program import Program
from shardc.ir.walk import ADDITIONS, LINEAR, all_eqns, bytes_of
from shardc.pipeline.cut.find_homes import is_large
from shardc.pipeline.cut.reassociate import reassociate
from shardc.pipeline.schedule.action import TaskId

CHEAP: Final = LINEAR | frozenset(
    (
        "iota", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "select_n", "add", "sub", "mul",
        "div", "max", "min", "abs", "sign", "exp", "log", "cos", "sin", "sqrt", "rsqrt", "pow", "integer_pow",
        "rem", "slice", "dynamic_slice", "concatenate", "rev", "floor", "round", "clamp", "is_finite",
        "stop_gradient", "random_wrap", "random_unwrap", "random_fold_in", "random_seed", "random_split",
        "random_bits", "threefry2x32", "shift_left", "shift_right_logical", "shift_right_arithmetic",
    )
)  # fmt: skip
"""Operations that are repeated rather than sent or kept, if they depend only on the loop's inputs."""
CHEAP_DEPTH: Final = 24
"""The most equations of such a computation."""
_TRACED_ONCE: Final = (
    "a boundary in a function that JAX traces once and that is called several times (jax.jit, jax.checkpoint) is one "
    "boundary. Call shardc.stage_boundary outside of that function, on its result."
)


@dataclass(frozen=True)
class CarryPart:
    """One carry of the microbatch loop, or one stage's part of it: a sum over microbatches, or state.

    Attributes:
      carry: the carry.
      before, after: its variables before and after a microbatch.
      task: the task that makes `after`.
      state: whether it is state: a microbatch may read the value that the previous one left.
    """

    carry: Carry
    before: Var
    after: Atom
    task: TaskId
    state: bool = False


@dataclass(frozen=True)
class PlacedBody:
    """The body of the loop with a task for each equation.

    Attributes:
      stages: P.
      fused: the last stage's forward lies inside its backward task.
      backward: whether there is a backward pass.
      eqns: (task, equation), in an order in which each stage can compute its own; a cheap equation may occur several
        times.
      carries: the parts of each carry, in the order of stages.
      ys: the variable and the task of each stacked result.
    """

    stages: int
    fused: bool
    backward: bool
    eqns: tuple[tuple[TaskId, Eqn], ...]
    carries: tuple[CarryPart, ...]
    ys: tuple[tuple[Atom, TaskId], ...]


def find_loop(program: Program, where: str) -> Loop:
    """The one loop over microbatches of a program.

    Raises:
      PipelineError: there is no loop, or more than one, or a stage boundary is in a place that cannot be cut.
    """
    loops = find_loops(program.jaxpr)
    if len(loops) != 1:
        raise PipelineError(f"{where}: a pipeline runs over one loop of microbatches, {_not_one(program, loops)}")
    (loop,) = loops
    outside = [e for eqn in program.jaxpr.eqns if eqn is not loop.eqn for e in (eqn, *_inside(eqn))]
    wrong = [
        f"{compat.source_line(e)}: outside of the loop over microbatches; move it into the function that "
        "shardc.accumulate takes."
        for e in outside
        if e.primitive is stage_boundary_p
    ]
    for eqn in loop.eqns:
        wrong += _in_loops(eqn)
    if wrong:
        raise PipelineError(all_offenders(f"{where}: stage boundaries in places that cannot be cut", _unique(wrong)))
    return loop


def find_loops(jaxpr: Jaxpr) -> list[Loop]:
    """The scans over microbatches among the equations of a program."""
    marked = {e.outvars[0] for e in jaxpr.eqns if e.primitive is microbatches_p}
    return [
        Loop.of(e)
        for e in jaxpr.eqns
        if e.primitive.name == "scan" and any(v in marked for v in e.invars if not compat.is_literal(v))
    ]


def _not_one(program: Program, loops: Sequence[Loop]) -> str:
    """The end of the error text for a program without exactly one loop: the loops that were found, and the fix."""
    if not loops:
        for eqn in program.jaxpr.eqns:
            if any(e.primitive is microbatches_p for e in _inside(eqn)):
                return (
                    f"found it inside the body of a {eqn.primitive.name} ({compat.source_line(eqn)}). Make the "
                    "function one step, and call it in a loop."
                )
        return (
            "found none. Write the gradient as shardc.accumulate(jax.value_and_grad(loss), microbatches=m)(params, "
            "batch), or jax.grad of an accumulate of the loss."
        )
    lines = ", ".join(_unique(compat.source_line(x.eqn) for x in loops))
    if any(x.reverse for x in loops):
        return (
            f"but the gradient is taken of the whole loop ({lines}), which makes a second one. Take it inside the "
            "loop, as shardc.accumulate(jax.value_and_grad(loss), microbatches=m)(params, batch), or as jax.grad of "
            "an accumulate of a function that returns one float."
        )
    return f"found {len(loops)} ({lines}). Put each loop into its own function, or merge them into one loop."


def _inside(eqn: Eqn) -> list[Eqn]:
    return [e for body in bodies_of(eqn) for e in all_eqns(body)]


def _in_loops(eqn: Eqn) -> list[str]:
    if eqn.primitive.name in REMAT:
        return [line for inner in bodies_of(eqn)[0].eqns for line in _in_loops(inner)]
    return [
        f"{compat.source_line(e)}: inside the body of a {eqn.primitive.name} ({compat.source_line(eqn)}), which runs "
        'as a whole on one stage; unroll the loop over layers at the boundaries, or let stages="auto" cut it.'
        for e in _inside(eqn)
        if e.primitive is stage_boundary_p
    ]


def _unique(lines: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(lines))


def boundary_lines(loop: Loop) -> list[str]:
    """The source lines of the boundaries of the loop's forward pass, in order."""
    found: dict[int, str] = {}
    for eqn in all_eqns(loop.body):
        if eqn.primitive is stage_boundary_p and not eqn.params["backward"] and eqn.params["cut"] != END:
            found.setdefault(eqn.params["cut"], compat.source_line(eqn))
    return list(found.values())


def place_body(loop: Loop, stages: int, where: str) -> PlacedBody:
    """Assign a task to each equation of the loop's body.

    Raises:
      PipelineError: there are too many or too few boundaries, they are out of order, or a stage has no work.
    """
    return _StageAssigner(loop, stages, where).run()


class _StageAssigner:
    def __init__(self, loop: Loop, stages: int, where: str) -> None:
        self.loop, self.stages, self.where = loop, stages, where
        self.alias: dict[Var, Atom] = {}
        self.floor: dict[Var, TaskId] = {}
        self.low: dict[Var, TaskId | None] = {}
        self.late: set[Eqn] = set()  # equations of recompute: computed as late as their readers allow
        self.limit: dict[Var, TaskId] = {}  # the task before the first cut that a value crosses
        self.depth = dict.fromkeys(
            (*loop.consts, *loop.rows), 0
        )  # number of equations of a cheap computation; absent: not cheap

    def run(self) -> PlacedBody:
        eqns = self._open(self.loop.eqns, recompute=False)
        self._number_cuts(eqns)
        kept = self._lows(eqns)
        ys = self._ys(kept)
        carries, extra = self._carries(kept, ys)
        kept += extra
        for eqn in extra:
            self._low_of(eqn)
        return self._resolve(kept, carries, ys)

    # -- aliases: the result of a boundary is its operand, read from behind the cut

    def base(self, atom: Atom) -> Atom:
        while not compat.is_literal(atom) and atom in self.alias:
            atom = self.alias[atom]
        return atom

    def at(self, atom: Atom) -> TaskId | None:
        """The first task in which a value is available under this name; None if it is available everywhere."""
        found: TaskId | None = None
        while not compat.is_literal(atom):
            if atom not in self.alias:
                return _latest(found, self.low.get(atom))
            found = _latest(found, self.floor.get(atom))
            atom = self.alias[atom]
        return found

    def _open(self, eqns: Sequence[Eqn], recompute: bool) -> list[Eqn]:
        """The equations, with rematerialised blocks that contain boundaries inlined."""
        found: list[Eqn] = []
        for eqn in eqns:
            if eqn.primitive.name in REMAT and any(e.primitive is stage_boundary_p for e in _inside(eqn)):
                (body,) = bodies_of(eqn)
                self.alias |= dict(zip(body.invars, eqn.invars, strict=True))
                found += self._open(body.eqns, recompute or is_recompute(eqn))
                self.alias |= dict(zip(eqn.outvars, body.outvars, strict=True))
            else:
                found.append(eqn)
                if recompute:
                    self.late.add(eqn)
        return found

    def _number_cuts(self, eqns: Sequence[Eqn]) -> None:
        marks = [e for e in eqns if e.primitive is stage_boundary_p]
        first = [e for e in marks if not e.params["backward"] and e.params["cut"] != END and e not in self.late]
        self.order = {c: k for k, c in enumerate(dict.fromkeys(e.params["cut"] for e in first))}
        self.backward = any(e.params["backward"] for e in marks)
        cuts = len(self.order)
        if cuts == self.stages and self.stages > 0 and cuts:  # the last one marks the end of the forward pass
            last = next(c for c, k in self.order.items() if k == cuts - 1)
            self.order[last] = END
            cuts -= 1
        if cuts != self.stages - 1:
            raise PipelineError(f"{self.where}: {self._miscount(cuts, first)}")
        ends = any(self._number(e) == END and e.params["backward"] for e in marks)
        self.fused = (self.backward or self.stages == 1) and not ends

    def _miscount(self, cuts: int, marks: Sequence[Eqn]) -> str:
        lines = _unique(compat.source_line(e) for e in marks)
        has = f"{cuts} ({', '.join(lines)})" if lines else "none"
        need = number_text(self.stages - 1, "stage boundary")
        rule = f"{number_text(self.stages, 'stage')} need {need}, the loop has {has}"
        passed = [(e.params["cut"], e.params["leaf"]) for e in marks]
        if len(set(passed)) < len(passed):
            return f"{rule}; {_TRACED_ONCE}"
        if cuts < self.stages - 1:
            return (
                f"{rule}. Write x = shardc.stage_boundary(x) between the stages and use its result from there on, or "
                'set stages="auto".'
            )
        return (
            f"{rule}. Remove {cuts - self.stages + 1}, or use more stages: a longer pipe axis, or more chunks. (One "
            "further boundary is allowed after the loss.)"
        )

    def _number(self, eqn: Eqn) -> int:
        cut = eqn.params["cut"]
        return cut if cut == END else self.order[cut]

    def _lows(self, eqns: Sequence[Eqn]) -> list[Eqn]:
        """Remove the boundaries, and find the earliest task of every other equation."""
        kept: list[Eqn] = []
        crossed: dict[tuple[int, int], Atom] = {}
        wrong: list[str] = []
        for eqn in eqns:
            if eqn.primitive is not stage_boundary_p:
                self._low_of(eqn)
                kept.append(eqn)
                continue
            k, key, x, y = self._number(eqn), (eqn.params["cut"], eqn.params["leaf"]), eqn.invars[0], eqn.outvars[0]
            if eqn in self.late and not eqn.params["backward"] and key in crossed:
                x = crossed[key]  # recompute would send it again, but it is there already
            elif not eqn.params["backward"]:
                if k != END and key in crossed and self.base(crossed[key]) is not self.base(x) and self.late:
                    wrong.append(
                        f"{compat.source_line(eqn)}: this boundary was traced once, but rematerialised code runs it "
                        "twice; call it outside of the jitted function that is called twice."
                    )
                crossed.setdefault(key, x)
            self.alias[y] = x
            front, behind = self._around(eqn)
            if eqn not in self.late and not compat.is_literal(b := self.base(x)):
                self.limit[b] = min(front, self.limit.get(b, front))
            before = self.at(x)
            if k != END and before is not None and before >= behind:
                wrong.append(
                    f"{compat.source_line(eqn)}: boundary {k} takes a value that is made after it "
                    f"(by stage {before.stage}): {_TRACED_ONCE}"
                )
            is_mark = k == END and not eqn.params["backward"]  # it separates no stages
            self.floor[y] = before or TaskId(0, "F") if is_mark else behind
        if wrong:
            raise PipelineError(all_offenders(f"{self.where}: stage boundaries out of order", _unique(wrong)))
        return kept

    def _around(self, boundary: Eqn) -> tuple[TaskId, TaskId]:
        """The tasks before and behind a boundary."""
        k, last = self._number(boundary), self.stages - 1
        if k == END:
            return TaskId(last, "F"), TaskId(last, "B")
        if boundary.params["backward"]:
            return TaskId(k + 1, "B"), TaskId(k, "B")
        return TaskId(k, "F"), TaskId(k + 1, "F")

    def _low_of(self, eqn: Eqn) -> None:
        low: TaskId | None = None
        for atom in eqn.invars:
            low = _latest(low, self.at(atom))
        depth: int | None = None
        if low is None and eqn.primitive.name in CHEAP and not eqn.effects:
            known = [self.depth.get(b) for b in self._vars(eqn)]
            depth = None if None in known else 1 + sum(d for d in known if d is not None)
        for v in eqn.outvars:
            self.low[v] = low
            if depth is not None and depth <= CHEAP_DEPTH:
                self.depth[v] = depth

    def _vars(self, eqn: Eqn) -> list[Var]:
        return [b for a in eqn.invars if not compat.is_literal(b := self.base(a))]

    # -- sums over microbatches, and state

    def _ys(self, eqns: list[Eqn]) -> list[Atom]:
        """The stacked results of the loop; a result that is state becomes a copy of it."""
        carried = {c.before for c in self.loop.carries}
        ys = [self.base(a) for a in self.loop.stacks.values()]
        for i, y in enumerate(ys):
            if not compat.is_literal(y) and y in carried:
                ys[i] = self._copied(y, eqns)
        return ys

    def _copied(self, atom: Atom, eqns: list[Eqn]) -> Var:
        var = compat.fresh_var(atom.aval)
        eqns.append(copy_eqn(atom, var))
        self._low_of(eqns[-1])
        return var

    def _carries(self, eqns: list[Eqn], ys: Sequence[Atom]) -> tuple[list[CarryPart], list[Eqn]]:
        made = {v: e for e in eqns for v in e.outvars}
        readers: dict[Var, int] = {}
        for e in eqns:
            for v in self._vars(e):
                readers[v] = readers.get(v, 0) + 1
        for a in (*(c.after for c in self.loop.carries), *ys):
            if not compat.is_literal(b := self.base(a)):
                readers[b] = readers.get(b, 0) + 1
        parts: list[CarryPart] = []
        extra: list[Eqn] = []
        for c in self.loop.carries:
            before, out = c.before, self.base(c.after)
            add = None if compat.is_literal(out) else made.get(out)
            reads = [] if add is None else [self.base(a) for a in add.invars]
            is_sum = add is not None and add.primitive.name in ADDITIONS and before in reads
            if add is None or not is_sum or readers.get(before, 0) > 1:
                after = out if add is not None else self._copied(out, eqns)
                parts.append(CarryPart(c, before, after, self._first, state=True))
                continue
            term = add.invars[1 - reads.index(before)]
            groups = reassociate(term, self.base, made, readers, self._stage_at)
            if len(groups) < 2:
                parts.append(CarryPart(c, before, out, self._first))
                continue
            for i, (_, value, eqns_of) in enumerate(groups):
                start = before if i == 0 else compat.fresh_var(before.aval)
                after = compat.fresh_var(out.aval)
                extra += [*eqns_of, add.replace(invars=[start, value], outvars=[after])]
                parts.append(CarryPart(c, start, after, self._first))
        return parts, extra

    def _follow(self, eqns: Sequence[Eqn], parts: Sequence[CarryPart]) -> dict[Var, set[TaskId]]:
        """For values that depend on state only: the tasks that replace this state."""
        states = [p for p in parts if p.state]
        behind: dict[Var, frozenset[Var]] = {p.before: frozenset((p.before,)) for p in states}
        for eqn in eqns:
            if all(self.low.get(v) is None for v in eqn.outvars):
                found = frozenset[Var]().union(*(behind.get(v, ()) for v in self._vars(eqn)))
                behind |= dict.fromkeys(eqn.outvars, found)
        lows = {p.before: self.at(p.after) for p in states}
        at = {v: self._fuse(low) for v, low in lows.items() if low is not None}
        while True:
            more = {
                p.before: max(at[v] for v in behind.get(p.after, ()) if v in at)
                for p in states
                if p.before not in at and any(v in at for v in behind.get(p.after, ()))
            }
            if not more:
                break
            at |= more
        return {
            v: {max(at[s] for s in found if s in at)}
            for v, found in behind.items()
            if v not in at and any(s in at for s in found)
        }

    def _stage_at(self, atom: Atom) -> int | None:
        low = self.at(atom)
        return None if low is None else low.stage

    def _fuse(self, task: TaskId) -> TaskId:
        last = self.stages - 1
        return TaskId(last, "B") if self.fused and task == TaskId(last, "F") else task

    @property
    def _first(self) -> TaskId:
        return self._fuse(TaskId(0, "F"))

    # -- tasks, from the readers back

    def _beside(self, eqns: Sequence[Eqn]) -> dict[Var, int]:
        """The stage of each value that depends on no microbatch: the stage of its largest input.

        The stage of an input is the first one that reads it.
        """
        at: dict[Var, int] = {}
        for eqn in reversed(eqns):
            reads = [at[v] for v in eqn.outvars if v in at]
            reads += [self.limit[v].stage for v in eqn.outvars if v in self.limit]
            for found in map(self.low.get, eqn.outvars) if eqn.outvars else map(self.at, eqn.invars):
                reads += [] if found is None else [found.stage]
            if reads:
                at |= {v: min(*reads, at.get(v, self.stages)) for v in self._vars(eqn)}
        for eqn in eqns:
            known = [v for v in self._vars(eqn) if v in at]
            if known:
                top = max(known, key=lambda v: (bytes_of(v), -at[v]))
                at |= dict.fromkeys(eqn.outvars, at[top])
        return at

    def _resolve(self, eqns: list[Eqn], parts: list[CarryPart], ys: Sequence[Atom]) -> PlacedBody:
        roots = {a for a in (*(p.after for p in parts), *ys) if not compat.is_literal(a)}
        follow = self._follow(eqns, parts)
        uses: dict[Var, set[TaskId]] = {v: set(follow[v]) for v in roots if v in follow}
        where: dict[Var, TaskId] = {}
        placed: list[tuple[TaskId, Eqn]] = []
        alone, beside = self._first, self._beside(eqns)
        for eqn in reversed(eqns):
            read = set[TaskId]().union(*(uses.get(v, ()) for v in eqn.outvars))
            root = any(v in roots for v in eqn.outvars)
            if not read and not root and not eqn.effects:
                continue
            low = None
            for found in map(self.low.__getitem__, eqn.outvars) if eqn.outvars else map(self.at, eqn.invars):
                low = _latest(low, found)
            if low is not None and not (eqn in self.late and read):
                tasks = {self._fuse(low)}
            elif not read:
                known = [beside[v] for v in eqn.outvars if v in beside]
                tasks = {self._fuse(low if low is not None else TaskId(min(known, default=0), "F"))}
            elif low is None and not root and all(v in self.depth for v in eqn.outvars):
                tasks = read
            else:
                limits = {self._fuse(self.limit[v]) for v in eqn.outvars if v in self.limit}
                large = [v for v in (*self._vars(eqn), *eqn.outvars) if is_large(v)]
                if low is None and large and not any(map(is_large, eqn.outvars)):  # a norm of weights: where they are
                    limits |= {self._fuse(TaskId(beside[v], "F")) for v in eqn.outvars if v in beside}
                tasks = {min(read | limits)}
            for p in sorted(tasks, reverse=True):
                placed.append((p, eqn.replace(invars=[self.base(a) for a in eqn.invars])))
                for v in self._vars(eqn):
                    uses.setdefault(v, set()).add(p)
            where |= {v: min(tasks) for v in eqn.outvars}
        placed.reverse()
        return PlacedBody(
            self.stages, self.fused, self.backward, tuple(placed),
            tuple(
                replace(p, task=where.get(p.after, p.task)) for p in parts
            ),
            tuple((y, alone if compat.is_literal(y) else where.get(y, alone)) for y in ys),
        )  # fmt: skip


def _latest(a: TaskId | None, b: TaskId | None) -> TaskId | None:
    return b if a is None else a if b is None else max(a, b)
