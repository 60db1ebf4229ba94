"""The number of registers of each channel, and orders of actions that are derived from credits."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from shardc.errors import PipelineError, all_offenders
from shardc.pipeline.schedule.action import Action
from shardc.pipeline.schedule.schedule import Schedule
from shardc.pipeline.schedule.simulate import Cost, LinkCost, Timeline, run_timed, simulate
from shardc.runtime.actor import Message, Network

SAME: Final = 1 + 1e-9
"""Times that differ by less than this factor are equal: sums of costs in another order."""


TooFull: TypeAlias = Callable[[Sequence[int]], Sequence[int]]
"""A function from the channels' numbers of registers to the actors that hold too much."""


def auto_credits(
    net: Network, cost: Cost, link: LinkCost | None = None, bound: int | Sequence[int] | TooFull | None = None
) -> tuple[int, ...]:
    """The number of registers of each channel: few that keep the best makespan, or that fit a bound on memory.

    Channels that have a number of registers keep it; the others are chosen.

    Without a bound: the network is run without limits. This gives the best makespan and, as peaks, registers that keep
    it. Then channels are lowered, those with large messages first, each as far as the best makespan allows while the
    later ones keep their peaks. Fewer registers never make a makespan shorter, so a bisection finds the fewest of each
    channel. The method is greedy: it does not see that one register more in one place may save two elsewhere, so the
    sum need not be minimal. Most channels need no bisection: the longest path to a receiver plus the longest path from
    a sender bounds the registers from below, and whole groups of channels are lowered to this bound at once if that
    keeps the makespan. If all channels are at the bound, the numbers are minimal.

    With a bound: while an actor is over its bound, it loses one register at a time: the one that costs the least time,
    then the one that saves the most bytes. Then registers are lowered again as far as the reached makespan allows. The
    order of the actions does not change. This is greedy too: it may miss a better set of registers and, as the fewest
    registers without deadlock are not unique, in principle any that fits.

    Args:
      net: actors and channels; `Channel.bytes` is the size of a register.
      cost, link: as for `simulate`.
      bound: bytes for the registers of each actor, one number for all or one each. A register lies at the channel's
        target, because messages move when they are sent. Or a function that gives the actors that hold too much.

    Raises:
      PipelineError: the network deadlocks with any registers, or the bound cannot be kept; the message has the
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
    _lower(free, floor, chosen, unbounded.makespan * SAME, makespan)
    if bound is not None:
        too_full = bound if callable(bound) else _Limits(net, bound)
        reached = _fit(free, too_full, chosen, makespan)
        _lower(free, [1] * len(floor), chosen, reached * SAME, makespan)
    return tuple(chosen)


class _Makespan:
    """The makespan as a function of the numbers of registers; infinite for a deadlock."""

    def __init__(self, net: Network, cost: Cost, link: LinkCost | None) -> None:
        self.net = net
        self._cost = cost
        self._link = link

    def __call__(self, registers: Sequence[int]) -> float:
        timeline = run_timed(self.net.with_registers(registers), self._cost, self._link)
        return float("inf") if timeline is None else timeline.makespan


def _lower(group: Sequence[int], floor: Sequence[int], chosen: list[int], limit: float, makespan: _Makespan) -> None:
    """Lower the registers of a group of channels as far as the makespan's `limit` allows.

    All are lowered to the floor, or else each half of the group on its own; a single channel by bisection.
    """
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
    few, enough = floor[channel], chosen[channel]  # `few` is too few
    while enough - few > 1:
        trial[channel] = (few + enough) // 2
        if makespan(trial) <= limit:
            enough = trial[channel]
        else:
            few = trial[channel]
    chosen[channel] = enough


def _fewest(timeline: Timeline, link: LinkCost | None) -> list[int]:
    """A lower bound of the registers of each channel: with fewer the makespan grows.

    With R registers, message k+R starts no earlier than message k is released. So the longest path to that release
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
            while late < len(out) and end + out[late] > timeline.makespan * SAME:
                late += 1
            least = max(least, late - k)
        fewest.append(min(least, max(1, len(out))))
    return fewest


def _tails(timeline: Timeline, link: LinkCost | None) -> list[list[float]]:
    """By actor and step, the longest path from the step's start to the end, without waits for links and registers."""
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
    """The actors whose registers take more bytes than their limits."""

    def __init__(self, net: Network, bound: int | Sequence[int]) -> None:
        self.channels = net.channels
        self.limits = [bound] * len(net.actors) if isinstance(bound, int) else list(bound)

    def __call__(self, registers: Sequence[int]) -> list[int]:
        held = [0] * len(self.limits)
        for c, n in zip(self.channels, registers, strict=True):
            held[c.target] += n * c.bytes
        return [a for a, h in enumerate(held) if h > self.limits[a]]


def _fit(free: Sequence[int], too_full: TooFull, chosen: list[int], makespan: _Makespan) -> float:
    """Remove registers until no actor holds too much. Returns the makespan."""
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
        + "\nUse a schedule that holds fewer activations, recompute more, or cut smaller stages."
    )


def derive_order(
    rank_of: Sequence[int],
    microbatches: int,
    credits: Sequence[int],
    cost: Callable[[Action], float],
    latency: float = 0.0,
    *,
    split: bool = False,
) -> Schedule:
    """The order in which ranks run if each free rank starts any action whose inputs are there, backward first.

    A rank prefers a backward (B, or I if it is split), then a forward if its stage has a credit left, then a weight
    gradient W; among equals the lowest microbatch, then the latest stage. A credit is taken when F starts and returned
    when B or W ends. With p-i credits for stage i of p this is exactly 1F1B, for any latency. With 2(p-i)-1 credits it
    hides a latency of up to half of F+B+W, as eager 1F1B does: the bubble is (p-1)(F+B+W) + 2(p-1)·latency.

    Args:
      rank_of: the rank of each stage.
      microbatches: m.
      credits: for each stage, the most microbatches whose activations it may hold; at least 1.
      cost: seconds of an action.
      latency: seconds from the end of an action on one rank until another rank has its result.
      split: whether backwards are split into I and W.

    Raises:
      PipelineError: credits that are not one for each stage, or fewer than 1.
    """
    stages = len(rank_of)
    if len(credits) != stages or min(credits, default=1) < 1:
        raise PipelineError(
            f"derive_order: credits {list(credits)}; give one number, at least 1, for each of {stages} stages."
        )
    return _Derivation(rank_of, credits, cost, latency, split).run(microbatches)


class _Derivation:
    """The state of `derive_order`: a simulation by events."""

    def __init__(
        self,
        rank_of: Sequence[int],
        credits: Sequence[int],
        cost: Callable[[Action], float],
        latency: float,
        split: bool,
    ) -> None:
        self.rank_of, self.cost, self.latency, self.split = rank_of, cost, latency, split
        self.last = len(rank_of) - 1
        self.back = "I" if split else "B"
        self.urgency = {self.back: 0, "F": 1, "W": 2}
        self.left = list(credits)
        self.rows: list[list[Action]] = [[] for _ in range(1 + max(rank_of, default=-1))]
        self.offers: list[list[tuple[int, int, int, Action]]] = [[] for _ in self.rows]  # with their inputs, best first
        self.busy = [False] * len(self.rows)
        self.missing: dict[Action, int] = {}
        self.count = itertools.count()
        self.events: list[tuple[float, int, Action, bool]] = []  # an action gets an input, or ends

    def run(self, microbatches: int) -> Schedule:
        for j in range(microbatches):
            self._push(0.0, Action(0, "F", j), ends=False)
        while self.events:
            time = self.events[0][0]
            while self.events and self.events[0][0] == time:
                _, _, action, ends = heapq.heappop(self.events)
                if ends:
                    self._end(time, action)
                else:
                    self._offer(action)
            self._start(time)
        return Schedule("derived", tuple(map(tuple, self.rows)))

    def _push(self, time: float, action: Action, *, ends: bool) -> None:
        heapq.heappush(self.events, (time, next(self.count), action, ends))

    def _offer(self, action: Action) -> None:
        """Count an input of an action, and offer the action to its rank once all inputs are there."""
        needs = 2 if action.kind == self.back and action.stage < self.last else 1
        missing = self.missing[action] = self.missing.get(action, needs) - 1
        if not missing:
            offers = self.offers[self.rank_of[action.stage]]
            heapq.heappush(offers, (self.urgency[action.kind], action.microbatch, -action.stage, action))

    def _end(self, time: float, action: Action) -> None:
        rank = self.rank_of[action.stage]
        self.busy[rank] = False
        self.left[action.stage] += action.kind in "BW"
        for reader in self._readers(action):
            delay = self.latency if self.rank_of[reader.stage] != rank else 0.0
            self._push(time + delay, reader, ends=False)

    def _readers(self, action: Action) -> list[Action]:
        """The actions that read the results of an action."""
        s, kind, j = action
        if kind == "F":
            return [Action(s + 1, "F", j)] * (s < self.last) + [Action(s, self.back, j)]
        if kind == "W":
            return []
        return [Action(s - 1, self.back, j)] * (s > 0) + [Action(s, "W", j)] * self.split

    def _start(self, time: float) -> None:
        """Start the best offered action of each free rank."""
        for rank, offered in enumerate(self.offers):
            action = None if self.busy[rank] else _pick(offered, self.left)
            if action is not None:
                self.busy[rank] = True
                self.left[action.stage] -= action.kind == "F"
                self.rows[rank].append(action)
                self._push(time + self.cost(action), action, ends=True)


def _pick(offered: list[tuple[int, int, int, Action]], left: Sequence[int]) -> Action | None:
    """Pop the best action whose stage has a credit."""
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
