"""A saved plan as JSON, and back. What many operations share is written once, with their numbers: `0-4 7`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Final

from shardc.errors import ArgumentError
from shardc.plan.saved_plan import Chain, SavedLeaf, SavedPlan, placement_word
from shardc.sbp.placement import REPLICATED, Placement

FORMAT: Final = 1
"""Of the files that this version writes and reads."""


def to_json(saved: SavedPlan) -> str:
    """The text of a file: keys in a fixed order, one thing to a line."""
    operations: dict[str, dict[str, list[int]]] = {}
    for n, (text, says) in enumerate(saved.operations or ()):
        operations.setdefault(text, {}).setdefault(says, []).append(n)
    boxings: dict[str, list[str]] = {}
    for reader, chain in saved.boxings.items():
        boxings.setdefault(_chain_text(chain), []).append(reader)
    data: dict[str, Any] = {
        "shardc plan": FORMAT,
        "function": saved.function,
        "mesh": dict(saved.mesh),
        "seconds": saved.seconds,
        "gap": saved.gap,
        "arguments": {path: str(leaf) for path, leaf in saved.arguments.items()},
        "captured": list(map(str, saved.captured)),
        "results": {path: str(leaf) for path, leaf in saved.results.items()},
        "operations": None
        if saved.operations is None
        else {
            text: {says: ranges_text(numbers) for says, numbers in sorted(said.items())}
            for text, said in sorted(operations.items())
        },
        "boxings": {chain: " ".join(sorted(readers, key=_in_order)) for chain, readers in sorted(boxings.items())},
        "digests": dict(saved.digests),
        **({"recomputed": list(saved.recomputed)} if saved.recomputed else {}),
        **({"cheaper": list(saved.cheaper)} if saved.cheaper else {}),
        **({"rewrites": list(saved.rewrites)} if saved.rewrites else {}),
        **({"pinned": list(saved.pinned)} if saved.pinned else {}),
        **({"shared": list(saved.shared)} if saved.shared else {}),
        **({"scans": dict(saved.scans)} if saved.scans else {}),
    }
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def _in_order(reader: str) -> tuple[float, ...]:
    """Readers in the order of the program, results last."""
    return tuple(math.inf if n == "results" else int(n) for n in re.split("[./]", reader))


def _chain_text(chain: Chain) -> str:
    return ", then ".join(f"{placement_word(src)} -> {placement_word(dst)}" for src, dst in chain)


def ranges_text(numbers: Sequence[int]) -> str:
    """Ascending numbers: `0-4 7`."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def numbers_of(text: str) -> list[int]:
    """The inverse of `ranges_text`."""
    ends = [tuple(map(int, part.split("-"))) for part in text.split()]
    return [n for end in ends for n in range(end[0], end[-1] + 1)]


def placement_of(word: str) -> Placement:
    """The inverse of `placement_word`."""
    return REPLICATED if word == "B" else Placement.parse(word)


def rows_of(says: str) -> list[tuple[list[Placement], list[Placement]]]:
    """Placements of the operands and results of an operation, then those of its bodies."""
    found: list[tuple[list[Placement], list[Placement]]] = []
    for row in says.split("; inside "):
        takes, gives = ([placement_of(w) for w in re.findall(r"\{[^}]*\}|B", side)] for side in row.split("->"))
        found.append((takes, gives))
    return found


def _leaf_of(text: str) -> SavedLeaf:
    kind, _, placement = text.partition(" ")
    return SavedLeaf(kind, placement_of(placement))


def _chain_of(text: str) -> Chain:
    steps = [step.split(" -> ") for step in text.split(", then ")]
    return tuple((placement_of(src), placement_of(dst)) for src, dst in steps)


def _operations_of(said: Mapping[str, Mapping[str, str]]) -> list[tuple[str, str]]:
    found = {n: (text, says) for text, rows in said.items() for says, ns in rows.items() for n in numbers_of(ns)}
    for says in {says for _, says in found.values()}:
        rows_of(says)  # which raises if it is wrong
    if sorted(found) != list(range(len(found))):
        raise ValueError("operations are missing")
    return [found[n] for n in range(len(found))]


def from_json(text: str, name: str) -> SavedPlan:
    """The inverse of `to_json`.

    Raises:
      ArgumentError: it is no plan that this version reads.
    """
    try:
        data = json.loads(text)
        made = data["shardc plan"]
        if made == FORMAT:
            return SavedPlan(
                data["function"], data["mesh"], data["seconds"], data["gap"],
                {path: _leaf_of(leaf) for path, leaf in data["arguments"].items()},
                {path: _leaf_of(leaf) for path, leaf in data["results"].items()},
                [_leaf_of(leaf) for leaf in data["captured"]],
                None if data["operations"] is None else _operations_of(data["operations"]),
                {r: _chain_of(chain) for chain, readers in data["boxings"].items() for r in readers.split()},
                data["digests"], name,
                *(tuple(map(str, data.get(k, ()))) for k in ("recomputed", "cheaper", "rewrites", "pinned")),
                shared=tuple(map(int, data.get("shared", ()))),
                scans=tuple((str(kind), int(n)) for kind, n in data.get("scans", {}).items()),
            )  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        wrong = f"{name} is no plan that shardc saved, or was changed so that it is none: {error!r}."
        raise ArgumentError(wrong) from error
    raise ArgumentError(
        f"{name} is a plan of format {made}, and this version of shardc reads format {FORMAT}; plan anew and save that."
    )


def load_plan(path: str | PathLike[str]) -> SavedPlan:
    """Reads a plan that `plan.save(path)` wrote.

    It goes to `shardc.function(plan=...)`, which lowers it as it was, without a search; or its `in_placements` and
    `out_placements` go to the arguments of these names, which pins the borders and leaves the rest to the planner.

    Raises:
      ArgumentError: there is no such file, or it is no plan.
    """
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{fspath(path)} cannot be read as a plan: {error}.") from error
    return from_json(text, Path(path).name)
