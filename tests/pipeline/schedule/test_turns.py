"""Steps and messages that share devices, links and interpreters take turns."""

import copy
import pickle
import random
from dataclasses import replace

import pytest

from shardc.pipeline.schedule.simulate import seconds_of_rounds, simulate
from shardc.pipeline.schedule.turns import PartlyHeld
from shardc.runtime.actor import Resource, check_network
from shardc.runtime.deadlock import find_deadlock
from tests.runtime.networks import build, first_of, looped, random_periodic, unrolled


def using(net, units, steps=None, channels=None):
    """The network with resources of so many units: labels of steps, and names of channels, with those that they use."""
    steps, channels = steps or {}, channels or {}
    return replace(
        net,
        actors=tuple(tuple(replace(s, uses=steps.get(s.label, ())) for s in row) for row in net.actors),
        channels=tuple(replace(c, uses=channels.get(c.name, ())) for c in net.channels),
        resources=tuple(Resource(f"r{i}", n) for i, n in enumerate(units)),
    )


def times(timeline):
    return {(s.label, s.round): (s.start, s.end) for row in timeline.spans for s in row}


def alone(count):
    """So many actors that need nobody."""
    return build([[(f"s{a}", "", "")] for a in range(count)], {})


# ---- by hand


def test_steps_of_one_device_go_one_after_the_other():
    net = using(alone(3), [1], {f"s{a}": (0,) for a in range(3)})
    timeline = simulate(net, {"s0": 1, "s1": 2, "s2": 4}.__getitem__)
    assert times(timeline) == {("s0", 0): (0, 1), ("s1", 0): (1, 3), ("s2", 0): (3, 7)}
    assert timeline.held == (7,)
    assert simulate(using(alone(3), [2], {f"s{a}": (0,) for a in range(3)}), lambda _: 1).makespan == 2
    assert simulate(using(alone(3), [3], {f"s{a}": (0,) for a in range(3)}), lambda _: 1).makespan == 1
    assert simulate(using(alone(3), [1], {"s1": (0,)}), lambda _: 1).held == (1,)  # of one alone, too


def test_who_is_ready_first_goes_first():
    net = build([[("a", "", "c.0")], [("b", "c.0", "")], [("d", "", ""), ("e", "", "")]], {"c": (0, 1)})
    net = using(net, [1], {"b": (0,), "e": (0,)})
    cost = {"a": 2, "b": 4, "d": 3, "e": 1}.__getitem__
    assert times(simulate(net, cost))["e", 0] == (6, 7)
    assert times(simulate(net, lambda label: 1 if label == "d" else cost(label)))["b", 0] == (2, 6)
    same = {"a": 2, "b": 4, "d": 2, "e": 1}.__getitem__
    assert times(simulate(net, same))["b", 0] == (2, 6)  # at one time the first actor


def test_who_needs_two_devices_holds_up_those_behind_it():
    """As the queues of devices do: a program at the head of one queue waits for the other one."""
    net = using(alone(3), [1, 1], {"s0": (0,), "s1": (0, 1), "s2": (1,)})
    assert times(simulate(net, lambda _: 1)) == {("s0", 0): (0, 1), ("s1", 0): (1, 2), ("s2", 0): (2, 3)}


def test_a_step_that_holds_what_it_uses_for_a_part_of_its_time():
    net = using(alone(3), [1], {f"s{a}": (0,) for a in range(3)})
    timeline = simulate(net, lambda _: PartlyHeld(5, 1))
    assert times(timeline) == {("s0", 0): (0, 5), ("s1", 0): (1, 6), ("s2", 0): (2, 7)}
    assert timeline.held == (3,)
    assert simulate(net, lambda _: PartlyHeld(5, 0)).makespan == 5
    for kept in (copy.copy(PartlyHeld(5, 1)), pickle.loads(pickle.dumps(PartlyHeld(5, 1)))):
        assert (kept, kept.held) == (5, 1)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_senders_share_the_link_into_their_taker(n):
    """Each sends for 3, a message is on its way for 10 more: it takes 3 n + 10, and not 13."""
    names = [f"c{a}" for a in range(n)]
    net = build(
        [*([(f"s{a}", "", f"c{a}.0")] for a in range(n)), [("t", " ".join(f"{c}.0" for c in names), "")]],
        {c: (a, n) for a, c in enumerate(names)},
    )
    net = using(net, [1, *[1] * n], channels={c: (0, 1 + a) for a, c in enumerate(names)})
    timeline = simulate(net, lambda _: 1, lambda _: (10, 3))
    assert times(timeline)["t", 0] == (1 + 3 * n + 10, 1 + 3 * n + 11)
    assert timeline.held == (3 * n, *[3] * n)


def test_a_link_in_use_holds_up_both_of_its_ends():
    """a sends to x and y, b to x: what leaves a for y waits until a's message to x has the link into x."""
    net = build(
        [[("b", "", "bx.0")], [("a", "", "ax.0 ay.0")], [("x", "ax.0 bx.0", "")], [("y", "ay.0", "")]],
        {"ax": (1, 2), "ay": (1, 3), "bx": (0, 2)},
    )
    net = using(net, [1, 1, 1, 1], channels={"ax": (0, 2), "ay": (0, 3), "bx": (1, 2)})
    found = times(simulate(net, lambda _: 0, lambda _: (0, 2)))
    assert found["x", 0] == (4, 4) and found["y", 0] == (6, 6)


def test_rounds_of_workers_with_one_server_are_counted():
    """n loops through one device of 2 seconds: a round takes max(2 n, 3), whatever the first rounds took."""
    for n in (1, 2, 3, 6):
        net = build(
            [
                *([(f"w{k}", f"d{k}.0", f"c{k}.0")] for k in range(n)),
                *([(f"s{k}", f"c{k}.0", f"d{k}.0")] for k in range(n)),
            ],
            {
                **{f"c{k}": (k, n + k, 1) for k in range(n)},
                **{f"d{k}": (n + k, k, 2, 0, 1) for k in range(n)},
            },
        )
        net = using(net, [1], {f"s{k}": (0,) for k in range(n)})
        calls = []

        def cost(label, calls=calls):
            calls.append(label)
            return 1.0 if label[0] == "w" else 2.0

        million = seconds_of_rounds(net, cost, None, 10**6)
        assert million == pytest.approx(max(2 * n, 3) * 10**6, rel=1e-5)
        assert len(calls) < 1000
        assert seconds_of_rounds(net, cost, None, 40) == simulate(net, cost, rounds=40).makespan


def test_a_network_whose_resources_nobody_shares_is_as_it_was():
    net = looped(1)
    own = using(net, [1, 1, 1], {"a": (0,), "b": (1,)}, {"c": (2,)})
    cost = {"a": 1, "b": 3}.__getitem__
    link = lambda channel: (0.5, 0.25)  # noqa: E731
    assert times(simulate(own, cost, link, 5)) == times(simulate(net, cost, link, 5))
    assert simulate(own, cost, link, 5).held == (5, 15, 5 * 0.25)


# ---- against an event simulation that is plain and slow


def who_waits(net):
    """The resources that more actors use than they have units, as givers of messages and as runners of steps, and those
    that messages use beside them."""
    users = [set() for _ in net.resources]
    for a, row in enumerate(net.actors):
        for s in row:
            for r in s.uses:
                users[r].add(("run", a))
    for c in net.channels:
        for r in c.uses if c.source != c.target else ():
            users[r].add(("send", c.source))
    found = {r for r, who in enumerate(users) if len(who) > net.resources[r].units}
    for _ in net.resources:
        found |= {r for c in net.channels if c.source != c.target and found & set(c.uses) for r in c.uses}
    return found


def by_events(net, cost, link, rounds):
    """Start and end of each step: of all that ask, the first one goes, again and again."""
    rows, shared = unrolled(net, rounds), who_waits(net)
    uses = {s.label: s.uses for row in net.actors for s in row}
    arrival, sent = dict.fromkeys(first_of(net), 0.0), []
    held = [sum(m[0] == c for m in arrival) for c in range(len(net.channels))]
    given = [[s.label for row in rows for s in row for m in s.gives if m[0] == c] for c in range(len(net.channels))]
    taken = [[s.label for row in rows for s in row for m in s.takes if m[0] == c] for c in range(len(net.channels))]
    free = {r: [0.0] * x.units for r, x in enumerate(net.resources)}
    found, done = {}, [0] * len(rows)

    def ready(a):
        """When the next step of an actor is ready; None: not yet known."""
        step = rows[a][done[a]]
        at = [found[rows[a][done[a] - 1].label][1] if done[a] else 0.0]
        for m in step.takes:
            at.append(arrival.get(m))
        for c, channel in enumerate(net.channels):
            for k, giver in enumerate(given[c]):
                before = -1 if channel.registers is None else k + held[c] - channel.registers
                if giver == step.label and before >= 0:
                    at.append(found.get(taken[c][before], (0, None))[1])
        return None if None in at else max(at)

    while any(n < len(row) for n, row in zip(done, rows, strict=True)) or sent:
        asks = []
        for a, n in enumerate(done):
            if n < len(rows[a]) and (at := ready(a)) is not None:
                turn = bool(set(uses[rows[a][n].label[0]]) & shared)
                asks.append((turn, at, rows[a][n].label[1], a, 1, 0, None))
        for number, (at, r, a, m) in enumerate(sent):
            asks.append((bool(set(net.channels[m[0]].uses) & shared), at, r, a, 0, number, m))
        if not asks:
            return None
        _, at, _, a, kind, number, m = min(asks)
        if kind:
            step = rows[a][done[a]]
            names = [r for r in uses[step.label[0]] if r in shared]
            begin = max([at, *(min(free[r]) for r in names)])
            seconds = cost(step.label[0])
            for r in names:
                free[r].remove(min(free[r]))
                free[r].append(begin + getattr(seconds, "held", seconds))
            found[step.label] = begin, begin + seconds
            done[a] += 1
            for m in step.gives:
                if net.channels[m[0]].source == net.channels[m[0]].target or link(net.channels[m[0]]) == (0, 0):
                    arrival[m] = begin + seconds
                else:
                    sent.append((begin + seconds, step.label[1], a, m))
        else:
            sent.pop(number)
            channel = net.channels[m[0]]
            latency, seconds = link(channel)
            names = channel.uses or [(channel.source, channel.target)]
            begin = max([at, *(min(free.setdefault(r, [0.0])) for r in names)])
            for r in names:
                free[r].remove(min(free[r]))
                free[r].append(begin + seconds)
            arrival[m] = begin + seconds + latency
    return found


def random_use(rng, net):
    """The network with random resources, and its costs: multiples of 1/4, zeros and ties among them."""
    units = [rng.choice((1, 1, 1, 2)) for _ in range(rng.randint(1, 4))]
    links = [1] * rng.randint(1, 3)  # what messages use has one unit
    some = lambda: tuple(rng.sample(range(len(units)), rng.choice((0, 1, 1, min(2, len(units))))))  # noqa: E731
    lines = [len(units) + k for k in range(len(links))]
    net = using(
        net, units + links, {s.label: some() for row in net.actors for s in row},
        {c.name: tuple(rng.sample(lines, rng.choice((0, 1, 1, min(2, len(lines)))))) for c in net.channels},
    )  # fmt: skip
    table = {}
    for row in net.actors:
        for s in row:
            seconds = rng.choice((0, 0.25, 1, 1, 2))
            part = rng.random() < 0.2
            table[s.label] = PartlyHeld(seconds, rng.choice((0, seconds / 2))) if part else seconds
    ways = {c.name: (rng.choice((0, 0.5, 3)), rng.choice((0, 0.25, 1))) for c in net.channels}
    return net, table.__getitem__, lambda channel: ways[channel.name]


def networks(seeds, **size):
    for seed in seeds:
        rng = random.Random(seed)
        net = random_periodic(rng, **size)
        if not check_network(net) and find_deadlock(net) is None and any(net.actors):
            yield rng, *random_use(rng, net)


def check(rng, net, cost, link):
    rounds = rng.randint(1, 2 * net.period + 2)
    assert times(simulate(net, cost, link, rounds)) == {
        (label, r): span for (label, r), span in by_events(net, cost, link, rounds).items()
    }
    many = rng.randint(1, 200)
    exact = simulate(net, cost, link, many).makespan
    assert seconds_of_rounds(net, cost, link, many) == pytest.approx(exact, rel=1e-9)


def test_times_are_those_of_an_event_simulation():
    found = list(networks(range(150), nodes=4, actors=4))
    for rng, *rest in found:
        check(rng, *rest)
    assert len(found) > 50


@pytest.mark.sampled(0)
@pytest.mark.parametrize("first", range(10_000, 20_000, 1000))
def test_times_of_many_are_those_of_an_event_simulation(first):
    for rng, *rest in networks(range(first, first + 1000), nodes=random.Random(first).choice((3, 6, 8)), actors=4):
        check(rng, *rest)
