"""What a loop stacks for a later loop alone, and that one can compute: it is computed again there, and not kept.

    c, r = scan f c x; d = scan g d r z    -->    c = scan f' c x; d = scan g' d x z

f' does not give r, and g' computes its row from rows of x or z, or from what f reads in every step. The first loop of
a training step stacks what its backward pass reads, the residuals: each is there, whole, while both loops run. Chen et
al. 2016, "Training Deep Nets with Sublinear Memory Cost"; Jain et al. 2020, "Checkmate". Two loops share nothing that
XLA could join again.

    c, r = scan f c x; d = scan g d r z    -->    c, s = scan f' c x; d = scan g' d s x z

What r needs of the carry, f' stacks instead: each step's c, as `jax.checkpoint` around a layer keeps what that begins
with. So may be anything else that f makes and r follows from.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from shardc import compat
from shardc.compat import NESTED, Atom, Eqn, Jaxpr, Var, bodies_of, with_bodies
from shardc.passes.trace.canonicalize import with_own_bodies

KEPT: Final = frozenset((
    "constrain", "microbatches", "receive", "send", "sharding_constraint", "shard_map", "stage_boundary", *NESTED,
))  # fmt: skip
"""Operations that are not done twice: pins, marks, transfers, a user's own, and what has a body."""


def may_repeat(eqn: Eqn) -> bool:
    """Whether an operation can be done twice."""
    return not eqn.effects and eqn.primitive.name not in KEPT


Again: TypeAlias = Mapping[Var, Var | None]
"""What the equations make that compute residuals again; of what is a row of a residual, that residual."""


@dataclass(frozen=True, slots=True)
class Residual:
    """A stack that one loop makes and only later loops of its length read, row by row.

    Attributes:
      stack: the value.
      maker: the loop that makes it.
      trips: how often the scope runs in which both loops are.
    """

    stack: Var
    maker: Eqn
    trips: int


def find_residuals(jaxpr: Jaxpr, trips: int = 1) -> Iterator[Residual]:
    """The residuals of a jaxpr and of its nested bodies."""
    nested = [eqn for eqn in jaxpr.eqns if eqn.primitive.name in NESTED]
    stacks = {v for eqn in nested if eqn.primitive.name == "scan" for v in eqn.outvars[compat.scan_of(eqn).carries :]}
    readers: dict[Var, list[Eqn]] = {}
    for eqn in jaxpr.eqns if stacks else ():
        for v in compat.variables(eqn.invars):
            if v in stacks:
                readers.setdefault(v, []).append(eqn)
    results = {a for a in jaxpr.outvars if not compat.is_literal(a)}
    for eqn in nested:
        inside = trips * compat.trips_of(eqn)
        for body in bodies_of(eqn):
            yield from find_residuals(body, inside)
        if eqn.primitive.name == "scan":
            for v in eqn.outvars[compat.scan_of(eqn).carries :]:
                found = readers.get(v, [])
                if found and v not in results and all(_reads_rows(e, v, eqn) for e in found):
                    yield Residual(v, eqn, trips)


def _reads_rows(eqn: Eqn, v: Var, maker: Eqn) -> bool:
    """Whether an equation is a loop like `maker` that reads `v` row by row and nowhere else."""
    if eqn.primitive.name != "scan" or compat.trips_of(eqn) != compat.trips_of(maker):
        return False
    return all(a is not v for a in eqn.invars[: compat.scan_of(eqn).rows_at])


class Slices:
    """How the rows that a loop stacks follow from what another loop can read: its other stacks, the stacks that it
    reads itself, and what it reads in every step. What it carries is not there any more, if it is not stacked as well.

    Args:
      maker: the loop.
      dropped: stacks that are not there.

    Attributes:
      kept: what it carries into a step or makes there, and is stacked for the other loop.
    """

    def __init__(self, maker: Eqn, dropped: Collection[Var]) -> None:
        self.maker = maker
        scan = compat.scan_of(maker)
        self.body: Jaxpr = scan.body
        self.made_by = {v: i for i, e in enumerate(self.body.eqns) for v in e.outvars}
        consts, carries = scan.consts, scan.carries
        inputs = list(zip(self.body.invars, maker.invars, strict=True))
        self.consts: dict[Var, Atom] = dict(inputs[:consts])
        self.carried = {v for v, _ in inputs[consts : consts + carries]}
        self.kept: dict[Var, Var] = {}
        self.rows: dict[Var, Var] = {row: stack for row, stack in inputs[consts + carries :] if stack not in dropped}
        self.row_of: dict[Var, Atom] = {}
        self.dropped: dict[Var, Var] = {}
        for row, stack in list(zip(self.body.outvars, maker.outvars, strict=True))[carries:]:
            self.row_of[stack] = row
            if compat.is_literal(row) or row in self.consts:
                continue
            if stack in dropped:
                self.dropped.setdefault(row, stack)
            else:
                self.rows.setdefault(row, stack)

    def of(self, stack: Var) -> list[Eqn] | None:
        """The equations that compute a row of a stack, in their order; None if it does not follow, or is no result of
        an equation."""
        found = self._walk(stack)
        return None if found is None else found[0]

    def carries(self, stack: Var) -> set[Var]:
        """What has to be stacked of the carry for a row of a stack to follow."""
        found = self._walk(stack)
        return set() if found is None else found[1]

    def keep(self, values: Collection[Var]) -> None:
        """Has some of what is carried or made in a step stacked."""
        length = compat.trips_of(self.maker)
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
            if i is None or not may_repeat(self.body.eqns[i]):
                return None
            if i not in found:
                found.add(i)
                pending += [a for a in self.body.eqns[i].invars if not compat.is_literal(a)]
        return [self.body.eqns[i] for i in sorted(found)], carries


def drop_residuals(jaxpr: Jaxpr, stacks: Collection[Var], instead: Collection[Var] = ()) -> tuple[Jaxpr, Again]:
    """The jaxpr that computes some of its residuals again, and which equations do that.

    Args:
      jaxpr: canonical.
      stacks: residuals of it, which follow from what is kept.
      instead: what the steps of the loops that made them make, and is stacked in their place.
    """
    makers = {r.stack: r.maker for r in find_residuals(jaxpr) if r.stack in stacks}
    again: dict[Var, Var | None] = {}
    slices = {id(m): Slices(m, stacks) for m in makers.values()}
    for s in slices.values():
        s.keep(instead)
    for stack, maker in makers.items():
        slices[id(maker)].keep(slices[id(maker)].carries(stack))

    def scope(body: Jaxpr) -> Jaxpr:
        return compat.new_jaxpr(body.invars, body.outvars, list(map(equation, body.eqns)), body)

    def equation(eqn: Eqn) -> Eqn:
        if bodies_of(eqn):
            eqn = eqn.replace(params=with_bodies(eqn, list(map(scope, bodies_of(eqn)))))
        if eqn.primitive.name == "scan":
            if any(a in makers for a in eqn.invars if not compat.is_literal(a)):
                eqn = _computing(eqn, makers, lambda stack: slices[id(makers[stack])], again)
            mine = next((makers[v] for v in eqn.outvars if v in makers), None)
            if mine is not None:
                eqn = _without(eqn, makers, slices[id(mine)].kept)
        return eqn

    return scope(jaxpr), again


def _without(eqn: Eqn, dropped: Collection[Var], stacked: Mapping[Var, Var]) -> Eqn:
    """A loop without some of its results and what computes these alone, and with what is `stacked` of its carry."""
    scan = compat.scan_of(eqn)
    body = scan.body
    kept = [(v, a) for v, a in zip(eqn.outvars, body.outvars, strict=True) if v not in dropped]
    kept += [(stack, v) for v, stack in stacked.items()]
    body = compat.new_jaxpr(body.invars, [a for _, a in kept], body.eqns, body)
    live = compat.remove_dead(body, [True] * len(kept))
    params = compat.scan_params(eqn, live, scan.consts, scan.carries)
    return eqn.replace(outvars=[v for v, _ in kept], params=params)


def _computing(
    eqn: Eqn, dropped: Collection[Var], slices_of: Callable[[Var], Slices], again: dict[Var, Var | None]
) -> Eqn:
    """A loop that computes rows of what is dropped, each before it is first read."""
    scan = compat.scan_of(eqn)
    body, nc, first = scan.body, scan.consts, scan.rows_at
    inputs = list(zip(body.invars, eqn.invars, strict=True))
    consts, carries = inputs[:nc], inputs[nc:first]
    rows = [(v, a) for v, a in inputs[first:] if a not in dropped]
    missing = {v: a for v, a in inputs[first:] if a in dropped}
    names: dict[Var, Atom] = {}
    eqns: list[Eqn] = []

    def given(v: Var, atom: Atom, among: list[tuple[Var, Atom]]) -> Atom:
        if compat.is_literal(atom):
            return atom
        found = next((mine for mine, theirs in among if theirs is atom), None)
        if found is None:
            found = compat.fresh_var(v.aval)
            among.append((found, atom))
        return found

    def read(v: Var, slices: Slices) -> None:
        if v not in names and v in slices.consts:
            names[v] = given(v, slices.consts[v], consts)
        elif v not in names:
            names[v] = given(v, slices.rows[v], rows)

    def compute(row: Var) -> None:
        stack = missing.pop(row)
        slices = slices_of(stack)
        for e in slices.of(stack) or ():
            if e.outvars[0] in names:
                continue
            made = {v for v in e.invars if not compat.is_literal(v)} - slices.rows.keys() - slices.consts.keys()
            for v in e.invars:
                if not compat.is_literal(v) and v not in made:
                    read(v, slices)
            copy = with_own_bodies(_renamed(e, names))
            fresh = [compat.fresh_var(v.aval) for v in e.outvars]
            names.update(zip(e.outvars, fresh, strict=True))
            again.update({new: slices.dropped.get(old) for new, old in zip(fresh, e.outvars, strict=True)})
            eqns.append(copy.replace(outvars=fresh))
        names[row] = names[slices.row_of[stack]]

    for e in body.eqns:
        for a in e.invars:
            if not compat.is_literal(a) and a in missing:
                compute(a)
        eqns.append(_renamed(e, names))
    for a in body.outvars:
        if not compat.is_literal(a) and a in missing:
            compute(a)
    outvars = [a if compat.is_literal(a) else names.get(a, a) for a in body.outvars]
    order = [*consts, *carries, *rows]
    made = compat.new_jaxpr([v for v, _ in order], outvars, eqns, body)
    return eqn.replace(invars=[a for _, a in order], params=compat.scan_params(eqn, made, len(consts), len(carries)))


def _renamed(eqn: Eqn, names: Mapping[Var, Atom]) -> Eqn:
    return eqn.replace(invars=[a if compat.is_literal(a) else names.get(a, a) for a in eqn.invars])
