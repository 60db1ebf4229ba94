"""Models of the zoo at middle size, compiled for machines that are not there: what is planned beside what is compiled.

    JAX_PLATFORMS=cpu python -m benchmarks.ahead h100:8 [MODEL ...] [--stages N] [--json FILE]

JAX's plugin for the machine has to be installed, and nothing runs. A row has the audit, the peak of the memory of a
device, and the milliseconds that are hidden behind computation. docs/accelerators.md has the tables.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import shardc
from benchmarks.measure import MIB
from examples.plans.stages import between
from examples.zoo import MODELS
from shardc.machine.topology import TOPOLOGIES

HALF = {"dtype": jnp.bfloat16}
SCANNED = HALF | {"scan_layers": True}


@dataclass(frozen=True)
class Middle:
    """A model at middle size: its plan, the axes of eight devices, rows, changes of its config `tiny`, and the shape of
    an image."""

    plan: str
    axes: Mapping[str, int]
    rows: int
    changes: dict[str, Any]
    image: tuple[int, ...] = ()


DATA, BOTH = {"data": 8}, {"data": 4, "model": 2}
TEXT = {"d_model": 1024, "heads": 16, "seq": 512}
MIDDLE = {
    "mlp": Middle("fsdp", DATA, 16384, {"width": 1024, "hidden": 4096, "blocks": 4}, (32, 32, 1)),
    "resnet": Middle("zero1", DATA, 256, HALF | {"width": 64, "image": (64, 64, 3), "large_stem": True}, (64, 64, 3)),
    "vit": Middle(
        "fsdp", DATA, 64, SCANNED | {"d_model": 768, "heads": 12, "patch": 16, "image": (224, 224, 3)}, (224, 224, 3)
    ),
    "mixer": Middle(
        "data_tensor", BOTH, 512, {"side": 64, "patch": 8, "width": 512, "hidden": 2048}, (64, 64, 1)
    ),
    "unet": Middle("zero1", DATA, 256, {"widths": (64, 128), "blocks": 1, "image": (32, 32, 1)}, (32, 32, 1)),
    "gpt2": Middle("data_tensor", BOTH, 64, SCANNED | TEXT | {"layers": 4}),
    "llama": Middle(
        "fsdp", DATA, 64, SCANNED | TEXT | {"layers": 4, "kv_heads": 8, "hidden": 2816, "remat": True}
    ),
    "moe": Middle("gshard", DATA, 64, SCANNED | {"d_model": 512, "heads": 8, "seq": 512, "hidden": 2048}),
    "bert": Middle("vocab", BOTH, 64, {"layers": 4, "d_model": 512, "heads": 8, "seq": 512}),
    "t5": Middle("tensor", {"model": 8}, 32, SCANNED | {
        "d_model": 512, "heads": 8, "d_head": 64, "hidden": 2048, "seq": 512, "spans": 25,
    }),
    "dlrm": Middle("hybrid", DATA, 65536, {
        "tables": (2**20, 2**18, 2**16, 2**16), "width": 64, "bottom": (512, 256), "top": (1024, 256)
    }),
    "ppo": Middle("data", DATA, 8192, {"carts": 8192, "times": 128, "hidden": 256, "epochs": 2}),
}  # fmt: skip


def planned_step(model: str, topology: str, stages: int) -> tuple[Any, tuple[Any, ...]]:
    """The function of a model's training step on a machine, and the shapes of its arguments."""
    zoo, middle = MODELS[model], MIDDLE[model]
    listed = {"scan_layers": False} if stages and "scan_layers" in middle.changes else {}
    cfg = replace(zoo.configs["tiny"], **middle.changes | listed)
    options, hooks = zoo.plans[middle.plan](), ()
    axes: Any = grown(middle.axes, topology)
    if stages:
        assert zoo.blocks is not None, f"{model} is no stack of blocks"
        options = zoo.plans["pipeline"]()
        axes = {"pipe": stages, "data": 8 // stages, "model": 1}
        hooks = partial(shardc.accumulate, microbatches=2 * stages), between(zoo.blocks(cfg), stages)
    init, step = zoo.make_step(cfg, *hooks)
    batch = {
        name: jax.ShapeDtypeStruct((middle.rows, *(middle.image if name == "image" else x.shape[1:])), x.dtype)
        for name, x in next(iter(zoo.batches(cfg, 8, 0))).items()
    }
    mesh = shardc.make_mesh(topology=topology, **axes)
    return shardc.function(step, mesh=mesh, **options), (*jax.eval_shape(init, jax.random.key(0)), batch)


def grown(axes: Mapping[str, int], topology: str) -> dict[str, int]:
    """The axes for all devices of a machine: the first one takes those beyond eight."""
    devices = 1
    for n in topology.partition(":")[2].split("x"):
        devices *= int(n)
    first, *others = axes
    return {first: axes[first] * devices // 8} | {a: axes[a] for a in others}


def row(model: str, topology: str, stages: int) -> dict[str, Any]:
    """What a plan says of a step, and its compiled program."""
    function, shapes = planned_step(model, topology, stages)
    began = time.process_time()
    plan = function.plan(*shapes)
    planned = time.process_time()
    compiled = function.compile(*shapes)
    ended = time.process_time()
    audit = compiled.audit()
    found = compiled.executable.memory.peak if stages else compiled.memory_stats().peak_memory_in_bytes
    hidden = [sum(f.planned.hidden for f in audit.overlaps), sum(f.hidden for f in audit.overlaps)]
    return {
        "model": model, "topology": topology, "stages": stages, "ok": audit.ok, "audit": str(audit).splitlines()[0],
        "missing": len(audit.missing), "peak": [plan.memory.peak / MIB, found / MIB], "seconds": plan.seconds,
        "hidden": hidden, "cpu": [planned - began, ended - planned], "text": str(audit),
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ahead", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("topology", help=f"with its shape; of {', '.join(TOPOLOGIES)}")
    parser.add_argument("models", nargs="*", choices=[*MIDDLE, []], default=list(MIDDLE))
    parser.add_argument("--stages", type=int, default=0, help="of a pipeline; default: one program")
    parser.add_argument("--json", type=Path, help="append the rows to this file")
    options = parser.parse_args(argv)
    for model in options.models:
        one = row(model, options.topology, options.stages)
        (planned, found), hidden, cpu = one["peak"], one["hidden"], one["cpu"]
        print(
            f"{model:7} {options.topology:9} {one['audit'].removeprefix('audit: ')}; peak {planned:.0f} / {found:.0f} "
            f"MiB ({planned / found:.2f}); step {1e3 * one['seconds']:.2f} ms, hidden {1e3 * hidden[0]:.2f} planned, "
            f"{1e3 * hidden[1]:.2f} compiled; CPU s {cpu[0]:.0f} + {cpu[1]:.0f}", flush=True,
        )  # fmt: skip
        if options.json:
            with options.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(one) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
