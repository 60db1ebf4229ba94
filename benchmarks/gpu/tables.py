"""A section's result as a table for the terminal and as Markdown for benchmarks/gpu/README.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from benchmarks.gpu.sections import MACHINE, SECTIONS, Section

Result = Mapping[str, Any]
"""One section in the JSON: ok, seconds, rows, errors, summary."""


def heading(machine: Result) -> str:
    """The machine in one line."""
    said = {k: v for row in machine.get("rows", ()) for k, v in row.items()}
    if "card" not in said:
        return "The machine did not say what it is."
    driver = f"driver {said['driver']}" if said["driver"] else "no NVIDIA driver"
    runtime = " ".join(said["runtime"].split())
    return (
        f"{said['card']} ({said['platform']}), {driver}, jax {said['jax']}, Python {said['python']}, "
        f"{said['cores']} cores, planned as {said['topology']}; runtime: {runtime}"
    )


def cells(section: Section, result: Result) -> list[list[str]]:
    rows = result["rows"]
    if section is MACHINE:  # one row, told bit by bit
        rows = [{k: v for row in rows for k, v in row.items()}]
    return [[cell(row) for cell in section.columns.values()] for row in rows]


def notes(result: Result) -> Iterator[str]:
    """The figures under a table, and everything that failed."""
    figures = {k: f"{v:.3f}" if isinstance(v, float) else v for k, v in result["summary"].items()}
    if figures:
        yield "; ".join(f"{k}: {v}" for k, v in figures.items() if v is not None)
    for where, error in failures(result):
        yield f"FAILED: {where}: {error['type']}: {' '.join(error['message'].split())}"


def failures(result: Result) -> Iterator[tuple[str, Mapping[str, str]]]:
    """(job or row, error) of all that failed in a section."""
    for error in result["errors"]:
        yield error["job"], error
    for row in result["rows"]:
        if not row.get("ok", True):
            where = next(str(row[k]) for k in ("what", "program", "schedule", "check", "job") if k in row)
            yield where, row["error"]


def to_rich(section: Section, result: Result) -> Table:
    table = Table(title=section.title, title_justify="left", box=None, pad_edge=False)
    for i, column in enumerate(section.columns):
        table.add_column(column, justify="right" if i else "left", overflow="fold")
    for row in cells(section, result):
        table.add_row(*row)
    return table


def to_markdown(found: Mapping[str, Any]) -> str:
    """All sections that were asked for."""
    lines = [heading(found["machine"]), ""]
    for section in (MACHINE, *SECTIONS.values()):
        result = found["machine"] if section is MACHINE else found["sections"].get(section.name)
        if result is None:
            continue
        if "rows" not in result:
            lines += [f"### {section.title}", "", "Not run.", ""]
            continue
        lines += [f"### {section.title}", "", *_markdown_rows([list(section.columns), *cells(section, result)]), ""]
        lines += [line for note in notes(result) for line in (note, "")]
    return "\n".join(lines)


def _markdown_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    head, *body = ("| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in rows)
    return [head, "|---" + "|---:" * (len(rows[0]) - 1) + "|", *body]
