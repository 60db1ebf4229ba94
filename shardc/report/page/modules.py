"""The program by module as data of the page: a tree of scopes, with source lines and what moves there."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from shardc.ir.collective import Collective
from shardc.report.page.equations import EquationRow
from shardc.report.tables import placement_text

PlacedRows: TypeAlias = tuple[tuple[str, ...], Sequence[EquationRow], int]
"""The modules around a program, its rows, and its executions in one call."""


@dataclass
class _Line:
    """The equations of one source line in one module."""

    operations: Counter[str] = field(default_factory=Counter[str])
    seconds: float = 0.0
    makes: str = ""
    size: int = -1
    moves: dict[tuple[str, ...], list[float]] = field(default_factory=dict[tuple[str, ...], list[float]])

    def add(self, row: EquationRow, times: int) -> None:
        if row.operation != "box":
            self.operations[row.operation] += 1
            if row.size > self.size:
                self.size, self.makes = row.size, row.makes
        self.seconds += row.time.total * times
        for c, seconds in seconds_of(row):
            key = c.kind, ", ".join(c.axes), c.value, placement_text(c.src), placement_text(c.dst), row.why
            found = self.moves.setdefault(key, [0, 0, 0.0])
            for i, more in enumerate((c.count, c.bytes, seconds)):
                found[i] += more * times


def seconds_of(row: EquationRow) -> list[tuple[Collective, float]]:
    """The collectives of an equation with their seconds. Those of one kind share its seconds by their bytes."""
    sent = Counter[str]()
    for c in row.collectives:
        sent[c.kind] += int(c.bytes) if c.is_known else 0
    return [(c, getattr(row.time, c.kind) * c.bytes / sent[c.kind] if c.is_known else 0.0) for c in row.collectives]


class _Texts(dict[str, int]):
    """Numbers of texts that occur many times."""

    def __missing__(self, text: str) -> int:
        self[text] = len(self)
        return self[text]


def modules_data(programs: Iterable[PlacedRows]) -> dict[str, Any]:
    """The tree of modules.

    Args:
      programs: all of them.

    Returns:
      `texts`; `nodes`, each before those inside it: (name, number of the node around it; -1: none); `lines`: (node,
      line, operations, makes, seconds); `moves`: (line, kind, axes, value, from, to, why, count, bytes, seconds).
      Names and words are numbers of `texts`, lines and nodes are numbered from 0.
    """
    nodes: dict[tuple[str, ...], dict[str, _Line]] = {}
    for around, rows, times in programs:
        for row in rows:
            if row.operation:
                lines = nodes.setdefault((*around, *row.scopes), {})
                lines.setdefault(row.line, _Line()).add(row, times)
    texts, numbers = _Texts(), dict[tuple[str, ...], int]()
    made_nodes: list[tuple[int, int]] = []
    made_lines: list[tuple[Any, ...]] = []
    moves: list[tuple[Any, ...]] = []
    for scopes, lines in nodes.items():
        for depth in range(len(scopes) + 1):
            path = scopes[:depth]
            if path not in numbers:
                numbers[path] = len(made_nodes)
                made_nodes.append((texts[path[-1] if path else ""], numbers[path[:-1]] if path else -1))
        for name, line in lines.items():
            operations = ", ".join(f"{op} x{n}" if n > 1 else op for op, n in line.operations.most_common())
            moves += [
                (len(made_lines), *(texts[word] for word in words), int(count), size_data(size), rounded(seconds))
                for words, (count, size, seconds) in line.moves.items()
            ]
            words = numbers[scopes], texts[name], texts[operations], texts[line.makes]
            made_lines.append((*words, rounded(line.seconds)))
    return {"texts": list(texts), "nodes": made_nodes, "lines": made_lines, "moves": moves}


def totals_data(programs: Iterable[PlacedRows]) -> list[tuple[Any, ...]]:
    """Bytes and seconds by axis and kind of collective, as (axes, kind, count, bytes, seconds), most seconds first."""
    totals: dict[tuple[str, str], list[float]] = {}
    for _, rows, times in programs:
        for c, seconds in (found for row in rows for found in seconds_of(row)):
            sums = totals.setdefault((", ".join(c.axes), c.kind), [0, 0, 0.0])
            for i, more in enumerate((c.count, c.bytes, seconds)):
                sums[i] += more * times
    found = sorted(totals.items(), key=lambda item: -item[1][2])
    return [(*key, int(count), size_data(size), rounded(seconds)) for key, (count, size, seconds) in found]


def size_data(size: float) -> int | None:
    """A number of bytes; None if it is unknown."""
    return None if math.isnan(size) else int(size)


def rounded(number: float) -> float:
    """A number with four digits."""
    return float(f"{number:.4g}")
