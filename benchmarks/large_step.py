"""One large model under one plan: `python -m benchmarks.large_step gpt3/fsdp [--compile]`. Started by large.py.

With --compile the devices are those that libtpu describes, and XLA:TPU compiles the planned step for them.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh

import shardc
from benchmarks.large_models import LARGE, Large, pins_of, size_of
from benchmarks.measure import moved, report
from benchmarks.xla_seconds import cycle_seconds, xla_seconds
from shardc.machine.mesh import AnyMesh, view
from shardc.plans import MemoryLimitError


def measure(case: str, compiled: bool, layers: int | None = None, text: Path | None = None) -> None:
    name, plan_name = case.split("/")
    large = LARGE[name] if layers is None else LARGE[name].truncated(layers)
    args, mesh = large.arguments(), (compiled_for if compiled else planned_for)(large)
    ours = shardc.function(mesh=mesh, **pins_of(name, plan_name))(large.step)
    tracing, _ = processor_seconds(lambda: ours.look(*args))
    known: dict[str, Any] = {
        "case": case, "mesh": ",".join(f"{a}={n}" for a, n in large.mesh.items()), "devices": large.devices,
        "params": size_of(args[0]), "tracing": tracing, "hbm": view(mesh).limit,
    }  # fmt: skip
    try:
        planning, plan = processor_seconds(lambda: ours.plan(*args))  # what was traced is not traced again
    except MemoryLimitError as error:
        report(**known, misfit=str(error))
        return
    work = large.work(large.config, args[0]) * large.rows / large.devices
    known |= {
        "planning": planning, "gap": plan.gap, "seconds": plan.seconds, "parts": vars(plan.time),
        "memory": plan.memory.peak, "bytes": plan.bytes_per_device, "by_kind": by_kind(plan),
        "utilization": work / (view(mesh).topology.flops * plan.seconds),
        "unlimited": plan.unlimited and vars(plan.unlimited),
    }  # fmt: skip
    report(**known)
    if compiled:
        report(**known, xla=figures(ours, args, text))


def processor_seconds(call: Any) -> tuple[float, Any]:
    began = time.process_time()
    result = call()
    return time.process_time() - began, result


def by_kind(plan: shardc.Plan) -> dict[str, int]:
    found: dict[str, int] = {}
    for c in plan.collectives:
        found[c.kind] = found.get(c.kind, 0) + c.bytes
    return found


def figures(ours: Any, args: tuple[Any, ...], text: Path | None) -> dict[str, Any]:
    """What XLA:TPU says of the compiled step."""
    began = time.perf_counter()
    executable = ours.compile(*args)
    compiled, took = executable.executable.compiled, time.perf_counter() - began
    audit, memory = executable.audit(), compiled.memory_analysis()
    hlo = compiled.as_text()
    if text is not None:
        text.write_text(hlo)
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return {
        "compiling": took, "seconds": xla_seconds(compiled), "cycles": cycle_seconds(hlo),
        "memory": held + memory.temp_size_in_bytes, "peak": memory.peak_memory_in_bytes, "bytes": moved(hlo),
        "audit": audit.ok, "audit_text": str(audit),
    }  # fmt: skip


def planned_for(large: Large) -> AnyMesh:
    return shardc.make_mesh(topology=large.topology, **large.mesh)


def compiled_for(large: Large) -> Mesh:
    from jax.experimental import topologies  # noqa: PLC0415

    name = f"v5:{'x'.join(map(str, large.chips))}"
    chips = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    chips = sorted(chips, key=lambda d: d.coords[::-1])
    sizes, axes = tuple(large.mesh.values()), tuple(large.mesh)
    return Mesh(np.asarray(chips).reshape(sizes), axes, (AxisType.Auto,) * len(axes))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--layers", type=int, help="instead of the model's own")
    parser.add_argument("--hlo", type=Path, help="write the text of the compiled program to this file")
    options = parser.parse_args()
    measure(options.case, options.compile, options.layers, options.hlo)
