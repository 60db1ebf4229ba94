"""`schedule="auto"`: a search for the best order under given costs, latency and memory, with an optimality gap."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from shardc.errors import PipelineError
from shardc.pipeline.schedule.action import Action
from shardc.pipeline.schedule.bound import lower_bound
from shardc.pipeline.schedule.costs import CostsLike, StageCosts
from shardc.pipeline.schedule.credits import SAME, derive_order
from shardc.pipeline.schedule.methods import v_half, v_min, zb_v
from shardc.pipeline.schedule.methods.method import RankPlacement, ranks_of
from shardc.pipeline.schedule.methods.order import one_stage
from shardc.pipeline.schedule.methods.squeeze import WINDOW, squeeze
from shardc.pipeline.schedule.methods.table import METHODS
from shardc.pipeline.schedule.network import network
from shardc.pipeline.schedule.schedule import Schedule
from shardc.pipeline.schedule.simulate import Timeline, peak_activations, simulate

WORK: Final = 200_000
"""The default number of actions that a search places before it stops: one or two seconds."""


@dataclass(frozen=True)
class SearchLimits:
    """Limits of a search for a schedule.

    Attributes:
      memory: how many activations a rank may hold, in chunks; one number for all ranks or one each. None: no limit.
      work: how many actions the search may place; all methods are tried in any case.
    """

    memory: int | Sequence[int] | None = None
    work: int = WORK


@dataclass(frozen=True)
class FoundSchedule:
    """The result of a search for a schedule.

    Attributes:
      schedule: the best schedule found. It has the name of its method, or "auto".
      makespan: its time, in the unit of the costs.
      bound: a lower bound of the makespan within the memory, in a loop or (for two chunks) in a V (see `lower_bound`).
      gap: makespan / bound - 1; 0 proves that no schedule is faster.
      tried: the number of schedules that were simulated.
    """

    schedule: Schedule
    makespan: float
    bound: float
    gap: float
    tried: int


def find_schedule(
    ranks: int,
    microbatches: int,
    chunks: int = 1,
    *,
    costs: CostsLike = (1.0, 1.0, 1.0),
    latency: float = 0.0,
    limits: SearchLimits = SearchLimits(),  # frozen
) -> FoundSchedule:
    """Search for the fastest schedule, from all methods with this number of chunks.

    The search squeezes plans (see `squeeze`): those of the methods under other limits on memory; then plans made from
    the best schedule, by putting every action as late as its makespan allows; then the same with noise. It is limited
    by work, and its noise has a fixed seed, so each run gives the same result. Among schedules with equal makespans,
    the one with fewer activations wins, then the one with fewer messages. Asynchronous methods are left out: they
    change the results.

    Args:
      ranks, microbatches: p and m.
      chunks: stages of a rank.
      costs: (F, B, W) of all stages, or one for each of the ranks·chunks stages.
      latency: latency of a message between two ranks, in the unit of the costs.
      limits: of memory and work.

    Raises:
      PipelineError: memory for less than one chunk of each of a rank's stages, or arguments that are no pipeline.
    """
    costs = StageCosts.read(costs, ranks * chunks)
    memory, work = _memory(limits.memory, ranks, chunks), limits.work
    if not 0 <= latency < float("inf"):
        raise PipelineError(f"auto: latency {latency}; it has to be a time of 0 or more.")
    placements: tuple[RankPlacement, ...] = ("loop", "v") if chunks == 2 and ranks > 1 else ("loop",)
    bound = min(lower_bound(ranks_of(p, ranks, chunks), microbatches, costs, latency, memory) for p in placements)
    search = _ScheduleSearch(microbatches, costs, latency, memory, bound)
    for schedule in _by_name(ranks, microbatches, chunks, costs):
        search.offer(schedule)
    for placement in placements:
        rank_of = ranks_of(placement, ranks, chunks)
        for schedule in _derived(rank_of, microbatches, costs, latency, memory):
            search.offer(schedule)
            if search.best and search.placed >= work:
                break
        for plan in _plans(placement, ranks, microbatches, chunks):
            for held in _rooms(rank_of, microbatches, memory):
                if search.placed < work:
                    search.squeeze(plan, rank_of, held)
    search.improve(work)
    assert search.best is not None  # one microbatch at a time is always among the derived orders
    makespan = search.best.makespan
    gap = makespan / bound - 1 if bound > 0 else 0.0
    return FoundSchedule(search.best.schedule, makespan, bound, max(0.0, gap), search.tried)


@dataclass(frozen=True)
class _TriedOrder:
    schedule: Schedule
    timeline: Timeline
    makespan: float
    rest: tuple[int, int, int]
    """The order of equal makespans: activations of the worst rank, activations of all ranks, messages."""


class _ScheduleSearch:
    def __init__(
        self, microbatches: int, costs: StageCosts, latency: float, memory: Sequence[int] | None, bound: float
    ) -> None:
        self.best: _TriedOrder | None = None
        self.tried = 0
        self.placed = 0
        self._m = microbatches
        self._costs = costs
        self._latency = latency
        self._memory = memory
        self._bound = bound

    def offer(self, schedule: Schedule) -> bool:
        """Keep a schedule if it fits in memory and is the best one so far. Returns whether it is kept."""
        self.tried += 1
        self.placed += sum(map(len, schedule.rows))
        timeline = simulate(network(schedule), self._costs, lambda channel: (self._latency, 0.0))
        peaks = peak_activations(schedule, timeline)
        if self._memory and any(p > limit for p, limit in zip(peaks, self._memory, strict=True)):
            return False
        new = _TriedOrder(schedule, timeline, timeline.makespan, (max(peaks), sum(peaks), timeline.messages))
        old = self.best
        faster = old is None or new.makespan * SAME < old.makespan
        if faster or (old and new.makespan <= old.makespan * SAME and new.rest < old.rest):
            self.best = new
            return True
        return False

    def squeeze(
        self, plan: Sequence[Sequence[Action]], rank_of: Sequence[int], held: Sequence[int], window: int = WINDOW
    ) -> bool:
        """Squeeze a plan, and offer the result. Returns whether it is kept."""
        self.placed += sum(map(len, plan)) * 3 // 2
        squeezed = squeeze(plan, rank_of, self._costs, held, self._latency, window=window)
        if squeezed is None or (self.best and squeezed.makespan > self.best.makespan * SAME):
            self.tried += 1
            return False
        return self.offer(Schedule("auto", _in_order(squeezed.rows)))

    def improve(self, work: int) -> None:
        """Make plans from the best schedule until it reaches the bound or the work is used up."""
        rng = random.Random(0)
        since = 0  # tries without success
        while self.best and self.placed < work and self.best.makespan > self._bound * SAME:
            start = self.best
            rank_of = start.schedule.rank_of
            noise = (since + 1) // 2 % 8 * sum(self._costs.of(0)) / 2
            plan = _as_late_as_possible(start, self._costs, self._latency, noise, rng)
            rooms = list(_rooms(rank_of, self._m, self._memory))
            won = self.squeeze(plan, rank_of, rooms[since % len(rooms)], (WINDOW, 1, 40)[since % 3])
            since = 0 if won else since + 1


def _in_order(rows: Sequence[Sequence[Action]]) -> tuple[tuple[Action, ...], ...]:
    """The rows with microbatches numbered in the order in which they start: they are interchangeable."""
    started = [a.microbatch for row in rows for a in row if a.stage == 0 and a.kind == "F"]
    number = {old: new for new, old in enumerate(started)}
    return tuple(tuple(a._replace(microbatch=number[a.microbatch]) for a in row) for row in rows)


def _by_name(ranks: int, microbatches: int, chunks: int, costs: StageCosts) -> Iterator[Schedule]:
    for method in METHODS.values():
        fits = chunks == method.chunks or (method.more_chunks and chunks > method.chunks)
        if fits and method.weight_versions == 1 and not method.refuse(ranks, microbatches, chunks):
            yield method.orders(ranks, microbatches, chunks, costs)


def _derived(
    rank_of: Sequence[int], microbatches: int, costs: StageCosts, latency: float, memory: Sequence[int] | None
) -> Iterator[Schedule]:
    """Backward-first schedules, from several limits on the microbatches in flight at each stage (credits).

    The last schedules have one microbatch in flight at each stage, so they fit in any memory.
    """
    stages = len(rank_of)
    for ahead in ([stages - s for s in range(stages)], [2 * (stages - s) - 1 for s in range(stages)], [1] * stages):
        credits = [min(a, microbatches) for a in ahead]
        if memory is not None:
            share = [max(1, memory[r] // rank_of.count(r)) for r in rank_of]
            credits = [min(c, s) for c, s in zip(credits, share, strict=True)]
        for split in (False, True):
            yield replace(derive_order(rank_of, microbatches, credits, costs, latency, split=split), name="auto")


def _plans(placement: RankPlacement, ranks: int, microbatches: int, chunks: int) -> Iterator[list[list[Action]]]:
    """Rough orders of F and I to squeeze."""
    if placement == "v":
        for block in (*zb_v.BLOCKS, *v_half.BLOCKS, *v_min.BLOCKS):
            yield block.plan(ranks, microbatches)
    elif chunks == 1:
        for lead in range(2 * ranks):
            yield [list(one_stage(r, microbatches, max(1, ranks + lead - 2 * r), "I")) for r in range(ranks)]
            yield [list(one_stage(r, microbatches, max(1, lead + 1 - r), "I")) for r in range(ranks)]
    else:
        rows = METHODS["interleaved"].orders(ranks, microbatches, chunks, StageCosts()).rows
        yield [[a._replace(kind="I") if a.kind == "B" else a for a in row] for row in rows]


def _rooms(rank_of: Sequence[int], microbatches: int, memory: Sequence[int] | None) -> Iterator[list[int]]:
    """Numbers of activations that ranks may hold: the limit, or several numbers if there is no limit."""
    ranks = 1 + max(rank_of)
    if memory is not None:
        yield list(memory)
        return
    for held in (len(rank_of), 2 * len(rank_of), microbatches * len(rank_of) // ranks):
        yield [held] * ranks


def _as_late_as_possible(
    best: _TriedOrder, costs: StageCosts, latency: float, noise: float, rng: random.Random
) -> list[list[Action]]:
    """F and I of each rank, sorted by their latest possible starts in this schedule plus noise."""
    schedule = best.schedule
    rank_of = schedule.rank_of
    left: dict[Action, float] = {}  # the longest path from an action's start to the end
    needed: dict[Action, float] = {}  # the longest such path of an action's readers, with the message
    behind = [0.0] * schedule.ranks
    order = sorted(
        (number, span.label)
        for numbers, spans in zip(best.timeline.sequence, best.timeline.spans, strict=True)
        for number, span in zip(numbers, spans, strict=True)
        if isinstance(span.label, Action)
    )
    for _, action in reversed(order):
        rank = rank_of[action.stage]
        left[action] = behind[rank] = costs(action) + max(behind[rank], needed.get(action, 0.0))
        for need in schedule.needs(action):
            way = left[action] + (latency if rank_of[need.stage] != rank else 0.0)
            needed[need] = max(needed.get(need, 0.0), way)
    number = {action: n for n, action in order}
    plan: list[list[Action]] = []
    for row in schedule.rows:
        keys = {a: (-left[a] + rng.uniform(-noise, noise), number[a]) for a in row if a.kind != "W"}
        plan.append([a._replace(kind="I") if a.kind == "B" else a for a in sorted(keys, key=keys.__getitem__)])
    return plan


def _memory(memory: int | Sequence[int] | None, ranks: int, chunks: int) -> list[int] | None:
    """The limit of each rank, checked."""
    if memory is None:
        return None
    limits = [memory] * ranks if isinstance(memory, int) else list(memory)
    if len(limits) != ranks:
        raise PipelineError(f"auto: memory has {len(limits)} numbers for {ranks} ranks; give one, or one for each.")
    few = [r for r, limit in enumerate(limits) if limit < chunks]
    if few:
        raise PipelineError(
            f"auto: rank{'s' * (len(few) > 1)} {', '.join(map(str, few))} may hold "
            f"{', '.join(str(limits[r]) for r in few)} activations, but one microbatch alone needs {chunks}, one for "
            "each stage of a rank. Allow that many, use fewer chunks, or recompute activations."
        )
    return limits
