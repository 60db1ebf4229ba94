"""The window of launched, unfinished steps."""

import gc

import pytest

from shardc.errors import PipelineError
from shardc.runtime.window import LaunchLimit, LaunchWindow


class Value:
    """A value that weak references can follow."""


def window_of(steps, finished=None):
    waited = []
    return LaunchWindow(LaunchLimit(steps, waited.append, finished)), waited


def test_full_at_the_limit():
    window, waited = window_of(2)
    values = [Value(), Value()]
    for i, v in enumerate(values):
        assert not window.full
        window.add((f"x{i}", "model.py:1"), [v], [])
    assert window.full and len(window) == 2 and window.oldest == ("x0", "model.py:1")
    window.make_room()
    assert waited == [[values[0]]] and window.oldest[0] == "x1" and not window.full


def test_values_that_are_gone_need_no_wait():
    window, waited = window_of(1)
    window.add(("x", ""), [Value(), (Value(), 3, None)], [])
    gc.collect()
    window.make_room()
    assert waited == []


def test_tokens_are_held_and_waited_for():
    window, waited = window_of(1, finished=lambda token: token == "ready")
    window.add(("x", ""), [Value()], ["not ready"])
    assert not window.may_go_on
    window.make_room()
    window.add(("y", ""), [Value()], ["ready"])
    assert window.may_go_on
    window.make_room()
    assert waited == [["not ready"], ["ready"]]


def test_without_finished_nothing_is_known():
    window, _ = window_of(1)
    window.add(("x", ""), [], ["token"])
    assert not window.may_go_on


def test_since():
    window, _ = window_of(2)
    assert window.since == 0.0
    window.add(("x", ""), [], ["token"])
    first = window.since
    window.add(("y", ""), [], ["token"])
    assert window.since == first > 0.0
    window.make_room()
    assert window.since >= first


def test_drain_waits_for_all_and_returns_the_first_failure():
    seen = []

    def wait(tokens):
        seen.append(tokens)
        if tokens != ["good"]:
            raise ValueError(tokens[0])

    window = LaunchWindow(LaunchLimit(9, wait))
    for name in ("good", "first", "second"):
        window.add((name, ""), [], [name])
    failed = window.drain()
    assert failed is not None
    (label, _), error = failed
    assert label == "first" and str(error) == "first"
    assert seen == [["good"], ["first"], ["second"]] and len(window) == 0
    assert window.drain() is None


def test_a_limit_is_one_step_or_more():
    with pytest.raises(PipelineError) as error:
        LaunchLimit(0, print)
    assert str(error.value) == "LaunchLimit: steps=0; an actor needs at least 1, as in LaunchLimit(1, wait)."
