"""Meshes: `make_mesh`, and the planner's view of a mesh: names, sizes, and the place of each axis in the machine."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Never, TypeAlias, TypeVar, cast
from weakref import WeakKeyDictionary

import jax
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from shardc import compat
from shardc.errors import MeshError, did_you_mean
from shardc.machine.devices import RemoteDevice, domain_of, memory_of, process_of, processes_of
from shardc.machine.devices import devices as devices_of_run
from shardc.machine.puts import LINKS, carrier_between
from shardc.machine.topology import (
    BETWEEN_PROCESSES,
    TOPOLOGIES,
    AxisSpan,
    DeviceLink,
    Topology,
    cut_spans,
    default_spans,
    lay_along,
    lay_out,
    parse_topology,
    read_topology,
    topology_of,
)
from shardc.runtime.cluster import current

AnyMesh: TypeAlias = Mesh | AbstractMesh


@dataclass(frozen=True)
class MeshView:
    """The planner's view of a mesh: names, sizes and the topology. Equal views give equal plans."""

    axes: tuple[tuple[str, int], ...]
    topology: Topology
    limit: int | None = None
    """Bytes of each device that a plan may use. None: unknown, as for fake devices, which share the host's memory."""
    shared: int = 1
    """Number of collectives that start together, for kinds that the compiler combines."""
    taken: str = field(default="", compare=False, repr=False)
    """The axis of a pipeline's ranks, if this is the mesh of one rank. It occurs in no placement."""
    avoids: frozenset[tuple[str, str]] = frozenset()
    """Kinds of steps, each over an axis, that a plan has only if it must: `shardc.sbp.cost.avoided_cost`."""
    cuts: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """The axes of the user's mesh that are cut in sub-axes, and the names of these, the outermost first."""
    sizes: Mapping[str, int] = field(init=False, compare=False, hash=False, repr=False)
    spans: Mapping[str, tuple[AxisSpan, ...]] = field(init=False, compare=False, hash=False, repr=False)
    """The spans of each axis."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", MappingProxyType(dict(self.axes)))
        spans = dict(self.topology.layout)
        if not spans.keys() >= {a for a, n in self.axes if n > 1}:
            spans = default_spans(self.topology, self.axes) | spans
        object.__setattr__(self, "spans", MappingProxyType({a: spans.get(a, ()) for a, _ in self.axes}))

    @property
    def size(self) -> int:
        return math.prod(n for _, n in self.axes)

    def cut(self, counts: Mapping[str, Sequence[int]]) -> MeshView:
        """This view with axes cut in sub-axes of so many devices, the outermost first: `data` in `data[0]`, ..."""
        axes, cuts, layout = list[tuple[str, int]](), list[tuple[str, tuple[str, ...]]](), dict(self.spans)
        for axis, n in self.axes:
            names = tuple(f"{axis}[{k}]" for k in range(len(counts.get(axis, ()))))
            axes += zip(names, counts[axis], strict=True) if names else [(axis, n)]
            if names:
                assert math.prod(counts[axis]) == n, (axis, counts)
                cuts.append((axis, names))
                layout |= zip(names, cut_spans(self.spans[axis], counts[axis]), strict=True)
        parts = dict(cuts)
        avoids = self.avoids | {(kind, name) for kind, a in self.avoids for name in parts.get(a, ())}
        topology = replace(self.topology, layout=tuple(layout.items()))
        return replace(self, axes=tuple(axes), topology=topology, avoids=avoids, cuts=tuple(cuts))

    @property
    def whole_axes(self) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the user's axes."""
        whole = {names[0]: (axis, math.prod(self.sizes[a] for a in names)) for axis, names in self.cuts}
        inner = {a for _, names in self.cuts for a in names[1:]}
        return tuple(whole.get(a, (a, n)) for a, n in self.axes if a not in inner)

    @property
    def whole(self) -> MeshView:
        """The view of the user's mesh, no axis of which is cut."""
        return replace(self, axes=self.whole_axes, cuts=()) if self.cuts else self

    def whole_names(self, axes: Iterable[str]) -> tuple[str, ...]:
        """The user's axes that these are, or are sub-axes of."""
        whole = {a: axis for axis, names in self.cuts for a in names}
        return tuple(dict.fromkeys(whole.get(a, a) for a in axes))

    def joined(self, axes: Sequence[str]) -> tuple[str, ...]:
        """The axes of a collective, a whole axis in place of all of its sub-axes."""
        found = list(axes)
        for axis, names in self.cuts:
            if set(names) <= set(found):
                found[found.index(names[0])] = axis
                found = [a for a in found if a not in names]
        return tuple(found)

    def spans_along(self, axes: Sequence[str]) -> tuple[AxisSpan, ...]:
        """The spans of several axes; all sub-axes of one are that one."""
        spans = dict(self.topology.layout) if self.cuts else self.spans
        return tuple(s for a in self.joined(axes) for s in spans.get(a, ()))

    @property
    def idle(self) -> tuple[str, ...]:
        """The axes of one device: they place nothing, and occur in no placement of a plan."""
        return tuple(a for a, n in self.axes if n == 1)

    @property
    def link(self) -> DeviceLink:
        """The link to the next mesh along the axis that this mesh was cut at; for a whole mesh, between neighbours."""
        cut = [a for a, _ in self.topology.layout if self.sizes.get(a, 1) == 1 and a not in dict(self.cuts)]
        return self.topology.link_along(cut[0]) if cut else self.topology.link

    def where_start_is_shared(self, by: int) -> MeshView:
        """This view for `by` collectives that the compiler combines: each pays an equal part of one start."""
        return self if by == self.shared else _shared(self, by)

    def goes_together(self, kind: str, axes: Sequence[str]) -> bool:
        """Whether a collective over these axes runs as one of its kind. True also if there is no smaller group."""
        most = dict(self.topology.together).get(kind, math.inf)
        n = math.prod(self.sizes[a] for a in axes)
        return n < self.size or n <= most or sum(self.sizes[a] > 1 for a in axes) == 1

    def __str__(self) -> str:
        return ", ".join(f"{a}={n}" for a, n in self.whole_axes) + f" on {self.topology.kind}"


@lru_cache(maxsize=1024)
def _shared(view: MeshView, by: int) -> MeshView:
    return replace(view, shared=by)


def parse_bytes(text: str | int | float) -> int:
    """Bytes from `"95GB"`, `"16GiB"` or a number."""
    if not isinstance(text, str):
        return int(text)
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if match is None:
        raise MeshError(f'hbm={text!r} is not an amount of memory; write "95GB", "16GiB" or a number of bytes.')
    power = " KMGT".index(match[2].upper() or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def _memory(hbm: str | int) -> int:
    """The bytes of `hbm=`. A number below 10 kB has lost its unit: no plan fits in so little.

    Raises:
      MeshError: it is no amount, or one without a unit below 10 kB.
    """
    unit = isinstance(hbm, str) and not hbm.strip().isdecimal()
    found = parse_bytes(hbm)
    if unit or found >= 10**4:
        return found
    raise MeshError(
        f'hbm={hbm!r} is read as bytes, and a device has more; write the unit: hbm="{found}GB", or hbm="{found}B" if '
        "so few are meant."
    )


@compat.api_boundary
def make_mesh(
    *unnamed: Never,
    topology: str | None = None,
    calibration: str | None = None,
    hbm: str | int | None = None,
    devices: Iterable[Any] | None = None,
    **axes: int,
) -> AnyMesh:
    """Make a mesh with the named axes over the first devices, of several processes over as many devices of each.

    The devices of a process lie side by side on the innermost axes, so that the outermost axes cross the border between
    processes.

    Args:
      *unnamed: none; axes are named.
      topology: the machine to plan for without its devices; the result is an AbstractMesh. A name and, after a colon,
        the devices along each physical dimension, the fastest first: `"v5p:4x4x2"`, `"h100:8x16"` (NVLink, then
        network), `"v5e:16x16x2"` (two slices); or a file of `python -m shardc calibrate`, whose name ends in `.json`.
        The last axis of the mesh lies along neighbours of the first dimension: put there what communicates most.
        Known: `cpu`; `v4`, `v5e`, `v5p`, `v6e`, `tpu7x`; `a100`, `a100-40`, `h100`, `h800`, `h200`, `b200`, `gb200`,
        `gb300`. A chip of `tpu7x` is two devices, which are its first dimension: `"tpu7x:2x4x4x4"`.
      calibration: such a file, to plan for the present devices with their measured figures.
      hbm: memory of a device, as `"95GB"` or, from 10 kB on, in bytes; overrides the topology's, or what JAX may take
        of the present TPUs and GPUs. JAX has one mesh object for equal axes over the same devices: `calibration` and
        `hbm` of the last call hold for functions that are made after it.
      devices: those of the mesh, in its order, as `shardc.devices()[4:]`; neighbours lie along the last axis. By
        default shardc chooses and orders them.
      **axes: name and size of each axis, outermost first. One size may be -1: as many devices as there are.

    Returns:
      A `jax.sharding.Mesh`, or an `AbstractMesh` when a topology is named.

    Raises:
      MeshError: axes are given as to `jax.make_mesh`; the mesh needs more devices than there are, or not the same
        number of each process; a size is not a positive integer; `devices` are not as many as the axes need, or one is
        there twice; or there is no such topology or file.

    Examples:
      >>> mesh = make_mesh(data=1, model=1)
      >>> dict(mesh.shape)
      {'data': 1, 'model': 1}
    """
    _refuse_order_of_jax(unnamed, axes)
    given = None if devices is None else _given_devices(devices, topology)
    axes = _filled(axes, topology, given)
    _check_axes(axes)
    if topology is not None and not isinstance(topology, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise MeshError(f'topology={topology!r} is no text; write a machine and its shape, as topology="v5p:4x4x2".')
    memory = None if hbm is None else _memory(hbm)
    if topology is not None and calibration is not None:
        raise MeshError("topology= plans without devices, calibration= for the present devices; give only one of them.")
    if topology is not None:
        return _mesh_without_devices(topology, memory, axes)
    mesh = _mesh_of_devices(axes, given)
    machine = None if calibration is None else read_topology(calibration)
    if calibration is not None and machine is not None:
        _check_room(axes, Path(calibration).name, machine)
    _note(_calibration_of_mesh, mesh, machine)
    _note(_hbm_of_mesh, mesh, memory)
    return mesh


def _refuse_order_of_jax(unnamed: Sequence[Any], axes: Mapping[str, Any]) -> None:
    """Raise MeshError for a call like that of `jax.make_mesh`, with sizes and then names; it shows the right call."""
    given = dict(zip(_OF_JAX, unnamed, strict=False)) | {n: axes[n] for n in _OF_JAX if n in axes}
    if not given:
        return
    sizes, names = given.get("axis_shapes", ()), given.get("axis_names", ("data", "model", "pipe"))
    if isinstance(sizes, Mapping):
        sizes, names = tuple(sizes.values()), tuple(sizes)
    sizes = sizes if isinstance(sizes, tuple | list) else (sizes,)
    names = (names,) if isinstance(names, str) else names
    pairs = [f"{a}={n}" for a, n in zip(names, sizes, strict=False)]
    known = pairs and len(pairs) == len(sizes) and all(isinstance(n, int | np.integer) for n in sizes)
    raise MeshError(
        "shardc.make_mesh takes the size of each axis by the name of the axis; write "
        f"shardc.make_mesh({', '.join(pairs) if known else 'data=4, model=2'})."
    )


_OF_JAX: Final = "axis_shapes", "axis_names"
"""The first arguments of `jax.make_mesh`."""


def _given_devices(devices: Iterable[Any], topology: str | None) -> list[Any]:
    """The devices that the user names."""
    if topology is not None:
        raise MeshError("topology= plans without devices, devices= names some that are there; give only one of them.")
    fix = "write a list of devices, as devices=shardc.devices()[:4]."
    if not isinstance(devices, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise MeshError(f"devices={devices!r}: {fix}")
    found = list(np.asarray(list(devices), object).flat)
    if wrong := [d for d in found if not isinstance(d, jax.Device | RemoteDevice)]:
        raise MeshError(f"devices=: {wrong[0]!r} is no device; {fix}")
    if twice := [d for d, n in Counter(found).items() if n > 1]:
        raise MeshError(f"devices=: {twice[0]} is there {found.count(twice[0])} times; name each device once.")
    return found


def _filled(axes: Mapping[str, int], topology: str | None, given: Sequence[Any] | None) -> dict[str, int]:
    """The axes with a size in place of -1, so that all devices are used."""
    free = [a for a, n in axes.items() if n == -1]
    others = [n for n in axes.values() if n != -1]
    if len(free) != 1 or any(type(n) is not int or n < 1 for n in others):
        return dict(axes)
    there = devices_of_run() if given is None else given
    devices = len(there) if topology is None else math.prod(parse_topology(topology).shape)
    size, rest = divmod(devices, math.prod(others))
    if rest or not size:
        raise MeshError(
            f"The mesh {_axes_text(axes)} cannot use all of {devices} device{'s' * (devices != 1)}: the product of the "
            f"other axes, {math.prod(others)}, does not divide {devices}. Give all sizes."
        )
    return {a: size if n == -1 else n for a, n in axes.items()}


def _check_axes(axes: Mapping[str, Any]) -> None:
    bad = [f"{a}={n!r}" for a, n in axes.items() if isinstance(n, bool) or not isinstance(n, int) or n < 1]
    options = ("topology", "calibration", "hbm", "devices")
    near = "".join(did_you_mean(a, options) for a, n in axes.items() if type(n) is not int)
    if bad or not axes:
        raise MeshError(
            f"A mesh needs a positive number of devices for each axis, got {', '.join(bad) or 'no axis'}; "
            f"write shardc.make_mesh(data=4, model=2), or data=-1 for all devices that there are.{near}"
        )


def _mesh_without_devices(topology: str, hbm: int | None, axes: Mapping[str, int]) -> AbstractMesh:
    machine = parse_topology(topology)
    _check_room(axes, topology, machine)
    kind = (
        machine.to_json() if topology.endswith(".json") else topology
    )  # the mesh does not depend on the file any more
    kind = kind if hbm is None else f"{kind} hbm={hbm}"
    auto = (AxisType.Auto,) * len(axes)
    return AbstractMesh(tuple(axes.values()), tuple(axes), auto, abstract_device=AbstractDevice(kind, None, _OURS))


def _mesh_of_devices(axes: Mapping[str, int], given: Sequence[Any] | None) -> Mesh:
    shape, auto = tuple(axes.values()), (AxisType.Auto,) * len(axes)
    if given is not None and len(given) != math.prod(shape):
        raise MeshError(
            f"The mesh {_axes_text(axes)} needs {math.prod(shape)} devices, devices= names {len(given)}; name as many, "
            "or give one axis the size -1."
        )
    devices = choose_devices(devices_of_run(), axes) if given is None else given
    return Mesh(np.asarray(devices).reshape(shape), tuple(axes), auto)


def choose_devices(devices: Sequence[Any], axes: Mapping[str, int]) -> list[Any]:
    """The devices of a mesh, in its order: the same number of each process, those of a process side by side unless
    they are on a torus.

    Raises:
      MeshError: there are too few devices, or not the same number of each process.
    """
    found, need = sorted(devices, key=along_links), math.prod(axes.values())
    processes = len({process_of(d) for d in found})
    if need > len(found):
        where = "this machine has" if processes == 1 else f"the {processes} processes of this run have"
        here = need if processes == 1 else -(-need // processes)
        fakes = (
            f"set XLA_FLAGS=--xla_force_host_platform_device_count={here} and NPROC={2 * here} before Python starts"
            if current() is None
            else f"start the run with --devices {here}"
        )
        raise MeshError(
            f"The mesh {_axes_text(axes)} needs {need} devices, {where} {len(found)} "
            f"({found[0].platform}). Use a smaller mesh; for fake CPU devices {fakes}; to plan without devices "
            'name a topology, as in topology="v5p".'
        )
    each = need // processes
    taken: Counter[int] = Counter()
    chosen: list[Any] = []
    for device in found:
        if taken[process_of(device)] < each:
            taken[process_of(device)] += 1
            chosen.append(device)
    if each * processes != need or len(chosen) != need:
        have = Counter(process_of(d) for d in found)
        least = min(have.values())
        raise MeshError(
            f"The mesh {_axes_text(axes)} needs {need} devices, and {processes} processes, the smallest of which has "
            f"{least}, cannot each give the same number. Make the product of the sizes a multiple of {processes}, at "
            f"most {processes * least}, as in shardc.make_mesh(data={processes * max(1, min(each, least))}); or start "
            "another number of processes."
        )
    return chosen


def _check_room(axes: Mapping[str, int], name: str, machine: Topology) -> None:
    need, have = math.prod(axes.values()), math.prod(machine.shape)
    if machine.shape and need > have:
        raise MeshError(f"The mesh {_axes_text(axes)} needs {need} devices, topology {name} has {have}.")


def _axes_text(axes: Mapping[str, int]) -> str:
    return " x ".join(f"{a}={n}" for a, n in axes.items())


_Noted = TypeVar("_Noted")


def _note(table: WeakKeyDictionary[Mesh, _Noted], mesh: Mesh, value: _Noted | None) -> None:
    """Record `value` for `mesh`; None removes the record."""
    if value is None:
        table.pop(mesh, None)
    else:
        table[mesh] = value


_hbm_of_mesh: WeakKeyDictionary[Mesh, int] = WeakKeyDictionary()
_calibration_of_mesh: WeakKeyDictionary[Mesh, Topology] = WeakKeyDictionary()
"""The arguments of `make_mesh` for a mesh of real devices. JAX interns meshes, so the last call counts."""

_OURS: Final = "shardc"
"""The platform of absent devices. Their device kind names the topology, the given memory and, for a part of a mesh, the
axes of the whole mesh."""


def view(mesh: AnyMesh) -> MeshView:
    """The planner's view of a jax `Mesh` or `AbstractMesh`, whatever its axis types."""
    axes = tuple(mesh.shape.items())
    if isinstance(mesh, Mesh):
        machine = _calibration_of_mesh.get(mesh)
        memory = _hbm_of_mesh.get(mesh) or min(filter(None, map(memory_of, mesh.devices.flat)), default=None)
        if machine is None:
            return _with_memory(axes, _machine_of(mesh), memory, _is_known(mesh.devices.flat[0].device_kind))
        if machine.shape:
            machine = replace(machine, layout=lay_out(machine, axes))
        return _with_memory(axes, machine, memory)
    device = mesh.abstract_device
    if device is None:
        return MeshView(axes, TOPOLOGIES["cpu"])
    if device.platform != _OURS:
        kind = device.device_kind
        return _with_memory(axes, TOPOLOGIES[topology_of(kind) or "h100"], None, _is_known(kind))
    kind, hbm, whole = _parse_kind(device.device_kind)
    machine = parse_topology(kind)
    if machine.shape:
        machine = replace(machine, layout=lay_out(machine, whole or axes))
    elif whole:
        machine = replace(machine, layout=tuple(default_spans(machine, whole).items()))
    return _with_memory(axes, machine, hbm or None)


def border(giver: AnyMesh | None, taker: AnyMesh | None) -> DeviceLink:
    """The link of one device between two meshes; None: the host.

    Meshes of one process, of one domain of fast links, or cut from one mesh, have the link between them; between all
    others lies the slowest fabric of the machine, which joins its hosts, or, where values go over links, a link. Fake
    devices without a topology are near.
    """
    meshes = [m for m in (giver, taker) if m is not None]
    if not meshes:
        return DeviceLink(TOPOLOGIES["cpu"].memory_bandwidth, 0.0)
    views = [view(m) for m in meshes]
    if len(meshes) == 1:
        machine = views[0].topology
        return DeviceLink(machine.host_bandwidth or views[0].link.bandwidth, views[0].link.latency)
    if _are_near(*meshes):
        return min((v.link for v in views), key=lambda link: link.bandwidth)
    known = [d for m in meshes if isinstance(m, Mesh) for d in m.devices.flat]
    if len(processes_of(known)) > 1 and carrier_between(known) == LINKS:
        return DeviceLink(BETWEEN_PROCESSES.bandwidth, BETWEEN_PROCESSES.latency)
    outer = [v.topology.fabrics[-1] if len(v.topology.fabrics) > 1 else BETWEEN_PROCESSES for v in views]
    return min((DeviceLink(f.bandwidth, f.latency) for f in outer), key=lambda link: link.bandwidth)


def _are_near(one: AnyMesh, other: AnyMesh) -> bool:
    """Whether two meshes are joined by the links within them."""
    if isinstance(one, Mesh) and isinstance(other, Mesh):
        ends = [*one.devices.flat, *other.devices.flat]
        domains = {domain_of(d) for d in ends}
        return len(processes_of(ends)) == 1 or (len(domains) == 1 and None not in domains)
    absent = [m.abstract_device for m in (one, other) if not isinstance(m, Mesh)]
    kinds = [_parse_kind(d.device_kind) for d in absent if d is not None and d.platform == _OURS]
    return len(kinds) < 2 or (kinds[0] == kinds[1] and bool(kinds[0][2]))


def is_topology(mesh: AbstractMesh) -> bool:
    """Whether a mesh is one of `make_mesh(topology=...)`, or a part of it."""
    return mesh.abstract_device is not None and mesh.abstract_device.platform == _OURS


def _with_memory(
    axes: tuple[tuple[str, int], ...], machine: Topology, given: int | None, known: bool = True
) -> MeshView:
    """The view of a mesh whose devices have the `given` memory, else that of their kind. A guess is no limit: fake
    devices share the memory of the host, and the memory of an unknown kind is not known."""
    limit = machine.hbm if known and not machine.kind.startswith("cpu") else None
    return MeshView(axes, replace(machine, hbm=given or machine.hbm), given or limit)


def _parse_kind(device_kind: str) -> tuple[str, int, tuple[tuple[str, int], ...]]:
    """The parts of an absent device's kind: topology, memory (0: the topology's), and the axes of the whole mesh."""
    match = re.fullmatch(r"(.*?)(?: hbm=(\d+))?(?: in (\S.*))?", device_kind, re.DOTALL)
    assert match is not None
    pairs = (pair.rpartition("=") for pair in match[3].split(",")) if match[3] else ()
    return match[1], int(match[2] or 0), tuple((axis, int(n)) for axis, _, n in pairs)


def _machine_of(mesh: Mesh) -> Topology:
    """The machine of a mesh's devices, with the layout of the mesh if the devices report their places."""
    machine = TOPOLOGIES[topology_of(mesh.devices.flat[0].device_kind) or "h100"]
    if len(machine.fabrics) == 1 and len({process_of(d) for d in mesh.devices.flat}) > 1:
        machine = replace(machine, fabrics=(*machine.fabrics, BETWEEN_PROCESSES))
    if len(machine.fabrics) == 1:
        return machine
    inside = bool(machine.pod) and machine.fabrics[0].kind == "switch"  # a chip has several devices
    rank = len(machine.fabrics) - 1 - inside
    places = places_of(list(mesh.devices.flat), on_torus=bool(machine.pod), rank=rank, in_chips=inside)
    if places is None:
        return machine
    at = np.asarray(places) - np.min(places, 0)
    numbered = at.reshape(*mesh.devices.shape, -1)

    def place(axis: int, i: int) -> tuple[int, ...]:
        index = [0] * mesh.devices.ndim
        index[axis] = i
        return tuple(int(x) for x in numbered[tuple(index)])

    machine = replace(machine, shape=tuple(int(n) for n in at.max(0) + 1))
    return replace(machine, shape=(), layout=lay_along(machine, tuple(mesh.shape.items()), place))


def places_of(
    devices: Sequence[Any], *, on_torus: bool, rank: int, in_chips: bool = False
) -> list[tuple[int, ...]] | None:
    """The place of each device: on a torus its first `rank` coordinates, after its number in its chip where these have
    several, else its number in the NVLink domain; then its slice or domain. None if the devices do not report it."""
    found: list[tuple[int, ...]] = []
    members: Counter[int] = Counter()
    for device in devices:
        domain = domain_of(device)
        if on_torus:
            coords = getattr(device, "coords", None)
            if coords is None:
                return None
            core = (getattr(device, "core_on_chip", 0),) if in_chips else ()
            found.append((*core, *coords[:rank], domain or 0))
        else:
            domain = process_of(device) if domain is None else domain
            found.append((members[domain], domain))
            members[domain] += 1
    return found


def along_links(device: Any) -> tuple[int, ...]:
    """Sort key: devices of a torus by coordinates, those in a chip fastest, then the first one; others by process and
    number."""
    place = getattr(device, "coords", None) if device.platform == "tpu" else None
    at = (process_of(device), device.id) if place is None else (*place[::-1], getattr(device, "core_on_chip", 0))
    return (domain_of(device) or 0, *at)


def _is_known(device_kind: str) -> bool:
    """Whether the kind determines the memory of a device. An A100 has one of two sizes."""
    return "a100" not in device_kind.lower() and topology_of(device_kind) is not None


def auto_mesh(mesh: AnyMesh) -> AnyMesh:
    """`mesh` with Auto axes, so that traced values carry no sharding in their types."""
    auto = (AxisType.Auto,) * len(mesh.axis_names)
    if mesh.axis_types == auto:
        return mesh
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, auto)
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names, auto, abstract_device=mesh.abstract_device)


def cut_mesh(mesh: Mesh, view: MeshView) -> Mesh:
    """The mesh with the axes of a view, some of which may be sub-axes, over the devices of `mesh` in its order."""
    if not view.cuts:
        return mesh
    return Mesh(mesh.devices.reshape([n for _, n in view.axes]), tuple(view.sizes), (AxisType.Auto,) * len(view.axes))


def without_mesh() -> AbstractContextManager[Any]:
    """A context in which no mesh is set, to be entered at once: shardc lowers for the mesh of its plan.

    JAX refuses `jax.set_mesh` inside a trace, where a user may ask for a plan too.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return nullcontext()
    if compat.inside_trace():
        return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))
    return jax.set_mesh(cast(Any, None))


def automatic() -> AbstractContextManager[Any]:
    """A context in which the axes of the current mesh are automatic, to be entered at once.

    Then traced values carry no sharding in their types. Explicit axes would refuse the user's constraints on them.
    """
    if not explicit_axes():
        return nullcontext()
    mesh: AbstractMesh = jax.sharding.get_abstract_mesh()
    devices = _current_mesh()
    if devices is None:
        return jax.sharding.use_abstract_mesh(cast(AbstractMesh, auto_mesh(mesh)))
    return jax.set_mesh(cast(Mesh, auto_mesh(devices)))


def explicit_axes() -> bool:
    """Whether the current mesh has axes that are not automatic."""
    mesh: AbstractMesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and not mesh.are_all_axes_auto


def as_it_is_set(mesh: AnyMesh) -> AnyMesh:
    """The current mesh if it differs from `mesh` only in axis types, else `mesh`: under a current mesh JAX accepts only
    arrays of its axis types."""
    there = _current_mesh()
    if there is None or auto_mesh(there) != auto_mesh(mesh):
        return mesh
    return there


def _current_mesh() -> Mesh | None:
    """The mesh of `jax.set_mesh`; None inside a trace, where JAX does not give it."""
    if compat.inside_trace() or (mesh := jax.sharding.get_mesh()).empty:
        return None
    return mesh


def meshes_along(mesh: AnyMesh, axis: str) -> list[AnyMesh]:
    """The meshes of a pipeline's ranks: one for each position on `axis`, with the other axes.

    Raises:
      MeshError: the mesh has no such axis.
    """
    if axis not in mesh.axis_names:
        near = did_you_mean(axis, mesh.axis_names)
        names = ", ".join(mesh.axis_names)
        raise MeshError(
            f'The mesh has no axis "{axis}" to run a pipeline along; it has {names}.{near} Name one in '
            f"shardc.Pipeline(axis=...), or make the mesh with one: shardc.make_mesh({axis}=4, ...)."
        )
    at = mesh.axis_names.index(axis)
    rest = tuple(a for a in mesh.axis_names if a != axis) or (axis,)  # a mesh needs an axis
    auto = (AxisType.Auto,) * len(rest)
    if isinstance(mesh, Mesh):
        ranks = np.split(mesh.devices, mesh.shape[axis], at)
        return [Mesh(d.reshape([mesh.shape[a] if a != axis else 1 for a in rest]), rest, auto) for d in ranks]
    sizes = tuple(mesh.shape[a] if a != axis else 1 for a in rest)
    device = mesh.abstract_device
    if device is not None and device.platform == _OURS:  # the whole mesh determines the layout of its axes
        whole = ",".join(f"{a}={n}" for a, n in mesh.shape.items())
        device = AbstractDevice(f"{device.device_kind} in {whole}", None, _OURS)
    return [AbstractMesh(sizes, rest, auto, abstract_device=device)] * mesh.shape[axis]


_STAGES: Final[WeakKeyDictionary[Mesh, set[tuple[int, ...]]]] = WeakKeyDictionary()


def note_stages(mesh: Mesh, stages: Sequence[int]) -> None:
    """Record the stages that run on a mesh, for texts."""
    _STAGES.setdefault(mesh, set()).add(tuple(stages))


def stages_text(mesh: AnyMesh) -> str:
    """`stage 2` or `stages 0, 4` for a mesh that runs these stages; empty for other meshes, or if pipelines differ."""
    known = _STAGES.get(mesh, ()) if isinstance(mesh, Mesh) else ()
    stages = next(iter(known)) if len(known) == 1 else ()
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}" if stages else ""
