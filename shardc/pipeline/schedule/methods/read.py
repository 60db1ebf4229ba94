"""A schedule from a user's argument: a name, a text, a function, a schedule."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Final, TypeAlias

from shardc.errors import PipelineError, did_you_mean
from shardc.pipeline.schedule.check import checked
from shardc.pipeline.schedule.costs import CostsLike, StageCosts
from shardc.pipeline.schedule.methods.auto import find_schedule
from shardc.pipeline.schedule.methods.method import Method
from shardc.pipeline.schedule.methods.table import METHODS
from shardc.pipeline.schedule.schedule import Schedule

ScheduleLike: TypeAlias = str | Schedule | Method | Callable[[int, int, int, StageCosts], Schedule]

_LOOKS_LIKE_TEXT: Final = re.compile(r"\d[FBIW]\d")


def make_schedule(
    schedule: ScheduleLike,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    *,
    costs: CostsLike = (1.0, 1.0, 1.0),
    latency: float = 0.0,
) -> Schedule:
    """The schedule for these ranks and microbatches, checked.

    Args:
      schedule: the name of a method, "auto" (the best schedule that `find_schedule` finds), the text of a grid, a
        Schedule, a Method, or a function from (ranks, microbatches, chunks, costs) to a Schedule.
      ranks, microbatches: p and m.
      chunks: stages of each rank; None: the method's number, or 1.
      costs: (F, B, W) of all stages, or one for each of the ranks·chunks stages, for methods whose order depends on
        time.
      latency: latency of a message between two ranks. Only "auto" uses it.

    Raises:
      PipelineError: an unknown name, a method that does not support these numbers, an invalid schedule (with all its
        faults), or a schedule for other numbers.

    Examples:
      >>> print(make_schedule("1f1b", 2, 3))
      1f1b
      rank 0 | 0F0 0F1     0B0 0F2 0B1     0B2
      rank 1 |     1F0 1B0 1F1 1B1 1F2 1B2
    """
    if not all(map(_is_count, (ranks, microbatches, 1 if chunks is None else chunks))):
        raise PipelineError(
            f"make_schedule: ranks={ranks!r}, microbatches={microbatches!r}, chunks={chunks!r}; each has to be 1 or "
            "more."
        )
    if isinstance(schedule, str) and _LOOKS_LIKE_TEXT.search(schedule):
        schedule = Schedule.parse(schedule)
    if isinstance(schedule, str):
        if schedule == "auto":
            return find_schedule(ranks, microbatches, chunks or 1, costs=costs, latency=latency).schedule
        if schedule not in METHODS:
            names = [*METHODS, "auto"]
            raise PipelineError(
                f'Unknown schedule "{schedule}"; there are {", ".join(names)}.{did_you_mean(schedule, names)}'
            )
        schedule = METHODS[schedule]
    if isinstance(schedule, Method):
        chunks = _chunks(schedule, ranks, microbatches, chunks)
        schedule = schedule.orders
    if not isinstance(schedule, Schedule):
        chunks = chunks or 1
        schedule = _called(schedule, ranks, microbatches, chunks, StageCosts.read(costs, ranks * chunks))
    return _fitting(checked(schedule), ranks, microbatches, chunks)


def _is_count(n: object) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and n > 0


def _called(function: object, *args: object) -> Schedule:
    """The schedule that a user's function returns."""
    if not callable(function):
        raise PipelineError(
            f'schedule={function!r} is not a schedule; write a name such as "1f1b", the text of a grid, a Schedule, or '
            "a function of (ranks, microbatches, chunks, costs) that returns a Schedule."
        )
    name = getattr(function, "__name__", repr(function))
    try:
        inspect.signature(function).bind(*args)
    except TypeError as error:
        raise PipelineError(
            f"The schedule function {name} is called with (ranks, microbatches, chunks, costs): {error}."
        ) from None
    found = function(*args)
    if not isinstance(found, Schedule):
        raise PipelineError(
            f"The schedule function {name} returned {found!r}; it has to return a Schedule, such as "
            "Schedule.parse(text)."
        )
    return found


def _chunks(method: Method, ranks: int, microbatches: int, chunks: int | None) -> int:
    """The method's number of chunks. Raises if it does not support these numbers."""
    chunks = chunks or method.chunks
    if chunks < method.chunks or (chunks > method.chunks and not method.more_chunks):
        least = "at least " if method.more_chunks else ""
        stages = f"{least}{method.chunks} stage{'s' * (method.chunks > 1)}"
        raise PipelineError(
            f'Schedule "{method.name}" has {stages} on each rank, not {chunks}: set chunks={method.chunks}, or use '
            f"{_others(chunks)}."
        )
    why = method.refuse(ranks, microbatches, chunks)
    if why:
        raise PipelineError(
            f'Schedule "{method.name}" does not support {ranks} ranks and {microbatches} microbatches: {why}.'
        )
    return chunks


def _others(chunks: int) -> str:
    fit = [m.name for m in METHODS.values() if m.chunks == chunks or (m.more_chunks and m.chunks < chunks)]
    return ", ".join([*fit, "auto"][:-1]) + f" or {[*fit, 'auto'][-1]}"


def _fitting(schedule: Schedule, ranks: int, microbatches: int, chunks: int | None) -> Schedule:
    """The schedule itself. Raises if it is for other numbers."""
    asked = {"ranks": ranks, "microbatches": microbatches, "chunks": chunks}
    has = {"ranks": schedule.ranks, "microbatches": schedule.microbatches, "chunks": schedule.chunks}
    wrong = [f"{has[name]} {name}, not {n}" for name, n in asked.items() if n is not None and n != has[name]]
    if wrong:
        raise PipelineError(f'Schedule "{schedule.name}" is for another pipeline: it has {", ".join(wrong)}.')
    return schedule
