"""The import graph of shardc by room, and its drawing in `docs/where-is-what.md`.

`python -m scripts.rooms` writes the drawing into the page. Lazy imports and type-only imports count.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Set
from functools import cache
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).parents[1]
PACKAGE: Final = REPOSITORY / "shardc"
PAGE: Final = REPOSITORY / "docs" / "where-is-what.md"

ROOMS: Final = (
    "errors", "versions", "typed_json", "compat", "runtime",
    "machine", "sbp", "arrays", "ir", "passes", "solver",
    "passes.trace", "passes.accumulate", "passes.estimate", "passes.place", "passes.recompute", "passes.rewrite",
    "passes.memory", "passes.lower", "passes.audit",
    "plan",
    "pipeline.schedule", "pipeline.cut", "pipeline.cut_search", "pipeline",
    "report", "execute", "plans", "calls", "dataflow", "checkpoint", "compiled", "pipelines", "api", "flows", "gangs",
    "flax", "equinox", "live", "tuning", "launch", "doctor", "commands", "__init__", "__main__",
)  # fmt: skip
"""A module may import those of its own room and of the rooms before it."""

NOT_DRAWN: Final = frozenset({"errors", "versions", "typed_json", "compat", "passes", "__init__", "__main__"})
"""Files that nearly every room imports, files that import nearly every room, and the list of passes."""

DRAWING: Final = re.compile(r"(?<=```mermaid\n)(?:(?!```).*\n)*(?=```)", re.MULTILINE)
"""The body of the page's mermaid block."""


def modules() -> dict[str, Path]:
    """Modules by name without `shardc.`; a package by the name of its folder, shardc itself as `__init__`."""
    found: dict[str, Path] = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found


def room_of(module: str) -> str:
    """The innermost room that a module lies in; empty if there is none."""
    return max((r for r in ROOMS if module == r or module.startswith(f"{r}.")), key=len, default="")


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """All nodes of a file's syntax tree, the module first. Each file is parsed once in a process."""
    return list(ast.walk(ast.parse(path.read_text("utf-8"))))


def imported(path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """The modules of shardc that a file imports, at its top or anywhere else."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (a.name.removeprefix("shardc.") for a in node.names if a.name.startswith("shardc."))
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "shardc":
            package = node.module.removeprefix("shardc").removeprefix(".")
            for a in node.names:
                name = f"{package}.{a.name}".removeprefix(".")
                yield name if name in known else package or "__init__"


@cache
def graph() -> dict[str, set[str]]:
    """The modules that each module imports."""
    known = modules()
    return {m: {x for x in imported(path, known) if x in known and x != m} for m, path in known.items()}


def room_graph(imports: Mapping[str, Set[str]]) -> dict[str, set[str]]:
    """The other rooms that each drawn room imports, in the order of the rooms."""
    found: dict[str, set[str]] = {r: set() for r in ROOMS if r not in NOT_DRAWN}
    for module, targets in imports.items():
        room = room_of(module)
        if room in found:
            found[room] |= {room_of(x) for x in targets} & found.keys() - {room}
    return found


def without_transitive(arrows: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The arrows of an acyclic graph that no longer way implies: `a --> b --> c, a --> c` becomes `a --> b --> c`."""

    def reached(room: str) -> set[str]:
        return arrows[room].union(*(reached(r) for r in arrows[room]))

    return {room: set(targets).difference(*(reached(r) for r in targets)) for room, targets in arrows.items()}


def drawing(imports: Mapping[str, Set[str]]) -> str:
    """The rooms as a mermaid flowchart, those that import nothing last; an arrow points to what a room imports."""
    arrows = without_transitive(room_graph(imports))
    lines = ["flowchart TD"]
    lines += [f'    {_id(room)}["{room.replace(".", "/")}"]' for room in reversed(arrows) if "." in room]
    for room in reversed(arrows):
        targets = sorted(arrows[room], key=ROOMS.index, reverse=True)
        if targets:
            lines.append(f"    {_id(room)} --> {' & '.join(map(_id, targets))}")
    return "\n".join(lines) + "\n"


def _id(room: str) -> str:
    return room.replace(".", "_")


def main() -> None:
    """Writes the drawing into the page."""
    made = drawing(graph())
    text, count = DRAWING.subn(lambda _: made, PAGE.read_text("utf-8"))
    assert count == 1, f"{PAGE} has {count} mermaid blocks"
    PAGE.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
