"""The order of plans by the cost model, beside the orders by XLA:TPU and by measured steps.

    python -m benchmarks.cost_model [--only tpu cpu] [--tpu-python PYTHON] [--case gpt2/fsdp] [--json FILE]

For plans of five models of the zoo: `plan.seconds` beside XLA:TPU's optimal_seconds, and calibrated `plan.seconds`
beside the measured step. Spearman's rank correlation of all plans together, where the models' sizes help, and of those
of each model alone, where they do not. benchmarks/cost_model.md has the results.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from scipy.stats import rankdata, spearmanr

from benchmarks.cases import Case, all_cases
from benchmarks.measure import fake_cpu, warn
from benchmarks.run import tpu_env
from benchmarks.tables import Rows, new_table, start

MODELS = ("mlp", "dlrm", "resnet", "vit", "gpt2")
TITLES = {
    "tpu": ("Planned for 8 chips of v5p (2x4x1), beside XLA:TPU's optimal_seconds", "planned ms", "XLA:TPU ms"),
    "cpu": ("Planned for 8 calibrated CPU devices, beside the measured step", "planned ms", "measured ms"),
}
WORST = 5


def correlation(rows: Rows) -> float:
    """Spearman's, of what was planned and the other."""
    if len(rows) < 3:
        return float("nan")
    found: Any = spearmanr([r["planned"] for r in rows], [r["other"] for r in rows])
    return float(found.statistic)


def within(rows: Rows) -> dict[str, float]:
    """The correlation among the plans of each model."""
    models = dict.fromkeys(Case.parse(r["case"]).model for r in rows)
    return {m: correlation([r for r in rows if Case.parse(r["case"]).model == m]) for m in models}


def each_text(found: dict[str, float]) -> str:
    return ", ".join(f"{model} {c:.2f}" for model, c in found.items())


def computing(row: dict[str, Any]) -> float:
    """Planned seconds that are no collectives: XLA:TPU's figures know no links."""
    return row["parts"]["compute"] + row["parts"]["memory"]


def worst(rows: Rows, count: int = WORST) -> Rows:
    """The rows whose ranks among those of their model differ most."""
    found: list[tuple[float, dict[str, Any]]] = []
    for model in within(rows):
        mine = [r for r in rows if Case.parse(r["case"]).model == model]
        ranks = [rankdata([r[side] for r in mine]) for side in ("planned", "other")]
        found += [(float(abs(a - b)), r) for a, b, r in zip(*ranks, mine, strict=True)]
    return [r for off, r in sorted(found, key=lambda pair: -pair[0])[:count] if off]


def show(side: str, rows: Rows, console: Console) -> None:
    title, planned, other = TITLES[side]
    parts = ("compute", "memory", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "overlapped")
    table = new_table(title, "example", "plan", "mesh", planned, other, "ratio", *parts)
    nonsense = [r for r in rows if r["other"] <= 0]
    for r in rows:
        case = Case.parse(r["case"])
        split = [f"{1e3 * r['parts'][p]:.3g}" if r["parts"][p] else "-" for p in parts]
        table.add_row(
            case.model, case.plan, case.mesh_text, f"{1e3 * r['planned']:.3g}", f"{1e3 * r['other']:.3g}",
            f"{r['planned'] / r['other']:.2f}", *split,
        )  # fmt: skip
    console.print(table)
    counted = [r for r in rows if r not in nonsense]
    each = within(counted)
    console.print(
        f"Rank correlation of {len(counted)} plans of {len(each)} models: {correlation(counted):.3f}. "
        f"Of the plans of a model: {each_text(each)}."
    )
    if nonsense:
        console.print(f"Not counted, for the other figure is no time: {', '.join(r['case'] for r in nonsense)}.")
    if all("cycles" in r for r in counted):
        alone = [r | {"planned": computing(r)} for r in counted]
        console.print(f"Planned without collectives: {correlation(alone):.3f}; {each_text(within(alone))}.")
        counts = [r | {"other": r["cycles"]} for r in alone]
        console.print(f"The same beside XLA:TPU's cycles: {correlation(counts):.3f}; {each_text(within(counts))}.")
    console.print("Furthest apart: " + ", ".join(r["case"] for r in worst(counted)) + ".\n")


def measure(side: str, cases: Iterable[Case], options: argparse.Namespace) -> Rows:
    """One process for each model, and one that calibrates."""
    python, env, more = sys.executable, fake_cpu(8), list[str]()
    if side == "tpu":
        python, env = options.tpu_python or python, tpu_env()
        if python == sys.executable and find_spec("libtpu") is None:
            warn("tpu: left out, for libtpu is not here; name a Python that has it with --tpu-python.")
            return []
    else:
        more = ["--turns", str(options.turns), "--calibration", calibration(env)]
    more += ["--small"] if options.small else []
    rows: Rows = []
    by_model: dict[str, list[str]] = {}
    for case in cases:
        by_model.setdefault(case.model, []).append(str(case))
    for named in by_model.values():
        rows += start("benchmarks.cost_step", side, *named, *more, env=env, python=python)
    return rows


def calibration(env: Any) -> str:
    """Measures this machine; the name of the file that says it."""
    file = Path(tempfile.gettempdir()) / f"shardc-{os.getpid()}.json"
    command = [sys.executable, "-m", "shardc", "calibrate", "--mesh", "model=8", "--save", str(file)]
    print(subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout)
    machine = json.loads(file.read_text())
    machine["shape"] = []  # of eight fake devices one is as far as another, whatever the axes
    file.write_text(json.dumps(machine))
    return str(file)


def cases_of(models: Sequence[str], start_with: str) -> list[Case]:
    return [c for c in all_cases(models) if str(c).startswith(start_with)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cost_model", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--only", nargs="+", choices=TITLES, default=list(TITLES))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--case", default="", help="only rows that start so, as in gpt2/fsdp")
    parser.add_argument("--turns", type=int, default=7, help="steps that are timed, for each row")
    parser.add_argument("--tpu-python", help="a Python with jax[tpu], if this one has none")
    parser.add_argument("--small", action="store_true", help="small models on both sides: whether it works")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(argv)
    console = Console() if sys.stdout.isatty() else Console(width=180)
    found: dict[str, Rows] = {}
    for side in options.only:
        found[side] = measure(side, cases_of(options.models, options.case), options)
        if found[side]:
            show(side, found[side], console)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
