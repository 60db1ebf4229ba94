"""What planning takes against the number of layers: `python -m benchmarks.layers [--scanned] [1 3 12 96]`.

GPT-3's layers (12288 wide), rows of the batch over `data` and nothing else said, for 512 chips of v5p with memory that
never is the limit. Each row is planned in a process of its own; seconds are the processor's. benchmarks/layers.md
has the columns and the results.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

import shardc
from benchmarks.large_models import LARGE, pins_of
from benchmarks.large_step import processor_seconds
from benchmarks.measure import fake_cpu, report
from benchmarks.planning import count
from benchmarks.tables import Rows, new_table, start

MESHES = ({"data": 64, "model": 8}, {"data": 2, "fsdp": 32, "model": 8})
LAYERS = (1, 3, 12, 48, 96)


def measure(layers: int, axes: int, scanned: bool) -> None:
    large = LARGE["gpt3"].truncated(layers)
    large = replace(large, config=replace(large.config, scan_layers=scanned))
    mesh = shardc.make_mesh(topology=large.topology, hbm="1000TB", **next(m for m in MESHES if len(m) == axes))
    args = large.arguments()
    ours = shardc.function(mesh=mesh, **pins_of("gpt3", "batch"))(large.step)
    tracing, (program, _) = processor_seconds(lambda: ours.look(*args))
    planning, plan = processor_seconds(lambda: ours.plan(*args))  # what was traced is not traced again
    equations = count(program.jaxpr)
    report(
        layers=layers, axes=axes, scanned=scanned, equations=equations, tracing=tracing, planning=planning,
        gap=plan.gap,
    )  # fmt: skip


def show(rows: Rows, console: Console) -> None:
    table = new_table("Planning", "what", "axes", "layers", "equations", "trace s", "plan s", "us/equation", "gap")
    for r in rows:
        each = 1e6 * r["planning"] / r["equations"]
        table.add_row(
            "scanned" if r["scanned"] else "unrolled", f"{r['axes']}", f"{r['layers']}", f"{r['equations']}",
            f"{r['tracing']:.2f}", f"{r['planning']:.2f}", f"{each:.0f}", f"{r['gap']:.4%}",
        )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layers", nargs="*", type=int, default=LAYERS)
    parser.add_argument("--axes", type=int, choices=[len(m) for m in MESHES], default=2)
    parser.add_argument("--scanned", action="store_true", help="instead of unrolled")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        measure(options.layers[0], options.axes, options.scanned)
        sys.exit()
    found: Rows = []
    more = ["--one", "--axes", str(options.axes), *(["--scanned"] if options.scanned else [])]
    for number in options.layers:
        found += start("benchmarks.layers", str(number), *more, env=fake_cpu(1))
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))
    show(found, Console())
