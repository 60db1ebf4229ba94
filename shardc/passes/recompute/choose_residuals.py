"""Chooses which residuals of loops to recompute.

JAX keeps of a scanned layer what its rules of differentiation ask for: of a GELU five values, all of which follow from
one. A value that is kept is written once and read once. A value that follows from others by light operations can be
fused into the loops that read it, and then costs only the reads of those. The cheapest set to keep of a step is a
minimum cut (the min-cut of PyTorch's partitioner, He and Yu 2023, with seconds as in Checkmate, Jain et al. 2020).

Before anything is placed, `choose_residuals` recomputes by light operations alone, and assumes that a device holds its
share of every value. If memory is short, `recompute` asks it of a plan, at a price on memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardc import compat
from shardc.compat import Eqn, Jaxpr, Var
from shardc.ir.box import Boxed
from shardc.ir.loop import Loop
from shardc.ir.nested import bodies_of
from shardc.ir.walk import all_eqns, bytes_of, local_bytes
from shardc.machine.mesh import MeshView
from shardc.passes.estimate.backend import IN_LOOPS, Backend, FusionKind, kind_of
from shardc.passes.estimate.plan_cost import alone_seconds
from shardc.passes.estimate.sizes import piece_bytes
from shardc.passes.recompute.min_cut import Repeatable
from shardc.passes.recompute.recompute_residuals import find_residuals, may_recompute
from shardc.sbp.cost import memory_seconds, send_price

FUSED: Final = IN_LOOPS | {FusionKind.REDUCED}
"""Kinds of operations that fuse their operands."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The costs of the values and operations of a step.

    Attributes:
      moved: bytes of a value that a device reads or writes.
      held: bytes of a value in memory.
      rerun: seconds to run an operation once more, without the bytes of light ones; inf: it is not recomputed.
      row: seconds to have a row that the first loop reads in the later loops as well, besides reading it.
      mesh: the mesh of these costs.
    """

    moved: Callable[[Var], float]
    held: Callable[[Var], float]
    rerun: Callable[[Eqn], float]
    row: Callable[[Var], float]
    mesh: MeshView


def unplaced_costs(mesh: MeshView) -> StepCosts:
    """Costs before anything is placed: all values are split over all devices. A row that the first loop reads may be a
    layer's parameters, which are split: it may have to be gathered once more."""
    axes = [a for a, n in mesh.axes if n > 1]

    def row(v: Var) -> float:
        return send_price("all_gather", bytes_of(v) // mesh.size, mesh, axes).seconds

    def rerun(eqn: Eqn) -> float:
        return 0.0 if may_recompute(eqn) and kind_of(eqn) in IN_LOOPS else math.inf

    def share(v: Var) -> float:
        return bytes_of(v) / mesh.size

    return StepCosts(share, share, rerun, row, mesh)


def placed_costs(boxed: Boxed, mesh: MeshView, backend: Backend) -> StepCosts:
    """Costs in a plan."""

    def moved(v: Var) -> float:
        return local_bytes(v, boxed.placements[v], mesh.sizes)

    def held(v: Var) -> float:
        return piece_bytes(v.aval, boxed.placements[v], mesh.sizes, backend)

    def rerun(eqn: Eqn) -> float:
        if not may_recompute(eqn):
            return math.inf
        return 0.0 if kind_of(eqn) in FUSED else alone_seconds([eqn], eqn.outvars, boxed, mesh)

    return StepCosts(moved, held, rerun, lambda _: 0.0, mesh)


def choose_residuals(jaxpr: Jaxpr, mesh: MeshView) -> tuple[tuple[Var, ...], tuple[Var, ...]]:
    """The residuals that cost less if they are recomputed, and the values that are stacked in their place.

    Args:
      jaxpr: canonical.
      mesh: that it will be placed on.
    """
    recomputed, instead = list[Var](), list[Var]()
    for loop in loops_of(jaxpr, unplaced_costs(mesh)):
        less, more, _ = loop.choose()
        recomputed += less
        instead += more
    return tuple(recomputed), tuple(instead)


def loops_of(jaxpr: Jaxpr, costs: StepCosts) -> Iterator[ResidualLoop]:
    """The loops of a program that make residuals."""
    makers: dict[Eqn, tuple[int, list[Var]]] = {}
    for r in find_residuals(jaxpr):
        makers.setdefault(r.maker, (r.trips, []))[1].append(r.stack)
    if makers:
        readers = _readers(jaxpr, {s for _, mine in makers.values() for s in mine})
        for maker, (trips, mine) in makers.items():
            yield ResidualLoop(maker, trips, {s: readers[s] for s in mine}, costs)


def _readers(jaxpr: Jaxpr, stacks: Collection[Var]) -> dict[Var, list[tuple[Eqn, Var]]]:
    """The loops that read each stack, and the variable of its row in them."""
    found: dict[Var, list[tuple[Eqn, Var]]] = {s: [] for s in stacks}
    for eqn in all_eqns(jaxpr):
        if eqn.primitive.name == "scan":
            for v, a in Loop.of(eqn).operands.items():
                if not compat.is_literal(a) and a in stacks:
                    found[a].append((eqn, v))
    return found


class ResidualLoop:
    """A loop whose steps make residuals.

    Args:
      maker: the loop.
      trips: executions of the scope that it is in.
      readers: for each residual the later loops that read it, and its row in them.
      costs: of a step.

    Attributes:
      body: a step.
      count: number of its operations.
    """

    def __init__(
        self, maker: Eqn, trips: int, readers: Mapping[Var, Sequence[tuple[Eqn, Var]]], costs: StepCosts
    ) -> None:
        self._costs, self._loop, self._trips = costs, (loop := Loop.of(maker)), trips
        self.count = len(loop.eqns)
        self._made_by = {v: n for n, e in enumerate(loop.eqns) for v in e.outvars}
        self._values = [*loop.operands, *self._made_by]
        self._bytes = np.asarray([costs.held(v) for v in self._values])
        self._stacks: dict[Var, list[Var]] = {}
        for stack, row in loop.stacks.items():
            if stack in readers and not compat.is_literal(row) and row in self._made_by:
                self._stacks.setdefault(row, []).append(stack)
        others = set(compat.variables(loop.stacks.values())) - self._stacks.keys()
        self._there = loop.consts.keys() | loop.rows.keys() | others
        loops = {loop for mine in self._stacks.values() for s in mine for loop, _ in readers[s]}
        read = {a for loop in loops for a in loop.invars if not compat.is_literal(a)}
        self._free = {v for v, a in loop.consts.items() if compat.is_literal(a) or a in read}
        self._in_memory = _in_memory(loop, {*compat.variables(c.after for c in loop.carries), *others})
        uses = {row: [_uses(loop, v) for s in mine for loop, v in readers[s]] for row, mine in self._stacks.items()}
        self._fused = [row for row, found in uses.items() if any(fused for fused, _ in found)]
        self._whole = [row for row, found in uses.items() if any(whole for _, whole in found)]

    def choose(self, price: float = 0.0, more: float = 0.0, first: int = 0) -> tuple[list[Var], list[Var], float]:
        """The residuals to recompute at a price on what is kept.

        Args:
          price: seconds a byte.
          more: the price of what the first operations of a step make.
          first: the number of these operations.

        Returns:
          Residuals; what is stacked in their place; the bytes of a device that this frees.
        """
        problem, kept = self._problem
        made = np.asarray([self._made_by.get(v, -1) for v in self._values])
        here = np.asarray([v not in self._there for v in self._values])
        bytes_ = self._loop.length * self._bytes * here
        found, _ = problem.solve(kept + np.tile(bytes_ * np.where(made < first, more, price), 2) * self._priced)
        stay = dict.fromkeys(v for v, k in zip(self._values * 2, found & self._priced, strict=True) if k)
        recomputed = [s for row, stacks in self._stacks.items() if row not in stay for s in stacks]
        if not recomputed:
            return [], [], 0.0
        size = dict(zip(self._values, bytes_, strict=True))
        freed = sum(size[row] * len(stacks) for row, stacks in self._stacks.items() if row not in stay)
        new = [v for v in stay if v not in self._there and v not in self._stacks]
        return recomputed, [v for v in new if v in self._made_by], freed - sum(size[v] for v in new)

    @cached_property
    def _priced(self) -> NDArray[np.bool_]:
        """(entries,) whether keeping a value for it takes memory that another entry does not take anyway."""
        whole = set(self._whole)
        return np.asarray([v not in whole for v in self._values] + [True] * len(self._values))

    @cached_property
    def _problem(self) -> tuple[Repeatable, NDArray[np.float64]]:
        """The cut, and the seconds that keeping each of its values takes.

        Each value has two entries: fused, for operations that fuse their operands and may recompute it, and in memory,
        for the others. If no light operation makes it, the first is read from the second; so is a value that has to be
        materialized anyway, if it is not recomputed.
        """
        eqns, values, count = self._loop.eqns, self._values, len(self._values)
        number, whole = {v: k for k, v in enumerate(values)}, set(self._whole)
        times = self._trips * self._loop.length
        moving = [times * memory_seconds(self._costs.moved(v), self._costs.mesh) for v in values]
        takes = [times * self._costs.rerun(e) for e in eqns]
        may_recompute = [math.isfinite(t) for t in takes]
        fuses = [kind_of(e) in FUSED for e in eqns]
        operands = [[number[a] for a in compat.variables(e.invars)] for e in eqns]
        reads = [ks if f else [count + k for k in ks] for ks, f in zip(operands, fuses, strict=True)]
        makers, kept = np.full(2 * count, -1, np.int64), np.zeros(2 * count)

        def operation(seconds: float, needs: list[int]) -> int:
            takes.append(seconds)
            reads.append(needs)
            return len(takes) - 1

        for k, v in enumerate(values):
            n, whole_k = self._made_by.get(v, -1), count + k
            recomputable = n >= 0 and may_recompute[n]
            kept[whole_k] = 0.0 if v in self._in_memory else moving[k]
            if v in self._loop.rows:
                kept[whole_k] = times * self._costs.row(v)
            if recomputable and fuses[n]:
                makers[k], makers[whole_k] = n, operation(moving[k], operands[n])
                kept[k] = moving[k] + (0.0 if v in whole else kept[whole_k])
            else:
                makers[k] = operation(0.0 if v in self._free else moving[k], [whole_k])
                kept[k] = np.inf
                makers[whole_k] = n if recomputable else -1
        needed = [*(number[v] for v in self._fused), *(count + number[v] for v in self._whole)]
        seconds = np.asarray([t if math.isfinite(t) else 0.0 for t in takes])  # the others make no value here
        after = np.full(len(takes), -1, np.int64)
        return Repeatable(needed, np.ones(2 * count), makers, seconds, reads, after), kept


def _in_memory(loop: Loop, written: Collection[Var]) -> set[Var]:
    """The values of a round that are in memory while it runs, besides those `written` to results: its inputs, and the
    operands and results of operations that do not fuse."""
    heavy = [e for e in loop.eqns if kind_of(e) not in FUSED]
    return {*written, *loop.operands, *(v for e in heavy for v in (*compat.variables(e.invars), *e.outvars))}


def _uses(loop: Eqn, row: Var) -> tuple[bool, bool]:
    """Whether operations of a loop's step that fuse read a row, and whether others do."""
    body = bodies_of(loop)[0]
    fuses = {kind_of(e) in FUSED for e in body.eqns if row in compat.variables(e.invars)}
    return True in fuses, False in fuses or row in compat.variables(body.outvars)
