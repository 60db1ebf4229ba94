"""Planned seconds beside others, of some plans of one model: `python -m benchmarks.cost_step tpu gpt2/fsdp/data=8`.

Started by cost_model.py. `tpu`: compiled ahead of time for eight chips of v5p that are not there, beside XLA:TPU's own
optimal_seconds, bodies of loops as often as they run, and its cycles. `cpu`: run on eight fake CPU devices, planned for
what `python -m shardc calibrate` measured of them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

import shardc
from benchmarks.cases import Case
from benchmarks.measure import Loop, report
from benchmarks.steps import state_and_batch
from benchmarks.xla_seconds import cycle_seconds, xla_seconds

CHIPS = "v5:2x4x1"
LARGE: Mapping[str, tuple[Mapping[str, Any], int]] = {
    "mlp": ({"blocks": 4, "hidden": 16384, "classes": 16}, 8192),
    "dlrm": ({"tables": (256, 65536, 262144, 262144), "width": 128, "bottom": (512,), "top": (1024, 512)}, 8192),
    "resnet": ({"width": 64, "classes": 16}, 1024),
    "vit": ({"layers": 1, "d_model": 1024, "heads": 16, "classes": 16}, 1024),
    "gpt2": ({"layers": 1, "d_model": 1024, "heads": 16, "seq": 512}, 32),
}
"""For TPUs: changes to each model's config "tiny", and rows in a batch."""
SMALL: Mapping[str, tuple[Mapping[str, Any], int]] = {
    "mlp": ({"blocks": 4, "hidden": 1024, "classes": 16}, 256),
    "dlrm": ({}, 512),
    "resnet": ({"width": 32, "classes": 16}, 64),
    "vit": ({"layers": 2, "classes": 16}, 64),
    "gpt2": ({}, 16),
}
"""For the CPU."""


def arguments(case: Case, sizes: tuple[Mapping[str, Any], int], *, shapes: bool) -> tuple[Any, tuple[Any, ...]]:
    """The step and its arguments, or their shapes."""
    changes, rows = sizes
    cfg = replace(case.zoo.configs["tiny"], **changes)
    init_fn, step_fn = case.zoo.make_step(cfg)
    if not shapes:
        args = (*jax.jit(init_fn)(jax.random.key(0)), next(case.zoo.batches(cfg, rows, 0)))
        return step_fn, jax.tree.map(np.asarray, args)
    few = next(case.zoo.batches(cfg, 8, 0))  # there may be fewer digits than rows
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), few)
    return step_fn, (*jax.eval_shape(init_fn, jax.random.key(0)), batch)


def on_tpu(case: Case, sizes: tuple[Mapping[str, Any], int]) -> None:
    from jax.experimental import topologies  # noqa: PLC0415

    chips = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS).devices
    chips = sorted(chips, key=lambda d: d.coords[::-1])
    mesh = Mesh(np.asarray(chips).reshape([n for _, n in case.mesh]), [a for a, _ in case.mesh],
                (AxisType.Auto,) * len(case.mesh))  # fmt: skip
    step_fn, args = arguments(case, sizes, shapes=True)
    ours = shardc.function(mesh=mesh, **case.options)(step_fn)
    plan = ours.plan(*args)
    compiled = ours.compile(*args).executable.compiled
    report(
        case=str(case),
        planned=plan.seconds,
        parts=vars(plan.time),
        other=xla_seconds(compiled),
        cycles=cycle_seconds(compiled.as_text()),
    )


def on_cpu(case: Case, sizes: tuple[Mapping[str, Any], int], calibration: str, turns: int) -> None:
    axes: dict[str, Any] = dict(case.mesh)
    mesh = shardc.make_mesh(calibration=calibration, **axes)
    step_fn, args = arguments(case, sizes, shapes=False)
    ours = shardc.function(mesh=mesh, **case.options)(step_fn)
    plan = ours.plan(*args)
    loop = Loop(ours, *state_and_batch(shardc.put(args, mesh, plan.in_placements)))
    loop()
    times = [loop() for _ in range(turns)]
    report(case=str(case), planned=plan.seconds, parts=vars(plan.time), other=statistics.median(times))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=("tpu", "cpu"))
    parser.add_argument("cases", nargs="+", type=Case.parse)
    parser.add_argument("--calibration")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--small", action="store_true", help="the CPU's sizes on both sides")
    options = parser.parse_args(argv)
    for case in options.cases:
        sizes = (SMALL if options.small or options.side == "cpu" else LARGE)[case.model]
        if options.side == "tpu":
            on_tpu(case, sizes)
        else:
            on_cpu(case, sizes, options.calibration, options.turns)


if __name__ == "__main__":
    main()
