"""Places: where an array is, or is to be, and how it comes there."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, TypeAlias, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from numpy.typing import NDArray

from shardc import compat
from shardc.arrays.fetch import of_words, words
from shardc.arrays.placed import (
    PlacedArray,
    as_jax,
    handed_over,
    is_placed,
    leaf_aval,
    lies_here,
    moved,
    narrow,
    weakly,
)
from shardc.machine.devices import me, process_of
from shardc.machine.mesh import AnyMesh, MeshView, view
from shardc.machine.puts import HERE, LINKS, carrier_between
from shardc.machine.topology import DeviceLink
from shardc.sbp.layout import is_plain, physical_shape, physical_spec, to_logical
from shardc.sbp.placement import AxisSizes, Placement, local_shape
from shardc.sbp.signature import is_extended
from shardc.sbp.way import Index, WayPlan, boxes, plan_way

Pieces: TypeAlias = Mapping[Index, NDArray[Any]]
"""Boxes of a logical array, with their elements; of random keys their words, in one more dimension."""


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

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.aval.shape)

    @property
    def dtype(self) -> Any:
        return self.aval.dtype

    @property
    def on_host(self) -> bool:
        """Whether the array is taken and given whole, as NumPy has it: it is on the host, or a pipeline's."""
        return self.mesh is None or self.placement is None

    @cached_property
    def at(self) -> Placement:
        """The placement; of a place on the host, that of one device."""
        return Placement() if self.on_host or self.placement is None else self.placement

    @cached_property
    def view(self) -> MeshView | None:
        """The planner's view of the mesh; None for the host."""
        return None if self.on_host or self.mesh is None else view(self.mesh)

    @cached_property
    def sizes(self) -> AxisSizes:
        return {} if self.on_host or self.mesh is None else dict(self.mesh.shape)

    @property
    def takers(self) -> tuple[int | None, ...]:
        """The processes that have the value, of a place on the host."""
        return (self.process,)

    @property
    def is_here(self) -> bool:
        """Whether this process has devices of the place, or it is on the host."""
        return self.on_host or not isinstance(self.mesh, Mesh) or me() in self.processes

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
        if self.on_host:
            return (self.process,)
        if not isinstance(self.mesh, Mesh):  # only planned
            return (None,) * (0 if self.mesh is None else self.mesh.size)
        return tuple(map(process_of, self.devices))

    def is_aligned_with(self, other: Place) -> bool:
        """Whether the devices of equal number of both places share a process and hold the same elements."""
        return self.processes == other.processes and self.sizes == other.sizes and self.at == other.at

    def way_to(self, other: Place, link: DeviceLink | None) -> WayPlan:
        """The plan of the way to another place over this border, or on one mesh (None); all processes make the same
        one."""
        shape, itemsize = (*self.shape, *self.words[0]), int(self.words[1].itemsize)
        known = {*self.processes, *other.processes} - {None}
        alone = link is None or len(known) < 2 or self.is_aligned_with(other)
        ends = (None, None) if alone else (other.processes, self.processes)
        return plan_way(shape, itemsize, self.at, self.view, other.at, other.view, link, *ends)

    def carrier_to(self, other: Place, way: WayPlan) -> str:
        """The carrier of a value to another place: `here`, where no parcel goes from process to process, or where that
        is not known; else `put` or `links`."""
        if all(self.processes[p.source] == other.processes[p.targets[0]] for p in way.parcels):
            return HERE
        return LINKS if self.on_host or other.on_host else carrier_between([*self.devices, *other.devices])

    @cached_property
    def is_plain(self) -> bool:
        """Whether a jax.Array can be there as it is: nothing is partial or uneven."""
        return is_plain(self.shape, self.at, self.sizes)

    @cached_property
    def sharding(self) -> NamedSharding:
        """The sharding of the physical array, on a mesh with devices."""
        return NamedSharding(self.device_mesh, physical_spec(self.at))

    @property
    def plain_sharding(self) -> NamedSharding | None:
        """The sharding, where devices are known and a jax.Array can be there as it is."""
        known = isinstance(self.mesh, Mesh) and self.placement is not None and self.is_plain
        return self.sharding if known else None

    @cached_property
    def physical_shape(self) -> tuple[int, ...]:
        return physical_shape(self.shape, self.at, self.sizes)

    @property
    def block(self) -> tuple[int, ...]:
        """The shape of the piece of a device, with its padding; of the host's value."""
        return local_shape(self.shape, self.at, self.sizes)

    @property
    def bytes(self) -> int:
        """Bytes on one device, or on the host."""
        return math.prod(self.block) * self.dtype.itemsize

    @cached_property
    def words(self) -> tuple[tuple[int, ...], Any]:
        """The shape and dtype of the numbers that hold one element: of a random key its words."""
        if not is_extended(self.dtype):
            return (), np.dtype(self.dtype)
        return tuple(compat.words_of_keys(self.dtype)), np.dtype(np.uint32)

    @cached_property
    def held(self) -> tuple[Index | None, ...]:
        """The elements that each device holds, without padding, in the order of the mesh; None: it holds zeros alone.
        Of a partial sum the first device holds all."""
        sums = self.at.partial_axes if self.at.partial_op == "sum" else ()
        coordinates = itertools.product(*(range(n) for n in self.sizes.values()))
        first = [not any(i for a, i in zip(self.sizes, at, strict=True) if a in sums) for at in coordinates]
        found = boxes(self.shape, self.at, self.sizes)
        return tuple(b if one and all(i < j for i, j in b) else None for b, one in zip(found, first, strict=True))

    def needs(self) -> list[Index]:
        """The boxes of the logical array that this process needs, each once."""
        own = (me(), None)
        here = [b for b, process in zip(self.held, self.processes, strict=True) if process in own]
        return [b for b in dict.fromkeys(here) if b is not None]

    def made_of(self, pieces: Pieces) -> Any:
        """The array here, made of the boxes that this process needs. On the host it is a NumPy array, or keys on one
        device."""
        if self.on_host:
            (box,) = self.held
            tail, dtype = self.words
            value = np.zeros((*self.shape, *tail), dtype) if box is None else pieces[box]
            return of_words(value, self.dtype)
        return self.leave(self._physical(pieces.__getitem__, self.aval))

    def read(self, elements: Callable[[Index], NDArray[Any]]) -> Any:
        """The array on this mesh. Its boxes are made, and put on their devices, one after the other: the host has no
        two of them."""
        return self.leave(self._physical(elements, self.aval, one_by_one=True))

    @cached_property
    def _held_in(self) -> dict[Index, Index | None]:
        """The box that each shard of the physical array holds."""
        found = self.sharding.devices_indices_map(self.physical_shape).values()
        return dict(zip((index_of(i, self.physical_shape) for i in found), self.held, strict=True))

    def _physical(self, elements: Callable[[Index], NDArray[Any]], aval: Any, one_by_one: bool = False) -> jax.Array:
        """The physical array of boxes with elements of the type of `aval`."""
        lead = (None, ...) if self.at.partial_axes else (...,)

        def piece(shard: Index) -> NDArray[Any] | None:
            box = self._held_in[shard]
            return None if box is None else elements(box)[lead]

        return array_of(piece, self.physical_shape, self.sharding, aval, one_by_one)

    def enter(self, x: Any) -> jax.Array:
        """The physical array of an array, put here from wherever it is."""
        if type(x) is PlacedArray and x.placement == self.placement and x.mesh == self.mesh:
            return x.physical
        if self.is_plain and isinstance(x, jax.Array) and x.committed and not is_placed(x):
            if x.sharding == self.sharding:
                return x
            if (there := self._there(x)) is not None:
                return there
        if lies_here(x) is False:
            return moved(x, self.at, self.sharding)
        if self.is_plain:
            return put_whole(as_jax(x), self.sharding)
        aval = leaf_aval(x)
        host = narrow(np.asarray(words(x) if is_extended(aval.dtype) else x))
        return self._physical(lambda box: _cut(host, box), compat.shaped_array(self.shape, aval.dtype))

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

    def value(self, x: jax.Array) -> Any:
        """The logical value of a physical array, on the host as `made_of` gives it."""
        numbers = to_logical(np.asarray(words(x)), (*self.shape, *self.words[0]), self.at, self.sizes)
        return of_words(numbers, self.dtype)

    def __str__(self) -> str:
        return "host" if self.mesh is None else "its stages" if self.placement is None else str(self.placement)


@dataclass(frozen=True)
class StagesPlace(Place):
    """A pipeline's argument or result, which others give and take whole.

    Attributes:
      pieces: where its rows are, or all of it.
      others: the processes beside `process` that have the whole value.
    """

    pieces: tuple[Place, ...] = ()
    others: tuple[int, ...] = ()

    @property
    def takers(self) -> tuple[int | None, ...]:
        return (self.process, *self.others)


def place_of(x: Any) -> Place:
    """The place of an array, or of one that is only described: a placed array's, or that of a sharding over a mesh; the
    host for all others."""
    if is_placed(x):
        return Place(x.aval, x.mesh, x.placement)
    sharding = getattr(x, "sharding", None)
    if isinstance(sharding, NamedSharding) and not sharding.mesh.empty:
        return Place(leaf_aval(x), sharding.mesh, Placement.from_sharding(sharding))
    return Place(leaf_aval(x))


def index_of(slices: Sequence[slice], shape: Sequence[int]) -> Index:
    """The box that JAX writes as slices."""
    pairs = [s.indices(n)[:2] for s, n in zip(slices, shape, strict=True)]
    return tuple((start, max(start, stop)) for start, stop in pairs)


def places(avals: Sequence[Any], mesh: AnyMesh | None, placements: Sequence[Placement | None]) -> list[Place]:
    return [Place(a, mesh, p) for a, p in zip(avals, placements, strict=True)]


def array_of(
    piece: Callable[[Index], NDArray[Any] | None],
    shape: tuple[int, ...],
    sharding: Any,
    aval: Any,
    one_by_one: bool = False,
) -> jax.Array:
    """An array of its pieces.

    Args:
      piece: what stands at the beginning of a shard, by the shard's box; the rest of the shard is zero. None: nothing.
        Of random keys it is their words.
      shape, sharding: of the array.
      aval: its dtype and weak type.
      one_by_one: whether a piece is on a device, and gone from the host, before the next one is made.
    """
    tail, dtype = Place(aval).words
    at_device = sharding.addressable_devices_indices_map(shape).items() if one_by_one else ()
    devices = {index_of(at or (), shape): device for device, at in at_device}

    @cache
    def shard(box: Index) -> Any:
        if not one_by_one:
            return on_host(box)
        return jax.block_until_ready(jax.device_put(handed_over(on_host(box), sharding.mesh), devices[box]))

    def on_host(box: Index) -> NDArray[Any]:
        found, block = piece(box), (*(b - a for a, b in box), *tail)
        if found is not None and found.shape == block:
            return found
        filled = np.zeros(block, dtype)
        if found is not None:
            filled[tuple(map(slice, found.shape))] = found
        return filled

    made = jax.make_array_from_callback(
        (*shape, *tail), sharding, lambda at: shard(index_of((at or ())[: len(shape)], shape)), dtype=dtype
    )
    made = of_words(made, aval.dtype)
    return weakly(sharding)(made) if getattr(aval, "weak_type", False) else made


def _cut(x: NDArray[Any], box: Index) -> NDArray[Any]:
    """A box of an array, in memory of its own."""
    return np.array(x[tuple(slice(*pair) for pair in box)])


def put_whole(x: Any, sharding: NamedSharding) -> jax.Array:
    """Put an array at a sharding. If its devices are of several processes, each of which has the whole value, each
    takes its pieces; `jax.device_put` would compare the values by a broadcast first."""
    if sharding.is_fully_addressable:
        return jax.device_put(handed_over(x, cast(Mesh, sharding.mesh)), sharding)
    if lies_here(x) is False:
        return moved(x, Placement(), sharding)
    aval = compat.aval_of(x)
    host = np.asarray(words(x)) if is_extended(aval.dtype) else np.asarray(x, aval.dtype)
    return array_of(lambda box: _cut(host, box), aval.shape, sharding, aval)


def put_leaf(x: Any, mesh: Mesh, placement: Placement) -> jax.Array | PlacedArray:
    """Put one array at `placement`: a jax.Array if JAX can express that, else a PlacedArray."""
    place = Place(leaf_aval(x), mesh, placement)
    return place.leave(place.enter(x))
