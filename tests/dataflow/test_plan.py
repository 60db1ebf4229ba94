"""Plans of flows: memory, bytes, seconds, simulated rounds; no devices are needed."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest

import shardc
from shardc import S
from shardc.dataflow.plan import PlannedFlow
from shardc.dataflow.round import Round
from shardc.errors import FlowError
from tests.dataflow.random_flows import AVAL, StubWork

BATCH = jax.ShapeDtypeStruct((64, 8), jnp.float32)
STATE = jax.ShapeDtypeStruct((8, 8), jnp.float32)


def grad(w, x):
    return jnp.tanh(x @ w).T @ x


def apply(w, grads):
    return w - sum(grads)


@shardc.host(gives=BATCH, credits=4, seconds=1e-3)
def read(key):
    return jnp.ones(BATCH.shape) * key


@shardc.host
def look(w):
    return None


def flow_of(*, workers=2, delay=1, **where):
    mesh = shardc.make_mesh(data=4, topology="v5p:2x2x1", **where)
    server = shardc.make_mesh(model=4, topology="v5p:2x2x1", **where)
    worker = shardc.function(grad, mesh=mesh, in_placements={"x": {"data": S(0)}})
    update = shardc.function(apply, mesh=server, donate_argnames="w")

    @shardc.flow
    def train(w, key):
        old = shardc.late(w, delay)
        w = update(w, [worker(old, read(key)) for _ in range(workers)])
        shardc.every(4, look)(w)
        return w, None

    return train


@pytest.fixture(scope="module")
def plan():
    return flow_of().plan(STATE, 0)


def test_nodes_actors_and_names(plan):
    assert [str(n) for n in plan.nodes] == ["inputs", "read", "grad", "read[1]", "grad[1]", "apply", "look"]
    assert list(plan.network.names) == ["inputs", "read", "grad, grad[1]", "read[1]", "apply", "look"]
    assert repr(plan) == "FlowPlan(train: 7 nodes, 6 actors, 6720 bytes a round, at least 0.001 s)"


def test_a_plan_is_kept(plan):
    flow = flow_of()
    assert flow.plan(STATE, 0) is flow.plan(jnp.zeros(STATE.shape), jnp.int32(3))
    assert flow.plan(STATE, 0) is not flow.plan(STATE, 0.5)


def test_bytes_and_registers(plan):
    """A worker gets its part of the batch and the weights of a late round; what stays moves no bytes."""
    weights, batch = 8 * 8 * 4, 64 * 8 * 4
    found = {(e.giver.name, e.taker.name): (e.delay, e.bytes, e.registers, e.held_bytes) for e in plan.edges}
    assert found["apply", "grad"] == (2, 4 * weights, 2 + 2, weights)
    assert found["read", "grad"] == (0, batch, 4, batch // 4)
    assert found["grad", "apply"] == (0, weights, 2, weights // 4)
    assert found["apply", "apply"] == (1, 0, 1 + 1, weights // 4)
    assert found["apply", "look"] == (0, weights, 2, weights)
    assert plan.bytes == 2 * (4 * weights + batch + weights) + weights // 4


def test_memory_is_registers_and_the_largest_node(plan):
    memory = {name: need for name, need, _ in plan.memory_by_row}
    grads = next(n for n in plan.nodes if n.name == "grad")
    assert memory["grad, grad[1]"] == 2 * (4 * 256 + 4 * 512) + grads.work.peak
    assert memory["look"] == 2 * 256


def test_a_deadlock():
    """No round of today's calls can deadlock; nodes that wait for later ones would."""
    round = Round("train", "train (train.py:7)")
    late, early = StubWork(None), StubWork((0, 2))
    early.waits = [(2, 0)]
    inputs = round.add("inputs", StubWork(None, results=1), [None], [AVAL])
    round.add("early", early, [], early.results)
    round.trace(
        lambda s, x: (s, round.values_of(round.add("late", late, round.values_of(round.nodes[1]), late.results))),
        AVAL, inputs, jax.tree.structure(0),
    )  # fmt: skip
    with pytest.raises(FlowError) as caught:
        PlannedFlow(round, 2)
    text = str(caught.value)
    assert text.startswith("train (train.py:7): The round deadlocks: early and late wait for each other; ")
    assert '  early is at early and waits for message 0 of "late -> early", which late gives in late' in text
    assert "ipeline" not in text


def test_memory_that_does_not_fit():
    with pytest.raises(FlowError) as caught:
        flow_of(hbm="100KB", delay=400).plan(STATE, 0)
    text = str(caught.value)
    assert text.startswith("train (test_plan.py:")
    assert "does not fit in memory:\n  grad, grad[1]: " in text
    assert text.endswith(
        " on each device, and it has 100000 bytes.\nGive fewer credits, delay less, or split what is sent."
    ) or text.endswith("KiB.\nGive fewer credits, delay less, or split what is sent.")


def test_seconds(plan):
    """Two readers at a millisecond each run beside each other."""
    assert plan.seconds == pytest.approx(1e-3, rel=1e-3)
    slow = {"grad": 5e-3, "grad[1]": 2e-3, "look": 1.0}
    assert plan.seconds_of(4000, seconds=slow) == pytest.approx(1000, rel=1e-2)  # of the evaluations
    assert plan.seconds_of(4000, seconds=slow | {"look": 0}) == pytest.approx(28, rel=1e-2)
    assert plan.seconds_of(10**5) == pytest.approx(100, rel=1e-2)


def test_simulated_rounds_with_samples(plan):
    times = itertools.cycle([1e-3, 9e-3])
    timeline = plan.simulate(40, seconds={"read": lambda: next(times), "grad": 0})
    assert timeline.makespan > 40 * 1e-3
    assert plan.simulate(40).makespan == pytest.approx(plan.seconds_of(40))


def test_seconds_of_a_node_that_is_not_there(plan):
    with pytest.raises(FlowError) as caught:
        plan.simulate(seconds={"rad": 1})
    assert str(caught.value).endswith(
        ": seconds= names rad; nodes are apply, grad, grad[1], inputs, look, read, read[1]."
    )
