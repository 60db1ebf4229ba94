"""Measures this machine: the speed of its devices' matrix products and memory, and the costs of their collectives; of
fake CPU devices also launches, and operations that are slow there.

The times of each collective along each mesh axis, for several sizes, are fitted by the formulas of `shardc.sbp.cost`:
seconds = start + hops · latency + bytes / rate, with one start for the machine, a latency for each axis and a rate for
each axis and kind, none of them negative. The fit minimizes errors relative to the time. The result is a topology whose
physical dimensions are the axes of the mesh, as a file that `make_mesh(topology=...)` and
`make_mesh(calibration=...)` read.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardc.arrays.place import put_whole
from shardc.errors import MeshError
from shardc.execute.process_group import group_of_mesh
from shardc.machine.mesh import view
from shardc.machine.topology import Fabric, Topology
from shardc.sbp.cost import COLLECTIVES, CollectiveKind, moved_bytes

CHAIN: Final = 8
"""Number of collectives in one measured program. They share the host's time to start it."""
DTYPES: Final = ("float32", "bfloat16")
SIZES: Final = (2**12, 2**16, 2**20)
"""Bytes that a device holds before a collective."""


@dataclass(frozen=True)
class Sample:
    """One measurement: a collective along an axis, the bytes that a device held and sent, and seconds."""

    axis: str
    kind: CollectiveKind
    held: int
    sent: int
    seconds: float


@dataclass(frozen=True)
class CollectiveFit:
    """The fitted cost of a kind of collective along an axis.

    Attributes:
      axis, kind: the axis and the kind of collective.
      latency: seconds of one hop along the axis.
      rate: bytes/s that a device sends.
      error: the largest |fitted - measured| / measured over the sizes.
    """

    axis: str
    kind: CollectiveKind
    latency: float
    rate: float
    error: float


@dataclass(frozen=True)
class Calibration:
    """The measurements and the fitted topology."""

    topology: Topology
    samples: tuple[Sample, ...]
    fits: tuple[CollectiveFit, ...]


def calibrate(mesh: Mesh, *, sizes: Sequence[int] = SIZES, turns: int = 5, width: int = 512) -> Calibration:
    """Measure a mesh of real devices.

    Args:
      mesh: the mesh.
      sizes: bytes that a device holds before a collective, at least two sizes.
      turns: repetitions of each measurement; the median is used.
      width: width of the matrices that are multiplied.

    Raises:
      MeshError: the mesh has no axis of several devices, or there are too few sizes.
    """
    axes = [a for a, n in mesh.shape.items() if n > 1]
    if not axes:
        raise MeshError("calibrate needs a mesh with an axis of at least two devices, as in --mesh data=4,model=2.")
    if len(set(sizes)) < 2 or min(sizes) < 4 * mesh.size:
        raise MeshError(f"calibrate needs at least two sizes, each of at least {4 * mesh.size} bytes on this mesh.")
    watch = Watch(mesh, turns)
    samples = tuple(
        measure_collective(mesh, axis, kind, size, watch) for axis in axes for kind in COLLECTIVES for size in sizes
    )
    known = view(mesh).topology
    rates = {dtype: measure_flops(mesh, dtype, width, watch) for dtype in DTYPES}
    launch, fits = fit_collectives(samples, dict(mesh.shape))
    fabrics = tuple(_fabric(axis, tier, fits) for tier, axis in enumerate(reversed(axes)))
    machine = Topology(
        f"{known.kind}-measured", rates["bfloat16"], measure_memory(mesh, 4 * max(sizes), watch), known.hbm, launch,
        fabrics, tuple(rates.items()), tuple(mesh.shape[a] for a in reversed(axes)), overlaps=known.overlaps,
        combined=known.combined, backend=known.backend, dispatch=known.dispatch, special=known.special,
    )  # fmt: skip
    if known.backend == "cpu":  # elsewhere the host runs ahead of the devices
        machine = replace(
            machine, dispatch=watch.idle, dispatch_array=measure_array(mesh, watch),
            vector=measure_vector(mesh, max(sizes), known.special, watch),
            shares=(("thin", measure_thin(mesh, watch) / rates["float32"]),),
            starts=(("convolution", measure_convolution(mesh, watch)),),
        )  # fmt: skip
    return Calibration(machine, samples, fits)


def _fabric(axis: str, tier: int, fits: Sequence[CollectiveFit]) -> Fabric:
    """A mesh axis as a physical dimension. The innermost axis is the first dimension."""
    mine = [f for f in fits if f.axis == axis]
    typical = statistics.median(f.rate for f in mine)
    return Fabric("switch", typical, mine[0].latency, tier, rates=tuple((f.kind, f.rate) for f in mine))


# --- fitting ---------------------------------------------------------------------------------------------------------


def fit_collectives(samples: Sequence[Sample], sizes: dict[str, int]) -> tuple[float, tuple[CollectiveFit, ...]]:
    """The start time of a collective, and the latency and rate of each axis and kind.

    The fit is non-negative least squares of the relative errors.
    """
    axes = list(dict.fromkeys(s.axis for s in samples))
    pairs: list[tuple[str, CollectiveKind]] = list(dict.fromkeys((s.axis, s.kind) for s in samples))
    matrix = np.zeros((len(samples), 1 + len(axes) + len(pairs)))
    for row, s in zip(matrix, samples, strict=True):
        row[0] = 1
        row[1 + axes.index(s.axis)] = _hops(s.kind, sizes[s.axis])
        row[1 + len(axes) + pairs.index((s.axis, s.kind))] = s.sent
    measured = np.asarray([s.seconds for s in samples])
    scale = np.abs(matrix / measured[:, None]).max(0)  # columns of equal size: seconds beside seconds for a byte
    found = scipy.optimize.nnls(matrix / measured[:, None] / scale, np.ones(len(samples)))[0] / scale
    errors = np.abs(matrix @ found / measured - 1)
    fits: list[CollectiveFit] = []
    for k, (axis, kind) in enumerate(pairs):
        slope = found[1 + len(axes) + k]
        error = max(e for e, s in zip(errors, samples, strict=True) if (s.axis, s.kind) == (axis, kind))
        latency, rate = float(found[1 + axes.index(axis)]), float(1 / max(slope, FASTEST))
        fits.append(CollectiveFit(axis, kind, latency, rate, float(error)))
    return float(found[0]), tuple(fits)


FASTEST: Final = 1e-14
"""The least seconds per byte, 100 TB/s: used if more bytes took no longer."""


def _hops(kind: CollectiveKind, n: int) -> int:
    return {"permute": 1, "all_reduce": 2 * (n - 1)}.get(kind, n - 1)


# --- measuring -------------------------------------------------------------------------------------------------------


class Watch:
    """Measures a call: the median seconds of several turns minus the time of a call that does nothing."""

    def __init__(self, mesh: Mesh, turns: int) -> None:
        self.turns, self.idle = turns, 0.0
        self._group = group_of_mesh(mesh)
        self.idle = self(jax.jit(jnp.negative), _on(mesh, np.ones(mesh.size, np.float32)))

    def __call__(self, call: Callable[[Any], Any], x: Any) -> float:
        jax.block_until_ready(call(x))  # compiles
        times: list[float] = []
        for _ in range(self.turns):
            start = time.perf_counter()
            jax.block_until_ready(call(x))
            times.append(time.perf_counter() - start)
        found = self._of_all(statistics.median(times))
        return max(found - self.idle, found / 10)

    def _of_all(self, seconds: float) -> float:
        """The most seconds of a process of the mesh: all of them then find the same figures."""
        if self._group is None:
            return seconds
        return max(float(each["seconds"]) for each in self._group.gather("calibrate", {"seconds": repr(seconds)}))


def _on(mesh: Mesh, x: np.ndarray) -> jax.Array:
    """The array split over all devices."""
    return put_whole(x, NamedSharding(mesh, _split(mesh)))


def _split(mesh: Mesh) -> PartitionSpec:
    return PartitionSpec(tuple(mesh.axis_names))


def _on_each(mesh: Mesh, run: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=_split(mesh), out_specs=_split(mesh), check_vma=False))


def measure_collective(mesh: Mesh, axis: str, kind: CollectiveKind, held: int, watch: Watch) -> Sample:
    """Measure one collective along an axis, in all groups at once; each device holds `held` bytes of float32."""
    n = mesh.shape[axis]
    length = held // 4 // n * n
    run = _STEPS[kind]

    def chain(x: jax.Array) -> jax.Array:
        for _ in range(CHAIN):
            x = run(x, axis, n)
        return x

    seconds = watch(_on_each(mesh, chain), _on(mesh, np.ones(length * mesh.size, np.float32))) / CHAIN
    piece = 4 * length if kind in ("all_reduce", "permute") else 4 * length // n
    return Sample(axis, kind, 4 * length, moved_bytes(kind, piece, n), seconds)


def _gather(x: jax.Array, axis: str, n: int) -> jax.Array:
    part = lax.slice_in_dim(x, 0, x.shape[0] // n)
    return lax.all_gather(part, axis, tiled=True)


def _scatter(x: jax.Array, axis: str, n: int) -> jax.Array:
    part = lax.psum_scatter(x, axis, tiled=True) / n
    return jnp.concatenate([part] * n)


def _shift(x: jax.Array, axis: str, n: int) -> jax.Array:
    return lax.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)])


_STEPS: Final[dict[CollectiveKind, Callable[[jax.Array, str, int], jax.Array]]] = {
    "all_reduce": lambda x, axis, n: lax.psum(x, axis) / n,
    "all_gather": _gather,
    "reduce_scatter": _scatter,
    "all_to_all": lambda x, axis, n: lax.all_to_all(x.reshape(n, -1), axis, 0, 0).reshape(-1),
    "permute": _shift,
}
"""Each returns an array as long as its argument, so that they can be chained."""


def measure_flops(mesh: Mesh, dtype: str, width: int, watch: Watch) -> float:
    """Operations per second of a product of square matrices on each device, all at once."""

    def chain(x: jax.Array) -> jax.Array:
        for _ in range(CHAIN):
            x = (x @ x / width).astype(x.dtype)
        return x

    x = _on(mesh, np.ones((width * mesh.size, width), dtype))
    return 2 * width**3 * CHAIN / watch(_on_each(mesh, chain), x)


def measure_memory(mesh: Mesh, held: int, watch: Watch) -> float:
    """Bytes per second that each device reads and writes, all at once, of arrays of `held` bytes."""

    def passes(x: jax.Array) -> jax.Array:  # one after the other and in place, so that no memory is allocated
        return lax.fori_loop(0, CHAIN, lambda i, x: x + jnp.float32(1) * i, x)

    x = _on(mesh, np.ones(held // 4 * mesh.size, np.float32))
    return 2 * held * CHAIN / watch(_on_each(mesh, passes), x)


def measure_array(mesh: Mesh, watch: Watch) -> float:
    """Seconds that each further argument and result of a program takes on each device."""
    x = [_on(mesh, np.ones(mesh.size, np.float32))] * (1 + ARRAYS)
    return watch(jax.jit(lambda x: [-a for a in x]), x) / (2 * ARRAYS * mesh.size)


ARRAYS: Final = 64


def measure_convolution(mesh: Mesh, watch: Watch) -> float:
    """Seconds of a convolution with next to no arithmetic, on all devices at once."""

    def chain(x: jax.Array) -> jax.Array:
        for _ in range(CHAIN):
            x = lax.conv_general_dilated(
                x, jnp.full((3, 3, 8, 8), 1e-2, x.dtype), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
        return x

    return watch(_on_each(mesh, chain), _on(mesh, np.ones((8 * mesh.size, 8, 8, 8), np.float32))) / CHAIN


def measure_thin(mesh: Mesh, watch: Watch) -> float:
    """Operations per second of thin products on each device, all at once."""
    batch, rows, width = 32, 128, 16

    def chain(x: jax.Array) -> jax.Array:
        for _ in range(CHAIN):
            x = jnp.einsum("bmn,bnk->bmk", jnp.einsum("bmk,bnk->bmn", x, x) / rows, x)
        return x

    x = _on(mesh, np.ones((batch * mesh.size, rows, width), np.float32))
    return 4 * batch * rows * rows * width * CHAIN / watch(_on_each(mesh, chain), x)


def measure_vector(mesh: Mesh, held: int, special: float, watch: Watch) -> float:
    """Elementwise operations per second in an exponential, a sum along rows, and two operations more, on all devices at
    once. `special`: operations that an exponential counts for."""
    rows = max(1, held // 4 // 512)

    def chain(x: jax.Array) -> jax.Array:
        for _ in range(CHAIN):
            x = lax.exp(x) + 1e-9 * x.sum(-1, keepdims=True)
        return x

    x = _on(mesh, np.zeros((rows * mesh.size, 512), np.float32))
    return CHAIN * rows * 512 * (special + 3) / watch(_on_each(mesh, chain), x)
