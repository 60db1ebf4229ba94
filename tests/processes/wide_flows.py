"""Flows with a mesh of several processes, against a plain loop and the same flow in one process.

    python -m shardc run --processes 4 --islands 2 --devices 2 -m tests.processes.wide_flows NAME ...

runs cases by name. Process 0 prints `ok NAME` for each. The learner is on the first two processes; each of the others
has a sampler; with two processes samplers are on devices of these. `random-A-B`, in two processes with four devices
each and one runtime, runs the random flows of seeds A to B.
"""

import random
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import shardc
from shardc import B, S
from shardc.arrays.remote_array import RemoteArray
from shardc.runtime.cluster import current
from tests.dataflow import random_flows as flows
from tests.dataflow.interpreter import assert_equal, plain

DEVICES = shardc.devices()
PROCESSES = current().processes
PER = len(DEVICES) // PROCESSES
OF = [DEVICES[PER * p : PER * (p + 1)] for p in range(PROCESSES)]
ALONE = PROCESSES == 2
LEARNER = Mesh(np.array([d for p in (0, 1) for d in OF[p][: PER // 2 if ALONE else PER]]), ("data",))
SAMPLERS = [Mesh(np.array(ds[PER // 2 :] if ALONE else ds), ("x",)) for ds in (OF if ALONE else OF[2:])]
ONE_SAMPLER = [Mesh(np.array([d for m in SAMPLERS for d in m.devices.flat]), ("x",))]
"""One sampler on the devices of all of them."""
ROWS, WIDE, OUT = 8, 40, 12
START = {"w": np.linspace(-1, 1, WIDE * OUT, dtype=np.float32).reshape(WIDE, OUT), "n": np.zeros((), np.int32)}
CASES = {}


def case(fn):
    CASES[fn.__name__] = fn
    return fn


def sample(w, x):
    return jnp.tanh(x @ w) + x[:, :OUT]


def learn(state, parts):
    w, n = state["w"], state["n"]
    ys = jnp.concatenate([y for _, y in parts])
    xs = jnp.concatenate([x for x, _ in parts])
    loss, g = jax.value_and_grad(lambda w: jnp.mean((jnp.sin(xs @ w) - ys) ** 2))(w)
    return {"w": w - 0.3 * g, "n": n + 1}, {"loss": loss, "rows": jnp.sin(xs @ w).sum(1)}


def batch(k, i):
    if k == 77 and i == 1:
        raise ValueError("bad file")
    return np.random.default_rng([int(k), int(i)]).normal(size=(ROWS, WIDE)).astype(np.float32)


def norm(w):
    return np.float32(np.abs(w).sum())


HELD = {"state": {"w": {"data": S(0)}, "n": {"data": B}}}
LEARN = shardc.function(learn, mesh=LEARNER, in_placements=HELD, donate_argnames="state")


def train_of(delay, process=None, samplers=SAMPLERS):
    read = shardc.host(batch, gives=jax.ShapeDtypeStruct((ROWS, WIDE), jnp.float32))
    sample_on = [shardc.function(sample, mesh=m, in_placements={"x": {"x": S(0)}}) for m in samplers]
    look = shardc.host(norm, gives=jax.ShapeDtypeStruct((), jnp.float32), process=process)

    @shardc.flow
    def train(state, k):
        w = shardc.late(state["w"], delay)
        parts = []
        for i, f in enumerate(sample_on):
            x = read(k, i)
            parts.append((x, f(w, x)))
        state, given = LEARN(state, parts)
        return state, {**given, "norm": shardc.every(2, look)(state["w"])}

    return train


def loop(delay, rounds, samplers=SAMPLERS):
    """The states and results of a plain loop."""
    states, found = [jax.tree.map(jnp.asarray, START)], []
    for k in range(rounds):
        w = states[max(0, k - delay)]["w"]
        xs = [batch(k, i) for i in range(len(samplers))]
        state, given = learn(states[-1], [(x, sample(w, x)) for x in xs])
        states.append(state)
        found.append(given)
    return states, found


def close_to(state, want):
    np.testing.assert_allclose(shardc.fetch(state["w"]), want["w"], rtol=1e-4, atol=1e-6)


@case
def a_learner_of_two_processes():
    for delay, process in ((0, None), (1, 1), (3, PROCESSES - 1)):
        train, (states, want) = train_of(delay, process), loop(delay, 8)
        state, given = train.run(START, range(8))
        for k, (found, wanted) in enumerate(zip(given, want, strict=True)):
            np.testing.assert_allclose(float(found["loss"]), wanted["loss"], rtol=1e-4)
            np.testing.assert_allclose(found["rows"], wanted["rows"], rtol=1e-4, atol=1e-5)
            assert (found["norm"] is not None) == bool(k % 2)
            if k % 2:
                np.testing.assert_allclose(found["norm"], norm(np.asarray(states[k + 1]["w"])), rtol=1e-4)
        me = current().me
        assert isinstance(state["w"], RemoteArray) == (me > 1)
        assert me > 1 or len(state["w"].sharding.device_set) == LEARNER.devices.size
        assert int(shardc.fetch(state["n"])) == 8
        close_to(state, states[8])
        train.close()


@case
def a_run_goes_on():
    for delay in (0, 2):
        train, (states, _) = train_of(delay), loop(delay, 9)
        state, pending = START, None
        for first in (0, 3, 6):
            state, given = train.run(state, range(first, first + 3), pending=pending, record=first == 3)
            pending = given.pending
            assert ("learn" in given.seconds) == (first == 3)
        close_to(state, states[9])
        train.close()


@case
def two_meshes_of_several_processes():
    train, (states, want) = train_of(1, samplers=ONE_SAMPLER), loop(1, 8, ONE_SAMPLER)
    state, given = train.run(START, range(8))
    np.testing.assert_allclose([float(g["loss"]) for g in given], [g["loss"] for g in want], rtol=1e-4)
    close_to(state, states[8])
    train.close()


@case
def a_failure_is_one_error_in_all():
    train = train_of(1)
    for _ in range(3):
        with pytest.raises(shardc.RoundFailedError) as caught:
            train.run(START, range(70, 90))
        assert (caught.value.node, caught.value.round) == ("batch[1]", 7)
        assert "ValueError: bad file" in str(caught.value)
    states, _ = loop(1, 3)
    state, _ = train.run(START, range(3))
    close_to(state, states[3])
    train.close()


@case
def checkpoints():
    folder = current().gather("folder", tempfile.mkdtemp() if current().me == 0 else "")[0]
    samplers = SAMPLERS if current().config.islands == 1 else ONE_SAMPLER
    train, (states, _) = train_of(1, samplers=samplers), loop(1, 6, samplers)
    late = train.plan(START, 0).pending
    for until in (1, 3):
        with shardc.checkpoints(folder) as saved:
            (state, pending), first = saved.last(or_else=(START, late))
            assert first == (0 if until == 1 else 1)
            for i in range(first, until):
                state, given = train.run(state, range(2 * i, 2 * i + 2), pending=pending)
                pending = given.pending
                saved.step(i, (state, pending))
    close_to(state, states[6])
    train.close()


@case
def checkpoints_of_arrays_of_some_processes():
    """Of processes 1 and 2, sharded; of the last one; of all, whole."""
    folder = current().gather("folder", tempfile.mkdtemp() if current().me == 0 else "")[0]
    middle, last = Mesh(np.array([*OF[1], *OF[2]]), ("data",)), Mesh(np.array(OF[3]), ("data",))
    x, y = np.arange(240, dtype=np.float32).reshape(12, 20), np.arange(8 * PER)
    state = {
        "rows": shardc.put(x, middle, {"data": S(0)}), "columns": shardc.put(x, middle, {"data": S(1)}),
        "uneven": shardc.put(x[:7], middle, {"data": S(0)}), "last": shardc.put(y, last, {"data": S(0)}),
        "whole": np.ones(3), "n": 0,
    }  # fmt: skip
    with shardc.checkpoints(folder, keep=2) as saved:
        for i in range(4):
            saved.step(i, {**state, "n": i})
    with shardc.checkpoints(folder) as saved:
        again, start = saved.last(or_else=state)
    assert (start, again["n"]) == (4, 3)
    whole = shardc.fetch(again)
    for name, value in {"rows": x, "columns": x, "uneven": x[:7], "last": y, "whole": np.ones(3)}.items():
        np.testing.assert_array_equal(whole[name], value)


@case
def what_stays_in_each_process():
    """Of meshes of the same processes: the second one has other pieces, of what the same process has."""
    halves = [[ds[: PER // 2], ds[PER // 2 :]] for ds in OF[:2]]
    here, there = (Mesh(np.array([halves[p][i] for p in (0, 1)]), ("p", "d")) for i in (0, 1))
    rows, columns = {"p": S(0), "d": S(0)}, {"p": S(0), "d": S(1)}
    double = shardc.function(lambda x: 2 * x, mesh=here, in_placements={"x": rows}, out_placements=rows)
    halve = shardc.function(lambda x, y: (x / 2, y + 1), mesh=there, in_placements={"x": columns, "y": columns})

    @shardc.flow
    def train(state, k):
        x, y = halve(double(state["x"]), state["y"])
        return {"x": x, "y": y}, None

    start = np.arange(32, dtype=np.float32).reshape(8, 4)
    state, _ = train.run({"x": start, "y": start}, range(4))
    np.testing.assert_array_equal(shardc.fetch(state["x"]), start)
    np.testing.assert_array_equal(shardc.fetch(state["y"]), start + 4)
    run = train.latest
    assert not [e for c, e in enumerate(run.plan.edges) if e.moves and c in run._remote.run.network.channels]
    train.close()


def walk(state):
    key, x = state
    return jax.random.split(key)[0], x + jax.random.normal(key, (5,))


def seen(state):
    key, x = state
    return jax.random.normal(key, (2,)), x[:2] > 1


@case
def random_keys_and_uneven_arrays():
    walks = shardc.function(walk, mesh=LEARNER, in_placements={"state": ({"data": B}, {"data": S(0)})})
    sees = shardc.function(seen, mesh=SAMPLERS[-1])

    @shardc.flow
    def train(state, k):
        return walks(state), sees(state)

    state = want = jax.random.key(1), np.ones(5, np.float32)
    for _ in range(2):
        state, given = train.run(state, range(3))
        for found in given:
            np.testing.assert_allclose(found[0], seen(want)[0], rtol=1e-5)
            np.testing.assert_array_equal(found[1], seen(want)[1])
            want = walk(want)
        np.testing.assert_allclose(shardc.fetch(state[1]), want[1], rtol=1e-5)
    train.close()


LARGE = 150
"""The length of values that stay on a stage; shorter ones come to all processes of a pipeline."""


def spread():
    """The meshes of random flows, by place, as the devices of each: several meshes are the stages of a pipeline. Where
    JAX runtimes are apart, a mesh lies in one of them. The last one shares devices with others that lie in other
    processes: beside them it is refused."""
    at = lambda *pairs: [PER * p + i for p, i in pairs]  # noqa: E731
    if PROCESSES == 2:
        return {(0, 2): [[4, 0]], (1, 4): [[1, 5, 2, 6]], (3, 1): [[3]], (7, 1): [[7]]}
    found = {
        (0, 2): [at((1, 0), (0, 0))],
        (1, 4): [at((0, 1), (1, 1), (0, 2), (1, 2))],
        (2, 1): [at((2, 0))],
        (3, 1): [at((0, 3))],
        (4, 2): [at((1, 3)), at((2, 1))],  # of unlike processes
        (5, 2): [at((2, 2), (2, 3)), at((0, 4), (0, 5))],  # the first stage behind the second one
        (6, 3): [at((0, 3)), at((2, 0))],
    }
    if PROCESSES == 4:
        found |= {(7, 4): [at((0, 6), (1, 4)), at((2, 4), (3, 4))], (8, 2): [at((2, 5), (3, 5))], (9, 1): [at((3, 3))]}
    return found


SPREAD = spread()


def on_stages(a, b):
    """As a pipeline of two stages over two microbatches."""

    def value(w, x):
        h = shardc.stage_boundary(jnp.sin(w) + 0.1 * x[:, None])
        return jnp.tanh(h * w[::-1]).mean()

    loss, g = shardc.accumulate(jax.value_and_grad(value), microbatches=2)(a, b)
    return jnp.cos(a) - g, 0.5 * b + loss


def meshes_of(place):
    return [Mesh(np.array(DEVICES)[of], ("data",)) for of in SPREAD[place]]


def function_of(place, donate):
    if len(SPREAD[place]) > 1:
        return shardc.function(on_stages, pipeline=shardc.Pipeline(meshes=meshes_of(place)), donate_argnames=donate)
    pins = {"a": {"data": S(0)}} if place[1] > 2 else {}
    return shardc.function(flows.on_mesh, mesh=meshes_of(place)[0], in_placements=pins, donate_argnames=donate)


def refused(run):
    """The error that a flow raises when it is planned, the same in all processes; empty if there is none."""
    try:
        run()
        text = ""
    except (shardc.FlowError, shardc.MeshError) as error:
        text = f"{type(error).__name__}: {error}"
    said = current().gather("refused", text)
    assert len(set(said)) == 1, said
    return text


def random_flows(first, last):
    flows.function = function_of
    flows.host = lambda credits: shardc.host(
        flows.on_host,
        gives=(flows.AVAL, flows.AVAL),
        credits=credits,
        process=None if credits is None else credits // 4,
    )
    flows.PLACES[:] = [None, None, *SPREAD, *SPREAD]
    for seed in range(first, last):
        begin, rng = time.monotonic(), random.Random(seed)
        rounds, pause = rng.choice([1, 6, 13]), rng.choice([None, 6])
        with jax.enable_x64(True):
            flows.LENGTH = 8 if PROCESSES == 2 else rng.choice([8, LARGE])
            flows.AVAL = jax.ShapeDtypeStruct((flows.LENGTH,), float)
            numbers = np.linspace(-1, 1, (rounds + 3) * flows.LENGTH).reshape(-1, flows.LENGTH)
            drawn = flows.draw(rng)
            if not any(c.place and c.place != (3, 1) for c in drawn.calls):
                continue  # process 0 has it all
            flow, state, items = flows.flow_of(drawn), list(numbers[: len(drawn.state)]), list(numbers[3:])
            places = " ".join("h" if c.place is None else str(c.place[0]) for c in drawn.calls)
            why = refused(lambda flow=flow, state=state, items=items: flow.plan(state, items[0]))
            if not why:
                wanted = plain(flow.__wrapped__, list(map(jnp.asarray, state)), items, rounds)
                given, pending, parts = [], None, (items[:rounds],)
                if pause is not None and rounds > pause:
                    parts = items[:pause], items[pause:rounds]
                for part in parts:
                    state, found = flow.run(state, part, pending=pending)
                    given, pending = [*given, *found], found.pending
                assert_equal((shardc.fetch(state), given), wanted)
            flow.close()
        if current().me == 0:
            seconds = time.monotonic() - begin
            print(
                f"seed {seed}: {places}, {flows.LENGTH} wide, {rounds} rounds, {seconds:.1f} s {why[:60]}", flush=True
            )


def main(names):
    for name in names or CASES:
        if name.startswith("random-"):
            random_flows(*map(int, name.split("-")[1:]))
        else:
            CASES[name]()
        current().gather("done", name)
        print("ok", name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
