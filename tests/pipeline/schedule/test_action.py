"""Tasks and actions: their texts, their order, and the task of an action."""

from __future__ import annotations

import pytest

from shardc.pipeline.schedule.action import Action, TaskId


@pytest.mark.parametrize("text", ["2F0", "0B12", "31I7", "4W400"])
def test_an_action_prints_as_it_parses(text):
    assert str(Action.parse(text)) == text


@pytest.mark.parametrize("text", ["", "F0", "2f0", "2F", "2F-1", "2X0", "2F0 2F1", "2SEND_F0", "9999999F0"])
def test_what_is_no_action(text):
    with pytest.raises(ValueError, match=r"is not an action; write <stage><F\|B\|I\|W><microbatch>, such as 2F0\."):
        Action.parse(text)


def test_the_texts_of_tasks():
    assert [str(TaskId(2, kind)) for kind in ("F", "B", "W", "load")] == ["2F", "2B", "2W", "load 2"]
    assert [str(TaskId(2, "update", level)) for level in (0, 1)] == ["update 2", "update 2.1"]
    assert [t.word for t in (TaskId(2, "B"), TaskId(2, "update"), TaskId(2, "update", 1))] == ["B", "update", "update1"]


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_tasks_are_ordered_as_a_microbatch_passes_them(stages):
    up = range(stages)
    order = [TaskId(s, "load") for s in up] + [TaskId(s, "F") for s in up]
    order += [TaskId(s, kind) for kind in "BW" for s in reversed(up)]
    order += [TaskId(s, "update", level) for level in (0, 1) for s in up]
    assert sorted(set(order)) == order
    assert [t.in_loop for t in order] == [t.kind in ("F", "B", "W") for t in order]


def test_the_task_of_an_action():
    tasks = [str(Action.parse(text).task) for text in ("2F0", "2B1", "2I1", "2W1")]
    assert tasks == ["2F", "2B", "2B", "2W"], "I is task B of a stage that has a W"
    assert [str(half) for half in Action.parse("2B1").halves] == ["2I1", "2W1"]
    assert Action.parse("2F0").halves == (Action.parse("2F0"),)
