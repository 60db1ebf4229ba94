import itertools
import random
import time

import pytest

from shardc.errors import PipelineError
from shardc.pipeline.schedule.costs import StageCosts
from shardc.pipeline.schedule.credits import auto_credits
from shardc.pipeline.schedule.methods import METHODS
from shardc.pipeline.schedule.network import network
from shardc.pipeline.schedule.schedule import Schedule
from shardc.pipeline.schedule.simulate import peak_activations, seconds_of_rounds, simulate
from shardc.runtime.actor import Span, check_network
from shardc.runtime.deadlock import find_deadlock
from shardc.runtime.executor import Executor, Task
from tests.pipeline.schedule import orders
from tests.runtime.networks import (
    build,
    first_of,
    late_by,
    looped,
    random_network,
    random_periodic,
    two_rates,
    unrolled,
)
from tests.runtime.watchdog import within

UNIT = (1.0, 1.0, 1.0)


def costs(f, b, w):
    """F, input gradient, weight gradient; a full backward costs both."""
    return lambda action: {"F": f, "B": b + w, "I": b, "W": w}[action.kind]


def times(timeline):
    return {span.label: (span.start, span.end) for spans in timeline.spans for span in spans}


# ---- by hand


def test_steps_start_as_soon_as_they_can():
    net = build(
        [[("x", "", "c.0"), ("y", "", "c.1"), ("z", "", "c.2")], [("u", "c.1", ""), ("v", "c.0 c.2", "")]],
        {"c": (0, 1)},
    )
    timeline = simulate(net, {"x": 1, "y": 2, "z": 4, "u": 1, "v": 3}.__getitem__)
    assert times(timeline) == {"x": (0, 1), "y": (1, 3), "z": (3, 7), "u": (3, 4), "v": (7, 10)}
    assert timeline.spans[1] == (Span(1, "u", 3, 4), Span(1, "v", 7, 10))
    assert timeline.order() == (("x", "y", "z"), ("u", "v"))
    assert timeline.makespan == 10
    assert timeline.busy == (7, 4)
    assert timeline.bubble == 6
    assert timeline.bubble_per_rank == (0, 3)
    assert timeline.messages == 3
    assert timeline.peaks == (3,)
    assert timeline.occupancy == ([(0, 1), (1, 2), (3, 3), (4, 2), (10, 0)],)


def test_a_register_is_taken_when_its_giver_starts_and_free_when_its_taker_ends():
    net = build(
        [[(f"x{j}", "", f"c.{j}") for j in range(3)], [(f"y{j}", f"c.{j}", "") for j in range(3)]], {"c": (0, 1, 2)}
    )
    timeline = simulate(net, lambda label: 1 if label[0] == "x" else 4)
    assert times(timeline) == {"x0": (0, 1), "x1": (1, 2), "x2": (5, 6), "y0": (1, 5), "y1": (5, 9), "y2": (9, 13)}
    assert timeline.peaks == (2,)


def test_messages_of_one_direction_go_one_after_the_other_and_their_latencies_overlap():
    net = build(
        [
            [("x", "", "c.0 d.0"), ("y", "", "c.1"), ("e", "back.0", "")],
            [("u", "c.0", "back.0"), ("v", "d.0", ""), ("w", "c.1", "")],
        ],
        {"c": (0, 1), "d": (0, 1), "back": (1, 0)},
    )
    timeline = simulate(net, lambda _: 1, lambda channel: (10, 3))
    # c.0 and d.0 leave at 1 and 4, c.1, made at 2, at 7; the way back is free at once
    assert times(timeline) == {"x": (0, 1), "y": (1, 2), "u": (14, 15), "v": (17, 18), "w": (20, 21), "e": (28, 29)}


def test_each_channel_its_own_link_speed_and_none_within_an_actor():
    net = build([[("x", "", "c.0 s.0"), ("y", "s.0", "")], [("u", "c.0", "")]], {"c": (0, 1), "s": (0, 0)})
    asked = []

    def link(channel):
        asked.append(channel.name)
        return 5, 2

    assert times(simulate(net, lambda _: 1, link)) == {"x": (0, 1), "y": (1, 2), "u": (8, 9)}
    assert asked == ["c"]


def test_what_ends_and_starts_at_one_time_shares_a_register():
    net = build([[("x0", "", "c.0"), ("x1", "", "c.1")], [("y0", "c.0", ""), ("y1", "c.1", "")]], {"c": (0, 1)})
    timeline = simulate(net, {"x0": 1, "x1": 1, "y0": 0, "y1": 1}.__getitem__)
    assert timeline.peaks == (1,)  # y0 has ended at 1 when x1 starts
    assert timeline.occupancy == ([(0, 1), (1, 1), (3, 0)],)


def test_steps_of_no_length_need_their_registers_too():
    """At time 0 all three x run before the first y, which waits for z."""
    net = build(
        [[("x0", "", "c.0"), ("x1", "", "c.1 d.0")], [("y0", "c.0 d.0", ""), ("y1", "c.1", "")]],
        {"c": (0, 1), "d": (0, 1)},
    )
    assert simulate(net, lambda _: 0.0).peaks == (2, 1)


def test_nothing():
    timeline = simulate(build([[], []], {}), lambda _: 1)
    assert (timeline.makespan, timeline.bubble, timeline.bubble_per_rank, timeline.messages) == (0, 0, (0, 0), 0)


# ---- rounds


def rounds_of(timeline):
    return {(span.label, span.round): (span.start, span.end) for spans in timeline.spans for span in spans}


def test_a_loop_of_two_actors_by_hand():
    """One round ago: both work at once. The same round: a deadlock. Three rounds ago, but one register between them."""
    cost = {"a": 1, "b": 3}.__getitem__
    timeline = simulate(looped(1), cost, rounds=3)
    assert rounds_of(timeline) == {
        ("a", 0): (0, 1), ("b", 0): (1, 4), ("a", 1): (4, 5), ("b", 1): (5, 8), ("a", 2): (8, 9), ("b", 2): (9, 12)
    }  # fmt: skip
    assert timeline.order() == (("a",) * 3, ("b",) * 3)
    assert (timeline.makespan, timeline.busy, timeline.messages) == (12, (3, 9), 6)
    assert timeline.peaks == (1, 1)
    assert timeline.occupancy[0] == [(0, 1), (1, 1), (5, 1), (9, 1)]
    ahead = simulate(looped(3, registers=4), cost, rounds=3)
    assert rounds_of(ahead) == {
        ("a", 0): (0, 1), ("b", 0): (1, 4), ("a", 1): (4, 5), ("b", 1): (5, 8), ("a", 2): (8, 9), ("b", 2): (9, 12)
    }  # fmt: skip
    wide = looped(3).with_registers([4, 2])
    assert rounds_of(simulate(wide, cost, rounds=3))["b", 2] == (7, 10)
    with pytest.raises(PipelineError, match="The flow deadlocks"):
        simulate(looped(0), cost)


def test_rates_by_hand():
    net = two_rates(delay=2)
    timeline = simulate(net, lambda label: 1 if label[0] == "g" else 10, rounds=8)
    assert [(s.label, s.round, s.start) for s in timeline.spans[0]] == [
        ("g0", 0, 0), ("g2", 2, 1), ("g4", 4, 2), ("g0", 6, 3)
    ]  # fmt: skip
    assert [(s.label, s.round, s.start) for s in timeline.spans[1]] == [("t0", 0, 0), ("t3", 3, 10), ("t0", 6, 20)]
    assert simulate(net, lambda _: 1).order() == (("g0", "g2", "g4"), ("t0", "t3"))


def test_a_million_rounds_are_counted():
    rng = random.Random(5)
    for net in (looped(1), looped(3).with_registers([5, 2]), two_rates(2)):
        table = {s.label: rng.random() for row in net.actors for s in row}
        calls = []

        def cost(label, table=table, calls=calls):
            calls.append(label)
            return table[label]

        link = lambda channel: (0.1, 0.01)  # noqa: E731
        small = simulate(net, table.__getitem__, link, 3000).makespan
        assert seconds_of_rounds(net, cost, link, 3000) == pytest.approx(small, rel=1e-9)
        assert len(calls) < 1000
        million = seconds_of_rounds(net, cost, link, 10**6)
        later = seconds_of_rounds(net, cost, link, 10**6 + net.period)
        a_period = simulate(net, table.__getitem__, link, 3000 + net.period).makespan - small
        assert later - million == pytest.approx(a_period, rel=1e-6)
        assert len(calls) < 3000
    assert seconds_of_rounds(looped(1), lambda _: 0.0, None, 10**6) == 0
    assert seconds_of_rounds(looped(1), lambda _: 1.0, None, 0) == 0


def test_parts_that_do_not_hold_each_other_back_are_run():
    net = build([[("x", "", "")], [("y", "", "")]], {})
    assert seconds_of_rounds(net, {"x": 1.0, "y": 1.5}.__getitem__, None, 100) == 150


# ---- against the definition


def by_definition(net, cost, link, rounds=None):
    """Start and end of each step, by label or by (label, round): equations are applied until nothing changes."""
    rows = net.actors if rounds is None else unrolled(net, rounds)
    name = (lambda label: label) if rounds is None else (lambda label: label[0])
    steps = {s.label: s for row in rows for s in row}
    before = {s.label: row[i - 1].label if i else None for row in rows for i, s in enumerate(row)}
    gives = [[s.label for row in rows for s in row for m in s.gives if m[0] == c] for c in range(len(net.channels))]
    takes = [[s.label for row in rows for s in row for m in s.takes if m[0] == c] for c in range(len(net.channels))]
    first = first_of(net) if rounds else []
    held = [sum(m[0] == c for m in first) for c in range(len(net.channels))]
    end = dict.fromkeys(steps, 0.0)
    while True:
        arrival, free = dict.fromkeys(first, 0.0), {}
        for row in rows:
            for s in row:
                for m in s.gives:
                    channel = net.channels[m[0]]
                    if channel.source == channel.target:
                        arrival[m] = end[s.label]
                        continue
                    latency, seconds = link(channel)
                    way = channel.source, channel.target
                    free[way] = max(free.get(way, 0.0), end[s.label]) + seconds
                    arrival[m] = free[way] + latency
        start = {}
        for label, s in steps.items():
            at = [end.get(before[label], 0.0), *(arrival[m] for m in s.takes)]
            for c, channel in enumerate(net.channels):
                for k, giver in enumerate(gives[c]):
                    before_it = -1 if channel.registers is None else k + held[c] - channel.registers
                    if giver == label and before_it >= 0:
                        at.append(end[takes[c][before_it]])
            start[label] = max(at)
        new = {label: start[label] + cost(name(label)) for label in steps}
        if new == end:
            return {label: (start[label], end[label]) for label in steps}
        end = new


def random_costs(rng, net):
    """Multiples of 1/4, zeros among them: exact, and with many ties."""
    table = {s.label: rng.choice((0, 0.25, 1, 1, 2)) for row in net.actors for s in row}
    ways = {c.name: (rng.choice((0, 0.5, 3)), rng.choice((0, 0.25))) for c in net.channels}
    return table.__getitem__, lambda channel: ways[channel.name]


def running_networks(count, **size):
    for seed in range(count):
        rng = random.Random(seed)
        net = random_network(rng, **size)
        if find_deadlock(net) is None:
            yield rng, net


def test_times_are_those_of_the_definition():
    checked = 0
    for rng, net in running_networks(600, actors=4, steps=12):
        cost, link = random_costs(rng, net)
        assert times(simulate(net, cost, link)) == by_definition(net, cost, link)
        checked += 1
    assert checked > 200


def test_times_of_rounds_are_those_of_the_definition():
    checked = 0
    for seed in range(400):
        rng = random.Random(seed)
        net = random_periodic(rng, nodes=4)
        if check_network(net) or find_deadlock(net) is not None:
            continue
        assert len(net.first_messages()) == sum(late_by(net, m) for m in set(net.first_messages()))
        cost, link = random_costs(rng, net)
        rounds = rng.randint(0, 2 * net.period + 2)
        assert rounds_of(simulate(net, cost, link, rounds)) == by_definition(net, cost, link, rounds)
        checked += 1
    assert checked > 150


def test_peaks_are_registers_with_which_all_runs_as_before():
    lower = 0
    for rng, net in running_networks(1500, actors=2, steps=16):
        cost, link = random_costs(rng, net)
        timeline = simulate(net.with_registers([None] * len(net.channels)), cost, link)
        bounded = simulate(net.with_registers([max(1, n) for n in timeline.peaks]), cost, link)
        assert times(bounded) == times(timeline)
        assert bounded.peaks == timeline.peaks
        messages = [
            sum(m[0] == c for row in net.actors for s in row for m in s.gives) for c in range(len(net.channels))
        ]
        assert all(n <= m for n, m in zip(timeline.peaks, messages, strict=True))
        lower += timeline.peaks != tuple(messages)
    assert lower > 25


def test_occupancy_between_events_is_what_has_started_and_not_ended():
    for rng, net in running_networks(300, actors=3, steps=12):
        cost, link = random_costs(rng, net)
        timeline = simulate(net, cost, link)
        spans = times(timeline)
        moments = sorted({t for span in spans.values() for t in span})
        for c, uses in enumerate(timeline.occupancy):
            lives = {}
            for row in net.actors:
                for s in row:
                    lives.update({m: (spans[s.label][0], lives.get(m, (0, 0))[1]) for m in s.gives if m[0] == c})
                    lives.update({m: (lives.get(m, (0, 0))[0], spans[s.label][1]) for m in s.takes if m[0] == c})
            for a, b in itertools.pairwise(moments):
                middle = (a + b) / 2
                now = [n for t, n in uses if t <= middle][-1:] or [0]
                assert now[0] == sum(start <= middle < end for start, end in lives.values())


# ---- against the literature: anchors/pipeline.md, 5.1 and 5.3

SIZES = [(p, k * p) for p in (2, 4, 8) for k in (1, 2, 4)]
COSTS = [(1, 1, 1), (2, 3, 1), (1, 1.5, 0.5), (3, 2, 1), (2, 3, 2)]


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("fbw", COSTS)
def test_closed_forms(p, m, fbw):
    f, b, w = fbw
    v = 2
    whole = (p - 1) * (f + b + w)
    ranks = range(p)
    forms = [  # schedule, bubble, peak activations by rank in chunks, messages
        (orders.gpipe(p, m), whole, [m] * p, 2 * m * (p - 1)),
        (orders.one_f_one_b(p, m), whole, [min(m, p - i) for i in ranks], 2 * m * (p - 1)),
        (orders.eager(p, m), whole, [min(m, 2 * (p - i) - 1) for i in ranks], 2 * m * (p - 1)),
        (orders.interleaved(p, m, v), whole, [min(v * m, 2 * (p - 1 - i) + (v - 1) * p + 1) for i in ranks],
         2 * m * (v * p - 1)),
        (orders.breadth_first(p, m, v), whole, [v * m] * p, 2 * m * (v * p - 1)),
        (orders.zb_h1(p, m), (p - 1) * (f + b - w), [p] * p, 2 * m * (p - 1)),
    ]  # fmt: skip
    for schedule, bubble, peaks, messages in forms:
        timeline = simulate(network(schedule), costs(*fbw))
        assert timeline.bubble == pytest.approx(bubble), schedule.name
        assert list(peak_activations(schedule, timeline)) == peaks, schedule.name
        assert timeline.messages == messages, schedule.name


@pytest.mark.parametrize(
    ("schedule", "scale", "bubbles"),
    [
        (orders.one_f_one_b(4, 16), 1, (9, 16, 23, 37)),
        (orders.eager(4, 16), 1, (9, 10.5, 12, 15)),
        (orders.gpipe(4, 16), 1, (9, 10.5, 12, 15)),
        (orders.zb_h1(4, 16), 1, (3, 6, 9, 23)),
        (orders.interleaved(4, 16, 2), 0.5, (4.5, 8, 11.5, 27.5)),
    ],
    ids=lambda x: getattr(x, "name", None),
)
def test_bubbles_under_latency(schedule, scale, bubbles):
    found = [simulate(network(schedule), costs(scale, scale, scale), lambda _, c=c: (c, 0)).bubble
             for c in (0, 0.25, 0.5, 1)]  # fmt: skip
    assert found == list(bubbles)


def test_bubble_of_the_run_and_of_a_rank_differ():
    timeline = simulate(network(Schedule.parse("0F0 0F1\n1F0 1F1")), costs(*UNIT))
    assert timeline.bubble == 1 and timeline.bubble_per_rank == (0, 0)


# ---- errors


def test_a_deadlock_is_told_with_its_cycle():
    with pytest.raises(PipelineError) as error:
        simulate(network(orders.one_f_one_b(3, 4), registers={"stash": [3, 1, 1]}), costs(*UNIT))
    assert str(error.value) == (
        "The pipeline deadlocks: actor 1 waits for itself; 3 of 3 actors never end.\n"
        '  actor 1 is at 1F1 and waits for a register of "stash 1": its only one holds message 0; '
        "actor 1 takes the first in 1B0, 1 step after 1F1.\n"
        "Order of the actions; [brackets] mark the stuck ones, actions before them are done:\n"
        "  actor 0 |  0F0   0F1   0F2  [0B0]  0F3   0B1   0B2   0B3\n"
        "  actor 1 |              1F0  [1F1]  1B0   1F2   1B1   1F3   1B2   1B3\n"
        "  actor 2 |        2F0   2B0  [2F1]  2B1   2F2   2B2   2F3   2B3\n"
        'It ends if you give more registers: 2 to "stash 1" (now 1). '
        "Or change the order so that they are free earlier."
    )


def test_no_network():
    with pytest.raises(PipelineError, match=r"0B0, takes message 0 of \"gradient 1->0\", which no step gives"):
        simulate(network(Schedule.parse("0F0 0B0 0F1 0B1\n1F0 1F1 1B1")), costs(*UNIT))


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_costs_and_links_are_numbers_of_seconds(bad):
    net = network(Schedule.parse("0F0 0B0\n1F0 1B0"))
    with pytest.raises(PipelineError, match=f"The cost of 1B0 is {bad}; it has to be a number of seconds, 0 or more."):
        simulate(net, lambda action: bad if str(action) == "1B0" else 1.0)
    with pytest.raises(PipelineError, match=r'The link of channel "activation 0->1" has latency 1 and'):
        simulate(net, costs(*UNIT), lambda _: (1, bad))


# ---- two clocks


@pytest.mark.parametrize(
    "schedule",
    [method.orders(3, 7, method.chunks, StageCosts()) for method in METHODS.values()],
    ids=lambda s: s.name,
)
def test_the_executor_does_what_the_simulator_does_in_the_same_order(schedule):
    net = network(schedule)
    net = net.with_registers(auto_credits(net, StageCosts()))
    timeline = simulate(net, StageCosts())
    rng = random.Random(0)
    ran = [[] for _ in range(schedule.ranks)]
    rank = schedule.rank_of

    def task(action):
        def run(values):
            ran[rank[action.stage]].append(action)
            time.sleep(rng.random() / 2000)
            return [action] * sum(action == s.label and len(s.gives) for row in net.actors for s in row)

        return Task(run)

    with Executor(net, task) as executor:
        spans = within(20, lambda: executor.run(record=True))
    assert tuple(map(tuple, ran)) == timeline.order() == schedule.rows
    assert [s.label for s in spans] == [label for row in timeline.order() for label in row]


@pytest.mark.sampled(0)
def test_a_million_actions_in_ten_seconds():
    net = network(orders.one_f_one_b(8, 62_500), registers={"stash": 8, "activation": 2, "gradient": 2})
    begin = time.process_time()  # of this process alone: the machine has other work
    timeline = simulate(net, costs(1, 1, 1), lambda _: (0.5, 0.1))
    assert timeline.makespan > 62_500 * 3
    assert time.process_time() - begin < 10
