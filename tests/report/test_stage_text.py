"""Short texts for stages: ranges, chains, stems of paths, and a grid cut to a width."""

import pytest

from shardc.pipeline.schedule.methods import make_schedule
from shardc.report.stage_text import cut_grid, pairs_text, ranges_text, stems, stems_text


def test_ranges():
    assert ranges_text([5, 0, 1, 2, 2]) == "0-2, 5"
    assert ranges_text([]) == ""


@pytest.mark.parametrize(
    ("pairs", "text"),
    [
        ([(0, 1)], "0 -> 1"),
        ([(0, 1), (1, 2), (2, 3)], "0 -> 1 -> 2 -> 3"),
        ([(i + 1, i) for i in range(7)], "7 -> 6 -> ... -> 0"),
        ([(0, t) for t in range(1, 8)], "0 -> 1-7"),
        ([(2, 0), (1, 0)], "1-2 -> 0"),
        ([(0, 1), (1, 2), (0, 3)], "0 -> 1 -> 2, 0 -> 3"),
    ],
)
def test_pairs(pairs, text):
    assert pairs_text(pairs) == text


def test_stems_tell_what_lives_where():
    found = stems({"l/0/w": 0, "l/0/b": 0, "l/1/w": 0, "l/2/w": 1, "head": 1})
    assert found == {0: ["l/0", "l/1"], 1: ["l/2", "head"]}
    assert stems_text(found[0]) == "l/0-1"
    assert stems_text(["l/2", "head", "a", "b", "c"]) == "l/2, head, a, and 2 more"


def test_a_wide_grid_is_cut_in_its_middle():
    schedule = make_schedule("1f1b", 4, 32)
    whole, nothing = cut_grid(schedule, 1000)
    assert nothing == "" and whole == "\n".join(str(schedule).splitlines()[1:])
    cut, left_out = cut_grid(schedule, 80)
    assert max(map(len, cut.splitlines())) <= 80 and " ... " in cut
    assert left_out.startswith("columns ") and left_out.endswith(" left out")
    first = cut.splitlines()[0].split(" ... ")
    assert whole.splitlines()[0].startswith(first[0].rstrip())
    assert whole.splitlines()[0].rstrip().endswith(first[1].strip())
