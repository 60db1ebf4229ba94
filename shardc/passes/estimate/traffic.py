"""Groups of light operations that XLA fuses, and the bytes that each group reads and writes: less than the sum over
operations.

A light operation is fused into its readers. So a group of them writes only what something else reads: a heavy
operation, a collective, a loop, the caller; and what a scatter of it, a kernel of its own, updates. It reads only what
no light operation made. All light operations together read such a value once, in equal shares. A sum of a product and
of what a loop carries is part of the product; so is the conversion of what is in memory to the type that the machine
multiplies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr, Var
from shardc.ir.nested import REMAT, bodies_of
from shardc.ir.walk import ADDITIONS, reads_of
from shardc.passes.estimate.backend import PRODUCTS

PARTLY_READ = frozenset(("gather", "slice", "dynamic_slice", "box"))
"""Operations that read at most as many bytes of their first operand as they return."""
UPDATED_OPERAND = {"dynamic_update_slice": 1, "scatter": 2, "scatter-add": 2}
"""Operations that update a part of their first operand in place, and the number of the operand that they write
there."""
SCATTERS = frozenset(("scatter", "scatter-add"))
"""Operations that are never fused into their readers."""


@dataclass(frozen=True, slots=True)
class FusedGroup:
    """Light equations that read results of each other, and the bytes that they read and write together."""

    eqns: Sequence[Eqn]
    bytes: float


def accumulations(jaxpr: Jaxpr, over: Set[str] | None) -> dict[Eqn, list[Eqn]]:
    """The products of a jaxpr and of its bodies that only add to an input of a body, which gives a result of it, such
    as gradients of weights that a loop adds up. By product, the sum and what rearranges the product before it: the
    compiler makes them part of the product. `over`: `Backend.accumulates_over`."""
    if over is None:
        return {}
    found, home = dict[Eqn, list[Eqn]](), _Home(jaxpr)
    for eqn in jaxpr.eqns:
        for body in bodies_of(eqn):
            found |= accumulations(body, over)
        if eqn.primitive.name not in ADDITIONS or eqn.outvars[0] not in home.results or home.reads[eqn.outvars[0]] != 1:
            continue
        for old, term in (eqn.invars, eqn.invars[::-1]):
            parts = [eqn]
            known = not compat.is_literal(old) and old in home.inputs
            if known and (product := _product_of(term, home, parts, over)) is not None:
                found[product] = parts
    return found


class _Home:
    """The values of one jaxpr: who makes them, and how often they are read."""

    def __init__(self, jaxpr: Jaxpr) -> None:
        self.jaxpr, self.inputs, self.results = jaxpr, set(jaxpr.invars), set(compat.variables(jaxpr.outvars))

    @cached_property
    def reads(self) -> Mapping[Var, int]:
        return reads_of(self.jaxpr.eqns, self.jaxpr.outvars)

    @cached_property
    def made(self) -> Mapping[Var, Eqn]:
        return {v: e for e in self.jaxpr.eqns for v in e.outvars}


def _product_of(term: Atom, home: _Home, parts: list[Eqn], over: Set[str]) -> Eqn | None:
    """The product that nothing but `term` is made of; None if there is none. `parts` gets what rearranges it."""
    while not compat.is_literal(term) and home.reads[term] == 1 and (maker := home.made.get(term)) is not None:
        if maker.primitive.name in PRODUCTS:
            return maker
        if maker.primitive.name in REMAT:
            (body,) = bodies_of(maker)
            term, home = body.outvars[maker.outvars.index(term)], _Home(body)
        elif maker.primitive.name in over:
            parts.append(maker)
            term = maker.invars[0]
        else:
            break
    return None


def joined(numbers: int, pairs: Iterable[tuple[int, int]]) -> list[int]:
    """For each of so many numbers the least number that pairs join it with."""
    first = list(range(numbers))

    def find(n: int) -> int:
        while first[n] != n:
            first[n] = n = first[first[n]]
        return n

    for a, b in pairs:
        a, b = find(a), find(b)
        first[max(a, b)] = min(a, b)
    return [find(n) for n in range(numbers)]


def narrows(eqn: Eqn, narrow: Any) -> bool:
    """Whether an equation converts float32 to `narrow`, the type in which the machine multiplies; None: it has none."""
    if narrow is None or eqn.primitive.name != "convert_element_type":
        return False
    return eqn.params["new_dtype"] == narrow and eqn.invars[0].aval.dtype == "float32"


def in_products(jaxpr: Jaxpr, narrow: Any) -> set[Eqn]:
    """The conversions to `narrow` that only products of a jaxpr read."""
    made = {e.outvars[0]: e for e in jaxpr.eqns if narrows(e, narrow)}
    if made:
        others = {v for e in jaxpr.eqns if e.primitive.name not in PRODUCTS for v in compat.variables(e.invars)}
        others.update(compat.variables(jaxpr.outvars))
        made = {v: e for v, e in made.items() if v not in others}
    return {*made.values()}


def fused_groups(
    jaxpr: Jaxpr, light: Set[Eqn], same: Set[Eqn], held: Mapping[Var, int], narrowing: Set[Eqn] = frozenset()
) -> list[FusedGroup]:
    """The groups of light operations of a jaxpr with the bytes of one execution, without those in nested jaxprs.

    Args:
      light: the light equations.
      same: those light equations whose result is their operand.
      held: bytes of a value on a device.
      narrowing: conversions that products make as they read, if the operand is in memory (`in_products`).
    """
    root: dict[Var, Var] = {}
    written: dict[Var, tuple[float, int]] = {}  # results of light operations: their bytes, and the number of the maker
    read: dict[Var, int] = {}
    readers: dict[Var, list[int]] = {}
    wanted: set[Var] = set()
    fused: list[Eqn] = []
    pairs: list[tuple[int, int]] = []

    for eqn in jaxpr.eqns:
        operands = [root.get(a, a) for a in eqn.invars if not compat.is_literal(a)]
        if eqn not in light:
            wanted.update([v for v in operands if v in written])
            continue
        if operands and (eqn in same or (eqn in narrowing and operands[0] not in written)):
            root[eqn.outvars[0]] = operands[0]
            continue
        name, number = eqn.primitive.name, len(fused)
        fused.append(eqn)
        pairs += [(number, written[v][1]) for v in operands if v in written]
        if name in PARTLY_READ and operands and operands[0] not in written:
            v = operands[0]
            read[v] = max(read.get(v, 0), min(held[v], sum(held[out] for out in eqn.outvars)))
            readers.setdefault(v, []).append(number)
        for v in operands[1:] if name in PARTLY_READ or name in UPDATED_OPERAND else operands:
            if v not in written:
                read[v] = held[v]
                readers.setdefault(v, []).append(number)
        put = eqn.invars[UPDATED_OPERAND[name]] if name in UPDATED_OPERAND else None
        for v in eqn.outvars:
            written[v] = held[v if put is None or compat.is_literal(put) else put], number
        if name in SCATTERS:
            wanted.update(eqn.outvars)
    results = [root.get(a, a) for a in jaxpr.outvars if not compat.is_literal(a)]
    wanted.update([v for v in results if v in written])
    shares = [written[v] for v in wanted]
    shares += [(size / len(readers[v]), number) for v, size in read.items() for number in readers[v]]
    return _grouped(fused, pairs, shares)


def _grouped(
    fused: Sequence[Eqn], pairs: Iterable[tuple[int, int]], shares: Iterable[tuple[float, int]]
) -> list[FusedGroup]:
    """The groups of equations that `pairs` of their numbers join. `shares`: bytes, and the number of an equation."""
    group, moved = joined(len(fused), pairs), [0.0] * len(fused)
    for size, number in shares:
        moved[group[number]] += size
    members: dict[int, list[Eqn]] = {}
    for number, eqn in enumerate(fused):
        members.setdefault(group[number], []).append(eqn)
    return [FusedGroup(eqns, moved[number]) for number, eqns in members.items()]
