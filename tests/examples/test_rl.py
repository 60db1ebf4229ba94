"""PPO as a dataflow learns, and its simulators are never more stale than it says."""

from dataclasses import replace

import numpy as np
import pytest

import shardc
from examples import ppo, rl

LATE = 1


@pytest.fixture(scope="module")
def ran():
    said = []
    cfg = replace(ppo.CONFIGS["tiny"], hidden=32)
    flow, state = rl.make_flow(cfg, shardc.make_mesh(data=4), rl.Settings(late=LATE, every=10), said.append)
    try:
        _, given = flow.run(state, range(20), record=True)
        yield flow.plan(state, 0), given, said
    finally:
        flow.close()


@pytest.mark.sampled(0)
def test_it_learns_with_parameters_of_a_round_ago(ran):
    _, given, said = ran
    first, second = (float(g["reached"]) for g in given if g["reached"] is not None)
    assert second > max(first, 100)
    assert [s[:24] for s in said] == ["round   10: falls after ", "round   20: falls after "]


@pytest.mark.sampled(0)
def test_no_simulator_is_staler_or_further_ahead_than_planned(ran):
    plan, given, _ = ran
    assert {e.delay for e in plan.edges if e.giver.name == "learn" and e.taker.name.startswith("play")} == {1 + LATE}
    learns = {s.round: s.start for s in given.spans if str(s.label) == "learn"}
    plays = [s for s in given.spans if str(s.label).startswith("play") and str(s.label) != "play together"]
    assert len(plays) == 16 * 20
    assert all(s.start > learns[s.round - 1 - LATE] for s in plays if s.round > LATE)
    used = given.chart.tracks[1].timeline.peaks
    assert all(n <= c.registers for n, c in zip(used, plan.network.channels, strict=True))


def test_lengths_of_games_have_a_long_tail(ran):
    """By the simulator: staleness takes away the wait for the longest game of each round."""
    plan = ran[0]
    rng = np.random.default_rng(0)
    synchronous = sum(max(rl.seconds_of_a_game(rng) for _ in range(16)) for _ in range(200))
    late = plan.simulate(200, seconds={"play": lambda: (rl.seconds_of_a_game(rng), 0.0), "learn": 0.0}).makespan
    assert 1.2 * late < synchronous
