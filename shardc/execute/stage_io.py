"""Conversion of a pipeline's arguments to the arrays of its stages, of these to its results, and the ways between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardc.arrays.place import Place
from shardc.arrays.placed import PlacedArray, StackedArray, is_placed
from shardc.execute.rank_processes import RankProcesses
from shardc.execute.ways import Way, Ways
from shardc.machine.devices import processes_of
from shardc.machine.puts import HERE
from shardc.passes.trace.trace import settings
from shardc.pipeline.cut_search.split_scans import Piece
from shardc.pipeline.plan import MpmdPlan
from shardc.pipeline.step_values import StepValues
from shardc.runtime.actor import Network
from shardc.sbp.layout import physical_spec


class StackedStageArray:
    """One logical array whose rows are spread over several stages.

    Args:
      pieces: the pieces, in the order of their rows.
      mesh, axis: the whole mesh, and the axis along which the stages' meshes lie, if they lie along one.

    Attributes:
      sharding: the NamedSharding of the whole array on `mesh`; None unless all ranks hold the same number of rows, in
        the order of the ranks.
    """

    def __init__(self, pieces: Sequence[Place], mesh: Any, axis: str | None) -> None:
        self.pieces = tuple(pieces)
        self.rows = tuple(pairwise(accumulate((b.shape[0] for b in pieces), initial=0)))
        self.shape = (self.rows[-1][1], *pieces[0].shape[1:])
        self.sharding = self._sharding(mesh, axis)
        if self.sharding is not None:
            at = {d: i for i, d in enumerate(mesh.devices.flat)}
            self._at = [[at[d] for d in b.devices] for b in pieces]

    def _sharding(self, mesh: Any, axis: str | None) -> NamedSharding | None:
        first = self.pieces[0]
        if not isinstance(mesh, Mesh) or axis not in mesh.axis_names or len(processes_of(mesh.devices.flat)) > 1:
            return None
        ranks = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), 0)
        ranks = ranks.reshape(len(ranks), -1).tolist()
        alike = all(b.is_plain and (b.shape, b.at) == (first.shape, first.at) for b in self.pieces)
        if not alike or [list(b.devices) for b in self.pieces] != ranks:
            return None
        rows, *rest = [*physical_spec(first.at), None][: max(1, len(first.shape))]
        inner = () if rows is None else rows if isinstance(rows, tuple) else (rows,)
        return NamedSharding(mesh, PartitionSpec((axis, *inner), *rest))

    def enter(self, x: Any) -> list[Any]:
        """The pieces of a logical array, each in a form that its stage takes."""
        if isinstance(x, StackedArray) and [p.shape for p in x.pieces] == [b.shape for b in self.pieces]:
            return list(x.pieces)
        if self.sharding is not None and isinstance(x, jax.Array) and x.committed and x.sharding == self.sharding:
            shards = [shard.data for shard in x.addressable_shards]
            return [
                jax.make_array_from_single_device_arrays(b.shape, b.sharding, [shards[i] for i in at])
                for b, at in zip(self.pieces, self._at, strict=True)
            ]
        whole = np.asarray(x)
        return [whole[a:b] for a, b in self.rows]

    def leave(self, pieces: Sequence[jax.Array]) -> jax.Array | StackedArray:
        """The logical array of the physical pieces."""
        if self.sharding is not None:
            shards = [shard.data for piece in pieces for shard in piece.addressable_shards]
            return jax.make_array_from_single_device_arrays(self.shape, self.sharding, shards)
        ends = zip(pieces, self.pieces, strict=True)
        return StackedArray([x if is_placed(x) else PlacedArray(x, b.shape, b.at, b.device_mesh) for x, b in ends])


class PiecedArrays:
    """The conversion between all arrays of a call (its arguments, or its results) and their pieces on the stages.

    Args:
      pieces: for each piece the number of its array, and the rows that it has.
      places: for each piece where it is on its stage.
      mesh, axis: the whole mesh, and the axis along which the stages' meshes lie, if they lie along one.
    """

    def __init__(self, pieces: Sequence[Piece], places: Sequence[Place], mesh: Any, axis: str | None) -> None:
        found: dict[int, list[Place]] = {}
        for piece, place in zip(pieces, places, strict=True):
            found.setdefault(piece.number, []).append(place)
        stacked = {p.number for p in pieces if p.rows is not None}
        self._ends = [StackedStageArray(b, mesh, axis) if n in stacked else b[0] for n, b in found.items()]

    def split(self, arrays: Sequence[Any]) -> list[Any]:
        """The pieces of logical arrays, each in a form that its stage takes."""
        return [
            part
            for x, end in zip(arrays, self._ends, strict=True)
            for part in (end.enter(x) if isinstance(end, StackedStageArray) else (x,))
        ]

    def assemble(self, pieces: Sequence[jax.Array]) -> list[jax.Array | PlacedArray]:
        """The logical arrays of physical pieces."""
        left = iter(pieces)
        return [
            end.leave([next(left) for _ in end.pieces]) if isinstance(end, StackedStageArray) else end.leave(next(left))
            for end in self._ends
        ]


def channel_ways(plan: MpmdPlan, places: RankProcesses, steps: Mapping[Any, StepValues]) -> list[Ways | None]:
    """The ways of the values of each channel; None for channels that carry nothing.

    Args:
      plan: the plan.
      places: which process runs which rank.
      steps: what each step of an actor takes and gives, by its label.
    """
    held, wide = _held(plan.network, steps), bool(settings()[0])
    found: list[Ways | None] = []
    for number, (channel, carried) in enumerate(zip(plan.network.channels, plan.built.channel_values, strict=True)):
        if carried is None:
            found.append(None)
            continue
        link, ends = plan.border(carried.source, carried.target), plan.ends(carried)
        ways = [Way(given, taken, link) for given, taken in ends]
        if places.are_apart(channel.source, channel.target) or not all(w.carrier == HERE for w in ways):
            ways = [replace(w, copied=i in held.get(number, ())) for i, w in enumerate(ways)]
        found.append(Ways(ways, wide))
    return found


def _held(network: Network, steps: Mapping[Any, StepValues]) -> dict[int, set[int]]:
    """For each channel the numbers of the values that a later step may overwrite: its sender keeps them too."""
    found: dict[int, set[int]] = {}
    for step in (s for row in network.actors for s in row if s.label in steps):
        values = steps[step.label]
        kept = {i for _, i, _ in values.kept if i is not None}
        for (channel, _), give in zip(step.gives, values.gives, strict=True):
            found.setdefault(channel, set()).update(
                k for k, g in enumerate(give) if g.output in kept or (g.output is None and g.spot is None)
            )
    return found
