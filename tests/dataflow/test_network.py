"""Networks of rounds: what becomes an actor, a channel, a register, and whether it can deadlock."""

from __future__ import annotations

import random
from collections import Counter

import jax
import numpy as np
import pytest

import shardc
from shardc.dataflow import network as networks
from shardc.dataflow.network import FlowNetwork
from shardc.dataflow.round import Round
from shardc.runtime.actor import Actor
from shardc.runtime.deadlock import find_deadlock
from tests.dataflow.interpreter import assert_same
from tests.dataflow.random_flows import AVAL, LENGTH, StubWork, draw, flow_of, mesh, round_of
from tests.runtime.watchdog import within

PERIODS = 18
"""Whole periods of all random flows."""


def run_many(built, rng, rounds):
    """Whether all actors end so many rounds, when they fire in a random order. Each value is the round in which it was
    made: a step gets those of its delay, and no channel holds more than its registers."""
    net, edges = built.network, built.edges
    actors = [Actor(net, a, None, rounds) for a in range(len(net.actors))]
    inside, turns = Counter(), Counter()
    for channel, key in net.first_messages():
        taken = (turns[channel] + 1) * edges[channel].taker.every - 1
        turns[channel] += 1
        inside[channel] += 1
        actors[net.channels[channel].target].deliver((channel, key), taken - edges[channel].delay)
    live = [a for a in actors if a.step is not None]
    while ready := [a for a in live if a.ready()]:
        actor = rng.choice(ready)
        at, step = actor.round, actor.step
        values, _ = actor.fire()
        for (channel, _), value in zip(step.takes, values, strict=True):
            assert value == at - edges[channel].delay
        for channel, key in step.gives:
            inside[channel] += 1
            assert inside[channel] <= net.channels[channel].registers
            actors[net.channels[channel].target].deliver((channel, key), at)
        for channel, _ in step.takes:
            inside[channel] -= 1
            actors[net.channels[channel].source].credit(channel, None)
        live = [a for a in actors if a.step is not None]
    return not live


def built_of(body):
    """The network of a round of stubs: `call(name, place, *args)` gives two values."""
    round = Round("train", "train (train.py:7)")
    inputs = round.add("inputs", StubWork(None, results=1), [None], [AVAL])

    def call(name, place, *args, donate=()):
        work = StubWork(place, donate)
        return round.values_of(round.add(name, work, args, work.results))

    round.trace(lambda s, x: body(call, s, x), AVAL, inputs, jax.tree.structure(0))
    return FlowNetwork(round, 2)


def names(nodes):
    return [n.name for n in nodes]


def test_calls_on_shared_devices_are_one_actor():
    def body(call, s, x):
        a = call("a", (0, 2), s)
        b = call("b", (4, 2), a[0])
        c = call("c", (1, 2), b[0])
        return call("d", (2, 1), c[0])[0], call("e", None, b[1])

    assert [names(row) for row in built_of(body).rows] == [["inputs"], ["a", "c", "d"], ["b"], ["e"]]


def test_a_loader_may_end_a_run_if_nothing_of_its_round_is_done_before():
    def body(call, s, x):
        loader = call("loader", None, x)
        seen = call("look", (0, 2), s)
        weighed = call("weigh", None, seen[0])  # on the host, between two meshes
        late = call("after", None, call("taker", (4, 2), s, donate=[0])[0])
        return call("update", (2, 2), loader[0], weighed[0], late[0])[0], call("log", None, s)

    built = built_of(body)
    assert names(built.ends) == ["inputs", "loader", "weigh"]
    gates = {(e.giver.name, e.taker.name) for e in built.edges if e.is_gate}
    assert ("weigh", "look") not in gates  # it waits for it
    assert {("inputs", "look"), ("loader", "log"), ("weigh", "taker")} <= gates
    assert find_deadlock(built.network) is None


@pytest.mark.sampled(4)
@pytest.mark.parametrize("part", range(10))
def test_the_verdict_of_a_random_flow_is_what_happens(part):
    dead = 0
    for seed in range(1000 * part, 1000 * part + 1000):
        rng = random.Random(seed)
        built = FlowNetwork(round_of(drawn := draw(rng)), drawn.credits)
        rounds = rng.randint(1, PERIODS + 1)
        if rng.random() < 0.5:  # also fewer registers than a flow ever has
            fewer = [rng.randint(max(1, -(-e.delay // e.taker.every)), e.registers) for e in built.edges]
            built.network, rounds = built.network.with_registers(fewer), PERIODS
        else:
            assert find_deadlock(built.network) is None
        ends = find_deadlock(built.network) is None
        dead += not ends
        assert run_many(built, rng, rounds) == ends, seed
    assert 10 < dead < 500


@pytest.mark.sampled(12)
@pytest.mark.parametrize("seed", range(60))
def test_a_random_flow_gives_what_its_function_gives(seed, compiled_fast):
    rng = random.Random(seed)
    rounds, pause = rng.choice([1, 6, 13]), rng.choice([None, None, 6])

    def run():
        with jax.enable_x64(True):
            numbers = jax.numpy.linspace(-1, 1, (rounds + 3) * LENGTH).reshape(-1, LENGTH)
            drawn = draw(rng)
            flow = flow_of(drawn)
            assert_same(
                flow, list(numbers[: len(drawn.state)]), list(numbers[3:]), rounds, pause=pause if rounds > 6 else None
            )
            flow.close()

    within(60, run)


@pytest.fixture
def two_processes(monkeypatch):
    """The devices are those of two processes, four each."""
    monkeypatch.setattr(networks, "processes_of", lambda devices: sorted({d.id // 4 for d in devices}))


def test_a_mesh_of_several_processes_is_one_actor_of_all_of_them(two_processes):
    def body(call, state, item):
        a, _ = call("host", None, item, item)
        b, _ = call("learn", (2, 4), a, state, donate=(1,))
        c, _ = call("look", None, b, a)
        d, _ = call("sample", (6, 2), b, c)
        return b, d

    built = built_of(body)
    named = {n.name: built.processes_of(n) for n in built.round.nodes}
    assert named == {"inputs": (0,), "host": (0,), "learn": (0, 1), "look": (1,), "sample": (1,)}
    crossing = {(e.giver.name, e.taker.name) for e in built.edges if e.moves and built.crosses(e)}
    assert crossing == {("host", "learn"), ("learn", "look"), ("host", "look"), ("learn", "sample")}
    copied = {(e.giver.name, e.taker.name) for e in built.edges if any(m.copied for m in e.moves)}
    assert copied == {("learn", "look"), ("learn", "sample")}  # the next round donates it


def test_meshes_that_share_devices_are_in_the_same_processes(two_processes):
    def body(call, state, item):
        a, _ = call("learn", (2, 4), state, item)
        b, _ = call("check", (2, 2), a, item)
        return a, b

    with pytest.raises(shardc.FlowError) as error:
        built_of(body)
    assert str(error.value) == (
        "train (train.py:7): functions that share devices run in the same processes; give them one mesh, or devices "
        "that no other one has:\n  learn: processes 0, 1.\n  check: process 0."
    )


def test_a_mesh_of_two_runtimes(two_processes, monkeypatch):
    monkeypatch.setattr(networks, "runtimes_of", networks.processes_of)
    with pytest.raises(shardc.MeshError, match=r"^train \(train.py:7\): the mesh of learn has devices of processes"):
        built_of(lambda call, state, item: (call("learn", (2, 4), state, item)[0], None))


def test_a_shared_state_lies_in_one_process(two_processes):
    held = shardc.shared(np.ones(4, np.float32), on=mesh(2, 4))

    @shardc.flow
    def train(state, item):
        return state, held.change(lambda s, x: s + x, item)

    says = r"a shared state of a flow lies in one process, and <lambda> is in processes 0, 1; give it devices of one"
    with pytest.raises(shardc.FlowError, match=says):
        train.plan(np.ones(4, np.float32), np.ones(4, np.float32))
