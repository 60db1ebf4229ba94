"""Rows measured in processes of their own, and how they are put in tables."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from rich.table import Table

from benchmarks.measure import results, warn

SLOW = 1.05
"""A ratio of times above this is marked."""

WORDS = ("example", "plan", "mesh", "audit", "model", "who", "tasks", "schedule", "what", "row")
"""Columns that are not numbers."""

Rows = list[dict[str, Any]]


def start(module: str, *args: str, env: Mapping[str, str], python: str = sys.executable) -> Rows:
    """Runs a module in a process of its own. Gives what it reported; a failure is told and left out."""
    done = subprocess.run([python, "-m", module, *args], env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        warn(f"{module} {' '.join(args)} failed:\n{done.stderr.strip()[-2000:]}")
    return results(done.stdout)


def new_table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        words = column in WORDS
        table.add_column(column, justify="left" if words else "right", no_wrap=True)
    return table


def times(pair: Mapping[str, float], scale: float) -> list[str]:
    spread = f"({pair['low']:.2f}-{pair['high']:.2f})"
    return [f"{scale * pair['ours']:.1f}", f"{scale * pair['peer']:.1f}", flagged(pair["ratio"]), spread]


def flagged(ratio: float) -> str:
    return f"{ratio:.2f}{' !' if ratio > SLOW else '  '}"


def fraction(ours: float, peer: float) -> str:
    return f"{ours / peer:.2f}{' !' if ours > peer else '  '}" if peer else ("-  " if not ours else "inf !")


def median(rows: Rows, of: Callable[[dict[str, Any]], float]) -> float:
    return statistics.median(map(of, rows))
