"""The order of the rooms: which module may import which, lazy and type-only imports included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import shardc

ROOT = Path(shardc.__file__).parent
ROOMS = (
    "errors", "versions", "compat", "passes",
    "machine", "sbp", "arrays", "ir", "solver",
    "passes.trace", "passes.estimate", "passes.place", "passes.recompute", "passes.lower", "passes.audit",
    "runtime", "plan",
    "pipeline.schedule", "pipeline.cut", "pipeline.points", "pipeline",
    "report", "execute", "plans", "api", "flax", "equinox", "tune", "__init__", "__main__",
)  # fmt: skip
"""A module may import those of its own room and of the rooms before it."""
MOST = 16
"""Files of a folder, but for those of like things."""
ALIKE = ("pipeline.schedule.methods",)
"""Folders of like things: schedules."""


def modules() -> dict[str, Path]:
    """Modules by name without `shardc.`; a package by the name of its folder, shardc itself as `__init__`."""
    found: dict[str, Path] = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found


def room_of(module: str) -> str:
    return max((r for r in ROOMS if module == r or module.startswith(f"{r}.")), key=len, default="")


def imported(path: Path, known: dict[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (a.name.removeprefix("shardc.") for a in node.names if a.name.startswith("shardc."))
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "shardc":
            package = node.module.removeprefix("shardc").removeprefix(".")
            for a in node.names:
                name = f"{package}.{a.name}".removeprefix(".")
                yield name if name in known else package or "__init__"


def graph() -> dict[str, set[str]]:
    known = modules()
    return {m: {x for x in imported(path, known) if x in known and x != m} for m, path in known.items()}


def test_every_module_is_in_a_room():
    assert [m for m in modules() if not room_of(m)] == []


def test_imports_follow_the_order_of_the_rooms():
    wrong = [
        f"{m} ({room_of(m)}) imports {x} ({room_of(x)})"
        for m, targets in graph().items()
        for x in sorted(targets)
        if ROOMS.index(room_of(x)) > ROOMS.index(room_of(m))
    ]
    assert wrong == []


def test_no_circle():
    """Takes away modules that import nothing more, again and again: what is left stands in a circle."""
    left = graph()
    while free := [m for m, targets in left.items() if not targets & left.keys()]:
        for m in free:
            del left[m]
    assert sorted(left) == []


def test_no_folder_has_too_many_files():
    counts: dict[str, int] = {}
    for path in ROOT.rglob("*.py"):
        if path.name != "__init__.py":
            room = ".".join(path.relative_to(ROOT).parts[:-1])
            counts[room] = counts.get(room, 0) + 1
    assert {room: n for room, n in counts.items() if n > MOST and room not in ALIKE} == {}
