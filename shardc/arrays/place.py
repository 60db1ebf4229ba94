"""Places: where an array is, or is to be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from shardc import compat
from shardc.arrays.placed import PlacedArray, StackedArray, is_placed, leaf_aval, put_leaf
from shardc.machine.devices import process_of
from shardc.machine.mesh import AnyMesh, MeshView, view
from shardc.machine.topology import DeviceLink
from shardc.sbp.layout import is_plain, physical_shape, physical_spec, to_logical
from shardc.sbp.placement import AxisSizes, Placement, local_shape
from shardc.sbp.signature import is_extended
from shardc.sbp.way import WayPlan, plan_way


@dataclass(frozen=True)
class Place:
    """An array at a placement on a mesh, or on the host.

    Attributes:
      aval: shape, dtype and weak type of the logical array.
      mesh: None: the host.
      placement: None: nobody has said it; a pipeline puts the array on its stages.
      process: of a place on the host, the process of the run; None: each has it.
    """

    aval: Any
    mesh: AnyMesh | None = None
    placement: Placement | None = None
    process: int | None = None

    def __post_init__(self) -> None:
        if self.placement is not None:
            object.__setattr__(self, "placement", self.placement.resolve(len(self.aval.shape)))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.aval.shape)

    @property
    def dtype(self) -> Any:
        return self.aval.dtype

    @property
    def on_host(self) -> bool:
        """Whether the array is taken and given whole, as NumPy has it: it is on the host, or a pipeline's."""
        return self.mesh is None or self.placement is None

    @property
    def at(self) -> Placement:
        """The placement; of a place on the host, that of one device."""
        return Placement() if self.on_host or self.placement is None else self.placement

    @cached_property
    def view(self) -> MeshView | None:
        """The planner's view of the mesh; None for the host."""
        return None if self.on_host or self.mesh is None else view(self.mesh)

    @property
    def sizes(self) -> AxisSizes:
        return {} if self.on_host or self.mesh is None else dict(self.mesh.shape)

    @property
    def device_mesh(self) -> Mesh:
        """The mesh, which has devices."""
        assert isinstance(self.mesh, Mesh)
        return self.mesh

    @cached_property
    def devices(self) -> list[Any]:
        """The devices, in the order of the mesh; none on the host."""
        return list(self.mesh.devices.flat) if isinstance(self.mesh, Mesh) and not self.on_host else []

    @cached_property
    def processes(self) -> tuple[int | None, ...]:
        """The process of each device, in the order of the mesh; of the host its process. None: it is not known."""
        if self.on_host or not self.devices:
            return (self.process,)
        return tuple(map(process_of, self.devices))

    def is_beside(self, other: Place) -> bool:
        """Whether the devices of equal number of both places share a process and hold the same elements."""
        return self.processes == other.processes and self.sizes == other.sizes and self.at == other.at

    def way_to(self, other: Place, link: DeviceLink) -> WayPlan:
        """The plan of the way to another place over this border; all processes make the same one."""
        shape, itemsize = (*self.shape, *self.words[0]), int(self.words[1].itemsize)
        known = {*self.processes, *other.processes} - {None}
        together = None if len(known) < 2 or self.is_beside(other) else other.processes
        return plan_way(shape, itemsize, self.at, self.view, other.at, other.view, link, together)

    @cached_property
    def is_plain(self) -> bool:
        """Whether a jax.Array can be there as it is: nothing is partial or uneven."""
        return is_plain(self.shape, self.at, self.sizes)

    @cached_property
    def sharding(self) -> NamedSharding:
        """The sharding of the physical array, on a mesh with devices."""
        return NamedSharding(self.device_mesh, physical_spec(self.at))

    @property
    def physical_shape(self) -> tuple[int, ...]:
        return physical_shape(self.shape, self.at, self.sizes)

    @property
    def bytes(self) -> int:
        """Bytes on one device, or on the host."""
        return math.prod(local_shape(self.shape, self.at, self.sizes)) * self.dtype.itemsize

    @cached_property
    def words(self) -> tuple[tuple[int, ...], Any]:
        """The shape and dtype of the numbers that hold one element: of a random key its words."""
        if not is_extended(self.dtype):
            return (), np.dtype(self.dtype)
        return tuple(compat.words_of_keys(self.dtype)), np.dtype(np.uint32)

    def enter(self, x: Any) -> jax.Array:
        """The physical array of an array, put here from wherever it is."""
        one = is_placed(x) and not isinstance(x, StackedArray)
        if one and x.placement == self.placement and x.mesh == self.mesh and x.parts:
            return x.physical
        if self.is_plain and isinstance(x, jax.Array) and x.committed and not is_placed(x):
            if x.sharding == self.sharding:
                return x
            if (there := self._there(x)) is not None:
                return there
        made = put_leaf(x, self.device_mesh, self.at)
        return made.physical if is_placed(made) else made

    def _there(self, x: jax.Array) -> jax.Array | None:
        """The part of an array of a larger mesh on these devices, if each of them holds its piece already."""
        if x.is_fully_addressable:
            return None
        theirs, ours = x.sharding.devices_indices_map(x.shape), self.sharding.devices_indices_map(x.shape)
        if any(theirs.get(d) != at for d, at in ours.items()):
            return None
        held = {shard.device: shard.data for shard in x.addressable_shards}
        pieces = [held[d] for d in self.sharding.addressable_devices_indices_map(x.shape)]
        return jax.make_array_from_single_device_arrays(x.shape, self.sharding, pieces)

    def leave(self, x: jax.Array) -> jax.Array | PlacedArray:
        """The array that a physical array here stands for."""
        if self.is_plain or is_placed(x):
            return x
        return PlacedArray(x, self.shape, self.at, self.device_mesh)

    def value(self, x: jax.Array) -> np.ndarray[Any, Any]:
        """The logical value of a physical array, on the host."""
        return to_logical(np.asarray(x), self.shape, self.at, self.sizes)

    def __str__(self) -> str:
        return "host" if self.mesh is None else "its stages" if self.placement is None else str(self.placement)


def place_of(x: Any) -> Place:
    """The place of an array: a placed array's, or that of a sharding over a mesh; the host for all others."""
    if is_placed(x):
        return Place(x.aval, x.mesh, x.placement)
    sharding = getattr(x, "sharding", None)
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return Place(leaf_aval(x), sharding.mesh, Placement.from_sharding(sharding))
    return Place(leaf_aval(x))


def places(avals: Sequence[Any], mesh: AnyMesh | None, placements: Sequence[Placement | None]) -> list[Place]:
    return [Place(a, mesh, p) for a, p in zip(avals, placements, strict=True)]
