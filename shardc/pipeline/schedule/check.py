"""Checks of a schedule: every action once, a stage on one rank, no action before one of its rank that it needs.

Waits between ranks are not checked here: `shardc.runtime.deadlock.find_deadlock` does that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardc.errors import PipelineError, all_offenders
from shardc.pipeline.schedule.action import KINDS, Action
from shardc.pipeline.schedule.schedule import Schedule
from shardc.pipeline.schedule.text import marked, shown


class _RankPlace(NamedTuple):
    rank: int
    column: int


def check_schedule(schedule: Schedule) -> list[str]:
    """The faults of a schedule, one text for each; empty if it is valid.

    A text names the rank and the column, and shows that part of the row with the action in brackets. The column is the
    position among the rank's actions, counted from 0 without idle cells.
    """
    places = _places(schedule)
    if not places:
        return ["it has no actions."]
    return [
        *_idle_ranks(schedule),
        *_gaps("stage", {a.stage for a in places}, schedule, places),
        *_gaps("microbatch", {a.microbatch for a in places}, schedule, places),
        *_doubled(schedule, places),
        *_split_stages(schedule, places),
        *_missing(schedule, places),
        *_too_early(schedule, places),
    ]


def checked(schedule: Schedule) -> Schedule:
    """The schedule itself. Raises PipelineError with all faults if there are any."""
    wrong = check_schedule(schedule)
    if wrong:
        raise PipelineError(all_offenders(f'Schedule "{schedule.name}" is not valid:', shown(wrong)))
    return schedule


def _places(schedule: Schedule) -> dict[Action, list[_RankPlace]]:
    found: dict[Action, list[_RankPlace]] = {}
    for rank, row in enumerate(schedule.rows):
        for column, action in enumerate(row):
            found.setdefault(action, []).append(_RankPlace(rank, column))
    return found


def _at(place: _RankPlace) -> str:
    return f"rank {place.rank}, column {place.column}"


def _marked(schedule: Schedule, place: _RankPlace) -> str:
    return "\n  " + marked(place.rank, schedule.rows[place.rank], place.column)


def _idle_ranks(schedule: Schedule) -> Iterator[str]:
    for rank, row in enumerate(schedule.rows):
        if not row:
            yield f"rank {rank} has no actions, but every rank has to run a stage. Leave the row out, or add actions."


def _gaps(field: str, present: set[int], schedule: Schedule, places: dict[Action, list[_RankPlace]]) -> Iterator[str]:
    """Numbers that are left out, such as stage 2 of stages 0, 1 and 3."""
    numbers = sorted(present)
    for before, after in zip([-1, *numbers], numbers, strict=False):
        if after > before + 1:
            first = next(a for a in places if getattr(a, field) == after)
            out = str(before + 1) if after == before + 2 else f"{before + 1} to {after - 1}"
            place = places[first][0]
            plural = {"stage": "stages", "microbatch": "microbatches"}[field] if " " in out else field
            verb = "have" if " " in out else "has"
            yield f"{_at(place)}: {first}, but {plural} {out} {verb} no actions.{_marked(schedule, place)}"


def _doubled(schedule: Schedule, places: dict[Action, list[_RankPlace]]) -> Iterator[str]:
    for action, found in places.items():
        for repeated in found[1:]:
            yield f"{_at(repeated)}: {action} again, after {_at(found[0])}.{_marked(schedule, repeated)}"


def _split_stages(schedule: Schedule, places: dict[Action, list[_RankPlace]]) -> Iterator[str]:
    """Stages on several ranks. The rank with most of the stage's actions is taken as the right one."""
    by_stage: dict[int, Counter[int]] = {}
    for action, found in places.items():
        by_stage.setdefault(action.stage, Counter()).update(p.rank for p in found)
    for stage, ranks in sorted(by_stage.items()):
        home = max(ranks, key=lambda r: (ranks[r], -r))
        for rank in sorted(set(ranks) - {home}):
            place = next(p for a, found in places.items() for p in found if (a.stage, p.rank) == (stage, rank))
            yield (
                f"{_at(place)}: stage {stage} has {ranks[rank]} actions here and {ranks[home]} on rank {home}; "
                f"a stage runs on one rank.{_marked(schedule, place)}"
            )


def _missing(schedule: Schedule, places: dict[Action, list[_RankPlace]]) -> Iterator[str]:
    """Missing actions: every stage and microbatch has F, and either B or both I and W."""
    for stage in sorted({a.stage for a in places}):
        for microbatch in sorted({a.microbatch for a in places}):
            present = [k for k in KINDS if Action(stage, k, microbatch) in places]
            wanted = "FB" if "B" in present or not {"I", "W"} & set(present) else "FIW"
            lacks = [k for k in wanted if k not in present]
            if "B" in present and len(present) > len(set(present) & {"F", "B"}):
                other = Action(stage, "I" if "I" in present else "W", microbatch)
                place = places[other][0]
                full = Action(stage, "B", microbatch)
                yield (
                    f"{_at(place)}: {other} and, at {_at(places[full][0])}, {full}: a full backward B already contains "
                    f"I and W. Keep B, or I and W.{_marked(schedule, place)}"
                )
            if lacks:
                wants = [Action(stage, k, microbatch) for k in lacks]
                yield _lack(schedule, places, wants, Action(stage, present[-1], microbatch) if present else None)


def _lack(
    schedule: Schedule, places: dict[Action, list[_RankPlace]], wants: Sequence[Action], last: Action | None
) -> str:
    """The text about missing actions of one stage and microbatch, whose last present action is `last`."""
    names = " and ".join(f"{a} ({KINDS[a.kind]}{', or I and W' if a.kind == 'B' else ''})" for a in wants)
    missing = f"{names} {'is' if len(wants) == 1 else 'are'} missing"
    stage = wants[0].stage
    if last is None:
        return f"rank {schedule.rank_of[stage]}: {missing}; this rank runs stage {stage}."
    place = places[last][0]
    return f"{_at(place)}: {missing}, but {last} is here.{_marked(schedule, place)}"


def _too_early(schedule: Schedule, places: dict[Action, list[_RankPlace]]) -> Iterator[str]:
    for action, found in places.items():
        place = found[0]
        for need in schedule.needs(action):
            later = places.get(need)
            if later and later[0].rank == place.rank and later[0].column > place.column:
                yield (
                    f"{_at(place)}: {action} comes before {need} (column {later[0].column}), which it needs."
                    f"{_marked(schedule, place)}"
                )
