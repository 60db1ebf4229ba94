"""Runs cases with a bar, and tells what came of them."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import jax
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from shardc.errors import did_you_mean
from tests.harnesses.cases import Case, all_cases, choose
from tests.harnesses.run import STATES, Outcome, Result, run_case

BAD = ("surprised", "crashed", "wrong")
KEPT = 150
"""Cases between two times that JAX's compiled programs are dropped: a whole run would fill the memory."""


def run_all(options: argparse.Namespace) -> int:
    groups = {case.group for case in all_cases()}
    if unknown := [g for g in options.groups if g not in groups]:
        Console(stderr=True).print(f"no group {unknown[0]!r}.{did_you_mean(unknown[0], groups)}", highlight=False)
        return 2
    cases = choose(options.groups, options.part, options.limit, options.seed, options.only)
    console = Console() if sys.stdout.isatty() else Console(width=160)
    results: list[Result] = []
    for result in run_each(cases, options.seed, options.draws, options.log):
        results.append(result)
        if result.worst.state in BAD:
            console.print(f"{result.worst.state}: {told(result.case, result.worst)}", markup=False, highlight=False)
    console.print(table(results))
    for text in reasons(results):
        console.print(text, markup=False, highlight=False)
    return int(any(r.worst.state in BAD for r in results))


def run_each(cases: Sequence[Case], seed: int, draws: int, log: str | None) -> Iterator[Result]:
    shown = track(cases, console=Console(stderr=True), disable=not sys.stderr.isatty())
    for k, case in enumerate(shown, 1):
        result = run_case(case, seed, draws)
        if log:
            with Path(log).open("a") as file:
                file.write(json.dumps(logged(result)) + "\n")
        yield result
        if k % KEPT == 0:
            jax.clear_caches()


def logged(result: Result) -> dict[str, object]:
    worst = result.worst
    return {
        "case": result.case.name, "group": result.case.group, "state": worst.state, "seconds": round(result.seconds, 3),
        "audited": result.audited, "gathered": sorted(result.gathered), "draw": str(worst.draw), "text": worst.text,
    }  # fmt: skip


def told(case: Case, outcome: Outcome) -> str:
    return f"{case.name}\n  {outcome.draw}\n  " + outcome.text.replace("\n", "\n  ")


def table(results: Iterable[Result]) -> Table:
    """One row for each group, and their sum."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.case.group, []).append(result)
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in ("group", "cases", *STATES, "audited", "gathered", "seconds"):
        made.add_column(column, justify="left" if column == "group" else "right", no_wrap=True)
    for group, members in sorted(groups.items()):
        made.add_row(group, *_numbers(members))
    made.add_section()
    made.add_row("all", *_numbers([r for members in groups.values() for r in members]))
    return made


def _numbers(results: Sequence[Result]) -> list[str]:
    states = Counter(r.worst.state for r in results)
    counts = [len(results), *(states[s] for s in STATES)]
    counts += [sum(r.audited for r in results), sum(bool(r.gathered) for r in results)]
    return [*(str(n) if n else "-" for n in counts), f"{sum(r.seconds for r in results):.1f}"]


def reasons(results: Sequence[Result]) -> Iterator[str]:
    """Why cases were skipped, left out or refused, and which primitives have no rule; each with how often."""
    for state in ("skipped", "undefined", "refused"):
        counts = Counter((r.case.group, r.worst.text) for r in results if r.worst.state == state)
        for (group, text), n in sorted(counts.items()):
            yield f"{state}: {group} x{n}: {text}"
    counts = Counter(name for r in results for name in r.gathered)
    if counts:
        yield "no rule: " + ", ".join(f"{name} x{n}" for name, n in sorted(counts.items()))
