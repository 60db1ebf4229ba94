"""Sections of reports as data and as plain text, and the format of numbers, placements and paths in them."""

from __future__ import annotations

import io
import math
import os
import re
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias, TypeVar

from jax.sharding import Mesh
from rich import box
from rich.console import Console
from rich.table import Table

from shardc.errors import number_text
from shardc.machine.mesh import AnyMesh, MeshView, stages_text, view
from shardc.machine.topology import Topology
from shardc.sbp.placement import Placement
from shardc.sbp.sub_axes import in_whole_axes

T = TypeVar("T")

WIDTH: Final = 120
"""Characters of a line of text that is drawn, where nothing says how many there is room for."""
MOST: Final = 8
"""The most lines, or names, of a list in a text; of a longer one, the first of them and the number of the others."""

Key: TypeAlias = tuple[Hashable, ...]


def bytes_text(count: float) -> str:
    """`512 bytes`, `1.5 KiB`, `2.0 MiB`; `unknown` for nan."""
    if math.isnan(count):
        return "unknown"
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
    """`+1.5 KiB`, `-126 us`; `0` for equal values; `unknown` for nan."""
    if math.isnan(difference):
        return "unknown"
    size = text(abs(difference))
    return "0" if size in (text(0), "0 s") else f"{'-' if difference < 0 else '+'}{size}"


def placement_text(placement: Placement | str, mesh: MeshView | None = None) -> str:
    """A placement; one that names no axis is `B`. On a mesh with sub-axes, whole axes stand for all parts of them."""
    if mesh is not None and isinstance(placement, Placement):
        placement = in_whole_axes(placement, mesh)
    return "B" if str(placement) == "{}" else str(placement)


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


class MeshText(NamedTuple):
    """The text of a mesh among others.

    Attributes:
      shape: as `mesh_text` says it.
      devices: its devices, if another mesh has this shape; else empty.
    """

    shape: str
    devices: str = ""

    def __str__(self) -> str:
        return f"{self.shape} (devices {self.devices})" if self.devices else self.shape


def mesh_texts(meshes: Iterable[AnyMesh]) -> dict[AnyMesh, MeshText]:
    """A text for each mesh that no other one has: `data=2`, or `data=2 (devices 4, 5)`."""
    distinct = dict.fromkeys(meshes)
    shapes = Counter(map(mesh_text, distinct))
    return {m: MeshText(s := mesh_text(m), _devices_of(m) if shapes[s] > 1 else "") for m in distinct}


def _devices_of(mesh: AnyMesh) -> str:
    """`4, 5`; of a mesh without devices `of v5p`."""
    if not isinstance(mesh, Mesh):
        return f"of {view(mesh).topology.kind}"
    runs: list[list[int]] = []
    for n in (d.id for d in mesh.devices.flat):
        if runs and runs[-1][-1] == n - 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs)


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

    def text(self, width: int | None = None) -> str:
        """The section as text, folded to `width` characters; None: as wide as it is."""
        room = width and width - 2 * bool(self.depth)
        below = [folded(text, room and room - 2) for text in self.lines]
        below += [_table_text(self.columns, self.rows, room and room - 2)] if self.rows else []
        text = "\n".join([folded(self.title, room)] * bool(self.title) + [indented(text) for text in below if text])
        return indented(text) if self.depth else text

    def __str__(self) -> str:
        return self.text()


def report_text(sections: Iterable[Section | None], width: int | None = None) -> str:
    """The sections that there are as text, one below the other, folded to `width` characters if that is given."""
    return "\n\n".join(s.text(width) for s in sections if s is not None)


def terminal_width() -> int | None:
    """The characters of a line of the terminal that standard output is, or as COLUMNS says; None: neither."""
    known = os.environ.get("COLUMNS", "").isdecimal() or sys.stdout.isatty()
    return max(_NARROWEST, shutil.get_terminal_size().columns) if known else None


_NARROWEST: Final = 40
"""Characters of the shortest line that text is folded to."""


def folded(text: str, width: int | None) -> str:
    """The text with each line that is longer than `width` as several, with a hanging indent; None: as it is."""
    if width is None:
        return text
    lines: list[str] = []
    for line in text.splitlines():
        indent = " " * (len(line) - len(line.lstrip()))
        folds = textwrap.wrap(line, width, subsequent_indent=f"{indent}  ", break_on_hyphens=False)
        lines += folds if len(line) > width else [line]
    return "\n".join(lines)


def indented(text: str) -> str:
    return "\n".join(f"  {line}".rstrip() for line in text.splitlines())


def _table_text(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> str:
    """A table as plain text, its cells folded so that it fits into a width; in lines if it cannot."""
    widths = _column_widths(columns, rows, width) if width else [None] * len(columns)
    if widths is None:
        return _records_text(columns, rows, width or 0)
    narrow = width and sum(filter(None, widths)) + _BETWEEN * (len(columns) - 1) > width
    padding = (0, 1 if narrow else 2, 0, 0)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=padding)
    for name, wide in zip(columns, widths, strict=True):
        side = "right" if name.startswith(">") else "left"
        table.add_column(name.lstrip(">"), justify=side, overflow="fold", width=wide)
    for row in rows:
        table.add_row(*map(_cut, row, widths))
    out = io.StringIO()
    console = Console(
        file=out, width=width or 10_000, color_system=None, force_terminal=False, force_jupyter=False, markup=False,
        emoji=False, highlight=False, legacy_windows=False, safe_box=False, _environ={},
    )  # fmt: skip
    console.print(table)
    return out.getvalue()


_BETWEEN: Final = 3
"""Characters between two columns of a table; one less where words are cut."""


_SHORTEST: Final = 6
"""Characters of the narrowest column of text in a table."""


def _column_widths(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[int] | None:
    """The width of each column so that a table fits and no number is cut; None: it cannot fit so.

    Words are cut only if they have to be: after a mark if that is enough, else anywhere.
    """
    names = [name.lstrip(">") for name in columns]
    cells = [[row[i] for row in rows] for i in range(len(columns))]
    whole = [_longest(column, str.splitlines) for column in cells]
    wanted = [max(n, len(name)) for n, name in zip(whole, names, strict=True)]

    def least(parts: Callable[[str], list[str]]) -> list[int]:
        """The widths in which no such part of a cell, and of a name, is cut."""
        each = zip(columns, names, cells, strict=True)
        return [
            max(_longest(texts, str.splitlines if c.startswith(">") else parts), _longest([name], parts))
            for c, name, texts in each
        ]

    found, words = least(_parts), least(str.split)
    room = width - _BETWEEN * (len(columns) - 1)
    room += (len(columns) - 1) * (sum(words) > room)
    texts = [i for i, name in enumerate(columns) if not name.startswith(">")]
    while sum(found) > room:
        at = max(texts, key=lambda i: found[i], default=None)
        if at is None or found[at] <= _SHORTEST:
            return None
        found[at] -= 1
    for at in sorted(texts, key=lambda i: words[i] - found[i]):  # the most words whole
        if words[at] - found[at] <= room - sum(found):
            found[at] = max(found[at], words[at])
    for _ in range(min(room, sum(wanted)) - sum(found)):
        at = min((i for i, n in enumerate(found) if n < wanted[i]), key=lambda i: found[i])
        found[at] += 1
    return found


def _longest(texts: Iterable[str], parts: Callable[[str], list[str]]) -> int:
    return max((len(part) for text in texts for part in parts(text)), default=0)


_MARKS: Final = re.compile(r"(?<=[/,_])|(?<=->)|\s+")


def _parts(text: str) -> list[str]:
    """The parts of a text, each with the mark after which a line may end."""
    return _MARKS.split(text)


def _cut(text: str, width: int | None) -> str:
    """A cell in lines of `width` characters, cut between words, else after marks, else anywhere."""
    if width is None or _longest([text], str.splitlines) <= width:
        return text
    lines: list[str] = []
    for word in text.split():
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += f" {word}"
            continue
        lines.append("")
        for part in [word] if len(word) <= width else _parts(word):
            if lines[-1] and len(lines[-1]) + len(part) > width:
                lines.append("")
            *cut, rest = [part[i : i + width] for i in range(0, len(part) or 1, width)]
            lines[-1:] = [*cut, lines[-1] + rest] if not cut else [*cut, rest]
    return "\n".join(lines)


def _records_text(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    """A table that is too wide, as a line for each row: `path: params/w; type: f32[8]`."""
    names = [f"{name.lstrip('>')}: " if name.lstrip(">") else "" for name in columns]
    return "\n".join(
        folded("; ".join(f"{n}{' '.join(c.split())}" for n, c in zip(names, row, strict=True) if c), width)
        for row in rows
    )
