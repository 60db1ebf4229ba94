"""`plan.explain()`: a plan as sections for people. Their text does not depend on the terminal."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from shardc import compat
from shardc.ir.collective import Collective, known_bytes, unknown_among
from shardc.ir.walk import all_eqns, short_aval
from shardc.machine.overlaps import options_text
from shardc.passes.estimate.attention import Attention, find_attention
from shardc.passes.estimate.overlap import Overlap
from shardc.passes.estimate.plan_cost import HostMove, Time
from shardc.passes.recompute.recompute import Recomputed
from shardc.pipeline.plan import MpmdPlan, PlanView
from shardc.plan.borders import Border
from shardc.plan.plan import SpmdPlan
from shardc.report.advice.advice import Advice, advice_on
from shardc.report.explain_pipeline import OwnSections, about_text, narrowed, pipeline_sections, uncounted
from shardc.report.plan_warnings import slow_axis_notes, uneven_notes
from shardc.report.stage_text import ranges_text
from shardc.report.tables import (
    MOST,
    Key,
    Section,
    bytes_text,
    devices_text,
    fold_leaves,
    fold_paths,
    fold_rows,
    number_text,
    percent_text,
    placement_text,
    report_text,
    seconds_text,
    times_text,
)
from shardc.sbp.cost import COLLECTIVES

WORDS = (
    "S(i): split along dimension i; B: every device holds all of it; P(op): partial, the sum, max or min of what the "
    "devices hold; axes that are not named: B."
)


BOUND: Final = (
    "The bound is one of the seconds of a call. Where collectives overlap with computing it is loose: the computing "
    "alone, or half of the sum of both."
)


def compared_text(plan: SpmdPlan) -> str:
    """Whether a plan that the search looked at takes fewer seconds: `2 other plans were timed, none is faster`."""
    others = {"a rewrite": [t.seconds for t in plan.trials] + [t.before for t in plan.trials]}
    if plan.unlimited is not None:
        others["that without the memory limit"] = [plan.unlimited.seconds]
    if plan.uneven is not None:
        others["that with uneven results"] = [plan.uneven.seconds]
    differ = {
        name: {s for s in each if math.isfinite(s) and not math.isclose(s, plan.seconds)}
        for name, each in others.items()
    }
    if not (count := sum(map(len, differ.values()))):
        return "no other plan was timed"
    seconds, name = min((s, name) for name, each in differ.items() for s in each)
    timed = f"{number_text(count, 'other plan')} {'was' if count == 1 else 'were'} timed"
    if seconds > plan.seconds:
        return f"{timed}, none is faster"
    return f"{timed}, {name} takes fewer seconds: {seconds_text(seconds)}"


def explain(plan: PlanView) -> str:
    """The text of a plan: where each value lives, which collectives run, why, their bytes, and their source lines."""
    return report_text(sections_of(plan))


def summary_of(plan: PlanView) -> list[Section | None]:
    """The sections with the figures of a plan of any kind: what a call takes, what is sent, memory."""
    own, advice = _own_sections(plan), advice_on(plan)
    return [_head(plan, own), advice and advice.section, totals(plan), _memory(plan, own)]


def _own_sections(plan: PlanView, width: int | None = None) -> OwnSections:
    return pipeline_sections(plan, width) if isinstance(plan, MpmdPlan) else _program_sections(plan)


def sections_of(plan: PlanView, width: int | None = None, advice: Advice | None = None) -> list[Section]:
    """The sections of a plan of any kind, in their order.

    Args:
      plan: of any kind.
      width: that of what is drawn.
      advice: on its costs, if somebody has it already.
    """
    own, advice = _own_sections(plan, width), advice or advice_on(plan)
    staged = isinstance(plan, MpmdPlan)
    found = [
        _head(plan, own), advice and advice.section, Section("\n".join([WORDS, *_cost_words(plan)])), *own.stages,
        _borders("Arguments", "uses" * staged, plan.in_borders),
        _borders("Results", "makes" * staged, plan.out_borders),
        *own.transfers, _moves(plan), totals(plan), _overlaps(plan), _host_memory(plan), *own.channels,
        _attention(plan), _gathered(plan), _found(plan), _notes(plan), _memory(plan, own),
    ]  # fmt: skip
    return [s for s in found if s is not None]


def _cost_words(plan: PlanView) -> list[str]:
    """The words of a plan of one program alone: its sub-axes, and its proof."""
    if isinstance(plan, MpmdPlan):
        return []
    text = compared_text(plan)
    return [*_cut_words(plan), f"{BOUND} {text[0].upper()}{text[1:]}."]


def _cut_words(plan: SpmdPlan) -> Iterator[str]:
    """A line about axes that are cut in sub-axes."""
    sizes = plan.mesh.sizes
    cuts = [f"{axis} is {' x '.join(f'{a}={sizes[a]}' for a in names)}" for axis, names in plan.mesh.cuts]
    if cuts:
        yield f"Axes in parts (sub-axes), the outermost first: {'; '.join(cuts)}; an axis stands for all its parts."


# -- head


def _head(plan: PlanView, own: OwnSections) -> Section:
    axes = " | ".join(" x ".join(f"{a}={n}" for a, n in mesh.whole_axes) for mesh in own.meshes)
    first = f"{plan.program.name} on {axes}: {devices_text(plan.mesh.topology, sum(m.size for m in own.meshes))}"
    return Section("\n".join([first, *own.head, *_loops(plan), *own.rewrites, *_scans(plan)]))


def _loops(plan: PlanView) -> Iterator[str]:
    """Lines that say how many rounds are counted for loops of unknown length."""
    once, counted = dict[str, None](), dict[str, None]()
    for eqn in (e for _, part in plan.parts for e in all_eqns(part.boxed.jaxpr)):
        if eqn.primitive.name == "while":
            n, line = compat.rounds_of(eqn), compat.source_line(eqn) or "a line of a library"
            (once if n is None else counted)[line if n is None else f"{number_text(n, 'round')} at {line}"] = None
    if counted:
        yield f"Loops of unknown length, counted as shardc.trips says: {', '.join(counted)}."
    if once:
        yield (
            f"Loops of unknown length, counted as one round in bytes and in time: {', '.join(once)}. "
            "To set the expected number of rounds, put `with shardc.trips(n):` around the loop."
        )


def _scans(plan: PlanView) -> Iterator[str]:
    """A line about associative scans that are computed in chunks."""
    if plan.program.scans:
        texts = [f"{kind}, in {number_text(n, 'chunk')}" for kind, n in plan.program.scans]
        yield f"Associative scans over a split dimension: {'; '.join(texts)}."


# -- one program


def _program_sections(plan: SpmdPlan) -> OwnSections:
    """The parts of the report that only a plan of one program has."""
    head = f"{_sent_text(plan)}; {about_text(plan)} {seconds_text(plan.seconds)}; {proof_text(plan)}."
    memory, hbm = plan.memory, plan.mesh.topology.hbm
    fullest = Section(
        f"Memory: at most {bytes_text(memory.peak)} on each device, {percent_text(memory.peak / hbm)} of its "
        f"{bytes_text(hbm)}",
        lines=[
            f"{bytes_text(memory.arguments)} arguments, {bytes_text(memory.temporaries)} other values at the peak; "
            f"{bytes_text(memory.results)} results"
        ],
    )
    lines = [head, *_time(plan.time), *uncounted(plan.mesh.topology), *narrowed(plan)]
    return OwnSections((plan.mesh,), lines, fullest, rewrites=[*_rewrites(plan)], recomputed=[*_recomputed(plan)])


def _sent_text(plan: SpmdPlan) -> str:
    """The bytes that each device sends in a call, and the operations that may send more."""
    known = [c for _, c in plan.moves if c.is_known and c.branch != "other"]
    unknown = unknown_among(c for _, c in plan.moves)
    runs = sum(c.count for c in known)
    times = f", which run {runs} times" if runs != len(known) else ""
    most = "at most " * any(c.at_most for c in known)
    sent = f"{most}{bytes_text(known_bytes(known))} a call in {number_text(len(known), 'collective')}{times}"
    if any(c.branch for _, c in plan.moves) and not unknown:
        other = [c for _, c in plan.moves if c.branch != "expected"]
        most = f"{bytes_text(plan.worst_bytes_per_device)} in {number_text(len(other), 'collective')}"
        return f"Each device sends {sent} if sorted rows fit their exchange, else {most}"
    if unknown:
        besides = f"Each device sends {sent}, and" if known else "Each device sends"
        return f"{besides} an unknown number of bytes in {', '.join(unknown)}, of which shardc does not know what moves"
    return f"Each device sends {sent}" if known else "Nothing moves between devices"


def proof_text(plan: PlanView) -> str:
    """The proof of a plan."""
    unknown = about_text(plan) == "at least"
    return optimality_text(plan.gap) + " but for what is unknown" * unknown


def optimality_text(gap: float | None) -> str:
    """How far the seconds of a plan are from the least: `proved optimal`, `within 4.8% of the optimum`."""
    if gap is None:
        return "without a bound"
    return f"within {percent_text(gap)} of the optimum" if gap else "proved optimal"


def _time(time: Time) -> Iterator[str]:
    """A line for each part of the time, and one for what overlaps."""
    again = f", {seconds_text(time.recompute)} of it to recompute" if time.recompute else ""
    parts = {"compute": f"computing{again}", "memory": "reading and writing memory", **{k: k for k in COLLECTIVES}}
    parts |= {"launch": "launching", "wait": "waiting", "host": "moving to and from host memory"}
    yield "Time:" if time.total else "Time: 0 s"
    for part, name in parts.items():
        if seconds := getattr(time, part):
            yield f"  {seconds_text(seconds)} {name}"
    if time.overlapped:
        rest = time.overlapped - time.overlapped_reductions - time.overlapped_rings
        kinds = {"gathers": rest, "reductions": time.overlapped_reductions, "rings": time.overlapped_rings}
        texts = [f"{seconds_text(s)} of {name}" for name, s in kinds.items() if s > 1e-9 * time.overlapped]
        yield f"  less {', '.join(texts)} that overlap with computation"


def _rewrites(plan: SpmdPlan) -> Iterator[str]:
    """A line that names the rewrites that were planned."""
    texts: list[str] = []
    for name, group in itertools.groupby(plan.trials, lambda t: t.name):
        tried = list(group)
        taken = next((t for t in reversed(tried) if t.taken), None)
        best = taken or min(tried, key=lambda t: t.seconds)
        now, then = _fits(best.seconds), _fits(best.before)
        times = f"{now} instead of {then}" if now != then else "it takes as long"
        room = f" for imbalance={plan.request.imbalance:g}" * (name == "exchange_rows")
        texts.append(f"{name}{room} {'' if taken else 'not '}taken: {times}")
    if texts:
        yield f"Rewrites of the program, each planned and compared: {'; '.join(texts)}."


def _fits(seconds: float) -> str:
    return seconds_text(seconds) if math.isfinite(seconds) else "no plan that fits"


# -- arguments and results


def _borders(title: str, verb: str, borders: Sequence[Border]) -> Section:
    """A table with one row for each group of arguments or results whose paths differ only in numbers or in one word.

    Args:
      title: what they are.
      verb: of a pipeline, what the stage does with each: "uses".
      borders: the arguments, or results.
    """
    rows: list[tuple[Key, str, Border]] = []
    for b in borders:
        if not b.reuses:
            placement = placement_text(b.placement) + ", padded" * b.is_padded + ", on the host" * b.on_host
            rows.append(((short_aval(b.aval), placement, why_placed(b)), b.path or "result", b))
    head = f"{title}: {number_text(len(borders), 'array')}, "
    on_device, on_host = (sum(b.bytes for b in borders if b.on_host is where) for where in (False, True))
    head += f"each on the stage that {verb} it" if verb else f"{bytes_text(on_device)} per device"
    head += f" and {bytes_text(on_host)} on the host" * bool(on_host)
    if len(rows) < len(borders):
        head += f"; {len(borders) - len(rows)} of them reuse the buffers and placements of donated arguments"
    if verb and rows:
        head += "; bytes of the stage that holds most of them"
    columns = ("path", "type", "placement", "why", *["stages"] * bool(verb), ">bytes per device")
    cells = [
        (path, *map(str, key), *[_stages(found)] * bool(verb), bytes_text(_most_bytes(found)))
        for key, path, found in fold_leaves(rows, _stages)
    ]
    return Section(head, columns, cells)


def _stages(borders: Iterable[Border]) -> str:
    return ranges_text(b.stage for b in borders)


def _most_bytes(borders: Sequence[Border]) -> int:
    """Bytes on a device of the stage that holds most of them."""
    return max(sum(b.bytes for b in borders if b.stage == stage) for stage in {b.stage for b in borders})


def why_placed(border: Border) -> str:
    """`pinned`, `pinned on data`, `as passed`, `chosen`."""
    pin, arrival = border.known.pin, border.known.arrival
    if pin is not None and not pin.allows(border.placement):
        return f"as passed, pinned at {placement_text(pin.placement)}"
    if pin is None or pin.fixed == frozenset():
        return "chosen" if arrival is None else "as passed"
    return "pinned" if pin.fixed is None else f"pinned on {', '.join(sorted(pin.fixed))}"


# -- what moves


_WHEN: Final = {"": "", "expected": "rows fit", "other": "not"}
"""When a collective runs, by its branch: only exchanges of sorted rows have expected branches."""


def _moves(plan: PlanView) -> Section:
    """A table of the collectives. Stages with equal ones share a row."""
    staged = isinstance(plan, MpmdPlan)
    title = "Moves within stages" if staged else "Moves"
    if not plan.moves:
        return Section(f"{title}: none")

    def key_of(c: Collective) -> Key:
        ends = placement_text(c.src), placement_text(c.dst)
        return c.kind, ", ".join(c.axes), c.value, *ends, c.one_round, c.at_most, c.branch

    rows: list[Sequence[str]] = []
    branches = any(c.branch for _, c in plan.moves)
    folded = fold_rows((key_of(c), c.source, (stage, c)) for stage, c in plan.moves)
    for (*key, one_round, at_most, branch), _, found in folded:
        of_stage: dict[int, list[Collective]] = {}
        for number, c in found:
            of_stage.setdefault(number, []).append(c)
        alike: dict[tuple[int, float], list[int]] = {}
        for number, cs in of_stage.items():
            alike.setdefault((sum(c.count for c in cs), sum(c.bytes for c in cs)), []).append(number)
        for (count, size), numbers in alike.items():
            made = fold_paths([c.source for number in numbers for c in of_stage[number]])
            times = str(count) + " a round" * bool(one_round)
            sent = "at most " * bool(at_most) + bytes_text(size)
            ends = [times, sent, *[_WHEN[str(branch)]] * branches, made]
            rows.append((*[ranges_text(numbers)] * staged, *map(str, key), *ends))
    when = ["if"] * branches
    columns = (*["stages"] * staged, "collective", "over", "value", "from", "to", ">times", ">bytes", *when, "made by")
    which = ": bytes that each device of one stage" if staged else ", in program order: bytes that each device"
    most = f"{plan.request.imbalance:g} times the mean (imbalance=), and what chance adds"
    room = f"Rows fit: no device gets more than {most}."
    return Section(f"{title}{which} sends in one call", columns, rows, [room] * branches)


def totals(plan: PlanView) -> Section | None:
    """A table of bytes by axis and kind of collective."""
    totals: dict[tuple[str, str], list[Collective]] = {}
    for _, c in plan.moves:
        if c.branch != "other":
            totals.setdefault((", ".join(c.axes), c.kind), []).append(c)
    if not totals:
        return None
    whole = known_bytes(c for _, c in plan.moves) or 1
    sums = [(*key, sum(c.count for c in found), sum(c.bytes for c in found)) for key, found in totals.items()]
    rows = [
        (axes, kind, str(count), bytes_text(size), "" if math.isnan(size) else percent_text(size / whole))
        for axes, kind, count, size in sorted(sums, key=lambda row: -math.inf if math.isnan(row[-1]) else -row[-1])
    ]
    title = "Totals by axis and kind" + ", one device of each stage added up" * isinstance(plan, MpmdPlan)
    return Section(title, ("over", "collective", ">times", ">bytes", ">share"), rows)


def _overlaps(plan: PlanView) -> Section | None:
    """A table of the collectives that are counted as hidden, the largest ones."""
    staged = isinstance(plan, MpmdPlan)
    listed = [(number, o) for number, part in plan.parts for o in part.overlaps]
    hidden, machine = sum(o.hidden for _, o in listed), plan.mesh.topology
    if not hidden:
        return None
    kinds = dict.fromkeys(o.kind for _, o in listed)
    shares = ", ".join(f"{percent_text(machine.overlap(kind))} of {kind}" for kind in kinds)
    head = f"Hidden beside computation: {seconds_text(hidden)} of {seconds_text(sum(o.seconds for _, o in listed))}"
    head += " in the stages' calls" if staged else ""
    lines = [f"{head}. Of what could be hidden XLA hides {shares} on {machine.kind} (docs/accelerators.md)."]
    for options in {options_text(o): o for _, part in plan.parts if (o := part.xla_options)}:
        lines.append(f"XLA is given {options}")
    alike: dict[Sequence[str], list[Overlap]] = {}
    for number, o in listed:
        key = (*[str(number)] * staged, o.kind, ", ".join(o.axes), o.value, o.source, o.beside)
        alike.setdefault(key, []).append(o)
    largest = sorted(alike.items(), key=lambda row: -sum(o.hidden for o in row[1]))
    rows = [
        (*key, str(len(found)), bytes_text(sum(o.bytes for o in found)),
         *(seconds_text(sum(s)) for s in ([o.seconds for o in found], [o.hidden for o in found])))
        for key, found in largest[:_OVERLAPS]
    ]  # fmt: skip
    if len(largest) > _OVERLAPS:
        lines.append(f"The largest {_OVERLAPS} of {len(largest)} rows:")
    columns = (
        *["stage"] * staged,
        "collective",
        "over",
        "value",
        "made by",
        "beside",
        ">of them",
        ">bytes",
        ">take",
        ">hidden",
    )
    return Section("\n".join(lines), columns, rows)


_OVERLAPS: Final = 5
"""Hidden collectives that the text lists."""


def _host_memory(plan: PlanView) -> Section | None:
    """A table of what lives on the host, and what moving it costs."""
    if not isinstance(plan, SpmdPlan) or plan.offloaded is None:
        return None
    values: dict[tuple[str, str], list[HostMove]] = {}
    for move in plan.host_moves:
        values.setdefault((move.source, move.value), []).append(move)
    cells: list[Sequence[str]] = []
    for (value,), source, found in fold_leaves(((value,), source, ms) for (source, value), ms in values.items()):
        moves = [m for ms in found for m in ms]
        to = (sum(m.bytes for m in moves if m.to == where) for where in ("device", "host"))
        cells.append((source, str(value), str(sum(m.count for m in moves)), *map(bytes_text, to)))
    held = f"{bytes_text(plan.memory.host)} for each device, {plan.offloaded.why}"
    moved = f"about {seconds_text(plan.time.host)} of moves a call, which are taken to overlap with nothing"
    same = "; fake CPU devices share it, so that nothing is saved" * (plan.mesh.topology.kind == "cpu")
    columns = ("what lives there", "type", ">moves", ">bytes to the device", ">to the host")
    return Section(f"Host memory: {held}; {moved}{same}", columns, cells)


# -- what was found, and notes


def _attention(plan: PlanView) -> Section | None:
    """A table of the attention of a program for a TPU or GPU: which of it has its scores in memory."""
    backend = plan.mesh.topology.backend
    if backend == "cpu":
        return None
    times: Counter[Attention] = Counter()
    for found in (a for _, part in plan.parts for a in find_attention(part.boxed, part.mesh)):
        times[replace(found, count=1)] += found.count
    if not times:
        return None
    rows = [
        (a.source, "two products and a softmax", str(n), a.scores, bytes_text(a.bytes))
        if a.scores
        else (a.source, "a kernel", str(n), "not in memory", "-")
        for a, n in times.items()
    ]
    lines = [f"XLA fuses no attention; {_KERNELS[backend]}."] if any(a.scores for a in times) else []
    columns = ("made by", "as", ">times", "scores", ">bytes per device")
    return Section("Attention: the scores of queries and keys", columns, rows, lines=lines)


_KERNELS: Final = {
    "gpu": 'jax.nn.dot_product_attention(..., implementation="cudnn") keeps its scores in the chip',
    "tpu": "a Pallas kernel, declared with shardc.signature, keeps its scores in the chip",
}


def _gathered(plan: PlanView) -> Section:
    """A table of the operations that no rule splits."""
    if not plan.gathered:
        return Section("Operations without a sharding rule: none")
    rows = [(g.primitive, str(g.count), ", ".join(g.sources)) for g in plan.gathered]
    return Section("Replicated: no sharding rule for these operations", ("operation", ">times", "made by"), rows)


def _found(plan: PlanView) -> Section | None:
    """A table of the operations without a rule that are split by automatically found signatures."""
    if not plan.found:
        return None
    names = ", ".join(f'"{name}"' for name in dict.fromkeys(f.primitive for f in plan.found))
    return Section(
        f"Signatures found for operations without a rule; to replicate these operations: replicate=[{names}]",
        ("operation", "justified by", "rule to paste", ">times", "made by"),
        [(f.primitive, f.how, f.rule, str(f.count), ", ".join(f.sources)) for f in plan.found],
    )


def _notes(plan: PlanView) -> Section | None:
    lines = notes_of(plan)
    return Section("Notes", lines=lines) if lines else None


def notes_of(plan: PlanView) -> list[str]:
    """The notes of a plan, alike ones folded."""
    notes = [
        *plan.request.notes,
        *slow_axis_notes(plan),
        *(note for _, part in plan.parts for note in uneven_notes(part)),
    ]
    folded = fold_rows([((), note, None) for note in notes])
    return [times_text(fold_paths(alike), len(alike)) for _, alike, _ in folded]


# -- memory


def _memory(plan: PlanView, own: OwnSections) -> Section:
    decided: list[str] = []
    if (free := plan.unlimited) is not None:
        slower = (
            ". That is slower than this plan: the search does not model communication that overlaps with computation"
        )
        decided.append(
            f"Memory decided: without the limit the search picks a plan of about {seconds_text(free.seconds)} and "
            f"{bytes_text(free.peak)}{slower * (free.seconds > plan.seconds)}"
        )
    return Section(own.memory.title, lines=[*own.memory.lines, *decided, *own.recomputed])


def _recomputed(plan: SpmdPlan) -> Iterator[str]:
    """Lines about the values that are recomputed."""
    if (found := plan.recomputed) is not None:
        yield f"Recomputed to save memory, in {seconds_text(found.seconds)}: {_values(found)}"
    if plan.recomputed_for_speed is not None:
        yield f"Recomputed for speed: {_values(plan.recomputed_for_speed)}"


def _values(found: Recomputed) -> str:
    return (
        f"{number_text(found.count, 'value')}, {bytes_text(found.bytes)}, of {', '.join(found.sources[:MOST])}"
        f"{f' and {len(found.sources) - MOST} more lines' * (len(found.sources) > MOST)}"
    )
