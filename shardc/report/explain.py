"""`plan.explain()`: a plan as text for people. The same text on every terminal, and on none."""

from __future__ import annotations

import io
import re
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table

from shardc.passes.collective import Collective
from shardc.passes.memory import local_bytes
from shardc.passes.plan import Argument, Plan
from shardc.passes.tally import short_aval
from shardc.sbp.placement import Pin, Placement, is_even

T = TypeVar("T")

WORDS = (
    "S(i): split along dimension i; B: every device holds all of it; P(op): partial, the sum, max or min of what the "
    "devices hold; axes that are not named: B."
)


REPLACES = "take the place of donated arguments, and live where these do"

_Row: TypeAlias = tuple[str, Any, Placement, str]
"""Path, variable, placement, and why it lives there."""


def explain(plan: Plan) -> str:
    """What lives where, what moves, why, how many bytes, and which line of the user's code made it."""
    sections = (
        _head(plan), WORDS, _arguments(plan), _results(plan), _moves(plan), _totals(plan), _gathered(plan),
        _notes(plan), _memory(plan),
    )  # fmt: skip
    return "\n\n".join(filter(None, sections))


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


def placement_text(placement: Placement | str) -> str:
    """A placement; the one that names no axis is `B`."""
    return "B" if str(placement) == "{}" else str(placement)


def _head(plan: Plan) -> str:
    mesh = plan.mesh
    moves = _moving(plan)
    runs = sum(c.count for c in moves)
    times = f", which run {runs} times" if runs != len(moves) else ""
    sent = (
        f"Each device sends {bytes_text(plan.bytes_per_device)} a call in {_number(len(moves), 'collective')}{times}"
        if moves
        else "Nothing moves between devices"
    )
    proved = {None: "not proved to be the best", 0.0: "proved to be the best"}.get(
        plan.gap, f"within {_percent(plan.gap or 0.0)} of the best"
    )
    axes = " x ".join(f"{a}={n}" for a, n in mesh.axes)
    shape = f" ({'x'.join(map(str, mesh.topology.shape))})" if mesh.topology.shape else ""
    return (
        f"{plan.program.name} on {axes}: {_number(mesh.size, f'{mesh.topology.kind} device')}{shape}\n"
        f"{sent}; about {seconds_text(plan.seconds)}, {seconds_text(plan.compute_seconds)} of it computing and "
        f"{seconds_text(plan.seconds - plan.compute_seconds)} moving; {proved}."
    )


def _arguments(plan: Plan) -> str:
    rows = [
        (path, var, placement, _why_argument(argument, placement))
        for path, var, placement, argument in zip(
            plan.program.in_paths, plan.boxed.jaxpr.invars, plan.inputs, plan.arguments, strict=True
        )
    ]
    return _leaves(plan, "Arguments", rows)


def _results(plan: Plan) -> str:
    rows: list[_Row] = []
    for path, var, placement, pin, tie in zip(
        plan.program.out_paths, plan.boxed.jaxpr.outvars, plan.outputs, plan.results, plan.ties, strict=True
    ):
        replaces = tie is not None and plan.inputs[tie] == placement
        rows.append((path or "result", var, placement, REPLACES if replaces else _why(pin, "chosen")))
    return _leaves(plan, "Results", rows)


def _leaves(plan: Plan, title: str, leaves: Sequence[_Row]) -> str:
    """One row for each group of leaves that differ only in the numbers of their paths."""
    sizes = plan.mesh.sizes
    rows: list[tuple[_Key, str, int]] = []
    total = 0
    for path, var, placement, why in leaves:
        size = local_bytes(var, placement, sizes)
        total += size
        padded = "" if is_even(var.aval.shape, placement, sizes) else ", padded"
        if why != REPLACES:
            rows.append(((short_aval(var.aval), placement_text(placement) + padded, why), path, size))
    head = f"{title}: {_number(len(leaves), 'array')}, {bytes_text(total)} per device"
    if len(rows) < len(leaves):
        head += f"; {len(leaves) - len(rows)} of them {REPLACES}"
    if not rows:
        return head
    table = _table("path", "type", "placement", "why", ">bytes per device")
    for key, paths, found in _folded(rows):
        table.add_row(_times(fold_paths(paths), len(paths)), *map(str, key), bytes_text(sum(found)))
    return _section(head, table)


def _why_argument(argument: Argument, placement: Placement) -> str:
    if argument.pin is not None and not argument.pin.allows(placement):
        return f"arrives so, pinned at {placement_text(argument.pin.placement)}"
    return _why(argument.pin, "arrives so" if argument.arrival is not None else "chosen")


def _why(pin: Pin | None, otherwise: str) -> str:
    if pin is None or pin.fixed == frozenset():
        return otherwise
    return "pinned" if pin.fixed is None else f"pinned on {', '.join(sorted(pin.fixed))}"


def _moving(plan: Plan) -> list[Collective]:
    return [c for c in plan.collectives if c.bytes]


def _moves(plan: Plan) -> str:
    moves = _moving(plan)
    if not moves:
        return _section("Moves: none")
    rows = [
        ((c.kind, ", ".join(c.axes), c.value, placement_text(c.src), placement_text(c.dst)), c.source, c) for c in moves
    ]
    table = _table("collective", "over", "value", "from", "to", ">times", ">bytes", "made by")
    for key, sources, found in _folded(rows):
        times = str(sum(c.count for c in found))
        table.add_row(*map(str, key), times, bytes_text(sum(c.bytes for c in found)), fold_paths(sources))
    return _section("Moves, in the order of the program: bytes that each device sends in one call", table)


def _totals(plan: Plan) -> str:
    moves = _moving(plan)
    if not moves:
        return ""
    totals: dict[tuple[str, str], list[Collective]] = {}
    for c in moves:
        totals.setdefault((", ".join(c.axes), c.kind), []).append(c)
    whole = sum(c.bytes for c in moves)
    table = _table("over", "collective", ">times", ">bytes", ">share")
    by_bytes = sorted(totals.items(), key=lambda item: -sum(c.bytes for c in item[1]))
    for (axes, kind), found in by_bytes:
        size = sum(c.bytes for c in found)
        table.add_row(axes, kind, str(sum(c.count for c in found)), bytes_text(size), _percent(size / whole))
    return _section("Totals by axis and kind", table)


def _gathered(plan: Plan) -> str:
    title = "Computed whole on every device for want of a rule"
    if not plan.gathered:
        return _section(f"{title}: none")
    table = _table("operation", ">times", "made by")
    for g in plan.gathered:
        table.add_row(g.primitive, str(g.count), ", ".join(g.sources))
    return _section(title, table)


def _notes(plan: Plan) -> str:
    if not plan.notes:
        return ""
    folded = _folded([((), note, None) for note in plan.notes])
    lines = [_times(fold_paths(notes), len(notes)) for _, notes, _ in folded]
    return "\n".join(["Notes", *(f"  {line}" for line in lines)])


def _memory(plan: Plan) -> str:
    memory, hbm = plan.memory, plan.mesh.topology.hbm
    return (
        f"Memory: at most {bytes_text(memory.peak)} on each device, {_percent(memory.peak / hbm)} of its "
        f"{bytes_text(hbm)}\n"
        f"  {bytes_text(memory.arguments)} arguments, {bytes_text(memory.temporaries)} the most that is alive besides; "
        f"{bytes_text(memory.results)} results"
    )


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _percent(fraction: float) -> str:
    if 0 < fraction < 1e-3:
        return "less than 0.1%"
    return f"{100 * fraction:.1f}%" if fraction < 0.1 else f"{100 * fraction:.0f}%"


def _times(text: str, count: int) -> str:
    return text if count == 1 else f"{text}  x{count}"


_NUMBERS = re.compile(r"(\d+)")


def fold_paths(paths: Sequence[str]) -> str:
    """The one text of paths that differ only in numbers: `blocks_0/up`, `blocks_1/up` --> `blocks_*/up`."""
    parts = zip(*(_NUMBERS.split(p) for p in paths), strict=True)
    return "".join(part[0] if len(set(part)) == 1 else "*" for part in parts)


_Key: TypeAlias = tuple[Hashable, ...]


def _folded(rows: Iterable[tuple[_Key, str, T]]) -> list[tuple[_Key, list[str], list[T]]]:
    """Rows (key, path, value) with equal keys and paths that differ only in numbers, put together in order."""
    groups: dict[Hashable, tuple[_Key, list[str], list[T]]] = {}
    for key, path, value in rows:
        _, paths, values = groups.setdefault((key, _skeleton(path)), (key, [], []))
        paths.append(path)
        values.append(value)
    return list(groups.values())


def _skeleton(path: str) -> str:
    """What paths that fold together share. The numbers of source lines are not to be folded."""
    return path if _SOURCE.match(path) else _NUMBERS.sub("*", path)


_SOURCE = re.compile(r"\S+\.\w+:\d+ \(")


def _table(*columns: str) -> Table:
    """A table whose columns are as wide as what is in them; `>` before a name aligns it to the right."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        right = name.startswith(">")
        table.add_column(name.lstrip(">"), justify="right" if right else "left", overflow="fold")
    return table


def _section(title: str, table: Table | None = None) -> str:
    return title if table is None else f"{title}\n{_indented(_rendered(table))}"


def _indented(text: str) -> str:
    return "\n".join(f"  {line}".rstrip() for line in text.splitlines())


def _rendered(table: Table) -> str:
    """Plain text, as wide as it is."""
    out = io.StringIO()
    console = Console(
        file=out, width=10_000, color_system=None, force_terminal=False, force_jupyter=False, markup=False, emoji=False,
        highlight=False, legacy_windows=False, safe_box=False, _environ={},
    )  # fmt: skip
    console.print(table)
    return out.getvalue()
