"""Finds the operations on rows that are sorted by group: around `ragged_dot`, from gathers of rows to scatters of them.

A value is *inside* if one of its dimensions counts the sorted rows. An operation is inside if it works on each row for
itself, sums over the rows, or multiplies them group by group. Rows come inside by a lookup of rows (`x[order]`, or its
transpose), and leave by one. What brings the rows into their order does not matter: whether it is one that can be
exchanged is seen when the program runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from jax.lax import GatherScatterMode

from shardc import compat
from shardc.compat import Eqn, Jaxpr, Var
from shardc.ir.nested import NESTED
from shardc.ir.walk import operation_of
from shardc.sbp.signature import family_of, find_rule, has_rule

Kind: TypeAlias = Literal["each row", "sum of rows", "by group", "sum by group", "look up", "write", "read", "put"]
"""What an operation does: something for each sorted row, or summed over rows, with an operand for each group, or
summed for each group; or brings rows inside (`look up` of outside rows, `write` of outside rows to sorted ones), or
outside (`read` of sorted rows, `put` of sorted rows to outside ones)."""
CROSSING: Final = frozenset(("look up", "write", "read", "put"))
INWARDS: Final = frozenset(("look up", "write"))


@dataclass(frozen=True, slots=True, eq=False)
class Inside:
    """An operation inside a region, or on its border.

    Attributes:
      kind: what it does.
      operands, results: for each the dimension of the sorted rows; None for values outside.
    """

    kind: Kind
    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]


@dataclass(eq=False)
class Region:
    """The operations on rows that are sorted by one array of group sizes.

    Attributes:
      sizes: that array.
      groups, rows: its length, and the number of sorted rows.
      seed: the first product by groups.
      eqns: the operations, by equation.
      dims: the dimension of the sorted rows of values that are made inside.
      weights: operands by group, and the dimension of the groups.
    """

    sizes: Var
    groups: int
    rows: int
    seed: Eqn
    eqns: dict[Eqn, Inside] = field(default_factory=dict[Eqn, Inside])
    dims: dict[Var, int] = field(default_factory=dict[Var, int])
    weights: list[tuple[Var, int]] = field(default_factory=list[tuple[Var, int]])


def find_regions(jaxpr: Jaxpr) -> Iterator[Region]:
    """The regions of a jaxpr, not those of its bodies, one for each array of group sizes."""
    found: dict[Var, Region] = {}
    for eqn in jaxpr.eqns:
        if (made := _product(eqn)) is not None:
            sizes = eqn.invars[2]
            assert not compat.is_literal(sizes)
            row = made.operands[0]
            assert row is not None
            rows = eqn.invars[0].aval.shape[row]
            region = found.setdefault(sizes, Region(sizes, sizes.aval.shape[0], rows, eqn))
            if rows == region.rows:
                region.eqns[eqn] = made
    for region in found.values():
        _Finder(jaxpr, region).run()
        if any(i.kind in INWARDS for i in region.eqns.values()):
            yield region


def _product(eqn: Eqn) -> Inside | None:
    """A product by groups; None if it is none, or of a form that stays as it is."""
    if eqn.primitive.name != "ragged_dot_general" or eqn.params["group_offset"] is not None:
        return None
    numbers, sizes = eqn.params["ragged_dot_dimension_numbers"], eqn.invars[2]
    (contract, batch), ragged = numbers.dot_dimension_numbers, numbers.lhs_ragged_dimensions[0]
    if batch[0] or len(sizes.aval.shape) > 1 or compat.is_literal(sizes) or not eqn.invars[0].aval.shape[ragged]:
        return None
    if ragged not in contract[0] and numbers.rhs_group_dimensions:
        row = sum(d not in contract[0] for d in range(ragged))
        return Inside("by group", (ragged, None, None), (row,))
    if ragged in contract[0] and not numbers.rhs_group_dimensions:
        other = contract[1][list(contract[0]).index(ragged)]
        return Inside("sum by group", (ragged, other, None), (None,))
    return None


class _Finder:
    """The walk from the products of a region to its borders."""

    def __init__(self, jaxpr: Jaxpr, region: Region) -> None:
        self.region = region
        self.made = {v: e for e in jaxpr.eqns for v in e.outvars}
        self.readers: dict[Var, list[Eqn]] = {}
        for eqn in jaxpr.eqns:
            for v in dict.fromkeys(compat.variables(eqn.invars)):
                self.readers.setdefault(v, []).append(eqn)
        self.pending: list[Var] = []
        self.asked: set[tuple[Var, int]] = set()

    def run(self) -> None:
        for eqn, inside in list(self.region.eqns.items()):
            if inside.kind == "by group" and not compat.is_literal(w := eqn.invars[1]):
                group = eqn.params["ragged_dot_dimension_numbers"].rhs_group_dimensions[0]
                self.region.weights.append((w, group))
            self.enter(eqn, inside)
        while self.pending:
            v = self.pending.pop()
            for eqn in self.readers.get(v, ()):
                if eqn not in self.region.eqns and (found := self.reader(eqn)) is not None:
                    self.enter(eqn, found)

    def enter(self, eqn: Eqn, inside: Inside) -> None:
        """Adds an operation, and those that its operands inside come from."""
        self.region.eqns[eqn] = inside
        for v, dim in zip(eqn.outvars, inside.results, strict=True):
            if dim is not None:
                self.region.dims[v] = dim
                self.pending.append(v)
        for a, dim in zip(eqn.invars, inside.operands, strict=True):
            if dim is not None and not compat.is_literal(a):
                self.ask(a, dim)

    def ask(self, v: Var, dim: int) -> None:
        """Adds the operation that makes a value that is read inside, if it can be done there. Values with one number a
        row are read by position: every device knows them all."""
        eqn = self.made.get(v)
        if v in self.region.dims or eqn is None or eqn in self.region.eqns or (v, dim) in self.asked:
            return
        self.asked.add((v, dim))
        if compat.size_of(v.aval) == self.region.rows:
            return
        found = self.inwards(eqn) if dim == 0 else None
        if found is None:
            found = self.each_row(eqn, eqn.outvars.index(v) + len(eqn.invars), dim)
        if found is not None:
            self.enter(eqn, found)

    def inwards(self, eqn: Eqn) -> Inside | None:
        """A lookup of rows outside for each sorted row, or a write of rows to sorted ones."""
        alone = len(eqn.invars) > 1 and len(eqn.invars[1].aval.shape) == 2
        if _reads_rows(eqn) and alone and eqn.invars[0].aval.shape[0] > self.region.groups:
            return Inside("look up", (None, None), (0,))
        if _writes_rows(eqn) and eqn.primitive.name == "scatter-add":
            return Inside("write", (0, None, None), (0,))
        return None

    def reader(self, eqn: Eqn) -> Inside | None:
        """An operation that reads a value inside."""
        dims, first = self.region.dims, eqn.invars[0]
        if _reads_rows(eqn) and first in dims:
            return Inside("read", (0, None), (None,)) if dims[first] == 0 and eqn.invars[1] not in dims else None
        if _writes_rows(eqn) and (updates := eqn.invars[2]) in dims and first not in dims:
            alone = len(eqn.invars[1].aval.shape) == 2 and dims[updates] == 0
            if alone and first.aval.shape[0] > self.region.groups and eqn.invars[1] not in dims:
                return Inside("put", (None, None, 0), (None,))
        for n, a in enumerate(eqn.invars):
            if not compat.is_literal(a) and a in dims:
                return self.each_row(eqn, n, dims[a])
        return None

    def each_row(self, eqn: Eqn, port: int, dim: int) -> Inside | None:
        """An operation on each row for itself, or a sum over rows; `dim` of `port` counts them."""
        name = eqn.primitive.name
        if not has_rule(name) or name in NESTED or eqn.effects or name == "ragged_dot_general":
            return None
        op = operation_of(eqn)
        rule = find_rule(op)
        ports = (*rule.operands, *rule.results)
        factor = ports[port][dim]
        if factor is None or factor in rule.granule or factor in rule.crossing:
            return None
        if family_of(name) in ("gather", "scatter") and factor not in rule.operands[1]:
            return None  # each index may address any row
        if family_of(name) == "random":
            return None
        at = [fs.index(factor) if factor in fs else None for fs in ports]
        operands, results = tuple(at[: len(eqn.invars)]), tuple(at[len(eqn.invars) :])
        if any(a in self.region.dims and self.region.dims[a] != d for a, d in self._variables(eqn, operands)):
            return None
        if all(d is None for d in operands) and name != "broadcast_in_dim":
            return None  # such as iota: it counts rows
        if None not in results:
            return Inside("each row", operands, results)
        sums = rule.reduced.get(factor) == "sum" and all(d is None for d in results)
        return Inside("sum of rows", operands, results) if sums else None

    @staticmethod
    def _variables(eqn: Eqn, dims: Sequence[int | None]) -> Iterator[tuple[Var, int | None]]:
        for a, d in zip(eqn.invars, dims, strict=True):
            if not compat.is_literal(a):
                yield a, d


def _reads_rows(eqn: Eqn) -> bool:
    """Whether it is `x[i]` of whole rows, one for each index."""
    if eqn.primitive.name != "gather" or compat.is_literal(eqn.invars[0]) or compat.is_literal(eqn.invars[1]):
        return False
    numbers, x, i = eqn.params["dimension_numbers"], eqn.invars[0].aval, eqn.invars[1].aval
    return (
        bool(compat.size_of(i))
        and tuple(numbers.start_index_map) == tuple(numbers.collapsed_slice_dims) == (0,)
        and not numbers.operand_batching_dims
        and tuple(numbers.offset_dims) == _after(i, x)
        and tuple(eqn.params["slice_sizes"]) == (1, *x.shape[1:])
        and eqn.params["mode"] != GatherScatterMode.ONE_HOT
    )


def _writes_rows(eqn: Eqn) -> bool:
    """Whether it is `x.at[i].add(rows)` or `.set(rows)` of whole rows, one for each index."""
    if eqn.primitive.name not in ("scatter", "scatter-add") or any(map(compat.is_literal, eqn.invars[1:])):
        return False
    numbers, x, i, u = eqn.params["dimension_numbers"], *(a.aval for a in eqn.invars)
    return (
        bool(compat.size_of(i))
        and tuple(numbers.scatter_dims_to_operand_dims) == tuple(numbers.inserted_window_dims) == (0,)
        and not numbers.operand_batching_dims
        and tuple(numbers.update_window_dims) == (after := _after(i, x))
        and tuple(u.shape[d] for d in after) == x.shape[1:]
    )


def _after(index: Any, rows: Any) -> tuple[int, ...]:
    """The dimensions of rows behind those of their index."""
    first = len(index.shape) - 1
    return tuple(range(first, first + len(rows.shape) - 1))
