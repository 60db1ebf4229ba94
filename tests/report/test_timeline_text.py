"""Timelines as text."""

import pytest

from shardc.pipeline.schedule.costs import StageCosts
from shardc.pipeline.schedule.methods import make_schedule
from shardc.pipeline.schedule.network import network
from shardc.pipeline.schedule.simulate import simulate
from shardc.report.timeline_text import draw_timeline, unit_of
from shardc.runtime.actor import Span


def spans(name, p, m, costs=(1, 1, 1), latency=0.0):
    schedule = make_schedule(name, p, m)
    return simulate(network(schedule), StageCosts.read(costs), lambda channel: (latency, 0.0)).spans


def short(action):
    return f"{action.kind}{action.microbatch}"


def test_a_cell_for_each_unit_of_time():
    assert draw_timeline(spans("zb-h1", 2, 3)) == (
        "time   | 0                   5\n"
        "rank 0 | 0F0 0F1 .   0I0 0W0 0F2 0I1 0W1 0I2 0W2\n"
        "rank 1 | .   1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"
    )


def test_long_actions_are_wide_and_lines_as_long_as_asked():
    drawn = spans("1f1b", 2, 2, (1, 1, 1), 0.5)
    assert draw_timeline(drawn, label=short) == (
        "time   | 0         2.5       5         7.5\n"
        "rank 0 | F0- F1- . . . . . . B0----- . . B1-----\n"
        "rank 1 | . . . F0- B0----- F1- B1----- . . . . ."
    )
    assert draw_timeline(drawn, label=short, width=32, name="actor") == (
        "time    | 0         2.5\n"
        "actor 0 | F0- F1- . . . . . .\n"
        "actor 1 | . . . F0- B0----- F1\n"
        "\n"
        "time    | 5         7.5\n"
        "actor 0 | B0----- . . B1-----\n"
        "actor 1 | - B1----- . . . . ."
    )


def test_times_that_nothing_short_fits_are_rounded():
    assert draw_timeline(spans("1f1b", 2, 2, (0.371, 0.7123, 0.211)), label=short) == (
        "time   | 0         1         2         3\n"
        "rank 0 | F0- F1 ..........B0------ ....B1------\n"
        "rank 1 | ....F0 B0------- F1 B1------- ........."
    )


def test_what_is_much_shorter_than_the_rest_is_not_drawn():
    rows = [[Span(0, "long", 0.0, 100.0)], [Span(1, "tick", 100.0, 100.01), Span(1, "long", 101.0, 201.0)]]
    time, first, second = draw_timeline(rows).splitlines()
    assert time.startswith("time   | 0         20        40        60")  # a unit of 2
    assert first == f"rank 0 | long{45 * '-'} {50 * '.'}"
    assert second == f"rank 1 | {50 * '.'}long{45 * '-'}"


def test_nothing_to_draw():
    assert draw_timeline([]) == draw_timeline([[], []]) == draw_timeline(spans("1f1b", 2, 2, (0, 0, 0))) == ""


@pytest.mark.parametrize(
    ("costs", "latency", "unit"),
    [
        ((1, 1, 1), 0, 1),
        ((2, 3, 1), 0, 1),
        ((2, 2, 2), 0, 2),
        ((1, 1, 1), 0.5, 0.5),
        ((1, 1.2, 0.8), 0.5, 0.1),
        ((1e-6, 1e-6, 1e-6), 0, 1e-6),
        ((0.371, 0.7123, 0.211), 0, 0.05),  # nothing short fits all of these
        ((0, 0, 0), 0, 0),
    ],
)
def test_the_unit(costs, latency, unit):
    assert unit_of(spans("zb-h1", 3, 4, costs, latency)) == pytest.approx(unit)
