"""What a run leaves for the next one: each late value once, known before a first run."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from shardc.errors import FlowError
from tests.dataflow.interpreter import assert_same, plain

SHAPE = jax.ShapeDtypeStruct((4,), jnp.float32)


def mesh(first, count):
    return jax.sharding.Mesh(np.array(jax.devices()[first : first + count]), ("data",))


def play(copy, params):
    return np.asarray(params) * (copy + 1)


def learn(params, found):
    return params + 0.1 * found.mean(0)


def actors(copies, delay, **options):
    players = shardc.host(play, gives=SHAPE, copies=copies)
    learner = shardc.function(learn, mesh=mesh(0, 2), **options)

    @shardc.flow
    def train(params):
        return learner(params, players(shardc.late(params, delay))), None

    return train


def counter(delay):
    """Its rounds tell of which round they have seen the counter."""

    def count(n):
        return n + 1

    counts = shardc.function(count, mesh=mesh(0, 1), donate_argnames="n")
    look = shardc.host(np.asarray, gives=jax.ShapeDtypeStruct((), jnp.float32))

    @shardc.flow
    def train(n):
        seen = look(shardc.late(n, delay))
        return counts(n), seen

    return train


def sizes(pending):
    return {name: len(values) for name, values in pending.items()}


@pytest.mark.parametrize("copies", [1, 8])
def test_a_value_is_kept_once_for_all_who_take_it(copies):
    flow = actors(copies, 1)
    _, given = flow.run(jnp.ones(4), rounds=5)
    assert sizes(given.pending) == {"learn": 1}  # of the two rounds before the next one, the last one made the state
    assert sum(x.nbytes for x in jax.tree.leaves(given.pending)) == 16


def test_what_the_state_has_is_not_kept_again():
    add = shardc.function(lambda n, x: n + x, mesh=mesh(0, 2))
    flow = shardc.flow(lambda n, x: (add(n, x), n))
    _, given = flow.run(jnp.zeros(()), [1.0, 2.0])
    assert given.pending == flow.plan(jnp.zeros(()), 1.0).pending == {}


@pytest.mark.parametrize("delay", [0, 1, 2, 3])
@pytest.mark.parametrize("pause", [1, 4])
def test_a_counter_goes_on(delay, pause):
    flow = counter(delay)
    shapes = flow.plan(jnp.zeros(())).pending
    state, first = flow.run(jnp.zeros(()), rounds=pause)
    assert jax.tree.structure(first.pending) == jax.tree.structure(shapes)
    assert [x.shape for x in jax.tree.leaves(first.pending)] == [x.shape for x in jax.tree.leaves(shapes)]
    _, rest = flow.run(state, rounds=8 - pause, pending=first.pending)
    assert [int(n) for n in [*first, *rest]] == [max(0, r - delay) for r in range(8)]
    _, again = flow.run(jnp.float32(pause), rounds=8 - pause, pending=first.pending)  # its arrays are still there
    assert [int(n) for n in again] == [int(n) for n in rest]


def test_shapes_stand_for_a_first_run():
    flow = counter(2)
    plan = flow.plan(jnp.zeros(()))
    assert [int(n) for n in flow.run(jnp.zeros(()), rounds=5, pending=plan.pending)[1]] == [0, 0, 0, 1, 2]


def test_values_with_firsts_of_their_own():
    """Two late values of one result whose first rounds differ are two; one that goes on from the other's is not."""

    def twice(x):
        return 2 * x

    double = shardc.function(twice, mesh=mesh(0, 1))
    one, other = jnp.full((), -1.0), jnp.full((), -2.0)

    @shardc.flow
    def train(s, x):
        y = double(x)
        early, later = shardc.late(y, 1, first=one), shardc.late(y, 3, first=other)
        return s, (double(early), double(later), double(shardc.late(early, 1)), early, later)

    plan = train.plan(jnp.zeros(()), 1.0)
    assert {name: [x.shape for x in values] for name, values in plan.pending.items()} == {
        "twice": [(), ()], "twice (2)": [(), (), ()],
    }  # fmt: skip
    for pause in (1, 2, 5):
        assert_same(train, jnp.zeros(()), [float(i) for i in range(8)], pause=pause)


def test_late_results_of_what_runs_seldom():
    total = shardc.function(lambda s, x: s + x, mesh=mesh(0, 1))
    seldom = shardc.host(lambda s: np.float32(s), gives=jax.ShapeDtypeStruct((), jnp.float32))

    @shardc.flow
    def train(s, x):
        seen = shardc.every(2, seldom)(shardc.late(s, 3))
        return total(s, x), (seen, shardc.late(s, 2))

    assert_same(train, jnp.zeros(()), [float(i) for i in range(8)], pause=4)
    odd = shardc.flow(lambda s, x: (total(s, x), shardc.every(2, seldom)(shardc.late(s, 3))))
    _, given = odd.run(jnp.zeros(()), [1.0] * 3)
    with pytest.raises(FlowError, match=r"has to be of a multiple of 2 rounds\."):
        odd.run(jnp.zeros(()), [1.0] * 2, pending=given.pending)


def test_the_documented_loop_goes_on_as_if_nothing_had_been_cut(tmp_path):
    def run(rounds):
        flow = actors(2, 2, donate_argnames="params")
        shapes = flow.plan(SHAPE).pending
        with shardc.checkpoints(tmp_path, every=1) as saved:
            (state, pending), first = saved.last(or_else=lambda: (jnp.ones(4), shapes))
            for i in range(first, rounds):
                state, given = flow.run(state, rounds=3, pending=pending)
                pending = given.pending
                saved.step(i, (state, pending))
        return first, state

    run(2)
    first, state = run(4)
    assert first == 2
    whole, _ = plain(actors(2, 2).__wrapped__, jnp.ones(4), rounds=12)
    np.testing.assert_allclose(state, whole, rtol=1e-5)


@pytest.mark.parametrize(
    ("pending", "text"),
    [
        (3, "is of type int; give `.pending` of what a run of this flow gave."),
        ([3], "is of type list; give `.pending` of what a run of this flow gave."),
        ({"count": [jnp.ones(()), SHAPE.update(shape=())]}, "has arrays and shapes; give one or the other."),
        ({}, ["count is missing."]),
        ({"count": 3}, ["count is of type int, and no list."]),
        ({"count": [1]}, ["count has 1 value of 2."]),
        (
            {"count": [jnp.ones(2), 1]},
            ["count has float32[2] for float32[].", "count has something of type int for float32[]."],
        ),
    ],
)
def test_a_wrong_pending_says_what_is_wrong(pending, text):
    flow = counter(2)
    with pytest.raises(FlowError) as caught:
        flow.run(jnp.zeros(()), rounds=2, pending=pending)
    if isinstance(text, list):
        text = "\n  ".join(["is not what a run of this flow has left:", *text])
    assert str(caught.value) == f"{flow.where}: pending= {text}"


def test_what_channels_held_is_of_an_older_release():
    flow = counter(2)
    with pytest.raises(FlowError, match=r"count -> asarray, 3 late is no late value .*\n.*older shardc, by channels"):
        flow.run(jnp.zeros(()), rounds=2, pending={"count -> asarray, 3 late": [()], "count": [jnp.ones(())] * 2})


def test_shapes_have_placements():
    flow = actors(2, 1, out_placements={"data": shardc.S(0)})
    ((shape,),) = flow.plan(SHAPE).pending.values()
    assert shape.sharding == jax.sharding.NamedSharding(mesh(0, 2), jax.sharding.PartitionSpec("data"))


FAR = """
import sys
import jax, jax.numpy as jnp, numpy as np, shardc
from jax.sharding import Mesh

size, folder, rounds = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
devices = shardc.devices()
near = shardc.function(lambda x: x + 1, mesh=Mesh(np.array([devices[0]]), ("data",)))
far = shardc.function(lambda x: x * 2, mesh=Mesh(np.array([devices[-1]]), ("data",)))

@shardc.flow
def train(x):
    return near(x), far(shardc.late(x, 2))

shapes = train.plan(jax.ShapeDtypeStruct((size,), jnp.float32)).pending
with shardc.checkpoints(folder, every=1) as saved:
    (state, pending), first = saved.last(or_else=lambda: (jnp.zeros(size), shapes))
    for i in range(first, rounds):
        state, given = train.run(state, rounds=3, pending=pending)
        pending = given.pending
        print("seen", [float(np.asarray(shardc.fetch(g))[0]) for g in given], flush=True)
        saved.step(i, (state, pending))
"""


@pytest.mark.sampled(0)
@pytest.mark.parametrize("size", [4, 1000])  # small values come to all processes, large ones stay
def test_late_values_of_another_process_go_through_a_checkpoint(tmp_path, size):
    (tmp_path / "far.py").write_text(FAR)
    command = [sys.executable, "-m", "shardc", "run", "--processes", "2", "--devices", "1", "--islands", "2"]
    seen = []
    for rounds in (2, 4):
        done = subprocess.run(
            [*command, str(tmp_path / "far.py"), str(size), str(tmp_path / "saved"), str(rounds)],
            capture_output=True, text=True, timeout=120, check=False,
            env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        seen += [line for line in done.stdout.splitlines() if line.startswith("seen")]
    assert seen == ["seen [0.0, 0.0, 0.0]", "seen [2.0, 4.0, 6.0]", "seen [8.0, 10.0, 12.0]", "seen [14.0, 16.0, 18.0]"]
