"""The walk that holds merged values in their factors, and merges them only where an operation needs that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import jax
from jax import lax

from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr, Var
from shardc.ir.nested import NESTED, Body, bodies_of, nested_bodies, with_bodies
from shardc.ir.walk import bytes_of
from shardc.passes.rewrite.factors import (
    Factors,
    common_of,
    is_plain,
    merged_by,
    merges_of,
    plain,
    reshaped,
    shape_of,
)
from shardc.passes.rewrite.in_factors import InFactors, broadcast_to, is_pointwise, pointwise, way_of
from shardc.passes.trace.canonicalize import EVERY, inlined_eqns

MOST_ROUNDS: Final = 8
"""Rounds in which the carries of a loop find their factors."""


def walked(jaxpr: Jaxpr, merging: Collection[Var]) -> tuple[Jaxpr, set[Var]]:
    """The jaxpr in which the reshapes with the results `merging` sink, and those of them that would save no bytes."""
    walk = _Walk(merging)
    return _Scope(walk, jaxpr).finished(), walk.worse()


@dataclass(frozen=True, slots=True)
class _Held:
    """A value in factors.

    Attributes:
      value: has the factors as its dimensions.
      factors: of the dimensions of the value in the program.
      root: the first reshape that it follows from.
    """

    value: Atom
    factors: Factors
    root: Var


@dataclass
class _Walk:
    """The walk through a program and its nested bodies.

    Attributes:
      merging: the results of reshapes that sink.
      saved: bytes of each reshape that sinks, times the factors that it merges (`merges_of`).
      paid: a reshape, and the bytes that are merged or split on behalf of it, times the factors.
      together: pairs of reshapes whose results meet in an operation.
    """

    merging: Collection[Var]
    saved: list[tuple[Var, int]] = field(default_factory=list[tuple[Var, int]])
    paid: list[tuple[Var, int]] = field(default_factory=list[tuple[Var, int]])
    together: list[tuple[Var, Var]] = field(default_factory=list[tuple[Var, Var]])

    @property
    def logs(self) -> tuple[list[Any], ...]:
        return self.saved, self.paid, self.together

    def mark(self) -> list[int]:
        return list(map(len, self.logs))

    def forget(self, mark: Sequence[int]) -> None:
        """Forgets what was noted since the mark."""
        for log, n in zip(self.logs, mark, strict=True):
            del log[n:]

    def worse(self) -> set[Var]:
        """The reshapes that would save no bytes, with all that they meet."""
        group = {v: {v} for v in self.merging}
        for a, b in self.together:
            if group[a] is not group[b]:
                group[a] |= group[b]
                for v in group[b]:
                    group[v] = group[a]
        saved, paid = Counter[int](), Counter[int]()
        for log, total in ((self.saved, saved), (self.paid, paid)):
            for v, n in log:
                total[id(group[v])] += n
        return {v for v, mine in group.items() if 0 < paid[id(mine)] >= saved[id(mine)]}


class _Scope:
    """One jaxpr of the walk: the program, or a nested body.

    Attributes:
      eqns: the new equations so far.
      made: the old equation of each value.
      held: the values that are in factors.
      names: values of their own shape, where they have other names than before.
      merged: the values in factors that were merged.
    """

    def __init__(self, walk: _Walk, jaxpr: Jaxpr, given: Sequence[_Held | None] = (), times: int = 1) -> None:
        self.walk, self.jaxpr, self.times = walk, jaxpr, times
        self.eqns: list[Eqn] = []
        self.made: dict[Var, Eqn] = {}
        self.held: dict[Var, _Held] = {}
        self.names: dict[Var, Atom] = {}
        self.merged: set[Var] = set()
        self.made_in: dict[tuple[Var, Factors], Atom] = {}
        self.invars = list(jaxpr.invars)
        for n, held in enumerate(given):
            if held is not None:
                old = self.invars[n]
                self.invars[n] = compat.fresh_var(_aval(old, shape_of(held.factors)))
                self.held[old] = _Held(self.invars[n], held.factors, held.root)
        for eqn in jaxpr.eqns:
            self.equation(eqn)

    def finished(self, wanted: Sequence[Factors | None] | None = None, root: Sequence[Var | None] = ()) -> Jaxpr:
        """The new jaxpr, with its results in the wanted factors."""
        wanted = wanted or [None] * len(self.jaxpr.outvars)
        roots = root or [None] * len(wanted)
        outvars = [
            self.plain(a) if f is None else self.in_factors(a, f, r)
            for a, f, r in zip(self.jaxpr.outvars, wanted, roots, strict=True)
        ]
        return compat.new_jaxpr(self.invars, outvars, self.eqns, self.jaxpr)

    def of(self, atom: Atom) -> _Held | None:
        return None if compat.is_literal(atom) else self.held.get(atom)

    # --- values -----------------------------------------------------------------------------------------------------

    def plain(self, atom: Atom) -> Atom:
        """A value in its own shape."""
        if compat.is_literal(atom):
            return atom
        if atom in self.held and atom not in self.names:
            held = self.held[atom]
            self.merged.add(atom)
            self.pay(held.root, atom, merges_of(held.factors))
            self.names[atom] = self.reshape(held.value, atom.aval.shape, self.made.get(atom))
        return self.names.get(atom, atom)

    def in_factors(self, atom: Atom, factors: Factors, root: Var | None) -> Atom:
        """A value in these factors."""
        if is_plain(factors):
            return self.plain(atom)
        assert root is not None
        held = self.of(atom)
        if held is not None and held.factors == factors:
            return held.value
        if compat.is_literal(atom):
            return self.reshape(atom, shape_of(factors), None)
        if (atom, factors) not in self.made_in:
            self.made_in[atom, factors] = self.split(atom, factors, root)
        return self.made_in[atom, factors]

    def split(self, atom: Var, factors: Factors, root: Var) -> Atom:
        """A value in other factors than it is held in, if it is."""
        if (held := self.held.get(atom)) is not None:
            self.pay(root, atom, merges_of(held.factors) - merges_of(factors))
            return self.reshape(held.value, shape_of(factors), None)
        made = self.made.get(atom)
        if made is not None and (way := self.spread(atom, factors)) is not None:
            return self.emit(made, way, root)[0]
        if made is not None and _only_splits(made):
            return self.reshape(self.plain(made.invars[0]), shape_of(factors), made)
        self.pay(root, atom, merges_of(factors))
        return self.reshape(self.plain(atom), shape_of(factors), made)

    def pay(self, root: Var, atom: Atom, factors: int) -> None:
        """Notes that so many factors of a value are merged or split on behalf of `root`."""
        if factors > 0:
            self.walk.paid.append((root, self.times * factors * bytes_of(atom)))

    def spread(self, atom: Atom, factors: Factors) -> InFactors | None:
        """How to make a value in factors that takes no more than a value of fewer elements; None if it is not so."""
        made = None if compat.is_literal(atom) else self.made.get(atom)
        if made is None:
            return None
        name = made.primitive.name
        if name == "broadcast_in_dim":
            return broadcast_to(made, factors) if made.invars[0].aval.size < made.outvars[0].aval.size else None
        if name == "iota" and len(factors[made.params["dimension"]]) == 1:
            at = sum(map(len, factors[: made.params["dimension"]]))
            return InFactors((), (factors,), {**made.params, "shape": shape_of(factors), "dimension": at})
        if is_pointwise(name) and len(made.outvars) == 1 and all(
            not a.aval.shape or (a.aval.shape == atom.aval.shape and self.spread(a, factors) is not None)
            for a in made.invars
        ):  # fmt: skip
            return pointwise(
                made, [factors if a.aval.shape == made.outvars[0].aval.shape else None for a in made.invars]
            )
        return None

    def reshape(self, atom: Atom, shape: Sequence[int], like: Eqn | None) -> Atom:
        if tuple(atom.aval.shape) == tuple(shape):
            return atom
        out = compat.fresh_var(_aval(atom, shape))
        params = {"new_sizes": tuple(shape), "dimensions": None, "sharding": None}
        self.eqns.append(compat.new_eqn([atom], [out], lax.reshape_p, params, like))
        return out

    # --- equations --------------------------------------------------------------------------------------------------

    def equation(self, eqn: Eqn) -> None:
        self.made |= dict.fromkeys(eqn.outvars, eqn)
        name = eqn.primitive.name
        if name in NESTED and bodies_of(eqn):
            self.nested(eqn)
        elif name in ("reshape", "squeeze") and self.reshaping(eqn):
            pass
        elif not any(self.of(a) for a in eqn.invars):
            self.keep(eqn)
        elif name == "optimization_barrier":
            self.barrier(eqn)
        elif (way := self.way(eqn)) is None:
            self.keep(eqn)
        else:
            roots = [h.root for a in eqn.invars if (h := self.of(a)) is not None]
            self.walk.together += [(roots[0], r) for r in roots[1:]]
            for v, value, factors in zip(eqn.outvars, self.emit(eqn, way, roots[0]), way.results, strict=True):
                self.hold(v, value, factors, roots[0])
            if way.cost:
                self.walk.paid.append((roots[0], self.times * way.cost))

    def keep(self, eqn: Eqn) -> None:
        """The equation as it is, on values of their own shapes."""
        invars = list(map(self.plain, eqn.invars))
        same = all(a is b for a, b in zip(invars, eqn.invars, strict=True))
        self.eqns.append(eqn if same else eqn.replace(invars=invars))

    def hold(self, v: Var, value: Atom, factors: Factors, root: Var) -> None:
        """Notes the value that stands for a result."""
        if is_plain(factors):
            self.names[v] = value
        else:
            self.held[v] = _Held(value, factors, root)

    def reshaping(self, eqn: Eqn) -> bool:
        """A reshape that begins, changes or ends factors; False if it does nothing to any."""
        (x,), (out,) = eqn.invars, eqn.outvars
        held = self.of(x)
        if held is None and out not in self.walk.merging:
            return False
        if eqn.params["dimensions"] is not None and eqn.primitive.name == "reshape":
            return False
        value = self.plain(x) if held is None else held.value
        factors = reshaped(value.aval.shape, out.aval.shape)
        if factors is None:
            return False
        root = out if held is None else held.root
        if not is_plain(merged_by(eqn) or ()):
            if out not in self.walk.merging and not is_plain(factors):
                return False
            self.walk.together.append((root, out if out in self.walk.merging else root))
            more = merges_of(factors) - (0 if held is None else merges_of(held.factors))
            self.walk.saved.append((root, self.times * max(more, 0) * bytes_of(out)))
        self.hold(out, self.reshape(value, shape_of(factors), eqn), factors, root)
        return True

    def way(self, eqn: Eqn) -> InFactors | None:
        """How to do an operation in factors, if what it splits is not more than what it would merge."""
        find = way_of(eqn)
        given = [None if (h := self.of(a)) is None else h.factors for a in eqn.invars]
        way = None if find is None else find(eqn, given)
        if way is None:
            return None
        splits = sum(
            bytes_of(a) for a, f in way.operands
            if not compat.is_literal(a) and merges_of(f) and not self.of(a) and not self.is_light(a, f)
        )  # fmt: skip
        merges = sum(bytes_of(a) for a in compat.variables(eqn.invars) if self.of(a) and a not in self.names)
        return way if splits <= merges else None

    def is_light(self, atom: Atom, factors: Factors) -> bool:
        """Whether a value of its own shape can be made in factors from less."""
        if self.spread(atom, factors) is not None:
            return True
        made = None if compat.is_literal(atom) else self.made.get(atom)
        return made is not None and _only_splits(made)

    def emit(self, eqn: Eqn, way: InFactors, root: Var) -> list[Atom]:
        """The results of an operation on factors."""
        invars = [self.in_factors(a, f, root) for a, f in way.operands]
        if way.computed is not None:
            avals = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in invars]
            found, results = inlined_eqns(jax.make_jaxpr(way.computed)(*avals), invars, eqn, (EVERY,))
            self.eqns += found
            return results
        outvars = [compat.fresh_var(_aval(v, shape_of(f))) for v, f in zip(eqn.outvars, way.results, strict=True)]
        self.eqns.append(eqn.replace(invars=invars, outvars=outvars, params=way.params))
        return [*outvars]

    def barrier(self, eqn: Eqn) -> None:
        """A barrier takes each operand as it is held."""
        held = [self.of(a) for a in eqn.invars]
        invars = [self.plain(a) if h is None else h.value for a, h in zip(eqn.invars, held, strict=True)]
        outvars = [compat.fresh_var(a.aval) for a in invars]
        for v, out, h in zip(eqn.outvars, outvars, held, strict=True):
            self.hold(v, out, plain(v.aval.shape) if h is None else h.factors, v if h is None else h.root)
        self.eqns.append(eqn.replace(invars=invars, outvars=outvars))

    # --- nested bodies ----------------------------------------------------------------------------------------------

    def nested(self, eqn: Eqn) -> None:
        """A nested equation with its operands, carries and results in factors."""
        found = _Nested(self, eqn)
        mark = self.walk.mark()
        for _ in range(MOST_ROUNDS):
            self.walk.forget(mark)
            found.run()
            if found.settled():
                break
        else:
            self.walk.forget(mark)
            found.give_up()
        found.put()


class _Nested:
    """A nested equation in the walk: what each operand and each result is held in.

    Attributes:
      operands, results: by number, how it is held; None: in its own shape.
      refused: operands that stay in their own shape.
    """

    def __init__(self, outer: _Scope, eqn: Eqn) -> None:
        self.outer, self.eqn, self.bodies = outer, eqn, nested_bodies(eqn)
        self.operands: list[_Held | None] = [outer.of(a) for a in eqn.invars]
        self.results: list[_Held | None] = [None] * len(eqn.outvars)
        self.refused: set[int] = set()
        self.scopes: list[_Scope] = []
        for body in self.bodies:
            for at, (_, n) in enumerate(body.inputs):
                if at >= body.rows_at and (held := self.operands[n]) is not None and len(held.factors[0]) > 1:
                    self.operands[n] = None  # the dimension of the rounds is merged

    def run(self) -> None:
        self.scopes = []
        for body in self.bodies:
            held = enumerate(self.operands[n] for _, n in body.inputs)
            given = [h and _Held(h.value, h.factors[1:], h.root) if at >= body.rows_at else h for at, h in held]
            given = [None if h is None or is_plain(h.factors) else h for h in given]
            self.scopes.append(_Scope(self.outer.walk, body.jaxpr, given, self.outer.times * body.trips))

    def settled(self) -> bool:
        """Whether the bodies agree with how their operands are held; if not, that has changed."""
        changed = False
        for body, scope in zip(self.bodies, self.scopes, strict=True):
            for v, operand in body.inputs:
                held = self.operands[operand]
                if v in scope.merged and held is not None:
                    self.operands[operand] = None
                    self.refused.add(operand)
                    changed = True
            if body.results:
                changed |= self.carried(body, scope)
        return not changed

    def carried(self, body: Body, scope: _Scope) -> bool:
        """Whether a carry is held in other factors than it comes out in: then it changes."""
        changed = False
        for out, operand in zip(body.jaxpr.outvars, body.carried, strict=False):
            held, found = self.operands[operand], scope.of(out)
            if found is None or operand in self.refused:
                continue
            if held is None:
                if not self.outer.is_light(self.eqn.invars[operand], found.factors):
                    self.refused.add(operand)
                    continue
                self.operands[operand], changed = found, True
            elif held.factors != found.factors:
                self.refused.add(operand)
                self.operands[operand], changed = None, True
        return changed

    def give_up(self) -> None:
        self.operands = [None] * len(self.operands)
        self.run()

    def put(self) -> None:
        """Adds the equation to the scope outside."""
        outer, together = self.outer, self.outer.walk.together
        carries = {k: n for body in self.bodies if body.results for k, n in enumerate(body.carried)}
        for k in range(len(self.results)):
            found = [h for b, s in zip(self.bodies, self.scopes, strict=True) if b.results
                     and (h := s.of(b.jaxpr.outvars[k])) is not None]  # fmt: skip
            if k in carries:
                self.results[k] = self.operands[carries[k]]
            elif found and (factors := common_of([h.factors for h in found])) is not None:
                self.results[k] = _Held(found[0].value, factors, found[0].root)
            if (held := self.results[k]) is not None:
                together += [(held.root, h.root) for h in found]
        made = list[Jaxpr]()
        for body, scope in zip(self.bodies, self.scopes, strict=True):
            wanted = self.results if body.results else [None] * len(body.jaxpr.outvars)
            made.append(scope.finished([h and h.factors for h in wanted], [h and h.root for h in wanted]))
        invars = [
            outer.plain(a) if h is None else outer.in_factors(a, h.factors, h.root)
            for a, h in zip(self.eqn.invars, self.operands, strict=True)
        ]
        rows = {k for body in self.bodies if self.eqn.primitive.name == "scan"
                for k in range(body.carries, len(self.results))}  # fmt: skip
        outvars = list[Var]()
        for k, (v, held) in enumerate(zip(self.eqn.outvars, self.results, strict=True)):
            factors = held and (((v.aval.shape[0],), *held.factors) if k in rows else held.factors)
            out = v if factors is None else compat.fresh_var(_aval(v, shape_of(factors)))
            if held is not None and factors is not None:
                outer.hold(v, out, factors, held.root)
            outvars.append(out)
        same = all(a is b for a, b in zip(made, bodies_of(self.eqn), strict=True))
        params = self.eqn.params if same else with_bodies(self.eqn, made)
        outer.eqns.append(self.eqn.replace(invars=invars, outvars=outvars, params=params))


def _only_splits(eqn: Eqn) -> bool:
    """Whether an equation is a reshape that merges nothing."""
    factors = merged_by(eqn)
    return factors is not None and is_plain(factors)


def _aval(atom: Atom, shape: Sequence[int]) -> Any:
    aval = atom.aval
    return compat.shaped_array(tuple(shape), aval.dtype, getattr(aval, "weak_type", False))
