"""One published run, planned: `python -m benchmarks.published.plan_run vtrain-multi-1`. Started by __main__.py."""

from __future__ import annotations

import sys
import time
from typing import Any

import shardc
from benchmarks.large_step import processor_seconds
from benchmarks.measure import report
from benchmarks.published.decoder import step_of
from benchmarks.published.machines import data_sheet, family, topology
from benchmarks.published.runs import Run, read
from shardc.machine.mesh import AnyMesh
from shardc.machine.topology import Topology
from shardc.plans import MemoryLimitError

BOUNDLESS = "10000GB"


def mesh_of(run: Run, machine: Topology, hbm: str | None) -> AnyMesh:
    axes: Any = run.mesh
    return shardc.make_mesh(topology=machine.to_json(), hbm=hbm, **axes)


def pipeline_of(run: Run) -> shardc.Pipeline | None:
    if run.pipe == 1:
        return None
    schedule = "1f1b" if run.chunks == 1 else "interleaved"
    return shardc.Pipeline(axis="pipe", schedule=schedule, chunks=run.chunks, recompute="none")


def measure(run: Run, limited: bool = False) -> None:
    """A report of the plan at data sheet figures, and of its seconds with the shares of them that are reached."""
    step, arguments, keywords = step_of(run)
    machine = data_sheet(topology(run))

    def plan_on(machine: Topology) -> Any:
        mesh = mesh_of(run, machine, None if limited else BOUNDLESS)
        ours = shardc.function(step, mesh=mesh, pipeline=pipeline_of(run), **keywords)
        return processor_seconds(lambda: ours.plan(*arguments))

    began = time.perf_counter()
    try:
        planning, plan = plan_on(machine)
        _, reached = plan_on(topology(run))
    except MemoryLimitError as error:
        report(run=run.name, misfit=str(error))
        return
    devices_seconds = run.devices * machine.flops_in(run.narrow or "bfloat16")
    known: dict[str, Any] = {
        "run": run.name, "family": family(run), "machine": machine.kind, "model": run.model,
        "mesh": ",".join(f"{a}={n}" for a, n in run.mesh.items()), "devices": run.devices,
        "microbatch": run.batch / (run.data * run.fsdp * run.microbatches), "microbatches": run.microbatches,
        "layers": run.layers / run.pipe, "recompute": run.recompute, "published": run.seconds, "planned": plan.seconds,
        "reached": reached.seconds,
        "parts": vars(plan.time), "bytes": plan.bytes_per_device, "by_kind": by_kind(plan, run),
        "model_flops": run.model_flops, "peak_flops": devices_seconds,
        "attention": run.kernel_flops / run.devices / machine.flops_in("bfloat16"),
        "hbm": machine.hbm, "memory": plan.memory.peak, "published_memory": run.gib and run.gib * 2**30,
        "planning": planning, "wall": time.perf_counter() - began,
    }  # fmt: skip
    report(**known)


def by_kind(plan: Any, run: Run) -> dict[str, int]:
    """Bytes that a device sends, by kind of collective; of a pipeline, the mean of its ranks, without its messages."""
    found: dict[str, int] = {}
    for c in plan.collectives:
        found[c.kind] = found.get(c.kind, 0) + c.bytes // run.pipe
    return found


if __name__ == "__main__":
    measure(next(run for run in read() if run.name == sys.argv[1]), "--limited" in sys.argv)
