"""Recomputes values that are live at the memory peak of a program, outside of loops.

    y = f x; ...; z = g y c    -->    y = f x; ...; x', _ = barrier x d; y' = f x'; z = g y' c

The forward pass lies before the peak, the backward pass behind it, and the values that one makes for the other are kept
over it. The cheapest set to keep, so that the rest follows from it, is a minimum cut: keeping a value costs its bytes
at a price, recomputing it costs its seconds (the min-cut of PyTorch's partitioner, He and Yu 2023, with seconds as in
Checkmate, Jain et al. 2020). Values that several parts of the forward pass share, the boundaries of its layers, are not
recomputed: else the last layer would need all layers before it (Chen et al. 2016).

The barrier keeps XLA from merging y' with y, and from computing it before `d` is ready, the value with the deepest
dependences so far. XLA:CPU merges both in spite of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

import numpy as np
from jax.lax import optimization_barrier_p
from numpy.typing import NDArray

from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr, Var
from shardc.ir.box import Boxed, box_p
from shardc.ir.nested import in_bodies
from shardc.ir.walk import with_atoms
from shardc.machine.mesh import MeshView
from shardc.passes.estimate.backend import Backend, FusionKind, kind_of
from shardc.passes.estimate.live_ranges import RunningScope, live_ranges, made_at
from shardc.passes.estimate.memory import Profile
from shardc.passes.estimate.plan_cost import alone_seconds
from shardc.passes.estimate.sizes import piece_bytes
from shardc.passes.recompute.min_cut import Repeatable
from shardc.passes.recompute.recompute_residuals import may_recompute
from shardc.sbp.cost import memory_seconds

PARTS: Final = tuple(2**k for k in range(9))
"""Numbers of parts into which boundaries may divide the forward pass, by seconds: within half a part around a boundary
there is no other."""
LEAST_PRICE: Final = 1e-30
"""A price, in seconds a byte, at which nothing is recomputed that takes any time."""


class LiveAtPeak:
    """The values that are live across the memory peak in one scope of a boxed program.

    Args:
      boxed, profile: the program, and its memory.
      scope: the scope, and its equation that runs at the peak.
      mesh, backend: of the devices.

    Attributes:
      since: the first value that is made behind the peak.
      bytes: kept over the peak on a device if nothing is recomputed.
      count: number of equations before the peak.
    """

    def __init__(self, boxed: Boxed, profile: Profile, scope: RunningScope, mesh: MeshView, backend: Backend) -> None:
        self.boxed, self.mesh, self.backend = boxed, mesh, backend
        jaxpr = scope.jaxpr
        self.early = jaxpr.eqns[: scope.now]
        self.count = len(self.early)
        self.maker = {v: n for n, e in enumerate(self.early) for v in e.outvars}
        late = jaxpr.eqns[scope.now + 1 :]
        self.since: Var | None = next((v for e in late if e.primitive is not box_p for v in e.outvars), None)
        reads = dict.fromkeys(a for e in late for a in e.invars if not compat.is_literal(a) and a in self.maker)
        results = {a for a in jaxpr.outvars if not compat.is_literal(a)}
        self.there = dict[Var, int]()
        for v, size in profile.largest():
            self.there[v] = self.there.get(v, 0) + size
        self.root = dict[Var, Var]()
        for e in self.early:
            if e.primitive is box_p and not compat.is_literal(e.invars[0]):
                self.root[e.outvars[0]] = self.root.get(e.invars[0], e.invars[0])
        self.crossing = [v for v in reads if v not in results]
        self.free = results | self._constants()
        self.in_loops, self.wanted = self._loops(jaxpr)
        self.price = [scope.trips * self._seconds(e) for e in self.early]
        self.fixed = self._boundaries()
        self.values = [v for v in self.maker if v not in self.free]
        self.problem = self._problem()
        self.bytes = self._taken(self.problem.solve(np.full(len(self.values), LEAST_PRICE))[0])

    def _constants(self) -> set[Var]:
        """Cheap values without operands: XLA fuses them into their readers."""
        found: set[Var] = set()
        for e in self.early:
            if kind_of(e) in (FusionKind.CHEAP, FusionKind.VIEW) and all(
                compat.is_literal(a) or a in found for a in e.invars
            ):
                found.update(e.outvars)
        return found - self.there.keys()

    def _loops(self, jaxpr: Jaxpr) -> tuple[set[Var], set[Var]]:
        """The values that are fused into their readers, and the values that operations other than loops read."""
        inside, outside = set[Var](), set[Var]()
        for e in self.early:
            kind = kind_of(e)
            if kind is FusionKind.CHEAP or (kind is FusionKind.VIEW and inside.issuperset(compat.variables(e.invars))):
                inside.update(v for v in e.outvars if v not in self.there)
        for e in reversed(jaxpr.eqns):
            kind = kind_of(e)
            if kind in (FusionKind.MADE, FusionKind.MOVED) or (kind is FusionKind.VIEW and e.outvars[0] in outside):
                outside.update(compat.variables(e.invars))
        return inside, outside

    def _seconds(self, eqn: Eqn) -> float:
        """Seconds to run an equation once more. A cheap one is fused: it reads those operands that are in memory, and
        writes results that operations other than loops read."""
        kind = kind_of(eqn)
        if kind is FusionKind.VIEW or not self.may_recompute(eqn):
            return 0.0
        if kind is FusionKind.CHEAP:
            read = (a for a in compat.variables(eqn.invars) if a not in self.in_loops)
            written = (v for v in eqn.outvars if v in self.wanted)
            return memory_seconds(sum(map(self.size, (*read, *written))), self.mesh)
        return alone_seconds([eqn], eqn.outvars, self.boxed, self.mesh)

    def may_recompute(self, eqn: Eqn) -> bool:
        if eqn.primitive is box_p:
            return self._copies(eqn)
        return may_recompute(eqn)

    def _boundaries(self) -> set[Var]:
        """The values that cross the narrowest points before the peak, each the narrowest in a stretch around it; the
        length of the stretches is that for which these values and those kept by one part take least together."""
        last: dict[Var, int] = {}
        for n, e in enumerate(self.early):
            last |= {a: n for a in e.invars if not compat.is_literal(a) and a in self.maker}
        spans = [(v, self.maker[v], n) for v, n in last.items() if v not in self.free]
        change = np.zeros(len(self.early) + 1)
        for v, begin, end in spans:  # live behind equation `begin`, and not behind `end`
            size = self.size(v)
            change[begin] += size
            change[end] -= size
        width, work = change.cumsum()[:-1], np.cumsum(self.price)
        order = np.argsort(width, kind="stable")
        kept = [(self.maker[v], self.there[v]) for v in self.crossing if v in self.there]
        best, fixed = np.inf, set[Var]()
        for parts in PARTS:
            half = 0.5 * work[-1] / parts
            begins, ends = np.searchsorted(work, work - half), np.searchsorted(work, work + half, side="right")
            taken, near = np.zeros(len(work), np.bool_), np.zeros(len(work), np.bool_)
            for n in order:
                if not near[n]:
                    taken[n] = True
                    near[begins[n] : ends[n]] = True
            part = np.cumsum(taken) - taken  # the number of points before each equation
            crossing = {v for v, begin, end in spans if part[begin] < part[end]}
            inside = np.zeros(len(work) + 1)
            for n, size in kept:
                inside[part[n]] += size
            needed = sum(map(self.size, crossing)) + inside.max()
            if needed < best:
                best, fixed = needed, crossing
        return fixed

    def size(self, v: Var) -> int:
        return self.there.get(v) or piece_bytes(v.aval, self.boxed.placements[v], self.mesh.sizes, self.backend)

    def _problem(self) -> Repeatable:
        number = {v: k for k, v in enumerate(self.values)}
        may_run = [self._may_recompute_value(v) for v in self.values]
        fused = [r and v in self.in_loops for v, r in zip(self.values, may_run, strict=True)]
        after = [self.maker[self.root[e.outvars[0]]] if self._copies(e) else -1 for e in self.early]
        return Repeatable(
            [number[v] for v in self.crossing if v in number],
            np.asarray([np.inf if f else self.size(v) for v, f in zip(self.values, fused, strict=True)]),
            np.asarray([self.maker[v] if r else -1 for v, r in zip(self.values, may_run, strict=True)], np.int64),
            np.asarray(self.price),
            [[number[v] for v in compat.variables(e.invars) if v in number] for e in self.early],
            np.asarray(after, np.int64),
        )

    def _may_recompute_value(self, v: Var) -> bool:
        eqn, root = self.early[self.maker[v]], self.root.get(v, v)
        return v not in self.fixed and root not in self.fixed and self.may_recompute(eqn)

    def _copies(self, eqn: Eqn) -> bool:
        """Whether an equation boxes a value of this scope: it runs again only if that value is recomputed."""
        return eqn.primitive is box_p and self.root.get(eqn.outvars[0]) in self.maker

    def choose(self, price: float, more: float = 0.0, first: int = 0) -> tuple[list[Var], int]:
        """The values to recompute at a price, and the bytes that this frees.

        Args:
          price: seconds a byte.
          more: the price of what the first equations make.
          first: the number of these equations.
        """
        made = np.asarray([self.maker[v] for v in self.values])
        kept, runs = self.problem.solve(np.where(made < first, more, price))
        values = dict[Var, None]()
        for v, r in zip(self.values, self.problem.makers, strict=True):
            if r >= 0 and runs[r] and v not in self.root and not self._follows(v, values):
                values[v] = None
        return list(values), self.bytes - self._taken(kept)

    def _taken(self, kept: NDArray[np.bool_]) -> int:
        return sum(self.size(v) for v, k in zip(self.values, kept, strict=True) if k)

    def _follows(self, v: Var, recomputed: Collection[Var]) -> bool:
        """Whether the loops that read a value recompute it anyway, from what is kept."""
        read = (self.root.get(a, a) for a in compat.variables(self.early[self.maker[v]].invars))
        return v in self.in_loops and v not in self.wanted and not any(a in recomputed for a in read)


# --- the program ------------------------------------------------------------------------------------------------------


def recompute_values(jaxpr: Jaxpr, choice: Mapping[Var, Var]) -> tuple[Jaxpr, dict[Var, Var | None]]:
    """The program that recomputes some of its values for late readers.

    Args:
      jaxpr: canonical.
      choice: for each such value the first result behind which its readers use the recomputed one.

    Returns:
      The jaxpr; and for the results of its new equations the values that they stand for, if these took memory.
    """
    if not choice:
        return jaxpr, {}
    found, made = live_ranges(jaxpr), made_at(jaxpr)
    kept = {
        v for v, begin, end in zip(found.values, found.begin, found.end, strict=True)
        if v in choice and begin <= made[choice[v]] < end
    }  # fmt: skip
    copied: dict[Var, Var] = {}

    def scope(body: Jaxpr) -> Jaxpr:
        mine = {v: choice[v] for e in body.eqns for v in e.outvars if v in choice}
        inside = [in_bodies(eqn, scope) for eqn in body.eqns]
        if not mine:
            return compat.new_jaxpr(body.invars, body.outvars, inside, body)
        return _Recomputer(body, inside, mine, copied).run()

    done = scope(jaxpr)
    return done, {new: old if old in kept else None for new, old in copied.items()}


class _Recomputer:
    """One scope, rewritten to recompute some of its values."""

    def __init__(self, body: Jaxpr, eqns: Sequence[Eqn], mine: Mapping[Var, Var], copied: dict[Var, Var]) -> None:
        self.body, self.old, self.mine, self.copied = body, eqns, mine, copied
        self.made_by = {v: n for n, e in enumerate(eqns) for v in e.outvars}
        self.since = min(self.made_by[v] for v in mine.values())
        self.names: dict[Var, Var] = {}
        self.eqns: list[Eqn] = []
        self.depth: dict[Var, int] = {}
        self.deepest: Var | None = None

    def run(self) -> Jaxpr:
        for n, eqn in enumerate(self.old):
            if n >= self.since:
                wanted = [a for a in eqn.invars if not compat.is_literal(a) and a in self.mine and a not in self.names]
                if wanted:
                    self.compute(wanted)
                eqn = with_atoms(eqn, self.names)
            self.add(eqn)
        return compat.new_jaxpr(self.body.invars, self.body.outvars, self.live(), self.body)

    def live(self) -> list[Eqn]:
        """The equations without those that were made only for late readers."""
        read = {a for a in self.body.outvars if not compat.is_literal(a)}
        kept: list[Eqn] = []
        for eqn in reversed(self.eqns):
            if eqn.effects or any(v in read for v in eqn.outvars) or not any(v in self.mine for v in eqn.outvars):
                kept.append(eqn)
                read.update(a for a in eqn.invars if not compat.is_literal(a))
        return kept[::-1]

    def add(self, eqn: Eqn) -> None:
        self.eqns.append(eqn)
        depth = 1 + max((self.depth.get(a, 0) for a in eqn.invars if not compat.is_literal(a)), default=0)
        for v in eqn.outvars:
            self.depth[v] = depth
            plain = v.aval.size and isinstance(v.aval.dtype, np.dtype)
            if plain and (self.deepest is None or depth > self.depth[self.deepest]):
                self.deepest = v

    def compute(self, wanted: Sequence[Var]) -> None:
        """Recomputes values, and what they follow from. For each equation that reads no recomputed value, one operand
        passes the barrier."""
        found: set[int] = set()
        pending = list(wanted)
        while pending:
            n = self.made_by[pending.pop()]
            if n not in found:
                found.add(n)
                operands = (a for a in self.old[n].invars if not compat.is_literal(a))
                pending += [a for a in operands if a in self.mine and a not in self.names]
        group = [self.old[n] for n in sorted(found)]
        fresh = {v for e in group for v in e.outvars} | self.names.keys()
        held: dict[Var, Var] = {}
        for e in group:
            operands = [a for a in e.invars if not compat.is_literal(a)]
            if not any(a in fresh or a in held for a in operands):
                held |= {a: compat.fresh_var(a.aval) for a in operands[:1]}
        if held:
            after = [] if self.deepest is None or self.deepest in held else [self.deepest]
            outs = [*held.values(), *(compat.fresh_var(a.aval) for a in after)]
            self.eqns.append(compat.new_eqn([*held, *after], outs, optimization_barrier_p, {}, group[0]))
        for e in group:
            invars: list[Atom] = [a if compat.is_literal(a) else self.names.get(a) or held.get(a, a) for a in e.invars]
            outs = [compat.fresh_var(v.aval) for v in e.outvars]
            self.names.update(zip(e.outvars, outs, strict=True))
            self.copied.update(zip(outs, e.outvars, strict=True))
            self.add(compat.as_recomputed(e.replace(invars=invars, outvars=outs)))
