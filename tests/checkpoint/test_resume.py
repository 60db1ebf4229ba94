"""A run that was interrupted, and goes on with another mesh, placement or number of stages, has the same losses."""

from functools import cache
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardc
from shardc import PlacedArray, S, StackedArray, make_mesh

pytestmark = pytest.mark.usefixtures("compiled_fast")

WIDTH, LAYERS, STEPS, SAVED = 8, 5, 6, 3


def init():
    k = np.random.default_rng(1)
    layers = {
        "up": 0.3 * k.normal(size=(LAYERS, WIDTH, 2 * WIDTH)).astype(np.float32),
        "down": 0.3 * k.normal(size=(LAYERS, 2 * WIDTH, WIDTH)).astype(np.float32),
    }
    params = {"first": k.normal(size=(WIDTH, WIDTH)).astype(np.float32), "layers": layers}
    return {"params": params, "momentum": jax.tree.map(np.zeros_like, params), "steps": 0}


def batch(i):
    k = np.random.default_rng(100 + i)
    return {"x": k.normal(size=(8, WIDTH)).astype(np.float32), "y": k.normal(size=(8, WIDTH)).astype(np.float32)}


def loss(params, batch):
    def block(x, layer):
        return x + jnp.tanh(x @ layer["up"]) @ layer["down"], None

    x, _ = lax.scan(block, batch["x"] @ params["first"], params["layers"])
    return jnp.mean((x - batch["y"]) ** 2)


def step(state, batch):
    value, grads = shardc.accumulate(jax.value_and_grad(loss), microbatches=2)(state["params"], batch)
    momentum = jax.tree.map(lambda a, g: 0.9 * a + g, state["momentum"], grads)
    params = jax.tree.map(lambda p, a: p - 0.1 * a, state["params"], momentum)
    return {"params": params, "momentum": momentum, "steps": state["steps"] + 1}, value


UNEVEN = shardc.rules({"*/up": {"data": S(0)}, "*/down": {"data": S(0), "model": S(1)}})
RUNS = {
    "one device": lambda: jax.jit(step, donate_argnums=0),
    "data": lambda: shardc.function(
        step, mesh=make_mesh(data=8), in_placements={"batch": {"data": S(0)}}, donate_argnames=("state",)
    ),
    "uneven": lambda: shardc.function(
        step, mesh=make_mesh(data=2, model=4), in_placements={"state": UNEVEN}, donate_argnames=("state",)
    ),
    "two stages": lambda: shardc.function(
        step, mesh=make_mesh(pipe=2), pipeline=shardc.Pipeline(stages="auto"), donate_argnames=("state",)
    ),
    "three stages": lambda: shardc.function(
        step, mesh=make_mesh(pipe=3, data=2), pipeline=shardc.Pipeline(stages="auto"), donate_argnames=("state",)
    ),
}


@cache
def function(name):
    return RUNS[name]()


@cache
def without_interruption(name):
    state, losses = init(), []
    for i in range(STEPS):
        state, value = function(name)(state, batch(i))
        losses.append(float(value))
    return losses


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """For each run a directory with the checkpoint that it leaves when it is interrupted."""

    @cache
    def made(name):
        directory = tmp_path_factory.mktemp("saved")
        with pytest.raises(InterruptedError), shardc.checkpoints(directory) as saved:
            state, start = saved.last(or_else=init)
            for i in range(start, STEPS):
                if i == SAVED:
                    raise InterruptedError
                state, value = function(name)(state, batch(i))
                saved.step(i, state, loss=value)
        return directory

    return made


def running(name):
    """A state of a run: its leaves say where they live."""
    return function(name)(init(), batch(0))[0]


def goes_on(directory, name, like):
    losses = []
    with shardc.checkpoints(directory, every=STEPS + 1) as saved:
        state, start = saved.last(or_else=like)
        kinds = {type(x) for x in jax.tree.leaves(state)}
        for i in range(start, STEPS):
            state, value = function(name)(state, batch(i))
            losses.append(float(value))
    return start, losses, kinds


def check(directories, source, target, like):
    start, losses, kinds = goes_on(directories(source), target, like)
    assert start == SAVED and len(losses) == STEPS - SAVED
    if source == target:
        assert losses == without_interruption(source)[SAVED:]
    else:
        np.testing.assert_allclose(losses, without_interruption(source)[SAVED:], rtol=1e-6)
    return kinds


@pytest.mark.parametrize("name", RUNS)
def test_the_same_run_has_the_same_losses_to_the_last_bit(directories, name):
    check(directories, name, name, running(name))
    check(directories, name, name, init())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("two stages", "three stages"), ("three stages", "uneven"), ("uneven", "two stages"), ("uneven", "data"),
        ("data", "one device"),
    ],
)  # fmt: skip
def test_another_run_goes_on(directories, source, target):
    kinds = check(directories, source, target, running(target))
    if target == "uneven":
        assert PlacedArray in kinds
    if target in ("two stages", "three stages"):
        assert StackedArray in kinds


@pytest.mark.sampled(0)
@pytest.mark.parametrize(("source", "target"), list(product(RUNS, RUNS)))
def test_every_run_goes_on_with_every_other(directories, source, target):
    check(directories, source, target, running(target))
