"""Chooses a signature for every node on every mesh axis, so that communication and repeated computation cost least.

The choices of a node are its combinations of signatures on all axes (`shardc.passes.place.domain`). The solver
minimizes the sum of the costs of the choices and of the boxings between them (`shardc.solver`). A solution that is not
proved to be near-optimal is improved along one axis after the other.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardc.compat import Var
from shardc.machine.mesh import MeshView
from shardc.passes.place.domain import Domain, Domains
from shardc.passes.place.problem import Node, Problem
from shardc.sbp.placement import Placement
from shardc.sbp.sub_axes import in_sub_axes
from shardc.solver import (
    ROUNDING,
    SETTLED,
    Assignment,
    AssignmentCost,
    Memo,
    SolverOptions,
    alike,
    choices_of,
    minimize,
    move,
)
from shardc.solver.cost_tables import FORBIDDEN, Given, Index, Table, whole
from shardc.solver.kernels import Kernels, kernels_for
from shardc.solver.search import DEFAULT, SWEEPS

log = logging.getLogger("shardc")

WORK_PER_CHOICE: Final = 5e4
"""Table entries that the solver may read for each choice of each node, within the solver's default and MOST_WORK: a few
seconds at most for a small model."""
MOST_WORK: Final = 2e10
PATIENCE: Final = 3.0
"""Factor on this work while cost and bound are far from each other: there it finds a better plan
(docs/design/solver.md, "What it costs")."""
NEAR: Final = 2
"""Steps between nodes that are near each other: a product, the hold of its operand, and who makes or reads that."""


@dataclass(frozen=True, eq=False)
class Placed:
    """A solution: the placement at each port of each node, its cost, and an upper bound on (cost - optimum) /
    optimum."""

    ports: Mapping[Node, tuple[Placement, ...]]
    seconds: float
    gap: float


@dataclass(frozen=True, eq=False)
class Tables:
    """A problem as arrays, for the solver.

    Attributes:
      domains: the choices of each node.
      unary, pairwise: seconds of choices, and of pairs of choices of two nodes.
      memo: results that were computed from tables.
      kernels: the implementation of the solver's loops, chosen by the size of the whole problem.
      offered: for each node the numbers of the choices that these tables have; None: all.
      unpriced: the same tables without prices on memory; None: these are without.
    """

    domains: Domains
    unary: Sequence[Table]
    pairwise: Mapping[tuple[int, int], Given]
    memo: Memo
    kernels: Kernels
    offered: Sequence[Index] | None = None
    unpriced: Tables | None = None

    @classmethod
    def of(cls, problem: Problem, domains: Domains) -> Tables:
        """The tables of a problem."""
        memo = Memo()
        unary = [d.seconds for d in domains.of]
        pairwise: dict[tuple[int, int], Given] = {}
        for value in (v for n in problem.nodes for v in n.results):
            for reader in value.readers:
                i, j, cost = value.maker.number, reader.node.number, domains.edge(value, reader)
                if i == j:  # a loop that reads its own carry
                    alone = unary[i]
                    unary[i] = memo.do(
                        ("loop", id(alone), id(cost)), (alone, cost), lambda u=alone, c=cost: u + np.diagonal(whole(c))
                    )
                    continue
                if i > j:
                    i, j = j, i
                    cost = memo.do(("T", id(cost)), cost, lambda c=cost: c.T)
                if (present := pairwise.get((i, j))) is not None:
                    both, key = (present, cost), ("sum", id(present), id(cost))
                    cost = memo.do(key, both, lambda both=both: whole(both[0]) + whole(both[1]))
                pairwise[i, j] = cost
        return cls(domains, unary, pairwise, memo, kernels_for(pairwise.values()))

    @property
    def work(self) -> float:
        """The work limit of the solver on these tables."""
        return min(max(WORK_PER_CHOICE * sum(len(u) for u in self.unary), DEFAULT.work), MOST_WORK)

    @cached_property
    def together(self) -> list[list[int]] | None:
        """Classes of nodes that are equal in repeated layers, whatever the prices on memory; None if there are few."""
        if self.unpriced is not None:
            return self.unpriced.together
        return alike(self.unary, self.pairwise, self.memo)

    @property
    def labels(self) -> list[NDArray[np.int64]]:
        """For each node (choices, axes) the number of the signature on each axis."""
        if self.offered is None:
            return [d.options for d in self.domains.of]
        return [d.options[f] for d, f in zip(self.domains.of, self.offered, strict=True)]

    def around(self, nodes: Collection[int]) -> set[int]:
        """The nodes with those that are `NEAR` by."""
        found = set(nodes)
        for _ in range(NEAR):
            found |= {k for pair in self.pairwise if not found.isdisjoint(pair) for k in pair}
        return found

    def among(self, offered: Sequence[Index]) -> Tables:
        """These tables restricted to `offered` choices per node, by number. Pairs in which both nodes have one choice
        left are dropped."""
        do, one = self.memo.do, self.memo.one
        offered = [one(f) for f in offered]
        unary = [
            do(("u", id(u), id(f)), (u, f), lambda u=u, f=f: one(u[f]))
            for u, f in zip(self.unary, offered, strict=True)
        ]
        pairwise = {
            (i, j): do(
                ("ix", id(c), id(offered[i]), id(offered[j])), (c, offered[i], offered[j]),
                lambda c=c, i=i, j=j: one(c[offered[i][:, None], offered[j]]),
            )
            for (i, j), c in self.pairwise.items() if offered[i].size > 1 or offered[j].size > 1
        }  # fmt: skip
        return replace(self, unary=unary, pairwise=pairwise, offered=offered)

    def minimize(
        self, start: Sequence[int] | None = None, work: float | None = None, close: float = ROUNDING,
        together: Sequence[Sequence[int]] | None = None,
    ) -> Assignment:  # fmt: skip
        """The best choices that the search finds and proves, none worse than `start`, until the relative gap is at most
        `close`. Choices have the domains' numbers. Nodes that are `together` get the same choice."""
        if start is not None and self.offered is not None:
            start = [int(np.searchsorted(f, c)) for f, c in zip(self.offered, start, strict=True)]
        patience = PATIENCE if work is None else 1.0
        options = SolverOptions(work or self.work, close, patience, together, kernels=self.kernels)
        found = minimize(self.unary, self.pairwise, start, self.labels, self.memo, options)
        if self.offered is None:
            return found
        return replace(found, values=[int(f[v]) for f, v in zip(self.offered, found.values, strict=True)])

    def best(self, start: Sequence[int] | None = None, proved: bool = True) -> Assignment:
        """The best choices that the search finds; if they are not proved to be close to the optimum, improved along the
        axes.

        Args:
          start: choices that the result is not to be worse than.
          proved: with a bound. Without, repeated layers get the same placements, in the time of one of them.
        """
        together = None if proved else self.together
        found = self.minimize(start, together=together)
        if found.gap > SETTLED and not found.settled:  # a move that gains no more counts as none
            values = self.move(found.values)
            cost = AssignmentCost(self.unary, self.pairwise).cost(values)
            found = min(replace(found, values=values, cost=cost), found, key=lambda a: a.cost)
        return found if together is None else replace(found, bound=-math.inf)

    def move(
        self, start: Sequence[int], sweeps: int = SWEEPS, among: Callable[[Sequence[Index]], Tables] | None = None
    ) -> list[int]:
        """The best choices found by moves along one axis at a time from `start`, in all repeated layers at once.

        Args:
          start: choices to begin with.
          sweeps: over all axes, at most.
          among: these tables restricted to some choices, at prices on memory; None: without prices.
        """
        assert self.offered is None
        tables_of = among or self.among

        def some(offered: Sequence[Index]) -> tuple[Sequence[Table], Mapping[tuple[int, int], Given]]:
            tables = tables_of(offered)
            return tables.unary, tables.pairwise

        options = SolverOptions(together=self.together, kernels=self.kernels)
        return move(some, start, self.labels, sweeps, self.memo, options)

    def merge(self, pool: Sequence[Sequence[int]], start: Sequence[int], work: float, close: float) -> list[int]:
        """The best choices that take each node's choice from some assignment of a pool, which has `start` (Lempitsky et
        al. 2010, "Fusion Moves for Markov Random Field Optimization")."""
        return self.among(choices_of(pool)).minimize(start, work, close).values


class Placer:
    """The placement of one problem: without a limit, or at prices on memory."""

    def __init__(self, problem: Problem, mesh: MeshView) -> None:
        self.problem, self.mesh = problem, mesh
        self.domains = Domains(problem, mesh, [a for a, n in mesh.axes if n > 1])
        self.tables = Tables.of(problem, self.domains)

    def near(self, placements: Mapping[Var, Placement]) -> list[int] | None:
        """The best choices that leave values where a plan of a similar program has them, on the mesh or on the user's;
        None: there are none."""
        values, idle = self.problem.values, self.mesh.idle
        known = {id(values[v]): in_sub_axes(p, self.mesh).without(idle) for v, p in placements.items() if v in values}
        masks: dict[tuple[Domain, tuple[Placement | None, ...]], Index] = {}

        def left(n: Node, d: Domain) -> Index:
            made = tuple(known.get(id(v)) for v in n.results)
            if (d, made) not in masks:
                ports = {k: p for k, p in enumerate(made, len(n.operands)) if p is not None}
                masks[d, made] = np.flatnonzero(d.choices_at(ports))
            return masks[d, made]

        offered = [left(n, d) for n, d in zip(self.problem.nodes, self.domains.of, strict=True)]
        if not all(some.size for some in offered):
            return None
        found = self.tables.among(offered).minimize(close=SETTLED)
        return found.values if found.cost < FORBIDDEN else None

    def least_seconds(self, bound: float, cost: float, seconds: float) -> float:
        """A lower bound of the seconds of all plans but for their launch.

        Nothing is faster than its computing, nor, where all is hidden that can be, than half of the least sum of
        computing and collectives. Where nothing is, it is the least sum. Collectives that start together are taken to
        save no more than in the plan at hand.

        Args:
          bound: of the search's cost.
          cost, seconds: of the plan at hand.
        """
        heavy = any(n.kind == "operation" and not n.is_light for n in self.problem.nodes)
        if heavy and (share := self.mesh.topology.most_hidden):
            return max(sum(float(d.seconds.min()) for d in self.domains.of), bound * (1 - share / 2))
        return bound - max(0.0, cost - seconds)

    def without_rings(self, found: Assignment) -> Iterator[Assignment]:
        """Choices that have no rings, or none along one axis, where `found` has some: the best that are `NEAR` by. To
        the search only the permutes of rings are hidden beside computing, to a plan gathers and reductions, too."""
        domains, chosen = self.domains, found.values
        rings = [domains.rings(n) for n in self.problem.nodes]
        axes = {int(k) for r, c in zip(rings, chosen, strict=True) for k in np.flatnonzero(r[c])}
        banned = [[k] for k in sorted(axes)]
        for some in [sorted(axes), *banned] if len(axes) > 1 else banned:
            gone = [r[:, some].any(1) for r in rings]
            near = self.tables.around([i for i, (g, c) in enumerate(zip(gone, chosen, strict=True)) if g[c]])
            offered = [
                np.flatnonzero(~g) if i in near else np.asarray([c], np.intp)
                for i, (g, c) in enumerate(zip(gone, chosen, strict=True))
            ]
            values = self.tables.among(offered).minimize().values
            cost = AssignmentCost(self.tables.unary, self.tables.pairwise).cost(values)
            yield replace(found, values=values, cost=cost)

    def placed(self, found: Assignment) -> Placed:
        """The placements of choices; nodes that share a domain and a choice share them, too."""
        ports: dict[Node, tuple[Placement, ...]] = {}
        known: dict[tuple[Domain, int], tuple[Placement, ...]] = {}
        for n, domain, choice in zip(self.problem.nodes, self.domains.of, found.values, strict=True):
            if (key := (domain, choice)) not in known:
                known[key] = self.domains.placements(n, choice)
            ports[n] = known[key]
        return Placed(ports, found.cost, found.gap)


def place(problem: Problem, mesh: MeshView) -> Placed:
    """The best placement found for a problem on a mesh."""
    placer = Placer(problem, mesh)
    return placer.placed(placer.tables.best())
