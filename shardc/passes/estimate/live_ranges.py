"""Live ranges: when the values of a program take memory. They follow from the program alone, without placements.

XLA materializes far fewer values than a program has. These rules decide how much is live at one time:

- A chain of elementwise operations is one loop; values inside it are never materialized. What the chain reads is live
  until the loop runs: `1 - tanh(x)²`, computed in the forward pass for the backward pass, is fused there.
- A value that is cheap to compute from one other value of its size is recomputed in each loop that reads it, and
  materialized once for readers of memory, such as products. So of a softmax both exp(x - max) and its quotient by the
  sum are kept: the quotient for the products, the exponentials for the loops of the backward pass.
- A costly value, or one computed from two large values, is computed once and kept if several loops read it.
- A loop writes its result over an operand of its own shape if nothing reads that later; an update of rows does so, too.
  On some devices a loop does not write over a value that was made in place, and sibling loops are fused
  (`fused_loops`).
- A collective may run as late as its result is read: its operand is live until then.
- A carry of a loop has one buffer, and a second one if a step reads the old value after it has made the new one.
  Stacked results are live from the beginning of the loop, stacked operands until its end, a row during its step.
- A result has memory from the beginning, unless it takes that of a donated argument. Then it is live from when it is
  made; if the argument is read later, both are, and the result is copied there in the end.
- Of a softmax in float32 the scores, the exponentials, or both are kept (`softmax.py`).

`Backend` has what differs between devices. The order of operations is that of the program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr, Var
from shardc.ir.nested import NESTED, REMAT, bodies_of, is_kept_apart, nested_bodies, trips_of
from shardc.ir.walk import itemsize_of
from shardc.passes.estimate.backend import (
    CONVOLUTIONS,
    IN_LOOPS,
    LOOKUPS,
    PRODUCTS,
    REINDEXING,
    TPU,
    UPDATES,
    Backend,
    FusionKind,
    ScheduledEqn,
    kind_of,
)
from shardc.passes.estimate.fused_loops import ExtendedRange, fused_siblings, reads_of
from shardc.passes.estimate.ready import Ready, find_ready
from shardc.passes.estimate.row_tables import RowTable, find_row_tables
from shardc.passes.estimate.softmax import LEAST_LOOPS, RecomputedExp, Scores, find_scores
from shardc.passes.estimate.traffic import narrows
from shardc.sbp.causal import is_attention


@dataclass(frozen=True, slots=True)
class Product:
    """A product, and the point at which it runs.

    Attributes:
      ready: the earliest point of each operand on eager devices (`find_ready`).
      over: the point at which a loop writes over its result, which is counted until before it; None if none does.
    """

    eqn: Eqn
    at: int
    ready: tuple[int, ...]
    over: int | None = None


@dataclass(frozen=True, slots=True)
class LiveRanges:
    """The live ranges of the values that take memory.

    Attributes:
      points: number of points of time: one for each equation, those of nested bodies inside theirs.
      values: whose placements give the bytes; a value may occur several times.
      begin, end: (len(values),) points: value i is live from `begin[i]` until before `end[i]`. Arguments are live all
        the time. A result that takes a donated argument's buffer as it is made is not counted.
      arguments: number of arguments, which are the first of `values`.
      products: all of them. Their placements say whether one has ring buffers (`ring_buffers`).
      extended: ranges that are longer if sibling loops are fused. Placements say whether they are: not where a product
        fuses its operand instead, and no product fuses what is computed from a product whose pieces go around.
      tables: values that are padded row by row, on devices that do so.
      recomputed: exponentials that are materialized only where the pieces of a product go around.
    """

    points: int
    values: tuple[Var, ...]
    begin: NDArray[np.int64]
    end: NDArray[np.int64]
    arguments: int
    products: tuple[Product, ...] = ()
    extended: tuple[ExtendedRange, ...] = ()
    tables: tuple[RowTable, ...] = ()
    recomputed: tuple[RecomputedExp, ...] = ()

    def live(self, size: Callable[[Var], int]) -> NDArray[np.int64]:
        """(points,) bytes in use at each point; `size`: bytes of a value on one device."""
        change = np.zeros(self.points + 1, np.int64)
        sizes = np.fromiter(map(size, self.values), np.int64, len(self.values))
        np.add.at(change, self.begin, sizes)
        np.subtract.at(change, self.end, sizes)
        return change.cumsum()[:-1]

    def holdings(self, point: int) -> list[Var]:
        """The values that are live at a point."""
        return [self.values[i] for i in np.flatnonzero((self.begin <= point) & (point < self.end))]


def live_ranges(jaxpr: Jaxpr, ties: Mapping[int, int] = MappingProxyType({}), backend: Backend = TPU) -> LiveRanges:
    """The live ranges of a program's values.

    Args:
      jaxpr: canonical (calls inlined, every variable unique), before or after boxing.
      ties: for results the number of the donated argument whose buffer each takes.
      backend: of the device.

    Returns:
      About one entry for each value that is materialized.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> def f(x, w):
      ...     return jnp.tanh(x @ w + 1.0) @ w
      >>> found = live_ranges(jax.make_jaxpr(f)(jnp.ones((2, 3)), jnp.ones((3, 3))).jaxpr)
      >>> [(v.aval.size, int(b), int(e)) for v, b, e in zip(found.values, found.begin, found.end)]
      [(6, 0, 5), (9, 0, 5), (6, 0, 5), (6, 3, 4), (6, 0, 3)]
      >>> found.live(lambda v: 4 * v.aval.size)  # x, w, the result, and x @ w, or the tanh that is written over it
      array([108, 108, 108, 108,  84])
    """
    return _Backward(_Forward(jaxpr), ties, backend).run()


def made_at(jaxpr: Jaxpr) -> Mapping[Var, int]:
    """The point at which each value of a program is made, nested bodies included."""
    return {v: step.at for v, step in _Forward(jaxpr).maker.items()}


class RunningScope(NamedTuple):
    """A scope that runs at a point of a program, with the number of its equation there and its executions in one
    call."""

    jaxpr: Jaxpr
    now: int
    trips: int


def scopes_at(jaxpr: Jaxpr, point: int) -> list[RunningScope]:
    """The scopes that run at a point of a program, the outermost first."""
    eqns, found, trips = _Forward(jaxpr).eqns, list[RunningScope](), 1
    scope: Jaxpr | None = jaxpr
    while scope is not None:
        here = [n for n, s in enumerate(eqns[scope]) if s.start <= point <= s.at]
        if not here:
            break
        found.append(RunningScope(scope, here[0], trips))
        inside = scope.eqns[here[0]]
        inner, trips = bodies_of(inside), trips * trips_of(inside)
        scope = next((b for b in inner if b.eqns and eqns[b][0].start <= point <= eqns[b][-1].at), None)
    return found


class _Forward:
    """The first walk: gives equations their points of time, and values what they are computed from.

    Attributes:
      now: number of points so far.
      eqns: the equations of each body, by its id.
      maker: the equation that makes a value.
      readers: number of equations that read a value.
      joins: fusable values that are computed from several values as large as themselves.
      source: for a fusable value the one value as large that a loop has to read for it; None if there is none. A value
        that is not in here is its own source.
      products, lookups: equations of these kinds (`backend`).
    """

    def __init__(self, jaxpr: Jaxpr) -> None:
        self.jaxpr, self.now = jaxpr, 0
        self.eqns: dict[Jaxpr, list[ScheduledEqn]] = {}
        self.maker: dict[Var, ScheduledEqn] = {}
        self.readers = Counter[Var]()
        self.source: dict[Var, Var | None] = {}
        self.joins: set[Var] = set()
        self.products: list[ScheduledEqn] = []
        self.lookups: list[Eqn] = []
        self.body(jaxpr)

    def body(self, body: Jaxpr) -> None:
        eqns, home = body.eqns, body
        operands = [[a for a in e.invars if not compat.is_literal(a)] for e in eqns]
        self.readers.update(chain.from_iterable(operands))
        self.readers.update([a for a in body.outvars if not compat.is_literal(a)])
        scheduled = self.eqns[home] = list[ScheduledEqn]()
        for eqn, mine in zip(eqns, operands, strict=True):
            start, kind, name = self.now, kind_of(eqn), eqn.primitive.name
            for inner in bodies_of(eqn) if name in NESTED else ():
                self.now += 1
                self.body(inner)
            step = ScheduledEqn(eqn, kind, mine, start, self.now, home)
            scheduled.append(step)
            for v in eqn.outvars:
                self.maker[v] = step
            if kind in IN_LOOPS:
                self.find_source(step, eqn.outvars[0])
            elif name in PRODUCTS or is_attention(name):
                self.products.append(step)
            elif name in LOOKUPS:
                self.lookups.append(eqn)
            self.now += 1

    def find_source(self, step: ScheduledEqn, v: Var) -> None:
        """Sets the source of `v`: its only operand as large, or itself if it is kept."""
        aval, size = v.aval, compat.size_of(v.aval)
        found: Var | None = None
        for a in step.operands if size else ():
            if a.aval is aval or compat.size_of(a.aval) >= size:
                source = self.source.get(a, a)
                if found is None:
                    found = source
                elif source is not None and source is not found:
                    self.joins.add(v)
                    found = v
                    break
        if step.kind is FusionKind.COSTLY and self.readers[v] > 1:
            found = v
        self.source[v] = found


class _Backward:
    """The second walk, from the last equation to the first: how long each value is read, and how.

    A value is read from memory, or fused into the loops that read it, or both.

    Attributes:
      whole, first: the last and the first point at which a value is read from memory.
      fused: the last point of a loop that fuses a value; `loops`: the number of loops that read it.
      multiplied: the number of products that read a value.
      narrowed: values that only products read, and what they are converted from: while that is in memory, products read
        it.
      taker: the value that the last such loop may write over it; `taken`: the value that one is written over.
      starts: values that loops materialize, and the points at which the loops run.
      spread: broadcast factors of sums that are materialized at full size, with their live range.
      lives: the live ranges (value, begin, end); `overwritten`: their ends where a loop writes over them.
      step_starts: points at which the rows of eager loops are ready.
      written: values that a softmax materializes; `recomputed`: its exponentials that are recomputed.
    """

    def __init__(self, ahead: _Forward, ties: Mapping[int, int], backend: Backend) -> None:
        self.ahead, self.ties, self.backend = ahead, ties, backend
        self.maker = ahead.maker
        self.early = find_ready(ahead.jaxpr) if backend.eager else Ready()
        self.whole: dict[Var, int] = {}
        self.first: dict[Var, int] = {}
        self.fused: dict[Var, int] = {}
        self.loops: dict[Var, int] = {}
        self.multiplied = Counter[Atom]()
        self.narrowed: dict[Var, Var] = {}
        self.taker: dict[Var, Var] = {}
        self.taken: dict[Var, Var] = {}
        self.starts: dict[Var, int] = {}
        self.spread: dict[tuple[Var, tuple[int, ...]], tuple[Var, int, int]] = {}
        self.lives: list[tuple[Var, int, int]] = []
        self.overwritten: dict[Var, int] = {}
        self.step_starts: set[int] = set()
        self.written: set[Var] = set()
        self.recomputed: list[RecomputedExp] = []

    def run(self) -> LiveRanges:
        jaxpr, end = self.ahead.jaxpr, self.ahead.now + 1
        results = dict.fromkeys(a for a in jaxpr.outvars if not compat.is_literal(a))
        for v in results:
            self.read(v, end - 1)
        self.body(jaxpr)
        over = {jaxpr.outvars[k] for k, i in self.ties.items() if self.writes_over(jaxpr.outvars[k], jaxpr.invars[i])}
        own = results.keys() - {jaxpr.outvars[k] for k in self.ties}
        arguments = [*jaxpr.constvars, *jaxpr.invars]
        rows = [(v, 0, end) for v in arguments]
        rows += [(v, 0 if v in own else b, e) for v, b, e in (*self.lives, *self.spread.values()) if v not in over]
        rows = self.without_narrowed(rows) if self.narrowed else rows
        begin, until = (np.asarray([r[i] for r in rows], np.int64).reshape(len(rows)) for i in (1, 2))
        products = tuple(map(self.product, self.ahead.products))
        values = tuple(r[0] for r in rows)
        extended, tables = self.extended_and_tables(over)
        return LiveRanges(end, values, begin, until, len(arguments), products, extended, tables, tuple(self.recomputed))

    def without_narrowed(self, rows: list[tuple[Var, int, int]]) -> list[tuple[Var, int, int]]:
        """The live ranges without those of narrowed values while what they are converted from is in memory."""
        until = dict[Var, int]()
        for v, _, end in rows:
            until[v] = max(end, until.get(v, 0))
        later = (
            (v, max(begin, until.get(self.narrowed[v], 0)) if v in self.narrowed else begin, e) for v, begin, e in rows
        )
        return [(v, begin, end) for v, begin, end in later if begin < end]

    def product(self, step: ScheduledEqn) -> Product:
        ready, over = self.early.operands.get(step.eqn, ()), self.overwritten.get(step.eqn.outvars[0])
        return Product(step.eqn, step.at, ready, over)

    def extended_and_tables(self, over: Collection[Var]) -> tuple[tuple[ExtendedRange, ...], tuple[RowTable, ...]]:
        """`LiveRanges.extended` and `.tables`; `over`: results that replace arguments in place."""
        if not self.backend.fuses_siblings and not self.backend.tiles:
            return (), ()
        reads = reads_of(self.starts, self.maker)
        extended = self.extended(reads, over) if self.backend.fuses_siblings else ()
        if not self.backend.tiles:
            return extended, ()
        return extended, find_row_tables(self.ahead.lookups, self.starts, reads, self.maker, self.last, over)

    def extended(self, reads: Mapping[Var, list[Var]], over: Collection[Var]) -> tuple[ExtendedRange, ...]:
        """Values that are live until a later sibling loop runs. Results that replace arguments are live anyway."""
        gone = {v: end for v, _, end in self.lives if v not in over}
        joined = fused_siblings(self.starts, reads, self.maker)
        return tuple(ExtendedRange(v, gone[v], ends) for v, ends in joined.items() if v in gone)

    def writes_over(self, v: Atom, argument: Var) -> bool:
        """Whether a result can replace an argument when it is made."""
        if compat.is_literal(v) or v not in self.maker:
            return False
        return self.last(argument, 0) <= max(self.maker[v].at, self.starts.get(v, 0))

    # --- who reads ----------------------------------------------------------------------------------------------------

    def read(self, a: Atom, t: int) -> None:
        """Records that `a` is read from memory at `t`."""
        if not compat.is_literal(a):
            self.loops[a] = self.loops.get(a, 0) + 1
            self.whole[a] = max(self.whole.get(a, t), t)
            self.first[a] = min(self.first.get(a, t), t)

    def fuse(self, a: Var, t: int, taker: Var | None = None, loops: int = 1) -> None:
        """Records that `a` is read in `loops` fused loops, the last at `t`, which may overwrite it with `taker`."""
        self.loops[a] = self.loops.get(a, 0) + loops
        if t > self.fused.get(a, -1):
            self.fused[a] = t
            if taker is not None:
                self.taker[a] = taker
            elif a in self.taker:
                del self.taker[a]

    def last(self, v: Var, t: int) -> int:
        """The last point at which `v` is read, `t` if it is not."""
        return max(self.whole.get(v, t), self.fused.get(v, t))

    def pass_on(self, v: Var, a: Atom, solid: bool = False) -> None:
        """Records the reads of `v` for `a`, whose memory it is; a solid one is materialized for its readers."""
        if compat.is_literal(a):
            return
        if solid and (v in self.whole or v in self.fused):
            self.read(a, self.last(v, -1))
            return
        if v in self.whole:
            self.read(a, self.whole[v])
            self.first[a] = min(self.first[a], self.first[v])
        if v in self.fused:
            self.fuse(a, self.fused[v], self.taker.get(v), self.loops[v] - (v in self.whole))

    def live(self, v: Var, begin: int, stays: bool = False) -> None:
        """Adds the live range of `v` from `begin` to its last reader or until it is overwritten; a loop does not
        overwrite it if it `stays`."""
        made = self.maker[v].at
        whole, fused = self.whole.get(v, made), self.fused.get(v, made)
        end, taker = max(whole, fused) + 1, self.taker.get(v)
        by_loop = taker is not None and self.maker[taker].kind in IN_LOOPS
        overwritten = taker is not None and self.starts.get(taker, self.maker[taker].at) == fused >= whole
        if taker is not None and overwritten and not (stays and by_loop) and self.taken.setdefault(taker, v) is v:
            end = max(fused, made + 1)
            if by_loop:
                self.overwritten[v] = end
        self.lives.append((v, begin, end))

    # --- equations ----------------------------------------------------------------------------------------------------

    def body(self, body: Jaxpr) -> None:
        for step in reversed(self.ahead.eqns[body]):
            eqn, kind = step.eqn, step.kind
            if kind is FusionKind.CHEAP or kind is FusionKind.COSTLY:
                self.computed(step, eqn.outvars[0])
            elif kind is FusionKind.VIEW:
                self.pass_on(eqn.outvars[0], eqn.invars[0])
            elif kind is FusionKind.MOVED:
                self.moved(step, eqn.outvars[0], eqn.invars[0])
            elif eqn.primitive.name in NESTED:
                self.nested(step)
            else:
                self.made_in_memory(step)

    def computed(self, step: ScheduledEqn, v: Var) -> None:
        """A fusable operation: fused into its readers, unless that repeats too much work; materialized for readers of
        memory.

        In a loop, what follows from the inputs of a step, such as a recomputed residual, may start with the step.
        """
        eqn, costly = step.eqn, step.kind is FusionKind.COSTLY
        once = self.loops.get(v, 0) > 1 and (v in self.ahead.joins or (costly and self.is_kept(eqn)))
        scores = find_scores(step, self.maker) if once and self.backend.materializes_scores else None
        if scores is not None:
            once = self.keeps(step, v, scores)
        once |= v in self.written
        in_place = eqn.primitive.name not in REINDEXING
        if not once and v in self.fused:
            t, loops = self.fused[v], self.loops[v] - (v in self.whole)
            taker = self.taker.get(v) if in_place else None
            for a in step.operands:
                self.fuse(a, t, taker if taker is not None and _alike(a.aval, v.aval) else None, loops)
        if once:
            t, ready = step.at, self.early.at.get(v)
            self.live(v, ready if ready in self.step_starts else t, stays=v in self.written)
        elif v in self.whole:
            narrow = self.multiplied[v] == self.loops[v] and narrows(eqn, self.backend.multiplies_in)
            if narrow and not compat.is_literal(a := eqn.invars[0]):
                self.narrowed[v] = a
            t = self.early.at[v] if self.backend.eager else self.first[v]
            taken = self.fused.get(v) == self.whole[v] and v in self.taker  # an update of rows overwrites it
            self.lives.append((v, t, self.whole[v] + (not taken)))
        else:
            return
        self.starts[v] = t
        in_place = in_place and (once or v not in self.fused)
        for a in step.operands:
            self.fuse(a, t, v if in_place and _alike(a.aval, v.aval) else None)

    def is_kept(self, eqn: Eqn) -> bool:
        """Whether a costly value is kept for several loops. Where siblings fuse, each loop divides by a scalar
        itself."""
        by_one = eqn.primitive.name == "div" and compat.size_of(eqn.invars[1].aval) == 1
        return not (by_one and self.backend.fuses_siblings and compat.size_of(eqn.outvars[0].aval) > 1)

    def keeps(self, step: ScheduledEqn, v: Var, scores: Scores) -> bool:
        """Whether exponentials that several loops read are materialized. Records which of their scores are."""
        alone = v not in self.whole and self.ahead.readers[scores.kept] == 1
        if scores.turned and alone and self.loops[v] >= LEAST_LOOPS:
            last = self.fused[v]
            made = (end for x, begin, end in self.lives if begin == last and _alike(x.aval, v.aval))
            self.recomputed.append(RecomputedExp(v, scores, step.at, last, max(made, default=last)))
            if len(scores.products) > 1:
                self.written.add(scores.kept)
            return False
        if scores.written:
            self.written.add(scores.rows)
        return True

    def moved(self, step: ScheduledEqn, v: Var, a: Atom) -> None:
        eqn, t = step.eqn, step.at
        done = t
        if v in self.early.together:
            done = self.early.together[v]
            self.whole[v] = max(self.whole.get(v, t), done)
        begin = self.early.at[v] if self.backend.eager else t
        if self.backend.one_layout and _turns(eqn):
            if eqn.params["dst"].items() <= eqn.params["src"].items():  # the result is copied into its layout
                several = self.ahead.readers.get(v, 0) > 1
                self.lives.append((v, begin, (self.last(v, t) if several else t) + 1))
                begin = begin if not several else t
            elif not compat.is_literal(a):
                self.lives.append((a, t, t + 1))
        self.live(v, begin)
        uses = [at for at in (self.first.get(v), self.fused.get(v)) if at is not None]
        self.read(a, max(done, min(uses, default=t)))

    def made_in_memory(self, step: ScheduledEqn) -> None:
        eqn, name, t = step.eqn, step.eqn.primitive.name, step.at
        for v in eqn.outvars:
            self.live(v, t, self.backend.pieces_stay and name in UPDATES)
        for i, a in enumerate(eqn.invars):
            taker = eqn.outvars[0] if i == 0 and name in UPDATES else None
            if compat.is_literal(a):
                continue
            if step.kind is FusionKind.REDUCED and self.backend.reductions_read_memory:
                self.summed(a, t)
            elif step.kind in (FusionKind.WRITTEN, FusionKind.REDUCED):
                self.fuse(a, t, taker)
            else:
                operand = self.straight(a) if name in PRODUCTS else a
                self.read(operand, t)
                if name in PRODUCTS:
                    self.multiplied[operand] += 1
                if taker is not None:
                    self.fuse(a, t, taker)
            if name in CONVOLUTIONS and self.backend.one_layout:
                self.lives.append((a, t, t + 1))

    def straight(self, a: Var) -> Atom:
        """The operand of a product without a transpose: a product reads a matrix by columns as well as by rows."""
        eqn = self.maker[a].eqn if a in self.maker else None
        turned = eqn is not None and eqn.primitive.name == "transpose" and eqn.params["permutation"] == (1, 0)
        return eqn.invars[0] if eqn is not None and turned else a

    def summed(self, a: Var, t: int) -> None:
        """A reduction that reads memory: the factors of the product that it sums are materialized, each at full
        size."""
        eqn = self.maker[a].eqn if a in self.maker else None
        if eqn is None or self.ahead.readers[a] > 1 or eqn.primitive.name not in ("mul", "square"):
            self.read(a, t)
            return
        for x in eqn.invars:
            if compat.is_literal(x) or x.aval.size == a.aval.size:
                self.read(x, t)
            else:
                begin = self.maker[x].at if x in self.maker else 0
                self.read(x, begin)
                _, begin, end = self.spread.get((x, a.aval.shape), (a, begin, t))
                self.spread[x, a.aval.shape] = a, begin, max(end, t + 1)

    # --- bodies -------------------------------------------------------------------------------------------------------

    def nested(self, step: ScheduledEqn) -> None:
        eqn, name, start = step.eqn, step.eqn.primitive.name, step.start
        if name == "optimization_barrier":
            for v, a in zip(eqn.outvars, eqn.invars, strict=True):
                self.pass_on(v, a, solid=True)
        elif name in REMAT:
            (body,) = bodies_of(eqn)
            for v, a in zip(eqn.outvars, body.outvars, strict=True):
                self.pass_on(v, a)
            self.body(body)
            solid = is_kept_apart(eqn)
            for v, a in zip(body.invars, eqn.invars, strict=True):
                self.pass_on(v, a, solid)
        elif name == "cond":
            for v in eqn.outvars:
                self.live(v, start, self.backend.pieces_stay)
            for body in bodies_of(eqn):
                self.returned(body.outvars, start)
                self.body(body)
                for v, a in zip(body.invars, eqn.invars[1:], strict=True):
                    self.pass_on(v, a, solid=True)
            self.read(eqn.invars[0], start)
        else:
            self.loop(step)

    def returned(self, atoms: Iterable[Atom], start: int) -> None:
        """Results of a body: written into the equation's result as soon as they are made."""
        for a in atoms:
            if not compat.is_literal(a):
                self.fuse(a, self.maker[a].at if a in self.maker else start)

    def loop(self, step: ScheduledEqn) -> None:
        eqn, start, end = step.eqn, step.start, step.at
        bodies = nested_bodies(eqn)
        loop = bodies[-1]
        body, rows = loop.jaxpr, loop.rows(eqn)
        for v in eqn.outvars:
            self.lives.append((v, start, self.last(v, end) + 1))
        self.returned(body.outvars, start)
        self.second_buffers(body, loop.befores, end)
        if self.backend.eager:
            self.step_starts.update(self.early.at[v] for v, _ in rows)
        for b in reversed(bodies):
            self.body(b.jaxpr)
        for row, stack in rows:
            self.read(stack, end)
            if row in self.whole:
                self.lives.append((row, self.first[row], self.whole[row] + 1))
        for _, a in (given for b in bodies for given in b.unchanged(eqn)):
            self.read(a, end)
        for a, v in zip((eqn.invars[n] for n in loop.carried), eqn.outvars, strict=False):
            if not compat.is_literal(a):
                self.read(a, start)
                self.fuse(a, start, v)

    def second_buffers(self, body: Jaxpr, carried: Sequence[Var], end: int) -> None:
        """Carries that need a second buffer until the step's `end`: it reads the old after it has made the new."""
        for old, new in zip(carried, body.outvars, strict=False):
            if not compat.is_literal(new) and new in self.maker:
                made = self.maker[new].at
                reads = [s.at for s in self.ahead.eqns[body] if old in s.operands]
                if max(reads, default=0) > made:
                    self.lives.append((new, made, end))


def _alike(x: Any, y: Any) -> bool:
    """Whether values of these avals have the same shape and bytes."""
    return x is y or (x.shape == y.shape and itemsize_of(x) == itemsize_of(y))


def _turns(eqn: Eqn) -> bool:
    """Whether a boxing splits or gathers another dimension than the first."""
    src, dst = eqn.params["src"], eqn.params["dst"]
    return any(src.axes_of(d) != dst.axes_of(d) for d in range(1, len(eqn.outvars[0].aval.shape)))
