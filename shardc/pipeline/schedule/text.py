"""Schedules as text: a grid for people, and torch's CSV. Both give the order; the columns have no further meaning."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from typing import Final, TypeAlias

from shardc.errors import PipelineError, all_offenders
from shardc.pipeline.schedule.action import Action

Rows: TypeAlias = tuple[tuple[Action, ...], ...]
Columns: TypeAlias = Sequence[Sequence[int]]

IDLE: Final = ("", ".", "-")
_AROUND: Final = 5
"""The most cells shown of a row before and after a wrong one."""
_SHOWN: Final = 20
"""The most offenders shown in an error."""
_COMPUTE_ONLY: Final = (
    "shardc derives sends and receives from the order of the computation. Save the compute-only format: torch's "
    '_dump_csv(file, format="compute_only").'
)
_LABEL: Final = re.compile(r"\s*(?:rank\s+(\d+)\b\s*[:|]?|(\d+)\s*[:|])", re.IGNORECASE)
_OVERLAP: Final = re.compile(r"\(([^()]*)\)(?:OVERLAP_F_B)?")
_COMMUNICATION: Final = re.compile(r"\d+(?:SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*")


def draw(name: str, rows: Rows, columns: Columns) -> str:
    """The name, then a row for each rank: the grid that `parse` reads."""
    cells = [_spread(row, at) for row, at in zip(rows, columns, strict=True)]
    width = max((len(c) for row in cells for c in row), default=0)
    label = len(f"rank {len(rows) - 1}")
    lines = (f"{f'rank {rank}':<{label}} | " + " ".join(f"{c:<{width}}" for c in row) for rank, row in enumerate(cells))
    return "\n".join([name, *(line.rstrip() for line in lines)])


def parse(grid: str) -> tuple[str, Rows]:
    """The name ("schedule" if there is none) and the rows of a grid."""
    lines = [line for line in grid.splitlines() if line.strip()]
    name = "schedule"
    if _begins_with_name(lines):
        name = lines.pop(0).strip()
    for rank, line in enumerate(lines):
        label = _LABEL.match(line)
        if label and int(label[1] or label[2]) != rank:
            raise PipelineError(
                f'Schedule "{name}": row {rank} is labelled "{label[0].strip()}"; rows have to be in order.'
            )
    return name, _read([_cells(line) for line in lines], name)


def _begins_with_name(lines: Sequence[str]) -> bool:
    """Whether the first line is no row: the second one is labelled as rank 0, or it has neither label nor action."""
    if len(lines) > 1 and (second := _LABEL.match(lines[1])) and int(second[1] or second[2]) == 0:
        return True
    return bool(lines) and not _LABEL.match(lines[0]) and not any(_is_action(c) for c in _cells(lines[0]))


def to_csv(rows: Rows, columns: Columns) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for row, at in zip(rows, columns, strict=True):
        writer.writerow(_spread(row, at))
    return out.getvalue()


def from_csv(text: str, name: str) -> Rows:
    rows = list(csv.reader(io.StringIO(text)))
    while rows and not rows[-1]:
        rows.pop()
    return _read(rows, name)


def _spread(row: Sequence[Action], at: Sequence[int]) -> list[str]:
    """The cells of a row up to its last action, blank if it is idle."""
    cells = [""] * (1 + max(at, default=-1))
    for action, column in zip(row, at, strict=True):
        cells[column] = str(action)
    return cells


def _cells(line: str) -> list[str]:
    label = _LABEL.match(line)
    return [c for c in re.split(r"[\s,|]+", line[label.end() :] if label else line) if c]


def _is_action(cell: str) -> bool:
    try:
        return bool(_actions(cell))
    except ValueError:
        return False


def _actions(cell: str) -> tuple[Action, ...]:
    """The actions of a cell: none, one, or the parts of an overlapped pair in their order."""
    cell = cell.strip()
    if cell in IDLE:
        return ()
    both = _OVERLAP.fullmatch(cell)
    return tuple(Action.parse(part) for part in both[1].split(";")) if both else (Action.parse(cell),)


def _read(rows: Sequence[Sequence[str]], name: str) -> Rows:
    read: list[tuple[Action, ...]] = []
    wrong: list[str] = []
    moves = False
    for rank, cells in enumerate(rows):
        row: list[Action] = []
        for column, cell in enumerate(cells):
            try:
                row.extend(_actions(cell))
            except ValueError as error:
                communicates = _COMMUNICATION.fullmatch(cell.strip())
                moves = moves or bool(communicates)
                reason = f"{cell.strip()} is communication." if communicates else str(error)
                wrong.append(f"rank {rank}, column {column}: {reason}\n  {marked(rank, cells, column)}")
        read.append(tuple(row))
    if wrong:
        error = all_offenders(f'Schedule "{name}" has cells that are not actions:', shown(wrong))
        raise PipelineError(f"{error}\n{_COMPUTE_ONLY}" if moves else error)
    return tuple(read)


def shown(wrong: list[str]) -> list[str]:
    """The offenders that an error shows, and how many more there are."""
    return wrong if len(wrong) <= _SHOWN else [*wrong[:_SHOWN], f"and {len(wrong) - _SHOWN} more."]


def marked(rank: int, cells: Sequence[str | Action], column: int) -> str:
    """The part of a row around a cell, that cell in brackets."""
    first, last = max(0, column - _AROUND), min(len(cells), column + _AROUND + 1)
    around = [str(c).strip() or "." for c in cells[first:last]]
    around[column - first] = f"[{around[column - first]}]"
    dots = ["..."]
    return f"rank {rank} | " + " ".join([*dots * (first > 0), *around, *dots * (last < len(cells))])
