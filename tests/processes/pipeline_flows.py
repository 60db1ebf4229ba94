"""Flows with a pipeline whose ranks lie in several processes, against a plain loop.

    python -m shardc run --processes 3 --islands 3 --devices 2 -m tests.processes.pipeline_flows NAME ...

runs cases by name. Process 0 prints `ok NAME` for each. A sampler is in process 0; the stages of the learner are in
processes 1 and 2.
"""

import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import shardc
from shardc import S
from shardc.arrays.placed import StackedArray
from shardc.arrays.remote_array import RemoteArray
from shardc.runtime.cluster import current

DEVICES = shardc.devices()
PER = len(DEVICES) // 3
OF = [DEVICES[PER * p : PER * (p + 1)] for p in range(3)]
STAGES = [Mesh(np.array(OF[p]), ("data",)) for p in (1, 2)]
SAMPLER = Mesh(np.array(OF[0]), ("x",))
ROWS, WIDE = 8, 20
CASES = {}


def case(fn):
    CASES[fn.__name__] = fn
    return fn


def dense(layer, x):
    return jnp.tanh(x @ layer["w"] + layer["b"])


def chain(params, x):
    """Two layers, of which each is a stage; or layers in a scan."""
    if isinstance(params, dict):
        return jax.lax.scan(lambda x, layer: (dense(layer, x), None), x, params)[0]
    return dense(params[1], shardc.stage_boundary(dense(params[0], x)))


def sample(params, x):
    return chain(params, x) + 0.5 * x


def learn(state, batch):
    def loss_of(params, batch):
        return ((chain(params, batch["x"]) - batch["y"]) ** 2).mean()

    loss, g = shardc.accumulate(jax.value_and_grad(loss_of), microbatches=2)(state["params"], batch)
    params = jax.tree.map(lambda p, g: p - 0.3 * g, state["params"], g)
    return {"params": params, "n": state["n"] + 1}, {"loss": loss, "grads": g}


def batch(k):
    if k == 77:
        raise ValueError("bad file")
    return np.random.default_rng(int(k)).normal(size=(ROWS, WIDE)).astype(np.float32)


def norm(w):
    return np.float32(np.abs(w).sum())


def start_of(scanned):
    rng = np.random.default_rng(0)
    layers = [
        {"w": (rng.normal(size=(WIDE, WIDE)) / 4).astype(np.float32), "b": rng.normal(size=WIDE).astype(np.float32)}
        for _ in range(4 if scanned else 2)
    ]
    params = jax.tree.map(lambda *xs: np.stack(xs), *layers) if scanned else layers
    return {"params": params, "n": np.zeros((), np.int32)}


READ = shardc.host(batch, gives=jax.ShapeDtypeStruct((ROWS, WIDE), jnp.float32))


def train_of(delay, scanned=False, process=None, pipelined=learn):
    options = {"stages": "auto"} if scanned else {}
    learner = shardc.function(
        pipelined, pipeline=shardc.Pipeline(meshes=STAGES, **options), donate_argnames="state",
        in_placements={"batch": {"data": S(0)}},
    )  # fmt: skip
    sampler = shardc.function(sample, mesh=SAMPLER, in_placements={"x": {"x": S(0)}})
    look = shardc.host(norm, gives=jax.ShapeDtypeStruct((), jnp.float32), process=process)

    @shardc.flow
    def train(state, k):
        x = READ(k)
        y = sampler(shardc.late(state["params"], delay), x)
        state, given = learner(state, {"x": x, "y": y})
        w = state["params"]["w"] if scanned else state["params"][1]["w"]
        return state, {**given, "norm": shardc.every(2, look)(w)}

    return train


def loop(delay, rounds, scanned=False):
    """The states and results of a plain loop."""
    states, found = [jax.tree.map(jnp.asarray, start_of(scanned))], []
    step, first = jax.jit(learn), jax.jit(sample)
    for k in range(rounds):
        y = first(states[max(0, k - delay)]["params"], batch(k))
        state, given = step(states[-1], {"x": batch(k), "y": y})
        states.append(state)
        found.append(given)
    return states, found


def close_to(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, want)


def check(delay, scanned, process):
    train, (states, want) = train_of(delay, scanned, process), loop(delay, 6, scanned)
    state, given = train.run(start_of(scanned), range(6))
    for k, (found, wanted) in enumerate(zip(given, want, strict=True)):
        close_to({name: found[name] for name in wanted}, wanted)
        w = states[k + 1]["params"]["w"] if scanned else states[k + 1]["params"][1]["w"]
        assert (found["norm"] is not None) == bool(k % 2)
        if k % 2:
            np.testing.assert_allclose(found["norm"], norm(np.asarray(w)), rtol=1e-4)
    if scanned:
        assert isinstance(state["params"]["w"], StackedArray)
    else:
        me = current().me
        assert [isinstance(p["w"], RemoteArray) for p in state["params"]] == [me != 1, me != 2]
    close_to(shardc.fetch(state), states[6])
    train.close()


@case
def a_layer_to_each_process():
    for delay, process in ((0, None), (1, 0), (2, 2)):
        check(delay, False, process)


@case
def layers_of_a_scan():
    for delay, process in ((0, 2), (1, None)):
        check(delay, True, process)


@case
def a_run_goes_on():
    for scanned, delay in ((False, 2), (True, 0), (True, 2)):
        train, (states, _) = train_of(delay, scanned), loop(delay, 6, scanned)
        state, pending = start_of(scanned), None
        for first in (0, 2, 4):
            state, given = train.run(state, range(first, first + 2), pending=pending, record=first == 2)
            pending = given.pending
        close_to(shardc.fetch(state), states[6])
        train.close()


@case
def a_failure_is_one_error_in_all():
    train = train_of(1)
    for _ in range(2):
        with pytest.raises(shardc.RoundFailedError) as caught:
            train.run(start_of(False), range(73, 90))
        assert (caught.value.node, caught.value.round) == ("batch", 4)
        assert "ValueError: bad file" in str(caught.value)
    states, _ = loop(1, 3)
    state, _ = train.run(start_of(False), range(3))
    close_to(shardc.fetch(state), states[3])
    train.close()


@case
def checkpoints():
    for scanned in (False, True):
        folder = current().gather("folder", tempfile.mkdtemp() if current().me == 0 else "")[0]
        train, (states, _) = train_of(1, scanned), loop(1, 6, scanned)
        late = train.plan(start_of(scanned), 0).pending
        for until in (1, 3):
            with shardc.checkpoints(folder) as saved:
                (state, pending), first = saved.last(or_else=(start_of(scanned), late))
                assert first == (0 if until == 1 else 1)
                for i in range(first, until):
                    state, given = train.run(state, range(2 * i, 2 * i + 2), pending=pending)
                    pending = given.pending
                    saved.step(i, (state, pending))
        close_to(shardc.fetch(state), states[6])
        train.close()


@case
def a_pipeline_outside_of_a_flow_too():
    train, (states, _) = train_of(0), loop(0, 3)
    state, _ = train.run(start_of(False), range(3))
    alone = shardc.function(
        learn, pipeline=shardc.Pipeline(meshes=STAGES), in_placements={"batch": {"data": S(0)}}
    )  # fmt: skip
    again, given = alone(state, {"x": batch(9), "y": batch(10)})
    want, loss = learn(states[3], {"x": batch(9), "y": batch(10)})
    np.testing.assert_allclose(float(given["loss"]), loss["loss"], rtol=1e-4)
    close_to(shardc.fetch(again), want)
    train.close()


def main(names):
    for name in names or CASES:
        CASES[name]()
        current().gather("done", name)
        print("ok", name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
