"""What is wrong with a schedule: rank, column, the row with the action marked, all offenders at once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardc.errors import PipelineError
from shardc.pipeline.schedule.check import check_schedule, checked
from shardc.pipeline.schedule.costs import StageCosts
from shardc.pipeline.schedule.methods import METHODS
from shardc.pipeline.schedule.network import network
from shardc.pipeline.schedule.schedule import Schedule
from shardc.pipeline.schedule.simulate import find_deadlock, simulate


@pytest.mark.parametrize(
    ("text", "offenders"),
    [
        ("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1", []),
        ("", ["it has no actions."]),
        (
            "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1 1F1",
            ["rank 1, column 4: 1F1 again, after rank 1, column 2.\n  rank 1 | 1F0 1B0 1F1 1B1 [1F1]"],
        ),
        (
            "0F0 0F1 0B0\n1F0 1I0 1F1 1B1",
            [
                "rank 0, column 1: 0B1 (full backward, or I and W) is missing, but 0F1 is here.\n"
                "  rank 0 | 0F0 [0F1] 0B0",
                "rank 1, column 1: 1W0 (weight gradient) is missing, but 1I0 is here.\n  rank 1 | 1F0 [1I0] 1F1 1B1",
            ],
        ),
        (
            "0F0 0B0 0B1 0F1\n1F0 1B0",
            [
                "rank 1: 1F1 (forward) and 1B1 (full backward, or I and W) are missing; this rank runs stage 1.",
                "rank 0, column 2: 0B1 comes before 0F1 (column 3), which it needs.\n  rank 0 | 0F0 0B0 [0B1] 0F1",
            ],
        ),
        (
            "0F0 0F1 0B0 0B1 1F0\n1F1 1B0 1B1",
            [
                "rank 0, column 4: stage 1 has 1 actions here and 3 on rank 1; a stage runs on one rank.\n"
                "  rank 0 | 0F0 0F1 0B0 0B1 [1F0]",
            ],
        ),
        (
            "0F0 0W0 0B0 0I0",
            [
                "rank 0, column 3: 0I0 and, at rank 0, column 2, 0B0: a full backward B already contains I and W. "
                "Keep B, or I and W.\n  rank 0 | 0F0 0W0 0B0 [0I0]",
                "rank 0, column 1: 0W0 comes before 0I0 (column 3), which it needs.\n  rank 0 | 0F0 [0W0] 0B0 0I0",
            ],
        ),
        (
            "0F0 0B0 0F3 0B3\n\nrank 1 |\nrank 2 | 4F0 4B0 4F3 4B3",
            [
                "rank 1 has no actions, but every rank has to run a stage. Leave the row out, or add actions.",
                "rank 2, column 0: 4F0, but stages 1 to 3 have no actions.\n  rank 2 | [4F0] 4B0 4F3 4B3",
                "rank 0, column 2: 0F3, but microbatches 1 to 2 have no actions.\n  rank 0 | 0F0 0B0 [0F3] 0B3",
            ],
        ),
        (
            "0F0 1F0 0B0 1B0",  # neighbours on one rank
            ["rank 0, column 2: 0B0 comes before 1B0 (column 3), which it needs.\n  rank 0 | 0F0 1F0 [0B0] 1B0"],
        ),
    ],
)
def test_offenders(text, offenders):
    schedule = Schedule.parse(text)
    assert check_schedule(schedule) == offenders


def test_all_at_once():
    with pytest.raises(PipelineError) as error:
        checked(Schedule.parse("mine\n0F0 0F0 0B0\n1F0 2F0 1B0"))
    assert str(error.value) == (
        'Schedule "mine" is not valid:\n'
        "  rank 0, column 1: 0F0 again, after rank 0, column 0.\n"
        "    rank 0 | 0F0 [0F0] 0B0\n"
        "  rank 1, column 1: 2B0 (full backward, or I and W) is missing, but 2F0 is here.\n"
        "    rank 1 | 1F0 [2F0] 1B0"
    )


def test_a_long_list_is_cut():
    forwards = Schedule.parse(" ".join(f"0F{j}" for j in range(50)))
    assert len(check_schedule(forwards)) == 50
    with pytest.raises(PipelineError, match=r"and 30 more\.$"):
        checked(forwards)


def test_a_schedule_that_is_right_is_given_back():
    schedule = Schedule.parse("0F0 0B0")
    assert checked(schedule) is schedule


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_order_that_is_accepted_ends_or_is_told_to_deadlock(data):
    method = METHODS[data.draw(st.sampled_from(sorted(METHODS)))]
    ranks, microbatches = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    if method.refuse(ranks, microbatches, method.chunks):
        return
    rows = [list(row) for row in method.orders(ranks, microbatches, method.chunks, StageCosts()).rows]
    row = data.draw(st.sampled_from(rows))
    for _ in range(data.draw(st.integers(1, 6))):
        i, j = (data.draw(st.integers(0, len(row) - 1)) for _ in range(2))
        row.insert(j, row.pop(i))
    schedule = Schedule("shuffled", tuple(map(tuple, rows)))
    assert Schedule.parse(str(schedule)) == schedule
    offenders = check_schedule(schedule)
    if offenders:
        assert all("column" in o for o in offenders)
        return
    net = network(schedule)
    deadlock = find_deadlock(net)
    if deadlock is None:
        assert simulate(net, StageCosts()).makespan >= 3 * microbatches
    else:
        assert str(deadlock).startswith("The pipeline deadlocks: ")
        with pytest.raises(PipelineError, match="deadlocks"):
            simulate(net, StageCosts())
