"""Splits conditions and loops outside of the loop over microbatches into one equation for each stage.

    a, b = cond p f x y     -->   stage 0: a = cond p f0 x;  stage 1: b = cond p f1 y

An equation is computed on one stage. So an update under a condition (every few steps, or if all gradients are finite)
would move all weights and gradients to one stage. The predicate is a scalar, which is sent to every stage; each stage
gets the branches with its own results only. One stage's part of a branch may make a value for another stage, such as a
part of a global norm. This value is the result of an earlier condition, and zero if another branch runs:

    cond p f x y, f sums over x and y   -->   s0 = cond p sum x;  s1 = cond p sum y;  s = cond p add s0 s1;  ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr, Var
from shardc.ir.eqns import full_eqn
from shardc.ir.nested import Body, bodies_of, nested_bodies, with_bodies, with_nested
from shardc.ir.walk import bytes_of, renamed, with_atoms
from shardc.passes.trace.canonicalize import with_own_bodies
from shardc.pipeline.cut.find_homes import is_large, largest
from shardc.pipeline.cut.regroup import regroup
from shardc.sbp.signature import is_extended

ResultGroup: TypeAlias = tuple[int, int]
"""Results that are computed together: (stage, 0), or (-1, number) for results that are computed where they are read."""


def anchor_of(eqn: Eqn, anchors: Mapping[Var, int]) -> int | None:
    """The stage of an equation outside of the loop: the stage with most bytes of its operands.

    Args:
      eqn: the equation.
      anchors: the stage of each value that is made on one stage.

    Returns:
      None if the equation is computed wherever its results are read.
    """
    operands = [v for v in eqn.invars if not compat.is_literal(v)]
    known = [v for v in operands if v in anchors]
    large = [v for v in known if is_large(v)]
    if not large and any(map(is_large, operands)):
        return None  # it is computed where it is read: its large inputs are arguments, which live there too
    weights: dict[int, int] = {}
    for v in large or known:
        weights[anchors[v]] = weights.get(anchors[v], 0) + (bytes_of(v) if large else 0)
    return min(weights, key=lambda s: (-weights[s], s), default=None)


def split_nested(eqns: Sequence[Eqn], anchors: dict[Var, int], homes: Mapping[Var, int]) -> list[Eqn]:
    """The equations, with nested ones split into one for each stage of their results.

    Args:
      eqns: the equations outside of the loop over microbatches, in order.
      anchors: the stage of each value that is made on one stage; the results of these equations are added.
      homes: the stages that values belong to. A scalar computed from values without an anchor, such as the norm of a
        parameter, is made on their home.
    """
    found: list[Eqn] = []
    for eqn in eqns:
        for part in _PARTS.get(eqn.primitive.name, _whole)(eqn, anchors, homes):
            at = None if any(v in anchors for v in part.outvars) else anchor_of(part, anchors)
            if at is None and not part.effects and not any(v in anchors or is_large(v) for v in part.outvars):
                at = largest(part.invars, homes)
            anchors |= {} if at is None else dict.fromkeys(part.outvars, at)
            found.append(part)
    return found


def _whole(eqn: Eqn, anchors: dict[Var, int], homes: Mapping[Var, int]) -> list[Eqn]:
    del anchors, homes
    return [eqn]


def _barriers(eqn: Eqn, anchors: dict[Var, int], homes: Mapping[Var, int]) -> list[Eqn]:
    """An optimization barrier for each stage."""
    del homes
    groups: dict[int | None, list[int]] = {}
    for i, a in enumerate(eqn.invars):
        groups.setdefault(None if compat.is_literal(a) else anchors.get(a), []).append(i)
    return [
        eqn.replace(invars=[eqn.invars[i] for i in some], outvars=[eqn.outvars[i] for i in some])
        for at, every in groups.items()
        for some in ([[i] for i in every] if at is None else [every])
    ]


# conditions


@dataclass
class _Branch:
    """One branch of a condition. Its operands have their outside names: the variables of the enclosing program.

    Attributes:
      eqns, outs: its equations and results.
      anchors: the stage of each value that is made on one stage, outside or here.
      made: the equation that makes each value.
      groups: for each equation the groups of results that compute it.
      level: for each equation and group, the round in which the group computes the equation.
    """

    eqns: list[Eqn]
    outs: list[Atom]
    anchors: dict[Var, int]
    made: dict[Var, Eqn] = field(init=False)
    groups: dict[Eqn, set[ResultGroup]] = field(default_factory=dict[Eqn, set[ResultGroup]])
    level: dict[tuple[Eqn, ResultGroup], int] = field(default_factory=dict[tuple[Eqn, ResultGroup], int])

    def __post_init__(self) -> None:
        self.made = {v: e for e in self.eqns for v in e.outvars}

    @classmethod
    def of(cls, body: Jaxpr, operands: Sequence[Atom], outer: Mapping[Var, int], homes: Mapping[Var, int]) -> _Branch:
        names = dict(zip(body.invars, operands, strict=True))

        named, outs = [with_atoms(e, names) for e in body.eqns], renamed(body.outvars, names)
        anchors = dict(outer)
        return cls(regroup(split_nested(named, anchors, homes), anchors, outs), outs, anchors)

    def home(self, atom: Atom) -> ResultGroup | None:
        """The only group that makes a value; None if it comes from outside, or if each reading group makes it."""
        if compat.is_literal(atom) or atom not in self.made or atom not in self.anchors:
            return None
        return self.anchors[atom], 0

    def put(self, of_results: Sequence[ResultGroup], first: ResultGroup) -> None:
        """Find the groups that compute each equation. Effects that belong to no stage go to the group `first`."""
        wanted: dict[Var, set[ResultGroup]] = {}
        for a, group in zip(self.outs, of_results, strict=True):
            if not compat.is_literal(a):
                wanted.setdefault(a, set()).add(group)
        for eqn in reversed(self.eqns):
            read = set[ResultGroup]().union(*(wanted.get(v, ()) for v in eqn.outvars))
            at = anchor_of(eqn, self.anchors) if not eqn.outvars else self.anchors.get(eqn.outvars[0])
            if eqn.effects:
                groups = {first if at is None else (at, 0)}
            else:
                groups = read if at is None or not read else {(at, 0)}
            self.groups[eqn] = groups
            for v in compat.variables(eqn.invars):
                wanted.setdefault(v, set()).update(groups)

    def levels(self, of_results: Sequence[ResultGroup]) -> dict[ResultGroup, int]:
        """The last round of each group. In a round, a group can read values that other groups made in earlier
        rounds."""
        for eqn in self.eqns:
            for group in self.groups[eqn]:
                self.level[eqn, group] = max((self._there(a, group) for a in eqn.invars), default=0)
        last: dict[ResultGroup, int] = {}
        for a, group in zip(self.outs, of_results, strict=True):
            last[group] = max(last.get(group, 0), self._there(a, group))
        return last

    def _there(self, a: Atom, group: ResultGroup) -> int:
        """The first round in which a group can read a value."""
        home = self.home(a)
        if home is None or home == group:
            return 0 if compat.is_literal(a) or a not in self.made else self.level[self.made[a], group]
        return self.level[self.made[a], home] + 1

    def delay(self, of_results: Sequence[ResultGroup], last: Mapping[ResultGroup, int]) -> None:
        """Delay equations that no other group waits for to the round of their first reader."""
        due: dict[tuple[Var, ResultGroup], int] = {}

        def read(a: Atom, group: ResultGroup, at: int) -> None:
            if compat.is_literal(a) or a not in self.made:
                return
            home = self.home(a) or group
            at = self.level[self.made[a], home] if home != group else at
            due[a, home] = min(at, due.get((a, home), at))

        for a, group in zip(self.outs, of_results, strict=True):
            read(a, group, last[group])
        for eqn in reversed(self.eqns):
            for group in self.groups[eqn]:
                at = min((due[v, group] for v in eqn.outvars if (v, group) in due), default=None)
                if at is not None:
                    self.level[eqn, group] = at
                for a in eqn.invars:
                    read(a, group, self.level[eqn, group])


def _conditions(eqn: Eqn, anchors: dict[Var, int], homes: Mapping[Var, int]) -> list[Eqn]:
    """The condition split into several: one for each group of results and each round."""
    branches = [_Branch.of(body, eqn.invars[1:], anchors, homes) for body in bodies_of(eqn)]
    of_results = _groups_of(eqn, branches)
    stages = {g for g in of_results if g[0] >= 0}
    if len(set(of_results)) < 2:
        return [eqn]
    for b in branches:
        b.put(of_results, min(stages, default=of_results[0]))
    last: dict[ResultGroup, int] = {}
    for b in branches:
        for group, level in b.levels(of_results).items():
            last[group] = max(level, last.get(group, 0))
    for b in branches:
        b.delay(of_results, last)
    segments = _Segments(eqn, branches, of_results, last)
    if any(is_extended(v.aval.dtype) for names in segments.names for v in names.values()):
        return [eqn]  # keys have no zeros
    parts = segments.run()
    for part, (stage, _) in parts:
        if stage >= 0:
            anchors |= dict.fromkeys(part.outvars, stage)
    return [part for part, _ in parts]


def _groups_of(eqn: Eqn, branches: Sequence[_Branch]) -> list[ResultGroup]:
    """The group of each result of a condition: (stage, 0) if it is made on a stage, otherwise (-1, number).

    Results without a stage share a group if they depend on a common large value.
    """
    groups: list[ResultGroup] = []
    shared: dict[Var, int] = {}
    for i in range(len(eqn.outvars)):
        at = {b.anchors[b.outs[i]] for b in branches if not compat.is_literal(b.outs[i]) and b.outs[i] in b.anchors}
        if at:
            groups.append((min(at), 0))
            continue
        behind = [v for b in branches for v in _behind(b, b.outs[i])]
        joined = {shared[v] for v in behind if v in shared}
        number = min(joined, default=i)
        shared |= dict.fromkeys(behind, number)
        shared = {v: number if n in joined else n for v, n in shared.items()}
        groups = [(-1, number) if s < 0 and n in joined else (s, n) for s, n in groups] + [(-1, number)]
    return groups


def _behind(branch: _Branch, result: Atom) -> list[Var]:
    """The large values of a branch that a result depends on, if no stage makes them."""
    found: dict[Var, None] = {}
    pending = [result]
    while pending:
        a = pending.pop()
        if compat.is_literal(a) or a not in branch.made or a in found or branch.home(a) is not None:
            continue
        found[a] = None
        pending += branch.made[a].invars
    return [v for v in found if is_large(v)]


class _Segments:
    """The conditions that one condition is split into.

    Attributes:
      names: for each branch, the new outside variable of each value that one condition makes for another, by (group
        that makes it, value).
    """

    def __init__(
        self, eqn: Eqn, branches: Sequence[_Branch], of_results: Sequence[ResultGroup], last: Mapping[ResultGroup, int]
    ) -> None:
        self.eqn, self.branches, self.of_results, self.last = eqn, branches, of_results, last
        self.names = [self._crossing(b) for b in branches]

    def run(self) -> list[tuple[Eqn, ResultGroup]]:
        places = {(at, g) for b in self.branches for (_, g), at in b.level.items()}
        places |= {(at, g) for g, at in self.last.items()}
        return [(self._segment(at, g), g) for at, g in sorted(places)]

    def _crossing(self, b: _Branch) -> dict[tuple[ResultGroup, Var], Var]:
        reads = [(a, b.level[e, g], g) for e in b.eqns for g in b.groups[e] for a in e.invars]
        reads += [(a, self.last[g], g) for a, g in zip(b.outs, self.of_results, strict=True)]
        found: dict[tuple[ResultGroup, Var], Var] = {}
        for a, at, group in reads:
            if not compat.is_literal(a) and a in b.made:
                home = b.home(a) or group
                if (home, a) not in found and (home, b.level[b.made[a], home]) != (group, at):
                    found[home, a] = compat.fresh_var(a.aval)
        return found

    def _segment(self, at: int, group: ResultGroup) -> Eqn:
        """The condition that computes the equations of one group in one round."""
        mine = [i for i, g in enumerate(self.of_results) if g == group and at == self.last[group]]
        parts = [[e for e in b.eqns if b.level.get((e, group)) == at] for b in self.branches]
        made = [{v for e in eqns for v in e.outvars} for eqns in parts]
        outvars = [self.eqn.outvars[i] for i in mine]
        outs: list[list[Atom | None]] = [[b.outs[i] for i in mine] for b in self.branches]
        for k, eqns in enumerate(parts):
            for v in (v for e in eqns for v in e.outvars if (group, v) in self.names[k]):
                outvars.append(self.names[k][group, v])
                for j, found in enumerate(outs):
                    found.append(v if j == k else None)
        read = [
            [self._outside(k, group, a) for a in (*(a for e in eqns for a in e.invars), *outs[k]) if a is not None
             and not compat.is_literal(a) and a not in made[k]]
            for k, eqns in enumerate(parts)
        ]  # fmt: skip
        operands = list(dict.fromkeys(v for some in read for v in some))
        bodies: list[Jaxpr] = []
        for k, eqns in enumerate(parts):
            inputs = {v: compat.fresh_var(v.aval) for v in operands}

            def named(a: Atom, k: int = k, inputs: Mapping[Var, Var] = inputs) -> Atom:
                return a if compat.is_literal(a) or a in made[k] else inputs[self._outside(k, group, a)]

            body = [e.replace(invars=[named(a) for a in e.invars]) for e in eqns]
            results: list[Atom] = []
            for a, v in zip(outs[k], outvars, strict=True):
                results.append(compat.fresh_var(v.aval) if a is None else named(a))
                body += [full_eqn(0, results[-1])] if a is None else []
            bodies.append(compat.new_jaxpr(list(inputs.values()), results, body, bodies_of(self.eqn)[k]))
        effects = frozenset[object]().union(*(b.effects for b in bodies))
        return with_own_bodies(
            self.eqn.replace(
                invars=[self.eqn.invars[0], *operands], outvars=outvars, params=with_bodies(self.eqn, bodies),
                effects=effects,
            )
        )  # fmt: skip

    def _outside(self, k: int, group: ResultGroup, v: Var) -> Var:
        """The outside variable of a value that a group reads in branch `k`."""
        b = self.branches[k]
        return self.names[k][b.home(v) or group, v] if v in b.made else v


# loops


def _loops(eqn: Eqn, anchors: dict[Var, int], homes: Mapping[Var, int]) -> list[Eqn]:
    """A loop split into one scan or while for each stage of its results, each with only the operands that its results
    need.

    The loop stays whole if an iteration's results of one stage depend on values of another stage.
    """
    del homes
    if eqn.effects:
        return [eqn]
    needs = _needs(eqn)
    groups: dict[int | None, list[int]] = {}
    for i, need in enumerate(needs):
        at = {anchors[v] for v in compat.variables(eqn.invars[n] for n in need) if is_large(v) and v in anchors}
        if len(at) > 1:
            return [eqn]
        groups.setdefault(min(at, default=None), []).append(i)
    if len(groups) < 2 and (None not in groups or len(_apart(groups[None], needs, eqn)) < 2):
        return [eqn]
    found: list[Eqn] = []
    for at, every in groups.items():
        for some in [every] if at is not None else _apart(every, needs, eqn):
            part = _only(eqn, some, set[int]().union(*(needs[i] for i in some)))
            anchors |= {} if at is None else dict.fromkeys(part.outvars, at)
            found.append(part)
    return found


def _apart(results: Sequence[int], needs: Sequence[set[int]], eqn: Eqn) -> list[list[int]]:
    """Groups of results, by their numbers: results that need a common large carry are in one group."""
    found: list[tuple[list[int], set[int]]] = []
    carries = nested_bodies(eqn)[-1].carried
    for i in results:
        mine = {n for n in needs[i] if n in carries and not compat.is_literal(a := eqn.invars[n]) and is_large(a)}
        some = [i]
        for group in [g for g in found if g[1] & mine]:
            found.remove(group)
            some, mine = [*group[0], *some], group[1] | mine
        found.append((some, mine))
    return [sorted(some) for some, _ in found]


def _needs(eqn: Eqn) -> list[set[int]]:
    """For each result of a loop, the numbers of the operands that it depends on."""
    bodies = nested_bodies(eqn)
    direct, carried = [_needs_of(body) for body in bodies], list(bodies[-1].carried)
    always = set[int]().union(*(need for body in direct[:-1] for need in body))
    found = [need | always | set(carried[i : i + 1]) for i, need in enumerate(direct[-1])]
    changed = True
    while changed:
        changed = False
        for need in found:
            more = need.union(*(found[i] for i, n in enumerate(carried) if n in need))
            if len(more) > len(need):
                need |= more
                changed = True
    return found


def _only(eqn: Eqn, results: Sequence[int], operands: set[int]) -> Eqn:
    """A loop with only these results and operands, and the carries that the results need."""
    bodies = nested_bodies(eqn)
    carried = [i for i, n in enumerate(bodies[-1].carried) if n in operands]
    mine = sorted({*carried, *results})
    parts: list[Jaxpr] = []
    for body in bodies:
        outs = [body.jaxpr.outvars[i] for i in mine] if not body.decides else body.jaxpr.outvars
        kept = [v for v, n in body.inputs if n in operands]
        parts.append(compat.new_jaxpr(kept, outs, _live(body.jaxpr, outs), body.jaxpr))
    fixed = [sum(n in operands for n in body.operands[: body.fixed]) for body in bodies]
    outvars = [eqn.outvars[i] if i in results else compat.fresh_var(eqn.outvars[i].aval) for i in mine]
    invars = [eqn.invars[n] for n in sorted(operands)]
    params = with_nested(eqn, parts, fixed, len(carried))
    return with_own_bodies(eqn.replace(invars=invars, outvars=outvars, params=params))


def _needs_of(body: Body) -> list[set[int]]:
    """For each result of a body, the numbers of the operands that it depends on."""
    needs: dict[Var, set[int]] = {v: {n} for v, n in body.inputs}
    for eqn in body.jaxpr.eqns:
        need = set[int]().union(*(needs[v] for v in compat.variables(eqn.invars)))
        needs |= dict.fromkeys(eqn.outvars, need)
    return [set() if compat.is_literal(a) else set(needs[a]) for a in body.jaxpr.outvars]


def _live(body: Jaxpr, outs: Sequence[Atom]) -> list[Eqn]:
    """The equations of a body that some of its results depend on."""
    read = set(compat.variables(outs))
    found: list[Eqn] = []
    for eqn in reversed(body.eqns):
        if not read.isdisjoint(eqn.outvars):
            read.update(compat.variables(eqn.invars))
            found.append(eqn)
    return found[::-1]


_PARTS: Final[Mapping[str, Callable[[Eqn, dict[Var, int], Mapping[Var, int]], list[Eqn]]]] = {
    "cond": _conditions,
    "optimization_barrier": _barriers,
    "scan": _loops,
    "while": _loops,
}
