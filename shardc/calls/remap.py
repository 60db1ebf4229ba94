"""`Function.remap`: one rank of a pipeline on other devices, and the state that moves there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from shardc.arrays.place import place_of
from shardc.arrays.placed import PlacedArray, StackedArray, is_placed
from shardc.arrays.remote_array import RemoteArray
from shardc.errors import ClusterError, MeshError, PipelineError
from shardc.execute.ways import Way, Ways
from shardc.machine.devices import me, processes_of
from shardc.machine.mesh import AnyMesh, auto_mesh, border
from shardc.passes.trace.trace import settings
from shardc.runtime.cluster import current
from shardc.runtime.transport.link import Packed


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


def mover(old: Mesh, new: Mesh) -> Callable[[Any], Any]:
    """A function that moves the arrays of a pytree from one mesh to another, which may be in another process.

    If they are in several processes, all processes call it together. Arrays elsewhere stay as they are.
    """
    link = border(old, new)

    def moved_leaf(x: Any) -> Any:
        if isinstance(x, StackedArray):
            return StackedArray([moved_leaf(p) for p in x.pieces])
        if not isinstance(x, jax.Array) or (given := place_of(x)).mesh != old:
            return x
        return _moved(x, Ways([Way(given, replace(given, mesh=new), link)], bool(settings()[0]), by_links=True))

    def move(tree: Any) -> Any:
        return jax.tree.map(moved_leaf, tree)

    return move


def _moved(x: Any, ways: Ways) -> Any:
    """An array at the place to which its way leads."""
    (way,) = ways.ways
    givers, takers = (sorted({p for p in at.processes if p is not None}) for at in (way.given, way.taken))
    values: tuple[Any, ...] = () if isinstance(x, RemoteArray) else (x.physical if is_placed(x) else x,)
    if ways.are_here:
        arrived = ways.move(values) if me() in takers else ()
    else:
        arrived = _exchanged(values, ways, givers, takers)
    if me() not in takers:
        return RemoteArray(way.taken.aval, way.taken.at, way.taken.device_mesh)
    (there,) = ways.arrive(arrived)
    return PlacedArray(there, x.shape, way.taken.at, way.taken.device_mesh) if is_placed(x) else there


def _exchanged(values: Sequence[Any], ways: Ways, givers: Sequence[int], takers: Sequence[int]) -> tuple[Any, ...]:
    """Send the parts of a message to the processes that need them; what arrives in this one, if it is one of them."""
    cluster = current()
    if cluster is None:
        raise ClusterError("remap: the meshes are in several processes; start them with python -m shardc run.")
    tag = f"remap {cluster.count('remap')}"
    parts: dict[int, Packed] = {}
    if me() in givers:
        left = ways.leave(values)
        for peer in takers:
            packed = ways.pack(peer, left)
            if peer == me():
                parts[peer] = packed
            else:
                cluster.link(peer).send_tagged(tag, packed)
    if me() not in takers:
        return ()
    for peer in givers:
        if peer != me():
            parts[peer] = cluster.receive_tagged(peer, tag, "for what remap moves")
    return ways.unpack(parts)
