"""The order of the rooms: which module may import which, lazy and type-only imports included."""

from __future__ import annotations

import re

from scripts.rooms import DRAWING, NOT_DRAWN, PACKAGE, PAGE, REPOSITORY, ROOMS, drawing, graph, modules, room_of

MOST = 16
"""Files of a folder, but for those of like things."""
ALIKE = ("pipeline.schedule.methods",)
"""Folders of like things: schedules."""


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
    left = dict(graph())
    while free := [m for m, targets in left.items() if not targets & left.keys()]:
        for m in free:
            del left[m]
    assert sorted(left) == []


def test_no_folder_has_too_many_files():
    counts: dict[str, int] = {}
    for path in PACKAGE.rglob("*.py"):
        if path.name != "__init__.py":
            room = ".".join(path.relative_to(PACKAGE).parts[:-1])
            counts[room] = counts.get(room, 0) + 1
    assert {room: n for room, n in counts.items() if n > MOST and room not in ALIKE} == {}


def test_the_page_has_the_drawing_of_the_rooms():
    assert DRAWING.findall(PAGE.read_text("utf-8")) == [drawing(graph())], "run python -m scripts.rooms"


def test_the_page_names_every_room_and_no_file_that_is_not_there():
    text = PAGE.read_text("utf-8")
    missing = [r for r in ROOMS if r not in NOT_DRAWN and f"`{r.replace('.', '/')}" not in text]
    named = [n for n in re.findall(r"`([\w./]+\.(?:py|md|toml)|[\w./]+/)`", text) if "/" in n]
    lost = [n for n in named if not (PACKAGE / n).exists() and not (REPOSITORY / n).exists()]
    assert (missing, lost) == ([], [])
