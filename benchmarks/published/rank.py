"""Published configurations of a model among the candidates of `shardc.tune`, beside what they took.

    python -m benchmarks.published.rank gpt-3.6B gpt-18.4B

One search for each published number of stages, over all meshes of the axes `data` and `model` and the published numbers
of microbatches, with what is pinned as `decoder.py` pins it. benchmarks/tune.md has the results.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

import shardc
from benchmarks.published.decoder import step_of
from benchmarks.published.fit import order
from benchmarks.published.machines import topology
from benchmarks.published.plan_run import BOUNDLESS
from benchmarks.published.runs import Run, read
from benchmarks.published.show import GIB
from benchmarks.tables import new_table
from shardc.tuning.tuning import Candidate

Configuration = tuple[int, int, int, int]
"""Devices along `pipe`, `data` and `model`, and microbatches."""


def candidates(runs: Sequence[Run], tries: int) -> Iterator[tuple[Configuration, Candidate]]:
    """The planned candidates of all searches; those without a pipeline are planned for each number of stages."""
    for pipe in sorted({run.pipe for run in runs}):
        named = replace(runs[0], pipe=pipe, chunks=1, data=2, tensor=2)  # the sizes of its axes are those of tune
        step, (_, arguments, pins) = _with_microbatches(named), step_of(named)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "machine.json"
            file.write_text(topology(named).to_json(), encoding="utf-8")
            found = shardc.tune(
                step, *arguments, devices=named.devices, topology=str(file), hbm=BOUNDLESS, axes=("data", "model"),
                pipe=(pipe,) if pipe > 1 else (), schedules=("1f1b",), tries=tries,
                microbatches=sorted({run.microbatches for run in runs if run.pipe == pipe}), **pins,
            )  # fmt: skip
        for c in found.candidates:
            yield (c.axes.get("pipe", 1), c.axes["data"], c.axes["model"], c.microbatches or 1), c


def _with_microbatches(run: Run) -> Callable[[int], Callable[..., Any]]:
    return lambda count: step_of(replace(run, microbatches=count))[0]


def rank(model: str, tries: int, console: Console) -> None:
    """A table of the candidates that fit, best first, with the measured seconds of those that were published."""
    began = time.perf_counter()
    runs = [run for run in read() if run.model == model]
    took = {(run.pipe, run.data, run.tensor, run.microbatches): run.seconds for run in runs}
    room = topology(runs[0]).hbm
    every = sorted(dict(candidates(runs, tries)).items(), key=lambda item: item[1].seconds)
    planned = [(configuration, c) for configuration, c in every if c.plan is not None and c.memory <= room]
    table = new_table(
        f"{model} on {runs[0].devices} devices", "place", "pipe", "data", "model", "microbatches", "planned s", "GiB",
        "measured s",
    )  # fmt: skip
    for i, (configuration, c) in enumerate(planned):
        measured = took.get(configuration)
        table.add_row(
            f"{i + 1}", *map(str, configuration), f"{c.seconds:.2f}", f"{c.memory / GIB:.1f}",
            f"{measured:.2f}" if measured else "",
        )  # fmt: skip
    console.print(table)
    both = [(c.seconds, {"published": took[key]}) for key, c in planned if key in took]
    best = min(took, key=took.__getitem__)
    place = next((i + 1 for i, (key, _) in enumerate(planned) if key == best), None)
    console.print(
        f"Spearman {order([row for _, row in both], [x for x, _ in both]):.2f} of {len(both)}; the fastest published "
        f"is number {place} of {len(planned)}; {len(every) - len(planned)} more do not fit. "
        f"{time.perf_counter() - began:.0f} s.\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.published.rank", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("models", nargs="+", choices=sorted({run.model for run in read() if run.name.startswith("v")}))
    parser.add_argument("--tries", type=int, default=40, help="candidates of one search")
    options = parser.parse_args(argv)
    console = Console() if sys.stdout.isatty() else Console(width=120)
    for model in options.models:
        rank(model, options.tries, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
