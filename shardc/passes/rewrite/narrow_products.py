"""Writes down the type in which the machine multiplies.

    y = dot_general x:f32 w:f32  -->  x' = convert[bf16] x; w' = convert[bf16] w; y = dot_general[f32] x' w'

XLA:TPU multiplies float32 numbers in one pass of bfloat16 and adds up in float32, unless the product asks for more
(`jax.default_matmul_precision`). It moves the conversion to where the operand is made, before collectives and loops,
and into the loop that stacks the operand for another loop. A plan of the program as it is written would count twice
the bytes of what is gathered or kept for products alone. The numbers are those of the product as it was.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from jax import lax

from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr, Var
from shardc.ir.boundary import microbatches_p
from shardc.ir.loop import Loop
from shardc.ir.nested import in_bodies, nested_bodies, with_bodies
from shardc.ir.program import Program
from shardc.passes import Context
from shardc.passes.estimate.backend import PRODUCTS, TPU, backend_of


def narrow_products(program: Program, context: Context) -> Program:
    """The program whose products of float32 read what the machine multiplies; itself where that is float32. A saved
    plan is replayed as it was made, on any machine."""
    if context.known is not None:
        narrow = TPU.multiplies_in if "narrow_products" in context.known.rewrites else None
    else:
        narrow = None if context.mesh is None else backend_of(context.mesh.topology.backend).multiplies_in
    jaxpr = program.jaxpr if narrow is None else narrowed(program.jaxpr, narrow)
    return program if jaxpr is program.jaxpr else program.after("narrow_products", jaxpr)


def narrowed(jaxpr: Jaxpr, narrow: Any, ours: set[Var] | None = None) -> Jaxpr:
    """The canonical jaxpr whose products of float32 at the default precision read operands of the type `narrow`.

    Args:
      ours: gets the results of conversions that are made.
    """
    ours = set() if ours is None else ours
    scope = _Scope(narrow, ours)
    for old in jaxpr.eqns:
        eqn = in_bodies(old, partial(narrowed, narrow=narrow, ours=ours))
        if eqn.primitive.name in PRODUCTS and _is_default(eqn.params["precision"]):
            eqn = scope.product(eqn)
        elif eqn is not old:
            eqn = scope.nested(eqn)
        scope.add(eqn)
    if len(scope.eqns) == len(jaxpr.eqns) and all(map(operator.is_, scope.eqns, jaxpr.eqns)):
        return jaxpr
    while stacking := scope.with_narrow_stacks(jaxpr.outvars):
        eqns, scope = scope.eqns, _Scope(narrow, ours)
        for eqn in eqns:
            scope.add(scope.nested(eqn) if eqn in stacking else eqn)  # a row that it passes on is only converted now
    made = compat.new_jaxpr(jaxpr.invars, jaxpr.outvars, scope.eqns, jaxpr)
    return compat.remove_dead(made, [True] * len(made.outvars))


class _Scope:
    """The equations of a body, where each value is converted at most once.

    Attributes:
      narrow: the type.
      ours: results of conversions that were made, in other bodies too.
      makers: the equation that makes a value.
      known: for values of float32 the narrow ones.
    """

    def __init__(self, narrow: Any, ours: set[Var]) -> None:
        self.narrow, self.ours = narrow, ours
        self.eqns: list[Eqn] = []
        self.makers: dict[Var, Eqn] = {}
        self.known: dict[Var, Var] = {}

    def add(self, eqn: Eqn) -> None:
        self.makers |= dict.fromkeys(eqn.outvars, eqn)
        self.eqns.append(eqn)
        if self.is_ours(eqn):
            self.known |= dict(zip(compat.variables(eqn.invars), eqn.outvars, strict=False))

    def of(self, a: Atom) -> Atom:
        """A value in the narrow type, if it is of float32: what it was made from, if that was narrow, or a conversion.
        That has no line of its own: reports name it by what it is a copy of."""
        if compat.is_literal(a) or a.aval.dtype != "float32":
            return a
        maker = self.makers.get(a)
        converted = maker is not None and maker.primitive.name == "convert_element_type"
        if maker is not None and converted and maker.invars[0].aval.dtype == self.narrow:
            return maker.invars[0]
        if a not in self.known:
            result = self.fresh(a.aval.shape)
            self.ours.add(result)
            params = {"new_dtype": self.narrow, "weak_type": False, "sharding": None}
            self.add(compat.new_eqn([a], [result], lax.convert_element_type_p, params, None))
        return self.known[a]

    def fresh(self, shape: tuple[int, ...]) -> Var:
        return compat.fresh_var(compat.shaped_array(shape, self.narrow))

    def product(self, eqn: Eqn) -> Eqn:
        operands = [self.of(a) for a in eqn.invars]
        if all(map(operator.is_, operands, eqn.invars)):
            return eqn
        params = {**eqn.params, "preferred_element_type": eqn.outvars[0].aval.dtype}
        return eqn.replace(invars=operands, params=params)

    def nested(self, eqn: Eqn) -> Eqn:
        """A nested equation to which narrow values are given, where its bodies only convert them: what is the same in
        every round, or the stack of a row. The loop over microbatches of a pipeline stays: its rounds are programs of
        their own, which would keep the narrow copies beside the wide ones."""
        if self.is_of_pipeline(eqn):
            return eqn
        bodies = nested_bodies(eqn)
        readers = [_readers(b.jaxpr.eqns, b.jaxpr.outvars) for b in bodies]
        inputs: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for n, body in enumerate(bodies):
            for k, (_, number) in enumerate(body.inputs):
                if not body.fixed <= k < body.rows_at:  # no carry
                    inputs[number].append((n, k))
        invars, operands, dropped = [list(b.jaxpr.invars) for b in bodies], list(eqn.invars), set[Eqn]()
        for number, places in inputs.items():
            found = [readers[n].get(bodies[n].jaxpr.invars[k], []) for n, k in places]
            only = any(found) and all(map(self.only_converts, filter(None, found)))
            if not only or compat.is_literal(operands[number]):
                continue
            operands[number] = self.of(operands[number])
            for (n, k), some in zip(places, found, strict=True):
                invars[n][k] = some[0].outvars[0] if some else self.fresh(invars[n][k].aval.shape)
                dropped.update(some)
        if not dropped:
            return eqn
        made = [
            compat.new_jaxpr(given, b.jaxpr.outvars, [e for e in b.jaxpr.eqns if e not in dropped], b.jaxpr)
            for given, b in zip(invars, bodies, strict=True)
        ]
        return eqn.replace(invars=operands, params=with_bodies(eqn, made))

    def is_of_pipeline(self, eqn: Eqn) -> bool:
        """Whether an equation is a loop over microbatches of a pipeline."""
        made = (self.makers.get(v) for v in compat.variables(eqn.invars))
        return any(maker is not None and maker.primitive is microbatches_p for maker in made)

    def with_narrow_stacks(self, results: Sequence[Atom]) -> set[Eqn]:
        """Lets loops stack narrow rows where their stack is only converted; gives these loops."""
        readers, made, dropped = _readers(self.eqns, results), dict[Eqn, Eqn](), set[Eqn]()
        for eqn in self.eqns:
            loop = Loop.of(eqn) if eqn.primitive.name == "scan" and not self.is_of_pipeline(eqn) else None
            small = {} if loop is None else {s: readers.get(s, []) for s in loop.stacks if s.aval.dtype == "float32"}
            small = {s: found[0] for s, found in small.items() if self.only_converts(found)}
            if loop is not None and small:
                made[eqn] = self.stacking(loop, small)
                dropped.update(small.values())
        self.eqns = [made.get(e, e) for e in self.eqns if e not in dropped]
        return {*made.values()}

    def stacking(self, loop: Loop, small: Mapping[Var, Eqn]) -> Eqn:
        """The loop with the results of these conversions in place of the stacks that they read."""
        inside = _Scope(self.narrow, self.ours)
        for eqn in loop.eqns:
            inside.add(eqn)
        stacks = {
            small[s].outvars[0] if s in small else s: inside.of(row) if s in small else row
            for s, row in loop.stacks.items()
        }
        return replace(loop, stacks=stacks, eqns=inside.eqns).equation()

    def only_converts(self, readers: Sequence[Eqn | None]) -> bool:
        """Whether a value is read by one conversion that was made here, and by nothing else."""
        return len(readers) == 1 and readers[0] is not None and self.is_ours(readers[0])

    def is_ours(self, eqn: Eqn) -> bool:
        return eqn.primitive.name == "convert_element_type" and eqn.outvars[0] in self.ours


def _readers(eqns: Sequence[Eqn], results: Collection[Atom]) -> dict[Var, list[Any]]:
    """The equations that read each value, None for a result."""
    found: dict[Var, list[Eqn | None]] = {}
    for eqn in eqns:
        for v in compat.variables(eqn.invars):
            found.setdefault(v, []).append(eqn)
    for v in compat.variables(results):
        found.setdefault(v, []).append(None)
    return found


def _is_default(precision: Any) -> bool:
    return precision is None or precision in (lax.Precision.DEFAULT, (lax.Precision.DEFAULT,) * 2)
