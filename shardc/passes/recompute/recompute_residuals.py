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
from dataclasses import dataclass
from typing import Final, TypeAlias

from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr, Var
from shardc.ir.nested import NESTED, bodies_of, scan_of, scan_params, trips_of, with_bodies
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
    stacks = {v for eqn in nested if eqn.primitive.name == "scan" for v in eqn.outvars[scan_of(eqn).carries :]}
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
        if eqn.primitive.name == "scan":
            for v in eqn.outvars[scan_of(eqn).carries :]:
                found = readers.get(v, [])
                if found and v not in results and all(_reads_rows(e, v, eqn) for e in found):
                    yield Residual(v, eqn, trips)


def _reads_rows(eqn: Eqn, v: Var, maker: Eqn) -> bool:
    """Whether an equation is a loop like `maker` that reads `v` row by row and nowhere else."""
    if eqn.primitive.name != "scan" or trips_of(eqn) != trips_of(maker):
        return False
    return all(a is not v for a in eqn.invars[: scan_of(eqn).rows_at])


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
        self.maker = maker
        scan = scan_of(maker)
        self.body: Jaxpr = scan.body
        self.made_by = {v: i for i, e in enumerate(self.body.eqns) for v in e.outvars}
        consts, carries = scan.consts, scan.carries
        inputs = list(zip(self.body.invars, maker.invars, strict=True))
        self.consts: dict[Var, Atom] = dict(inputs[:consts])
        self.carried = {v for v, _ in inputs[consts : consts + carries]}
        self.kept: dict[Var, Var] = {}
        self.rows: dict[Var, Var] = {row: stack for row, stack in inputs[consts + carries :] if stack not in stacks}
        self.row_of: dict[Var, Atom] = {}
        self.recomputed: dict[Var, Var] = {}
        for row, stack in list(zip(self.body.outvars, maker.outvars, strict=True))[carries:]:
            self.row_of[stack] = row
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
        length = trips_of(self.maker)
        for v in (*self.body.invars, *self.made_by):
            if v in values:
                self.kept[v] = compat.fresh_var(v.aval.update(shape=(length, *v.aval.shape)))
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
            if i is None or not may_recompute(self.body.eqns[i]):
                return None
            if i not in found:
                found.add(i)
                pending += [a for a in self.body.eqns[i].invars if not compat.is_literal(a)]
        return [self.body.eqns[i] for i in sorted(found)], carries


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
        if bodies_of(eqn):
            eqn = eqn.replace(params=with_bodies(eqn, list(map(scope, bodies_of(eqn)))))
        if eqn.primitive.name == "scan":
            if any(a in makers for a in eqn.invars if not compat.is_literal(a)):
                eqn = _Reader(eqn, makers, lambda stack: slices[makers[stack]], variables).run()
            mine = next((makers[v] for v in eqn.outvars if v in makers), None)
            if mine is not None:
                eqn = _without(eqn, makers, slices[mine].kept)
        return eqn

    return scope(jaxpr), variables


def _without(eqn: Eqn, stacks: Collection[Var], stacked: Mapping[Var, Var]) -> Eqn:
    """A loop without the results `stacks` and what computes them alone; with some values of a step `stacked`."""
    scan = scan_of(eqn)
    body = scan.body
    kept = [(v, a) for v, a in zip(eqn.outvars, body.outvars, strict=True) if v not in stacks]
    kept += [(stack, v) for v, stack in stacked.items()]
    body = compat.new_jaxpr(body.invars, [a for _, a in kept], body.eqns, body)
    live = compat.remove_dead(body, [True] * len(kept))
    params = scan_params(eqn, live, scan.consts, scan.carries)
    return eqn.replace(outvars=[v for v, _ in kept], params=params)


class _Reader:
    """A loop that reads residuals, rewritten to recompute their rows, each before it is first read.

    Attributes:
      consts, carries, rows: inputs of the new body with what the loop reads for them.
      missing: residuals that are not stacked any more, by their row.
      names: values of the new body, by those of the old one and of the loops that made the residuals.
      eqns: the new body so far.
    """

    def __init__(
        self, eqn: Eqn, stacks: Collection[Var], slices_of: Callable[[Var], Slices], variables: dict[Var, Var | None]
    ) -> None:
        self.eqn, self.scan = eqn, scan_of(eqn)
        self.slices_of, self.variables = slices_of, variables
        nc, first = self.scan.consts, self.scan.rows_at
        inputs = list(zip(self.scan.body.invars, eqn.invars, strict=True))
        self.consts, self.carries = inputs[:nc], inputs[nc:first]
        self.rows = [(v, a) for v, a in inputs[first:] if a not in stacks]
        self.missing: dict[Var, Var] = {v: a for v, a in inputs[first:] if a in stacks}
        self.names: dict[Var, Atom] = {}
        self.eqns: list[Eqn] = []

    def run(self) -> Eqn:
        body = self.scan.body
        for e in body.eqns:
            self.compute_missing(e.invars)
            self.eqns.append(_renamed(e, self.names))
        self.compute_missing(body.outvars)
        outvars = [a if compat.is_literal(a) else self.names.get(a, a) for a in body.outvars]
        order = [*self.consts, *self.carries, *self.rows]
        made = compat.new_jaxpr([v for v, _ in order], outvars, self.eqns, body)
        params = scan_params(self.eqn, made, len(self.consts), len(self.carries))
        return self.eqn.replace(invars=[a for _, a in order], params=params)

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
            copy = with_own_bodies(_renamed(e, self.names))
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
        found = next((mine for mine, theirs in inputs if theirs is given), None)
        if found is None:
            found = compat.fresh_var(v.aval)
            inputs.append((found, given))
        self.names[v] = found


def _renamed(eqn: Eqn, names: Mapping[Var, Atom]) -> Eqn:
    return eqn.replace(invars=[a if compat.is_literal(a) else names.get(a, a) for a in eqn.invars])
