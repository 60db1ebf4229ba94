"""The tables of the gold standards. Bytes are those that a device sends, in KiB or MiB."""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.gold.large import LARGE, TOPOLOGY
from benchmarks.gold.row import SIDES, Row, Side
from benchmarks.gold.rows import ROWS
from benchmarks.measure import MIB, fake_cpu
from benchmarks.tables import Rows, fraction, new_table, start

KIB = 1024


def gold(options: argparse.Namespace) -> Rows:
    """Measures the rows of `options.only`, all if there are none, and prints them."""
    rows = LARGE if options.large else ROWS
    columns = ("plan s", "gap") if options.large else ("work",)
    sides = [cell for side in SIDES[: 2 if options.large else 3] for cell in (side, "ratio", "small", *columns)]
    title = f"Bytes of hand-written plans, planned for {TOPOLOGY}, MiB" if options.large else (
        "Bytes of hand-written plans, KiB"
    )  # fmt: skip
    table = new_table(title, "row", "mesh", "hand", *sides, *(() if options.large else ("audit",)))
    formulas = new_table("What they are", "row", "what")
    found: Rows = []
    for row in (rows[name] for name in options.only or rows):
        large = ["--large"] if options.large else []
        for figures in start("benchmarks.gold.measure", row.name, *large, env=fake_cpu(row.devices)):
            found.append({"hand": row.gold, "formula": row.formula, **figures})
            table.add_row(*(planned if options.large else compiled)(row, figures))
            formulas.add_row(row.name, f"{row.formula}; {row.note}" if row.note else row.formula)
            if options.explain:
                for side in SIDES[:2]:
                    options.console.print(f"{row.name}, {side}:\n{figures[side]['explained']}", markup=False)
    options.console.print(table)
    options.console.print(formulas)
    return found


def compiled(row: Row, figures: dict[str, Any]) -> list[str]:
    cells = first_cells(row, KIB)
    for side in SIDES:
        work = row.devices * figures[side]["sent"]["flops"] / figures["flops"]
        cells += [*moved(row, figures, side, KIB), f"{work:.2f}"]
    audits = [figures[side]["audit"] for side in SIDES if figures[side]["audit"] is not None]
    return [*cells, "ok" if all(audits) else "SURPRISES"]


def planned(row: Row, figures: dict[str, Any]) -> list[str]:
    cells = first_cells(row, MIB)
    for side in SIDES[:2]:
        gap = figures[side]["gap"]
        shown = "?" if gap is None else f"{gap:.1%}"
        cells += [*moved(row, figures, side, MIB), f"{figures[side]['planning']:.1f}", shown]
    return cells


def first_cells(row: Row, unit: int) -> list[str]:
    return [row.name, ",".join(f"{a}={n}" for a, n in row.mesh.items()), text(row.gold, unit)]


def moved(row: Row, figures: dict[str, Any], side: Side, unit: int) -> list[str]:
    sent = figures[side]["sent"]
    large = sum(sent["large"].values())
    return [text(large, unit), fraction(large, row.gold), text(sent["small"], unit)]


def text(count: float, unit: int) -> str:
    return f"{count / unit:.1f}" if count else "0"
