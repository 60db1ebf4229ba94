"""Short texts for stages and ranks: ranges of numbers, chains, stems of paths, and a grid cut to a width."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from shardc.pipeline.schedule.schedule import Schedule

FEW: Final = 4
"""The most names or numbers in one cell of a table. Of more, some are left out."""
_LAST_NUMBER: Final = re.compile(r"(.*?)(\d+)(\D*)")


def ranges_text(numbers: Iterable[int]) -> str:
    """`0-2, 5`."""
    runs: list[list[int]] = []
    for n in sorted(set(numbers)):
        if runs and runs[-1][-1] == n - 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def pairs_text(pairs: Iterable[tuple[int, int]]) -> str:
    """Pairs of source and target: `0 -> 1`, `0 -> 1-7`, `1-7 -> 0`; as chains `0 -> 1 -> 2`, `7 -> 6 -> ... -> 0`."""
    left = sorted(set(pairs))
    sources, targets = {a for a, _ in left}, {b for _, b in left}
    if len(sources) == 1 or len(targets) == 1:
        return f"{ranges_text(sources)} -> {ranges_text(targets)}"
    if all(a > b for a, b in left):
        left.reverse()
    chains: list[list[int]] = []
    for a, b in left:
        chain = next((c for c in chains if c[-1] == a), None)
        if chain is None:
            chains.append([a, b])
        else:
            chain.append(b)
    return ", ".join(map(_chain_text, chains))


def _chain_text(chain: Sequence[int]) -> str:
    shown = [str(n) for n in chain]
    if len(chain) > FEW:
        shown = [*shown[:2], "...", shown[-1]]
    return " -> ".join(shown)


def stems(homes: Mapping[str, int]) -> dict[int, list[str]]:
    """For each stage the shortest path prefixes whose paths all live there.

    Args:
      homes: for each path, names joined by `/`, the stage where it lives.

    Examples:
      >>> stems({"l/0/w": 0, "l/0/b": 0, "l/1/w": 1, "head": 1})
      {0: ['l/0'], 1: ['l/1', 'head']}
    """
    under: dict[str, set[int]] = {}
    for path, home in homes.items():
        for beginning in _beginnings(path):
            under.setdefault(beginning, set()).add(home)
    found: dict[int, dict[str, None]] = {}
    for path, home in homes.items():
        stem = next((b for b in _beginnings(path) if len(under[b]) == 1), path)
        found.setdefault(home, {})[stem] = None
    return {home: list(names) for home, names in found.items()}


def _beginnings(path: str) -> list[str]:
    """The prefixes of a path: `a`, `a/b`, `a/b/c`."""
    parts = path.split("/")
    return ["/".join(parts[: i + 1]) for i in range(len(parts))]


def stems_text(names: Sequence[str]) -> str:
    """The first names, those that differ in one number as a range: `blocks/0-3, head`."""
    groups: dict[tuple[str, str], list[int]] = {}
    for name in names:
        numbered = _LAST_NUMBER.fullmatch(name)
        key = (numbered[1], numbered[3]) if numbered else (name, "")
        groups.setdefault(key, []).extend([int(numbered[2])] if numbered else [])
    texts = [f"{before}{ranges_text(ns) if ns else ''}{behind}" for (before, behind), ns in groups.items()]
    if len(texts) > FEW:
        texts = [*texts[: FEW - 1], f"and {len(texts) - FEW + 1} more"]
    return ", ".join(texts)


def cut_grid(schedule: Schedule, width: int) -> tuple[str, str]:
    """The rows of a schedule's grid, cut in the middle to fit the width, and a text about the columns left out."""
    lines = str(schedule).splitlines()[1:]
    cell = 1 + max((len(str(a)) for row in schedule.rows for a in row), default=0)
    at = max((line.find("| ") + 2 for line in lines), default=0)
    count = -(-max((len(line) - at for line in lines), default=0) // cell)
    if at + count * cell <= width + 1:
        return "\n".join(lines), ""
    kept = max(2, (width - at - len("... ")) // cell)
    head, tail = kept - kept // 3, kept // 3
    cut = (
        f"{line[: at + head * cell]:<{at + head * cell}}... {line[at + (count - tail) * cell :]}".rstrip()
        for line in lines
    )
    return "\n".join(cut), f"columns {head} to {count - tail - 1} of {count} left out"
