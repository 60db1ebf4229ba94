"""The machines of published runs: shardc's own topologies, and what the sources say of theirs that differs."""

from __future__ import annotations

import re
from dataclasses import replace

from benchmarks.published.runs import Run
from shardc.machine.overlaps import FULL, NONE
from shardc.machine.topology import TOPOLOGIES, Topology

GB = 10**9


def data_sheet(machine: Topology) -> Topology:
    """A machine without its shares of what is reached."""
    fabrics = tuple(replace(f, bandwidth=f.bandwidth / machine.reached) for f in machine.fabrics)
    return replace(machine, reached=1.0, fabrics=fabrics, shares=())


def reaching(machine: Topology, reached: float) -> Topology:
    """A machine with another share of its data sheet's figures."""
    fabrics = tuple(replace(f, bandwidth=f.bandwidth / machine.reached * reached) for f in machine.fabrics)
    return replace(machine, reached=reached, fabrics=fabrics)


def with_port(machine: Topology, port: float) -> Topology:
    """A machine whose GPUs have another port to the network: bytes/s one way, as its data sheet has them."""
    *inside, network = machine.fabrics
    return replace(machine, fabrics=(*inside, replace(network, bandwidth=port * machine.reached)))


_A100, _H100, _V7X = TOPOLOGIES["a100"], TOPOLOGIES["h100"], TOPOLOGIES["tpu7x"]

MACHINES: dict[str, Topology] = {
    "A100.*(800 Gb|one node)": replace(with_port(_A100, 1.25e10), kind="a100-vtrain"),
    "A100": _A100,
    # [P] At 500 W these cards reach less of the same data sheet.
    "H100 SXM 96 GB": replace(reaching(_H100, 0.41), kind="h100-500w", memory_bandwidth=2.4e12, hbm=96 * GB),
    "H100 A3": replace(with_port(_H100, 1.25e10), kind="h100-a3"),
    "DGX-H100": _H100,
    "DGX-GB200": TOPOLOGIES["gb200"],
    "DGX-GB300": TOPOLOGIES["gb300"],
    # A whole chip, as the source counts them: 192 GB, 7.37 TB/s, links as v5p (1200 GB/s both ways of all).
    "tpu7x": replace(
        reaching(TOPOLOGIES["v5p"], _V7X.reached), kind="v7x", flops=2 * _V7X.flops, memory_bandwidth=7.37e12,
        hbm=192 * GB, rates=tuple((t, 2 * rate) for t, rate in _V7X.rates), shares=_V7X.shares,
    ),
    **{kind: TOPOLOGIES[kind] for kind in ("v4", "v5e", "v5p", "v6e")},
}  # fmt: skip
"""By a pattern of what a row calls its hardware; the first that is found."""

FAMILIES = {
    "A100.*one node": "A100, one node", "A100-80 SXM": "A100, torchtitan", "A100": "A100",
    "H100 SXM 96 GB": "H100 at 500 W", "H100": "H100", "GB200": "GB200", "GB300": "GB300",
    "v4|v5e|v5p": "TPU v4, v5e, v5p", "v6e": "TPU v6e", "tpu7x": "TPU 7x",
}  # fmt: skip


def family(run: Run) -> str:
    return next(name for pattern, name in FAMILIES.items() if re.search(pattern, run.hardware))


def overlaps(run: Run) -> bool:
    """Whether the program overlaps collectives with computation: the Megatron of 2021 and 2022 did not."""
    return not run.megatron


def topology(run: Run) -> Topology:
    """The machine of a run, with the shape of its slices."""
    found = next(machine for pattern, machine in MACHINES.items() if re.search(pattern, run.hardware))
    if found.pod:
        slices = int(run.hardware.split(" x ")[0]) if " x " in run.hardware else 1
        sides = grid(run.devices // slices, len(found.pod))
        found = replace(found, shape=(*sides, slices) if slices > 1 else sides)
    return replace(found, overlaps=FULL if overlaps(run) else NONE)


def grid(chips: int, dimensions: int) -> tuple[int, ...]:
    """The sides of a slice, as nearly equal as powers of two can be: 512 in 3 --> 8, 8, 8."""
    power = chips.bit_length() - 1
    return tuple(2 ** ((power + i) // dimensions) for i in range(dimensions))
