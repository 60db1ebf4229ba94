"""Charts as text, word for word."""

import pytest

from shardc.pipeline.schedule.costs import StageCosts
from shardc.pipeline.schedule.methods import make_schedule
from shardc.pipeline.schedule.network import network
from shardc.pipeline.schedule.simulate import simulate
from shardc.report.chart import Chart, Track
from shardc.report.chart_text import chart_text
from tests.report.charts import chart


@pytest.mark.parametrize(
    ("name", "of"),
    {
        "planned": ("1f1b", 4, 8),
        "measured": ("1f1b", 2, 4, 1.2),
        "much_slower": ("zb-h1", 2, 4, 9.0),
        "chunks": ("zb-v", 2, 4, None, 2),
        "on_below": ("1f1b", 4, 24),
        "crowded": ("zb-h1", 16, 64),
    }.items(),
)
def test_text(name, of, golden):
    golden(f"chart_{name}", chart_text(chart(*of), 100))


def test_no_line_is_wider_than_asked():
    for width in (60, 100, 200):
        drawing = [n for n in chart_text(chart("zb-h1", 4, 8, 1.3), width).splitlines() if " | " in n]
        assert len(drawing) > 8 and width - 20 < max(map(len, drawing)) <= width


def in_units(name, costs=(1, 1, 1), latency=0.0, width=100):
    """The rows and the scale of a schedule whose times are units of the costs."""
    schedule = make_schedule(name, 2, 2)
    timeline = simulate(network(schedule), StageCosts.read(costs), lambda channel: (latency, 0.0))
    drawn = Chart(name, (Track("simulated", timeline),), schedule.rank_of, seconds=False)
    return chart_text(drawn, width).partition("\n\n")[2].rpartition("\n\n")[0]


def test_a_dot_is_a_unit_of_time():
    assert in_units("zb-h1") == ("rank 0 | F0 F1 .  I0 W0 I1 W1\nrank 1 | .  F0 I0 F1 I1 W0 W1\n       | 0")


def test_long_actions_are_wide_and_blocks_end_with_a_unit():
    assert in_units("1f1b", latency=0.5) == (
        "rank 0 | F0- F1- . . . . . . B0----- . . B1-----\n"
        "rank 1 | . . . F0- B0----- F1- B1----- . . . . .\n"
        "       | 0                   5"
    )
    assert in_units("1f1b", latency=0.5, width=32).splitlines()[:3] == [
        "rank 0 | F0- F1- . . . . . . B0",
        "rank 1 | . . . F0- B0----- F1-",
        "       | 0                   5",
    ]


def test_times_without_a_unit_fill_the_width():
    assert in_units("1f1b", (0.371, 0.7123, 0.211), width=60).startswith(
        "rank 0 | F0-- F1---............B0----------.....B1----------\n"
    )


def test_nothing_takes_time():
    assert in_units("1f1b", (0, 0, 0)) == "rank 0 |\nrank 1 |\n       | 0"
