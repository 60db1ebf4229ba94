"""One actor, two clocks: what runs under a real function is in the order that the simulation says."""

from __future__ import annotations

from functools import partial

import jax
import pytest

import shardc
from shardc.pipeline.schedules import METHODS
from tests.pipelines import batch, layers, loss, training


@pytest.mark.parametrize("name", [n for n, m in METHODS.items() if m.weight_versions == 1])
def test_actions_run_in_the_order_of_the_simulation(name):
    stages = 2 * METHODS[name].chunks
    step = training(partial(loss, cuts=range(stages - 1)), 5)
    compiled = shardc.function(
        step, mesh=shardc.make_mesh(pipe=2), pipeline=shardc.Pipeline(schedule=name), donate_argnames="params"
    ).compile(layers(stages), batch(10))
    with_numpy = layers(stages), batch(10)
    for _ in range(2):
        jax.block_until_ready(compiled(*with_numpy))
        run = compiled.executable._last.spans
        simulated = compiled.plan.simulate().spans
        for actor, row in enumerate(compiled.plan.schedule.rows):
            order = [s.label for s in run if s.actor == actor]
            assert order == [s.label for s in simulated if s.actor == actor]
            assert order == [s.label for s in compiled.plan.network.actors[actor]]
            actions = [str(label) for label in order if hasattr(label, "microbatch")]
            whole = {a: [a] for a in map(str, row)}
            if compiled.plan.schedule.splits_backward:  # a full backward is both of its halves
                whole |= {str(a): [str(a._replace(kind=k)) for k in "IW"] for a in row if a.kind == "B"}
            missing = [p for a in map(str, row) for p in whole[a] if p not in actions]
            assert not [p for p in missing if "W" not in p], "a stage without weights of its own has no W"
            assert actions == [p for a in map(str, row) for p in whole[a] if p in actions]
