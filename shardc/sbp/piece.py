"""The work of one device in an operation: masks, collectives between the pieces, then the local piece.

The collectives bring windows, and the arrays that the pieces exchange: `internal_steps` lists them for a plan,
`run_piece` runs them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from shardc.machine.mesh import MeshView
from shardc.sbp.cost import RingTime, send_price, steps_time
from shardc.sbp.placement import block_sizes, extents, local_shape
from shardc.sbp.ring import ring_of, run_ring
from shardc.sbp.signature import OperandWindow, Passed, Ranges, Rule, Setting, Site, Turned, neutral_value

Positions: TypeAlias = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Sent:
    """One collective inside an operation: every device contributes an array of `shape`.

    `operand` is the number of the operand whose window it brings; None: the pieces of a factor exchange arrays.
    `beside` as in `Passed`.
    """

    kind: Literal["all_gather", "all_to_all", "permute"]
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any
    operand: int | None = None
    beside: bool = False


_KINDS: Final[dict[type, Literal["all_to_all", "permute"]]] = {Turned: "all_to_all", Passed: "permute"}


@dataclass(frozen=True)
class Shift:
    """One permute of a window, or the elements that a device holds itself: overlaps of held and wanted ranges, all at
    one distance between the devices. Lowering needs the tables for each device; a price needs only the length.

    Attributes:
      sent: whether the elements go to another device.
      length: elements that each source sends.
      block: elements of a piece.
      overlaps: (source, target, begin, end, origin) of each, with the numbers of the devices along the axes; the
        target's window would begin at element `origin`, if all of it were as this overlap.
      held: begin of each device's piece.
    """

    sent: bool
    length: int
    block: int
    overlaps: tuple[tuple[int, int, int, int, int], ...]
    held: tuple[int, ...]

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """(source, target) of each overlap; empty if nothing is sent."""
        return tuple((source, target) for source, target, *_ in self.overlaps) if self.sent else ()

    @property
    def first(self) -> tuple[int, ...]:
        """For each device, the begin of the sent range in its piece."""
        found = [0] * len(self.held)
        for source, _, begin, *_ in self.overlaps:
            found[source] = self._first(source, begin)
        return tuple(found)

    @property
    def at(self) -> tuple[int, ...]:
        """For each device, the position in its window of the first element that it gets; may be outside."""
        places = {
            target: self.held[source] + self._first(source, begin) - origin
            for source, target, begin, _, origin in self.overlaps
        }
        one = next(iter(places.values()))  # also for devices that get nothing: equal numbers need no table
        return tuple(places.get(k, one) for k in range(len(self.held)))

    @property
    def fills(self) -> tuple[tuple[int, int], ...]:
        """For each device, begin and end of the part of its window that this fills."""
        found = [(0, 0)] * len(self.held)
        for _, target, begin, end, origin in self.overlaps:
            found[target] = begin - origin, end - origin
        return tuple(found)

    def _first(self, source: int, begin: int) -> int:
        return min(begin - self.held[source], self.block - self.length)


@dataclass(frozen=True, slots=True)
class Reading:
    """How the devices get their windows of a dimension.

    Attributes:
      axes: the axes that split it.
      dim: number of the dimension in the operand.
      length: elements of the dimension in a window.
      span: length of a window, dilation counted.
      phases: for each device, the number of positions of its window before the first element.
      shifts: the permutes that bring the elements.
    """

    axes: tuple[str, ...]
    dim: int
    length: int
    span: int
    phases: tuple[int, ...]
    shifts: tuple[Shift, ...]


def reading(rule: Rule, w: OperandWindow, setting: Setting) -> Reading | None:
    """The reading of a window at these placements; None if its factor is not split."""
    dim = rule.operands[w.operand].index(w.factor)
    by_dim = (*rule.operands, *rule.results)[w.by].index(w.factor)
    axes = setting.operands[w.operand].axes_of(dim)
    if not axes:
        return None
    reach = _Reach(*(int(n) for n in (w.start, w.step, w.width, w.dilation)))  # padding may be NumPy's integers
    cuts = setting.cut(w.operand, dim), setting.cut(w.by, by_dim)
    return _range_reading(axes, dim, w.ranges, reach, *cuts) if w.ranges else _reading(axes, dim, reach, *cuts)


class _Reach(NamedTuple):
    """The positions that a window covers, as in `OperandWindow`."""

    start: int
    step: int
    width: int
    dilation: int


@lru_cache(maxsize=65536)
def _reading(
    axes: tuple[str, ...],
    dim: int,
    reach: _Reach,
    operand: tuple[int, tuple[int, ...]],
    by: tuple[int, tuple[int, ...]],
) -> Reading:
    """The reading of a window; `operand` and `by` are the cut dimensions, as `Setting.cut` has them."""
    start, step, width, dilation = reach
    block, count = block_sizes(*operand)[-1], block_sizes(*by)[-1]
    offsets, valid = np.asarray(extents(*by)).T
    span = (count - 1) * abs(step) + width if count else 0
    ahead = max(-step, 0)  # where positions fall, the last element reads the first of the window
    starts = offsets * step + start - ahead * (count - 1)
    ends = (offsets if ahead else offsets + valid - 1) * step + start + width
    low = -(-starts // dilation)
    high = np.where(valid > 0, -(-ends // dilation), low)
    phases = low * dilation - starts
    length = max(int((-(-(span - phases) // dilation)).max()), 0)
    return Reading(
        axes, dim, length, span, tuple(phases.tolist()), _shifts(extents(*operand), block, [(low, high, low)])
    )


@lru_cache(maxsize=65536)
def _range_reading(
    axes: tuple[str, ...],
    dim: int,
    ranges: Ranges,
    reach: _Reach,
    operand: tuple[int, tuple[int, ...]],
    by: tuple[int, tuple[int, ...]],
) -> Reading:
    """The reading of several ranges, each by the devices in whose window it falls."""
    block, count = block_sizes(*operand)[-1], block_sizes(*by)[-1]
    offsets, valid = np.asarray(extents(*by)).T
    span = (count - 1) * reach.step + reach.width if count else 0
    begins = offsets * reach.step + reach.start
    ends = np.where(valid > 0, begins + (valid - 1) * reach.step + reach.width, begins)
    wants: list[tuple[Positions, Positions, Positions]] = []
    for at, start, stop in ranges:
        origin = begins + (start - at)
        low = np.maximum(origin, start)
        wants.append((low, np.maximum(np.minimum(ends + (start - at), stop), low), origin))
    return Reading(axes, dim, span, span, (0,) * offsets.size, _shifts(extents(*operand), block, wants))


def _shifts(
    held: Sequence[tuple[int, int]], block: int, wants: Sequence[tuple[Positions, Positions, Positions]]
) -> tuple[Shift, ...]:
    """The overlaps of held ranges (begin, length) with each of the wanted ranges (begin, end and origin): a shift for
    each distance between the devices at which every device sends one of them, or for several."""
    offsets, valid = np.asarray(held).T
    found = [_overlaps(offsets, valid, *want) for want in wants]
    overlaps = np.concatenate(found) if len(found) > 1 else found[0]
    size = offsets.size
    group = (overlaps[:, 1] - overlaps[:, 0]) % size
    if len(found) > 1:
        group = group * len(wants) + _repeats(group * size + overlaps[:, 0])
    overlaps = overlaps[np.argsort(group, kind="stable")]
    groups, first = np.unique(np.sort(group), return_index=True)
    rows: list[_Row] = list(map(tuple, overlaps.tolist()))  # pyright: ignore[reportAssignmentType]
    pieces = tuple(offsets.tolist())
    parts = [rows[at:until] for at, until in itertools.pairwise([*first.tolist(), len(rows)])]
    distances = (groups // len(wants)).tolist()
    own = [Shift(False, block, block, tuple(p), pieces) for d, p in zip(distances, parts, strict=True) if not d]
    sent = _joined(p for d, p in zip(distances, parts, strict=True) if d)
    return (*own, *(Shift(True, max(r[3] - r[2] for r in p), block, tuple(p), pieces) for p in sent))


_Row: TypeAlias = tuple[int, int, int, int, int]


def _joined(parts: Iterable[list[_Row]]) -> list[list[_Row]]:
    """Sets of overlaps, of which those become one that no device sends or gets two of: a mirrored dimension takes one
    permute, though the devices of its pairs are at several distances."""
    found: list[tuple[set[int], set[int], list[_Row]]] = []
    for part in parts:
        sources, targets = {r[0] for r in part}, {r[1] for r in part}
        fits = (f for f in found if not (f[0] & sources or f[1] & targets))
        if (into := next(fits, None)) is None:
            found.append((sources, targets, part))
        else:
            into[0].update(sources)
            into[1].update(targets)
            into[2].extend(part)
    return [part for _, _, part in found]


def _repeats(keys: Positions) -> Positions:
    """How often each key came before.

    Examples:
      >>> _repeats(np.asarray([7, 3, 7, 7])).tolist()
      [0, 0, 1, 2]
    """
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    found = np.empty_like(keys)
    found[order] = np.arange(keys.size) - np.searchsorted(ordered, ordered, "left")
    return found


def _overlaps(offsets: Positions, valid: Positions, low: Positions, high: Positions, origin: Positions) -> Positions:
    """Rows of (source, target, begin, end, origin), in the order of targets."""
    owners = np.flatnonzero(valid)
    begins = offsets[owners]
    first = np.maximum(np.searchsorted(begins, low, "right") - 1, 0)
    some = np.maximum(np.searchsorted(begins, high, "left") - first, 0)  # number of possible owners for each target
    target = np.repeat(np.arange(low.size), some)
    source = owners[np.arange(target.size) - np.repeat(np.cumsum(some) - some - first, some)]
    begin, end = np.maximum(low[target], offsets[source]), np.minimum(high[target], (offsets + valid)[source])
    return np.stack([source, target, begin, end, origin[target]], 1)[begin < end]


def internal_steps(rule: Rule, setting: Setting) -> tuple[Sent, ...]:
    """The collectives that an operation needs at these placements, in order."""
    ring = ring_of(rule, setting)
    if ring is not None:
        aval, placement = setting.port(ring.port(rule))
        shape = local_shape(aval.shape, placement, setting.sizes)
        return (Sent("permute", (ring.axis,), shape, aval.dtype, ring.operand),) * (setting.sizes[ring.axis] - 1)
    crossed = rule.crossed(setting)
    if not crossed:
        return ()
    found = _window_steps(rule, setting)
    for factor, arrays in rule.exchanged.items():
        if factor in crossed:
            found += [
                Sent(
                    _KINDS.get(type(a), "all_gather"), crossed[factor], tuple(a.shape), a.dtype,
                    beside=isinstance(a, Passed) and a.beside,
                )
                for a in arrays(setting)
            ]  # fmt: skip
    return tuple(found)


def _window_steps(rule: Rule, setting: Setting) -> list[Sent]:
    """The permutes of the windows. An operand with windows in several dimensions gets one after the other."""
    found: list[Sent] = []
    shapes: dict[int, list[int]] = {}
    for w in rule.windows:
        read = reading(rule, w, setting)
        if read is not None:
            shape = shapes.setdefault(w.operand, list(setting.operand_shape(w.operand)))
            for shift in read.shifts:
                if shift.sent:
                    shape[read.dim] = shift.length
                    found.append(
                        Sent("permute", read.axes, tuple(shape), setting.op.operands[w.operand].dtype, w.operand)
                    )
            shape[read.dim] = read.length
    return found


class SentCost(NamedTuple):
    """Bytes that each device sends in one collective inside an operation, and the seconds that takes."""

    bytes: int
    seconds: float


def sent_cost(sent: Sent, mesh: MeshView) -> SentCost:
    """The cost of a collective inside an operation: that of a boxing step of its kind."""
    width = sent.dtype.itemsize if hasattr(sent.dtype, "itemsize") else np.dtype(sent.dtype).itemsize
    price = send_price(sent.kind, math.prod(sent.shape) * int(width), mesh, sent.axes)
    return SentCost(price.bytes, price.seconds)


def sent_seconds(sent: Iterable[Sent], mesh: MeshView) -> float:
    """Seconds of the collectives that an operation waits for."""
    return sum(len(list(same)) * sent_cost(s, mesh).seconds for s, same in itertools.groupby(sent) if not s.beside)


def around_time(sent: Iterable[Sent], computing: float, mesh: MeshView) -> RingTime | None:
    """The time of an operation that computes for so many seconds while pieces go around; None if none do."""
    beside = [s for s in sent if s.beside]
    if not beside:
        return None
    axes, bytes_ = beside[0].axes, sum(sent_cost(s, mesh).bytes for s in beside)
    n = math.prod(mesh.sizes[a] for a in axes)
    return RingTime(*map(float, steps_time(bytes_ / (n - 1), computing / n, mesh, axes)))


def run_piece(site: Site, rule: Rule, operands: Sequence[Any]) -> Sequence[Any]:
    """The local results of an operation."""
    operands = mask_padding(site, rule, operands)
    ring = ring_of(rule, site)
    if ring is not None:
        return run_ring(site, rule, ring, operands)
    if not rule.crossed(site):
        return rule.local(site, *operands)
    windows = list(operands)
    found = [(w, read) for w in rule.windows if (read := reading(rule, w, site)) is not None]
    fills = [
        neutral_value(w.fill, operands[w.operand].dtype) if isinstance(w.fill, str) else operands[w.fill]
        for w, _ in found
    ]
    for (w, read), fill in zip(found, fills, strict=True):
        windows[w.operand] = _window(site, read, windows[w.operand], fill)
    for (w, read), fill in zip(found, fills, strict=True):  # after the permutes: elements of `fill` are not sent
        if w.dilation > 1:
            windows[w.operand] = _dilated(site, read, windows[w.operand], fill, w.dilation)
    return rule.across(site, *windows)


def _window(site: Site, read: Reading, x: Any, fill: Any) -> Any:
    """This device's window before dilation: its own elements, those of others, and `fill` outside of the dimension."""
    me, dim = site.linear_index(read.axes), read.dim
    shape = [*x.shape[:dim], read.length, *x.shape[dim + 1 :]]
    window = jnp.full(shape, fill, x.dtype)
    for shift in read.shifts:
        part = x
        if shift.sent:
            part = lax.dynamic_slice_in_dim(x, at_device(shift.first, me), shift.length, axis=dim)
            part = site.wire.permute(part, read.axes, shift.pairs)
        part = placed_at(part, dim, at_device(shift.at, me), read.length, fill)
        fills = shift.fills
        if set(fills) == {(0, read.length)}:
            window = part
        else:
            begin, end = (at_device(side, me) for side in zip(*fills, strict=True))
            position = lax.broadcasted_iota(np.int32, window.shape, dim)
            window = jnp.where((position >= begin) & (position < end), part, window)
    return window


def _dilated(site: Site, read: Reading, window: Any, fill: Any, dilation: int) -> Any:
    """The window with `fill` between its elements. If all devices have one phase, this is one `pad`, which XLA can fuse
    into a convolution."""
    dim, phase = read.dim, at_device(read.phases, site.linear_index(read.axes))
    alike = len(set(read.phases)) == 1 and read.length > 0
    low, high = (phase, read.span - phase - (read.length - 1) * dilation - 1) if alike else (0, 0)
    config = [(low, high, dilation - 1) if d == dim else (0, 0, 0) for d in range(window.ndim)]
    window = lax.pad(window, jnp.asarray(fill, window.dtype), config)
    return window if alike else placed_at(window, dim, phase, read.span, fill)


def at_device(table: Sequence[int], me: Any) -> Any:
    """The entry of device number `me`; a plain number if all entries are equal."""
    if len(set(table)) == 1:
        return table[0]
    return table[me] if isinstance(me, int) else jnp.asarray(np.asarray(table, np.int32))[me]


def placed_at(x: Any, dim: int, at: Any, length: int, fill: Any) -> Any:
    """An array of `length` elements along `dim`: `x` from position `at` (-size to length) on, and `fill` elsewhere."""
    size = x.shape[dim]
    if isinstance(at, int):
        widths = [(at, length - at - size, 0) if d == dim else (0, 0, 0) for d in range(x.ndim)]
        return lax.pad(x, jnp.asarray(fill, x.dtype), widths)
    widths = [(length, length, 0) if d == dim else (0, 0, 0) for d in range(x.ndim)]
    return lax.dynamic_slice_in_dim(lax.pad(x, jnp.asarray(fill, x.dtype), widths), length - at, length, axis=dim)


def along(mask: Any, shape: Sequence[int]) -> Any:
    """`mask` broadcast to `shape`. A mask of no dimension is a plain True."""
    return jnp.broadcast_to(mask, shape)


def mask_padding(site: Site, rule: Rule, operands: Sequence[Any]) -> list[Any]:
    """The operands with their declared neutral values in the padding of reduced factors.

    Kept factors need no mask: their padding stays padding. Even splits cost nothing.
    """
    return [_mask_operand(site, rule, i, x) if i in rule.neutral else x for i, x in enumerate(operands)]


def _mask_operand(site: Site, rule: Rule, i: int, x: Any) -> Any:
    windowed = {w.factor for w in rule.windows if w.operand == i}  # a window brings its own `fill`
    for dim in [d for d, f in enumerate(rule.operands[i]) if f in rule.reduced and f not in windowed]:
        x = masked(site, i, dim, x, neutral_value(rule.neutral[i], x.dtype))
    return x


def masked(site: Site, i: int, dim: int, x: Any, value: Any) -> Any:
    """Operand `i` with `value` in the padding of `dim`, if there is padding."""
    axes = site.operands[i].axes_of(dim)
    if site.op.operands[i].shape[dim] % math.prod(site.sizes[a] for a in axes) == 0:
        return x
    _, valid = site.operand_extent(i, dim)
    inside = jax.lax.broadcasted_iota(np.int32, x.shape, dim) < valid
    return jax.numpy.where(inside, x, value)
