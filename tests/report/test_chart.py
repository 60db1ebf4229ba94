"""The data of charts: scales, and names of tasks."""

import pytest

from shardc.pipeline.schedule.action import Action
from shardc.report.chart import scale_of
from tests.report.charts import chart


def test_runs_of_one_length_share_a_scale_and_others_do_not():
    assert len(set(chart("1f1b", 2, 4, 1.2).spans_of_time)) == 1
    assert len(set(chart("1f1b", 2, 4, 9.0).spans_of_time)) == 2


@pytest.mark.parametrize(
    ("extent", "most", "texts", "unit"),
    [
        (0.0346, 5, ["0", "10", "20", "30"], "ms"),
        (7.06e-4, 10, ["0", "100", "200", "300", "400", "500", "600", "700"], "us"),
        (1.0, 3, ["0", "0.5", "1"], "s"),
        (2.5e-3, 3, ["0", "1", "2"], "ms"),
        (0.0, 3, ["0"], "ns"),
    ],
)
def test_scales_are_round(extent, most, texts, unit):
    places, found, name = scale_of(extent, most, seconds=True)
    assert (found, name) == (texts, unit)
    assert all(0 <= p <= extent * (1 + 1e-9) for p in places)


def test_a_scale_without_seconds():
    assert scale_of(27.0, 4, seconds=False) == ([0.0, 10.0, 20.0], ["0", "10", "20"], "")


def test_labels_and_kinds():
    own, several = chart("1f1b", 2, 4), chart("zb-v", 2, 4, None, 2)
    action = Action(1, "F", 3)
    assert own.label(action) == "F3" and several.label(action) == "1F3"
    assert own.label("update 1") == "U" and several.label("update 1") == "U1"
    assert own.kind("update 0.1") == "U" and own.kind("load 3") == "L" and own.kind("done 1") == "-"
    assert several.chunk(Action(3, "F", 0)) == 1 and several.chunk(Action(0, "F", 0)) == 0
