"""What loops keep for later loops, so that least is written and read.

What JAX keeps of a scanned layer is what its rules of differentiation ask for: of a GELU five values, all of which
follow from one. Kept, a value is written once and read once. What follows from others by light operations can be
computed in the loops that read it instead, and takes no time but what reading those takes. What is kept is a minimum
cut (the min-cut of PyTorch's partitioner, He and Yu 2023), made before anything is placed: a device is taken to hold
its share of every value. Products, reductions and what moves are not done again here; where memory is short, that is
`compute_again`'s.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr, Var
from shardc.mesh import MeshView
from shardc.passes.compute_again import Choice
from shardc.passes.drop_residuals import KEPT, find_residuals
from shardc.passes.fusion import Kind, kind_of
from shardc.passes.memory import all_eqns, bytes_of
from shardc.sbp.cost import memory_seconds, send_price
from shardc.solver.cut import Repeatable

REPEATED: Final = frozenset((Kind.CHEAP, Kind.COSTLY, Kind.VIEW))
"""Operations that are computed where their results are read."""
FUSED: Final = REPEATED | {Kind.REDUCED}
"""Operations that need not have in memory what they read."""


def choose_residuals(jaxpr: Jaxpr, mesh: MeshView) -> Choice:
    """The residuals that take less when they are computed again.

    Args:
      jaxpr: canonical.
      mesh: that it will be placed on.
    """
    stacks: dict[Eqn, list[Var]] = {}
    for r in find_residuals(jaxpr):
        stacks.setdefault(r.maker, []).append(r.stack)
    dropped, instead = list[Var](), list[Var]()
    if stacks:
        readers = _readers(jaxpr, {s for mine in stacks.values() for s in mine})
        for maker, mine in stacks.items():
            less, more = _Loop(maker, {s: readers[s] for s in mine}, mesh).choose()
            dropped += less
            instead += more
    return Choice(tuple(dropped), tuple(instead))


def _readers(jaxpr: Jaxpr, stacks: Collection[Var]) -> dict[Var, list[tuple[Eqn, Var]]]:
    """The loops that read each stack, and what a row of it is in them."""
    found: dict[Var, list[tuple[Eqn, Var]]] = {s: [] for s in stacks}
    for eqn in all_eqns(jaxpr):
        if eqn.primitive.name == "scan":
            for a, v in zip(eqn.invars, eqn.params["jaxpr"].jaxpr.invars, strict=True):
                if not compat.is_literal(a) and a in stacks:
                    found[a].append((eqn, v))
    return found


class _Loop:
    """A loop whose steps make residuals.

    Args:
      maker: it.
      readers: of each residual the later loops that read it, and its row in them.
      mesh: that it will be placed on.
    """

    def __init__(self, maker: Eqn, readers: Mapping[Var, Sequence[tuple[Eqn, Var]]], mesh: MeshView) -> None:
        self.mesh = mesh
        self.body: Jaxpr = maker.params["jaxpr"].jaxpr
        consts, carries = maker.params["num_consts"], maker.params["num_carry"]
        self.made_by = {v: n for n, e in enumerate(self.body.eqns) for v in e.outvars}
        stacked = list(zip(maker.outvars, self.body.outvars, strict=True))[carries:]
        self.stacks: dict[Var, list[Var]] = {}
        for stack, row in stacked:
            if stack in readers and not compat.is_literal(row) and row in self.made_by:
                self.stacks.setdefault(row, []).append(stack)
        self.others = {row for _, row in stacked if not compat.is_literal(row)} - self.stacks.keys()
        loops = {eqn for mine in self.stacks.values() for s in mine for eqn, _ in readers[s]}
        there = {a for eqn in loops for a in eqn.invars if not compat.is_literal(a)}
        given = list(zip(self.body.invars, maker.invars, strict=True))
        self.consts = {v: compat.is_literal(a) or a in there for v, a in given[:consts]}
        self.rows = {v for v, _ in given[consts + carries :]}
        self.in_memory = _in_memory(self.body, {*_variables(self.body.outvars[:carries]), *self.others})
        reads = {row: [_reads(loop, v) for s in mine for loop, v in readers[s]] for row, mine in self.stacks.items()}
        self.fused = [row for row, found in reads.items() if any(fused for fused, _ in found)]
        self.whole = [row for row, found in reads.items() if any(whole for _, whole in found)]

    def choose(self) -> tuple[list[Var], list[Var]]:
        """The residuals that are computed again, and what is stacked in their place.

        What an operation that does not fuse reads has a second entry, for the value in memory: it is kept, or written
        where it is computed again.
        """
        eqns = self.body.eqns
        values = [*self.body.invars, *self.made_by]
        number = {v: k for k, v in enumerate(values)}
        repeated = [kind_of(e) in REPEATED and e.primitive.name not in KEPT and not e.effects for e in eqns]
        reads = [[number[a] for a in _variables(e.invars)] for e in eqns]
        made = [self.made_by.get(v, -1) for v in values]
        sizes = [self._kept(v, True) for v in values] + [self._kept(v, False) for v in self.whole]
        makers = [n if n >= 0 and repeated[n] else -1 for n in made]
        seconds = [0.0] * len(eqns)
        for v in self.whole:
            n = self.made_by[v]
            makers.append(len(seconds) if repeated[n] else -1)
            seconds.append(memory_seconds(self._share(v), self.mesh))
            reads.append(reads[n])
        needed = [*(number[v] for v in self.fused), *range(len(values), len(sizes))]
        problem = Repeatable(
            needed, np.asarray(sizes), np.asarray(makers, np.int64), np.asarray(seconds), reads,
            np.full(len(seconds), -1, np.int64),
        )  # fmt: skip
        found, _ = problem.solve(np.ones(len(sizes)))
        kept = dict.fromkeys(v for v, k in zip((*values, *self.whole), found, strict=True) if k)
        dropped = [s for row, stacks in self.stacks.items() if row not in kept for s in stacks]
        instead = [v for v in kept if v in self.made_by and v not in self.stacks and v not in self.others]
        return dropped, instead if dropped else []

    def _share(self, v: Var) -> float:
        """The bytes of a value that a device holds, if it is split over all."""
        return bytes_of(v) / self.mesh.size

    def _kept(self, v: Var, read: bool) -> float:
        """Seconds that it takes to have a value in the later loops, and to `read` it there for operations that fuse.

        A row that the first loop reads as well is not stacked anew. It may be a layer's parameters, which may lie in
        pieces, and are gathered once more then.
        """
        if v in self.consts:
            return 0.0 if self.consts[v] else memory_seconds(self._share(v), self.mesh)
        if v in self.rows:
            axes = [a for a, n in self.mesh.axes if n > 1]
            gather = send_price("all_gather", bytes_of(v) // self.mesh.size, self.mesh, axes).seconds
            return gather + memory_seconds(bytes_of(v), self.mesh)
        return memory_seconds(((v not in self.in_memory) + read) * self._share(v), self.mesh)


def _in_memory(body: Jaxpr, written: Collection[Var]) -> set[Var]:
    """What of a body is in memory while it runs, besides what is `written` of it: the operands and the results of what
    does not fuse, and the same in other shapes."""
    found = set(written)
    for e in reversed(body.eqns):
        kind = kind_of(e)
        if kind not in FUSED or (kind is Kind.VIEW and e.outvars[0] in found):
            found.update(_variables(e.invars))
    for e in body.eqns:
        kind = kind_of(e)
        if kind not in FUSED or (kind is Kind.VIEW and found.issuperset(_variables(e.invars))):
            found.update(e.outvars)
    return found


def _reads(loop: Eqn, row: Var) -> tuple[bool, bool]:
    """Whether operations of a loop's step that fuse read a row, and whether others do."""
    body: Jaxpr = loop.params["jaxpr"].jaxpr
    same, fused, whole = {row}, False, False
    for e in body.eqns:
        if not same.isdisjoint(_variables(e.invars)):
            kind = kind_of(e)
            if kind is Kind.VIEW:
                same.update(e.outvars)
            fused |= kind in FUSED and kind is not Kind.VIEW
            whole |= kind not in FUSED
    return fused, whole or not same.isdisjoint(_variables(body.outvars))


def _variables(atoms: Iterable[Atom]) -> list[Var]:
    return list(dict.fromkeys(a for a in atoms if not compat.is_literal(a)))
