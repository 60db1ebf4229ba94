"""Meshes of compile-only devices: XLA compiles for a machine that is not there, and nothing runs on it."""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from shardc import compat
from shardc.errors import MeshError
from shardc.machine.mesh import AnyMesh, along_links, auto_mesh, is_topology, view
from shardc.machine.topology import Topology, shape_of

_TARGETS: Final = Path(__file__).parent / "gpus"
"""For each GPU the text that tells XLA what it is."""
_ON_A_HOST: Final = {"gb200": 4, "gb300": 4}
"""GPUs of a host, where an NVLink domain has several hosts."""
_MEGACORE: Final = {"v4": {"chip_config_name": "megacore"}}
"""Options of libtpu for chips whose two cores are one device."""


def is_absent(mesh: AnyMesh) -> bool:
    """Whether a mesh has compile-only devices."""
    return isinstance(mesh, Mesh) and compat.is_compile_only(mesh.devices.flat[0])


def with_devices(mesh: AnyMesh) -> AnyMesh:
    """A mesh as programs are compiled for it: that of `make_mesh(topology=...)` with compile-only devices; any other
    one as it is.

    Raises:
      MeshError: JAX's plugin for the machine is not installed, or has no machine of this shape.
    """
    return _compile_only(mesh) if isinstance(mesh, AbstractMesh) and is_topology(mesh) else mesh


@lru_cache(maxsize=64)
def _compile_only(mesh: AbstractMesh) -> Mesh:
    """Device i of the mesh is the i-th of the machine along its links, as the layout of a plan has it."""
    machine, axes = view(mesh).topology, tuple(mesh.shape.items())
    devices = sorted(_devices_of(machine, shape_of(machine, axes), axes), key=along_links)
    placed = np.asarray(devices[: mesh.size]).reshape(mesh.axis_sizes)
    made = auto_mesh(Mesh(placed, mesh.axis_names))
    assert isinstance(made, Mesh)
    return made


def _devices_of(machine: Topology, shape: tuple[int, ...], axes: tuple[tuple[str, int], ...]) -> list[Any]:
    """The compile-only devices of a machine."""
    kind = machine.kind.removesuffix("-measured")
    sizes = ", ".join(f"{a}={n}" for a, n in axes)
    if machine.backend == "cpu":
        raise MeshError(
            f"XLA compiles for CPUs that are there: make the mesh without topology=, as shardc.make_mesh({sizes}), "
            f"with fake CPU devices (XLA_FLAGS=--xla_force_host_platform_device_count={math.prod(n for _, n in axes)})."
        )
    platform = "cuda" if machine.backend == "gpu" else "tpu"
    if not compat.has_plugin(platform):
        name, what = ("cuda", "CUDA") if platform == "cuda" else ("tpu", "TPUs")
        raise MeshError(
            f"To compile for {machine.kind}, JAX's plugin for {what} has to be installed, the machine need not be "
            f"there: pip install 'shardc[{name}]'. To plan for it needs no plugin."
        )
    if platform == "cuda":
        return compat.compile_only_devices("cuda", "", **_gpu_options(kind, shape))
    if not shape:
        raise MeshError(
            f'topology="{machine.kind}" plans for each axis on a ring of its own; to compile, say how many chips lie '
            f'along each dimension, as in shardc.make_mesh(topology="{machine.kind}:{_example(machine)}", {sizes}).'
        )
    name, options = _tpu_options(machine, kind, shape)
    try:
        return compat.compile_only_devices("tpu", name, **options)
    except jax.errors.JaxRuntimeError as error:
        raise MeshError(f"libtpu cannot compile for {name}: {error}") from error


def _gpu_options(kind: str, shape: tuple[int, ...]) -> dict[str, str]:
    """The options of XLA:GPU: the partitions that fast links join, hosts of each, GPUs of a host; and what a GPU is."""
    target = _TARGETS / f"{kind}.txtpb"
    if not target.exists():
        known = ", ".join(sorted(p.stem for p in _TARGETS.glob("*.txtpb")))
        raise MeshError(f"shardc has no description of {kind} for XLA, and cannot compile for it; it has {known}.")
    domain, domains = shape[0], math.prod(shape[1:])
    host = math.gcd(domain, _ON_A_HOST.get(kind, domain))
    return {"topology": f"{domains}x{domain // host}x{host}", "target_config": target.read_text("utf-8")}


def _tpu_options(machine: Topology, kind: str, shape: tuple[int, ...]) -> tuple[str, dict[str, Any]]:
    """The name of a slice, and libtpu's options: what lies beyond a pod's dimensions are slices."""
    rank = len(machine.pod)
    inside = machine.fabrics[0].kind == "switch"  # the first dimension are the devices of a chip
    chips = (*shape[inside:rank], *(1 for _ in range(rank - len(shape))))
    slices = math.prod(shape[rank:])
    several = {"num_slices": slices} if slices > 1 else {}
    return f"{kind}:{'x'.join(map(str, chips))}", {**_MEGACORE.get(kind, {}), **several}


def _example(machine: Topology) -> str:
    """A small shape, for texts."""
    inside = machine.fabrics[0].kind == "switch"
    return "x".join("2" for _ in range(inside + (3 if len(machine.pod) - inside == 3 else 2)))
