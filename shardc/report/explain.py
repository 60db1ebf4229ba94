"""`plan.explain()`: a plan as text for people. The text does not depend on the terminal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

from shardc import compat
from shardc.compat import Jaxpr
from shardc.ir.collective import Collective
from shardc.ir.walk import all_eqns, short_aval
from shardc.passes.estimate.backend import backend_of
from shardc.passes.estimate.plan_cost import Time
from shardc.passes.estimate.sizes import piece_bytes
from shardc.passes.recompute.recompute import Recomputed
from shardc.passes.trace.pins import code_text
from shardc.plan.plan import FoundSignatures, Gathered, SpmdPlan, Unlimited
from shardc.plan.request import Argument
from shardc.plan.rewrites import RewriteTrial
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


REUSES = "reuse the buffers and placements of donated arguments"

_Row: TypeAlias = tuple[str, Any, Placement, str]
"""Path, variable, placement, and the reason of the placement."""


def explain(plan: SpmdPlan) -> str:
    """The text of a plan: where each value lives, which collectives run, why, their bytes, and their source lines."""
    sections = (
        _head(plan), WORDS, _arguments(plan), _results(plan), _moves(plan), totals_section(plan.collectives),
        gathered_section(plan.gathered), found_section(plan.found),
        notes_section([*plan.notes, *uneven_notes(plan)]), _memory(plan),
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

    axes = " x ".join(f"{a}={n}" for a, n in mesh.axes)
    shape = f" ({'x'.join(map(str, mesh.topology.shape))})" if mesh.topology.shape else ""
    return (
        f"{plan.program.name} on {axes}: {number_text(mesh.size, f'{mesh.topology.kind} device')}{shape}\n"
        f"{sent}; about {seconds_text(plan.seconds)}; {optimality_text(plan.gap)}.\n"
        f"{time_text(plan.time)}{loops_text([plan.boxed.jaxpr])}{_rewrites_text(plan.trials)}"
        f"{_scans_text(plan.program.scans)}"
    )


def _rewrites_text(trials: Sequence[RewriteTrial]) -> str:
    """A line to append that names the rewrites that were planned; empty if there are none."""
    if not trials:
        return ""
    texts: list[str] = []
    for name, group in itertools.groupby(trials, lambda t: t.name):
        tried = list(group)
        taken = next((t for t in reversed(tried) if t.taken), None)
        best = taken or min(tried, key=lambda t: t.seconds)
        now, then = _fits(best.seconds), _fits(best.before)
        times = f"{now} instead of {then}" if now != then else "it takes as long"
        texts.append(f"{name} {'' if taken else 'not '}taken: {times}")
    return f"\nRewrites of the program, each planned and compared: {'; '.join(texts)}."


def _scans_text(scans: Sequence[tuple[str, int]]) -> str:
    """A line to append about associative scans that are computed in chunks; empty if there are none."""
    texts = [f"{kind}, in {number_text(n, 'chunk')}" for kind, n in scans]
    return f"\nAssociative scans over a split dimension: {'; '.join(texts)}." if texts else ""


def _fits(seconds: float) -> str:
    return seconds_text(seconds) if math.isfinite(seconds) else "no plan that fits"


def optimality_text(gap: float | None) -> str:
    """`proved optimal`, `within 4.8% of the optimum`."""
    if gap is None:
        return "not proved optimal"
    return f"within {percent_text(gap)} of the optimum" if gap else "proved optimal"


def loops_text(jaxprs: Iterable[Jaxpr]) -> str:
    """Lines to append that say how many rounds are counted for loops of unknown length; empty if there are none."""
    once, counted = dict[str, None](), dict[str, None]()
    for eqn in (e for jaxpr in jaxprs for e in all_eqns(jaxpr)):
        if eqn.primitive.name == "while":
            n, line = compat.rounds_of(eqn), compat.source_line(eqn) or "a line of a library"
            (once if n is None else counted)[line if n is None else f"{number_text(n, 'round')} at {line}"] = None
    text = f"\nLoops of unknown length, counted as shardc.trips says: {', '.join(counted)}." if counted else ""
    if once:
        text += (
            f"\nLoops of unknown length, counted as one round in bytes and in time: {', '.join(once)}. "
            "To set the expected number of rounds, put `with shardc.trips(n):` around the loop."
        )
    return text


def time_text(time: Time) -> str:
    """One line with the parts of the time."""
    parts = [f"{seconds_text(time.compute)} computing", f"{seconds_text(time.memory)} reading and writing memory"]
    parts += [f"{seconds_text(s)} {kind}" for kind in COLLECTIVES if (s := getattr(time, kind))]
    overlap = f"; {seconds_text(time.overlapped)} of the reductions overlap with computation" if time.overlapped else ""
    return f"Time: {', '.join(parts)}{overlap}."


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
        reuses = tie is not None and plan.inputs[tie] == placement
        rows.append((path or "result", var, placement, REUSES if reuses else why_placed(pin, "chosen")))
    return _leaves(plan, "Results", rows)


def _leaves(plan: SpmdPlan, title: str, leaves: Sequence[_Row]) -> str:
    """A table with one row for each group of leaves whose paths differ only in numbers or in one word."""
    sizes, backend = plan.mesh.sizes, backend_of(plan.mesh.topology.kind)
    rows: list[tuple[Key, str, int]] = []
    total = 0
    for path, var, placement, why in leaves:
        size = piece_bytes(var.aval, placement, sizes, backend)
        total += size
        padded = "" if is_even(var.aval.shape, placement, sizes) else ", padded"
        if why != REUSES:
            rows.append(((short_aval(var.aval), placement_text(placement) + padded, why), path, size))
    head = f"{title}: {number_text(len(leaves), 'array')}, {bytes_text(total)} per device"
    if len(rows) < len(leaves):
        head += f"; {len(leaves) - len(rows)} of them {REUSES}"
    if not rows:
        return head
    table = make_table("path", "type", "placement", "why", ">bytes per device")
    for key, path, found in fold_leaves(rows):
        table.add_row(path, *map(str, key), bytes_text(sum(found)))
    return section(head, table)


def why_argument(argument: Argument, placement: Placement) -> str:
    """`pinned`, `pinned on data`, `as passed`, `chosen`."""
    if argument.pin is not None and not argument.pin.allows(placement):
        return f"as passed, pinned at {placement_text(argument.pin.placement)}"
    return why_placed(argument.pin, "as passed" if argument.arrival is not None else "chosen")


def why_placed(pin: Pin | None, otherwise: str) -> str:
    """`pinned`, `pinned on data`, or `otherwise` for a value without a pin."""
    if pin is None or pin.fixed == frozenset():
        return otherwise
    return "pinned" if pin.fixed is None else f"pinned on {', '.join(sorted(pin.fixed))}"


def moving(collectives: Sequence[Collective]) -> list[Collective]:
    """The collectives that send bytes."""
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
    return section("Moves, in program order: bytes that each device sends in one call", table)


def totals_section(collectives: Sequence[Collective]) -> str:
    """A table of bytes by axis and kind of collective."""
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
    """A table of the operations that no rule splits."""
    if not gathered:
        return section("Operations without a sharding rule: none")
    table = make_table("operation", ">times", "made by")
    for g in gathered:
        table.add_row(g.primitive, str(g.count), ", ".join(g.sources))
    return section("Replicated: no sharding rule for these operations", table)


def found_section(found: Sequence[FoundSignatures]) -> str:
    """A table of the operations without a rule that are split by automatically found signatures."""
    if not found:
        return ""
    table = make_table("operation", "justified by", "rule to paste", ">times", "made by")
    for f in found:
        table.add_row(f.primitive, f.how, f.rule, str(f.count), ", ".join(f.sources))
    names = ", ".join(f'"{name}"' for name in dict.fromkeys(f.primitive for f in found))
    title = f"Signatures found for operations without a rule; to replicate these operations: replicate=[{names}]"
    return section(title, table)


def notes_section(notes: Sequence[str]) -> str:
    """The notes of a plan, alike ones folded."""
    if not notes:
        return ""
    folded = fold_rows([((), note, None) for note in notes])
    lines = [times_text(fold_paths(alike), len(alike)) for _, alike, _ in folded]
    return "\n".join(["Notes", *(f"  {line}" for line in lines)])


def uneven_notes(plan: SpmdPlan) -> list[str]:
    """A line about open results that would be cheaper as uneven splits; empty if they cost little."""
    if (found := plan.uneven) is None:
        return []
    pins = {path: dict(p.items_) for path, p in found.pins}
    code = code_text(pins[""]) if list(pins) == [""] else f"shardc.rules({code_text(pins)})"
    return [
        f"{number_text(len(pins), 'result')} left open would be split unevenly, which a plain jax.Array is not. With "
        f"out_placements={code} a call takes {seconds_text(found.seconds)} instead of {seconds_text(plan.seconds)}, "
        f"sends {bytes_text(found.bytes)} instead of {bytes_text(plan.bytes_per_device)}, and gives a "
        "shardc.PlacedArray there."
    ]


NAMED: Final = 6
"""The most source lines of recomputed values that are listed."""


def memory_decided(free: Unlimited | None, seconds: float) -> str:
    """A line about the plan without a memory limit, if it is another one.

    Args:
      free: the plan without the limit, if it is another one.
      seconds: time of a call of this plan.
    """
    if free is None:
        return ""
    slower = ". That is slower than this plan: the search does not model communication that overlaps with computation"
    return (
        f"\n  Memory decided: without the limit the search picks a plan of about {seconds_text(free.seconds)} and "
        f"{bytes_text(free.peak)}{slower * (free.seconds > seconds)}"
    )


def _values(found: Recomputed) -> str:
    return (
        f"{number_text(found.count, 'value')}, {bytes_text(found.bytes)}, of {', '.join(found.sources[:NAMED])}"
        f"{f' and {len(found.sources) - NAMED} more lines' * (len(found.sources) > NAMED)}"
    )


def _memory(plan: SpmdPlan) -> str:
    memory, hbm = plan.memory, plan.mesh.topology.hbm
    decided = memory_decided(plan.unlimited, plan.seconds)
    if (found := plan.recomputed) is not None:
        decided += f"\n  Recomputed to save memory, in {seconds_text(found.seconds)}: {_values(found)}"
    if plan.cheaper is not None:
        decided += f"\n  Recomputed because keeping them takes longer: {_values(plan.cheaper)}"
    return (
        f"Memory: at most {bytes_text(memory.peak)} on each device, {percent_text(memory.peak / hbm)} of its "
        f"{bytes_text(hbm)}\n"
        f"  {bytes_text(memory.arguments)} arguments, {bytes_text(memory.temporaries)} other values at the peak; "
        f"{bytes_text(memory.results)} results"
        f"{decided}"
    )
