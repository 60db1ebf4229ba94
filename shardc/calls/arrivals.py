"""Where the arrays of a call already live."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from shardc.arrays.placed import PlacedArray, StackedArray
from shardc.arrays.remote_array import RemoteArray
from shardc.calls.wrong_devices import wrong_devices_text
from shardc.errors import ArgumentError
from shardc.machine.mesh import AnyMesh, MeshView
from shardc.passes.trace.trace import Call, is_array
from shardc.sbp.placement import Placement


def arrivals(
    call: Call,
    mesh: AnyMesh,
    ranks: Sequence[AnyMesh] | None,
    left: Sequence[Mesh],
    where: str,
    view: MeshView,
) -> list[Placement | None]:
    """Where each array of a call lives on the mesh; None: anywhere else, it is put where the plan wants it.

    Args:
      ranks: the meshes of a pipeline's ranks; None: this is no pipeline.
      left: meshes that ranks were on before `Function.remap`.
      where, view: the function and its mesh, for errors.

    Raises:
      ArgumentError: arrays live on other devices.
    """
    elsewhere: list[tuple[str, str, Any]] = []
    found: list[Placement | None] = []
    for name, path, x in zip(call.names, call.paths, call.leaves, strict=True):
        if is_array(x):
            arrival = _arrival(x, mesh) if ranks is None else _arrival_in(x, mesh, ranks)
            found.append(arrival if not isinstance(arrival, str) else None)
            if isinstance(arrival, str):
                elsewhere.append((name, path, x))
    if elsewhere:
        raise ArgumentError(wrong_devices_text(where, view, elsewhere, left))
    return found


ELSEWHERE: Final = "elsewhere"
"""Says of an array that it lives on other devices, or on another mesh."""


def _arrival(x: Any, mesh: AnyMesh) -> Placement | str | None:
    """Where an array lives on the mesh; None if it may be put anywhere; or ELSEWHERE."""
    if isinstance(x, StackedArray):
        return ELSEWHERE
    if isinstance(x, PlacedArray):
        return x.placement if _is_same(x.mesh, mesh) else ELSEWHERE
    sharding = getattr(x, "sharding", None)
    if sharding is None or (isinstance(x, jax.Array) and not getattr(x, "committed", True)):
        return None
    if isinstance(sharding, NamedSharding) and _is_same(sharding.mesh, mesh):
        idle = [a for a, n in mesh.shape.items() if n == 1]
        return Placement.from_sharding(sharding).without(idle)
    if isinstance(mesh, Mesh) and set(sharding.device_set) == set(mesh.devices.flat) and sharding.is_fully_replicated:
        return Placement()
    return ELSEWHERE


def _is_same(theirs: AnyMesh, ours: AnyMesh) -> bool:
    """Whether two meshes have the same axes and devices, as far as they have devices."""
    if tuple(theirs.shape.items()) != tuple(ours.shape.items()):
        return False
    if isinstance(theirs, AbstractMesh) or isinstance(ours, AbstractMesh):
        return True
    return np.array_equal(theirs.devices, ours.devices)


def _arrival_in(x: Any, mesh: AnyMesh, meshes: Sequence[AnyMesh]) -> Placement | str | None:
    """The placement of an array of a pipeline: on one rank's mesh, or on the whole mesh."""
    if isinstance(x, StackedArray):
        return x.placement if x.mesh in meshes else None
    if isinstance(x, RemoteArray):
        return x.placement if x.mesh in meshes else ELSEWHERE
    devices = set(x.sharding.device_set) if isinstance(x, jax.Array) else set[Any]()
    for m in meshes:
        if isinstance(m, Mesh) and (devices == set(m.devices.flat) or (isinstance(x, PlacedArray) and x.mesh == m)):
            return _arrival(x, m)
    if isinstance(x, jax.Array) and not isinstance(x, PlacedArray) and not x.is_fully_addressable:
        return _arrival_on_all(x, mesh, meshes[0])
    if isinstance(x, jax.Array) and getattr(x, "committed", False) and isinstance(mesh, Mesh):
        return None if devices <= set(mesh.devices.flat) else _arrival(x, mesh)
    return _arrival(x, meshes[0]) if not isinstance(x, jax.Array) else None


def _arrival_on_all(x: jax.Array, mesh: AnyMesh, rank: AnyMesh) -> Placement | str:
    """The placement of an array of several processes on the mesh of all ranks: each rank has it on its own devices."""
    sharding = x.sharding
    if not isinstance(sharding, NamedSharding) or not _is_same(sharding.mesh, mesh):
        return ELSEWHERE
    idle = [a for a, n in mesh.shape.items() if n == 1]
    placement = Placement.from_sharding(sharding).without(idle)
    return placement if all(a in rank.axis_names for a in placement) else ELSEWHERE
