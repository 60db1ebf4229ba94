"""The one cost model: what a boxing step moves and how long that takes, and how long an operation computes.

Bytes are those that each device sends. A collective over several axes at once is a multi-dimensional ring: its bytes
are those of one ring of all its devices, its latency that of one ring after the other ("How to Scale Your Model",
Austin et al. 2025, chapter "sharding"). The formulas for one ring are those of the alpha-beta model (Thakur et al.
2005, "Optimization of Collective Communication Operations in MPICH").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal, TypeAlias, TypeVar

import numpy as np

from shardc.mesh import MeshView
from shardc.sbp.placement import Placement, local_shape

StepKind: TypeAlias = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "slice", "keep", "fill"
]
"""The five collectives, and three local steps: `slice` B->S, `keep` B->P, `fill` S->P."""
Amount = TypeVar("Amount", float, np.ndarray)
LOCAL_STEPS: Final = frozenset(("slice", "keep", "fill"))

LAUNCH_HOPS: Final = 10
"""What it costs to start a collective, in hops. Started alone it costs far more; XLA combines the many small ones of a
step, so this is what each of them counts for."""
LIGHT: Final = 1e-4
"""Share of a light operation's memory traffic that counts. XLA fuses such operations into their neighbours, whose
traffic is priced; what is left decides between placements that move the same, for the one that holds less."""


def step_bytes(
    kind: StepKind, shape: Sequence[int], itemsize: int, src: Placement, dst: Placement, mesh: MeshView, n: int
) -> int:
    """Bytes that each device sends in one boxing step over a group of `n` devices, padding included."""
    if kind in LOCAL_STEPS:
        return 0
    before, after = (math.prod(local_shape(shape, p, mesh.sizes)) * itemsize for p in (src, dst))
    match kind:
        case "all_gather" | "permute":
            return sent_bytes(kind, before, n)
        case "reduce_scatter":
            return (n - 1) * after
        case "all_reduce":  # a reduce-scatter and an all-gather
            return 2 * (n - 1) * before // n
        case _:  # all_to_all: n-1 of n pieces leave
            if dst.partial_axes == src.partial_axes:
                pieces = zip(*(local_shape(shape, p, mesh.sizes) for p in (src, dst)), strict=True)
                return (n - 1) * math.prod(map(min, pieces)) * itemsize
            return (n - 1) * after  # P(max) -> S: the pieces of a reduce-scatter, reduced at their goal


def sent_bytes(kind: Literal["all_gather", "permute"], held: int, n: int) -> int:
    """Bytes that each of `n` devices sends of the `held` bytes that it puts in."""
    return held if kind == "permute" else (n - 1) * held  # to n-1 others, passed on around the ring


def step_hops(kind: StepKind, counts: Sequence[int]) -> int:
    """Messages that follow one another in one boxing step over axes of `counts` devices, its start counted in them.

    Each costs a latency.
    """
    if kind in LOCAL_STEPS:
        return 0
    if kind == "permute":
        return LAUNCH_HOPS + 1
    return LAUNCH_HOPS + sum(n - 1 for n in counts) * (2 if kind == "all_reduce" else 1)


def boxing_seconds(moved: Amount, hops: Amount, mesh: MeshView) -> Amount:
    """Time of boxing steps that send `moved` bytes in `hops` messages."""
    return hops * mesh.topology.link.latency + moved / mesh.topology.link.bandwidth


def compute_seconds(flops: float, memory: float, mesh: MeshView) -> float:
    """Roofline time of a local piece: `flops` operations of a heavy one, else `memory` bytes read and written."""
    if flops:
        return max(flops / mesh.topology.flops, memory / mesh.topology.memory_bandwidth)
    return LIGHT * memory / mesh.topology.memory_bandwidth
