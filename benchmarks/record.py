"""Plans written down, and held against what was written down before: for changes that must not change a plan.

    python -m benchmarks.record --out before.json            # zoo, schedules, gold rows, large models
    python -m benchmarks.record --against before.json        # prints what differs, and exits with 1 if anything does
    python -m benchmarks.record --only zoo schedules --out before.json

Of each plan: a digest of its saved text (the placement of each value, each boxing), bytes sent per device, seconds,
peak memory, gap, of a pipeline its schedule and registers, and the processor seconds that planning took, whose median
ratio is printed. Each group is planned in a process of its own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import jax

import shardc
from benchmarks.cases import Case, all_cases
from benchmarks.gold import large as gold_large
from benchmarks.gold.measure import make_plan
from benchmarks.gold.row import Row, Side
from benchmarks.gold.rows import ROWS
from benchmarks.large_models import LARGE, pins_of
from benchmarks.large_step import planned_for, processor_seconds
from benchmarks.measure import fake_cpu, report
from benchmarks.tables import start
from examples import gpt2, mlp
from examples.plans.stages import between
from examples.zoo import MODELS
from shardc.errors import ShardcError
from shardc.pipeline.schedule.methods import METHODS

TOPOLOGIES = (None, "v5p:2x2x2")
SHOWN = ("bytes", "seconds", "peak", "gap")
NEAR = 1e-9
"""Two floats that are as near as this are equal: sums may be added up in another order."""

Made = Callable[[], Any]
"""Makes a plan."""


def zoo() -> Iterator[tuple[str, Made]]:
    """Each plan of each model once, the machines by turns."""
    first: dict[tuple[str, str], Case] = {}
    for case in all_cases([m for m in MODELS if m != "mixer"]):
        first.setdefault((case.model, case.plan), case)
    for case, topology in zip(first.values(), cycle(TOPOLOGIES), strict=False):
        yield f"{case} {topology or 'cpu'}", partial(plan_of_case, case, topology)


def plan_of_case(case: Case, topology: str | None) -> Any:
    cfg = replace(case.zoo.configs["tiny"])
    init_fn, step_fn = case.zoo.make_step(cfg)
    args = (*jax.eval_shape(init_fn, jax.random.key(0)), shapes(next(case.zoo.batches(cfg, 64, 0))))
    named = {} if topology is None else {"topology": topology}
    mesh = shardc.make_mesh(**named, **dict(case.mesh))
    return shardc.function(mesh=mesh, **case.options)(step_fn).plan(*args)


def schedules() -> Iterator[tuple[str, Made]]:
    configs = {
        "mlp": lambda stages: mlp.Config(blocks=stages, hidden=64),
        "gpt2": lambda stages: gpt2.Config(d_model=64, heads=4, layers=stages, seq=16),
    }
    for model, config in configs.items():
        for name, method in METHODS.items():
            if getattr(method, "weight_versions", 1) > 1:
                continue
            for stages, topology in zip(("marked", "auto"), TOPOLOGIES, strict=True):
                text = f"{model} {name} {stages} {topology or 'cpu'}"
                yield text, partial(plan_of_pipeline, model, config, name, method.chunks, stages, topology)


def plan_of_pipeline(model: str, config: Any, schedule: str, chunks: int, stages: str, topology: str | None) -> Any:
    cfg = config(2 * chunks)
    hooks = [partial(shardc.accumulate, microbatches=4)]
    if stages == "marked":
        hooks.append(between(MODELS[model].blocks(cfg), 2 * chunks))
    init_fn, step_fn = MODELS[model].make_step(cfg, *hooks)
    args = (*jax.eval_shape(init_fn, jax.random.key(0)), shapes(next(MODELS[model].batches(cfg, 16, 0))))
    named = {} if topology is None else {"topology": topology}
    mesh = shardc.make_mesh(**named, pipe=2, data=2, model=2)
    options = MODELS[model].plans["pipeline"]() | {
        "pipeline": shardc.Pipeline(axis="pipe", schedule=schedule, chunks=chunks, stages=stages)
    }
    return shardc.function(mesh=mesh, **options)(step_fn).plan(*args)


def gold() -> Iterator[tuple[str, Made]]:
    for name, row in ROWS.items():
        for side in ("annotated", "auto"):
            yield f"{name} {side} cpu", partial(plan_of_row, row, side, None)
    for name, row in gold_large.LARGE.items():
        for side in ("annotated", "auto"):
            yield f"{name} {side} {gold_large.TOPOLOGY}", partial(plan_of_row, row, side, gold_large.TOPOLOGY)


def plan_of_row(row: Row, side: Side, topology: str | None) -> Any:
    named = {} if topology is None else {"topology": topology}
    return make_plan(row, side, shardc.make_mesh(**named, hbm=row.hbm, **row.mesh))[1]


def large() -> Iterator[tuple[str, Made]]:
    for name, model in LARGE.items():
        for plan in model.plans:
            yield f"{name}/{plan}", partial(plan_of_large, name, plan)


def plan_of_large(name: str, plan: str) -> Any:
    model = LARGE[name]
    ours = shardc.function(mesh=planned_for(model), **pins_of(name, plan))(model.step)
    args = model.arguments()
    ours.look(*args)
    return lambda: ours.plan(*args)


def shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


GROUPS: dict[str, Callable[[], Iterator[tuple[str, Made]]]] = {
    "zoo": zoo, "schedules": schedules, "gold": gold, "large": large,
}  # fmt: skip


def measure(group: str) -> None:
    for name, make in GROUPS[group]():
        try:
            planning, plan = processor_seconds(make)
            if callable(plan):
                planning, plan = processor_seconds(plan)
        except ShardcError as error:
            report(name=f"{group}: {name}", error=f"{type(error).__name__}: {str(error)[:200]}")
            continue
        report(name=f"{group}: {name}", planning=planning, **facts(plan))


def facts(plan: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        plan.save(path)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    memory = plan.memory
    known = {"digest": digest, "bytes": plan.bytes_per_device, "seconds": plan.seconds, "peak": memory.peak}
    if hasattr(memory, "ranks"):
        known["ranks"] = [r.peak for r in memory.ranks]
        known["schedule"] = hashlib.sha256(str(plan.schedule).encode()).hexdigest()[:16]
        known["registers"] = [c.registers for c in plan.network.channels]
    return known | {"gap": plan.gap}


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [
        f"{key} {before.get(key)} -> {now.get(key)}"
        for key in dict.fromkeys([*before, *now])
        if key not in ("name", "planning") and not same(before.get(key), now.get(key))
    ]


def same(a: Any, b: Any) -> bool:
    both_floats = isinstance(a, float) and isinstance(b, float)
    return math.isclose(a, b, rel_tol=NEAR, abs_tol=NEAR) if both_floats else a == b


def compare(before: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]]) -> int:
    old = {r["name"]: r for r in before}
    wrong = 0
    for row in now:
        if row["name"] not in old:
            print(f"{row['name']}: new")
            continue
        if found := differences(old[row["name"]], row):
            wrong += 1
            print(f"{row['name']}: {'; '.join(found)}")
    times = [r["planning"] / old[r["name"]]["planning"] for r in now if "planning" in r and r["name"] in old]
    if times:
        print(f"{len(now)} plans, {wrong} differ; planning takes {statistics.median(times):.2f} times as long.")
    return 1 if wrong else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.record", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--out", type=Path, help="write the plans to this file")
    parser.add_argument("--against", type=Path, help="compare with the plans in this file")
    parser.add_argument("--measure", choices=GROUPS, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.measure:
        measure(options.measure)
        return 0
    rows: list[dict[str, Any]] = []
    for group in options.only:
        rows += start("benchmarks.record", "--measure", group, env=fake_cpu(8))
        if options.out:
            options.out.write_text(json.dumps(rows, indent=1))
    return compare(json.loads(options.against.read_text()), rows) if options.against else 0


if __name__ == "__main__":
    sys.exit(main())
