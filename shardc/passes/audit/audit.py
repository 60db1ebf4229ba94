"""Compares the collectives of a plan with those of the compiled program.

    planned collectives, optimized HLO --> Audit

A surprise is a collective of the HLO that the plan does not pay for. XLA may do less than planned: it merges equal
gathers and drops results that nobody reads. It may also divide the work differently: its combiner joins tensors, loops
are unrolled, invariants leave them. So tensors and executions are compared, not instructions, and the rest is compared
by its total bytes.

An operation of which the plan does not know what it moves explains what is found at its line.

The iterations of a `while` are not known: its collectives are compared for one iteration. If XLA knows the number,
collectives are counted for all iterations, and those beyond the plan are reported as `iterated`.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import reduce
from typing import Final, Generic, TypeAlias, TypeVar

from shardc.ir.collective import Collective
from shardc.machine.overlaps import options_text
from shardc.passes.audit.hlo import HloCollective, Tensor, parse_collectives
from shardc.passes.audit.hlo_groups import axes_of_groups, crossed_axes
from shardc.passes.audit.hlo_overlap import FoundOverlap
from shardc.passes.audit.hlo_text import itemsize
from shardc.sbp.cost import COLLECTIVES


@dataclass(frozen=True, slots=True)
class FoundCollective:
    """One tensor of a collective in the HLO, in the terms of a planned Collective.

    Attributes:
      kind: a planned kind, or an HLO opcode that shardc never emits.
      axes: the mesh axes that the device groups follow; None if they follow none; empty for a permute.
      crosses: the mesh axes along which devices of a group, or the ends of a permute, differ.
      bytes: sent per device, over all executions in one call; a promoted tensor counts as it is on the wire.
      count: executions in one call; 1 if a loop's trip count is not known.
      value, source, name: dtype and shape, line of user code, HLO instruction.
    """

    kind: str
    axes: tuple[str, ...] | None
    bytes: int
    count: int
    value: str
    source: str
    name: str
    crosses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Audit:
    """The result of an audit. It is ok if there are no surprises; printed, it says so in a line, or lists them.

    Attributes:
      planned, found: all that was compared.
      surprises: collectives that were not planned, or run more often than planned.
      compiler_added: on TPU and GPU, collectives that the backend's own rewrites of planned ones add.
      missing: planned collectives that XLA merged or dropped.
      iterated: executions in iterations of a `while` beyond the planned one.
      where: the process whose programs these are, if others run other ones: `process 1`.
      crossed: bytes that the calls so far have sent from mesh to mesh, of a pipeline's stages.
      planned_crossed: bytes that these calls send by the plan.
      overlaps: on TPU and GPU, what the plan counts on to be hidden, and what the schedule of the program hides of it.
      options: options that XLA was given for this program.
      refused: options that the plan counts on, and that this XLA refuses.
      links: the measured bytes a second and latency in seconds of the link to each process that values go to.
    """

    planned: tuple[Collective, ...]
    found: tuple[FoundCollective, ...]
    surprises: tuple[FoundCollective, ...]
    compiler_added: tuple[FoundCollective, ...]
    missing: tuple[Collective, ...]
    iterated: tuple[FoundCollective, ...] = ()
    where: str = ""
    crossed: int = 0
    planned_crossed: int = 0
    overlaps: tuple[FoundOverlap, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict[str, str])
    refused: Mapping[str, str] = field(default_factory=dict[str, str])
    links: Mapping[int, tuple[float, float]] = field(default_factory=dict, compare=False)

    @property
    def ok(self) -> bool:
        """Whether the compiled program sends nothing that is not in the plan."""
        return not self.surprises and self.crossed <= self.planned_crossed

    def __str__(self) -> str:
        added = f", {_summary(self.compiler_added)} added by the compiler" if self.compiler_added else ""
        if self.iterated:
            added += f", {_summary(self.iterated)} more in further iterations of `while`"
        if self.crossed or self.planned_crossed:
            plan = "as planned" if self.crossed == self.planned_crossed else f"{_size(self.planned_crossed)} planned"
            added += f"; {_size(self.crossed)} sent from mesh to mesh, {plan}"
        for peer, (rate, latency) in self.links.items():
            added += f"; the link to process {peer} does {rate / 1e9:.2g} GB/s after {1e3 * latency:.2g} ms"
        name = f"audit of {self.where}" if self.where else "audit"
        if self.ok and not self.missing:
            head = f"{name}: planned = found ({_summary(self.planned)}){added}"
        elif self.ok:
            head = f"{name}: found within plan ({_summary(self.planned)}; XLA removed {_summary(self.missing)}){added}"
        else:
            head = f"{name}: {_summary(self.surprises)} not in the plan of {_summary(self.planned)}{added}"
        return "\n".join([head, *(_table(self) if self.surprises else ()), *_overlaps(self), *_options(self)])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def __repr__(self) -> str:
        """The first line of the text."""
        first = str(self).splitlines()[0]
        return f"Audit({first.removeprefix('audit').removeprefix(': ').strip()})"


def audit(
    planned: Sequence[Collective], hlo: str, axes: Mapping[str, int], platform: str = "cpu",
    cuts: Sequence[tuple[str, tuple[str, ...]]] = (),
) -> Audit:  # fmt: skip
    """Compares planned collectives with those of a compiled program.

    Args:
      planned: the plan's collectives.
      hlo: text of the optimized module, `compiled.as_text()`.
      axes: mesh axes and their sizes, in mesh order.
      platform: of the text. On "cpu" nothing may be added; on others the backend's known rewrites may.
      cuts: the axes of the user's mesh that `axes` has sub-axes of, as in `MeshView`.
    """
    exact = platform == "cpu"
    parts, whole = dict(cuts), {a: axis for axis, names in cuts for a in names}
    plans = [_planned_lot(c, axes, parts) for c in planned if c.bytes and c.is_known]
    unknown = {c.source for c in planned if not c.is_known}
    lots: list[_Lot[FoundCollective]] = []
    added: list[FoundCollective] = []
    for op in parse_collectives(hlo):
        for tensor in op.tensors:
            record, padding = _found(op, tensor, axes, exact)
            record = replace(record, crosses=tuple(dict.fromkeys(whole.get(a, a) for a in record.crosses)))
            if op.added and not exact:
                added.append(record)
                continue
            lots.append(_found_lot(record, tensor, padding, op.looped))
            if padding:
                added.append(replace(record, bytes=padding * record.count))
    found = (*(lot.record for lot in lots), *(record for record in added if record.kind == "permute"))

    by_group = _by_group(plans)
    for alike in (True, False):  # loops with loops first: else a loop takes what is planned once behind it
        for fits in _FITS:
            _match(lots, by_group, fits, alike)
    if not exact:
        added += _match_all_reduces(lots, by_group)
    iterated = _match_iterations(lots, by_group, exact)
    _match_totals(lots, by_group, exact)
    return Audit(
        planned=tuple(planned),
        found=found,
        surprises=tuple(_rest(lot) for lot in lots if lot.left and lot.record.source not in unknown),
        compiler_added=tuple(added),
        missing=tuple(_rest(lot) for lot in plans if lot.left),
        iterated=tuple(iterated),
    )


# --- the two sides in one form -------------------------------------------------------------------------------------

_Group: TypeAlias = tuple[str, frozenset[str] | None]
_Record = TypeVar("_Record", Collective, FoundCollective)


@dataclass(slots=True)
class _Lot(Generic[_Record]):
    """A record with its executions that are not matched yet.

    `each` is the bytes of one execution, `dtype` and `width` the element type and its size (None: not known), `looped`
    whether it is planned in a `while`, or found in any loop.
    """

    record: _Record
    group: _Group
    each: Fraction
    dtype: str
    width: Fraction | None
    left: int
    looped: bool
    promoted: bool = False

    @property
    def total(self) -> Fraction:
        return self.each * self.left


_RAGGED: Final = "ragged-all-to-all"
"""The HLO opcode of a planned all-to-all whose bytes depend on data."""
_BROADCAST: Final = "collective-broadcast"
"""The HLO opcode of a planned permute from one device to all."""


def _planned_lot(
    c: Collective, axes: Mapping[str, int], parts: Mapping[str, tuple[str, ...]]
) -> _Lot[Collective]:  # fmt: skip
    each = [a for axis in c.axes for a in parts.get(axis, (axis,)) if axes[a] > 1]
    along = frozenset(each if c.kind != "permute" else ())
    dtype = m[0] if (m := re.match(r"[a-z]+\d+\w*|pred|bool", c.value)) else ""
    width = itemsize(dtype) if dtype else None
    kind = _RAGGED if c.at_most else c.kind
    return _Lot(c, (kind, along), Fraction(int(c.bytes), c.count), dtype, width, c.count // c.trips, c.per_iteration)


def _found_lot(f: FoundCollective, tensor: Tensor, padding: int, looped: bool) -> _Lot[FoundCollective]:
    kind = "permute" if f.kind == _BROADCAST else f.kind
    # Groups that follow no axes match no plan: no planned group is None.
    along = None if f.axes is None or kind not in (*COLLECTIVES, _RAGGED) else frozenset(f.axes)
    group = (kind, frozenset[str]() if kind == "permute" else along)
    each = Fraction(tensor.bytes - padding)
    return _Lot(f, group, each, tensor.dtype, itemsize(tensor.dtype), f.count, looped, tensor.promoted)


def _found(op: HloCollective, tensor: Tensor, axes: Mapping[str, int], exact: bool) -> tuple[FoundCollective, int]:
    along = () if op.kind == "permute" else axes_of_groups(op.groups, axes)
    padding = 0 if exact else tensor.padding
    count = 1 if op.trips is None else op.trips
    value = f"{tensor.dtype}[{','.join(map(str, tensor.shape))}]"
    crosses = crossed_axes(op.groups, axes) if along is None or op.kind == "permute" else along
    sent = (tensor.bytes - padding) * count
    return FoundCollective(op.kind, along, sent, count, value, op.source, op.name, crosses), padding


def _rest(lot: _Lot[_Record]) -> _Record:
    return replace(lot.record, bytes=int(lot.total), count=lot.left)


def _by_group(lots: Iterable[_Lot[Collective]]) -> dict[_Group, list[_Lot[Collective]]]:
    groups: dict[_Group, list[_Lot[Collective]]] = {}
    for lot in lots:
        groups.setdefault(lot.group, []).append(lot)
    return groups


# --- matching ------------------------------------------------------------------------------------------------------


def _close(a: Fraction, b: Fraction) -> bool:
    return abs(a - b) <= 1  # 2(n-1)/n of a few bytes is rounded


def _same(f: _Lot[FoundCollective], p: _Lot[Collective]) -> bool:
    return p.width in (None, f.width) and _close(f.each, p.each)


def _narrowed(f: _Lot[FoundCollective], p: _Lot[Collective]) -> bool:
    """Whether XLA has moved a narrowing conversion before the collective: as many elements, of fewer bytes."""
    if p.width is None or f.width is None or f.width >= p.width:
        return False
    return _close(f.each * p.width / f.width, p.each)


def _promoted(f: _Lot[FoundCollective], p: _Lot[Collective]) -> bool:
    """Whether the backend has no collective of this type: XLA:CPU moves bf16 as f32, f8 and f4 as f16."""
    widens = f.promoted or p.dtype.startswith(("bf16", "f8", "f4"))
    whole = p.width is None or f.width == 2 * max(p.width, 1)  # smaller types are planned as bytes
    return widens and whole and _close(f.each / 2, p.each)


def _reinterpreted(f: _Lot[FoundCollective], p: _Lot[Collective]) -> bool:
    return _close(f.each, p.each)


_FITS: Final = (_same, _narrowed, _promoted, _reinterpreted)


def _match(
    lots: Sequence[_Lot[FoundCollective]],
    by_group: Mapping[_Group, Sequence[_Lot[Collective]]],
    fits: Callable[[_Lot[FoundCollective], _Lot[Collective]], bool],
    alike: bool,
) -> None:
    """Matches records that fit. If `alike`, only those that are in a `while` in the plan and in a loop in the HLO, or
    in neither."""
    for f in lots:
        for p in by_group.get(f.group, ()):
            if f.left and p.left and (not alike or f.looped == p.looped) and fits(f, p):
                n = min(f.left, p.left)
                f.left -= n
                p.left -= n


def _match_iterations(
    lots: Sequence[_Lot[FoundCollective]], by_group: Mapping[_Group, Sequence[_Lot[Collective]]], exact: bool
) -> list[FoundCollective]:
    """Matches collectives in loops that fit an iteration of a planned `while`: these may run any number of times."""
    found: list[FoundCollective] = []
    for f in lots:
        kind, along = f.group
        planned = any(p.looped and fits(f, p) for p in by_group.get(f.group, ()) for fits in _FITS)
        if not exact and kind == "all_reduce":
            planned |= any(p.looped and _close(f.each / 2, p.each) for p in by_group.get(("reduce_scatter", along), ()))
        if f.left and f.looped and planned:
            found.append(_rest(f))
            f.left = 0
    return found


def _match_all_reduces(
    lots: Sequence[_Lot[FoundCollective]], by_group: Mapping[_Group, Sequence[_Lot[Collective]]]
) -> list[FoundCollective]:
    """Matches all-reduces of XLA:TPU with a planned reduce-scatter, of which they are followed by a slice, or with a
    planned all-gather of pieces that do not fill a tile, which they fill up with zeros: the second half of their bytes
    is the compiler's."""
    added: list[FoundCollective] = []
    for f in lots:
        kind, along = f.group
        plans = [p for k in ("reduce_scatter", "all_gather") for p in by_group.get((k, along), ())]
        for p in plans if kind == "all_reduce" else ():
            if f.left and p.left and _close(f.each / 2, p.each):
                n = min(f.left, p.left)
                f.left -= n
                p.left -= n
                added.append(replace(f.record, bytes=int((f.each - p.each) * n), count=n))
    return added


def _match_totals(
    lots: Sequence[_Lot[FoundCollective]], by_group: Mapping[_Group, Sequence[_Lot[Collective]]], exact: bool
) -> None:
    """Matches collectives that were divided differently, by the bytes that are left in each group.

    On CPU they must be equal. XLA:GPU joins the operands of all-reduces into one vector, also when some of the plan's
    were dropped: there they may be fewer.
    """
    for group, plans in by_group.items():
        founds = [f for f in lots if f.group == group]
        for f in founds:
            for p in plans:
                if f.left and p.left and _close(f.total, p.total):
                    f.left = p.left = 0
        rest, budget = [f for f in founds if f.left], [p for p in plans if p.left]
        moved, paid = sum(f.total for f in rest), sum(p.total for p in budget)
        slack = len(rest) + len(budget)  # each may be rounded
        if rest and budget and moved <= paid + slack and (not exact or moved >= paid - slack):
            for lot in (*rest, *budget):
                lot.left = 0


# --- report --------------------------------------------------------------------------------------------------------


def _table(a: Audit) -> list[str]:
    rows = [
        (what, c.kind, _along(c.axes), c.value, _size(int(c.bytes)), f"x{c.count}", c.source, getattr(c, "name", ""))
        for what, records in (
            ("not planned", a.surprises),
            ("not found", a.missing),
            ("compiler added", a.compiler_added),
        )
        for c in records
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _overlaps(a: Audit) -> Iterator[str]:
    """A line of what the schedule hides, and the planned overlaps that it exposes most of."""
    if not a.overlaps:
        return
    planned, hidden = sum(f.planned.hidden for f in a.overlaps), sum(f.hidden for f in a.overlaps)
    yield f"  hidden beside computation: {_ms(planned)} planned, {_ms(hidden)} of it in the compiled schedule"
    rest = sorted((f for f in a.overlaps if f.exposed > 0.01 * planned), key=lambda f: -f.exposed)
    for f in rest[:_SHOWN]:
        waits = ", ".join(f"%{name} {_ms(seconds)}" for name, seconds in f.names[:2])
        what = f"{f.planned.kind} of {f.planned.value} at {f.planned.source or 'an unknown line'}"
        yield f"  planned hidden, compiled exposed: {_ms(f.exposed)} of {what}" + (f" ({waits})" if waits else "")
    if rest[_SHOWN:]:
        yield f"  and {_ms(sum(f.exposed for f in rest[_SHOWN:]))} of {len(rest) - _SHOWN} more"


def _options(a: Audit) -> Iterator[str]:
    if a.options:
        yield f"  compiled with {options_text(a.options)}"
    if a.refused:
        yield f"  this XLA refuses {options_text(a.refused)}: it hides less of rings than planned"


_SHOWN: Final = 5
"""Exposed overlaps that the text lists."""


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _along(axes: tuple[str, ...] | None) -> str:
    return "(not along axes)" if axes is None else ",".join(axes)


def _summary(records: Sequence[Collective | FoundCollective]) -> str:
    plural = "" if len(records) == 1 else "s"
    known = [c for c in records if not math.isnan(c.bytes)]
    besides = f" and what is unknown in {len(records) - len(known)}" if len(known) < len(records) else ""
    return f"{len(records)} collective{plural}, {_size(int(sum(c.bytes for c in known)))}{besides}"


def _size(n: int) -> str:
    size, unit = float(n), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{n} B" if unit == "B" else f"{size:.1f} {unit}"


def audit_all(audits: Sequence[Audit]) -> Audit:
    """The audits of several programs as one."""
    return reduce(_both, audits, Audit((), (), (), (), ()))


def _both(a: Audit, b: Audit) -> Audit:
    return Audit(
        a.planned + b.planned, a.found + b.found, a.surprises + b.surprises,
        a.compiler_added + b.compiler_added, a.missing + b.missing, a.iterated + b.iterated,
        overlaps=a.overlaps + b.overlaps, options={**a.options, **b.options}, refused={**a.refused, **b.refused},
    )  # fmt: skip
