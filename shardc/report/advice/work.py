"""The words for what devices compute: work that no rule splits, that is repeated, computed again or padded."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from shardc.machine.topology import Topology
from shardc.pipeline.plan import PlanView
from shardc.plan.plan import SpmdPlan
from shardc.report.advice.cost import SMALL, Change, Words
from shardc.report.advice.elsewhere import Asked
from shardc.report.advice.moves import NAMED, at_text, names_text, sent_text
from shardc.report.advice.pieces import TimePiece, UnevenCut, seconds_of
from shardc.report.tables import seconds_text


def _operations(pieces: Sequence[TimePiece]) -> str:
    """`dot_general at model.py:12 (loss), 1.20 ms`: the dearest operations."""
    found: dict[str, list[float]] = defaultdict(list)
    for p in pieces:
        found[at_text(str(p.name) if p.name.is_copy else p.name.word, p.name.line)].append(p.seconds)
    dearest = sorted(((math.fsum(each), name) for name, each in found.items()), key=lambda item: -item[0])
    named = [(seconds, name) for seconds, name in dearest[:NAMED] if seconds > SMALL * seconds_of(pieces)]
    texts = [f"{name}, {seconds_text(seconds)}" for seconds, name in named]
    return "; ".join(texts) + f"; {len(found) - len(named)} more" * (len(found) > len(named))


def of_unsplit(asked: Asked, pieces: Sequence[TimePiece]) -> Words:
    plan = asked.plan
    moving, work = ([p for p in pieces if bool(p.moves) is moves] for moves in (True, False))
    name, devices = pieces[0].of[0], max(p.devices for p in pieces)
    ruleless = any(g.primitive == name for g in plan.gathered)
    why = "It has no sharding rule" if ruleless else "No rule splits it here"
    why += f", so its operands are gathered: {sent_text(moving)}." if moving else "."
    lines = names_text(p.name.line for p in work or pieces)
    what = f"{name} at {lines}, all of which each of {devices} devices computes"
    saved = seconds_of(moving) + seconds_of(work) * (1 - 1 / devices)
    rule = f"A rule{', declared with shardc.signature,' * ruleless} that splits it over all devices"
    return Words(what, why, (Change(rule, saved, "at most"),))


def of_repeated(asked: Asked, pieces: Sequence[TimePiece]) -> Words:
    axes = ", ".join(pieces[0].of)
    saved = math.fsum(p.seconds * (1 - 1 / p.devices) for p in pieces)
    split = Change(f"Placements that split it over {axes}, if nothing moves for them", saved, "at most")
    what = f"work that the {pieces[0].devices} devices along {axes} repeat: {_operations(pieces)}"
    return Words(what, f"No operand of it is split over {axes}.", (split,))


def of_recomputed(asked: Asked, pieces: Sequence[TimePiece]) -> Words:
    plan = asked.plan
    found = plan.recomputed if isinstance(plan, SpmdPlan) else None
    if found is not None:
        why = "The plan recomputes values to fit into memory."
    else:
        why = "jax.checkpoint asks for it, or it is faster than reading what was kept."
    kept = Change("All of it kept in memory", seconds_of(pieces), "at most", found.bytes if found is not None else 0)
    return Words(f"computing again what was computed before: {_operations(pieces)}", why, (kept,))


def of_computing(asked: Asked, pieces: Sequence[TimePiece]) -> Words:
    plan = asked.plan
    changes = [*_without_padding(pieces), *_narrower(plan.mesh.topology, pieces)]
    return _shared(plan, pieces, "computing", changes)


def of_memory(asked: Asked, pieces: Sequence[TimePiece]) -> Words:
    plan = asked.plan
    wide = seconds_of(p for p in pieces if p.value.startswith("f32"))
    narrow = [Change("Float32 values in bfloat16", wide / 2, "at most")] * bool(wide)
    return _shared(plan, pieces, "reading and writing memory", [*_without_padding(pieces), *narrow])


def _shared(plan: PlanView, pieces: Sequence[TimePiece], what: str, changes: Sequence[Change]) -> Words:
    """The words for work of which each device has its part."""
    seconds = seconds_of(pieces)
    if not any(c.is_worth_a_line(seconds) for c in changes):
        changes = [Change("Twice as many devices that share it", seconds / 2, "at most")]
    repeated = ", which no device repeats" * (plan.mesh.size > 1)
    return Words(f"{what}{repeated}: {_operations(pieces)}", "", tuple(changes))


def _without_padding(pieces: Sequence[TimePiece]) -> Iterator[Change]:
    """The dimension whose padding takes most, without it."""
    wasted: dict[UnevenCut, float] = defaultdict(float)
    for p in pieces:
        if p.cut is not None:
            wasted[p.cut] += p.seconds * p.cut.padding
    if wasted:
        cut = max(wasted, key=wasted.__getitem__)
        into = f"{', '.join(cut.axes)} cuts into {cut.devices} pieces of {cut.most // cut.devices}"
        what = f"No padding in the dimension of {cut.size} that {into} ({cut.most} takes as long)"
        yield Change(what, wasted[cut], "at most")


def _narrower(machine: Topology, pieces: Sequence[TimePiece]) -> Iterator[Change]:
    """Products in bfloat16, where that is faster."""
    wide = [p for p in pieces if p.dtype in ("float32", "float64")]
    fast = machine.flops_in("bfloat16")
    saved = math.fsum(p.computes * (1 - machine.flops_in(p.dtype) / fast) for p in wide)
    if saved > 0:
        yield Change("Products in bfloat16 (docs/mixed-precision.md)", saved, "at most")
