"""One actor, two clocks: what runs under a real function is in the order that the simulation says."""

from __future__ import annotations

import time
from functools import partial

import jax
import pytest

import shardc
from shardc.pipeline.schedule.action import Action
from shardc.pipeline.schedule.methods import METHODS
from tests.pipeline.pipelines import batch, layers, loss, training


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [n for n, m in METHODS.items() if m.weight_versions == 1])
def test_actions_run_in_the_order_of_the_simulation(name):
    stages = 2 * METHODS[name].chunks
    step = training(partial(loss, cuts=range(stages - 1)), 5)
    compiled = shardc.function(
        step, mesh=shardc.make_mesh(pipe=2), pipeline=shardc.Pipeline(schedule=name), donate_argnames="params"
    ).compile(layers(stages), batch(10))
    simulated = compiled.plan.simulate().order()
    schedule, network = compiled.plan.schedule, compiled.plan.network
    for _ in range(2):
        jax.block_until_ready(compiled(layers(stages), batch(10)))
        spans = compiled.executable._last.spans
        for actor, row in enumerate(schedule.rows):
            ran = [s.label for s in spans if s.actor == actor]
            assert ran == list(simulated[actor]) == [s.label for s in network.actors[actor]]
            actions = [label for label in ran if isinstance(label, Action)]
            if schedule.splits_backward:  # a full backward is both of its halves; a stage may have nothing for W
                row = [p for a in row for p in ([a._replace(kind=k) for k in "IW"] if a.kind == "B" else [a])]
                row = [a for a in row if a.kind != "W" or a in actions]
            assert actions == list(row)


def test_programs_that_call_back_have_a_thread_for_each_rank():
    """XLA:CPU runs them where they are launched: in one thread the ranks would not overlap."""

    def napping(params, batch):
        x = batch["x"]
        for i, layer in enumerate(params):
            x = jax.pure_callback(nap, jax.ShapeDtypeStruct(x.shape, x.dtype), x) * layer["b"].sum()
            x = shardc.stage_boundary(x) if i < len(params) - 1 else x
        return x.mean()

    running, most = [], []

    def nap(x):
        running.append(1)
        most.append(len(running))
        time.sleep(0.02)
        running.pop()
        return x

    average = shardc.accumulate(napping, microbatches=6)
    step = shardc.function(average, mesh=shardc.make_mesh(pipe=3), pipeline=shardc.Pipeline())
    jax.block_until_ready(step(layers(3), batch(6)))
    assert max(most) == 3
