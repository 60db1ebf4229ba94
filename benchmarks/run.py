"""Measure shardc beside its peers and print the tables of benchmarks/run.md.

    python -m benchmarks.run [--quick] [--only steps plan dispatch pipeline tpu gpu] [--case gpt2/fsdp]

Each row is measured in a process of its own, both sides by turns. --json keeps the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from benchmarks.cases import Case, all_cases
from benchmarks.measure import MIB, fake_cpu, warn
from benchmarks.pipeline.tables import pipeline
from benchmarks.tables import Rows, flagged, fraction, median, new_table, start, times

QUICK = (
    "mlp/data/data=8",
    "mlp/data_tensor/data=4,model=2",
    "resnet/data/data=8",
    "gpt2/data_tensor/data=4,model=2",
    "gpt2/fsdp/data=8",
)
PLANNED = (*QUICK[1:], "gpt2/data/data=8")


# --- the sections --------------------------------------------------------------------------------------------------


def steps(options: argparse.Namespace) -> Rows:
    turns = "3" if options.quick else str(options.turns)
    table = new_table("Training steps, 8 CPU devices", "example", "plan", "mesh", "shardc ms", "jit ms", "ratio",
                      "(least-most)", "shardc MiB", "jit MiB", "ratio", "operations", "audit")  # fmt: skip
    rows: Rows = []
    for case in chosen(all_cases(), options, QUICK):
        for row in start("benchmarks.steps", str(case), "--turns", turns, env=fake_cpu(8)):
            rows.append(row)
            ours, peer = (sum(row[side]["bytes"].values()) for side in ("ours", "peer"))
            counts = [sum(row[side]["operations"].values()) for side in ("ours", "peer")]
            table.add_row(
                case.model, case.plan, case.mesh_text, *times(row["time"], 1e3),
                f"{ours / MIB:.2f}", f"{peer / MIB:.2f}", fraction(ours, peer), f"{counts[0]} : {counts[1]}",
                "ok" if row["audit"] else "SURPRISES",
            )  # fmt: skip
            if row["difference"] > 1e-2:
                warn(f"{case}: the losses of the two sides differ by {row['difference']:.1e} of their size")
    options.console.print(table)
    return rows


def plan(options: argparse.Namespace) -> Rows:
    table = new_table("Planning and compiling, once, in ms", "example", "plan", "mesh", "equations", "trace", "plan",
                      "compile", "jit trace", "jit compile", "plan : jit", "trace+plan : jit",
                      "compile : compile")  # fmt: skip
    rows: Rows = []
    for case in chosen(map(Case.parse, PLANNED), options, PLANNED[:3]):
        runs: Rows = []
        for i in range(1 if options.quick else 4):
            first = ["--peer-first"] if i % 2 else []
            runs += start("benchmarks.planning", str(case), *first, env=fake_cpu(8))
        if not runs:
            continue
        rows += runs
        parts = ("trace", "plan", "compile", "peer_trace", "peer_compile")
        ms = [median(runs, lambda r, part=part: 1e3 * r[part]) for part in parts]
        table.add_row(
            case.model, case.plan, case.mesh_text, f"{runs[0]['equations']}", *(f"{x:.0f}" for x in ms),
            f"{median(runs, lambda r: r['plan'] / (r['peer_trace'] + r['peer_compile'])):.2f}",
            f"{median(runs, lambda r: (r['plan'] + r['trace']) / (r['peer_trace'] + r['peer_compile'])):.2f}",
            f"{median(runs, lambda r: r['compile'] / r['peer_compile']):.2f}",
        )  # fmt: skip
    options.console.print(table)
    return rows


def dispatch(options: argparse.Namespace) -> Rows:
    table = new_table("A call beside its work", "devices", "arrays", "shardc us", "jit us", "ratio", "(least-most)")
    rows: Rows = []
    for devices in (1, 8):
        args = ("--devices", str(devices), "--turns", "5" if options.quick else str(options.turns))
        rows += start("benchmarks.dispatch", *args, env=fake_cpu(devices))
    for row in rows:
        table.add_row(str(row["devices"]), str(row["leaves"]), *times(row["time"], 1e6))
    options.console.print(table)
    return rows


def tpu(options: argparse.Namespace) -> Rows:
    python = options.tpu_python or sys.executable
    if python == sys.executable and find_spec("libtpu") is None:
        options.console.print("tpu: left out, for libtpu is not here; pip install 'shardc[tpu]', or name a Python that "
                              "has it with --tpu-python.\n")  # fmt: skip
        return []
    table = new_table("GPT-2 blocks compiled for 32 chips of v5p (4x4x2)", "plan", "mesh", "shardc s", "jit s", "ratio",
                      "Tflop", "jit Tflop", "shardc GiB", "jit GiB", "ratio", "HBM GiB", "jit HBM", "ratio",
                      "audit")  # fmt: skip
    rows: Rows = []
    layers = ["--layers", "1"] if options.quick else []
    for name in ("data_tensor", "fsdp_tensor", "fsdp"):
        rows += start("benchmarks.tpu", name, *layers, env=tpu_env(), python=python)
    for row in rows:
        cells = [row["case"], row["mesh"]]
        for what, unit in (("seconds", 1), ("flops", 1e12), ("bytes", 2**30), ("hbm", 2**30)):
            ours, peer = (row[side][what] for side in ("ours", "peer"))
            ours, peer = (sum(x.values()) if isinstance(x, dict) else x for x in (ours, peer))
            cells += [f"{ours / unit:.3f}", f"{peer / unit:.3f}"]
            if what == "seconds":
                cells.append(flagged(ours / peer))
            elif what != "flops":
                cells.append(fraction(ours, peer))
        table.add_row(*cells, "ok" if row["audit"] else "SURPRISES")
    options.console.print(table)
    return rows


def tpu_env() -> dict[str, str]:
    """What libtpu wants to hear to compile for chips that are not there."""
    described = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0",
                 "TPU_ACCELERATOR_TYPE": "v5p-32", "JAX_PLATFORMS": "cpu",
                 "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}  # fmt: skip  # none of them takes a chip
    path = os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH", ""))))
    return os.environ | described | {"PYTHONPATH": path}


def gpu(options: argparse.Namespace) -> Rows:
    probe = "import jax; raise SystemExit(jax.default_backend() != 'gpu')"  # in a process of its own: it takes the GPU
    if subprocess.run([sys.executable, "-c", probe], capture_output=True, check=False).returncode:
        options.console.print("gpu: left out, for JAX finds no GPU here.\n")
        return []
    subprocess.run([sys.executable, "-m", "benchmarks.gpu"], env=os.environ, check=False)  # it prints its own lines
    return []


SECTIONS: dict[str, Callable[[argparse.Namespace], Rows]] = {
    "steps": steps, "plan": plan, "dispatch": dispatch, "pipeline": pipeline, "tpu": tpu, "gpu": gpu,
}  # fmt: skip


def chosen(cases: Iterable[Case], options: argparse.Namespace, quick: Sequence[str]) -> list[Case]:
    return [case for case in cases if str(case).startswith(options.case) and (not options.quick or str(case) in quick)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few rows and turns: whether it works, not how fast")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--turns", type=int, default=15, help="of both sides, for each row")
    parser.add_argument("--case", default="", help="only rows that start so, as in gpt2/fsdp")
    parser.add_argument("--tpu-python", help="a Python with jax[tpu], if this one has none")
    parser.add_argument("--torch-python", help="a Python with torch, if this one has none")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(argv)
    options.console = Console() if sys.stdout.isatty() else Console(width=180)
    found = {name: SECTIONS[name](options) for name in SECTIONS if name in options.only}
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
