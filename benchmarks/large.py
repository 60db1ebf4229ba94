"""Models of the largest sizes, planned from shapes for slices of v5p with three axes; and compiled for them.

    python -m benchmarks.large [gpt3 llama405b/fsdp ...]
    python -m benchmarks.large gpt3 --compile --tpu-python PYTHON

Nothing runs, and no chip is needed. Each row is planned in a process of its own. With --compile XLA:TPU compiles the
planned step for the whole slice, and its memory, collectives and seconds stand beside the plan's. benchmarks/large.md
has the columns and the results.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from scipy.stats import spearmanr

from benchmarks.large_models import LARGE
from benchmarks.measure import fake_cpu, warn
from benchmarks.run import tpu_env
from benchmarks.tables import Rows, new_table, start
from shardc.sbp.cost import COLLECTIVES

GIB = 2**30
CASES = [f"{name}/{plan}" for name, large in LARGE.items() for plan in large.plans]


def measure(cases: Sequence[str], options: argparse.Namespace) -> Rows:
    python, env = sys.executable, fake_cpu(1)
    if options.compile:
        python, env = options.tpu_python or python, tpu_env()
        if python == sys.executable and find_spec("libtpu") is None:
            warn("libtpu is not here, so nothing is compiled; name a Python that has it with --tpu-python.")
            options.compile, env = False, fake_cpu(1)
    rows: Rows = []
    for case in cases:
        more = ["--compile"] if options.compile else []
        rows += start("benchmarks.large_step", case, *more, env=env, python=python)[-1:]  # the last knows most
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1))
    return rows


def show_plans(rows: Rows, console: Console) -> None:
    table = new_table(
        "Planned for v5p", "model", "10^9", "plan", "mesh", "chips", "trace s", "plan s", "gap", "step s", "compute",
        "memory", "collectives", "overlapped", "GiB", "of", "sent GiB", "MFU",
    )  # fmt: skip
    for r in rows:
        model, plan = r["case"].split("/")
        known = [model, f"{r['params'] / 1e9:.1f}", plan, r["mesh"], f"{r['devices']}", f"{r['tracing']:.1f}"]
        if "misfit" in r:
            table.add_row(*known, "does not fit")
            continue
        parts = r["parts"]
        moving = sum(parts[kind] for kind in COLLECTIVES)
        table.add_row(
            *known, f"{r['planning']:.1f}", gap_text(r["gap"]), f"{r['seconds']:.4g}",
            *(f"{x:.3g}" for x in (parts["compute"], parts["memory"], moving, parts["overlapped"])),
            f"{r['memory'] / GIB:.1f}{' *' if r['unlimited'] else '  '}", f"{r['hbm'] / GIB:.1f}",
            f"{r['bytes'] / GIB:.2f}", f"{r['utilization']:.0%}",
        )  # fmt: skip
    console.print(table)
    console.print("* the limit on memory decided: the cheapest plan is another.\n")
    for r in rows:
        if "misfit" in r:
            console.print(f"{r['case']}: {r['misfit']}\n", markup=False, soft_wrap=True)


def gap_text(gap: float | None) -> str:
    return "-" if gap is None else f"{gap:.2%}"


def show_compiled(rows: Rows, console: Console) -> None:
    table = new_table(
        "Compiled for v5p by XLA:TPU, beside the plan", "model", "plan", "compile s", "GiB", "XLA peak", "ratio",
        "XLA allots", "sent GiB", "XLA sent", "ratio", "step s", "computing", "XLA:TPU s", "ratio", "audit",
    )  # fmt: skip
    for r in rows:
        xla, computing = r["xla"], r["parts"]["compute"] + r["parts"]["memory"]
        sent, memory = sum(xla["bytes"].values()), r["memory"] / xla["peak"]
        sizes = [f"{bytes_ / GIB:.1f}" for bytes_ in (r["memory"], xla["peak"], xla["memory"])]
        table.add_row(
            *r["case"].split("/"), f"{xla['compiling']:.0f}", *sizes[:2],
            f"{memory:.2f}{' !' if not 1 <= memory <= 1.1 else '  '}", sizes[2], f"{r['bytes'] / GIB:.2f}",
            f"{sent / GIB:.2f}", f"{r['bytes'] / sent:.2f}", f"{r['seconds']:.4g}", f"{computing:.4g}",
            *((f"{xla['seconds']:.4g}", f"{computing / xla['seconds']:.2f}") if timed(r) else ("-", "-")),
            "ok" if xla["audit"] else "SURPRISES",
        )  # fmt: skip
    console.print(table)
    known = list(filter(timed, rows))
    if len(known) > 2:
        for name in ("seconds", "computing"):
            console.print(f"Rank correlation of {len(known)} plans, {name}: {correlation(known, name):.3f}.")


def timed(row: dict[str, Any]) -> bool:
    """Whether XLA:TPU's figure is a time."""
    return row["xla"]["seconds"] > 0


def correlation(rows: Rows, of: str) -> float:
    """Spearman's, of planned seconds, or of those that are no collectives, with XLA:TPU's."""

    def planned(r: dict[str, Any]) -> float:
        return r["seconds"] if of == "seconds" else r["parts"]["compute"] + r["parts"]["memory"]

    found: Any = spearmanr([planned(r) for r in rows], [r["xla"]["seconds"] for r in rows])
    return float(found.statistic)


def chosen(named: Sequence[str]) -> list[str]:
    return [case for case in CASES if not named or any(f"{case}/".startswith(f"{name}/") for name in named)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.large", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="MODEL[/PLAN]", help=f"of {', '.join(LARGE)}; default: all")
    parser.add_argument("--compile", action="store_true", help="XLA:TPU compiles the planned steps; minutes each")
    parser.add_argument("--tpu-python", help="a Python with jax[tpu] and the examples' packages, if this one has none")
    parser.add_argument("--json", type=Path, help="write the figures to this file, after each row")
    parser.add_argument("--read", type=Path, help="print the tables of such a file, and measure nothing")
    options = parser.parse_args(argv)
    unknown = [name for name in options.cases if not chosen([name])]
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(CASES)}")
    console = Console() if sys.stdout.isatty() else Console(width=190)
    rows = json.loads(options.read.read_text()) if options.read else measure(chosen(options.cases), options)
    show_plans(rows, console)
    compiled = [r for r in rows if "xla" in r]
    if compiled:
        show_compiled(compiled, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
