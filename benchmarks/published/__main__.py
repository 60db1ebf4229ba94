"""Published training runs, planned as they were run, beside what they took.

    python -m benchmarks.published [PREFIX ...] [--json FILE] [--read FILE] [--fit]

Nothing runs, and no accelerator is needed. Each run is planned in a process of its own. benchmarks/published.md has the
method and the results.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.measure import fake_cpu
from benchmarks.published.runs import Run, read
from benchmarks.published.show import (
    GIB,
    show_families,
    show_fit,
    show_memory,
    show_order,
    show_runs,
    show_within,
)
from benchmarks.tables import Rows, start


def cheap_first(runs: Sequence[Run]) -> list[Run]:
    return sorted(runs, key=lambda run: len(run.stages) * (1 + run.microbatches / 100))


def measure(runs: Sequence[Run], file: Path | None, known: Rows) -> Rows:
    """Plans each run that is not known yet, and each configuration once: some were run with several releases."""
    rows, every = list(known), {run.name: run for run in read()}
    planned = {every[row["run"]].configuration: row for row in rows}
    for run in cheap_first([run for run in runs if run.name not in {row["run"] for row in rows}]):
        twin = planned.get(run.configuration)
        own = {"run": run.name, "published": run.seconds, "published_memory": run.gib and run.gib * GIB}
        found = [twin | own] if twin else start("benchmarks.published.plan_run", run.name, env=fake_cpu(1))
        rows += found
        planned |= dict.fromkeys([run.configuration], found[0]) if found else {}
        if file:
            file.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return rows


def measure_within(rows: Rows, file: Path | None) -> None:
    """Plans anew, within the memory of the device, the runs whose fastest plan takes more: those that say what they
    recompute, and offload nothing to the host."""
    for row in rows:
        said = row["recompute"] in ("full", "minimal", "selective") and row["machine"] != "v7x"
        if row["memory"] > row["hbm"] and "within" not in row and said:
            found = start("benchmarks.published.plan_run", row["run"], "--limited", env=fake_cpu(1))
            row["within"] = found[0] if found else {"misfit": "the planner failed"}
            if file:
                file.write_text(json.dumps(rows, indent=1), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.published", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", metavar="PREFIX", help="of the names of runs; default: all")
    parser.add_argument("--json", type=Path, help="write the figures to this file, after each run")
    parser.add_argument("--read", type=Path, help="print the tables of such a file; runs that it has are not planned")
    parser.add_argument("--within", action="store_true", help="plan those that take too much memory anew, within it")
    parser.add_argument("--fit", action="store_true", help="fit shares of the machines' figures to the runs of --read")
    options = parser.parse_args(argv)
    known = json.loads(options.read.read_text(encoding="utf-8")) if options.read else []
    chosen = [run for run in read() if not options.runs or run.name.startswith(tuple(options.runs))]
    rows = known if options.read and not options.runs else measure(chosen, options.json, known)
    if options.within:
        measure_within(rows, options.json)
    console = Console() if sys.stdout.isatty() else Console(width=210)
    show_runs(rows, console)
    show_families(rows, console)
    show_memory(rows, console)
    show_within(rows, console)
    show_order(rows, console)
    if options.fit:
        show_fit(rows, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
