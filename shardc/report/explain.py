"""`plan.explain()`: a plan as text for people. The same text on every terminal, and on none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

from shardc import compat
from shardc.compat import Jaxpr
from shardc.ir.collective import Collective
from shardc.ir.walk import all_eqns, local_bytes, short_aval
from shardc.passes.estimate.plan_cost import Time
from shardc.passes.recompute.recompute import Recomputed
from shardc.plan.plan import FoundSignatures, Gathered, SpmdPlan, Unlimited
from shardc.plan.request import Argument
from shardc.report.tables import (
    Key,
    bytes_text,
    fold_leaves,
    fold_paths,
    fold_rows,
    make_table,
    number_text,
    percent_text,
    placement_text,
    seconds_text,
    section,
    times_text,
)
from shardc.sbp.cost import COLLECTIVES
from shardc.sbp.placement import Pin, Placement, is_even

WORDS = (
    "S(i): split along dimension i; B: every device holds all of it; P(op): partial, the sum, max or min of what the "
    "devices hold; axes that are not named: B."
)


REPLACES = "take the place of donated arguments, and live where these do"

_Row: TypeAlias = tuple[str, Any, Placement, str]
"""Path, variable, placement, and why it lives there."""


def explain(plan: SpmdPlan) -> str:
    """What lives where, what moves, why, how many bytes, and which line of the user's code made it."""
    sections = (
        _head(plan), WORDS, _arguments(plan), _results(plan), _moves(plan), totals_section(plan.collectives),
        gathered_section(plan.gathered), found_section(plan.found), notes_section(plan.notes), _memory(plan),
    )  # fmt: skip
    return "\n\n".join(filter(None, sections))


def _head(plan: SpmdPlan) -> str:
    mesh = plan.mesh
    moves = moving(plan.collectives)
    runs = sum(c.count for c in moves)
    count = number_text(len(moves), "collective")
    times = f", which run {runs} times" if runs != len(moves) else ""
    sent = (
        f"Each device sends {bytes_text(plan.bytes_per_device)} a call in {count}{times}"
        if moves
        else "Nothing moves between devices"
    )
    proved = {None: "not proved to be the best", 0.0: "proved to be the best"}.get(
        plan.gap, f"within {percent_text(plan.gap or 0.0)} of the best"
    )
    axes = " x ".join(f"{a}={n}" for a, n in mesh.axes)
    shape = f" ({'x'.join(map(str, mesh.topology.shape))})" if mesh.topology.shape else ""
    return (
        f"{plan.program.name} on {axes}: {number_text(mesh.size, f'{mesh.topology.kind} device')}{shape}\n"
        f"{sent}; about {seconds_text(plan.seconds)}; {proved}.\n"
        f"{time_text(plan.time)}{loops_text([plan.boxed.jaxpr])}"
    )


def loops_text(jaxprs: Iterable[Jaxpr]) -> str:
    """How often loops of unknown length are counted, in lines to append; empty if there is none."""
    once, said = dict[str, None](), dict[str, None]()
    for eqn in (e for jaxpr in jaxprs for e in all_eqns(jaxpr)):
        if eqn.primitive.name == "while":
            n, line = compat.rounds_of(eqn), compat.source_line(eqn) or "a line of a library"
            (once if n is None else said)[line if n is None else f"{number_text(n, 'round')} at {line}"] = None
    text = f"\nLoops of unknown length count as shardc.trips says: {', '.join(said)}." if said else ""
    if once:
        text += (
            f"\nLoops of unknown length count one round, in bytes and in time: {', '.join(once)}. "
            "To say how many are expected: with shardc.trips(n): around the loop."
        )
    return text


def time_text(time: Time) -> str:
    """Where the time goes, in one line."""
    parts = [f"{seconds_text(time.compute)} computing", f"{seconds_text(time.memory)} reading and writing memory"]
    parts += [f"{seconds_text(s)} {kind}" for kind in COLLECTIVES if (s := getattr(time, kind))]
    hidden = f", of which {seconds_text(time.overlapped)} behind computing" if time.overlapped else ""
    return f"Time: {', '.join(parts)}{hidden}."


def _arguments(plan: SpmdPlan) -> str:
    rows = [
        (path, var, placement, why_argument(argument, placement))
        for path, var, placement, argument in zip(
            plan.program.in_paths, plan.boxed.jaxpr.invars, plan.inputs, plan.arguments, strict=True
        )
    ]
    return _leaves(plan, "Arguments", rows)


def _results(plan: SpmdPlan) -> str:
    rows: list[_Row] = []
    for path, var, placement, pin, tie in zip(
        plan.program.out_paths, plan.boxed.jaxpr.outvars, plan.outputs, plan.results, plan.ties, strict=True
    ):
        replaces = tie is not None and plan.inputs[tie] == placement
        rows.append((path or "result", var, placement, REPLACES if replaces else why_placed(pin, "chosen")))
    return _leaves(plan, "Results", rows)


def _leaves(plan: SpmdPlan, title: str, leaves: Sequence[_Row]) -> str:
    """One row for each group of leaves whose paths differ only in numbers, or in a word."""
    sizes = plan.mesh.sizes
    rows: list[tuple[Key, str, int]] = []
    total = 0
    for path, var, placement, why in leaves:
        size = local_bytes(var, placement, sizes)
        total += size
        padded = "" if is_even(var.aval.shape, placement, sizes) else ", padded"
        if why != REPLACES:
            rows.append(((short_aval(var.aval), placement_text(placement) + padded, why), path, size))
    head = f"{title}: {number_text(len(leaves), 'array')}, {bytes_text(total)} per device"
    if len(rows) < len(leaves):
        head += f"; {len(leaves) - len(rows)} of them {REPLACES}"
    if not rows:
        return head
    table = make_table("path", "type", "placement", "why", ">bytes per device")
    for key, path, found in fold_leaves(rows):
        table.add_row(path, *map(str, key), bytes_text(sum(found)))
    return section(head, table)


def why_argument(argument: Argument, placement: Placement) -> str:
    """`pinned`, `pinned on data`, `arrives so`, `chosen`."""
    if argument.pin is not None and not argument.pin.allows(placement):
        return f"arrives so, pinned at {placement_text(argument.pin.placement)}"
    return why_placed(argument.pin, "arrives so" if argument.arrival is not None else "chosen")


def why_placed(pin: Pin | None, otherwise: str) -> str:
    """`pinned`, `pinned on data`, or the other word."""
    if pin is None or pin.fixed == frozenset():
        return otherwise
    return "pinned" if pin.fixed is None else f"pinned on {', '.join(sorted(pin.fixed))}"


def moving(collectives: Sequence[Collective]) -> list[Collective]:
    """Those that send something."""
    return [c for c in collectives if c.bytes]


def _moves(plan: SpmdPlan) -> str:
    moves = moving(plan.collectives)
    if not moves:
        return section("Moves: none")
    rows = [
        ((c.kind, ", ".join(c.axes), c.value, placement_text(c.src), placement_text(c.dst), c.one_round), c.source, c)
        for c in moves
    ]
    table = make_table("collective", "over", "value", "from", "to", ">times", ">bytes", "made by")
    for (*key, _), sources, found in fold_rows(rows):
        times = str(sum(c.count for c in found)) + " a round" * found[0].one_round
        table.add_row(*map(str, key), times, bytes_text(sum(c.bytes for c in found)), fold_paths(sources))
    return section("Moves, in the order of the program: bytes that each device sends in one call", table)


def totals_section(collectives: Sequence[Collective]) -> str:
    """Bytes by axis and kind."""
    moves = moving(collectives)
    if not moves:
        return ""
    totals: dict[tuple[str, str], list[Collective]] = {}
    for c in moves:
        totals.setdefault((", ".join(c.axes), c.kind), []).append(c)
    whole = sum(c.bytes for c in moves)
    table = make_table("over", "collective", ">times", ">bytes", ">share")
    by_bytes = sorted(totals.items(), key=lambda item: -sum(c.bytes for c in item[1]))
    for (axes, kind), found in by_bytes:
        size = sum(c.bytes for c in found)
        table.add_row(axes, kind, str(sum(c.count for c in found)), bytes_text(size), percent_text(size / whole))
    return section("Totals by axis and kind", table)


def gathered_section(gathered: Sequence[Gathered]) -> str:
    """The operations that no rule split."""
    title = "Computed whole on every device for want of a rule"
    if not gathered:
        return section(f"{title}: none")
    table = make_table("operation", ">times", "made by")
    for g in gathered:
        table.add_row(g.primitive, str(g.count), ", ".join(g.sources))
    return section(title, table)


def found_section(found: Sequence[FoundSignatures]) -> str:
    """The operations without a rule that are split by signatures that were found."""
    if not found:
        return ""
    table = make_table("operation", "justified by", "rule to paste", ">times", "made by")
    for f in found:
        table.add_row(f.primitive, f.how, f.rule, str(f.count), ", ".join(f.sources))
    refused = ", ".join(f'"{name}"' for name in dict.fromkeys(f.primitive for f in found))
    return section(f"Signatures found for operations without a rule; to refuse them: replicate=[{refused}]", table)


def notes_section(notes: Sequence[str]) -> str:
    """What the plan says besides."""
    if not notes:
        return ""
    folded = fold_rows([((), note, None) for note in notes])
    lines = [times_text(fold_paths(alike), len(alike)) for _, alike, _ in folded]
    return "\n".join(["Notes", *(f"  {line}" for line in lines)])


NAMED: Final = 6
"""Lines of what is computed again that are named."""


def memory_decided(free: Unlimited | None, seconds: float) -> str:
    """What would be without the limit on memory, if that is another plan than this one of so many seconds."""
    if free is None:
        return ""
    more = ", which is more: searches do not count on what hides" * (free.seconds > seconds)
    return (
        f"\n  Memory decided: without the limit the plan would take about {seconds_text(free.seconds)} and "
        f"{bytes_text(free.peak)}{more}"
    )


def _values(again: Recomputed) -> str:
    return (
        f"{number_text(again.count, 'value')}, {bytes_text(again.bytes)}, of {', '.join(again.sources[:NAMED])}"
        f"{f' and {len(again.sources) - NAMED} more lines' * (len(again.sources) > NAMED)}"
    )


def _memory(plan: SpmdPlan) -> str:
    memory, hbm = plan.memory, plan.mesh.topology.hbm
    decided = memory_decided(plan.unlimited, plan.seconds)
    if (again := plan.recomputed) is not None:
        decided += (
            f"\n  Computed again where they are read, in {seconds_text(again.seconds)}, and not kept: {_values(again)}"
        )
    if plan.cheaper is not None:
        decided += f"\n  Computed again where they are read, as keeping them takes longer: {_values(plan.cheaper)}"
    return (
        f"Memory: at most {bytes_text(memory.peak)} on each device, {percent_text(memory.peak / hbm)} of its "
        f"{bytes_text(hbm)}\n"
        f"  {bytes_text(memory.arguments)} arguments, {bytes_text(memory.temporaries)} the most that is alive besides; "
        f"{bytes_text(memory.results)} results"
        f"{decided}"
    )
