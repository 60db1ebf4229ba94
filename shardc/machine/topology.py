"""Machines: the figures of a device, the fabrics between devices, and the layout of a mesh. Imports only the errors.

A machine has physical dimensions. Each has a fabric: links between neighbours (a torus), or a switch. A mesh axis lies
along parts of one or more dimensions: its *spans*. They determine the speed of the axis: an axis inside NVLink is fast,
one from host to host is slow.

Sources of the figures, by the letter beside them:
  [B] "How to Scale Your Model" (Austin et al. 2025), chapters tpus and sharding: operations, memory, links (45 and 90
      GB/s one way), 1 us for a hop, 25 GB/s for a host (of 4 chips; v5e and v6e of 8), which dimensions are rings.
  [N] NVIDIA's data sheets of A100 SXM, H100 SXM, H800, H200 SXM, HGX B200, GB200 and GB300 NVL72: operations without
      sparsity, memory, NVLink, one port of 400 Gb/s for each GPU (A100 200, GB300 800). JAX multiplies float32 in TF32.
  [A] The cost models of autoparallel and DTensor (meta-pytorch/autoparallel; torch.distributed.tensor): 6.6 us to
      start a collective, 0.6 us for a hop inside a host, 2.7 us between hosts.
  [M] Measured here: `python -m shardc calibrate` on fake devices of XLA:CPU; the sizes that XLA:TPU combines, from
      programs compiled ahead of time for v5p: 25 MiB were combined, 31.5 MiB were not (libtpu 0.0.50.1).
  [H] Host links and host memory of a device. TPUs: 15 GB/s over PCIe in [B] (its question on v6e; taken for all); the
      memory of Google Cloud's machine types of whole hosts (ct4p-hightpu-4t 407 GB, ct5lp-hightpu-4t 192,
      ct5p-hightpu-4t 448, ct6e-standard-4t 720, tpu7x-standard-4t 960), shared by their devices. GPUs: PCIe of 16 lanes
      one way, 32 GB/s in generation 4 and 64 in 5; 1 TB for 8 GPUs of 40 GB, 2 TB for others (DGX A100, H100, B200);
      of GB200 and GB300 NVLink-C2C, 450 GB/s one way and 480 GB for two GPUs. The figures of the links are peaks.
  [X] Defaults of XLA:GPU's flags xla_gpu_all_reduce_combine_threshold_bytes and those of other kinds.
  [I] Google's page on TPU7x: half of 2307 TFLOP/s in bfloat16, of 7.38 TB/s and 192 GB for each device; links of 100
      GB/s one way; between the halves of a chip six times as much.
  [P] Fitted to published training runs: benchmarks/published.md has the runs, and the errors on those that were kept
      out of the fit. One share for all figures of a machine: more are no better on TPUs, and do not hold elsewhere. On
      TPU7x the same models ran in bfloat16 and float8: products in float8, with their scales, reach less. B200 has no
      runs: the share of GB200.
  [F] Dao 2023, "FlashAttention-2": 50 to 73 % of the peak of an A100, forward and backward; large products reach 86 %
      (Bekman, "Machine Learning Engineering").
  [V] Vector units. TPUs: [B], appendix A: four ALUs for each of 8 x 128 lanes, two cores on v5p at 1.75 GHz; v5e one
      core at 1.5 GHz; v4 two ALUs at 1.05 GHz, v6e and a device of TPU7x as one core of v5p [G]. GPUs: float32 without
      tensor cores in [N], an addition and a multiplication counted once. Special functions: CUDA C++ Programming Guide,
      "Arithmetic Instructions", 16 a clock beside 64 additions (A100) or 128; TPUs as the latter [G].
  [G] Guessed here: no source.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, TypeAlias, cast

from shardc.errors import MeshError, did_you_mean
from shardc.machine.overlaps import FULL, KINDS, NONE, SHARES, Overlaps

FabricKind: TypeAlias = Literal["torus", "switch"]
BackendKind: TypeAlias = Literal["cpu", "gpu", "tpu"]
GB: Final = 10**9
MiB: Final = 2**20
ANY: Final = 2.0**62
"""Bytes: no limit."""


@dataclass(frozen=True)
class Fabric:
    """The connection of the devices along a physical dimension.

    Attributes:
      kind: `torus`: links between neighbours; `switch`: each device has one port, and reaches all others through it.
      bandwidth: bytes/s that a device sends: on a torus along one link, one way; else through its port.
      latency: seconds for each hop.
      tier: collectives pass the tiers one after the other; fabrics of one tier work at the same time.
      most: largest number of devices along it, or of domains of the fabric before it; 0: no limit.
      ring: a torus dimension closes to a ring if its size is a multiple of this; 0: it never does.
      rates: bytes/s in collectives of one kind, if known to differ from `bandwidth`.
    """

    kind: FabricKind
    bandwidth: float
    latency: float
    tier: int = 0
    most: int = 0
    ring: int = 0
    rates: tuple[tuple[str, float], ...] = ()

    def rate(self, kind: str) -> float:
        return dict(self.rates).get(kind, self.bandwidth)


@dataclass(frozen=True)
class AxisSpan:
    """A part of a physical dimension that a mesh axis lies along.

    Attributes:
      dim: number of the dimension.
      count: devices along it.
      stride: distance between two of them, which is also the number of groups that share the links.
      closed: whether the last is joined to the first.
    """

    fabric: Fabric
    dim: int
    count: int
    stride: int = 1
    closed: bool = False


Layout: TypeAlias = tuple[tuple[str, tuple[AxisSpan, ...]], ...]
"""The spans of each mesh axis."""


@dataclass(frozen=True)
class DeviceLink:
    """The connection between two devices: bytes/s, and seconds until the first byte arrives."""

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Topology:
    """A kind of machine: the figures of a device, and the fabrics between devices.

    Attributes:
      kind: name, as in `make_mesh(topology="v5p:4x4x2")`.
      flops: matrix operations per second, in bfloat16.
      memory_bandwidth: bytes/s between the device and its memory.
      hbm: bytes of memory.
      launch: seconds to start a collective.
      fabrics: one for each physical dimension, the fastest first; the last one stands for all further dimensions.
      rates: matrix operations per second in other types, by name; a type without a name runs at the speed of bfloat16.
      shape: devices along each physical dimension; empty if not given.
      pod: the largest shape that exists; empty: no limit.
      layout: the spans of the axes of a mesh; for axes without a name here, `default_spans`.
      overlaps: by kind of collective, the share that the compiler hides of what can run while the device computes
        (`shardc/machine/overlaps.py`). On XLA:CPU each waits for the one before it.
      together: by kind of collective, the largest mesh whose devices all take part in one; other kinds have no limit.
        Above it XLA:TPU turns a collective of all chips of a slice into an all-reduce of twice the bytes: all-gathers
        from 64 chips on, reduce-scatters from 8 or, on v5e and v6e, 16 (libtpu 0.0.42 and 0.0.52, ahead of time).
      combined: by kind of collective, the most bytes that the compiler combines into one, which starts once. Only
        collectives along the same axes that do not wait for each other are combined. Other kinds start one by one.
      backend: the compiler of XLA.
      reached: the share of `flops`, `rates`, `memory_bandwidth` and `vector` that programs reach. The bandwidths of
        fabrics are what is reached.
      host_bandwidth: bytes/s one way between the device and the memory of its host; 0: unknown, nothing can live there.
      host_memory: bytes of it for each device.
      shares: by kind of operation (`Rule.kind`) or type of its operands, the share of the rate of products that it
        reaches; others reach all.
      starts: by kind of operation, seconds of each execution besides its arithmetic and memory.
      vector: elementwise operations per second, or elements that reductions add up; 0: unknown, they take no time.
      special: elementwise operations that take as long as one special function (`exp`, `sin`).
      dispatch: seconds that the host takes to launch a program. Fake CPU devices share its cores: there it adds to the
        time of each program. Elsewhere the host runs ahead, and a task of a pipeline takes at least this long.
      dispatch_array: seconds besides, for each argument and result on each fake device.
    """

    kind: str
    flops: float
    memory_bandwidth: float
    hbm: int
    launch: float
    fabrics: tuple[Fabric, ...]
    rates: tuple[tuple[str, float], ...] = ()
    shape: tuple[int, ...] = ()
    pod: tuple[int, ...] = ()
    layout: Layout = ()
    overlaps: Overlaps = FULL
    together: tuple[tuple[str, float], ...] = ()
    combined: tuple[tuple[str, float], ...] = ()
    backend: BackendKind = "gpu"
    reached: float = 1.0
    host_bandwidth: float = 0.0
    host_memory: int = 0
    shares: tuple[tuple[str, float], ...] = ()
    starts: tuple[tuple[str, float], ...] = ()
    vector: float = 0.0
    special: float = 1.0
    dispatch: float = 0.0
    dispatch_array: float = 0.0

    def fabric(self, dim: int) -> Fabric:
        return self.fabrics[min(dim, len(self.fabrics) - 1)]

    def peak_in(self, dtype: str) -> float:
        """Matrix operations per second on operands of a type, by its name, as the data sheet has them."""
        return dict(self.rates).get(dtype, self.flops)

    def flops_in(self, dtype: str, kind: str = "") -> float:
        """Operations per second that a kind of operation reaches on operands of a type."""
        shares = dict(self.shares)
        return self.reached * self.peak_in(dtype) * shares.get(kind, 1.0) * shares.get(dtype, 1.0)

    def overlap(self, kind: str) -> float:
        """The share of collectives of a kind that is hidden where it can be."""
        return dict(self.overlaps).get(kind, 0.0)

    @property
    def most_hidden(self) -> float:
        """The largest share of what can be hidden of a kind of collective that is, but for rings."""
        return max((share for kind, share in self.overlaps if kind != "ring"), default=0.0)

    @property
    def memory_rate(self) -> float:
        """Bytes/s between the device and its memory that are reached."""
        return self.reached * self.memory_bandwidth

    @property
    def link(self) -> DeviceLink:
        """The link between neighbours along the first dimension."""
        return DeviceLink(self.fabrics[0].bandwidth, self.fabrics[0].latency)

    def link_along(self, axis: str) -> DeviceLink:
        """The slowest link between neighbours along a mesh axis."""
        spans = dict(self.layout).get(axis, ())
        links = [DeviceLink(s.fabric.bandwidth / s.stride, s.fabric.latency * _hops(s)) for s in spans]
        return min(links, key=lambda link: link.bandwidth, default=self.link)

    def to_json(self) -> str:
        """The text of a file for `make_mesh(topology="file.json")`."""
        data = {k: v for k, v in asdict(self).items() if k not in _NOT_IN_FILES}
        data |= {name: dict(getattr(self, name)) for name in _TABLES}
        data["fabrics"] = [f | {"rates": dict(f["rates"])} for f in data["fabrics"]]
        return json.dumps(data, indent=1)


_NOT_IN_FILES: Final = ("layout", "pod")
_TABLES: Final = ("rates", "together", "combined", "shares", "starts", "overlaps")
"""Fields that are objects in files, from names to numbers."""
_REPLACED: Final = ("element", "cached")
"""Names that older files have in place of `vector` and `special`."""


def _hops(span: AxisSpan) -> int:
    return span.stride if span.fabric.kind == "torus" else 1


_DISPATCH: Final = 5e-5
"""[G] Seconds that the host of an accelerator takes to launch a program, such as a task of a pipeline."""


class _Chip(NamedTuple):
    """A chip: operations/s in bfloat16, bytes/s of its memory, GB of memory, elementwise operations/s, operations/s in
    other types."""

    flops: float
    memory: float
    hbm: int
    vector: float
    rates: tuple[tuple[str, float], ...] = ()


def _tpu(kind: str, chip: _Chip, link: float, pod: tuple[int, ...], reached: float) -> Topology:
    """[B] The dimensions of a pod, then the network between slices: that of a host, which its chips share."""
    chips, ring, together = (4, 4, 4) if len(pod) == 3 else (8, 16, 8)
    torus = Fabric("torus", link * reached, 1e-6, ring=ring)
    network = Fabric("switch", 2.5e10 * reached / chips, 1e-5, tier=1)  # latency [G]
    fabrics = (torus,) * len(pod) + (network,)
    most = (("all_gather", 63), ("reduce_scatter", together))
    combined = (("all_reduce", 30.0 * MiB),)  # [M]
    return Topology(
        kind, chip.flops, chip.memory, chip.hbm * GB, 1e-6, fabrics, chip.rates, pod=pod, together=most,
        combined=combined, backend="tpu", reached=reached, dispatch=_DISPATCH, vector=chip.vector, special=_SPECIAL,
    )  # fmt: skip


def _ironwood(reached: float) -> Topology:
    """[I] JAX has two devices for each chip, a half of it each, and these share the chip's links."""
    half = _Chip(1.1535e15, 3.69e12, 96, 7.2e12, tuple((t, 2.307e15) for t in ("float8_e4m3fn", "float8_e5m2")))
    found = _tpu("tpu7x", half, 5e10, (16, 24, 24), reached)
    chip = Fabric("switch", 6e11 * reached, 1e-6, most=2)
    return replace(
        found, fabrics=(chip, *(replace(f, tier=f.tier + 1) for f in found.fabrics)), pod=(2, *found.pod),
        shares=(("float8_e4m3fn", 0.82), ("float8_e5m2", 0.82)),  # [P]
    )  # fmt: skip


def _gpu(kind: str, chip: _Chip, reached: float, nvlink: float, domain: int, network: float) -> Topology:
    """[N, A, X] An NVLink domain of at most `domain` GPUs, and the network between domains, of one port for each GPU:
    bytes/s one way, as the data sheets have them."""
    inside = Fabric("switch", nvlink * reached, 6e-7, most=domain)
    fabrics = inside, Fabric("switch", network * reached, 2.7e-6, tier=1)
    combined = tuple((kind, 30.0 * MiB) for kind in ("all_reduce", "all_gather", "reduce_scatter"))  # [X]
    return Topology(
        kind, chip.flops, chip.memory, chip.hbm * GB, 6.6e-6, fabrics, chip.rates, combined=combined,
        reached=reached, dispatch=_DISPATCH, shares=(("attention", _FLASH),), vector=chip.vector,
        special=_SPECIAL_A100 if kind.startswith("a100") else _SPECIAL,
    )  # fmt: skip


_SPECIAL: Final = 8.0
_SPECIAL_A100: Final = 4.0
"""[V] Elementwise operations in the time of one special function."""

_FLASH: Final = 0.72
"""[F] Operations/s of a flash attention kernel, beside those of large products."""


_HOPPER: Final = (
    ("float32", 4.94e14), ("float64", 6.7e13), ("int8", 1.979e15),
    ("float8_e4m3fn", 1.979e15), ("float8_e5m2", 1.979e15),
)  # fmt: skip
_BLACKWELL: Final = (
    ("float32", 1.1e15), ("float64", 3.7e13), ("int8", 4.5e15), ("float8_e4m3fn", 4.5e15), ("float8_e5m2", 4.5e15),
    ("float4_e2m1fn", 9e15),
)  # fmt: skip
_GB200: Final = (
    ("float32", 1.25e15), ("float64", 4e13), ("int8", 5e15), ("float8_e4m3fn", 5e15), ("float8_e5m2", 5e15),
    ("float4_e2m1fn", 1e16),
)  # fmt: skip
_BLACKWELL_ULTRA: Final = (
    ("float32", 1.25e15), ("float64", 1.25e12), ("int8", 1.65e14), ("float8_e4m3fn", 5e15), ("float8_e5m2", 5e15),
    ("float4_e2m1fn", 1.5e16),
)  # fmt: skip


_AMPERE: Final = (("float32", 1.56e14), ("float64", 1.95e13), ("int8", 6.24e14))
# [P] The shares that are reached.
_V4_V5, _V6E, _V7X, _A100, _H100, _GB200S, _GB300S = 0.82, 0.58, 0.74, 0.67, 0.58, 0.56, 0.65

_HOSTS: Final = {
    "cpu": (2e9, 16), "v4": (1.5e10, 100), "v5e": (1.5e10, 48), "v5p": (1.5e10, 112), "v6e": (1.5e10, 180),
    "tpu7x": (1.5e10, 120), "a100-40": (3.2e10, 128), "a100": (3.2e10, 256), "gb200": (2.25e11, 240),
    "gb300": (2.25e11, 240),
}  # fmt: skip
"""[H] Bytes/s to the memory of a device's host, GB of it. A copy on fake CPU devices reads and writes one memory."""
_HOST: Final = (6.4e10, 256)
"""[H] Of other GPUs."""

TOPOLOGIES: Final[Mapping[str, Topology]] = MappingProxyType(
    {
        t.kind: replace(t, host_bandwidth=link, host_memory=memory * GB, overlaps=SHARES[t.kind])
        for t in (
            # [M] Fake devices of one host share its cores and memory: 8 devices on 2 cores. Measured by themselves: 54
            # Gop/s in products of width 512, 38 in those of width 128, 3 to 9 in batches with a side of 16; 14.5
            # GB/s; 1.9 ns for an element of an exponential (an addition is bound by memory: 0.9 ns); the dispatches.
            # Fitted, the share of thin products and the start of a convolution, to the steps of benchmarks/clock.md.
            Topology("cpu", 4e10, 1.5e10, 4 * GB, 1e-4, (Fabric("switch", 6e8, 2e-7),),
                     combined=(("all_reduce", ANY),), backend="cpu",
                     shares=(("thin", 0.15),), starts=(("convolution", 6e-4),), vector=_SPECIAL / 1.9e-9,
                     special=_SPECIAL, dispatch=1e-4, dispatch_array=5e-7),
            _tpu("v4", _Chip(2.75e14, 1.2e12, 32, 4.3e12), 4.5e10, (16, 16, 16), _V4_V5),
            _tpu("v5e", _Chip(1.97e14, 8.1e11, 16, 6.1e12, (("int8", 3.94e14),)), 4.5e10, (16, 16), _V4_V5),
            _tpu("v5p", _Chip(4.59e14, 2.8e12, 95, 1.4e13, (("int8", 9.18e14),)), 9e10, (16, 20, 28), _V4_V5),
            _tpu("v6e", _Chip(9.2e14, 1.6e12, 32, 7.2e12, (("int8", 1.84e15),)), 9e10, (16, 16), _V6E),
            _ironwood(_V7X),
            _gpu("a100-40", _Chip(3.12e14, 1.555e12, 40, 9.75e12, _AMPERE), _A100, 3e11, 8, 2.5e10),
            _gpu("a100", _Chip(3.12e14, 2.039e12, 80, 9.75e12, _AMPERE), _A100, 3e11, 8, 2.5e10),
            _gpu("h100", _Chip(9.89e14, 3.35e12, 80, 3.35e13, _HOPPER), _H100, 4.5e11, 8, 5e10),
            _gpu("h800", _Chip(9.89e14, 3.35e12, 80, 3.35e13, _HOPPER), _H100, 2e11, 8, 5e10),
            _gpu("h200", _Chip(9.89e14, 4.8e12, 141, 3.35e13, _HOPPER), _H100, 4.5e11, 8, 5e10),
            _gpu("gb300", _Chip(2.5e15, 8e12, 279, 4e13, _BLACKWELL_ULTRA), _GB300S, 9e11, 72, 1e11),
            _gpu("gb200", _Chip(2.5e15, 8e12, 186, 4e13, _GB200), _GB200S, 9e11, 72, 5e10),
            _gpu("b200", _Chip(2.25e15, 8e12, 180, 3.75e13, _BLACKWELL), _GB200S, 9e11, 8, 5e10),
        )
        for link, memory in [_HOSTS.get(t.kind, _HOST)]
    }
)  # fmt: skip

DEVICE_KINDS: Final = {"v5p": "v5p|v5$", "v5e": "v5e|v5 ?lite", "v6e": "v6", "tpu7x": "tpu ?7", "a100-40": "a100.*40gb"}
"""Regular expressions of JAX's names for devices, in lower case, where they do not hold the name of the topology."""


def topology_of(device_kind: str) -> str | None:
    """The name of the topology of a kind of device; None if it is not known."""
    name = device_kind.lower()
    return next((t for t in TOPOLOGIES if re.search(DEVICE_KINDS.get(t, t), name)), None)


BETWEEN_PROCESSES: Final = Fabric("switch", 3e8, 3e-4, tier=1)
"""[M] Sockets between the processes of a CPU mesh: 2 processes of 4 devices on 2 cores."""


# --- shapes ----------------------------------------------------------------------------------------------------------


def parse_topology(text: str) -> Topology:
    """A topology from its name and, after a colon, its shape, `"v5p:4x4x2"`; or from JSON, or a `.json` file of it.

    Raises:
      MeshError: there is no such machine, or none of that shape.
    """
    if text.startswith("{"):
        return topology_from_json(text)
    if text.endswith(".json"):
        return read_topology(text)
    kind, _, dims = text.partition(":")
    if kind not in TOPOLOGIES:
        raise MeshError(
            f"There is no topology {kind!r}.{did_you_mean(kind, TOPOLOGIES)} Known are {', '.join(TOPOLOGIES)}."
        )
    if dims and not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", dims):
        raise MeshError(f"topology={text!r}: the shape after the colon is written 4x4x2.")
    shape = tuple(int(d) for d in dims.split("x")) if dims else ()
    _check_shape(text, TOPOLOGIES[kind], shape)
    return replace(TOPOLOGIES[kind], shape=shape)


def _check_shape(text: str, machine: Topology, shape: Sequence[int]) -> None:
    inside = sorted(shape[: len(machine.pod)], reverse=True)
    largest = sorted(machine.pod, reverse=True)
    if any(n > most for n, most in zip(inside, largest, strict=False)):
        raise MeshError(
            f"topology={text!r}: a pod of {machine.kind} has {'x'.join(map(str, machine.pod))} chips. Several slices "
            f"over the network are a further dimension, as in {machine.kind}:{'x'.join('4' for _ in largest)}x2."
        )
    for dim, n in enumerate(shape):
        most = machine.fabric(dim).most
        if most and n > most:
            fit = next(m for m in range(most, 0, -1) if n % m == 0)
            better = "x".join(map(str, (*shape[:dim], fit, n // fit)))
            by = "a switch" if dim else "NVLink" if machine.backend == "gpu" else "a chip"
            raise MeshError(
                f"topology={text!r}: {by} joins at most {most} {'domains of ' * bool(dim)}"
                f"{machine.kind}; write the GPUs of a domain, then the number of domains"
                f"{' of each switch, then the number of switches' * bool(dim)}, as in {machine.kind}:{better}."
            )


# --- layouts ---------------------------------------------------------------------------------------------------------


def default_spans(machine: Topology, axes: Sequence[tuple[str, int]]) -> dict[str, tuple[AxisSpan, ...]]:
    """The spans without a shape: on a torus a ring for each axis; else devices fill the fastest fabric first."""
    first = machine.fabrics[0]
    if first.kind == "torus":
        return {a: (AxisSpan(first, k, n, closed=True),) for k, (a, n) in enumerate(axes)}
    if len(machine.fabrics) == 1:
        return {a: (AxisSpan(first, 0, n),) for a, n in axes}
    whole = math.prod(n for _, n in axes)
    filled, _ = _fill(machine, axes)
    limited = [*(f.most for f in machine.fabrics[:-1]), 0]
    shape = tuple(n if most else whole for n, most in zip(filled, limited, strict=True))
    return dict(lay_out(replace(machine, shape=shape), axes))


def shape_of(machine: Topology, axes: Sequence[tuple[str, int]]) -> tuple[int, ...]:
    """The shape that the layout of a mesh counts on: the given one, else that in which devices fill switches; empty on
    a torus, where each axis is a ring of its own."""
    return machine.shape or (() if machine.pod else tuple(_fill(machine, axes)[0]))


def default_shape(machine: Topology, devices: int) -> tuple[int, ...]:
    """The shape of so many devices on switches: of each fabric the largest part that divides what is left."""
    shape, _ = _fill(machine, [("", devices)])
    while len(shape) > 1 and shape[-1] == 1:
        shape.pop()
    return tuple(shape)


class Outside(NamedTuple):
    """An axis of which no part fits into the room that a fast fabric has left for it.

    Attributes:
      dim: the dimension of the fabric.
      axis, size: the axis and its devices.
      parts: those of it that slower fabrics join: each is one device, or a group that a faster fabric joins.
      room: the parts for which there is room.
    """

    dim: int
    axis: str
    size: int
    parts: int
    room: int


def outside_by_default(machine: Topology, axes: Sequence[tuple[str, int]]) -> list[Outside]:
    """The axes that the default layout leaves to slower links, though a faster fabric has room for two parts of them or
    more."""
    if machine.fabrics[0].kind == "torus" or len(machine.fabrics) == 1:
        return []
    return _fill(machine, axes)[1]


def _fill(machine: Topology, axes: Sequence[tuple[str, int]]) -> tuple[list[int], list[Outside]]:
    """The shape in which devices fill the fastest fabric first and each axis is a grid, and the axes that this leaves
    outside. A fabric takes whole axes from the innermost one on, and of the next one the largest divisor that fits."""
    left = [(a, n, n) for a, n in axes if n > 1]
    shape, outside = list[int](), list[Outside]()
    for dim, fabric in enumerate(machine.fabrics[:-1]):
        taken = 1
        while left:
            axis, size, parts = left.pop()
            room = fabric.most // taken if fabric.most else parts
            fit = next(m for m in range(min(parts, room), 0, -1) if parts % m == 0) if room else 1
            taken *= fit
            if fit < parts:
                left.append((axis, size, parts // fit))
                if fit == 1 < room:
                    outside.append(Outside(dim, axis, size, parts, room))
                break
        shape.append(taken)
    return [*shape, math.prod(parts for _, _, parts in left)], outside


def lay_out(machine: Topology, axes: Sequence[tuple[str, int]]) -> Layout:
    """The layout of a mesh over the first devices of a shape. Devices are numbered along the first dimension first; the
    last axis of the mesh lies along neighbours."""
    strides = [math.prod(n for _, n in axes[k + 1 :]) for k in range(len(axes))]

    def place(axis: int, i: int) -> tuple[int, ...]:
        number, found = i * strides[axis], list[int]()
        for d in machine.shape:
            number, at = divmod(number, d)
            found.append(at)
        return tuple(found)

    return lay_along(machine, axes, place)


def lay_along(
    machine: Topology, axes: Sequence[tuple[str, int]], place: Callable[[int, int], tuple[int, ...]]
) -> Layout:
    """The layout of a mesh, given the place in the machine's shape of the i-th device along an axis."""
    found: list[tuple[str, tuple[AxisSpan, ...]]] = []
    for k, (axis, n) in enumerate(axes):
        if n > 1:
            found.append((axis, _spans(machine, n, [place(k, i) for i in range(n)])))
    return tuple(found)


def _spans(machine: Topology, n: int, at: Sequence[tuple[int, ...]]) -> tuple[AxisSpan, ...]:
    """The spans of `n` devices at these places. If these are no grid, a line along the last dimension they cover."""
    values = {d: sorted(set(column)) for d, column in enumerate(zip(*at, strict=True)) if len(set(column)) > 1}
    if math.prod(map(len, values.values())) != n or not all(map(_is_even, values.values())):
        dim = max(values, default=0)
        return (AxisSpan(machine.fabric(dim), dim, n),)
    return tuple(_span(machine, d, len(v), v[1] - v[0]) for d, v in values.items())


def _is_even(values: Sequence[int]) -> bool:
    return len({b - a for a, b in pairwise(values)}) == 1


def _span(machine: Topology, dim: int, count: int, stride: int) -> AxisSpan:
    fabric, size = machine.fabric(dim), machine.shape[dim]
    closed = bool(fabric.ring) and size % fabric.ring == 0 and count * stride == size
    return AxisSpan(fabric, dim, count, stride if fabric.kind == "torus" else 1, closed)


def cut_spans(spans: Sequence[AxisSpan], counts: Sequence[int]) -> list[tuple[AxisSpan, ...]]:
    """The spans of an axis that is cut into parts of `counts` devices, the outermost first. A part that is no grid lies
    along the whole span."""
    left, found = list(spans), list[tuple[AxisSpan, ...]]()
    for n in reversed(counts):
        part = list[AxisSpan]()
        while n > 1 and left:
            inner = left.pop(0)
            here = math.gcd(n, inner.count)
            if here < inner.count:
                stride = inner.stride * (here if inner.fabric.kind == "torus" else 1)
                left.insert(0, replace(inner, count=inner.count // here, stride=stride))
                inner = replace(inner, count=here, closed=False)
            part.append(replace(inner, count=n, closed=False) if here == 1 else inner)
            n = 1 if here == 1 else n // here
        found.insert(0, tuple(part))
    return found


def merged(spans: Iterable[AxisSpan]) -> tuple[AxisSpan, ...]:
    """The spans of several axes together; two spans end to end along one dimension become one."""
    found: list[AxisSpan] = []
    for s in sorted(spans, key=lambda s: (s.fabric.tier, s.dim, s.stride)):
        last = found[-1] if found else None
        if last is not None and s.dim == last.dim and s.fabric.kind == "torus" and s.stride == last.count * last.stride:
            found[-1] = replace(last, count=last.count * s.count, closed=s.closed)
        else:
            found.append(s)
    return tuple(found)


# --- files -----------------------------------------------------------------------------------------------------------


def read_topology(path: str) -> Topology:
    """A topology from a file of JSON.

    Raises:
      MeshError: the file does not exist, or is not a valid topology.
    """
    try:
        return topology_from_json(Path(path).read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        raise MeshError(f"The topology {path} cannot be read: {error}.") from None


def topology_from_json(text: str, where: str = "The topology") -> Topology:
    """The inverse of `Topology.to_json`."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise MeshError(f"{where} is not JSON: {error}.") from None
    data = _named(data, Topology, where)
    fabrics = data.get("fabrics")
    if not isinstance(fabrics, list) or not fabrics:
        raise MeshError(f'{where}: "fabrics" must be a list of at least one fabric.')
    read = tuple(_fabric(f, f"{where}, fabric {i}") for i, f in enumerate(fabrics))
    kind, shape = data["kind"], data.get("shape", [])
    if not isinstance(kind, str) or not re.fullmatch(r"[\w.-]+", kind):
        raise MeshError(f'{where}: "kind" must be a name of letters, digits, dots and dashes, not {kind!r}.')
    if not isinstance(shape, list) or not all(isinstance(n, int) and n > 0 for n in shape):
        raise MeshError(f'{where}: "shape" must be a list of positive whole numbers, not {shape!r}.')
    numbers = [_positive(data, name, where) for name in ("flops", "memory_bandwidth", "hbm")]
    launch = _positive(data, "launch", where, least=0.0)
    host, memory, vector, dispatch, array = (
        _positive({k: data.get(k, 0)}, k, where, least=0.0)
        for k in ("host_bandwidth", "host_memory", "vector", "dispatch", "dispatch_array")
    )
    named = TOPOLOGIES.get(kind.removesuffix("-measured"))  # older files do not say it
    backend = data.get("backend", "gpu" if named is None else named.backend)
    if backend not in ("cpu", "gpu", "tpu"):
        raise MeshError(f'{where}: "backend" must be "cpu", "gpu" or "tpu", not {backend!r}.')
    reached, special = (_positive({k: data.get(k, 1.0)}, k, where) for k in ("reached", "special"))
    return Topology(
        kind, numbers[0], numbers[1], int(numbers[2]), launch, read, _rates(data, where), tuple(cast(list[int], shape)),
        overlaps=_overlaps(data, where), together=_rates(data, where, "together"),
        combined=_rates(data, where, "combined"), backend=backend, reached=reached,
        host_bandwidth=host, host_memory=int(memory), shares=_rates(data, where, "shares"),
        starts=_rates(data, where, "starts"), vector=vector, special=special, dispatch=dispatch, dispatch_array=array,
    )  # fmt: skip


def _fabric(data: Any, where: str) -> Fabric:
    data = _named(data, Fabric, where)
    if data["kind"] not in ("torus", "switch"):
        raise MeshError(f'{where}: "kind" must be "torus" or "switch", not {data["kind"]!r}.')
    tier, most, ring = (int(_positive({k: data.get(k, 0)}, k, where, 0.0)) for k in ("tier", "most", "ring"))
    return Fabric(
        data["kind"], _positive(data, "bandwidth", where), _positive(data, "latency", where, 0.0), tier, most, ring,
        _rates(data, where),
    )  # fmt: skip


def _named(data: Any, of: type[Topology] | type[Fabric], where: str) -> dict[str, Any]:
    """`data` itself, if it has all required names and no unknown ones."""
    names = [f.name for f in fields(of) if f.name not in _NOT_IN_FILES]
    needed = {f.name for f in fields(of) if f.default is MISSING}
    if not isinstance(data, dict):
        raise MeshError(f"{where}: must be an object with {', '.join(names)}.")
    found = cast(dict[str, Any], data)
    wrong = [f"has no {n!r}" for n in names if n in needed and n not in found]
    wrong += [
        f'{n!r} is no longer read: write "vector" (elementwise operations per second) and "special" (those that take '
        "as long as one exp or sin) in its place"
        if n in _REPLACED
        else f"has the unknown name {n!r}.{did_you_mean(n, names)}"
        for n in found
        if n not in names
    ]
    if wrong:
        raise MeshError(f"{where}: {'; '.join(wrong)}")
    return found


def _positive(data: Mapping[str, Any], name: str, where: str, least: float = 1e-300) -> float:
    number = data[name]
    if isinstance(number, bool) or not isinstance(number, int | float) or not least <= number < math.inf:
        raise MeshError(f"{where}: {name!r} must be a positive number, not {number!r}.")
    return number


def _overlaps(data: Mapping[str, Any], where: str) -> Overlaps:
    """Shares by kind of collective; true and false stand for all and none. Where a file does not tell, those of the
    machine of its name, else of h100."""
    told = data.get("overlaps")
    if told is None:
        return SHARES.get(str(data["kind"]).removesuffix("-measured"), SHARES["h100"])
    if isinstance(told, bool):
        return FULL if told else NONE
    found = _rates({"overlaps": told}, where, "overlaps")
    for kind, share in found:
        if kind not in KINDS or share > 1:
            raise MeshError(
                f'{where}: "overlaps" has the share {share:g} of {kind!r}; it takes shares up to 1 of '
                f"{', '.join(KINDS)}, or true or false for all of them."
            )
    return found


def _rates(data: Mapping[str, Any], where: str, key: str = "rates") -> tuple[tuple[str, float], ...]:
    rates = data.get(key, {})
    if not isinstance(rates, dict):
        raise MeshError(f'{where}: "{key}" must be an object from names to numbers, not {rates!r}.')
    found = cast(dict[str, Any], rates)
    return tuple((name, _positive(found, name, where)) for name in found)
