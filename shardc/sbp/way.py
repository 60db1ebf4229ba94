"""Ways: how a value goes from a placement on one mesh to a placement on another.

    given on a mesh --boxing--> what leaves --parcels over the border--> what arrives --boxing--> taken on a mesh

A value crosses the border piece by piece: a *parcel* is a box of its elements that one device sends. What is partial is
reduced before it leaves, what must be everywhere is spread after it has arrived where the taker's own links are faster
than the border; devices that hold the same elements share the sending. `plan_way` compares the few sensible pairs of
placements by time, then by bytes that cross. A mesh of None is the host of one process: one place that holds all.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeAlias

from shardc.machine.mesh import MeshView
from shardc.machine.topology import DeviceLink
from shardc.sbp.boxing import Boxing, Shape, find_boxing
from shardc.sbp.placement import AxisSizes, B, Placement, S, extents, local_shape

Index: TypeAlias = tuple[tuple[int, int], ...]
"""A box of elements: in each dimension the first one, and the one behind the last."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """Elements that cross once.

    Attributes:
      source: number of the giver's device that sends them, in the order of its mesh.
      targets: numbers of the taker's devices that need them: one, or all that share what arrives (on one host).
      box: the elements.
    """

    source: int
    targets: tuple[int, ...]
    box: Index

    @property
    def shape(self) -> Shape:
        return tuple(b - a for a, b in self.box)

    @property
    def elements(self) -> int:
        return _elements(self.box)


@dataclass(frozen=True)
class WayPlan:
    """The plan of a way.

    Attributes:
      shape, itemsize: of the logical value.
      given, leaves, arrives, taken: its placements in order; `leaves` and `arrives` are never partial.
      giver, taker: the meshes; None: the host.
      before, after: the boxings on either mesh.
      link: the border; None: giver and taker are one mesh, and nothing crosses.
      takers: for each device of the taker its process, or whatever those have in common that share what arrives; None:
        each device gets its own copy.
      givers: for each device of the giver the same; between a giver and a taker that are equal nothing crosses.
    """

    shape: Shape
    itemsize: int
    given: Placement
    leaves: Placement
    arrives: Placement
    taken: Placement
    giver: MeshView | None
    taker: MeshView | None
    before: Boxing
    after: Boxing
    link: DeviceLink | None
    takers: tuple[Hashable, ...] | None
    givers: tuple[Hashable, ...] | None = None

    @cached_property
    def parcels(self) -> tuple[Parcel, ...]:
        """What crosses the border: each element once for each device, or group of devices, that needs it."""
        if 0 in self.shape or self.link is None:
            return ()
        held: dict[Index, list[int]] = {}
        for device, box in enumerate(boxes(self.shape, self.leaves, sizes_of(self.giver))):
            if not _is_empty(box):
                held.setdefault(box, []).append(device)
        needed: dict[tuple[Hashable, Index], list[int]] = {}
        for device, box in enumerate(boxes(self.shape, self.arrives, sizes_of(self.taker))):
            group = device if self.takers is None else self.takers[device]
            if not _is_empty(box):
                needed.setdefault((group, box), []).append(device)
        load = dict.fromkeys((d for devices in held.values() for d in devices), 0)
        found: list[Parcel] = []
        for (group, wanted), targets in needed.items():
            for box, devices in held.items():
                if _is_empty(common := _common(box, wanted)):
                    continue
                near = [d for d in devices if self.givers is not None and self.givers[d] == group]
                source = min(near or devices, key=lambda d: (load[d], d not in targets, d))
                load[source] += _elements(common)
                found.append(Parcel(source, tuple(targets), common))
        return tuple(found)

    @property
    def border_bytes(self) -> int:
        """Bytes that cross the border."""
        if self.link is None:
            return 0
        if self.takers is not None:
            return sum(p.elements for p in self.parcels if not self._is_near(p)) * self.itemsize
        sizes = sizes_of(self.taker)
        copies = math.prod(n for a, n in sizes.items() if not isinstance(self.arrives[a], S))
        return math.prod(self.shape) * self.itemsize * copies

    def _is_near(self, parcel: Parcel) -> bool:
        if self.givers is None or self.takers is None:
            return False
        return self.givers[parcel.source] == self.takers[parcel.targets[0]]

    @property
    def device_bytes(self) -> int:
        """Bytes that the busiest device of either mesh sends or receives over the border, if devices that hold the same
        share the sending evenly, and devices that share what arrives the taking."""
        if not self.border_bytes:
            return 0
        if self.takers is None:
            into = math.prod(local_shape(self.shape, self.arrives, sizes_of(self.taker))) * self.itemsize
        else:
            got, sharing = Counter[Hashable](), Counter(self.takers)
            for p in self.parcels:
                got[self.takers[p.targets[0]]] += _elements(p.box)
            into = max((-(-n * self.itemsize // sharing[group]) for group, n in got.items()), default=0)
        senders = 1 if self.giver is None else self.giver.size
        return max(into, -(-self.border_bytes // senders))

    @property
    def boxing_bytes(self) -> int:
        """Bytes that a device sends in the boxings before and after."""
        return self.before.bytes + self.after.bytes

    @property
    def border_seconds(self) -> float:
        """Seconds on the border."""
        if self.link is None or not self.border_bytes:
            return 0.0
        return self.link.latency + self.device_bytes / self.link.bandwidth

    @property
    def seconds(self) -> float:
        return self.before.seconds + self.border_seconds + self.after.seconds


def sizes_of(mesh: MeshView | None) -> AxisSizes:
    return {} if mesh is None else mesh.sizes


def boxes(shape: Shape, placement: Placement, sizes: AxisSizes) -> list[Index]:
    """The elements that each device holds, without padding, in the order of the mesh."""
    cut = [tuple(sizes.get(a, 1) for a in placement.axes_of(d)) for d in range(len(shape))]
    pieces = [extents(size, counts) for size, counts in zip(shape, cut, strict=True)]
    found: list[Index] = []
    for coords in itertools.product(*(range(n) for n in sizes.values())):
        at = dict(zip(sizes, coords, strict=True))
        box: list[tuple[int, int]] = []
        for d, of_dim in enumerate(pieces):
            number = 0
            for axis in placement.axes_of(d):
                number = number * sizes.get(axis, 1) + at.get(axis, 0)
            start, valid = of_dim[number]
            box.append((start, start + valid))
        found.append(tuple(box))
    return found


def _is_empty(box: Index) -> bool:
    return any(a >= b for a, b in box)


def _elements(box: Index) -> int:
    return math.prod(b - a for a, b in box)


def _common(one: Index, other: Index) -> Index:
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))


def _split_evenly(shape: Shape, placement: Placement, axes: Sequence[str], sizes: AxisSizes) -> Placement | None:
    """The placement with these axes as splits, each of the longest pieces that it divides; None if one divides none."""
    for axis in axes:
        local = local_shape(shape, placement, sizes)
        fitting = [
            d for d, n in enumerate(local) if n and n % sizes[axis] == 0 and _is_even(shape, placement, d, sizes)
        ]
        if not fitting:
            return None
        placement = placement.moved((axis,), S(max(fitting, key=lambda d: local[d])))
    return placement


def _is_even(shape: Shape, placement: Placement, dim: int, sizes: AxisSizes) -> bool:
    return shape[dim] % math.prod(sizes[a] for a in placement.axes_of(dim)) == 0


def _ends(shape: Shape, placement: Placement, mesh: MeshView | None) -> Iterator[Placement]:
    """The placements at which a value may cross a border that is `placement` on its mesh: what is partial is whole or
    split, what is everywhere is so or split."""
    if mesh is None:
        yield placement
        return
    sizes = {a: n for a, n in mesh.axes if n > 1}
    partial = tuple(a for a in placement.partial_axes if a in sizes)
    everywhere = tuple(a for a in sizes if a not in placement)
    whole = placement.moved(placement.partial_axes, B) if placement.partial_axes else placement
    for axes in dict.fromkeys(((), partial, everywhere, (*partial, *everywhere))):
        split = _split_evenly(shape, whole, axes, sizes)
        if split is not None:
            yield split


@lru_cache(maxsize=65536)
def plan_way(  # noqa: PLR0913  # two ends and what lies between
    shape: Shape, itemsize: int, given: Placement, giver: MeshView | None, taken: Placement, taker: MeshView | None,
    link: DeviceLink | None, takers: tuple[Hashable, ...] | None = None, givers: tuple[Hashable, ...] | None = None,
) -> WayPlan:  # fmt: skip
    """The fastest way of a value between two meshes.

    Args:
      shape, itemsize: of the logical value.
      given, giver: its placement, and the mesh; None: the host.
      taken, taker: where it goes.
      link: the border: bytes/s of one device, and seconds until the first byte arrives. None: both are one mesh.
      takers, givers: as in `WayPlan`.
    """
    given, taken = (p.without(m.idle) if m is not None and m.idle else p for p, m in ((given, giver), (taken, taker)))
    if link is None:
        assert giver is not None
        boxing = find_boxing(shape, itemsize, given, taken, giver)
        return WayPlan(
            shape, itemsize, given, taken, taken, taken, giver, taker, boxing, Boxing((), ()), None, takers
        )  # fmt: skip
    best: tuple[tuple[float, int, int], WayPlan] | None = None
    for leaves in dict.fromkeys(_ends(shape, given, giver)):
        before = Boxing((), ()) if giver is None else find_boxing(shape, itemsize, given, leaves, giver)
        for arrives in dict.fromkeys(_ends(shape, taken, taker)):
            after = Boxing((), ()) if taker is None else find_boxing(shape, itemsize, arrives, taken, taker)
            plan = WayPlan(
                shape, itemsize, given, leaves, arrives, taken, giver, taker, before, after, link, takers, givers
            )
            key = plan.seconds, plan.border_bytes, len(before.steps) + len(after.steps)
            if best is None or key < best[0]:
                best = key, plan
    assert best is not None
    return best[1]
