"""Tables as plain text, and how numbers, placements and paths are written in them."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Final, TypeAlias, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table

from shardc.sbp.placement import Placement

T = TypeVar("T")

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
    """`+1.5 KiB`, `-126 us`; `0` for what is the same."""
    said = text(abs(difference))
    return "0" if said in (text(0), "0 s") else f"{'-' if difference < 0 else '+'}{said}"


def placement_text(placement: Placement | str) -> str:
    """A placement; the one that names no axis is `B`."""
    return "B" if str(placement) == "{}" else str(placement)


def number_text(count: int, what: str) -> str:
    """`1 array`, `2 arrays`, `0 matches`."""
    return f"{count} {what}{'' if count == 1 else 'es' if what.endswith(('s', 'ch')) else 's'}"


def percent_text(fraction: float) -> str:
    """`12%`, `3.4%`."""
    if 0 < fraction < 1e-3:
        return "less than 0.1%"
    return f"{100 * fraction:.1f}%" if fraction < 0.1 else f"{100 * fraction:.0f}%"


def times_text(text: str, count: int) -> str:
    """The text; `text  x3` for what stands for several."""
    return text if count == 1 else f"{text}  x{count}"


_NUMBERS = re.compile(r"(\d+)")


def fold_paths(paths: Sequence[str]) -> str:
    """The one text of paths that differ only in numbers: `blocks_0/up`, `blocks_1/up` --> `blocks_*/up`."""
    parts = zip(*(_NUMBERS.split(p) for p in paths), strict=True)
    return "".join(part[0] if len(set(part)) == 1 else "*" for part in parts)


def fold_rows(rows: Iterable[tuple[Key, str, T]]) -> list[tuple[Key, list[str], list[T]]]:
    """Rows (key, path, value) with equal keys and paths that differ only in numbers, put together in order."""
    groups: dict[Hashable, tuple[Key, list[str], list[T]]] = {}
    for key, path, value in rows:
        _, paths, values = groups.setdefault((key, _skeleton(path)), (key, [], []))
        paths.append(path)
        values.append(value)
    return list(groups.values())


def fold_leaves(
    rows: Iterable[tuple[Key, str, T]], besides: Callable[[list[T]], Hashable] = lambda _: None
) -> list[tuple[Key, str, list[T]]]:
    """Rows of arrays (key, path, value), in order: those with equal keys whose paths differ only in numbers, or in one
    word behind the first, under one text: `mu/{bias,scale}  x2`. For the words, what `besides` says is to be equal too.
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
"""Characters that the words in braces may take."""


def _in_braces(
    group: list[tuple[Key, tuple[str, ...], list[T]]], at: int
) -> list[tuple[Key, tuple[str, ...], list[T]]]:
    """One row for those that differ only in word `at`; the rows themselves, where those words are too long."""
    key, words, _ = group[0]
    if len(group) == 1:
        return group
    text = "{" + ",".join(words[at] for _, words, _ in group) + "}"
    if len(text) > _BRACES:
        return group
    return [(key, (*words[:at], text, *words[at + 1 :]), [value for _, _, values in group for value in values])]


def _skeleton(path: str) -> str:
    """What paths that fold together share. The numbers of source lines are not to be folded."""
    return path if _SOURCE.match(path) else _NUMBERS.sub("*", path)


_SOURCE = re.compile(r"\S+\.\w+:\d+ \(")


def make_table(*columns: str) -> Table:
    """A table whose columns are as wide as what is in them; `>` before a name aligns it to the right."""
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        right = name.startswith(">")
        made.add_column(name.lstrip(">"), justify="right" if right else "left", overflow="fold")
    return made


def section(title: str, body: Table | None = None) -> str:
    """A title, and a table below it."""
    return title if body is None else f"{title}\n{indented(_rendered(body))}"


def indented(text: str) -> str:
    return "\n".join(f"  {line}".rstrip() for line in text.splitlines())


def _rendered(body: Table) -> str:
    """Plain text, as wide as it is."""
    out = io.StringIO()
    console = Console(
        file=out, width=10_000, color_system=None, force_terminal=False, force_jupyter=False, markup=False, emoji=False,
        highlight=False, legacy_windows=False, safe_box=False, _environ={},
    )  # fmt: skip
    console.print(body)
    return out.getvalue()
