"""The words for what waits: launches, moves to and from the host, and the ranks of a pipeline."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from shardc.errors import PipelineError
from shardc.pipeline.make import with_schedule
from shardc.pipeline.plan import MpmdPlan
from shardc.pipeline.schedule.methods.table import METHODS
from shardc.pipeline.schedule.simulate import simulate
from shardc.plan.plan import SpmdPlan
from shardc.report.advice.cost import Change, Words
from shardc.report.advice.elsewhere import Asked
from shardc.report.advice.pieces import TimePiece, seconds_of
from shardc.report.tables import bytes_text, number_text, seconds_text
from shardc.runtime.actor import Channel
from shardc.sbp.cost import launch_seconds


def of_host(asked: Asked, pieces: Sequence[TimePiece]) -> Words:
    plan = asked.plan
    names = list(dict.fromkeys(str(p.name.original) for p in pieces))
    more = f" and {len(names) - 1} more" * (len(names) > 1)
    offloaded, held = (plan.offloaded, plan.memory.host) if isinstance(plan, SpmdPlan) else (None, 0)
    why = f"They live in host memory: {offloaded.why}." if offloaded else ""
    kept = Change("All of it on the device", seconds_of(pieces), "at least", held)
    return Words(f"moves between device and host of {names[0]}{more}", why, (kept,))


def of_launch(asked: Asked, pieces: Sequence[TimePiece]) -> Words:
    plan = asked.plan
    if isinstance(plan, MpmdPlan):
        why = f"A task takes at least its launch, {seconds_text(plan.mesh.topology.dispatch)}."
        return Words("launching the tasks of the rank", why, tuple(_larger(plan)))
    arrays = len(plan.boxed.jaxpr.invars) + len(plan.boxed.jaxpr.outvars)
    each = launch_seconds(1, plan.mesh) - launch_seconds(0, plan.mesh)
    why = f"It grows with the {arrays} arguments and results, {seconds_text(each)} for each, not with their size."
    ten = Change("Ten steps in one call (jax.lax.scan), for each step", seconds_of(pieces) * 9 / 10, "about")
    return Words("launching the program from the host", why, (ten,))


# -- pipelines


def rank_of(plan: MpmdPlan) -> int:
    """The rank whose costs are listed: that which waits least."""
    return plan.rank_times.index(plan.time)


def transfer_seconds(plan: MpmdPlan) -> float:
    """Seconds of a call that the transfers between stages take, with the schedule as it is."""
    return _with_links(plan, 0.0)


def _with_links(plan: MpmdPlan, part: float) -> float:
    """Seconds less of a call in which the links take this part of their time, latency included."""

    def link(channel: Channel) -> tuple[float, float]:
        latency, busy = plan.link(channel)
        return latency * (part > 0), busy * part

    return max(plan.seconds - simulate(plan.network, plan.cost, link).makespan, 0.0)


def of_transfers(asked: Asked, pieces: Sequence[TimePiece]) -> Words:
    plan = asked.plan
    assert isinstance(plan, MpmdPlan)
    largest = max(plan.transfers, key=lambda t: t.seconds * t.count)
    each = f"{largest.value} of {bytes_text(largest.bytes / largest.count)}, {seconds_text(largest.seconds)}"
    why = f"The longest: {each}, {number_text(largest.count, 'time')} from stage {largest.source} to {largest.target}."
    half = Change("Half the bytes, as float32 in bfloat16 at the stage boundary", _with_links(plan, 0.5), "about")
    changes = [half] if largest.value.startswith("f32") else []
    return Words("waiting for transfers between stages", why, tuple(changes))


def of_bubble(asked: Asked, pieces: Sequence[TimePiece]) -> Words:
    plan = asked.plan
    assert isinstance(plan, MpmdPlan)
    busy = plan.simulate().busy
    microbatches = number_text(plan.schedule.microbatches, "microbatch")
    what = f"the bubble of {plan.schedule.name} with {microbatches}: the rank waits for others"
    even = seconds_text(min(busy)) == seconds_text(max(busy))
    why = "" if even else f"Ranks are busy for {seconds_text(min(busy))} to {seconds_text(max(busy))}."
    changes = [*_smaller(plan, seconds_of(pieces))]
    if (saved := plan.seconds - _balanced(plan)) > 0:
        changes.append(Change("Stages that take equally long", saved, "about"))
    return Words(what, why, tuple(changes))


def _scaled(plan: MpmdPlan, size: float) -> tuple[float, float]:
    """Seconds of the rank's loop, and those with microbatches of `size` times the rows, as many fewer."""
    now = then = 0.0
    for task in plan.built.tasks.values():
        if task.plan is not None and task.id.in_loop and plan.stages[task.id.stage].rank == rank_of(plan):
            least, times = plan.mesh.topology.dispatch, plan.cut.loop.length
            now += max(task.plan.seconds, least) * times
            then += max(task.plan.seconds * size, least) * times / size
    return now, then


def _larger(plan: MpmdPlan) -> Iterator[Change]:
    now, then = _scaled(plan, 2.0)
    if plan.schedule.microbatches > 1:
        yield Change("Half as many microbatches of twice the size, but for a longer bubble", now - then, "about")


def _smaller(plan: MpmdPlan, bubble: float) -> Iterator[Change]:
    """Twice as many microbatches: the bubble is as many of them long as before."""
    now, then = _scaled(plan, 0.5)
    saved = bubble * (1 - then / now / 2) - (then - now) if now else 0.0
    what = f"{2 * plan.schedule.microbatches} microbatches of half the size, which compute in half the time"
    yield Change(what, saved, "at most")


def other_schedule(plan: MpmdPlan) -> Iterator[Change]:
    """The fastest of the schedules that take the same tasks."""
    found = [other for name in METHODS if name != plan.schedule.name for other in _under(plan, name)]
    if (best := min(found, key=lambda other: other.seconds, default=None)) and best.seconds < plan.seconds:
        more = best.memory.peak - plan.memory.peak
        what = f"The schedule {best.schedule.name}, plan.with_schedule({best.schedule.name!r})"
        yield Change(what, plan.seconds - best.seconds, memory=more)


def _under(plan: MpmdPlan, name: str) -> Iterator[MpmdPlan]:
    try:
        yield with_schedule(plan, name)
    except PipelineError:  # it wants other tasks or stages, or more memory
        return


def _balanced(plan: MpmdPlan) -> float:
    """Seconds of a call in which each rank computes for as long as the average one."""
    busy = plan.simulate().busy
    mean = math.fsum(busy) / len(busy)
    ranks = {step.label: rank for rank, steps in enumerate(plan.network.actors) for step in steps}

    def cost(label: object) -> float:
        return plan.cost(label) * mean / busy[rank] if busy[rank := ranks[label]] else 0.0

    return simulate(plan.network, cost, plan.link).makespan
