"""Flows whose nodes run in several processes, each with a JAX runtime of its own, against a plain loop.

    python -m shardc run --processes 3 --islands 3 --devices 2 -m tests.processes.flows NAME ...

runs cases by name. Process 0 prints `ok NAME` for each.
"""

import itertools
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import shardc
from shardc import S
from shardc.runtime.cluster import current

DEVICES = shardc.devices()
WORKERS = [Mesh(np.array(DEVICES[2 * i : 2 * i + 2]), ("data",)) for i in range(len(DEVICES) // 2 - 1)]
SERVER = Mesh(np.array(DEVICES[-2:]), ("data",))
WIDE = 40
START = {"w": np.ones((WIDE, 30), np.float32), "n": np.zeros((), np.int32)}
CASES = {}


def case(fn):
    CASES[fn.__name__] = fn
    return fn


def grad_of(w, x):
    return jax.value_and_grad(lambda w: jnp.mean((x @ w - 1) ** 2))(w)


def apply(state, found):
    mean = sum(g for _, g in found) / len(found)
    return {"w": state["w"] - 0.1 * mean, "n": state["n"] + 1}, sum(loss for loss, _ in found)


def apply_one(state, g):
    return {"w": state["w"] - 0.1 * g, "n": state["n"] + 1}


def apply_one_more(w, more):
    return w + more


def batch(k, i):
    if k == 77 and i == 1:
        raise ValueError("bad file")
    return np.random.default_rng([int(k), int(i)]).normal(size=(8, WIDE)).astype(np.float32)


GRADS = [shardc.function(grad_of, mesh=m, in_placements={"x": {"data": S(0)}}) for m in WORKERS]
UPDATE = shardc.function(apply, mesh=SERVER, donate_argnames="state")
READ = shardc.host(batch, gives=jax.ShapeDtypeStruct((8, WIDE), jnp.float32))
LOOK = shardc.host(lambda w: np.float32(w.sum()), gives=jax.ShapeDtypeStruct((), jnp.float32))


def server(delay):
    @shardc.flow
    def train(state, k):
        w = shardc.late(state["w"], delay)
        found = [g(w, READ(k, i)) for i, g in enumerate(GRADS)]
        state, loss = UPDATE(state, found)
        return state, {"loss": loss, "sum": shardc.every(3, LOOK)(state["w"])}

    return train


def loop(delay, rounds):
    """The states and losses of a plain loop."""
    states, losses = [START], []
    for k in range(rounds):
        w = states[max(0, k - delay)]["w"]
        state, loss = apply(states[-1], [grad_of(w, batch(k, i)) for i in range(len(WORKERS))])
        states.append(state)
        losses.append(float(loss))
    return states, losses


@case
def late_parameters():
    for delay in (0, 2):
        train, (states, losses) = server(delay), loop(delay, 12)
        state, given = train.run(START, range(12))
        np.testing.assert_allclose([g["loss"] for g in given], losses, rtol=1e-5)
        assert [g["sum"] is not None for g in given] == [(k + 1) % 3 == 0 for k in range(12)]
        np.testing.assert_allclose(given[11]["sum"], states[12]["w"].sum(), rtol=1e-5)
        assert int(state["n"]) == 12
        np.testing.assert_allclose(shardc.fetch(state["w"]), states[12]["w"], rtol=1e-5)
        train.close()


@case
def a_run_goes_on_from_a_state_that_lives_elsewhere():
    train, (states, _) = server(0), loop(0, 9)
    state = START
    for first in (0, 3, 6):
        state, given = train.run(state, itertools.count(first), rounds=3)
        assert len(given) == 3
    np.testing.assert_allclose(shardc.fetch(state["w"]), states[9]["w"], rtol=1e-5)
    train.close()


@case
def a_failure_is_one_error_in_all_processes():
    train = server(1)
    with pytest.raises(shardc.RoundFailedError) as caught:
        train.run(START, range(70, 90))
    assert (caught.value.node, caught.value.round) == ("batch[1]", 7)
    assert "in process 1: ValueError: bad file" in str(caught.value)
    state, _ = train.run(START, range(3))  # it can be run again
    assert int(state["n"]) == 3
    train.close()


def changing(held, stale, more):
    @shardc.flow
    def train(seen, k):
        after = []
        for i, g in enumerate(GRADS):
            _, d = g(seen[i], READ(k, i))
            after.append(held.change(apply_one, d, stale=stale, **more)["w"])
        return after, None

    return train


@case
def shared_states():
    for stale, more in ((0, {}), (2, {}), (None, {}), (0, {"quorum": (2, 2), "grace": 0.1})):
        held = shardc.shared(START, on=SERVER)

        train = changing(held, stale, more)
        _, given = train.run([START["w"]] * len(WORKERS), range(6))
        assert len(given) == 6
        if current().me == len(WORKERS):
            assert int(held.value["n"]) == 6 * (1 if more else len(WORKERS))
        else:
            with pytest.raises(shardc.ClusterError, match=f"lives in process {len(WORKERS)}: read .value there"):
                _ = held.value
        train.close()


@case
def checkpoints():
    folder = current().gather("folder", tempfile.mkdtemp() if current().me == 0 else "")[0]
    train, (states, _) = server(0), loop(0, 6)
    for until in (1, 3):
        with shardc.checkpoints(folder) as saved:
            state, first = saved.last(or_else=START)
            assert first == (0 if until == 1 else 1)
            for i in range(first, until):
                state, _ = train.run(state, range(2 * i, 2 * i + 2))
                saved.step(i, state)
    np.testing.assert_allclose(shardc.fetch(state["w"]), states[6]["w"], rtol=1e-5)
    train.close()


@case
def what_processes_begin_with_is_compared():
    me = current().me
    train = server(1)
    start = {"w": np.ones((WIDE, 30), np.float32) * (1 + 10 * (me == 1)), "n": START["n"]}
    same = {"rounds": 3}
    wrong = {
        r"the value of state/w: processes 0, 2: \w{8}; process 1: \w{8}$": (start, range(3), same),
        r"rounds=: process 0: 3; processes 1, 2: 4$": (START, range(6), {"rounds": 3 if me == 0 else 4}),
        r"the number of items: processes 0, 1: 3; process 2: 5$": (START, range(5 if me == 2 else 3), {}),
        r"state/n: processes 0, 2: int32\[\]; process 1: float32\[\]": (
            START if me != 1 else {**START, "n": np.float32(0)}, range(3), same,
        ),
        r"leaf 0 of the item: process 0: int32\[\]; processes 1, 2: float32\[\]": (
            START, [0, 1, 2] if me == 0 else [0.0, 1.0, 2.0], same,
        ),
    }  # fmt: skip
    for says, (state, items, more) in wrong.items():
        with pytest.raises(shardc.DisagreementError, match=f"(?m){says}") as caught:
            train.run(state, items, **more)
        assert str(caught.value).startswith("the flow train"), caught.value
    _, whole = train.run(START, range(3) if me == 0 else iter(range(100)))  # a placeholder without length
    assert len(whole) == 3
    train.close()


@case
def arrays_that_calls_close_over_are_compared():
    seed = np.full((WIDE, 30), float(current().me == 1), np.float32)
    for made, says in (
        ((lambda w: w + seed), "captured array 0 of <lambda>"),
        ((lambda w: w + 1), "leaf 0 of shared state 0"),
    ):
        adds = [shardc.function(made, mesh=m) for m in WORKERS]
        held = shardc.shared(seed if "shared" in says else START["w"], on=SERVER)

        @shardc.flow
        def train(seen, k):
            return [held.change(apply_one_more, add(w)) for add, w in zip(adds, seen, strict=True)], None  # noqa: B023

        with pytest.raises(shardc.DisagreementError, match=rf"the value of {says}: process"):
            train.run([START["w"]] * len(WORKERS), range(2))
        train.close()


def main(names):
    for name in names or CASES:
        CASES[name]()
        current().gather("done", name)
        print("ok", name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
