"""Signatures: the legal combinations of operand and result sbps of an operation on one mesh axis.

A rule describes its operation by *factors*, the named dimensions of an einsum (Shardy and TOAST use the same device).
A factor that stands in operands and results may be split: S in, S out. A factor that is reduced away may be split too
and leaves a partial value. Linearity and monotonicity give the signatures with partial operands. All-B is always legal.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, Protocol, TypeAlias, TypeVar

import jax
import numpy as np
from jax import lax

from shardc.errors import PlacementError
from shardc.sbp.placement import (
    REDUCE_OPS,
    SBP,
    AxisSizes,
    B,
    P,
    Placement,
    ReduceOp,
    S,
    extents,
    local_extent,
    local_shape,
)

Factors: TypeAlias = tuple[str | None, ...]
"""The factor of each dimension of one operand or result; None is never split."""
Partials: TypeAlias = tuple[tuple[ReduceOp | None, ...], ReduceOp]
"""Operands that are partial (None: B), and the partial op of all results."""
Ranges: TypeAlias = tuple[tuple[int, int, int], ...]
"""(at, start, stop) of ranges of an array that stand in another one from `at` on; there they do not overlap."""
Joined: TypeAlias = Sequence[tuple[int, Ranges] | None]
"""For dimensions, how many elements the ranges are joined to; None: the dimension is as it is."""
Neutral: TypeAlias = Literal["zero", "one", "lowest", "highest"]


class Aval(Protocol):
    """Shape and dtype: a ShapedArray, a ShapeDtypeStruct or an array."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Operation:
    """An equation as a rule sees it: one primitive, logical shapes, parameters."""

    name: str
    operands: tuple[Aval, ...]
    results: tuple[Aval, ...]
    params: Mapping[str, Any]


@dataclass(frozen=True)
class Setting:
    """An operation with the placements around it.

    Attributes:
      op: the operation, with logical shapes.
      operands, results: the placements, one for each operand and result.
      sizes: the mesh.
    """

    op: Operation
    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    sizes: AxisSizes

    def operand_shape(self, i: int) -> tuple[int, ...]:
        """Local shape of operand `i`, padding included."""
        return local_shape(self.op.operands[i].shape, self.operands[i], self.sizes)

    def result_shape(self, i: int = 0) -> tuple[int, ...]:
        """Local shape of result `i`, padding included."""
        return local_shape(self.op.results[i].shape, self.results[i], self.sizes)

    def port(self, i: int) -> tuple[Aval, Placement]:
        """The type and placement of port `i`: operands are counted first, then results."""
        avals, placements = (*self.op.operands, *self.op.results), (*self.operands, *self.results)
        return avals[i], placements[i]

    def extents(self, port: int, dim: int) -> tuple[tuple[int, int], ...]:
        """Offset and number of valid elements of each piece of a dimension, in the order of its axes."""
        return extents(*self.cut(port, dim))

    def cut(self, port: int, dim: int) -> tuple[int, tuple[int, ...]]:
        """Size of a dimension, and the sizes of the axes that split it, in their order."""
        aval, placement = self.port(port)
        return aval.shape[dim], tuple(self.sizes[a] for a in placement.axes_of(dim))


@dataclass(frozen=True)
class Site(Setting):
    """The place where a local piece runs: its setting and the coordinates of the device.

    Attributes:
      index: coordinate of this device along an axis; a traced integer on a mesh, a plain one in a proof.
      bind: runs the operation's own primitive on local operands, with some of its parameters replaced.
      wire: the collectives between the pieces of one operation.
      blank: makes an array, by its shape and type, that is written as a whole before it is read.
    """

    index: Callable[[str], Any]
    bind: Callable[..., list[Any]]
    wire: Wire
    blank: Callable[[Sequence[int], Any], Any] = lax.empty

    def operand_extent(self, i: int, dim: int) -> tuple[Any, Any]:
        """Offset of this device's piece of dimension `dim` of operand `i`, and how many of its elements are valid."""
        return self._extent(self.op.operands[i].shape[dim], self.operands[i].axes_of(dim))

    def result_extent(self, i: int, dim: int) -> tuple[Any, Any]:
        """Offset of this device's piece of dimension `dim` of result `i`, and how many of its elements are valid."""
        return self._extent(self.op.results[i].shape[dim], self.results[i].axes_of(dim))

    def _extent(self, size: int, axes: Sequence[str]) -> tuple[Any, Any]:
        return extent(size, axes, self.sizes, self.index)

    def linear_index(self, axes: Sequence[str]) -> Any:
        """This device's number along `axes`, the last counting fastest."""
        at: Any = 0
        for axis in axes:
            at = at * self.sizes[axis] + self.index(axis)
        return at


class Wire(Protocol):
    """The collectives that a local piece may use; its rule says when (`windows`, `exchanged`)."""

    def all_gather(self, x: Any, axes: tuple[str, ...]) -> Any:
        """The `x` of all devices along `axes`, stacked in a new leading dimension."""
        ...

    def all_to_all(self, x: Any, axes: tuple[str, ...]) -> Any:
        """Row i of `x` on every device along `axes`, stacked in their order, on device i."""
        ...

    def permute(self, x: Any, axes: tuple[str, ...], pairs: Sequence[tuple[int, int]]) -> Any:
        """The `x` of the device that is paired with this one as (source, target); zeros if none is."""
        ...


def extent(size: int, axes: Sequence[str], sizes: AxisSizes, index: Callable[[str], Any]) -> tuple[Any, Any]:
    """`local_extent` for coordinates that may be traced."""
    coords = {a: index(a) for a in axes}
    if all(isinstance(c, int) for c in coords.values()):
        return local_extent(size, axes, sizes, coords)
    offset, valid, block = 0, size, size
    for axis in axes:
        block = -(-block // sizes[axis])
        start = coords[axis] * block
        offset, valid = offset + start, jax.numpy.clip(valid - start, 0, block)
    return offset, valid


Local: TypeAlias = Callable[..., Sequence[Any]]
"""`local(site, *operands) -> results`: what one device computes on its pieces."""
Exchange: TypeAlias = Callable[[Setting], Sequence[Aval]]
"""The arrays that each device sends to the others along the axes of a split factor: shape and dtype of each."""


@dataclass(frozen=True, slots=True)
class Turned:
    """An array of which each device sends every other one a part of this shape: an all-to-all instead of a gather."""

    shape: tuple[int, ...]
    dtype: Any


@dataclass(frozen=True, slots=True)
class Passed:
    """An array that each device sends to one other: a permute instead of a gather. `beside`: it goes on while the
    device computes with the one before (`Rule.around`)."""

    shape: tuple[int, ...]
    dtype: Any
    beside: bool = False


def bind_same(site: Site, *operands: Any) -> Sequence[Any]:
    """The default local piece: the primitive itself, parameters unchanged."""
    return site.bind(*operands)


@dataclass(frozen=True, slots=True)
class OperandWindow:
    """The elements of a split dimension that a device reads, whichever device holds them. Element r of the factor at
    port `by` reads r·step + start ... r·step + start + width - 1 of an operand's dimension. A window has the order of
    the dimension, even if `step` is negative.

    Attributes:
      operand: number of the operand that is read, in its dimension of `factor`.
      factor: the split factor.
      by: the port whose piece determines what is read, as `Setting.port` counts.
      start, step, width: as above.
      dilation: positions are counted with dilation - 1 elements of `fill` between every two elements of the dimension.
      fill: the value outside of the dimension and between its elements: a neutral element, or the number of a scalar
        operand.
      ranges: (at, start, stop) of ranges that make up the dimension that is read, without dilation: its element r of at
        ... at + stop - start - 1 is element r - at + start of the operand, and other elements are `fill`.
    """

    operand: int
    factor: str
    by: int
    start: int = 0
    step: int = 1
    width: int = 1
    dilation: int = 1
    fill: Neutral | int = "zero"
    ranges: Ranges = ()


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of a product: `local` computes one from pieces of the operands; they are added up in `dtype`."""

    dtype: Any
    local: Local


@dataclass(frozen=True, slots=True)
class Run:
    """Dimensions of the operand, and of the result, of a reshape that have the same elements in the same order."""

    operand: tuple[int, ...]
    result: tuple[int, ...]


@dataclass(frozen=True)
class Rule:
    """How one operation may be placed.

    Attributes:
      operands, results: factors of each operand's and result's dimensions.
      reduced: factors that occur in operands only, and the partial op that a split of them leaves. None: the pieces
        exchange arrays (`exchanged`) and compute the whole result, which leaves B.
      partials: the legal partial combinations, by linearity (sum) or monotonicity (max, min).
      neutral: for an operand, the value that its padding must hold before the local piece when a *reduced* factor is
        split unevenly; operands that are not listed need none.
      granule: factors whose split must fall on a unit: the devices that split them must divide this number
        (reshapes; groups of a convolution).
      runs: of a reshape, the runs of more than one dimension. Several axes may cut one of them in a chain
        (`shardc.passes.place.chains`).
      local: the computation of a device on its pieces.
      windows: operands of which a device reads more elements than it holds, or other ones, when their factor is split.
      exchanged: factors whose split makes the pieces exchange arrays, and these arrays.
      around: factors whose pieces may go around the devices that split another factor, and that other one. The same
        axes split both, and the operation computes and sends as if the other one were split alone (`exchanged`).
      across: the computation of a device if a factor of `windows` or `exchanged` is split. It gets windows in place of
        pieces: in their dimension (n-1)·|step| + width elements, n being the local size at port `by`.
      held, moved: the bytes that a device holds in `across` besides its pieces, and those that it reads and writes
        besides them; None: few.
      terms: for a product of two operands, how it is computed in terms; None: it has no ring (`shardc.sbp.ring`).
      flops: floating-point operations of the whole operation; 0 if it is bound by memory.
      passes: how often it reads and writes the memory of its operands and results. 0: once if it has `flops`, else it
        is light: bound by memory, and fused with other light operations.
      margin: for a split factor the work of each device besides its own share, as a number of elements of the factor.
      kind: `elementwise`, `special` (an elementwise function that vector units compute by many operations),
        `reduction`, `thin` (a product), `convolution`, `attention` or none: machines have times for these
        (`element_seconds`, `Topology.shares`, `starts`).
    """

    operands: tuple[Factors, ...]
    results: tuple[Factors, ...]
    reduced: Mapping[str, ReduceOp | None] = field(default_factory=dict[str, "ReduceOp | None"])
    partials: tuple[Partials, ...] = ()
    neutral: Mapping[int, Neutral] = field(default_factory=dict[int, Neutral])
    granule: Mapping[str, int] = field(default_factory=dict[str, int])
    runs: tuple[Run, ...] = ()
    local: Local = bind_same
    windows: tuple[OperandWindow, ...] = ()
    exchanged: Mapping[str, Exchange] = field(default_factory=dict[str, Exchange])
    around: Mapping[str, str] = field(default_factory=dict[str, str])
    across: Local = bind_same
    held: Callable[[Setting], int] | None = None
    moved: Callable[[Setting], int] | None = None
    terms: Terms | None = None
    flops: float = 0.0
    passes: float = 0.0
    margin: Mapping[str, int] = field(default_factory=dict[str, int])
    kind: str = ""

    @property
    def is_heavy(self) -> bool:
        """Whether it runs by itself and has a time of its own, not as part of a chain of fused operations."""
        return self.flops > 0 or self.passes > 0

    def factors(self) -> tuple[str, ...]:
        """Factors that may be split alone, in order of appearance."""
        kept = {f for fs in self.results for f in fs if f} - self.around.keys()
        seen = dict.fromkeys(f for fs in (*self.operands, *self.results) for f in fs if f)
        return tuple(f for f in seen if f in kept or f in self.reduced)

    @property
    def crossing(self) -> frozenset[str]:
        """Factors whose split makes the pieces of one operation communicate."""
        return frozenset(w.factor for w in self.windows) | self.exchanged.keys()

    def crossed(self, setting: Setting) -> dict[str, tuple[str, ...]]:
        """The split factors among `crossing`, each with the axes that split it."""
        found: dict[str, tuple[str, ...]] = {}
        if self.windows or self.exchanged:
            for i, factors in enumerate((*self.operands, *self.results)):
                for dim, axes in setting.port(i)[1].splits.items():
                    if (f := factors[dim]) and f in self.crossing:
                        found[f] = axes
        return found

    def sizes(self, op: Operation) -> dict[str, int]:
        """Size of each factor, from the dimensions of the operation."""
        pairs = zip((*self.operands, *self.results), (*op.operands, *op.results), strict=True)
        return {f: n for factors, aval in pairs for f, n in zip(factors, aval.shape, strict=True) if f}


def shared_by(rule: Rule, op: Operation, counts: Mapping[str, int]) -> float:
    """How many devices share the work if `counts` devices split each factor: 8 rows on 32 devices keep 8 busy."""
    sizes = rule.sizes(op)
    return math.prod(sizes[f] / (-(-sizes[f] // n) + rule.margin.get(f, 0)) for f, n in counts.items() if sizes[f])


RuleFn: TypeAlias = Callable[[Operation], Rule | None]
"""The rule of a primitive for one operation; None if this case has no split (all-B remains)."""

_Fn = TypeVar("_Fn", bound=RuleFn)
_RULES: Final[dict[str, RuleFn]] = {}


def rule(*names: str) -> Callable[[_Fn], _Fn]:
    """Register a function as the rule of the primitives `names`."""

    def register(fn: _Fn) -> _Fn:
        for name in names:
            assert name not in _RULES, name
            _RULES[name] = fn
        return fn

    return register


def has_rule(name: str) -> bool:
    return name in _RULES


def family_of(name: str) -> str:
    """The file of a primitive's rule, as `elementwise`; empty if it has none."""
    return _RULES[name].__module__.rpartition(".")[2] if name in _RULES else ""


def rule_names() -> tuple[str, ...]:
    """All primitives with a rule, sorted."""
    return tuple(sorted(_RULES))


def rules() -> dict[RuleFn, list[str]]:
    """Each rule with its primitives."""
    found: dict[RuleFn, list[str]] = {}
    for name, fn in _RULES.items():
        found.setdefault(fn, []).append(name)
    return found


def gathered(op: Operation) -> Rule:
    """The rule of an operation that has none: everything B."""
    return Rule(tuple((None,) * len(a.shape) for a in op.operands), tuple((None,) * len(a.shape) for a in op.results))


def find_rule(op: Operation) -> Rule:
    """The rule of an operation. If the table has none: `gathered`, with one pass through memory."""
    fn = _RULES.get(op.name)
    if fn is None:
        return replace(gathered(op), passes=1.0)
    return fn(op) or gathered(op)


def dims(rank: int, prefix: str = "d") -> tuple[str, ...]:
    """Factor names of `rank` dimensions: `d0`, `d1`, ..."""
    return tuple(f"{prefix}{i}" for i in range(rank))


def passes(
    count: int, group: Sequence[int], *more: Sequence[int], ops: Sequence[ReduceOp] = REDUCE_OPS
) -> tuple[Partials, ...]:
    """Partials of an operation of `count` operands that commutes with `ops` in each of the groups of operands.

    An operation that only moves elements commutes with all three.
    """
    return tuple((tuple(op if i in g else None for i in range(count)), op) for g in (group, *more) for op in ops)


def linear(count: int, *groups: Sequence[int]) -> tuple[Partials, ...]:
    """Partials of an operation of `count` operands that is jointly linear in each of the groups of operands.

    Examples:
      >>> linear(2, (0,), (1,))  # a product: linear in each
      ((('sum', None), 'sum'), ((None, 'sum'), 'sum'))
    """
    return tuple(p for g in groups for p in passes(count, g, ops=("sum",)))


def neutral_value(kind: Neutral, dtype: Any) -> Any:
    """The element of `dtype` that leaves a sum (zero), product (one), max (lowest) or min (highest) unchanged."""
    if kind in ("zero", "one"):
        return np.asarray(kind == "one", dtype)
    low = kind == "lowest"
    if jax.numpy.issubdtype(dtype, np.bool_):
        return np.asarray(not low)
    if jax.numpy.issubdtype(dtype, np.integer):
        info = jax.numpy.iinfo(dtype)
        return np.asarray(info.min if low else info.max, dtype)
    infinity = np.asarray(-np.inf if low else np.inf, dtype)
    if np.isinf(infinity.astype(np.float64)):
        return infinity
    info = jax.numpy.finfo(dtype)  # some float8 types have no infinity
    return np.asarray(info.min if low else info.max, dtype)


@dataclass(frozen=True, slots=True)
class Signature:
    """One legal combination on one axis. `split` names the split factor, if there is one: the devices share its work.
    `around` names the factor whose pieces go around (`shardc.sbp.ring`, `Rule.around`)."""

    operands: tuple[SBP, ...]
    results: tuple[SBP, ...]
    split: str | None = None
    around: str | None = None

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.operands))} -> {', '.join(map(str, self.results))}"


def is_extended(dtype: Any) -> bool:
    """Whether the elements are PRNG keys, and no numbers."""
    return bool(jax.numpy.issubdtype(dtype, jax.dtypes.extended))


def may_be_partial(aval: Aval, op: ReduceOp) -> bool:
    """Whether values like this one can be P(op)."""
    if is_extended(aval.dtype):
        return False
    dtype = np.dtype(aval.dtype)
    return dtype != np.bool_ if op == "sum" else dtype.kind != "c"


def signatures(rule: Rule, op: Operation) -> tuple[Signature, ...]:
    """All legal one-axis signatures but those of rings (`shardc.sbp.ring`), all-B first. Signatures of several axes are
    products of these; on axes that split a factor of `Rule.around`, pieces go around all of them or none."""
    found = [Signature((B,) * len(rule.operands), (B,) * len(rule.results))]
    for factor, around in (*((f, None) for f in rule.factors()), *((f, a) for a, f in rule.around.items())):
        operands = tuple(_sbp_of(fs, factor, around) for fs in rule.operands)
        left = rule.reduced.get(factor)
        rest = P(left) if left else B
        results = tuple(_sbp_of(fs, factor, around, rest) for fs in rule.results)
        found.append(Signature(operands, results, factor, around))
    for ops, result in rule.partials:
        found.append(Signature(tuple(P(o) if o else B for o in ops), (P(result),) * len(rule.results)))
    return tuple(s for s in found if _legal(s, op))


def _sbp_of(factors: Factors, factor: str, around: str | None, rest: SBP = B) -> SBP:
    return next((S(factors.index(f)) for f in (factor, around) if f and f in factors), rest)


def _legal(s: Signature, op: Operation) -> bool:
    pairs = (*zip(s.operands, op.operands, strict=True), *zip(s.results, op.results, strict=True))
    return all(may_be_partial(aval, sbp.op) for sbp, aval in pairs if isinstance(sbp, P))


def parse_factors(text: str) -> tuple[tuple[Factors, ...], tuple[Factors, ...]]:
    """Operand and result factors from `"b s d, d f -> b s f"`; `_` is a dimension that is never split.

    Examples:
      >>> parse_factors("b s d, d f -> b s f")
      ((('b', 's', 'd'), ('d', 'f')), (('b', 's', 'f'),))
    """
    left, arrow, right = text.partition("->")
    words = re.compile(r"[A-Za-z_]\w*")
    sides = [[part.split() for part in side.split(",")] for side in (left, right)]
    if not left.strip():
        sides[0] = []  # no operand; an empty right side is one scalar result
    bad = [w for side in sides for part in side for w in part if not words.fullmatch(w)]
    if not arrow or bad:
        raise PlacementError(
            f"{text!r} is not in factor notation{f': {bad[0]!r} is no name' if bad else ''}; write "
            '"b s d, d f -> b s f", one group of names for each operand, an arrow, one for each result.'
        )
    operands, results = (tuple(tuple(None if w == "_" else w for w in part) for part in side) for side in sides)
    return operands, results
