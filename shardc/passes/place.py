"""Chooses a signature for every node on every axis, so that what moves and what is computed twice costs least.

The domains say what each node may choose on all axes at once (`shardc.passes.domain`), the solver minimises the sum of
their costs and of the boxings between them (`shardc.solver`). What it cannot prove to be best is then looked at along
one axis after the other.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardc.mesh import MeshView
from shardc.passes.domain import Domain, Domains
from shardc.passes.problem import Node, Problem
from shardc.sbp.placement import Placement
from shardc.solver import Assignment, Memo, minimize
from shardc.solver.costs import Costs
from shardc.solver.search import CLOSE
from shardc.solver.tables import Table

log = logging.getLogger("shardc")

SWEEPS: Final = 4
"""Sweeps over the axes from one start, at most; they end when nothing improves."""
SETTLED: Final = 1e-3
"""An axis is settled if solving it anew gains no more than this part of the cost."""
WORK_PER_CHOICE: Final = 5e4
"""Table entries that the solver may touch for each choice of each node: a few seconds at most for a small model."""
LEAST_WORK: Final = 4e9
MOST_WORK: Final = 2e10
MOVE_WORK: Final = 1e9
"""The same for some of the choices of each node, whose best is nearly always proved with less."""
FAR: Final = 1e-2
"""Relative distance of cost and bound from which on it is also looked for from another start."""


@dataclass(frozen=True, eq=False)
class Placed:
    """A solution: the placement at each port of each node, its cost, and the relative gap to a lower bound."""

    ports: Mapping[Node, tuple[Placement, ...]]
    seconds: float
    gap: float


class Tables:
    """A problem as arrays: what the solver sees."""

    def __init__(self, problem: Problem, domains: Domains) -> None:
        self.domains = domains
        self.memo = Memo()
        self.unary = [d.seconds for d in domains.of]
        self.pairwise: dict[tuple[int, int], Table] = {}
        for value in (v for n in problem.nodes for v in n.results):
            for reader in value.readers:
                self._add(value.maker.number, reader.node.number, domains.edge(value, reader))

    @property
    def work(self) -> float:
        """What the solver may spend on it."""
        return min(max(WORK_PER_CHOICE * sum(len(u) for u in self.unary), LEAST_WORK), MOST_WORK)

    def among(self, offered: Sequence[NDArray[np.intp]]) -> Tables:
        """The same with only some choices offered to each node, by number. What nodes of one choice cost each other is
        left out."""
        do, one, found = self.memo.do, self.memo.one, copy.copy(self)
        offered = [one(f) for f in offered]
        found.unary = [
            do(("u", id(u), id(f)), (u, f), lambda u=u, f=f: one(u[f]))
            for u, f in zip(self.unary, offered, strict=True)
        ]
        found.pairwise = {
            (i, j): do(
                ("ix", id(c), id(offered[i]), id(offered[j])), (c, offered[i], offered[j]),
                lambda c=c, i=i, j=j: one(np.ascontiguousarray(c[np.ix_(offered[i], offered[j])])),
            )
            for (i, j), c in self.pairwise.items() if offered[i].size > 1 or offered[j].size > 1
        }  # fmt: skip
        return found

    def _add(self, i: int, j: int, cost: Table) -> None:
        do = self.memo.do
        if i == j:  # a loop that reads what it carries
            alone = self.unary[i]
            self.unary[i] = do(("loop", id(alone), id(cost)), (alone, cost), lambda: alone + np.diagonal(cost))
            return
        if i > j:
            i, j = j, i
            cost = do(("T", id(cost)), cost, lambda c=cost: np.ascontiguousarray(c.T))
        present = self.pairwise.get((i, j))
        if present is not None:
            cost = do(("sum", id(present), id(cost)), (present, cost), lambda c=cost: present + c)
        self.pairwise[i, j] = cost


def choices_of(assignments: Sequence[Sequence[int]]) -> list[NDArray[np.intp]]:
    """For each node the choices that some assignments have."""
    found = np.asarray(assignments, np.intp)
    same = (found == found[0]).all(0).tolist()
    return [c[:1] if one else np.unique(c) for one, c in zip(same, np.ascontiguousarray(found.T), strict=True)]


class Moves:
    """Searches among some of the choices of each node."""

    def __init__(self, tables: Tables) -> None:
        self.tables, self.memo = tables, tables.memo
        self.costs = Costs(tables.unary, tables.pairwise)

    def along(self, domain: Domain, axis: int, choice: int) -> NDArray[np.intp]:
        """The choices that differ from one on an axis at most."""
        rest = np.delete(domain.options, axis, 1)
        return self.memo.one(np.flatnonzero((rest == rest[choice]).all(-1)))

    def improve(self, start: Sequence[int], axis: int) -> Assignment:
        """The best choices on one axis, each node keeping what it has on the others."""
        do, domains = self.memo.do, self.tables.domains.of
        free = [
            do(("along", id(d), axis, c), d, lambda d=d, c=c: self.along(d, axis, c))
            for d, c in zip(domains, start, strict=True)
        ]
        return self.among(free, start)

    def join(self, *found: Assignment) -> Assignment:
        """The best that each node takes from any of these (Lempitsky et al. 2010, "Fusion Moves for Markov Random Field
        Optimization")."""
        return self.among(choices_of([a.values for a in found]), min(found, key=lambda a: a.cost).values)

    def among(self, offered: Sequence[NDArray[np.intp]], start: Sequence[int]) -> Assignment:
        """The best of the offered choices, no worse than those of `start`. It proves nothing of others."""
        t = self.tables.among(offered)
        begin = [int(np.searchsorted(f, c)) for f, c in zip(offered, start, strict=True)]
        found = minimize(t.unary, t.pairwise, begin, self.memo, MOVE_WORK, SETTLED)
        values = [int(f[v]) for f, v in zip(offered, found.values, strict=True)]
        return Assignment(values, self.costs.cost(values), -np.inf)


class Placer:
    """Places one problem: as it is, or at prices on memory."""

    def __init__(self, problem: Problem, mesh: MeshView) -> None:
        self.problem, self.mesh = problem, mesh
        self.domains = Domains(problem, mesh, [a for a, n in mesh.axes if n > 1])
        self.tables = Tables(problem, self.domains)

    def minimize(self, tables: Tables, start: Sequence[int] | None = None, close: float = CLOSE) -> Assignment:
        """What the search finds and proves, until cost and bound are as close as that, relatively."""
        labels = [d.options for d in self.domains.of] if len(self.domains.axes) > 1 else None
        return minimize(tables.unary, tables.pairwise, start, tables.memo, tables.work, close, labels)

    def best(self, tables: Tables | None = None, start: Sequence[int] | None = None) -> Assignment:
        """The best choices found for all nodes.

        Args:
          tables: the problem's own, or these with prices on them.
          start: choices that the result is not to be worse than.
        """
        t = tables or self.tables
        found = self.minimize(t, start)
        if found.exact or len(self.domains.axes) < 2:
            return found
        moved = self.along_axes(t, found.values)
        if moved.cost - found.bound > FAR * moved.cost:
            moved = Moves(t).join(moved, self.along_axes(t, [0] * len(found.values)))
        return min(replace(moved, bound=found.bound), found, key=lambda a: a.cost)

    def along_axes(self, tables: Tables, start: Sequence[int], sweeps: int = SWEEPS) -> Assignment:
        """The best choices that are found by moves along one axis at a time, from a start on."""
        moves, axes = Moves(tables), self.domains.axes
        found, settled = Assignment(list(start), np.inf, -np.inf), 0
        for axis in itertools.islice(itertools.cycle(range(len(axes))), sweeps * len(axes)):
            before = found.cost
            found = moves.improve(found.values, axis)
            settled = settled + 1 if found.cost >= before * (1 - SETTLED) else 1
            log.debug("axis %s: cost %.3e", axes[axis], found.cost)
            if settled == len(axes):
                break
        return found

    def placed(self, found: Assignment) -> Placed:
        """The placements that choices mean."""
        ports = {n: self.domains.placements(n, found.values[n.number]) for n in self.problem.nodes}
        return Placed(ports, found.cost, max(found.cost - found.bound, 0.0) / found.cost if found.cost else 0.0)


def place(problem: Problem, mesh: MeshView) -> Placed:
    """The best placement found for a problem on a mesh."""
    placer = Placer(problem, mesh)
    return placer.placed(placer.best())
