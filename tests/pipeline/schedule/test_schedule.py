"""Schedules as data: properties, the grid and CSV that parse back, and what is told of cells that are none."""

import doctest

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardc.errors import PipelineError
from shardc.pipeline.schedule import action, costs
from shardc.pipeline.schedule.action import Action
from shardc.pipeline.schedule.methods import METHODS, make_schedule, read
from shardc.pipeline.schedule.schedule import Schedule


@pytest.mark.parametrize("module", [action, costs, read], ids=lambda m: m.__name__)
def test_examples(module):
    result = doctest.testmod(module)
    assert result.attempted
    assert not result.failed


def test_the_grid():
    schedule = make_schedule("1f1b", 3, 4)
    assert str(schedule) == (
        "1f1b\n"
        "rank 0 | 0F0 0F1 0F2         0B0 0F3 0B1     0B2     0B3\n"
        "rank 1 |     1F0 1F1     1B0 1F2 1B1 1F3 1B2     1B3\n"
        "rank 2 |         2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"
    )
    assert Schedule.parse(str(schedule)) == schedule
    assert hash(Schedule.parse(str(schedule))) == hash(schedule)


def test_properties():
    schedule = make_schedule("zb-v", 3, 5)
    assert (schedule.ranks, schedule.stages, schedule.microbatches, schedule.chunks) == (3, 6, 5, 2)
    assert schedule.rank_of == (0, 1, 2, 2, 1, 0)
    assert schedule.splits_backward
    assert not make_schedule("1f1b", 3, 5).splits_backward
    assert make_schedule("interleaved", 2, 2, 3).rank_of == (0, 1, 0, 1, 0, 1)


def test_what_an_action_needs():
    whole, split = make_schedule("1f1b", 2, 1), make_schedule("zb-h1", 2, 1)
    assert [str(a) for a in whole.needs(Action(0, "B", 0))] == ["0F0", "1B0"]
    assert [str(a) for a in split.needs(Action(0, "I", 0))] == ["0F0", "1I0"]
    assert [str(a) for a in split.needs(Action(1, "I", 0))] == ["1F0"]
    assert [str(a) for a in split.needs(Action(0, "W", 0))] == ["0I0"]
    assert whole.needs(Action(0, "F", 0)) == ()


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 4), (3, 11)])
def test_round_trips(name, p, m):
    schedule = make_schedule(name, p, m)
    assert Schedule.parse(str(schedule)) == schedule
    assert Schedule.from_csv(schedule.to_csv(), name) == schedule


ROWS = st.lists(
    st.lists(st.builds(Action, st.integers(0, 12), st.sampled_from("FBIW"), st.integers(0, 30)), max_size=8).map(tuple),
    min_size=1,
    max_size=4,
).map(tuple)


@settings(max_examples=200, deadline=None)
@given(rows=ROWS, name=st.text("abrnk 01Ff-_é()|.,:", max_size=8))
def test_any_rows_round_trip(rows, name):
    """Schedules that are none, too: what is wrong with them has to be shown. A name is a line of its own."""
    schedule = Schedule(name, rows)
    if rows[-1]:  # empty rows at the end are the end of a file
        assert Schedule.from_csv(schedule.to_csv(), name).rows == rows
    grid = str(schedule)
    assert Schedule.parse(grid).rows == rows
    if name == name.strip() and name:
        assert Schedule.parse(grid) == schedule


@pytest.mark.parametrize(
    "text",
    [
        "0F0 0F1 . 0B0 0B1\n- 1F0 1B0 1F1 1B1",
        "rank 0 | 0F0 | 0F1 |     | 0B0 | 0B1\nrank 1 |     | 1F0 | 1B0 | 1F1 | 1B1",
        "\n\nRank 0: 0F0, 0F1, 0B0, 0B1\n\n   1: 1F0, 1B0, 1F1, 1B1\n",
        "my own one\n0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1",
        "0F0 0F1 0B0 0B1\r\n1F0 (1B0;1F1)OVERLAP_F_B 1B1",
    ],
)
def test_ways_to_write_a_grid(text):
    rows = Schedule.parse(text).rows
    assert [" ".join(map(str, row)) for row in rows] == ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]
    assert Schedule.parse(text).name == ("my own one" if "own" in text else "schedule")


def test_torchs_csv():
    text = "0F0,0F1,,0B0,(0F2;1B0)OVERLAP_F_B,,\r\n,2F0,,,\r\n"
    rows = Schedule.from_csv(text).rows
    assert [" ".join(map(str, row)) for row in rows] == ["0F0 0F1 0B0 0F2 1B0", "2F0"]


def test_csv_is_a_row_for_each_rank():
    assert make_schedule("1f1b", 2, 2).to_csv() == "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "0F0,1SEND_F0,1RECV_B0,0B0\n1F0,x,1B0,,2F\n",
            'Schedule "csv" has cells that are not actions:\n'
            "  rank 0, column 1: 1SEND_F0 is communication.\n"
            "    rank 0 | 0F0 [1SEND_F0] 1RECV_B0 0B0\n"
            "  rank 0, column 2: 1RECV_B0 is communication.\n"
            "    rank 0 | 0F0 1SEND_F0 [1RECV_B0] 0B0\n"
            '  rank 1, column 1: "x" is not an action; write <stage><F|B|I|W><microbatch>, such as 2F0.\n'
            "    rank 1 | 1F0 [x] 1B0 . 2F\n"
            '  rank 1, column 4: "2F" is not an action; write <stage><F|B|I|W><microbatch>, such as 2F0.\n'
            "    rank 1 | 1F0 x 1B0 . [2F]\n"
            "shardc derives sends and receives from the order of the computation. Save the compute-only format: "
            'torch\'s _dump_csv(file, format="compute_only").',
        ),
        (
            ",".join(["0F0"] * 9 + ["oops"] + ["0F0"] * 9),
            'Schedule "csv" has cells that are not actions:\n'
            '  rank 0, column 9: "oops" is not an action; write <stage><F|B|I|W><microbatch>, such as 2F0.\n'
            "    rank 0 | ... 0F0 0F0 0F0 0F0 0F0 [oops] 0F0 0F0 0F0 0F0 0F0 ...",
        ),
    ],
)
def test_cells_that_are_no_actions(text, message):
    with pytest.raises(PipelineError) as error:
        Schedule.from_csv(text)
    assert str(error.value) == message


def test_many_wrong_cells_are_counted():
    with pytest.raises(PipelineError, match=r"and 10 more\."):
        Schedule.parse("0F0 " + "x " * 30)


def test_rows_out_of_order():
    with pytest.raises(PipelineError) as error:
        Schedule.parse("rank 0 | 0F0 0B0\nrank 2 | 1F0 1B0")
    assert str(error.value) == 'Schedule "schedule": row 1 is labelled "rank 2 |"; rows have to be in order.'
