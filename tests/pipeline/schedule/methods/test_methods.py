"""Every method for every size that it allows, and what it says of those that it does not."""

import itertools
import re

import pytest

from shardc.errors import PipelineError
from shardc.pipeline.schedule.costs import StageCosts
from shardc.pipeline.schedule.methods import METHODS, make_schedule
from shardc.pipeline.schedule.methods.method import ranks_of
from shardc.pipeline.schedule.schedule import Schedule
from tests.pipeline.schedule.methods.measure import measure


def with_chunks(chunks):
    """The names of the methods that have so many stages on each rank, and "auto", as an error lists them."""
    *names, last = [m.name for m in METHODS.values() if m.chunks == chunks or (m.more_chunks and m.chunks < chunks)]
    return f"{', '.join([*names, last])} or auto"


def test_names():
    assert len(METHODS) > 10
    assert all(m.name == name and m.source for name, m in METHODS.items())
    assert METHODS["pipedream-2bw"].weight_versions == 2


@pytest.mark.parametrize("name", METHODS)
def test_all_sizes_end(name):
    method = METHODS[name]
    for p, m in itertools.product((1, 2, 3, 4, 5), (1, 2, 3, 5, 8, 11)):
        for v in (method.chunks, method.chunks + 1)[: 1 + method.more_chunks]:
            if why := method.refuse(p, m, v):
                with pytest.raises(PipelineError, match=re.escape(why)):
                    make_schedule(name, p, m, v)
                continue
            schedule = make_schedule(name, p, m, v)
            measure(schedule)  # is checked, and does not deadlock
            assert schedule.name == name
            assert (schedule.ranks, schedule.microbatches, schedule.chunks) == (p, m, v)
            assert schedule.rank_of == ranks_of(method.placement, p, v)


def test_dualpipe_fills_the_v_from_both_ends():
    for p, m in itertools.product((1, 2, 3, 4, 5), (1, 2, 3, 5, 8, 11)):
        assert bool(METHODS["dualpipe-v"].refuse(p, m, 2)) == (m < 2 * p)


@pytest.mark.parametrize("name", METHODS)
def test_costs_of_each_stage(name):
    p, v = 3, METHODS[name].chunks
    costs = [(1 + s % 2, 0.5 * s, 1) for s in range(p * v)]
    measure(make_schedule(name, p, 7, costs=costs), costs, latency=0.3)


def test_without_time_there_is_an_order_too():
    for name in METHODS:
        measure(make_schedule(name, 3, 6, costs=(0, 0, 0)))


def test_a_last_group_that_is_not_full():
    """Interleaved where p does not divide m: what is too much in the last group is left out."""
    full, part = make_schedule("interleaved", 4, 8), make_schedule("interleaved", 4, 6)
    assert part.rows == tuple(tuple(a for a in row if a.microbatch < 6) for row in full.rows)
    assert measure(part).bubble <= measure(full).bubble + 6  # two microbatches of one stage


def test_pipedream_has_the_order_of_1f1b():
    assert make_schedule("pipedream-2bw", 4, 8).rows == make_schedule("1f1b", 4, 8).rows


def test_a_schedule_of_ones_own():
    def serial(ranks, microbatches, chunks, costs):
        assert costs == StageCosts(((1.0, 2.0, 3.0),))
        return Schedule.parse(" ".join(f"0F{j} 0B{j}" for j in range(microbatches)))

    ours = make_schedule(serial, 1, 3, costs=(1, 2, 3))
    assert str(ours) == "schedule\nrank 0 | 0F0 0B0 0F1 0B1 0F2 0B2"
    assert make_schedule(str(ours), 1, 3) == make_schedule(ours, 1, 3) == ours
    assert make_schedule(METHODS["zb-v"], 2, 3) == make_schedule("zb-v", 2, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("zbh1", 4, 8),
            f'Unknown schedule "zbh1"; there are {", ".join(METHODS)}, auto. Did you mean "zb-h1"?',
        ),
        (
            ("dualpipe-v", 4, 7),
            'Schedule "dualpipe-v" does not support 4 ranks and 7 microbatches: it needs at least 2·ranks = 8 '
            "microbatches, to fill the V from both ends; zb-v needs fewer.",
        ),
        (
            ("1f1b", 4, 8, 2),
            f'Schedule "1f1b" has 1 stage on each rank, not 2: set chunks=1, or use {with_chunks(2)}.',
        ),
        (
            ("interleaved", 4, 8, 1),
            f'Schedule "interleaved" has at least 2 stages on each rank, not 1: set chunks=2, or use {with_chunks(1)}.',
        ),
        (("1f1b", 0, 8), "make_schedule: ranks=0, microbatches=8, chunks=None; each has to be 1 or more."),
        (("auto", 4, 8, -1), "make_schedule: ranks=4, microbatches=8, chunks=-1; each has to be 1 or more."),
        (
            ("0F0 0B0", 2, 3),
            'Schedule "schedule" is for another pipeline: it has 1 ranks, not 2, 1 microbatches, not 3.',
        ),
    ],
)
def test_what_cannot_be(arguments, message):
    with pytest.raises(PipelineError) as error:
        make_schedule(*arguments)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ((1, 2), "costs: (1, 2) has to be three numbers F, B, W (forward, input gradient, weight gradient)."),
        ([(1, 1, 1)] * 3, "costs has 3 triples for 4 stages; give one (F, B, W) for all of them, or one for each."),
        (
            [(1, 1, 1), (-1, 1, float("nan")), (1, 1, 1), (1, 1, 1)],
            "A cost has to be a number of 0 or more:\n  stage 1: F costs -1.0\n  stage 1: W costs nan",
        ),
    ],
)
def test_costs_that_are_none(costs, message):
    with pytest.raises(PipelineError) as error:
        make_schedule("1f1b", 4, 8, costs=costs)
    assert str(error.value) == message
