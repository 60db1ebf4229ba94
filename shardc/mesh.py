"""Meshes and topologies: names, sizes, links and memory. Imports nothing of ours but the errors.

Figures of TPUs are those of the "How to Scale Your Model" book (Austin et al. 2025, chapters tpus and sharding), of
GPUs those of NVIDIA's data sheets and of autoparallel's cost model (H100: NVSwitch all-gather about 320 GB/s, 7 us
to launch a kernel).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, TypeAlias
from weakref import WeakKeyDictionary

import jax
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from shardc.errors import MeshError, did_you_mean


@dataclass(frozen=True)
class Link:
    """One mesh axis's connection.

    Attributes:
      bandwidth: bytes/s that a device can send along it.
      latency: seconds for each hop from neighbour to neighbour.
    """

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Topology:
    """What a device of a kind can do.

    Attributes:
      kind: name, as in `make_mesh(topology="v5p:4x4x2")`.
      flops: matrix operations per second, in bfloat16 (on CPU: float32).
      memory_bandwidth: bytes/s between the device and its memory.
      hbm: bytes of memory.
      link: the connection between neighbours along one mesh axis.
      shape: devices along each physical dimension; empty if not said.
    """

    kind: str
    flops: float
    memory_bandwidth: float
    hbm: int
    link: Link
    shape: tuple[int, ...] = ()


GB: Final = 10**9
TOPOLOGIES: Final[Mapping[str, Topology]] = MappingProxyType(
    {
        t.kind: t
        for t in (
            # Fake devices of one host share its cores and memory: 2 cores, 8 devices. Starting a collective alone takes
            # some 1e-4 s there; a step's many small ones are combined, so what counts for each is far less.
            Topology("cpu", 1e10, 4e9, 4 * GB, Link(1e9, 2e-7)),
            Topology("v4", 2.75e14, 1.2e12, 32 * GB, Link(9e10, 1e-7)),
            Topology("v5e", 1.97e14, 8.1e11, 16 * GB, Link(9e10, 1e-7)),
            Topology("v5p", 4.59e14, 2.8e12, 95 * GB, Link(1.8e11, 1e-7)),
            Topology("v6e", 9.2e14, 1.6e12, 32 * GB, Link(1.8e11, 1e-7)),
            Topology("h100", 9.89e14, 3.35e12, 80 * GB, Link(3.2e11, 1e-7)),
            Topology("h200", 9.89e14, 4.8e12, 141 * GB, Link(3.2e11, 1e-7)),
            Topology("b200", 2.25e15, 8e12, 180 * GB, Link(7e11, 1e-7)),
        )
    }
)

AnyMesh: TypeAlias = Mesh | AbstractMesh


@dataclass(frozen=True)
class MeshView:
    """What the planner knows of a mesh: names, sizes and the topology. Plans of equal views are equal."""

    axes: tuple[tuple[str, int], ...]
    topology: Topology
    taken: str = field(default="", compare=False, repr=False)
    """The axis that a pipeline's ranks lie along, if this is one rank's mesh: it stands in no placement."""
    sizes: Mapping[str, int] = field(init=False, compare=False, hash=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", MappingProxyType(dict(self.axes)))

    @property
    def size(self) -> int:
        return math.prod(n for _, n in self.axes)

    def __str__(self) -> str:
        return ", ".join(f"{a}={n}" for a, n in self.axes) + f" on {self.topology.kind}"


def parse_bytes(text: str | int | float) -> int:
    """Bytes from `"95GB"`, `"16GiB"` or a number."""
    if not isinstance(text, str):
        return int(text)
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if match is None:
        raise MeshError(f'hbm={text!r} is not an amount of memory; write "95GB", "16GiB" or a number of bytes.')
    power = " KMGT".index(match[2].upper() or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def parse_topology(text: str) -> Topology:
    """A topology from its name and, after a colon, its shape: `"v5p:4x4x2"`."""
    kind, _, dims = text.partition(":")
    if kind not in TOPOLOGIES:
        raise MeshError(
            f"There is no topology {kind!r}.{did_you_mean(kind, TOPOLOGIES)} Known are {', '.join(TOPOLOGIES)}."
        )
    if dims and not re.fullmatch(r"\d+(x\d+)*", dims):
        raise MeshError(f"topology={text!r}: the shape after the colon is written 4x4x2.")
    return replace(TOPOLOGIES[kind], shape=tuple(int(d) for d in dims.split("x")) if dims else ())


def make_mesh(*, topology: str | None = None, hbm: str | int | None = None, **axes: int) -> AnyMesh:
    """A mesh with the named axes, over the first devices that are needed.

    Args:
      topology: plan for this machine and without its devices, as in `"v5p:4x4x2"`; an AbstractMesh comes back.
      hbm: memory of a device, in bytes or as `"95GB"`; overrides the topology's.
      **axes: name and size of each axis, outermost first.

    Returns:
      A `jax.sharding.Mesh`, or an `AbstractMesh` when a topology is named.

    Raises:
      MeshError: more devices are asked for than there are, or a size is not a positive integer.

    Example:
      >>> mesh = make_mesh(data=1, model=1)
      >>> dict(mesh.shape)
      {'data': 1, 'model': 1}
    """
    bad = [f"{a}={n!r}" for a, n in axes.items() if isinstance(n, bool) or not isinstance(n, int) or n < 1]  # pyright: ignore[reportUnnecessaryIsInstance]
    if bad or not axes:
        raise MeshError(
            f"A mesh wants a positive number of devices for each axis, got {', '.join(bad) or 'no axis'}; "
            "write shardc.make_mesh(data=4, model=2)."
        )
    need, shape, names = math.prod(axes.values()), tuple(axes.values()), tuple(axes)
    asked = " x ".join(f"{a}={n}" for a, n in axes.items())
    auto = (AxisType.Auto,) * len(names)
    if topology is not None:
        machine = parse_topology(topology)
        have = math.prod(machine.shape)
        if machine.shape and need > have:
            raise MeshError(f"The mesh {asked} wants {need} devices, topology {topology} has {have}.")
        kind = topology if hbm is None else f"{topology} hbm={parse_bytes(hbm)}"
        return AbstractMesh(shape, names, auto, abstract_device=AbstractDevice(kind, None, "shardc"))
    devices = jax.devices()
    if need > len(devices):
        raise MeshError(
            f"The mesh {asked} wants {need} devices, this machine has {len(devices)} ({devices[0].platform}). Use a "
            "smaller mesh; for fake CPU devices set the environment variable "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={need} before JAX starts; to plan without devices "
            'name a topology, as in topology="v5p".'
        )
    mesh = Mesh(np.asarray(devices[:need]).reshape(shape), names, auto)
    if hbm is not None:
        _hbm_of_mesh[mesh] = parse_bytes(hbm)
    return mesh


_hbm_of_mesh: WeakKeyDictionary[Mesh, int] = WeakKeyDictionary()
"""What `make_mesh(hbm=...)` said of a mesh of real devices; JAX interns meshes, so the last word counts."""

_KINDS: Final = (
    ("cpu", r"cpu"), ("v5p", r"v5p|v5$"), ("v5e", r"v5e|v5 ?lite"), ("v6e", r"v6"), ("v4", r"v4"),
    ("h200", r"h200"), ("h100", r"h100|a100"), ("b200", r"b200"),
)  # fmt: skip


def view(mesh: AnyMesh) -> MeshView:
    """The planner's view of a jax `Mesh` or `AbstractMesh`, whatever its axis types."""
    axes = tuple(mesh.shape.items())
    if isinstance(mesh, Mesh):
        device = mesh.devices.flat[0]
        machine = TOPOLOGIES[_known_kind(device.device_kind)]
        return MeshView(axes, replace(machine, hbm=_hbm_of_mesh.get(mesh, machine.hbm)))
    device = mesh.abstract_device
    if device is None:
        return MeshView(axes, TOPOLOGIES["cpu"])
    if device.platform != "shardc":
        return MeshView(axes, TOPOLOGIES[_known_kind(device.device_kind)])
    kind, _, hbm = device.device_kind.partition(" hbm=")
    machine = parse_topology(kind)
    return MeshView(axes, replace(machine, hbm=int(hbm)) if hbm else machine)


def _known_kind(device_kind: str) -> str:
    return next((kind for kind, pattern in _KINDS if re.search(pattern, device_kind.lower())), "h100")


def auto_mesh(mesh: AnyMesh) -> AnyMesh:
    """The same mesh with Auto axes, so that traced values carry no sharding in their types."""
    auto = (AxisType.Auto,) * len(mesh.axis_names)
    if mesh.axis_types == auto:
        return mesh
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, auto)
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names, auto, abstract_device=mesh.abstract_device)


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
    rest = tuple(a for a in mesh.axis_names if a != axis) or (axis,)  # a mesh wants an axis
    auto = (AxisType.Auto,) * len(rest)
    if isinstance(mesh, Mesh):
        ranks = np.split(mesh.devices, mesh.shape[axis], at)
        return [Mesh(d.reshape([mesh.shape[a] if a != axis else 1 for a in rest]), rest, auto) for d in ranks]
    sizes = tuple(mesh.shape[a] if a != axis else 1 for a in rest)
    return [AbstractMesh(sizes, rest, auto, abstract_device=mesh.abstract_device)] * mesh.shape[axis]
