import itertools
import random

import pytest

from shardc.errors import PipelineError
from shardc.pipeline.schedule.credits import auto_credits, derive_order
from shardc.pipeline.schedule.network import network
from shardc.pipeline.schedule.schedule import Schedule
from shardc.pipeline.schedule.simulate import peak_activations, simulate
from shardc.runtime.deadlock import find_deadlock
from tests.pipeline.schedule import orders
from tests.runtime.networks import build, random_network

LATENCIES = (0, 0.25, 0.5, 1)


def cost(action):
    return {"F": 1, "B": 2, "I": 1, "W": 1}[action.kind]


def makespan(net, registers, seconds, link=None):
    bounded = net.with_registers(registers)
    return float("inf") if find_deadlock(bounded) else simulate(bounded, seconds, link).makespan


# ---- orders from credits: anchors/pipeline.md, 5.3


@pytest.mark.parametrize("latency", LATENCIES)
@pytest.mark.parametrize(("p", "m"), [(4, 16), (2, 3), (3, 2), (5, 5), (1, 3)])
def test_p_minus_i_credits_give_1f1b_exactly(p, m, latency):
    derived = derive_order(range(p), m, [p - i for i in range(p)], cost, latency)
    assert derived.rows == orders.one_f_one_b(p, m).rows


@pytest.mark.parametrize(
    ("credits", "bubbles"),
    [
        ([4, 3, 2, 1], (9, 16, 23, 37)),
        ([7, 5, 3, 1], (9, 10.5, 12, 15)),
        ([16] * 4, (9, 10.5, 12, 15)),
        ([4] * 4, (9, 22.5, 27, 36)),
        ([2] * 4, (51, 63, 75, 99)),
        ([1] * 4, (144, 168, 192, 240)),
    ],
)
def test_bubbles_under_latency(credits, bubbles):
    found = []
    for latency in LATENCIES:
        schedule = derive_order(range(4), 16, credits, cost, latency)
        timeline = simulate(network(schedule), cost, lambda _, c=latency: (c, 0))
        assert all(n <= c for n, c in zip(peak_activations(schedule, timeline), credits, strict=True))
        found.append(timeline.bubble)
    assert found == list(bubbles)


@pytest.mark.parametrize("latency", [0, 0.5, 1])
@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 16), (8, 32)])
@pytest.mark.parametrize("costs", [(1, 2), (2, 3), (1, 1)])
def test_twice_p_minus_i_less_one_hides_the_latency(p, m, latency, costs):
    seconds = lambda a: dict(zip("FB", costs, strict=True))[a.kind]  # noqa: E731
    schedule = derive_order(range(p), m, [2 * (p - i) - 1 for i in range(p)], seconds, latency)
    timeline = simulate(network(schedule), seconds, lambda _: (latency, 0))
    assert timeline.bubble == (p - 1) * sum(costs) + 2 * (p - 1) * latency


def test_weight_gradients_fill_the_gaps():
    schedule = derive_order(range(4), 8, [4] * 4, cost, split=True)
    timeline = simulate(network(schedule), cost)
    assert timeline.bubble == 5  # 1F1B: 9
    assert max(peak_activations(schedule, timeline)) <= 4
    assert {a.kind for row in schedule.rows for a in row} == set("FIW")


def test_stages_may_share_ranks():
    schedule = derive_order([0, 1, 1, 0], 3, [4, 4, 4, 4], cost, 0.5)
    assert schedule.name == "derived" and schedule.rank_of == (0, 1, 1, 0)
    assert sorted(a for row in schedule.rows for a in row) == sorted(
        (s, k, j) for s in range(4) for k in "FB" for j in range(3)
    )
    assert find_deadlock(network(schedule)) is None


@pytest.mark.parametrize("seed", range(30))
def test_derived_orders_never_deadlock(seed):
    rng = random.Random(seed)
    ranks, stages = rng.randint(1, 4), rng.randint(1, 8)
    rank_of = [*range(ranks), *(rng.randrange(ranks) for _ in range(stages))]
    table = {(s, k): rng.choice((0, 0.5, 1, 2)) for s in range(len(rank_of)) for k in "FBIW"}
    credits = [rng.randint(1, 3) for _ in rank_of]
    split = rng.random() < 0.5
    schedule = derive_order(rank_of, 5, credits, lambda a: table[a[:2]], rng.choice((0, 1)), split=split)
    assert sum(map(len, schedule.rows)) == 5 * len(rank_of) * (3 if split else 2)
    assert find_deadlock(network(schedule, registers={} if split else {"stash": credits})) is None


def test_credits_for_each_stage():
    for credits in ([1, 1], [1, 0, 1]):
        with pytest.raises(PipelineError) as error:
            derive_order(range(3), 2, credits, cost)
        assert (
            str(error.value) == f"derive_order: credits {credits}; give one number, at least 1, for each of 3 stages."
        )


# ---- registers for an order


def test_1f1b_needs_its_stashes_and_little_else():
    net = network(orders.one_f_one_b(4, 16))
    chosen = dict(zip([c.name for c in net.channels], auto_credits(net, cost), strict=True))
    assert [chosen[f"stash {i}"] for i in range(4)] == [4, 3, 2, 1]
    assert [chosen[f"activation {i}->{i + 1}"] for i in range(3)] == [1, 1, 1]


def least_in_all(net, seconds, link, best):
    """Every choice of registers that keeps the best time and of which none can be lowered, by brute force."""
    peaks = simulate(net, seconds, link).peaks
    keep = [r for r in itertools.product(*(range(1, max(2, n + 1)) for n in peaks))
            if makespan(net, r, seconds, link) <= best]  # fmt: skip
    below = lambda r, i: (*r[:i], r[i] - 1, *r[i + 1 :])  # noqa: E731
    return [r for r in keep if not any(below(r, i) in keep for i in range(len(r)))]


def test_none_can_be_lowered_against_brute_force():
    checked = more_than_ones = 0
    for seed in range(300):
        rng = random.Random(seed)
        net = random_network(rng, actors=3, steps=14)
        net = net.with_registers([None] * len(net.channels))
        if find_deadlock(net) is not None:
            continue
        table = {s.label: rng.choice((0.25, 1, 2)) for row in net.actors for s in row}
        way = rng.choice((0, 1)), rng.choice((0, 0.5))
        link = lambda _, way=way: way  # noqa: E731
        best = simulate(net, table.__getitem__, link).makespan
        chosen = auto_credits(net, table.__getitem__, link)
        assert chosen in least_in_all(net, table.__getitem__, link, best), seed
        checked += 1
        more_than_ones += any(n > 1 for n in chosen)
    assert checked > 100 and more_than_ones > 25


@pytest.mark.parametrize("latency", [0, 0.5, 2])
def test_latency_costs_registers_not_time(latency):
    """What eager 1F1B needs on the way back grows with the latency."""
    net = network(orders.eager(4, 12))
    link = lambda _: (latency, latency / 10)  # noqa: E731
    chosen = auto_credits(net, cost, link)
    best = simulate(net, cost, link).makespan
    assert makespan(net, chosen, cost, link) == pytest.approx(best, rel=1e-9)
    for i, n in enumerate(chosen):
        if n > 1:
            assert makespan(net, (*chosen[:i], n - 1, *chosen[i + 1 :]), cost, link) > best * (1 + 1e-9)


def test_pinned_channels_keep_their_registers():
    net = network(orders.one_f_one_b(3, 6), registers={"activation": 5, "stash": [None, 3, None]})
    chosen = dict(zip([c.name for c in net.channels], auto_credits(net, cost), strict=True))
    assert chosen["activation 0->1"] == 5 and chosen["stash 1"] == 3 and chosen["stash 0"] == 3


def slow_taker(size):
    """x fills a buffer for y, which needs w's long step first; so registers buy time for z, which comes after x."""
    rows = [
        [*((f"x{j}", "", f"c.{j}") for j in range(4)), ("z", "", "d.0")],
        [("w", "", ""), *((f"y{j}", f"c.{j}", "") for j in range(4))],
        [("end", "d.0", "")],
    ]
    return build(rows, {"c": (0, 1, None, size), "d": (0, 2)})


def test_a_bound_costs_the_least_time_that_it_can():
    net = slow_taker(10)
    seconds = lambda label: {"w": 4, "end": 6}.get(label, 1)  # noqa: E731
    by_registers = {r: makespan(net, (r, 1), seconds) for r in (1, 2, 3, 4)}
    assert by_registers == {1: 17, 2: 14, 3: 13, 4: 11}
    assert auto_credits(net, seconds) == (4, 1)
    assert auto_credits(net, seconds, bound=39) == (3, 1)
    assert auto_credits(net, seconds, bound=[0, 25, 0]) == (2, 1)
    assert auto_credits(net, seconds, bound=10) == (1, 1)


@pytest.mark.parametrize(("bound", "time"), [(8, 32), (5, 36), (3, 51), (2, 67)])
def test_within_a_bound_nothing_is_kept_that_buys_no_time(bound, time):
    net = network(orders.gpipe(3, 6), bytes={"activation": 1, "gradient": 1})
    link = lambda _: (2, 0)  # noqa: E731
    chosen = auto_credits(net, cost, link, bound=bound)
    for a in range(3):
        assert sum(n * c.bytes for c, n in zip(net.channels, chosen, strict=True) if c.target == a) <= bound
    assert makespan(net, chosen, cost, link) == time
    for i, n in enumerate(chosen):
        if n > 1:
            assert makespan(net, (*chosen[:i], n - 1, *chosen[i + 1 :]), cost, link) > time


def test_a_bound_that_cannot_be_kept():
    net = network(orders.one_f_one_b(3, 6), bytes={"stash": 100, "gradient": 7})
    with pytest.raises(PipelineError) as error:
        auto_credits(net, cost, bound=[320, 150, 99])
    assert str(error.value) == (
        "The registers do not fit the bound, and with fewer at the first of these actors the order deadlocks:\n"
        "  actor 1: 2 x 100 (stash 1) + 1 x 7 (gradient 2->1) = 207 bytes; the bound is 150.\n"
        "  actor 2: 1 x 100 (stash 2) = 100 bytes; the bound is 99.\n"
        "Use a schedule that holds fewer activations, recompute more, or cut smaller stages."
    )


def test_a_deadlock_whatever_the_registers():
    with pytest.raises(PipelineError, match="No number of registers helps"):
        auto_credits(network(Schedule.parse("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")), cost)
