"""Planned seconds beside measured steps. benchmarks/clock.md has the results.

    python -m benchmarks.clock [--models lstm gpt2] [--sizes tiny larger] [--turns 7] [--json FILE] [--pipelines]

For each model of the zoo, an LSTM and a GRU, at two sizes and in up to three plans, on eight fake CPU devices as users
have them: `plan.seconds`, the measured step, and the step of `jax.jit` with the plan's borders, by turns. With
`--pipelines` those of the zoo instead: two stages, four microbatches, 1f1b; jit runs none. A process of its own for
each model and size.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.cases import ALL, Case, all_cases
from benchmarks.measure import Loop, by_turns, fake_cpu, report
from benchmarks.tables import Rows, new_table, start

PLANS = 3
"""Of each model, at most."""
STAGES = 2
FAR = 5
SIZES: Mapping[str, Mapping[str, tuple[Mapping[str, Any], int]]] = {
    "mlp": {"tiny": ({}, 64), "larger": ({"blocks": 4, "hidden": 1024}, 512)},
    "resnet": {"tiny": ({}, 64), "larger": ({"width": 32}, 64)},
    "vit": {"tiny": ({}, 64), "larger": ({"layers": 4}, 256)},
    "gpt2": {"tiny": ({}, 16), "larger": ({"layers": 4}, 32)},
    "llama": {"tiny": ({}, 16), "larger": ({"layers": 4}, 32)},
    "moe": {"tiny": ({}, 16), "larger": ({"layers": 4}, 32)},
    "t5": {"tiny": ({}, 16), "larger": ({"layers": 4}, 32)},
    "bert": {"tiny": ({}, 16), "larger": ({"layers": 4}, 32)},
    "dlrm": {"tiny": ({}, 64), "larger": ({"width": 64}, 512)},
    "ppo": {"tiny": ({}, 64), "larger": ({"hidden": 256}, 64)},
    "unet": {"tiny": ({}, 64), "larger": ({}, 256)},
    "mixer": {"tiny": ({}, 64), "larger": ({"width": 128, "hidden": 512}, 64)},
    "lstm": {"tiny": ({"units": 64}, 16), "larger": ({"units": 256}, 256)},
    "gru": {"tiny": ({"units": 64}, 16), "larger": ({"units": 256}, 256)},
}
"""Changes to each model's config "tiny", and rows in a batch."""


def cases(models: Sequence[str]) -> list[Case]:
    """Plans of a model, the first for each of its names."""
    found: dict[tuple[str, str], Case] = {}
    for case in all_cases(models):
        found.setdefault((case.model, case.plan), case)
    by_model: dict[str, list[Case]] = {}
    for case in found.values():
        by_model.setdefault(case.model, []).append(case)
    return [c for mine in by_model.values() for c in mine[:PLANS]]


def pipelines(models: Sequence[str]) -> list[Case]:
    """The pipelines of the models that have blocks."""
    mesh = (("pipe", STAGES), ("data", 2), ("model", 2))
    return [Case(m, "pipeline", mesh) for m in models if ALL[m].blocks and "pipeline" in ALL[m].plans]


def hooks(case: Case, cfg: Any) -> list[Any]:
    """What cuts the step of a pipeline into microbatches and stages."""
    if case.plan != "pipeline" or case.zoo.blocks is None:
        return []
    import shardc  # noqa: PLC0415  the environment is set before JAX is imported
    from examples.plans.stages import between  # noqa: PLC0415

    return [partial(shardc.accumulate, microbatches=4), between(case.zoo.blocks(cfg), STAGES)]


def measure(case: Case, size: str, turns: int) -> None:
    import jax  # noqa: PLC0415  the environment is set before JAX is imported

    import shardc  # noqa: PLC0415
    from benchmarks.peer import jitted  # noqa: PLC0415

    changes, rows = SIZES[case.model][size]
    cfg = replace(case.zoo.configs["tiny"], **changes)
    init_fn, step_fn = case.zoo.make_step(cfg, *hooks(case, cfg))
    args = jax.tree.map(np.asarray, (*jax.jit(init_fn)(jax.random.key(0)), next(case.zoo.batches(cfg, rows, 0))))
    mesh = shardc.make_mesh(**dict(case.mesh))
    ours = shardc.function(mesh=mesh, **case.options)(step_fn)
    plan = ours.plan(*args)
    placed = [shardc.put(args, mesh, plan.in_placements) for _ in range(2)]
    both = ours, ours if case.plan == "pipeline" else jitted(step_fn, plan, mesh, case.options)
    loops = [Loop(fn, mine[:-1], mine[-1]) for fn, mine in zip(both, placed, strict=True)]
    time = by_turns(*loops, turns)
    moves = [c for _, c in plan.moves] if case.plan == "pipeline" else plan.collectives
    report(case=str(case), size=size, planned=plan.seconds, parts=vars(plan.time), time=time,
           collectives=sum(c.count for c in moves))  # fmt: skip


def show(rows: Rows, console: Console) -> None:
    from scipy.stats import spearmanr  # noqa: PLC0415

    table = new_table(
        "Planned for 8 fake CPU devices, beside the clock", "example", "size", "plan", "mesh", "collectives",
        "planned ms", "measured ms", "ratio", "jit ms", "shardc : jit",
    )  # fmt: skip
    for r in rows:
        case, time = Case.parse(r["case"]), r["time"]
        table.add_row(
            case.model, r["size"], case.plan, case.mesh_text, str(r["collectives"]), f"{1e3 * r['planned']:.3g}",
            f"{1e3 * time['ours']:.3g}", f"{r['planned'] / time['ours']:.2f}", f"{1e3 * time['peer']:.3g}",
            f"{time['ratio']:.2f}",
        )  # fmt: skip
    console.print(table)
    ratios = [r["planned"] / r["time"]["ours"] for r in rows]
    found: Any = spearmanr([r["planned"] for r in rows], [r["time"]["ours"] for r in rows])
    off = [abs(x - 1) for x in ratios]
    slow = [r for r in rows if r["time"]["ratio"] > 1.1]
    console.print(
        f"{len(rows)} plans: rank correlation {found.statistic:.3f}; planned is off by {statistics.median(off):.0%} of "
        f"the measured step in the median; {len(slow)} are slower than 1.1 times jit."
    )
    far = sorted(zip(off, rows, strict=True), key=lambda pair: -pair[0])[:FAR]
    console.print("Furthest off: " + ", ".join(f"{r['case']} {r['size']}" for _, r in far))
    if slow:
        console.print("Slower: " + ", ".join(f"{r['case']} {r['size']} {r['time']['ratio']:.2f}" for r in slow))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.clock", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=ALL, default=list(ALL))
    parser.add_argument("--sizes", nargs="+", choices=("tiny", "larger"), default=("tiny", "larger"))
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--pipelines", action="store_true")
    parser.add_argument("--measure", nargs="+", type=Case.parse, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.measure:
        for case in options.measure:
            measure(case, options.sizes[0], options.turns)
        return 0
    console = Console() if sys.stdout.isatty() else Console(width=140)
    rows: Rows = []
    for model in options.models:
        named = list(map(str, (pipelines if options.pipelines else cases)([model])))
        for size in options.sizes if named else ():
            more = ["--sizes", size, "--turns", str(options.turns)]
            rows += start("benchmarks.clock", "--measure", *named, *more, env=fake_cpu(8))
            if options.json:
                options.json.write_text(json.dumps(rows, indent=1))
    if rows:
        show(rows, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
