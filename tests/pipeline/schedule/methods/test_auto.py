"""The search: never worse than a method, within memory, the same each time, and honest about the bound."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardc.errors import PipelineError
from shardc.pipeline.schedule.action import Action
from shardc.pipeline.schedule.bound import lower_bound
from shardc.pipeline.schedule.costs import StageCosts
from shardc.pipeline.schedule.methods import METHODS, SearchLimits, find_schedule, make_schedule
from shardc.pipeline.schedule.network import network
from shardc.pipeline.schedule.schedule import Schedule
from shardc.pipeline.schedule.simulate import find_deadlock
from tests.pipeline.schedule.methods.measure import measure

UNEQUAL = [(1, 1, 1), (1, 2, 1), (2, 2, 2), (0.5, 0.5, 0.5)]


def methods(p, m, v):
    for method in METHODS.values():
        fits = v == method.chunks or (method.more_chunks and v > method.chunks)
        if fits and method.weight_versions == 1 and not method.refuse(p, m, v):
            yield method.name


@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 4), (4, 8), (4, 6), (5, 2), (3, 1)])
@pytest.mark.parametrize(("costs", "latency"), [((1, 1, 1), 0), ((1, 1.2, 0.8), 0.4)])
def test_never_worse_than_a_method(p, m, v, costs, latency):
    found = find_schedule(p, m, v, costs=costs, latency=latency, limits=SearchLimits(work=20_000))
    got = measure(found.schedule, costs, latency)
    assert got.makespan == pytest.approx(found.makespan)
    assert found.bound <= found.makespan * (1 + 1e-9)
    assert found.gap == pytest.approx(found.makespan / found.bound - 1)
    for name in methods(p, m, v):
        assert found.makespan <= measure(make_schedule(name, p, m, v, costs=costs), costs, latency).makespan + 1e-9


@pytest.mark.parametrize(
    ("p", "m", "v", "memory", "makespan"),
    [
        (4, 8, 1, None, 27),  # nothing is faster: the bound says so
        (8, 16, 2, None, 103),
        (4, 8, 1, 1, 72),
        (4, 8, 1, 4, 27),
        (4, 8, 2, 6, 53),
        (4, 8, 2, 7, 52),
    ],
)
def test_proved_best(p, m, v, memory, makespan):
    found = find_schedule(p, m, v, limits=SearchLimits(memory))
    assert (found.makespan, found.bound, found.gap) == (makespan, makespan, 0)
    assert memory is None or max(measure(found.schedule).peaks) <= memory


def test_unequal_stages():
    """A slow third stage, and no room for 1F1B's four activations: still as fast as that stage can be."""
    found = find_schedule(4, 16, costs=UNEQUAL, limits=SearchLimits(3))
    assert (found.gap, found.makespan) == (0, 98)


@pytest.mark.parametrize("memory", [1, 2, 3, [4, 3, 2, 1], [5, 1, 1, 7]])
def test_memory_is_kept(memory):
    found = find_schedule(4, 8, limits=SearchLimits(memory, 20_000))
    limits = [memory] * 4 if isinstance(memory, int) else memory
    assert all(p <= limit for p, limit in zip(measure(found.schedule).peaks, limits, strict=True))


def test_less_memory_never_helps():
    times = [find_schedule(4, 8, 2, limits=SearchLimits(k, 20_000)).makespan for k in range(2, 9)]
    assert times == sorted(times, reverse=True)


def test_the_same_question_has_the_same_answer():
    ask = {"costs": UNEQUAL, "limits": SearchLimits(2, 20_000)}
    one, two = (find_schedule(4, 8, **ask) for _ in range(2))
    assert (one.schedule, one.makespan, one.tried) == (two.schedule, two.makespan, two.tried)


def test_microbatches_are_numbered_as_they_start():
    found = find_schedule(4, 8, limits=SearchLimits(3, 50_000)).schedule
    assert [a.microbatch for a in found.rows[0] if a.kind == "F"] == list(range(8))


def test_through_make_schedule():
    assert make_schedule("auto", 3, 4) == find_schedule(3, 4).schedule


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"chunks": 2, "limits": SearchLimits([2, 1, 4, 1])},
            "auto: ranks 1, 3 may hold 1, 1 activations, but one microbatch alone needs 2, one for each stage of a "
            "rank. Allow that many, use fewer chunks, or recompute activations.",
        ),
        ({"limits": SearchLimits([2, 1])}, "auto: memory has 2 numbers for 4 ranks; give one, or one for each."),
        ({"latency": -1}, "auto: latency -1; it has to be a time of 0 or more."),
    ],
)
def test_what_cannot_be(options, message):
    with pytest.raises(PipelineError) as error:
        find_schedule(4, 8, **options)
    assert str(error.value) == message


# ---- the bound

TIMES = st.sampled_from([0, 0.5, 1, 2, 3])


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_schedule_beats_the_bound(data):
    method = METHODS[data.draw(st.sampled_from(sorted(METHODS)))]
    p, m, v = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 8)), method.chunks
    if method.refuse(p, m, v):
        return
    costs = StageCosts(tuple(data.draw(st.tuples(TIMES, TIMES, TIMES)) for _ in range(p * v)))
    latency = data.draw(TIMES)
    schedule = method.orders(p, m, v, costs)
    got = measure(schedule, costs, latency)
    for memory in (None, got.peaks):
        assert lower_bound(schedule.rank_of, m, costs, latency, memory) <= got.makespan + 1e-9


@pytest.mark.parametrize("costs", [(1, 1, 1), (1, 2, 1), (2, 1, 3)])
@pytest.mark.parametrize("latency", [0, 1])
def test_the_best_of_all_orders_of_a_tiny_pipeline(costs, latency):
    """Two ranks, two microbatches: all orders. The bound is below the best; the search finds the best."""
    m = 2

    def orders(rank):
        row = [Action(rank, k, j) for k in "FIW" for j in range(m)]
        for order in itertools.permutations(row):
            place = {a: i for i, a in enumerate(order)}
            if all(
                place[Action(rank, "F", j)] < place[Action(rank, "I", j)] < place[Action(rank, "W", j)]
                for j in range(m)
            ):
                yield order

    schedules = [Schedule("any", rows) for rows in itertools.product(orders(0), orders(1))]
    assert len(schedules) == 400
    for memory in (None, 1, 2):
        runs = [measure(s, costs, latency) for s in schedules if find_deadlock(network(s)) is None]
        best = min(r.makespan for r in runs if memory is None or max(r.peaks) <= memory)
        found = find_schedule(2, m, costs=costs, latency=latency, limits=SearchLimits(memory, 20_000))
        assert found.bound <= best == found.makespan
