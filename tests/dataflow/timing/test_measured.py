"""The seconds of recorded nodes, without those in which they waited for a turn."""

from types import SimpleNamespace

import pytest

from shardc.dataflow.network import NodeStep
from shardc.dataflow.timing.measured import mean_seconds, seconds_by_node
from shardc.pipeline.schedule.turns import PartlyHeld
from shardc.runtime.actor import Network, Resource, Span, Step


def spans_of(times):
    """`times`: for each name its (start, end)s."""
    rows = enumerate(times.items())
    return [Span(a, NodeStep(name, a, 0), *t, r) for a, (name, found) in rows for r, t in enumerate(found)]


def steps_of(names, **more):
    """A row of one step for each name."""
    return tuple((Step(NodeStep(n, a, 0), **more),) for a, n in enumerate(names))


def nodes_of(*names, meshes=()):
    return [SimpleNamespace(name=n, number=i, work=SimpleNamespace(meshes=meshes)) for i, n in enumerate(names)]


def test_changes_of_one_device_begin_when_the_one_before_has_ended():
    """Three of 2 seconds each, which come at once: the third one's span has 6."""
    net = Network(steps_of("abc", uses=(0,)), (), resources=(Resource("device 7"),))
    spans = spans_of({"a": [(0, 2), (10, 12)], "b": [(0, 4), (11, 14)], "c": [(0, 6), (20, 22)]})
    found = seconds_by_node(net, nodes_of("a", "b", "c", meshes=("data=1",)), spans, {})
    assert found == {0: [2, 2], 1: [2, 2], 2: [2, 2]}
    assert mean_seconds(found[1]) == 2
    alone = Network(steps_of("abc"), ())
    assert seconds_by_node(alone, nodes_of("a", "b", "c", meshes=("m",)), spans, {})[2] == [6, 2]


def test_calls_in_python_at_the_same_time_are_as_long_as_they_compute():
    """Four calls of 2 seconds that take turns in small slices: each takes 8."""
    net = Network(steps_of("abcd"), ())
    spans = spans_of({n: [(0, 8)] for n in "abcd"})
    found = seconds_by_node(net, nodes_of(*"abcd"), spans, {n: [2.0] for n in "abcd"})
    assert all(times == [pytest.approx(2)] and times[0].held == 2 for times in found.values())


def test_calls_that_sleep_are_as_long_as_they_sleep():
    net = Network(steps_of("ab"), ())
    spans = spans_of({"a": [(0, 8), (8, 16)], "b": [(0, 4), (20, 24)]})
    found = seconds_by_node(net, nodes_of("a", "b"), spans, {"a": [0.0, 0.0], "b": [0.0, 4.0]})
    assert found == {0: [8, 8], 1: [4, 4]}
    assert [t.held for t in found[1]] == [0, 4]
    mean = mean_seconds(found[1])
    assert (mean, mean.held) == (4, 2)


def test_a_call_whose_thread_is_not_known_takes_what_it_took():
    """Of another process, or with a deadline."""
    net = Network(steps_of("ab"), ())
    found = seconds_by_node(net, nodes_of("a", "b"), spans_of({"a": [(0, 3)], "b": [(1, 2)]}), {"b": [0.5]})
    assert found[0] == [3] and not isinstance(found[0][0], PartlyHeld)
    assert not isinstance(mean_seconds([PartlyHeld(1, 1), 2.0]), PartlyHeld)
