"""`plan.explain(why=...)` and `plan.explain(pins=True)`: alternatives to a plan, and what they would cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardc import compat
from shardc.ir.collective import known_bytes
from shardc.ir.walk import itemsize_of, short_aval
from shardc.machine.mesh import MeshView
from shardc.passes.place.problem import Node
from shardc.plan.counterfactual import Counterfactual, Other
from shardc.plan.names import Box, Use, ValueName
from shardc.plan.plan import SpmdPlan
from shardc.report.explain import proof_text
from shardc.report.find_values import Named, find_values, values_of
from shardc.report.tables import (
    Section,
    bytes_text,
    fold_paths,
    fold_rows,
    number_text,
    placement_text,
    seconds_text,
    signed_text,
    times_text,
)
from shardc.sbp.boxing import find_boxing
from shardc.sbp.placement import AUTO, Pin
from shardc.sbp.sub_axes import in_whole_axes

TRIED = 3
"""The most values that are explained, and the other placements of each that are searched for."""
LISTED = 20
"""The most further values that are listed."""


def why_sections(parts: Sequence[Counterfactual], pattern: str, titles: Sequence[str] = ()) -> list[Section]:
    """Why values have their placements: who makes and reads them, and what other placements would cost.

    Args:
      parts: the problem of each part of the plan. Alternatives are solved for each part alone.
      pattern: the name of a value.
      titles: of the parts; not given: they are the stages of a pipeline, or the whole program.

    Raises:
      ArgumentError: no value of any part has the name.
    """
    part_of = {v: number for number, asked in enumerate(parts) for v in _values(asked)}
    matches: dict[int, list[Named]] = {}
    for value in find_values(list(part_of), pattern):
        matches.setdefault(part_of[value], []).append(value)
    if not titles and len(parts) > 1:
        titles = list(map(stage_title, range(len(parts))))
    sections: list[Section] = []
    for number, found in matches.items():
        sections += [Section(titles[number])] if titles else []
        sections += _explained(parts[number], found, pattern)
        if parts[number].plan.unlimited is not None:
            text = "Memory decided this plan. The alternatives are solved without the limit and may not fit."
            sections.append(Section(text))
    return sections


def stage_title(number: int) -> str:
    return f"Stage {number}: time and bytes of its own tasks in one call, without transfers between stages"


def _values(asked: Counterfactual) -> list[Named]:
    return values_of(asked.plan.program, asked.problem, asked.plan.all_on_device)


def _explained(asked: Counterfactual, found: Sequence[Named], pattern: str) -> Iterator[Section]:
    rows = [((v.name.kind, short_aval(v.aval), str(v.placement)), f"{v.name} at {v.name.line}", v) for v in found]
    groups = [alike for _, _, alike in fold_rows(rows)]
    groups.sort(key=lambda alike: -sum(_seconds(asked.plan, v) for v in alike))  # the longest boxings first
    for alike in groups[:TRIED]:
        yield from _why(asked, alike)
    if len(groups) > TRIED:
        yield _listed(groups[TRIED:], pattern, asked.plan.mesh)


def _listed(groups: Sequence[Sequence[Named]], pattern: str, mesh: MeshView) -> Section:
    rows: list[Sequence[str]] = []
    for alike in groups[:LISTED]:
        first = alike[0]
        name = times_text(fold_paths([str(v.name) for v in alike]), len(alike))
        at = placement_text(first.placement, mesh)
        rows.append((name, short_aval(first.aval), at, first.name.line or "argument"))
    more = f", of which the first {LISTED}" if len(groups) > LISTED else ""
    title = f"{pattern!r} also matches {number_text(len(groups), 'other value')}{more}; name one of them to explain it"
    return Section(title, ("value", "type", "placement", "made by"), rows)


def _why(asked: Counterfactual, alike: Sequence[Named]) -> Iterator[Section]:
    value, plan = alike[0], asked.plan
    more = f" and {len(alike) - 1} more like it" if len(alike) > 1 else ""
    made = f", made at {value.name.line}" if value.name.line else ""
    head = f"{value.name}{more}: {short_aval(value.aval)} at {placement_text(value.placement, plan.mesh)}{made}"
    others = sorted(asked.others(value.node, value.port, TRIED), key=_rank)
    yield Section(head, lines=[_verdict(asked, value, others)])
    for title, uses in (("computed from", value.made_of), ("read by", value.uses)):
        if uses:
            yield _ways(plan, title, uses, is_read=uses is value.uses)
    if others:
        which = f"the first one, {value.name}" if len(alike) > 1 else "it"
        yield Section(
            f"The best plans with another placement of {which}, compared with this plan",
            ("placement", ">time", ">sent", ">peak memory", ">arguments changed"),
            [(placement_text(other.placement, plan.mesh), *_differences(plan, other.plan)) for other in others],
            depth=1,
        )


def _rank(other: Other) -> tuple[float, int, int, str]:
    """The sort key of alternatives: time to six digits, then bytes, then text, so that ties have a fixed order."""
    plan = other.plan
    return float(f"{plan.seconds:.6g}"), known_bytes(plan.collectives), plan.memory.peak, str(other.placement)


def _verdict(asked: Counterfactual, value: Named, others: Sequence[Other]) -> str:
    """One sentence with the reason of a value's placement."""
    plan, pin = asked.plan, asked.pins.get(value.node)
    here = placement_text(value.placement, plan.mesh)
    uneven = dict(plan.uneven.pins) if plan.uneven and value.name.kind == "result" else {}
    if (split := uneven.get(value.name.word)) is not None:
        there = placement_text(split)
        return f"{here} is the cheapest for a plain jax.Array. Pinned at {there}, an uneven split, it is cheaper."
    if not others:
        return f"No other placement is possible{'' if pin is None else ', so the pin costs nothing'}."
    best = others[0]
    gains = faster(best.plan, plan)
    there = placement_text(best.placement, plan.mesh)
    if pin is None or pin.fixed == frozenset():
        if gains:
            return f"{there} {_costs(plan, best.plan)}: better than this plan, of which {proof_text(plan)}."
        return f"No cheaper placement was found: the next best, {there}, {_costs(plan, best.plan)}."
    by_user = is_from_user(value.node, pin)
    how = f"It is pinned by {source_of(value.node, pin)}" if by_user else "The argument is passed with this placement"
    if gains:
        return f"{how}. If it were AUTO, the best placement found is {there}, which {_costs(plan, best.plan)}."
    return f"{how}. This costs nothing: no better placement was found; {there} {_costs(plan, best.plan)}."


def is_from_user(node: Node, pin: Pin) -> bool:
    """Whether a pin is the user's: not the placement of a passed array, nor a pin that planning of a stage adds."""
    constrained = node.kind == "carrier" and node.path == "constrain"
    return pin.fixed != frozenset() and (bool(pin.said) or constrained)


def source_of(node: Node, pin: Pin) -> str:
    return pin.said or f"shardc.constrain at {compat.source_line(node.equation)}"


def faster(a: SpmdPlan, b: SpmdPlan) -> bool:
    """Whether plan `a` is faster than plan `b` by more than rounding."""
    return a.seconds < b.seconds * (1 - 1e-9)


def pin_text(pin: Pin, mesh: MeshView) -> str:
    """`{data: S(0)}`; with `, ...: AUTO` if axes are left open."""
    if pin.fixed is None:
        return placement_text(pin.placement, mesh)
    at, fixed = in_whole_axes(pin.placement, mesh), mesh.whole_names(sorted(pin.fixed))
    return "{" + ", ".join([*(f"{a}: {at[a]}" for a in fixed), f"...: {AUTO}"]) + "}"


def _costs(plan: SpmdPlan, other: SpmdPlan) -> str:
    """`would take 1.2 us longer and send 512 bytes more`."""
    seconds, sent = other.seconds - plan.seconds, _more_bytes(plan, other)
    times = f"would take {seconds_text(abs(seconds))} {'longer' if seconds > 0 else 'less'}"
    if seconds_text(abs(seconds)) == "0 s":
        times = "would take as long"
    if not sent:
        return f"{times} and send as much"
    return f"{times} and send {bytes_text(abs(sent))} {'more' if sent > 0 else 'less'}"


def _more_bytes(plan: SpmdPlan, other: SpmdPlan) -> int:
    """Bytes that another plan sends more; what is unknown is so in both."""
    return known_bytes(other.collectives) - known_bytes(plan.collectives)


def _ways(plan: SpmdPlan, title: str, uses: Sequence[Use], *, is_read: bool) -> Section:
    """A table of a value's operands or readers, with the boxings between. A boxing that readers share counts once."""
    rows: list[Sequence[str]] = []
    named = [(u.reader if is_read else u.value, u) for u in uses]
    mesh = plan.mesh
    keyed = [((n.line, placement_text(u.at, mesh), _way_text(u.way, mesh)), str(n), u) for n, u in named]
    seen: set[tuple[ValueName | None, tuple[Box, ...]]] = set()
    for (line, at, way), names, found in fold_rows(keyed):
        steps = {(None if is_read else u.value, u.way[: k + 1]): u for u in found for k in range(len(u.way))}
        costs = [_sent(plan, u, prefix[-1]) for (name, prefix), u in steps.items() if (name, prefix) not in seen]
        seen |= set(steps)
        sent, seconds = sum(c[0] for c in costs), sum(c[1] for c in costs)
        paid = (bytes_text(sent), seconds_text(seconds)) if costs else ("as above" if way else "", "")
        rows.append((times_text(fold_paths(names), len(names)), str(line), str(at), str(way), *paid))
    return Section("", (title, "line", "at", "boxing", ">bytes", ">time"), rows)


def _way_text(way: Sequence[Box], mesh: MeshView) -> str:
    return ", then ".join(f"{placement_text(b.src, mesh)} -> {placement_text(b.dst, mesh)}" for b in way)


def _sent(plan: SpmdPlan, use: Use, box: Box) -> tuple[int, float]:
    """Bytes that a device sends in one call for a boxing on the way to a reader, and its seconds."""
    view = plan.mesh.where_start_is_shared(box.shared)
    boxing = find_boxing(tuple(use.aval.shape), itemsize_of(use.aval), box.src, box.dst, view)
    return boxing.bytes * box.times, boxing.seconds * box.times


def _seconds(plan: SpmdPlan, value: Named) -> float:
    """Seconds of all boxings before and after a value."""
    steps = {(u.at, box): u for u in (*value.made_of, *value.uses) for box in u.way}
    return sum(_sent(plan, u, box)[1] for (_, box), u in steps.items())


def _differences(plan: SpmdPlan, other: SpmdPlan) -> tuple[str, str, str, str]:
    """Another plan minus this one: time, bytes sent, peak memory, and the number of arguments placed differently."""
    changed = sum(a != b for a, b in zip(plan.whole_inputs, other.whole_inputs, strict=True))
    return (
        signed_text(other.seconds - plan.seconds, seconds_text),
        signed_text(_more_bytes(plan, other), bytes_text),
        signed_text(other.memory.peak - plan.memory.peak, bytes_text),
        str(changed),
    )


def pins_sections(parts: Sequence[Counterfactual]) -> list[Section]:
    """For each part of a plan a table of the user's pins with the cost of each, compared with AUTO."""
    return [_pins(asked, f"Stage {k}. " if len(parts) > 1 else "") for k, asked in enumerate(parts)]


def _pins(asked: Counterfactual, which: str) -> Section:
    plan = asked.plan
    by_user = [((), source_of(n, pin), n) for n, pin in asked.pins.items() if is_from_user(n, pin)]
    if not by_user:
        return Section(f"{which}Pins: none")
    rows: list[Sequence[str]] = []
    for _, names, nodes in fold_rows(by_user):
        at = ", ".join(dict.fromkeys(pin_text(asked.pins[n], plan.mesh) for n in nodes))
        other = asked.without(nodes)
        gains = faster(other.plan, plan)
        costs = _differences(other.plan, plan)[:3] if gains else ("nothing", "", "")
        places = list(dict.fromkeys(placement_text(p, plan.mesh) for p in other.placements)) if gains else ["as pinned"]
        rows.append((fold_paths(names), at, str(len(nodes)), *costs, ", ".join(places)))
    return Section(
        f"{which}Pins: cost of each per call, compared with AUTO for its values while the other pins are kept",
        ("pinned by", "at", ">values", ">time", ">sent", ">peak memory", "with AUTO"),
        rows,
    )
