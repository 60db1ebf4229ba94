"""What is kept over the fullest point of a program that is written out, and can be had otherwise: computed again.

    y = f x; ...; z = g y c    -->    y = f x; ...; x', _ = barrier x d; y' = f x'; z = g y' c

In front of the point lies the forward pass, behind it the backward pass, and what one makes for the other is kept over
it. What should be kept instead, so that the rest follows from it, is a minimum cut: a value costs its bytes at a price,
and what computes it again its seconds (the min-cut of PyTorch's partitioner, He and Yu 2023, with seconds as in
Checkmate, Jain et al. 2020). What several parts of the forward pass share, the boundaries of its layers, is not
computed again: else the last layer would ask for all before it (Chen et al. 2016).

The barrier keeps XLA from sharing y' with y, and from making it before `d`, the deepest of what the program has made
so far, is there. XLA:CPU joins both again in spite of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

import numpy as np
from jax.lax import optimization_barrier_p
from numpy.typing import NDArray

from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr, Var, bodies_of, with_bodies
from shardc.ir.box import Boxed, box_p
from shardc.machine.mesh import MeshView
from shardc.passes.estimate.backend import Habits, Kind, kind_of
from shardc.passes.estimate.live_ranges import lifetimes, made_at
from shardc.passes.estimate.memory import Profile
from shardc.passes.estimate.plan_cost import alone_seconds
from shardc.passes.estimate.sizes import piece_bytes
from shardc.passes.recompute.min_cut import Repeatable
from shardc.passes.recompute.recompute_residuals import may_repeat
from shardc.sbp.cost import memory_seconds

PARTS: Final = tuple(2**k for k in range(9))
"""Into so many the forward pass may be parted, by seconds: within half of one around a boundary there is no other."""
NOTHING: Final = 1e-30
"""A price, in seconds a byte, at which nothing is computed again that takes any time."""


class Crossing:
    """What crosses the fullest point in one scope of a boxed program.

    Args:
      boxed, profile: the program, and what it takes in memory.
      jaxpr: the scope.
      now: the equation of it that is running at that point.
      trips: how often the scope runs.
      mesh, habits: of the devices.

    Attributes:
      since: the first of what is made behind the point.
      bytes: of a device, that are kept over it if nothing is computed again.
      count: of the equations in front of the point.
    """

    def __init__(
        self, boxed: Boxed, profile: Profile, jaxpr: Jaxpr, now: int, trips: int, mesh: MeshView, habits: Habits
    ) -> None:
        self.boxed, self.mesh, self.habits = boxed, mesh, habits
        self.early: list[Eqn] = jaxpr.eqns[:now]
        self.count = len(self.early)
        self.maker = {v: n for n, e in enumerate(self.early) for v in e.outvars}
        late = jaxpr.eqns[now + 1 :]
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
        self.price = [trips * self._seconds(e) for e in self.early]
        self.fixed = self._boundaries()
        self.values = [v for v in self.maker if v not in self.free]
        self.problem = self._problem()
        self.bytes = self._taken(self.problem.solve(np.full(len(self.values), NOTHING))[0])

    def _constants(self) -> set[Var]:
        """What follows from nothing: XLA makes it where it is read."""
        found: set[Var] = set()
        for e in self.early:
            if kind_of(e) in (Kind.CHEAP, Kind.VIEW) and all(compat.is_literal(a) or a in found for a in e.invars):
                found.update(e.outvars)
        return found - self.there.keys()

    def _loops(self, jaxpr: Jaxpr) -> tuple[set[Var], set[Var]]:
        """What is computed in the loops that read it, and what is read by what is no loop."""
        inside, outside = set[Var](), set[Var]()
        for e in self.early:
            kind = kind_of(e)
            if kind is Kind.CHEAP or (kind is Kind.VIEW and inside.issuperset(compat.variables(e.invars))):
                inside.update(v for v in e.outvars if v not in self.there)
        for e in reversed(jaxpr.eqns):
            kind = kind_of(e)
            if kind in (Kind.MADE, Kind.MOVED) or (kind is Kind.VIEW and e.outvars[0] in outside):
                outside.update(compat.variables(e.invars))
        return inside, outside

    def _seconds(self, eqn: Eqn) -> float:
        """That it takes once more. What is cheap is computed in the loops that read it: of these it reads what is in
        memory, and writes what no loop reads."""
        kind = kind_of(eqn)
        if kind is Kind.VIEW or not self.may_repeat(eqn):
            return 0.0
        if kind is Kind.CHEAP:
            read = (a for a in compat.variables(eqn.invars) if a not in self.in_loops)
            written = (v for v in eqn.outvars if v in self.wanted)
            return memory_seconds(sum(map(self.size, (*read, *written))), self.mesh)
        return alone_seconds([eqn], eqn.outvars, self.boxed, self.mesh)

    def may_repeat(self, eqn: Eqn) -> bool:
        if eqn.primitive is box_p:
            return self._copies(eqn)
        return may_repeat(eqn)

    def _boundaries(self) -> set[Var]:
        """What crosses the narrowest points of the early part, those in a stretch of it of which no point is narrower;
        in parts so long that these values and what one part keeps take least together."""
        last: dict[Var, int] = {}
        for n, e in enumerate(self.early):
            last |= {a: n for a in e.invars if not compat.is_literal(a) and a in self.maker}
        spans = [(v, self.maker[v], n) for v, n in last.items() if v not in self.free]
        change = np.zeros(len(self.early) + 1)
        for v, begin, end in spans:  # there behind equation `begin`, and not behind `end`
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
            part = np.cumsum(taken) - taken  # of an equation: how many points are in front of it
            crossing = {v for v, begin, end in spans if part[begin] < part[end]}
            inside = np.zeros(len(work) + 1)
            for n, size in kept:
                inside[part[n]] += size
            needed = sum(map(self.size, crossing)) + inside.max()
            if needed < best:
                best, fixed = needed, crossing
        return fixed

    def size(self, v: Var) -> int:
        return self.there.get(v) or piece_bytes(v.aval, self.boxed.placements[v], self.mesh.sizes, self.habits)

    def _problem(self) -> Repeatable:
        number = {v: k for k, v in enumerate(self.values)}
        repeated = [self._may_repeat_for(v) for v in self.values]
        computed = [r and v in self.in_loops for v, r in zip(self.values, repeated, strict=True)]
        after = [self.maker[self.root[e.outvars[0]]] if self._copies(e) else -1 for e in self.early]
        return Repeatable(
            [number[v] for v in self.crossing if v in number],
            np.asarray([np.inf if c else self.size(v) for v, c in zip(self.values, computed, strict=True)]),
            np.asarray([self.maker[v] if r else -1 for v, r in zip(self.values, repeated, strict=True)], np.int64),
            np.asarray(self.price),
            [[number[v] for v in compat.variables(e.invars) if v in number] for e in self.early],
            np.asarray(after, np.int64),
        )

    def _may_repeat_for(self, v: Var) -> bool:
        eqn, root = self.early[self.maker[v]], self.root.get(v, v)
        return v not in self.fixed and root not in self.fixed and self.may_repeat(eqn)

    def _copies(self, eqn: Eqn) -> bool:
        """Whether an equation boxes what the scope makes: it does so again only if that is made again."""
        return eqn.primitive is box_p and self.root.get(eqn.outvars[0]) in self.maker

    def choose(self, price: float, more: float = 0.0, first: int = 0) -> tuple[list[Var], int]:
        """What is computed again at a price, and the bytes that this frees.

        Args:
          price: seconds a byte.
          more: the same for what the first equations make, so many as `first` says.
        """
        made = np.asarray([self.maker[v] for v in self.values])
        kept, again = self.problem.solve(np.where(made < first, more, price))
        values = dict[Var, None]()
        for v, r in zip(self.values, self.problem.makers, strict=True):
            if r >= 0 and again[r] and v not in self.root and not self._follows(v, values):
                values[v] = None
        return list(values), self.bytes - self._taken(kept)

    def _taken(self, kept: NDArray[np.bool_]) -> int:
        return sum(self.size(v) for v, k in zip(self.values, kept, strict=True) if k)

    def _follows(self, v: Var, again: Collection[Var]) -> bool:
        """Whether the loops that read a value compute it anyway, from what is kept."""
        read = (self.root.get(a, a) for a in compat.variables(self.early[self.maker[v]].invars))
        return v in self.in_loops and v not in self.wanted and not any(a in again for a in read)


# --- the program ------------------------------------------------------------------------------------------------------


def drop_values(jaxpr: Jaxpr, choice: Mapping[Var, Var]) -> tuple[Jaxpr, dict[Var, Var | None]]:
    """The program that computes some of its values again for those that read them late.

    Args:
      jaxpr: canonical.
      choice: for each such value what is made first of what reads the second one.

    Returns:
      The jaxpr; and of what its new equations make, that for which it stands, if that took memory.
    """
    if not choice:
        return jaxpr, {}
    found, made = lifetimes(jaxpr), made_at(jaxpr)
    kept = {
        v for v, begin, end in zip(found.values, found.begin, found.end, strict=True)
        if v in choice and begin <= made[choice[v]] < end
    }  # fmt: skip
    again: dict[Var, Var] = {}

    def scope(body: Jaxpr) -> Jaxpr:
        mine = {v: choice[v] for e in body.eqns for v in e.outvars if v in choice}
        inside = [
            eqn.replace(params=with_bodies(eqn, list(map(scope, bodies_of(eqn))))) if bodies_of(eqn) else eqn
            for eqn in body.eqns
        ]
        if not mine:
            return compat.new_jaxpr(body.invars, body.outvars, inside, body)
        return _Again(body, inside, mine, again).run()

    done = scope(jaxpr)
    return done, {new: old if old in kept else None for new, old in again.items()}


class _Again:
    """One scope that computes some of its values again."""

    def __init__(self, body: Jaxpr, eqns: Sequence[Eqn], mine: Mapping[Var, Var], again: dict[Var, Var]) -> None:
        self.body, self.old, self.mine, self.again = body, eqns, mine, again
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
                eqn = eqn.replace(invars=[a if compat.is_literal(a) else self.names.get(a, a) for a in eqn.invars])
            self.add(eqn)
        return compat.new_jaxpr(self.body.invars, self.body.outvars, self.live(), self.body)

    def live(self) -> list[Eqn]:
        """Without what was made for later readers alone."""
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
        """Computes values again, and what they follow from: one operand of each equation that reads none of these is
        behind the barrier."""
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
            self.again.update(zip(outs, e.outvars, strict=True))
            self.add(e.replace(invars=invars, outvars=outs))
