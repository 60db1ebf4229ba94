"""Sections of reports as data and as plain text, and the format of numbers, placements and paths in them."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table

from shardc.machine.mesh import AnyMesh, stages_text
from shardc.machine.topology import Topology
from shardc.sbp.placement import Placement

T = TypeVar("T")

WIDTH: Final = 120
"""Characters of a line of text that is drawn, where nothing says how many there is room for."""
MOST: Final = 8
"""The most lines, or names, of a list in a text; of a longer one, the first of them and the number of the others."""

Key: TypeAlias = tuple[Hashable, ...]


def bytes_text(count: float) -> str:
    """`512 bytes`, `1.5 KiB`, `2.0 MiB`."""
    if count < 1024:
        return f"{count:.0f} byte{'s' * (count != 1)}"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1023.95:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"


def seconds_text(seconds: float) -> str:
    """`126 us`, `1.26 ms`, `12.6 s`, with three digits."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)):
        if seconds >= scale:
            digits = max(0, 3 - len(str(int(seconds / scale))))
            return f"{seconds / scale:.{digits}f} {unit}"
    return "0 s"


def signed_text(difference: float, text: Callable[[float], str]) -> str:
    """`+1.5 KiB`, `-126 us`; `0` for equal values."""
    size = text(abs(difference))
    return "0" if size in (text(0), "0 s") else f"{'-' if difference < 0 else '+'}{size}"


def placement_text(placement: Placement | str) -> str:
    """A placement; one that names no axis is `B`."""
    return "B" if str(placement) == "{}" else str(placement)


def number_text(count: int, noun: str) -> str:
    """`1 array`, `2 arrays`, `0 matches`."""
    return f"{count} {noun}{'' if count == 1 else 'es' if noun.endswith(('s', 'ch')) else 's'}"


def percent_text(fraction: float) -> str:
    """`12%`, `3.4%`."""
    if 0 < fraction < 1e-3:
        return "less than 0.1%"
    return f"{100 * fraction:.1f}%" if fraction < 0.1 else f"{100 * fraction:.0f}%"


def devices_text(topology: Topology, count: int) -> str:
    """`32 v5p devices (4x4x2)`."""
    shape = f" ({'x'.join(map(str, topology.shape))})" if topology.shape else ""
    return number_text(count, f"{topology.kind} device") + shape


def mesh_text(mesh: AnyMesh) -> str:
    """`data=4, model=2`; of a pipeline's rank `data=2, stage 3`."""
    return ", ".join([*(f"{a}={n}" for a, n in mesh.shape.items()), *filter(None, [stages_text(mesh)])])


def numbers_text(numbers: Iterable[int]) -> str:
    """`4, 5` or `0-7`."""
    found = sorted(numbers)
    if len(found) > 2 and found == [*range(found[0], found[-1] + 1)]:
        return f"{found[0]}-{found[-1]}"
    return ", ".join(map(str, found if len(found) <= 4 else [*found[:3], "…", found[-1]]))


def times_text(text: str, count: int) -> str:
    """`text`, or `text  x3` if it stands for several."""
    return text if count == 1 else f"{text}  x{count}"


_NUMBERS = re.compile(r"(\d+)")


def fold_paths(paths: Sequence[str]) -> str:
    """One text for paths that differ only in numbers: `blocks_0/up`, `blocks_1/up` --> `blocks_*/up`."""
    parts = zip(*(_NUMBERS.split(p) for p in paths), strict=True)
    return "".join(part[0] if len(set(part)) == 1 else "*" for part in parts)


def fold_rows(rows: Iterable[tuple[Key, str, T]]) -> list[tuple[Key, list[str], list[T]]]:
    """Groups of rows (key, path, value) that have equal keys and paths that differ only in numbers, in order."""
    groups: dict[Hashable, tuple[Key, list[str], list[T]]] = {}
    for key, path, value in rows:
        _, paths, values = groups.setdefault((key, _skeleton(path)), (key, [], []))
        paths.append(path)
        values.append(value)
    return list(groups.values())


def fold_leaves(
    rows: Iterable[tuple[Key, str, T]], besides: Callable[[list[T]], Hashable] = lambda _: None
) -> list[tuple[Key, str, list[T]]]:
    """Groups of rows of arrays (key, path, value) under one text, in order: `mu/{bias,scale}  x2`.

    A group has equal keys, and paths that differ only in numbers or in one word after the first. For groups by words,
    `besides` of the values has to be equal too.
    """
    folded = [(key, tuple(fold_paths(paths).split("/")), values) for key, paths, values in fold_rows(rows)]
    for at in range(max((len(words) for _, words, _ in folded), default=0) - 1, 0, -1):
        alike: dict[Hashable, list[tuple[Key, tuple[str, ...], list[T]]]] = {}
        for key, words, values in folded:
            rest = (words[:at], words[at + 1 :]) if at < len(words) else (words,)
            alike.setdefault((key, besides(values), *rest), []).append((key, words, values))
        folded = [row for group in alike.values() for row in _in_braces(group, at)]
    return [(key, times_text("/".join(words), len(values)), values) for key, words, values in folded]


_BRACES: Final = 24
"""The most characters of the words in braces."""


def _in_braces(
    group: list[tuple[Key, tuple[str, ...], list[T]]], at: int
) -> list[tuple[Key, tuple[str, ...], list[T]]]:
    """One row for rows that differ only in word `at`; the rows themselves if the words are too long together."""
    key, words, _ = group[0]
    if len(group) == 1:
        return group
    text = "{" + ",".join(words[at] for _, words, _ in group) + "}"
    if len(text) > _BRACES:
        return group
    return [(key, (*words[:at], text, *words[at + 1 :]), [value for _, _, values in group for value in values])]


def _skeleton(path: str) -> str:
    """The common form of paths that are folded together. Line numbers of source lines are not folded."""
    return path if _SOURCE.match(path) else _NUMBERS.sub("*", path)


_SOURCE = re.compile(r"\S+\.\w+:\d+ \(")


@dataclass(frozen=True)
class Section:
    """A part of a report, as data: a title, and below it lines of text or a table.

    Attributes:
      title: one line or several; empty: the table belongs to the section before it.
      columns: the names of the table's columns; one with `>` before it has numbers, aligned to the right.
      rows: the cells of each row of the table.
      lines: of text.
      depth: 1 for a part of the section before it.
    """

    title: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    lines: Sequence[str] = ()
    depth: int = 0

    def __str__(self) -> str:
        table = _table_text(self.columns, self.rows) if self.rows else ""
        below = [indented(text) for text in (*self.lines, table) if text]
        text = "\n".join([self.title] * bool(self.title) + below)
        return indented(text) if self.depth else text


def report_text(sections: Iterable[Section | None]) -> str:
    """The sections that there are as text, one below the other."""
    return "\n\n".join(str(s) for s in sections if s is not None)


def indented(text: str) -> str:
    return "\n".join(f"  {line}".rstrip() for line in text.splitlines())


def _table_text(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table as plain text, without a limit of width."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        right = name.startswith(">")
        table.add_column(name.lstrip(">"), justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    out = io.StringIO()
    console = Console(
        file=out, width=10_000, color_system=None, force_terminal=False, force_jupyter=False, markup=False, emoji=False,
        highlight=False, legacy_windows=False, safe_box=False, _environ={},
    )  # fmt: skip
    console.print(table)
    return out.getvalue()
