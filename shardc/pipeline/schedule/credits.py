"""How many registers each channel gets, and orders of actions that follow from registers."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import TypeAlias

from shardc.errors import PipelineError, all_offenders
from shardc.pipeline.schedule.action import Action
from shardc.pipeline.schedule.schedule import Schedule
from shardc.pipeline.schedule.simulate import Cost, Link, Timeline, run_timed, simulate
from shardc.runtime.actor import Message, Network

_SAME = 1 + 1e-9
"""Times that differ by less are the same: sums of costs in another order."""


TooFull: TypeAlias = Callable[[Sequence[int]], Sequence[int]]
"""The actors that hold too much, if the channels have so many registers."""


def auto_credits(
    net: Network, cost: Cost, link: Link | None = None, bound: int | Sequence[int] | TooFull | None = None
) -> tuple[int, ...]:
    """Registers for each channel: few that keep the best time, or a good time within a bound on memory.

    Channels that have a number of registers keep it; the others are chosen.

    Without a bound: the network is run with no limits, which gives the best makespan and, as peaks, registers that
    keep it. Then channels are lowered, those with large messages first, each as far as the best makespan allows while
    those after it keep their peaks. A shorter makespan never comes from fewer registers, so a bisection finds each
    one's fewest, and in the end none can be lowered any more. It is greedy, though: where one register more here
    would save two elsewhere it is not seen, so the sum need not be the least. Most channels need no bisection: the
    longest path into a taker plus that out of a giver bounds the registers from below, and whole groups of channels
    are lowered to that at once when it keeps the time; where it does for all, nobody can do with fewer anywhere.

    With a bound: from there, as long as an actor is over it, the register is taken from it that costs the least time
    (then: that saves the most bytes), one at a time; then again what the time reached allows is saved. The order of
    the actions is not touched, and this too is greedy: it may miss a better set of registers, and, as the fewest
    registers that do not deadlock are not unique, in principle any that fits.

    Args:
      net: actors and channels; `Channel.bytes` says what a register holds.
      cost, link: as for `simulate`.
      bound: bytes for the registers of each actor, one number for all or one each. A register lies at the channel's
        target, as messages move when they are made. Or a function that says who holds too much.

    Raises:
      PipelineError: the network deadlocks whatever the registers, or the bound cannot be kept; the message has the
        breakdown.
    """
    unbounded = simulate(net, cost, link)
    chosen = [
        max(1, p) if c.registers is None else c.registers for c, p in zip(net.channels, unbounded.peaks, strict=True)
    ]
    free = [i for i, c in enumerate(net.channels) if c.registers is None]
    free.sort(key=lambda i: (-net.channels[i].bytes, i))
    makespan = _Makespan(net, cost, link)
    floor = _fewest(unbounded, link)
    _lower(free, floor, chosen, unbounded.makespan * _SAME, makespan)
    if bound is not None:
        too_full = bound if callable(bound) else _Limits(net, bound)
        reached = _fit(free, too_full, chosen, makespan)
        _lower(free, [1] * len(floor), chosen, reached * _SAME, makespan)
    return tuple(chosen)


class _Makespan:
    """The makespan for some numbers of registers, infinite where they deadlock."""

    def __init__(self, net: Network, cost: Cost, link: Link | None) -> None:
        self.net = net
        self._cost = cost
        self._link = link

    def __call__(self, registers: Sequence[int]) -> float:
        timeline = run_timed(self.net.with_registers(registers), self._cost, self._link)
        return float("inf") if timeline is None else timeline.makespan


def _lower(group: Sequence[int], floor: Sequence[int], chosen: list[int], limit: float, makespan: _Makespan) -> None:
    """Lowers the registers of a group of channels as far as `limit` allows: all to the floor, or one half, or one."""
    if not any(chosen[i] > floor[i] for i in group):
        return
    trial = list(chosen)
    for i in group:
        trial[i] = min(floor[i], chosen[i])
    if makespan(trial) <= limit:
        chosen[:] = trial
        return
    if len(group) > 1:
        _lower(group[: len(group) // 2], floor, chosen, limit, makespan)
        _lower(group[len(group) // 2 :], floor, chosen, limit, makespan)
        return
    channel = group[0]
    few, enough = floor[channel], chosen[channel]  # too few, enough
    while enough - few > 1:
        trial[channel] = (few + enough) // 2
        if makespan(trial) <= limit:
            enough = trial[channel]
        else:
            few = trial[channel]
    chosen[channel] = enough


def _fewest(timeline: Timeline, link: Link | None) -> list[int]:
    """For each channel a number of registers below which the makespan grows for certain.

    With R registers message k+R starts no earlier than message k is released. So the longest path up to that release
    plus the longest path from that start to the end must not exceed the makespan.
    """
    net = timeline.network
    released: list[list[float]] = [[] for _ in net.channels]
    remaining: list[list[float]] = [[] for _ in net.channels]
    for steps, ends, tails in zip(net.actors, timeline.ends, _tails(timeline, link), strict=True):
        for step, end, tail in zip(steps, ends, tails, strict=True):
            for channel, _ in step.takes:
                released[channel].append(end)
            for channel, _ in step.gives:
                remaining[channel].append(tail)
    fewest: list[int] = []
    for into, out in zip(released, remaining, strict=True):
        least, late = 1, 0
        for k, end in enumerate(into):
            late = max(late, k + 1)
            while late < len(out) and end + out[late] > timeline.makespan * _SAME:
                late += 1
            least = max(least, late - k)
        fewest.append(min(least, max(1, len(out))))
    return fewest


def _tails(timeline: Timeline, link: Link | None) -> list[list[float]]:
    """By actor and step, the longest path from its start to the end of all, but for waits for links and registers."""
    net = timeline.network
    way = [0.0 if link is None or c.source == c.target else sum(link(c)) for c in net.channels]
    tails = [[0.0] * len(steps) for steps in net.actors]
    needed: dict[Message, float] = {}
    order = sorted((number, a, i) for a, row in enumerate(timeline.sequence) for i, number in enumerate(row))
    for _, a, i in reversed(order):
        step = net.actors[a][i]
        after = [tails[a][i + 1]] if i + 1 < len(tails[a]) else []
        after += [way[m[0]] + needed[m] for m in step.gives]
        tails[a][i] = timeline.ends[a][i] - timeline.starts[a][i] + max(after, default=0.0)
        needed.update((m, tails[a][i]) for m in step.takes)
    return tails


class _Limits:
    """The actors whose registers have more bytes than their limits."""

    def __init__(self, net: Network, bound: int | Sequence[int]) -> None:
        self.channels = net.channels
        self.limits = [bound] * len(net.actors) if isinstance(bound, int) else list(bound)

    def __call__(self, registers: Sequence[int]) -> list[int]:
        held = [0] * len(self.limits)
        for c, n in zip(self.channels, registers, strict=True):
            held[c.target] += n * c.bytes
        return [a for a, h in enumerate(held) if h > self.limits[a]]


def _fit(free: Sequence[int], too_full: TooFull, chosen: list[int], makespan: _Makespan) -> float:
    """Takes registers away until no actor holds too much; gives the makespan that is left."""
    channels = makespan.net.channels
    best = makespan(chosen)
    while over := too_full(chosen):
        trials: list[tuple[float, int, int]] = []
        for i in free:
            if channels[i].target == over[0] and chosen[i] > 1 and channels[i].bytes:
                chosen[i] -= 1
                trials.append((makespan(chosen), -channels[i].bytes, i))
                chosen[i] += 1
        best, _, channel = min(trials, default=(float("inf"), 0, 0))
        if best == float("inf"):
            raise PipelineError(_too_large(makespan.net, over, too_full, chosen))
        chosen[channel] -= 1
    return best


def _too_large(net: Network, over: Sequence[int], too_full: TooFull, chosen: Sequence[int]) -> str:
    blocks: list[str] = []
    for a in over:
        held = [(n * c.bytes, n, c) for c, n in zip(net.channels, chosen, strict=True) if c.target == a and c.bytes]
        held.sort(key=lambda part: -part[0])
        limit = f"; the bound is {too_full.limits[a]}" if isinstance(too_full, _Limits) else ""
        blocks.append(
            f"actor {a}: {' + '.join(f'{n} x {c.bytes} ({c.name})' for _, n, c in held)} = "
            f"{sum(b for b, _, _ in held)} bytes{limit}."
        )
    return (
        all_offenders(
            "The registers do not fit the bound, and with fewer at the first of these actors the order deadlocks:",
            blocks,
        )
        + "\nTake a schedule that holds fewer activations, recompute more, or cut smaller stages."
    )


def derive_order(
    rank_of: Sequence[int],
    microbatches: int,
    credits: Sequence[int],
    cost: Callable[[Action], float],
    latency: float = 0.0,
    *,
    split: bool = False,
    name: str = "derived",
) -> Schedule:
    """The order in which ranks would run if each, whenever it is free, took what is there, backward first.

    A rank prefers a backward (B, or I where it is split), then a forward if its stage has a credit left, then a weight
    gradient W; among equals the lowest microbatch, then the latest stage. A credit is taken when F starts and given
    back when B or W ends. With p-i credits for stage i of p this is 1F1B exactly, whatever the latency; with 2(p-i)-1
    it hides a latency of up to half of F+B+W, as eager 1F1B does: the bubble is (p-1)(F+B+W) + 2(p-1)·latency.

    Args:
      rank_of: the rank of each stage.
      microbatches: m.
      credits: for each stage, how many microbatches' activations it may hold; at least 1.
      cost: seconds of an action.
      latency: seconds from the end of an action on one rank until another rank has its result.
      split: whether backwards are split into I and W.
      name: of the schedule.

    Raises:
      PipelineError: credits that are not one for each stage, or fewer than 1.
    """
    stages = len(rank_of)
    if len(credits) != stages or min(credits, default=1) < 1:
        raise PipelineError(
            f"derive_order: credits {list(credits)}; give one number, at least 1, for each of {stages} stages."
        )
    back = "I" if split else "B"
    urgency = {back: 0, "F": 1, "W": 2}
    left = list(credits)
    rows: list[list[Action]] = [[] for _ in range(1 + max(rank_of, default=-1))]
    offers: list[list[tuple[int, int, int, Action]]] = [[] for _ in rows]  # what has its inputs, best first
    busy = [False] * len(rows)
    missing: dict[Action, int] = {}
    count = itertools.count()
    events: list[tuple[float, int, Action, bool]] = []  # an action gets an input, or ends

    def feeds(action: Action) -> list[Action]:
        s, kind, j = action
        if kind == "F":
            return [Action(s + 1, "F", j)] * (s + 1 < stages) + [Action(s, back, j)]
        if kind == "W":
            return []
        return [Action(s - 1, back, j)] * (s > 0) + [Action(s, "W", j)] * split

    for j in range(microbatches):
        heapq.heappush(events, (0.0, next(count), Action(0, "F", j), False))
    while events:
        time = events[0][0]
        while events and events[0][0] == time:
            _, _, action, ends = heapq.heappop(events)
            rank = rank_of[action.stage]
            if not ends:
                need = 2 if action.kind == back and action.stage + 1 < stages else 1
                missing[action] = missing.get(action, need) - 1
                if not missing[action]:
                    heapq.heappush(offers[rank], (urgency[action.kind], action.microbatch, -action.stage, action))
                continue
            busy[rank] = False
            left[action.stage] += action.kind in "BW"
            for fed in feeds(action):
                delay = latency if rank_of[fed.stage] != rank else 0.0
                heapq.heappush(events, (time + delay, next(count), fed, False))
        for rank, offered in enumerate(offers):
            action = None if busy[rank] else _pick(offered, left)
            if action is not None:
                busy[rank] = True
                left[action.stage] -= action.kind == "F"
                rows[rank].append(action)
                heapq.heappush(events, (time + cost(action), next(count), action, True))
    return Schedule(name, tuple(map(tuple, rows)))


def _pick(offered: list[tuple[int, int, int, Action]], left: Sequence[int]) -> Action | None:
    """The best action that has a credit, taken out; those without stay."""
    without: list[tuple[int, int, int, Action]] = []
    found: Action | None = None
    while offered and found is None:
        best = heapq.heappop(offered)
        if best[3].kind == "F" and not left[best[3].stage]:
            without.append(best)
        else:
            found = best[3]
    for offer in without:
        heapq.heappush(offered, offer)
    return found
