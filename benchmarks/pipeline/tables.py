"""The tables of pipelines: each row measured in a process of its own, with four fake devices."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from benchmarks.measure import MIB, fake_cpu, warn
from benchmarks.pipeline.models import HAND, STAGES
from benchmarks.pipeline.torch_peer import torch_of
from benchmarks.tables import Rows, flagged, new_table, start

WITHIN = 1.10
"""A measured time of sleeping devices above this share of the simulated is marked."""


def peers(options: argparse.Namespace) -> Rows:
    python = options.torch_python or sys.executable
    version = torch_of(python)
    if version is None:
        options.console.print("torch: left out, for it is not here; pip install 'shardc[peers]', or name a Python that "
                              "has it with --torch-python.\n")  # fmt: skip
    title = f"A training step, p=4, m=8; {f'torch {version}' if version else 'without torch'}"
    table = new_table(title, "model", "who", "ms", "ratio", "ms in a row", "ratio", "(least-most)",
                      "first call s", "live microbatches", "gradient off by")  # fmt: skip
    rows: Rows = []
    for model in ("mlp", "gpt2"):
        turns = {"mlp": 30, "gpt2": 11}[model]
        args = [model, "--turns", "2" if options.quick else str(turns)]
        args += ["--torch-python", python] if version else []
        found = start("benchmarks.pipeline.peers", *args, env=fake_cpu(STAGES))
        for row in found:
            table.add_row(
                row["model"], row["side"], f"{1e3 * row['waited']:.1f}", flagged(row["waited_ratio"]),
                f"{1e3 * row['row']:.1f}", flagged(row["ratio"]), f"({row['low']:.2f}-{row['high']:.2f})",
                f"{row['first']:.1f}", " ".join(map(str, row["peak"])), f"{row['difference']:.0e}",
            )  # fmt: skip
            if row["difference"] > 1e-5 or row["loss_difference"] > 1e-4:
                warn(f"{row['model']}, {row['side']}: not the step of one device")
        rows += found
    options.console.print(table)
    return rows


def sleep(options: argparse.Namespace) -> Rows:
    table = new_table("Devices that sleep 20 ms a task, p=4, m=16", "tasks", "schedule", "actions", "simulated s",
                      "measured s", "ratio", "(to)")  # fmt: skip
    args = ("--turns", "1", "--only", "1f1b", "zb-h1") if options.quick else ()
    rows = start("benchmarks.pipeline.sleep", *args, env=fake_cpu(STAGES))
    for row in rows:
        best, worst = (f(row["times"]) / row["planned"] for f in (min, max))
        table.add_row(
            row["what"], row["schedule"], str(row["actions"]), f"{row['planned']:.2f}", f"{min(row['times']):.3f}",
            f"{best:.3f}{' !' if best > WITHIN else '  '}", f"({worst:.3f})",
        )  # fmt: skip
    options.console.print(table)
    return rows


def overhead(options: argparse.Namespace) -> Rows:
    rows: Rows = []
    for schedule in ("1f1b", "zb-h1"):
        args = (schedule, "--turns", "5" if options.quick else "40")
        rows += start("benchmarks.pipeline.overhead", *args, env=fake_cpu(STAGES))
    for row in rows:
        per = 1e6 / row["actions"]
        table = new_table(
            f"{row['schedule']}, tasks without work: {row['actions']} actions, {row['programs']} programs, "
            f"{row['copies']} copies between devices", "what", "ms", "least ms", "us per action", "least", "processor",
            "this part",
        )  # fmt: skip
        before = 0.0
        for name, t in row["parts"].items():
            ms = [f"{1e3 * t[k]:.2f}" for k in ("median", "least")]
            if name == HAND:
                table.add_row(f"{name}, {row['hand_programs']} programs", *ms, *[""] * 4)
                continue
            figures = (t["median"], t["least"], t["least_cpu"], t["least_cpu"] - before)
            before = t["least_cpu"]
            table.add_row(name, *ms, *(f"{per * x:.1f}" for x in figures))
        options.console.print(table)
    return rows


def host_ahead(options: argparse.Namespace) -> Rows:
    table = new_table("Host work of h = 0.2 s in every actor, no work on devices, m=16", "stages", "before inputs: h",
                      "after them: h")  # fmt: skip
    rows = start("benchmarks.pipeline.host_ahead", "--turns", "1" if options.quick else "9", env=fake_cpu(STAGES))
    for row in rows:
        table.add_row(str(row["stages"]), *(f"{row[k] / row['host']:.2f}" for k in ("prepare", "run")))
    options.console.print(table)
    return rows


def memory(options: argparse.Namespace) -> Rows:
    table = new_table("Bytes that live at most, in MiB, by rank", "model", "schedule", "planned", "measured", "ratio")
    rows: Rows = []
    for model in ("mlp",) if options.quick else ("mlp", "gpt2"):
        rows += start("benchmarks.pipeline.memory", model, env=fake_cpu(STAGES))
    for i in range(0, len(rows), STAGES):
        ranks = rows[i : i + STAGES]
        planned, live = (" ".join(f"{r[k] / MIB:.2f}" for r in ranks) for k in ("planned", "live"))
        ratio = max(r["live"] / r["planned"] for r in ranks)
        mark = " !" if ratio > 1 else "  "
        table.add_row(ranks[0]["model"], ranks[0]["schedule"], planned, live, f"{ratio:.3f}{mark}")
    options.console.print(table)
    return rows


PARTS: dict[str, Callable[[argparse.Namespace], Rows]] = {
    "peers": peers, "sleep": sleep, "overhead": overhead, "host-ahead": host_ahead, "memory": memory,
}  # fmt: skip


def pipeline(options: argparse.Namespace) -> Rows:
    return [{"part": name, **row} for name in getattr(options, "part", PARTS) for row in PARTS[name](options)]
