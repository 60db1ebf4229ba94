"""The worth of each mechanism of the solver: `python -m benchmarks.solver_ablation [problems ...] [--without ...]`.

The tables are those that the planner hands to the solver with memory that never is the limit. The same
tables are solved with one mechanism taken out at a time. A mechanism stays if without it some cost rises by 0.1 % or
some time doubles. Each problem runs in a process of its own; seconds are the processor's. docs/design/solver.md has the
table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

import shardc
from benchmarks.cases import Case
from benchmarks.large_models import LARGE, Large, pins_of
from benchmarks.large_step import processor_seconds
from benchmarks.layers import MESHES
from benchmarks.measure import fake_cpu, report
from benchmarks.record import plan_of_case
from benchmarks.tables import Rows, new_table, start
from shardc.passes.place import place
from shardc.solver import Assignment, Memo, SolverOptions, dual, minimize
from shardc.solver.cost_tables import Given, Pair, Table
from shardc.solver.kernels import kernels_for, numpy_kernels
from shardc.solver.reduce import Reduction
from shardc.solver.search import Search


def plan_large(large: Large, sizes: Mapping[str, int], pins: str) -> None:
    mesh = shardc.make_mesh(topology=large.topology, hbm="1000TB", **dict[str, Any](sizes))
    shardc.function(mesh=mesh, **pins_of(pins, "batch"))(large.step).plan(*large.arguments())


def gpt3(layers: int, axes: int, scanned: bool = False) -> None:
    large = LARGE["gpt3"].truncated(layers)
    large = replace(large, config=replace(large.config, scan_layers=scanned))
    plan_large(large, next(m for m in MESHES if len(m) == axes), "gpt3")


def small(case: str) -> None:
    plan_of_case(Case.parse(case), "v5p:2x2x2")


PROBLEMS: Mapping[str, Callable[[], None]] = {
    "mlp-1": lambda: small("mlp/fsdp/data=8"),
    "resnet-1": lambda: small("resnet/fsdp/data=8"),
    "gpt3-scanned-2": lambda: gpt3(96, 2, scanned=True),
    "gpt3-scanned-3": lambda: gpt3(96, 3, scanned=True),
    "gpt3-12-2": lambda: gpt3(12, 2),
    "gpt3-24-3": lambda: gpt3(24, 3),
    "gpt3-96-2": lambda: gpt3(96, 2),
    "t5_11b-3": lambda: plan_large(LARGE["t5_11b"], LARGE["t5_11b"].mesh, "t5_11b"),
}
"""Plans by name: tiny models of the zoo, or large ones, scanned or of so many layers written out; then the axes."""


@dataclass(frozen=True)
class Captured:
    """The arguments of the planner's first call of the solver."""

    unary: Sequence[Table]
    pairwise: Mapping[Pair, Given]
    labels: Sequence[NDArray[np.int64]]
    options: SolverOptions


class Stop(Exception):
    """Ends planning once the tables are captured."""


def capture(name: str) -> Captured:
    found: list[Captured] = []

    def catch(unary: Any, pairwise: Any, start: Any, labels: Any, memo: Any, options: SolverOptions) -> Assignment:
        found.append(Captured(list(unary), dict(pairwise), list(labels), options))
        raise Stop

    with mock.patch.object(place, "minimize", catch):
        try:
            PROBLEMS[name]()
        except Stop:
            return found[0]
    raise AssertionError(name)


def only_one(owner: Any, method: str) -> Any:
    """Variables with two neighbours stay."""
    plain = getattr(owner, method)
    return lambda self, v: plain(self, v) if len(self.near[v]) < 2 else None


def unchanged(problem: Reduction, values: Any, own: Any, tables: Any, slack: float) -> Reduction:
    """Rewrites a problem, and drops nothing that costs too much."""
    return PLAIN(problem, values, own, tables, np.inf)


PLAIN = Reduction.cheap
NOTHING: Callable[..., None] = lambda *_, **__: None  # noqa: E731
PATCHES: Mapping[str, tuple[tuple[Any, str, Any], ...]] = {
    "tied layers": ((Search, "_tie", NOTHING),),
    "joining": ((Reduction, "join_small", NOTHING),),
    "moves": ((Search, "move", NOTHING),),
    "values compared": ((Reduction, "_drop_beaten", NOTHING),),
    "two neighbours": ((Reduction, "_work_of", only_one(Reduction, "_work_of")),),
    "pairs fixed": ((Reduction, "cheap", unchanged),),
    "extrapolation": ((dual, "extrapolated", lambda after, *_: after),),
}
"""What takes a mechanism out, by its name."""
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "layer chain": {"chain": False},
    "coarse problem": {"coarse": False},
    "elimination": {"at_once": 0},
    "compiled loops": {"kernels": SimpleNamespace(**vars(numpy_kernels))},  # another object is never replaced
}
MECHANISMS = (*OPTIONS, *PATCHES)


@contextmanager
def without(mechanism: str | None) -> Generator[None]:
    patches = [mock.patch.object(*p) for p in PATCHES.get(mechanism or "", ())]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def measure(name: str, mechanisms: Sequence[str]) -> None:
    problem = capture(name)
    options = replace(problem.options, kernels=kernels_for(problem.pairwise.values()))

    def solve(options: SolverOptions) -> Assignment:
        return minimize(problem.unary, problem.pairwise, None, problem.labels, Memo(), options)

    solve(replace(options, work=1.0))  # loads compiled loops
    least = 0.0
    for mechanism in (None, *mechanisms):
        with without(mechanism):
            seconds, found = processor_seconds(lambda m=mechanism: solve(replace(options, **OPTIONS.get(m or "", {}))))
        least = least or found.cost
        report(
            problem=name, variables=len(problem.unary), without=mechanism, seconds=seconds,
            more=found.cost / least - 1, gap=found.gap,
        )  # fmt: skip


def show(rows: Rows, console: Console) -> None:
    table = new_table("Solver without one mechanism", "problem", "variables", "without", "s", "times", "cost", "gap")
    full: dict[str, float] = {}
    for r in rows:
        times = r["seconds"] / full.setdefault(r["problem"], r["seconds"])
        table.add_row(
            r["problem"], f"{r['variables']}", r["without"] or "-", f"{r['seconds']:.1f}", f"{times:.2f}",
            f"{r['more']:+.4%}", f"{r['gap']:.1e}",
        )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problems", nargs="*", default=list(PROBLEMS), help=", ".join(PROBLEMS))
    parser.add_argument("--without", nargs="+", choices=MECHANISMS, default=list(MECHANISMS))
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        measure(asked.problems[0], asked.without)
        sys.exit()
    figures: Rows = []
    for problem in asked.problems:
        figures += start(
            "benchmarks.solver_ablation", problem, "--one", "--without", *asked.without, env=fake_cpu(1)
        )  # fmt: skip
        if asked.json:
            asked.json.write_text(json.dumps(figures, indent=1))
    show(figures, Console())
