"""The cost model: bytes and time of a boxing step, and time of an operation.

Bytes are those that each device sends. Times follow the alpha-beta model (Thakur et al. 2005, "Optimization of
Collective Communication Operations in MPICH"): a latency for each message that has to wait for another, and bytes over
bandwidth. They are integers, in femtoseconds, so that ties are exact and sums do not depend on their order.

A collective over a group of axes passes the tiers of the machine one after the other (NVLink, then the network). A
gather starts with the slowest, while the pieces are small; a reduction is a scatter and a gather. Within a tier

  a ring of n         pieces go both ways: gather (n-1)·p / 2w in n/2 hops, exchange (n²/4)·p / 2w
  a line of n         gather (n-1)·p / w in n-1 hops, exchange (n²/4)·p / w
  several such at once ("How to Scale Your Model", Austin et al. 2025, chapter sharding): their bandwidths add up in a
                      gather, each carries its share of an exchange
  a switch of n       gather (n-1)·p / w, exchange (n-1)·p / w, one ring of messages for each axis

for pieces of p bytes and w bytes/s, one way along a link or through a device's port. An exchange over several tiers
sends each piece directly to its destination. See docs/design/cost-model.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np

from shardc.machine.mesh import MeshView
from shardc.machine.topology import AxisSpan, Topology, merged
from shardc.sbp.placement import Placement, local_shape

CollectiveKind: TypeAlias = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute"]
StepKind: TypeAlias = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "slice", "keep", "fill"
]
"""The five collectives, and three local steps: `slice` B->S, `keep` B->P, `fill` S->P."""
COLLECTIVES: Final[tuple[CollectiveKind, ...]] = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute"
)  # fmt: skip
LOCAL_STEPS: Final = frozenset(("slice", "keep", "fill"))
STEP_KINDS: Final[tuple[StepKind, ...]] = (*COLLECTIVES, "slice", "keep", "fill")

FEMTO: Final = 10**15
"""Femtoseconds in a second."""
LONGEST: Final = 2**59
"""Femtoseconds that a longer step counts as, ten minutes: a sum of two still fits in an int64."""
LIGHT: Final = 1e-4
"""The share of the memory traffic of a light operation, or of a boxing's local step, that counts when placements are
chosen. XLA fuses them into their neighbours; the traffic of fused operations has its own price (`Node.traffic`). This
share breaks ties in favour of the placement that holds less."""
HIDING: Final = 0.01
"""The part of a ring's overlapped time, of permutes or of arithmetic, that counts at least. Not measured: without it a
ring over a value that every device holds anyway would tie with no ring."""
_FUSED: Final = round(1 / LIGHT)
_AVOIDED: Final[Mapping[StepKind, int]] = {**dict.fromkeys((*COLLECTIVES, "fill"), 100 * FEMTO), "slice": FEMTO // 1000}
"""Femtoseconds added to a step that the mesh avoids: more than a call of a training step takes. A slice sends nothing,
so its addition is small and it comes before steps that send."""


# --- groups of axes --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceGroup:
    """A group of devices with the costs of collectives over it; in arrays, several groups.

    Attributes:
      n: number of devices.
      wire: by kind, femtoseconds for each byte of a piece. The piece is what each device puts into a gather, gets from
        a scatter, sends to each other device in an exchange, or holds before a permute; in an all-reduce it is the
        n-th part of what a device holds.
      latency: by kind, femtoseconds before the last byte moves: the start, and hops that wait for each other.
    """

    n: Any
    wire: Mapping[str, Any]
    latency: Mapping[str, Any]


def group_of(mesh: MeshView, axes: Sequence[str]) -> DeviceGroup:
    """A group of devices that differ only along the given axes."""
    combined = frozenset(kind for kind, _ in mesh.topology.combined) if mesh.shared > 1 else frozenset[str]()
    return _group(mesh.spans_along(axes), mesh.topology.launch, combined, mesh.shared)


@lru_cache(maxsize=4096)
def _group(spans: tuple[AxisSpan, ...], launch: float, combined: frozenset[str], shared: int) -> DeviceGroup:
    ways = merged(spans)
    tiers = [tuple(found) for _, found in itertools.groupby(ways, key=lambda s: s.fabric.tier)]
    around = sum(_hops(s) * s.fabric.latency for s in ways)
    across = sum((1 if s.fabric.kind == "switch" else _hops(s)) * s.fabric.latency for s in ways)
    hops = {
        "all_gather": around, "reduce_scatter": around, "all_reduce": 2 * around, "all_to_all": around,
        "permute": across,
    }  # fmt: skip
    latency = {k: round((launch + s) * FEMTO / (shared if k in combined else 1)) for k, s in hops.items()}
    wire = {
        "all_gather": _gather("all_gather", tiers),
        "reduce_scatter": _gather("reduce_scatter", tiers),
        "all_reduce": 2 * _gather("all_reduce", tiers),
        "all_to_all": _exchange(tiers),
        "permute": max((_permute(t) for t in tiers), default=0),
    }
    return DeviceGroup(math.prod(s.count for s in ways), MappingProxyType(wire), MappingProxyType(latency))


def _hops(s: AxisSpan) -> int:
    """The number of messages in sequence until every device has data of every other one."""
    if s.fabric.kind == "switch":
        return s.count - 1
    return s.stride * (s.count // 2 if s.closed else s.count - 1)


def _width(s: AxisSpan, kind: str) -> float:
    """Bytes/s that a device sends along a span. A closed torus dimension has two links; `stride` groups share them."""
    links = 2 if s.closed else 1
    return s.fabric.rate(kind) * (links / s.stride if s.fabric.kind == "torus" else 1)


def _tier_width(tier: Sequence[AxisSpan], kind: str) -> float:
    if tier[0].fabric.kind == "torus":
        return sum(_width(s, kind) for s in tier)
    return min(_width(s, kind) for s in tier)


def _gather(kind: str, tiers: Sequence[Sequence[AxisSpan]]) -> int:
    """Femtoseconds for each byte that each device contributes; the outer tiers gather first."""
    total, held = 0, 1
    for tier in reversed(tiers):
        n = math.prod(s.count for s in tier)
        total += (n - 1) * held * _per_byte(_tier_width(tier, kind))
        held *= n
    return total


def _exchange(tiers: Sequence[Sequence[AxisSpan]]) -> int:
    """Femtoseconds for each byte that each device sends to each other device, directly to its destination."""
    total, inside = 0, 1
    for tier in tiers:
        n = math.prod(s.count for s in tier)
        if tier[0].fabric.kind == "torus":  # half of all pieces cross the middle of each dimension
            loads = (s.count**2 // 4 * (n // s.count) * _per_byte(_width(s, "all_to_all")) for s in tier)
            total += inside * max(loads)
        else:
            total += inside * (n - 1) * _per_byte(_tier_width(tier, "all_to_all"))
        inside *= n
    return total


def _permute(tier: Sequence[AxisSpan]) -> int:
    """Femtoseconds for each byte that each device sends to one other. On a torus the distance is the average over all
    others, and all links are in use."""
    if tier[0].fabric.kind == "switch":
        return _per_byte(_tier_width(tier, "permute"))
    return max(max(s.count**2 // 4, s.count) * _per_byte(_width(s, "permute")) // s.count for s in tier)


def _per_byte(bandwidth: float) -> int:
    """Femtoseconds for a byte: a whole number, so that equal bytes tie."""
    return max(round(FEMTO / bandwidth), 1)


# --- steps -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepPrice:
    """The cost of one boxing step.

    Attributes:
      bytes: that each device sends.
      wire: femtoseconds that the links are busy, or the memory if it is slower.
      rest: femtoseconds of latency, and of local copies.
    """

    bytes: int
    wire: int
    rest: int

    @property
    def seconds(self) -> float:
        return (self.wire + self.rest) / FEMTO


@dataclass(frozen=True, slots=True)
class BoxingStep:
    """One step of a boxing: `kind` over the group of `axes`, from `src` to `dst`."""

    kind: StepKind
    axes: tuple[str, ...]
    src: Placement
    dst: Placement

    @property
    def is_collective(self) -> bool:
        return self.kind not in LOCAL_STEPS


def step_price(step: BoxingStep, shape: Sequence[int], itemsize: int, mesh: MeshView) -> StepPrice:
    """The cost of one boxing step of a value of `shape`."""
    kind, src, dst = step.kind, step.src, step.dst
    shapes = [local_shape(shape, p, mesh.sizes) for p in (src, dst)]
    before, after = (math.prod(s) * itemsize for s in shapes)
    smaller = math.prod(map(min, zip(*shapes, strict=True))) * itemsize
    piece = sent_pieces(kind, before, after, smaller, int(src.partial_axes != dst.partial_axes))
    group, memory = group_of(mesh, step.axes), memory_cost(mesh.topology)
    return StepPrice(
        moved_bytes(kind, piece, group.n),
        wire_cost(kind, piece, before + after, group, memory),
        rest_cost(kind, after, dst.partial_op in ("max", "min"), group, memory),
    )


def sent_pieces(kind: StepKind, before: Any, after: Any, smaller: Any, reduced: Any) -> Any:
    """Bytes of the pieces of a collective, in numbers or in arrays.

    Args:
      before, after: bytes that a device holds, padding included.
      smaller: for an all-to-all, bytes of a piece that is cut for its destination and not yet joined.
      reduced: 1 where an all-to-all stands for the reduce-scatter of a max or min, else 0.

    Returns:
      The pieces of `DeviceGroup.wire`; for an all-reduce all n of them together.
    """
    match kind:
        case "reduce_scatter":
            return after
        case "all_to_all":
            return after * reduced + smaller * (1 - reduced)
        case _:
            return before


def moved_bytes(kind: StepKind, piece: int, n: int) -> int:
    """Bytes that each of `n` devices sends, padding included."""
    if kind in LOCAL_STEPS:
        return 0
    if kind == "permute":
        return piece
    if kind == "all_reduce":  # a reduce-scatter and an all-gather
        return 2 * (n - 1) * piece // n
    return (n - 1) * piece  # to n-1 others, passed on around the ring


def wire_cost(kind: StepKind, piece: Any, touched: Any, group: DeviceGroup, memory: int) -> Any:
    """Femtoseconds that a step's bytes take on the links, and at least the time that memory takes to read and write
    them. In numbers or in arrays.

    Args:
      touched: bytes held before and after.
      memory: femtoseconds to read or write a byte.
    """
    if kind in LOCAL_STEPS:
        return 0 * piece
    wire = group.wire[kind]
    if kind == "all_reduce":  # its pieces are n times smaller; the product here is not n times larger
        sent = _times(piece // group.n, wire) + piece % group.n * wire // group.n
    else:
        sent = _times(piece, wire)
    least = _times(touched, memory)
    return (max(sent, least) if isinstance(piece, int) else np.maximum(sent, least)) * (touched > 0)


def _times(held: Any, cost: Any) -> Any:
    """`held * cost`, at most LONGEST."""
    if isinstance(held, int):
        return min(held * cost, LONGEST)
    cost = np.minimum(cost, LONGEST)
    return np.where(held * cost.astype(np.float64) < LONGEST, held * cost, LONGEST)


def rest_cost(kind: StepKind, after: Any, idle: Any, group: DeviceGroup, memory: int) -> Any:
    """The other femtoseconds of a step: latency, or the share of a local copy that counts. In numbers or in arrays.

    Args:
      idle: whether a `keep` writes nothing, because a value that all hold is its own max or min.
    """
    if kind not in LOCAL_STEPS:
        return group.latency[kind] + 0 * after
    written = after * (1 - idle) if kind == "keep" else after
    return 2 * written * memory // _FUSED


@lru_cache(maxsize=256)
def memory_cost(topology: Topology) -> int:
    """Femtoseconds to read or write a byte."""
    return _per_byte(topology.memory_rate)


def avoided_cost(kind: StepKind, axes: Sequence[str], mesh: MeshView) -> int:
    """Femtoseconds that the search adds to a step because its mesh avoids such ones; no part of a plan's time."""
    return _AVOIDED.get(kind, 0) if mesh.avoids and any((kind, a) in mesh.avoids for a in axes) else 0


def send_price(kind: CollectiveKind, piece: int, mesh: MeshView, axes: Sequence[str]) -> StepPrice:
    """The price of a collective that is no boxing step: one inside an operation, or a user's own.

    Args:
      piece: bytes, as from `sent_pieces`.
    """
    group = group_of(mesh, axes)
    if group.n == 1 or not piece:
        return StepPrice(0, 0, 0)
    wire = wire_cost(kind, piece, piece, group, memory_cost(mesh.topology))
    return StepPrice(moved_bytes(kind, piece, group.n), wire, group.latency[kind])


# --- rings -----------------------------------------------------------------------------------------------------------


class RingWork(NamedTuple):
    """The work of a ring on one of its pieces, in numbers or in arrays of them.

    Attributes:
      piece: bytes of a piece that goes around.
      flops, memory: of the product with one piece: operations, and bytes read and written.
      added: bytes that are read and written to add it up.
    """

    piece: Any
    flops: Any
    memory: Any
    added: Any


class RingTime(NamedTuple):
    """Seconds of a ring product: its arithmetic, its permutes, and the total with their overlap."""

    computing: Any
    moving: Any
    total: Any


def ring_time(work: RingWork, mesh: MeshView, axis: str, dtype: Any, kind: str = "") -> RingTime:
    """The time of a product in pieces. Half of the pieces come from either side; while the pieces of one step move,
    those of the step before are multiplied, as far as the backend overlaps them.

    Args:
      axis: the mesh axis that the pieces go around.
      dtype: of the operands.
      kind: of the product.
    """
    each = heavy_seconds(work.flops, work.memory, mesh, dtype, kind=kind) + memory_seconds(work.added, mesh)
    return steps_time(work.piece, each, mesh, (axis,))


def steps_time(piece: Any, each: Any, mesh: MeshView, axes: tuple[str, ...]) -> RingTime:
    """The time of a computation in as many steps as there are devices along `axes`, around which pieces go.

    Args:
      piece: bytes of a piece.
      each: seconds of a step.
    """
    n = math.prod(mesh.sizes[a] for a in axes)
    held, late, wires = memory_seconds(piece, mesh), _hop_latency(mesh, axes), _hop_wires(mesh, axes)
    one, two = (np.maximum(piece * wire / FEMTO, k * held) + late for k, wire in enumerate(wires, 1))
    pairs, alone = (n - 1) // 2, (n + 1) % 2  # pairs of pieces that move at once; whether one piece moves alone
    moving = pairs * two + alone * one
    first, last = np.maximum(two if pairs else one, each), each * (1 + n % 2)
    total = first + last + max(pairs - 1, 0) * np.maximum(two, 2 * each)
    if pairs and alone:
        total = total + np.maximum(one, 2 * each)
    waited = max(HIDING, 1 - mesh.topology.overlap("ring"))
    return RingTime(n * each, moving, total + waited * (n * each + moving - total))


@lru_cache(maxsize=256)
def _hop_wires(mesh: MeshView, axes: tuple[str, ...]) -> tuple[int, int]:
    """Femtoseconds for each byte that every device passes to the next: of one piece, and of two pieces at once, one
    each way. On a closed torus the two use different links. Elsewhere they share: the piece of the last device travels
    all the way back, and a device has one port to a switch. In outer dimensions only the pieces of one device in each
    row cross: forward at one end of the row, backward at the other."""
    spans = merged(mesh.spans_along(axes))
    wires = [_per_byte(s.fabric.rate("permute") / (s.stride if s.fabric.kind == "torus" else 1)) for s in spans]
    apart = spans[0].fabric.kind == "torus" and spans[0].closed
    return max(wires), max(wires[0] * (1 if apart else 2), *wires)


@lru_cache(maxsize=256)
def _hop_latency(mesh: MeshView, axes: tuple[str, ...]) -> float:
    """Seconds before the last byte of such a piece moves: the start, and the longest path."""
    hops = ((1, s) if s.fabric.kind == "switch" else (s.stride * (1 if s.closed else s.count - 1), s)
            for s in merged(mesh.spans_along(axes)))  # fmt: skip
    return mesh.topology.launch + sum(n * s.fabric.latency for n, s in hops)


# --- operations ------------------------------------------------------------------------------------------------------


def light_seconds(memory: float, mesh: MeshView) -> float:
    """The counted time of a light local piece that reads and writes `memory` bytes (`LIGHT`)."""
    return LIGHT * memory_seconds(memory, mesh)


def heavy_seconds(flops: Any, memory: Any, mesh: MeshView, dtype: Any, passes: float = 0.0, kind: str = "") -> Any:
    """Roofline time of a heavy local piece, or of arrays of them.

    Args:
      flops: its operations.
      memory: bytes that it reads and writes in one pass.
      dtype: of its operands; matrix units are faster in some.
      passes: how often it goes through this memory, at least once.
      kind: of operation; some are slower, or take time to start.
    """
    moved = max(passes, 1.0) * memory / mesh.topology.memory_rate
    machine = mesh.topology
    return np.maximum(flops / machine.flops_in(str(dtype), kind), moved) + dict(machine.starts).get(kind, 0.0)


@lru_cache(maxsize=256)
def element_seconds(kind: str, topology: Topology) -> float:
    """Seconds that the vector units take for each element of a light operation of a kind; 0 for kinds that compute
    nothing."""
    operations = {"elementwise": 1.0, "reduction": 1.0, "special": topology.special}.get(kind, 0.0)
    return operations / (topology.reached * topology.vector) if topology.vector else 0.0


def memory_seconds(memory: float, mesh: MeshView) -> float:
    """Time to read and write `memory` bytes."""
    return memory / mesh.topology.memory_rate


def launch_seconds(arrays: int, mesh: MeshView) -> float:
    """Time of the host to launch a program with so many arguments and results, where it shares its cores with the
    devices; elsewhere it runs ahead of them."""
    machine = mesh.topology
    return machine.dispatch + arrays * mesh.size * machine.dispatch_array if machine.backend == "cpu" else 0.0
