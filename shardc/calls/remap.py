"""`Function.remap`: one rank of a pipeline on other devices, and the state that moves there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from shardc.arrays.placed import PlacedArray, StackedArray, is_placed
from shardc.arrays.remote_array import RemoteArray
from shardc.errors import ClusterError, MeshError, PipelineError
from shardc.execute.stage_codec import StageEdge
from shardc.execute.stage_io import StageArray
from shardc.machine.devices import me, processes_of
from shardc.machine.mesh import AnyMesh, auto_mesh
from shardc.runtime.cluster import current
from shardc.sbp.placement import Placement


def checked_rank(rank: Any, mesh: Any, ranks: Sequence[AnyMesh] | None, where: str) -> tuple[Mesh, Mesh]:
    """The mesh of a rank and the one that it is to have.

    Raises:
      PipelineError: this is no pipeline, or has no such rank.
      MeshError: the new mesh has other axes, no devices, or devices of another rank; or one process of several would
        have all ranks.
    """
    if ranks is None:
        raise PipelineError(
            f"{where}.remap: it is no pipeline; make a function for the other mesh with shardc.function."
        )
    if not isinstance(rank, int) or not 0 <= rank < len(ranks):
        raise PipelineError(f"{where}.remap: there is no rank {rank!r}; the ranks are 0 to {len(ranks) - 1}.")
    old = ranks[rank]
    if not isinstance(old, Mesh) or not isinstance(mesh, Mesh):
        raise MeshError(f"{where}.remap: only a mesh with devices can be mapped; this one only plans.")
    if dict(old.shape) != dict(mesh.shape):
        has, wants = dict(mesh.shape), dict(old.shape)
        raise MeshError(
            f"{where}.remap: the new mesh of rank {rank} has the axes {has}; it needs those of its old one, {wants}, "
            "so that nothing is planned anew."
        )
    for other, theirs in enumerate(ranks):
        assert isinstance(theirs, Mesh)
        both = set(mesh.devices.flat) & set(theirs.devices.flat) if other != rank else None
        if both:
            names = ", ".join(sorted(map(str, both)))
            raise MeshError(f"{where}.remap: {names} belong to rank {other}; give rank {rank} devices of its own.")
    new = auto_mesh(mesh)
    assert isinstance(new, Mesh)
    others = {p for r, m in enumerate(ranks) if isinstance(m, Mesh) and r != rank for p in processes_of(m.devices.flat)}
    before, after = others.union(processes_of(old.devices.flat)), others.union(processes_of(new.devices.flat))
    if len(after) == 1 < len(before):
        raise MeshError(
            f"{where}.remap: all ranks would run in process {min(after)}, and the other processes would have nothing "
            "to do; give ranks to two processes or more."
        )
    return old, new


def whole_mesh(mesh: AnyMesh, axis: str, ranks: Sequence[Any]) -> Mesh:
    """The mesh of all ranks along `axis`."""
    at = mesh.axis_names.index(axis)
    shape = [n for a, n in mesh.shape.items() if a != axis]
    devices = np.stack([m.devices.reshape(shape) for m in ranks], at)
    return Mesh(devices, mesh.axis_names, (AxisType.Auto,) * len(mesh.axis_names))


class Move:
    """Moves the arrays of a pytree from one mesh to another, which may be in another process.

    If they are in several processes, all processes call it together. Arrays elsewhere stay as they are.
    """

    def __init__(self, old: Mesh, new: Mesh) -> None:
        self.old, self.new = old, new

    def __call__(self, tree: Any) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        return jax.tree.unflatten(structure, list(map(self._leaf, leaves)))

    def _leaf(self, x: Any) -> Any:
        if isinstance(x, StackedArray):
            return StackedArray([self._leaf(p) for p in x.pieces])
        if is_placed(x):
            return self._moved(x, x.placement) if x.mesh == self.old else x
        if isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding) and x.sharding.mesh == self.old:
            return self._moved(x, Placement.from_sharding(x.sharding))
        return x

    def _moved(self, x: Any, placement: Placement) -> Any:
        aval = x.aval
        to = StageArray(tuple(aval.shape), placement, self.new)
        givers, takers = processes_of(self.old.devices.flat), processes_of(self.new.devices.flat)
        if givers == takers and len(givers) == 1:  # nobody sends
            here = givers == [me()]
            x = jax.device_put(x.physical if is_placed(x) else x, to.sharding) if here else x
            return to.leave(x) if here else RemoteArray(aval, to.placement, self.new)
        edge = StageEdge(StageArray(tuple(aval.shape), placement, self.old), to, aval)
        pieces = self._exchange(x, edge, givers, takers)
        return to.leave(edge.enter(pieces)) if me() in takers else RemoteArray(aval, to.placement, self.new)

    def _exchange(self, x: Any, edge: StageEdge, givers: Sequence[int], takers: Sequence[int]) -> dict[int, Any]:
        """Send the pieces of an array to the processes that need them, and collect those for this one."""
        cluster = current()
        if cluster is None:
            raise ClusterError("remap: the meshes are in several processes; start them with python -m shardc run.")
        tag = f"remap {cluster.count('remap')}"
        found: dict[int, Any] = {}
        if me() in givers:
            assert not isinstance(x, RemoteArray)
            for peer in takers:
                numbers, buffers = edge.pack(x.physical if isinstance(x, PlacedArray) else x, peer)
                if peer == me():
                    found |= dict(zip(numbers, buffers, strict=True))
                else:
                    cluster.link(peer).send_tagged(tag, (" ".join(map(str, numbers)).encode(), buffers))
        if me() in takers:
            for peer in givers:
                if peer != me():
                    about, buffers = cluster.receive_tagged(peer, tag, "for what remap moves")
                    found |= dict(zip(map(int, about.split()), buffers, strict=True))
        return found
