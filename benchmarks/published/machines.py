"""The machines of published runs, with the figures of their data sheets: nothing of them is fitted."""

from __future__ import annotations

import re
from dataclasses import replace

from benchmarks.published.runs import Run
from shardc.machine.overlaps import FULL, NONE
from shardc.machine.topology import TOPOLOGIES, Fabric, Topology

GB = 10**9


def _data_sheet(machine: Topology) -> Topology:
    """A machine without its share of what is reached."""
    fabrics = tuple(replace(f, bandwidth=f.bandwidth / machine.reached) for f in machine.fabrics)
    return replace(machine, reached=1.0, fabrics=fabrics)


_H100, _V5P = _data_sheet(TOPOLOGIES["h100"]), _data_sheet(TOPOLOGIES["v5p"])


def _gpu(kind: str, flops: float, memory: float, hbm: int, links: tuple[float, int, float], fp8: float = 0) -> Topology:
    """`links`: bytes/s of NVLink one way, GPUs that it joins, bytes/s of each GPU's network port."""
    nvlink, domain, port = links
    narrow = (("float8_e4m3fn", fp8), ("float8_e5m2", fp8), ("float4_e2m1fn", 2 * fp8)) if fp8 else ()
    fabrics = (Fabric("switch", nvlink, 6e-7, most=domain), Fabric("switch", port, 2.7e-6, tier=1))
    return replace(
        _H100, kind=kind, flops=flops, memory_bandwidth=memory, hbm=hbm * GB, fabrics=fabrics, rates=narrow
    )  # fmt: skip


MACHINES: dict[str, Topology] = {
    t.kind: t
    for t in (
        _gpu("a100", 3.12e14, 2.039e12, 80, (3e11, 8, 2.5e10)),
        _gpu("a100-vtrain", 3.12e14, 2.039e12, 80, (3e11, 8, 1.25e10)),
        _gpu("h100", 9.89e14, 3.35e12, 80, (4.5e11, 8, 5e10), 1.979e15),
        _gpu("h100-hbm2e", 9.89e14, 2.4e12, 96, (4.5e11, 8, 5e10), 1.979e15),
        _gpu("b200", 2.25e15, 8e12, 180, (9e11, 8, 5e10), 4.5e15),
        _gpu("gb200", 2.5e15, 8e12, 186, (9e11, 72, 5e10), 5e15),
        _gpu("gb300", 2.5e15, 8e12, 279, (9e11, 72, 1e11), 5e15),
        # A whole chip, as the source counts them: 192 GB, 7.37 TB/s, links as v5p (1200 GB/s both ways of all).
        replace(
            _V5P, kind="v7x", flops=2.307e15, memory_bandwidth=7.37e12, hbm=192 * GB,
            rates=(("float8_e4m3fn", 4.614e15), ("float8_e5m2", 4.614e15)),
        ),
    )
}  # fmt: skip

FAMILIES = {
    "A100.*one node": "A100, one node", "A100": "A100", "H100 SXM 96 GB": "H100 at 500 W", "H100": "H100",
    "B200|GB200|GB300": "Blackwell", "v4|v5e|v5p": "TPU v4, v5e, v5p", "v6e": "TPU v6e", "tpu7x": "TPU 7x",
}  # fmt: skip


REACHED = {
    name: TOPOLOGIES[kind].reached
    for name, kind in {
        "A100, one node": "a100", "A100": "a100", "H100 at 500 W": "h100", "H100": "h100", "Blackwell": "gb200",
        "TPU v4, v5e, v5p": "v5p", "TPU v6e": "v6e", "TPU 7x": "tpu7x",
    }.items()
}  # fmt: skip
"""The share of these figures that shardc's own topology of each family counts on."""


def family(run: Run) -> str:
    return next(name for pattern, name in FAMILIES.items() if re.search(pattern, run.hardware))


def overlaps(run: Run) -> bool:
    """Whether the program overlaps collectives with computation: the Megatron of 2021 and 2022 did not."""
    return not run.megatron


def topology(run: Run) -> Topology:
    """The machine of a run, with the shape of its slices."""
    if run.hardware.startswith("A100"):
        found = MACHINES["a100-vtrain" if run.name.startswith("vtrain") else "a100"]
    elif "H100 SXM 96 GB" in run.hardware:
        found = MACHINES["h100-hbm2e"]
    elif run.hardware.startswith("DGX-"):
        found = MACHINES[run.hardware.removeprefix("DGX-").lower()]
    else:
        kind = "v7x" if "tpu7x" in run.hardware else next(k for k in TOPOLOGIES if k in run.hardware and k != "cpu")
        chip = MACHINES.get(kind) or _data_sheet(TOPOLOGIES[kind])
        slices = int(run.hardware.split(" x ")[0]) if " x " in run.hardware else 1
        sides = grid(run.devices // slices, len(chip.pod) or 3)
        found = replace(chip, shape=(*sides, slices) if slices > 1 else sides)
    return replace(found, overlaps=FULL if overlaps(run) else NONE)


def grid(chips: int, dimensions: int) -> tuple[int, ...]:
    """The sides of a slice, as nearly equal as powers of two can be: 512 in 3 --> 8, 8, 8."""
    power = chips.bit_length() - 1
    return tuple(2 ** ((power + i) // dimensions) for i in range(dimensions))
