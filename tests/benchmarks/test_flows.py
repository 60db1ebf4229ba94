"""The benchmark of dataflows runs, and simulates the seconds that it sleeps. No time is looked at."""

import numpy as np
import pytest

from benchmarks import flows
from benchmarks.flows import FLOWS, SHAPES, overhead, parts, rounds_of, seconds_of, sleeps


@pytest.mark.parametrize("make", SHAPES)
def test_overhead(make):
    found = overhead(make, 3, 1)
    assert found["hand"] > 0 and found["flow"] > 0 and found["empty"] > 0
    assert found["actors"] <= found["nodes"] + 1


def test_parts():
    assert len(parts(2)) == 7 and all(seconds > 0 for seconds in parts(2).values())


def test_a_plan_is_simulated_with_the_seconds_of_the_run(monkeypatch):
    make, option = FLOWS["loader, 4 ahead"]
    flow = make(option)
    timeline = flow.plan(np.float32(0), 0).simulate(20, seconds=sleeps(flow.plan(np.float32(0), 0)))
    busy = [sum(seconds_of(name, 0, r) for r in range(20)) for name in ("read", "step")]
    assert timeline.busy[1:] == pytest.approx([*busy, 2 * seconds_of("evaluate", 0, 9)])
    monkeypatch.setattr(flows, "seconds_of", lambda *_: 0.0)
    assert rounds_of(make, option, 3)[1] > 0
