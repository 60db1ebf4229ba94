"""Recomputes what one loop stacks only for later loops, in the loops that read it, instead of keeping it.

    c, r = scan f c x; d = scan g d r z    -->    c = scan f' c x; d = scan g' d x z

f' does not return r, and g' recomputes its row from rows of x or z, or from what f reads in every step. The first loop
of a training step stacks what its backward pass reads, the residuals: each is live, whole, while both loops run. Chen
et al. 2016, "Training Deep Nets with Sublinear Memory Cost"; Jain et al. 2020, "Checkmate". XLA cannot merge equal
operations of two loops.

    c, r = scan f c x; d = scan g d r z    -->    c, s = scan f' c x; d = scan g' d s x z

If r depends on the carry, f' stacks that instead: each step's c, as `jax.checkpoint` around a layer keeps the input of
the layer. It may stack any other value of f that r follows from.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr, Var
from shardc.ir.loop import Loop
from shardc.ir.nested import NESTED, bodies_of, in_bodies, parted, trips_of
from shardc.ir.walk import renamed, with_atoms
from shardc.passes.trace.canonicalize import with_own_bodies

NOT_RECOMPUTED: Final = frozenset((
    "constrain", "microbatches", "receive", "send", "sharding_constraint", "shard_map", "stage_boundary", *NESTED,
))  # fmt: skip
"""Operations that run once only: pins, marks, transfers, a user's own shard_map, and operations with a body."""


def may_recompute(eqn: Eqn) -> bool:
    """Whether an operation can run twice."""
    return not eqn.effects and eqn.primitive.name not in NOT_RECOMPUTED


RecomputedVars: TypeAlias = Mapping[Var, Var | None]
"""The results of recomputing equations; for a row of a residual that residual, for others None."""


@dataclass(frozen=True, slots=True)
class Residual:
    """A stack that one loop makes and only later loops of its length read, row by row.

    Attributes:
      stack: the value.
      maker: the loop that makes it.
      trips: executions of the scope that both loops are in.
    """

    stack: Var
    maker: Eqn
    trips: int


def find_residuals(jaxpr: Jaxpr, trips: int = 1) -> Iterator[Residual]:
    """The residuals of a jaxpr and of its nested bodies."""
    nested = [eqn for eqn in jaxpr.eqns if eqn.primitive.name in NESTED]
    made = {eqn: Loop.of(eqn).stacks for eqn in nested if eqn.primitive.name == "scan"}
    stacks = set[Var]().union(*made.values())
    readers: dict[Var, list[Eqn]] = {}
    for eqn in jaxpr.eqns if stacks else ():
        for v in compat.variables(eqn.invars):
            if v in stacks:
                readers.setdefault(v, []).append(eqn)
    results = {a for a in jaxpr.outvars if not compat.is_literal(a)}
    for eqn in nested:
        inside = trips * trips_of(eqn)
        for body in bodies_of(eqn):
            yield from find_residuals(body, inside)
        for v in made.get(eqn, ()):
            found = readers.get(v, [])
            if found and v not in results and all(_reads_rows(e, v, eqn) for e in found):
                yield Residual(v, eqn, trips)


def _reads_rows(eqn: Eqn, v: Var, maker: Eqn) -> bool:
    """Whether an equation is a loop like `maker` that reads `v` row by row and nowhere else."""
    if eqn.primitive.name != "scan" or trips_of(eqn) != trips_of(maker):
        return False
    loop = Loop.of(eqn)
    return all(a is not v for a in (*loop.consts.values(), *(c.start for c in loop.carries)))


class Slices:
    """How the rows that a loop stacks follow from what another loop can read: the loop's other stacks, the stacks that
    it reads, and what it reads in every step. Its carry is available only if it is stacked as well.

    Args:
      maker: the loop.
      stacks: residuals that are recomputed.

    Attributes:
      kept: values of a step, carried or made there, that are stacked for the other loop.
      recomputed: the residuals that are recomputed, by their row.
    """

    def __init__(self, maker: Eqn, stacks: Collection[Var]) -> None:
        self.loop = loop = Loop.of(maker)
        self.made_by = {v: i for i, e in enumerate(loop.eqns) for v in e.outvars}
        self.consts, self.carried, self.row_of = loop.consts, {c.before for c in loop.carries}, loop.stacks
        self.kept: dict[Var, Var] = {}
        self.rows: dict[Var, Atom] = {row: stack for row, stack in loop.rows.items() if stack not in stacks}
        self.recomputed: dict[Var, Var] = {}
        for stack, row in loop.stacks.items():
            if compat.is_literal(row) or row in self.consts:
                continue
            if stack in stacks:
                self.recomputed.setdefault(row, stack)
            else:
                self.rows.setdefault(row, stack)

    def of(self, stack: Var) -> list[Eqn] | None:
        """The equations that compute a row of a stack, in their order; None if it does not follow, or is no result of
        an equation."""
        found = self._walk(stack)
        return None if found is None else found[0]

    def carries(self, stack: Var) -> set[Var]:
        """The carries that have to be stacked for a row of a stack to follow."""
        found = self._walk(stack)
        return set() if found is None else found[1]

    def keep(self, values: Collection[Var]) -> None:
        """Stacks some values that are carried or made in a step."""
        for v in (*self.loop.operands, *self.made_by):
            if v in values:
                self.kept[v] = self.loop.stack_of(v)
        self.rows |= self.kept

    def _walk(self, stack: Var) -> tuple[list[Eqn], set[Var]] | None:
        row = self.row_of[stack]
        if compat.is_literal(row) or row not in self.made_by:
            return None
        found, carries = set[int](), set[Var]()
        pending = [row]
        while pending:
            v = pending.pop()
            if v in self.rows or v in self.consts:
                continue
            if v in self.carried:
                carries.add(v)
                continue
            i = self.made_by.get(v)
            if i is None or not may_recompute(self.loop.eqns[i]):
                return None
            if i not in found:
                found.add(i)
                pending += compat.variables(self.loop.eqns[i].invars)
        return [self.loop.eqns[i] for i in sorted(found)], carries


def recompute_residuals(
    jaxpr: Jaxpr, stacks: Collection[Var], instead: Collection[Var] = ()
) -> tuple[Jaxpr, RecomputedVars]:
    """The jaxpr that recomputes some of its residuals, and the results of its recomputing equations.

    Args:
      jaxpr: canonical.
      stacks: residuals of it, which follow from what is kept.
      instead: values of the steps of the loops that made them, to be stacked in their place.
    """
    makers = {r.stack: r.maker for r in find_residuals(jaxpr) if r.stack in stacks}
    variables: dict[Var, Var | None] = {}
    slices = {m: Slices(m, stacks) for m in makers.values()}
    for s in slices.values():
        s.keep(instead)
    for stack, maker in makers.items():
        slices[maker].keep(slices[maker].carries(stack))

    def scope(body: Jaxpr) -> Jaxpr:
        return compat.new_jaxpr(body.invars, body.outvars, list(map(equation, body.eqns)), body)

    def equation(eqn: Eqn) -> Eqn:
        eqn = in_bodies(eqn, scope)
        if eqn.primitive.name == "scan":
            if any(a in makers for a in eqn.invars if not compat.is_literal(a)):
                eqn = _RecomputingLoop(eqn, makers, lambda stack: slices[makers[stack]], variables).run()
            mine = next((makers[v] for v in eqn.outvars if v in makers), None)
            if mine is not None:
                eqn = _without(eqn, makers, slices[mine].kept)
        return eqn

    return scope(jaxpr), variables


def _without(eqn: Eqn, stacks: Collection[Var], stacked: Mapping[Var, Var]) -> Eqn:
    """A loop without the results `stacks` and what computes them alone; with some values of a step `stacked`."""
    loop = Loop.of(eqn)
    kept = {v: a for v, a in loop.stacks.items() if v not in stacks}
    return replace(loop, stacks=kept | {stack: v for v, stack in stacked.items()}).live().equation()


class _RecomputingLoop:
    """A loop that reads residuals, rewritten to recompute their rows, each before it is first read.

    Attributes:
      consts, rows: inputs of the new body with what the loop reads for them.
      missing: residuals that are not stacked any more, by their row.
      names: values of the new body, by those of the old one and of the loops that made the residuals.
      eqns: the new body so far.
    """

    def __init__(
        self, eqn: Eqn, stacks: Collection[Var], slices_of: Callable[[Var], Slices], variables: dict[Var, Var | None]
    ) -> None:
        self.loop = loop = Loop.of(eqn)
        self.slices_of, self.variables = slices_of, variables
        self.consts, self.rows = dict(loop.consts), {v: a for v, a in loop.rows.items() if a not in stacks}
        self.missing: dict[Var, Var] = {v: a for v, a in loop.rows.items() if a in stacks}
        self.names: dict[Var, Atom] = {}
        self.eqns: list[Eqn] = []

    def run(self) -> Eqn:
        for e in self.loop.eqns:
            self.compute_missing(e.invars)
            self.eqns.append(with_atoms(e, self.names))
        outputs = [*self.loop.results.values()]
        self.compute_missing(outputs)
        afters, rows = parted(renamed(outputs, self.names), self.loop.carries, self.loop.stacks)
        carries = [replace(c, after=a) for c, a in zip(self.loop.carries, afters, strict=True)]
        stacks = dict(zip(self.loop.stacks, rows, strict=True))
        return Loop(self.loop.eqn, self.consts, carries, self.rows, stacks, self.eqns, self.loop.length).equation()

    def compute_missing(self, atoms: Sequence[Atom]) -> None:
        for a in atoms:
            if not compat.is_literal(a) and a in self.missing:
                self.compute(a)

    def compute(self, row: Var) -> None:
        """Appends the equations that recompute a row."""
        stack = self.missing.pop(row)
        slices = self.slices_of(stack)
        for e in slices.of(stack) or ():
            if e.outvars[0] in self.names:
                continue
            for v in compat.variables(e.invars):
                if v in slices.rows or v in slices.consts:
                    self.read(v, slices)
            copy = with_own_bodies(with_atoms(e, self.names))
            fresh = [compat.fresh_var(v.aval) for v in e.outvars]
            self.names.update(zip(e.outvars, fresh, strict=True))
            self.variables.update({new: slices.recomputed.get(old) for new, old in zip(fresh, e.outvars, strict=True)})
            self.eqns.append(compat.as_recomputed(copy.replace(outvars=fresh)))
        made = slices.row_of[stack]
        assert not compat.is_literal(made)
        if made in slices.rows:  # another stack of the same rows is kept
            self.read(made, slices)
        self.names[row] = self.names[made]

    def read(self, v: Var, slices: Slices) -> None:
        """Makes an input of the loop that made the residual an input of this one."""
        if v in self.names:
            return
        given, inputs = (slices.consts[v], self.consts) if v in slices.consts else (slices.rows[v], self.rows)
        if compat.is_literal(given):
            self.names[v] = given
            return
        found = next((mine for mine, theirs in inputs.items() if theirs is given), None)
        if found is None:
            found = compat.fresh_var(v.aval)
            inputs[found] = given
        self.names[v] = found
