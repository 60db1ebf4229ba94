"""Ways: the values of a message, carried from the places where they are given to those where they are taken.

    physical array --leave--> at the placement that leaves --cross, or pack and unpack--> that arrives --arrive--> taken

`sbp/way.py` plans each way. `leave` and `arrive` launch the boxings of the plan, each in the thread that launches all
programs of its mesh. Between them stands a carrier:
- `cross`, if both meshes are in this process, or no parcel goes from one of their processes to another: the parcels are
  cut on the giver's devices, copied one by one and joined on the taker's; all is launched and nothing waited for;
- a link, if a mesh has devices in other processes: `pack` makes the bytes for one of them, `unpack` puts the bytes of
  all on the devices here.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from threading import Lock
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from shardc import compat
from shardc.arrays.fetch import of_words, words
from shardc.arrays.pieces import as_bytes, from_bytes
from shardc.arrays.place import Place, place_of
from shardc.arrays.placed import StackedArray, as_jax, is_placed
from shardc.errors import ClusterError
from shardc.machine.devices import me
from shardc.machine.launch_order import in_launch_order, ordered_devices
from shardc.machine.puts import HERE, LINKS, PUT, Outgoing
from shardc.machine.topology import DeviceLink
from shardc.passes.lower.lower_boxing import emit_step
from shardc.runtime.transport.link import Packed
from shardc.sbp.boxing import Boxing
from shardc.sbp.layout import bits_of, physical_shape, physical_spec
from shardc.sbp.placement import Placement, local_shape
from shardc.sbp.way import Index, Parcel, WayPlan, boxes

Local: TypeAlias = tuple[int, ...]
"""Where a box begins in the block of a device."""


@dataclass(frozen=True)
class Way:
    """The way of one value.

    Attributes:
      given, taken: the places.
      link: the border between them.
      copied: whether the value may be overwritten where it is given: then a copy is sent.
    """

    given: Place
    taken: Place
    link: DeviceLink
    copied: bool = False

    @cached_property
    def carrier(self) -> str:
        """The carrier of the value: `here`, where none of it goes from process to process; `put` or `links`."""
        given, taken = self.given, self.taken
        if not (given.on_host or taken.on_host):
            return HERE if self.is_within else given.carrier_to(taken, self.plan)
        alone = {*given.processes, *taken.processes, *taken.takers} <= {me(), None}
        return HERE if alone or given.is_aligned_with(taken) else LINKS

    @cached_property
    def stays(self) -> bool:
        """Whether the value is already where it is taken."""
        given, taken = self.given, self.taken
        if given.on_host or taken.on_host:
            return given.mesh is None and taken.mesh is None and self.carrier == HERE
        return given.mesh == taken.mesh and given.placement == taken.placement

    @cached_property
    def is_within(self) -> bool:
        """Whether both places are on one mesh, within which a boxing leads from one to the other."""
        return not (self.given.on_host or self.taken.on_host) and self.given.mesh == self.taken.mesh

    @cached_property
    def plan(self) -> WayPlan:
        return self.given.way_to(self.taken, None if self.is_within else self.link)

    @cached_property
    def held(self) -> list[Index]:
        """The elements that each device of the giver has when they leave."""
        return boxes(self.plan.shape, self.plan.leaves, self.given.sizes)

    @cached_property
    def needed(self) -> list[Index]:
        """The elements that each device of the taker has when they have arrived."""
        return boxes(self.plan.shape, self.plan.arrives, self.taken.sizes)

    @cached_property
    def block(self) -> Local:
        """The shape of the block of a device of the taker, with its padding, when it has arrived."""
        return local_shape(self.plan.shape, self.plan.arrives, self.taken.sizes)

    @property
    def moved_dtype(self) -> Any:
        """The dtype of the numbers that move: elements of less than a byte move as bytes."""
        dtype = self.given.words[1]
        if bits_of(dtype) >= 8:
            return dtype
        return np.dtype(np.int8 if jax.numpy.issubdtype(dtype, jax.numpy.signedinteger) else np.uint8)

    # -- on the giver's side

    def leave(self, x: Any) -> Any:
        """The numbers of a physical array, or of a host's value, as they leave."""
        if self.stays:
            return x.copy() if self.copied and hasattr(x, "copy") else x
        if self.given.on_host:
            return x.copy() if self.copied and isinstance(x, jax.Array) else x
        if not self.given.is_here:
            return None
        if self.taken.on_host and self.carrier == HERE:
            x = self.given.leave(x)
            x = x.copy() if self.copied else x
            if self.given.mesh != self.taken.mesh:
                x.copy_to_host_async()
            return x
        x = words(x)
        if self.plan.before.steps:
            return boxed(self.given.mesh, self.plan.shape, self.plan.before, self.plan.given, self.plan.leaves)(x)
        return x.copy() if self.copied else x

    def entered(self, x: Any) -> jax.Array:
        """The physical array of a whole value, put where it is taken. One that is on another mesh of this process, as a
        pipeline's result, is moved: `jax.device_put` would wait for it."""
        here = place_of(x)
        if here.mesh not in (None, self.taken.mesh) and x.is_fully_addressable and not isinstance(x, StackedArray):
            x = moved(x, here, self.taken, self.link)
        return self.taken.enter(x)

    def pack(self, x: Any, peer: int) -> list[memoryview]:
        """The bytes of the parcels from this process to another one, or copies of those for itself, in the order of the
        plan. Waits for the device."""
        mine = self.parcels_to(peer)
        if not mine:
            return []
        if self.given.on_host:
            is_key = bool(self.given.words[0]) and isinstance(x, jax.Array)
            whole = np.asarray(words(as_jax(x)) if is_key else x, self.given.words[1])
            blocks = {0: whole}
        else:
            number = {d: i for i, d in enumerate(self.given.devices)}
            sources = {p.source for p in mine}
            shards = {number[s.device]: s.data for s in x.addressable_shards}
            blocks = {i: np.asarray(shards[i]) for i in sources}
        parts = [blocks[p.source][_slices(p.box, self.held[p.source])] for p in mine]
        return [as_bytes(part.copy() if peer == me() else part) for part in parts]

    def parcels_to(self, peer: int) -> list[Parcel]:
        """The parcels from this process to another one, in the order of the plan."""
        return [p for p in self.plan.parcels if self._giver(p) == me() and peer in self._takers(p)]

    def _giver(self, parcel: Parcel) -> int | None:
        return self.given.processes[parcel.source]

    def _takers(self, parcel: Parcel) -> tuple[int | None, ...]:
        return self.taken.takers if self.taken.on_host else (self.taken.processes[parcel.targets[0]],)

    # -- on the taker's side

    def unpack(self, parts: Mapping[int, Sequence[Any]]) -> Any:
        """The physical array as it has arrived, of the buffers of all processes; on the host the value. None for a
        process that has no devices of the taker's mesh."""
        if not self.taken.is_here:
            return None
        dtype = self.given.words[1]
        left = {p: iter(buffers) for p, buffers in parts.items()}
        blocks: dict[int, np.ndarray[Any, Any]] = {}
        for p in self.plan.parcels:
            giver = self._giver(p)
            if giver is None or giver not in parts or me() not in self._takers(p):
                continue
            piece = from_bytes(next(left[giver]), p.shape, dtype)
            for target in p.targets:
                if p.shape == self.block:
                    blocks[target] = piece
                    continue
                if target not in blocks:
                    blocks[target] = np.zeros(self.block, dtype)
                blocks[target][_slices(p.box, self.needed[target])] = piece
        mine = [i for i, process in enumerate(self.taken.processes) if process == me() or self.taken.on_host]
        for i in mine:
            if i not in blocks:
                blocks[i] = np.zeros(self.block, dtype)
        if self.taken.on_host:
            return of_words(blocks[0], self.taken.dtype)
        devices = self.taken.devices
        pieces = jax.device_put([blocks[i] for i in mine], [SingleDeviceSharding(devices[i]) for i in mine])
        return jax.make_array_from_single_device_arrays(*self.arrived, pieces)

    @cached_property
    def arrived(self) -> tuple[tuple[int, ...], NamedSharding]:
        """The shape and the sharding of the physical array that has arrived."""
        mesh = self.taken.sharding.mesh
        shape = physical_shape(self.plan.shape, self.plan.arrives, self.taken.sizes)
        return shape, NamedSharding(mesh, physical_spec(self.plan.arrives))

    @cached_property
    def is_empty(self) -> bool:
        """Whether an array without elements goes to another mesh: nothing is sent."""
        return 0 in self.given.shape and not (self.given.on_host or self.taken.on_host or self.is_within)

    def nothing(self) -> jax.Array:
        """An array without elements, as it arrives. No program makes it: in jax 0.10 results without elements have
        another sharding than their pieces."""
        shape, sharding = self.arrived
        return jax.make_array_from_callback(shape, sharding, lambda at: np.zeros(shape, self.given.words[1])[at])

    @property
    def is_finished(self) -> bool:
        """Whether what has arrived is what is taken."""
        weak = getattr(self.taken.aval, "weak_type", False)
        return self.taken.on_host or not (self.plan.after.steps or weak or self.given.words[0])

    def arrive(self, x: Any) -> Any:
        """The physical array of what has arrived."""
        if self.taken.on_host or self.stays or not self.taken.is_here:
            return x
        if self.plan.after.steps:
            x = boxed(self.taken.mesh, self.plan.shape, self.plan.after, self.plan.arrives, self.plan.taken)(x)
        x = of_words(x, self.taken.dtype)
        return compat.as_aval(x, self.taken.aval) if getattr(self.taken.aval, "weak_type", False) else x


def _slices(box: Index, inside: Index) -> tuple[slice, ...]:
    """A box as an index into the block of a device that holds `inside`."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(box, inside, strict=True))


@lru_cache(maxsize=4096)
def boxed(mesh: Any, shape: tuple[int, ...], boxing: Boxing, src: Placement, dst: Placement) -> Callable[[Any], Any]:
    """The program of a boxing: from physical array to physical array."""
    sizes = dict(mesh.shape)

    def local(x: Any) -> Any:
        x = x[0] if src.partial_axes else x
        for step in boxing.steps:
            x = emit_step(step, x, shape, sizes, lax.axis_index)
        return x[None] if dst.partial_axes else x

    run = jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=physical_spec(src), out_specs=physical_spec(dst), check_vma=False
        ),
        out_shardings=NamedSharding(mesh, physical_spec(dst)),  # an array without elements has no other sharding
    )  # fmt: skip
    return lambda x: in_launch_order(ordered_devices(mesh), lambda: run(x))


class Ways:
    """The ways of the values of a message, which all leave one mesh or host and arrive at one.

    Args:
      ways: of each value.
      wide: whether numbers of 64 bits are on. The threads that carry values lack this setting.
      by_links: whether values that leave the process go over links in any case.
    """

    def __init__(self, ways: Sequence[Way], wide: bool, by_links: bool = False) -> None:
        self.ways, self._wide, self._by_links = tuple(ways), wide, by_links
        self._counts: dict[int, tuple[int, int]] = {}  # of each process that takes: messages and bytes
        self._counting = Lock()  # a link's thread packs too

    @property
    def sent(self) -> int:
        """Bytes that have crossed the border from this process."""
        return sum(size for _, size in list(self._counts.values()))

    @property
    def planned(self) -> int:
        """Bytes that the messages sent from this process have by the plan."""
        found = 0
        for peer, (number, _) in list(self._counts.items()):
            ways = (self.ways[i] for i in self._crossing) if peer == me() else self.ways
            parcels = (p.elements * w.plan.itemsize for w in ways if not w.stays for p in w.parcels_to(peer))
            found += number * sum(parcels)
        return found

    def _count(self, peer: int, size: int) -> None:
        with self._counting:
            number, before = self._counts.get(peer, (0, 0))
            self._counts[peer] = number + 1, before + size

    @property
    def stay(self) -> bool:
        """Whether all values stay where they are, as they are."""
        return all(w.stays and not w.copied for w in self.ways)

    @cached_property
    def carrier(self) -> str:
        """What carries the message as a whole, as each value."""
        carriers = {w.carrier for w in self.ways if not w.is_empty}
        if carriers <= {HERE}:
            return HERE
        return PUT if carriers == {PUT} and not self._by_links else LINKS

    @property
    def are_here(self) -> bool:
        """Whether `move` carries the message, in each process of the two meshes."""
        return self.carrier == HERE

    @property
    def are_put(self) -> bool:
        return self.carrier == PUT

    @property
    def boxes(self) -> bool:
        """Whether collectives run on either side of the border."""
        return any(w.plan.boxing_bytes for w in self.ways if not w.stays)

    @cached_property
    def _digest(self) -> bytes:
        text = "; ".join(f"{w.plan.shape} {w.plan.itemsize} {w.plan.parcels}" for w in self.ways)
        return b"%08x" % zlib.crc32(text.encode())

    def leave(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """The values as they leave. In the thread of the giver's programs."""
        with jax.enable_x64(self._wide):
            left = tuple(w.leave(x) for w, x in zip(self.ways, values, strict=True))
            return self._cross.cut_here([left[i] for i in self._crossing]) if self.are_put else left

    def move(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """The values as they arrive, of those that are given, within this process. Launched, never waited for."""
        if self._is_copy:
            moved = tuple(self._cross.copy_alike(values))
            self._count(me(), self._cross.sent)
            return moved
        with jax.enable_x64(self._wide):
            left = [w.leave(x) for w, x in zip(self.ways, values, strict=True)]
            for i, w in enumerate(self.ways):
                if not w.stays and w.given.on_host and not w.taken.on_host:
                    left[i] = words(w.entered(left[i]))
                elif w.is_empty:
                    left[i] = w.nothing()
            if self._crossing:
                moved = [left[i] for i in self._crossing]
                for i, x in zip(self._crossing, self._cross(moved), strict=True):
                    left[i] = x
                self._count(me(), self._cross.sent)
        return tuple(left)

    @cached_property
    def _is_copy(self) -> bool:
        """Whether every value is copied as it is, from each device to the one of its number."""
        plain = all(not (w.copied or w.plan.before.steps or w.given.words[0]) for w in self.ways)
        return plain and len(self._crossing) == len(self.ways) and bool(self.ways) and self._cross.is_copy

    @cached_property
    def _crossing(self) -> list[int]:
        """The values that cross from devices to devices."""
        return [
            i for i, w in enumerate(self.ways)
            if not (w.stays or w.is_within or w.is_empty or w.given.on_host or w.taken.on_host)
        ]  # fmt: skip

    @cached_property
    def _cross(self) -> _Crossing:
        return _Crossing([self.ways[i] for i in self._crossing])

    @cached_property
    def finishes(self) -> bool:
        """Whether `arrive` has something to do."""
        return self.are_put or not all(w.stays or w.is_finished for w in self.ways)

    def arrive(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """The values as they are taken. In the thread of the taker's programs."""
        if not self.finishes:
            return tuple(values)
        with jax.enable_x64(self._wide):
            if self.are_put:
                joined = dict(zip(self._crossing, self._cross.join_here(values), strict=True))
                values = [joined[i] if i in joined else w.nothing() for i, w in enumerate(self.ways)]
            return tuple(w.arrive(x) for w, x in zip(self.ways, values, strict=True))

    # -- from process to process

    def pack(self, peer: int, values: Sequence[Any]) -> Packed:
        """The part of a message for another process: bytes for a link, or arrays to put. Waits for the devices: of a
        value that cannot be computed nothing is sent."""
        if self.are_put:
            found = self._cross.parcels_to(peer, values)
            if peer != me():
                self._count(peer, sum(x.nbytes for x in found))
            return json.dumps([self._digest.decode(), len(found)]).encode(), found
        buffers = [b for w, x in zip(self.ways, values, strict=True) for b in w.pack(x, peer)]
        if peer != me():
            self._count(peer, sum(b.nbytes for b in buffers))
        counts = [len(w.parcels_to(peer)) for w in self.ways]
        return json.dumps([self._digest.decode(), counts]).encode(), buffers

    def unpack(self, parts: Mapping[int, Packed]) -> tuple[Any, ...]:
        """The values as they arrive, of the parts of all sending processes."""
        of: list[dict[int, Sequence[Any]]] = [{} for _ in self.ways]
        for peer, (about, buffers) in parts.items():
            digest, counts = json.loads(about)
            if digest != self._digest.decode():
                raise ClusterError(f"process {peer} has planned another way for what it sends here.")
            if self.are_put:
                continue
            rest = iter(buffers)
            for found, count in zip(of, counts, strict=True):
                found[peer] = [next(rest) for _ in range(count)]
        with jax.enable_x64(self._wide):
            if self.are_put:
                return self._cross.came({peer: arrays for peer, (_, arrays) in parts.items()})
            return tuple(w.unpack(found) for w, found in zip(self.ways, of, strict=True))


# --- parcels from mesh to mesh within a process -----------------------------------------------------------------------


class _Cut:
    """How parcels of one shape are cut, copied and joined for one value: as slots, of which each device fills one.

    Attributes:
      shape: of each parcel.
      cut: for each slot of the giver and each of its devices, where the parcel begins in its block.
      join: for each slot of the taker and each of its devices, where it begins there; None: it gets none.
      copies: for each slot of the taker and each of its devices, the slot and the device of the giver.
    """

    def __init__(self, way: Way, shape: Local) -> None:
        self.shape = shape
        parcels = [(p.source, t, p.box) for p in way.plan.parcels if p.shape == shape for t in p.targets]
        rank = len(shape)
        givers, takers = len(way.held), len(way.needed)
        self.cut: list[list[Local]] = []
        self.join: list[list[Local | None]] = []
        self.copies: list[list[tuple[int, int] | None]] = []
        slots: dict[tuple[int, Index], int] = {}
        sent, got = [0] * givers, [0] * takers
        for source, target, box in parcels:
            if (source, box) not in slots:
                slot = slots[source, box] = sent[source]
                sent[source] += 1
                if slot == len(self.cut):
                    self.cut.append([(0,) * rank] * givers)
                self.cut[slot][source] = _start(box, way.held[source])
            slot = got[target]
            got[target] += 1
            if slot == len(self.join):
                self.join.append([None] * takers)
                self.copies.append([None] * takers)
            self.join[slot][target] = _start(box, way.needed[target])
            self.copies[slot][target] = slots[source, box], source

    def leaves_whole(self, way: Way) -> bool:
        """Whether the block of each device that sends is one parcel."""
        block = local_shape(way.plan.shape, way.plan.leaves, way.given.sizes)
        return self.shape == block and len(self.cut) == 1 and way.moved_dtype == way.given.words[1]

    def is_in_order(self) -> bool:
        """Whether each device of the taker gets what the device of its number gives."""
        return [at for row in self.copies for at in row] == [(0, i) for i in range(len(self.cut[0]))]

    def arrives_whole(self, way: Way) -> bool:
        """Whether the block of each device of the taker is one parcel."""
        return self.shape == way.block and None not in self.join[0] and way.moved_dtype == way.given.words[1]


def _start(box: Index, inside: Index) -> Local:
    return tuple(a - c for (a, _), (c, _) in zip(box, inside, strict=True))


class _Sent(NamedTuple):
    """A block that a process sends another one.

    Attributes:
      block: value, class of parcels, slot and device of the giver.
      targets: the slots and devices that need it.
    """

    block: tuple[int, int, int, int]
    targets: Sequence[tuple[int, int]]

    @property
    def receiver(self) -> int:
        """The device that it is sent to: devices of one process take turns."""
        return self.targets[self.block[3] % len(self.targets)][1]


class _Crossing:
    """Carries values from one mesh to another within this process, or within each of their processes: one program cuts
    all parcels, each is copied once, and one program joins them. Parcels that are whole blocks need no cut, or no join;
    values whose blocks go from each device to the one of its number are copied as they are.

    Attributes:
      sent: bytes of the parcels that a call copies, as the first one has found.
    """

    def __init__(self, ways: Sequence[Way]) -> None:
        self._ways = list(ways)
        given, taken = self._ways[0].given, self._ways[0].taken
        self._giver, self._taker = given.device_mesh, taken.device_mesh
        self._sources, self._targets = given.devices, taken.devices
        self._mine = [t for t, process in enumerate(taken.processes) if process == me()]
        self._cuts = [[_Cut(w, s) for s in sorted({p.shape for p in w.plan.parcels})] for w in self._ways]
        pairs = [(i, w, c) for i, (w, c) in enumerate(zip(self._ways, self._cuts, strict=True))]
        self._parted = [i for i, w, c in pairs if not (len(c) == 1 and c[0].leaves_whole(w))]
        self._joined = [i for i, w, c in pairs if not (len(c) == 1 and c[0].arrives_whole(w))]
        whole = {i for i, *_ in pairs} - {*self._parted, *self._joined}
        alone = len({*given.processes, *taken.processes}) == 1  # JAX copies no array of which others have a part
        self._alike = [i for i, _, c in pairs if alone and i in whole and c[0].is_in_order()]
        self._copy_alike = compat.copies_to([self._ways[i].arrived[1] for i in self._alike])
        self._blank: dict[tuple[int, Local, Any], Any] = {}
        self._between: dict[tuple[int, int], list[_Sent]] = {}
        self.sent = 0

    @property
    def is_copy(self) -> bool:
        """Whether all values are copied as they are: `copy_alike` copies them."""
        return len(self._alike) == len(self._ways)

    @cached_property
    def _all_copies(self) -> list[tuple[int, int, int, int, int, int]]:
        """All copies: value, class of parcels, slot and device of the giver, slot and device of the taker."""
        return [
            (i, c, at[0], at[1], slot, target)
            for i, cuts in enumerate(self._cuts)
            if i not in self._alike
            for c, cut in enumerate(cuts)
            for slot, row in enumerate(cut.copies)
            for target, at in enumerate(row)
            if at is not None
        ]

    @cached_property
    def _copies(self) -> list[tuple[int, int, int, int, int, int]]:
        """Those to devices here."""
        return [copy for copy in self._all_copies if copy[-1] in self._mine]

    @cached_property
    def _comes(self) -> list[tuple[int, int, int, int]]:
        """What comes to devices here: value, class of parcels, slot and device."""
        return [(i, c, slot, target) for i, c, _, _, slot, target in self._copies]

    def copy_alike(self, values: Sequence[Any]) -> Sequence[Any]:
        """The values that are copied as they are, on the taker's devices."""
        if not self.sent:
            self.sent = sum(shard.data.nbytes for x in values for shard in x.addressable_shards)
        return self._copy_alike(values)

    @cached_property
    def _copy(self) -> Callable[[Sequence[jax.Array]], Sequence[jax.Array]]:
        return compat.copies_to([SingleDeviceSharding(self._targets[t]) for *_, t in self._copies])

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        given = list(values)
        is_first = not self.sent
        alike = dict(zip(self._alike, self.copy_alike([given[i] for i in self._alike]), strict=True))
        blocks = self._cut(given)
        sent = [blocks[i, c, slot][self._sources[source]] for i, c, slot, source, _, _ in self._copies]
        if is_first:
            self.sent += sum(x.nbytes for x in sent)
        came = dict(zip(self._comes, self._copy(sent), strict=True))
        return self._join(came, alike)

    def _cut(self, values: Sequence[Any]) -> dict[tuple[int, int, int], dict[Any, Any]]:
        """The blocks of the devices here, by value, class of parcels and slot, but for what is copied as it is."""
        cut = iter(self._cutter(*(values[i] for i in self._parted)) if self._parted else ())
        blocks: dict[tuple[int, int, int], dict[Any, Any]] = {}
        for i, x in enumerate(values):
            if i in self._alike:
                continue
            if i not in self._parted:
                blocks[i, 0, 0] = _by_device(x)
                continue
            for c, of in enumerate(self._cuts[i]):
                for slot in range(len(of.cut)):
                    blocks[i, c, slot] = _by_device(next(cut))
        return blocks

    def _join(self, came: Mapping[tuple[int, int, int, int], Any], alike: Mapping[int, Any]) -> list[Any]:
        joined = iter(self._joiner(*self._slots(came)) if self._joined else ())
        return [
            alike[i] if i in alike else next(joined) if i in self._joined else self._put_together(i, came)
            for i in range(len(self._ways))
        ]

    # -- from process to process

    def _sent_between(self, giver: int, taker: int) -> list[_Sent]:
        """What devices of one process send to those of another, in the order in which it is sent: neighbours of one
        pair of devices are put in one call."""
        if (giver, taker) not in self._between:
            found: dict[tuple[int, int, int, int], list[tuple[int, int]]] = {}
            given, taken = self._ways[0].given.processes, self._ways[0].taken.processes
            for i, c, slot, source, into, target in self._all_copies:
                if (given[source], taken[target]) == (giver, taker):
                    found.setdefault((i, c, slot, source), []).append((into, target))
            sent = [_Sent(block, sorted(targets, key=lambda t: t[1])) for block, targets in found.items()]
            self._between[giver, taker] = sorted(sent, key=lambda s: (s.block[3], s.receiver, s.block))
        return self._between[giver, taker]

    @cached_property
    def _leaving(self) -> list[tuple[int, int, int, int]]:
        """The blocks of devices here that are sent: value, class of parcels, slot and device."""
        given = self._ways[0].given.processes
        found = ((i, c, slot, source) for i, c, slot, source, _, _ in self._all_copies)
        return [block for block in dict.fromkeys(found) if given[block[3]] == me()]

    def cut_here(self, values: Sequence[Any]) -> tuple[jax.Array, ...]:
        """The blocks of devices here that are sent. In the thread of the giver's programs."""
        blocks = self._cut(values)
        return tuple(blocks[i, c, slot][self._sources[source]] for i, c, slot, source in self._leaving)

    def parcels_to(self, peer: int, blocks: Sequence[jax.Array]) -> list[Any]:
        """What `cut_here` has cut for a process, each with the device there; for this one copies. Waits until it is
        computed: a transfer of what fails would never end."""
        of, sent = dict(zip(self._leaving, blocks, strict=True)), self._sent_between(me(), peer)
        arrays: list[Any] = jax.block_until_ready([of[s.block] for s in sent])
        devices = [self._targets[s.receiver] for s in sent]
        if peer == me():
            return list(compat.copies_to([SingleDeviceSharding(d) for d in devices])(arrays))
        return [Outgoing(x, device) for x, device in zip(arrays, devices, strict=True)]

    def came(self, parts: Mapping[int, Sequence[Any]]) -> tuple[jax.Array, ...]:
        """What has come to the devices here, of the arrays from each process: what several of them share comes to one,
        which the others copy."""
        found: dict[tuple[int, int, int, int], Any] = {}
        spread: list[tuple[tuple[int, int, int, int], Any]] = []
        for giver, arrays in parts.items():
            for s, x in zip(self._sent_between(giver, me()), arrays, strict=True):
                for slot, target in s.targets:
                    at = (*s.block[:2], slot, target)
                    if target == s.receiver:
                        found[at] = x
                    else:
                        spread.append((at, x))
        copy = compat.copies_to([SingleDeviceSharding(self._targets[at[3]]) for at, _ in spread])
        found |= zip((at for at, _ in spread), copy([x for _, x in spread]) if spread else (), strict=True)
        return tuple(found[at] for at in self._comes)

    def join_here(self, came: Sequence[jax.Array]) -> list[Any]:
        """The values as they arrive, of what has come. In the thread of the taker's programs."""
        return self._join(dict(zip(self._comes, came, strict=True)), {})

    def _put_together(self, i: int, came: Mapping[tuple[int, int, int, int], Any]) -> jax.Array:
        shape, sharding = self._ways[i].arrived
        pieces = [came[i, 0, 0, t] for t in self._mine]
        return jax.make_array_from_single_device_arrays(shape, sharding, pieces)

    def _slots(self, came: Mapping[tuple[int, int, int, int], Any]) -> list[jax.Array]:
        """The arrays that the joining program takes: for each slot one parcel of each device."""
        found: list[jax.Array] = []
        for i in self._joined:
            dtype = self._ways[i].moved_dtype
            for c, of in enumerate(self._cuts[i]):
                for slot in range(len(of.join)):
                    pieces = [
                        came[i, c, slot, t] if of.join[slot][t] is not None else self._empty(t, of.shape, dtype)
                        for t in self._mine
                    ]
                    shape = _stacked(of.shape, len(self._targets))
                    found.append(jax.make_array_from_single_device_arrays(shape, self._each(self._taker), pieces))
        return found

    def _empty(self, target: int, shape: Local, dtype: Any) -> Any:
        key = target, shape, dtype
        if key not in self._blank:
            self._blank[key] = jax.device_put(np.zeros(shape or 1, dtype), self._targets[target])
        return self._blank[key]

    @staticmethod
    def _each(mesh: Mesh) -> NamedSharding:
        """The sharding of an array that has rows for each device."""
        return NamedSharding(mesh, PartitionSpec(tuple(mesh.axis_names)))

    @cached_property
    def _cutter(self) -> Any:
        mesh, every = self._giver, PartitionSpec(tuple(self._giver.axis_names))
        ways = [(self._ways[i], self._cuts[i]) for i in self._parted]

        def local(*xs: Any) -> list[Any]:
            device = lax.axis_index(tuple(mesh.axis_names))
            found: list[Any] = []
            for x, (way, cuts) in zip(xs, ways, strict=True):
                x = x.astype(way.moved_dtype)
                for of in cuts:
                    for starts in of.cut:
                        at = jax.numpy.asarray(np.asarray(starts, np.int32).reshape(len(starts), -1))[device]
                        parcel = lax.dynamic_slice(x, list(at), of.shape)
                        found.append(parcel.reshape(of.shape or (1,)))
            return found

        count = sum(len(of.cut) for _, cuts in ways for of in cuts)
        specs = tuple(physical_spec(w.plan.leaves) for w, _ in ways)
        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=[every] * count, check_vma=False))

    @cached_property
    def _joiner(self) -> Any:
        mesh, every = self._taker, PartitionSpec(tuple(self._taker.axis_names))
        ways = [(self._ways[i], self._cuts[i]) for i in self._joined]

        def local(*slots: Any) -> list[Any]:
            device, left = lax.axis_index(tuple(mesh.axis_names)), iter(slots)
            return [_joined(way, cuts, left, device) for way, cuts in ways]

        count = sum(len(of.join) for _, cuts in ways for of in cuts)
        specs = [physical_spec(w.plan.arrives) for w, _ in ways]
        join = jax.shard_map(local, mesh=mesh, in_specs=(every,) * count, out_specs=specs, check_vma=False)
        return jax.jit(join, out_shardings=[NamedSharding(mesh, s) for s in specs])


def _joined(way: Way, cuts: Sequence[_Cut], slots: Any, device: Any) -> Any:
    """The block of a device, of its parcels."""
    if len(cuts) == 1 and (dim := _row_of(cuts[0], way.block)) is not None:
        order = sorted(range(len(cuts[0].join)), key=lambda k: cuts[0].join[k][0] or ())
        parcels = [next(slots) for _ in cuts[0].join]
        return lax.concatenate([parcels[k] for k in order], dim).astype(way.given.words[1])
    block = jax.numpy.zeros(way.block, way.moved_dtype)
    for of in cuts:
        for starts in of.join:
            table = np.asarray([s or (0,) * len(of.shape) for s in starts], np.int32).reshape(len(starts), -1)
            there = np.asarray([s is not None for s in starts])
            parcel = next(slots).reshape(of.shape)
            new = lax.dynamic_update_slice(block, parcel, list(jax.numpy.asarray(table)[device]))
            block = new if there.all() else jax.numpy.where(jax.numpy.asarray(there)[device], new, block)
    return block.astype(way.given.words[1])


def _row_of(of: _Cut, block: Local) -> int | None:
    """The dimension along which the parcels of each device lie side by side and fill its block; None: they do not."""
    dims = [d for d, (n, whole) in enumerate(zip(of.shape, block, strict=True)) if n != whole]
    if len(dims) != 1 or of.shape[dims[0]] * len(of.join) != block[dims[0]]:
        return None
    alike = all(start == row[0] for row in of.join for start in row)
    return dims[0] if alike else None


def _stacked(shape: Local, devices: int) -> Local:
    """The shape of an array that has such rows for each device."""
    return (devices * shape[0], *shape[1:]) if shape else (devices,)


def _by_device(x: jax.Array) -> dict[Any, Any]:
    return {shard.device: shard.data for shard in x.addressable_shards}


class WaysCodec:
    """The codec of a network (`shardc.runtime.distributed_network.Codec`).

    Args:
      channels: the ways of each channel; None for channels that carry nothing.
    """

    def __init__(self, channels: Sequence[Ways | None]) -> None:
        self._channels = channels

    @property
    def put_channels(self) -> list[int]:
        """The channels whose values JAX carries, from device to device."""
        return [i for i, ways in enumerate(self._channels) if ways is not None and ways.are_put]

    def is_ready(self, value: Any) -> bool:
        arrays: list[Any] = [words(x) for x in value if isinstance(x, jax.Array)]
        return all(x.is_ready() for x in arrays)

    def pack(self, channel: int, peer: int, value: Any) -> Packed:
        ways = self._channels[channel]
        return (b"", ()) if ways is None else ways.pack(peer, value)

    def unpack(self, channel: int, parts: Mapping[int, Packed]) -> Any:
        ways = self._channels[channel]
        return () if ways is None else ways.unpack(parts)


@lru_cache(maxsize=1024)
def _way_alone(given: Place, taken: Place, link: DeviceLink, wide: bool) -> Ways:
    return Ways([Way(given, taken, link)], wide)


def moved(x: Any, given: Place, taken: Place, link: DeviceLink) -> Any:
    """An array, or a physical array, moved within this process: the leaf at its new place."""
    ways = _way_alone(given, taken, link, bool(jax.config.jax_enable_x64))  # pyright: ignore[reportAttributeAccessIssue]
    (there,) = ways.arrive(ways.move([x.physical if is_placed(x) else x]))
    return there if taken.on_host else taken.leave(there)
