"""State that goes from microbatch to microbatch: as in the loop on one device, under pipelines too."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import shardc
from shardc import S, compat
from shardc.ir.loop import Loop
from shardc.passes import Context
from shardc.passes.trace.trace import Arguments, trace
from shardc.pipeline.cut.precompute_state import precompute_state
from tests.pipeline.pipelines import assert_same, batch, dense, layers, on_host

pytestmark = pytest.mark.usefixtures("compiled_fast")

M = 4


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def start(count, width=4):
    rng = np.random.default_rng(2)
    return {
        "key": jax.random.key(3),
        "count": np.int32(0),
        "norm": [rng.normal(size=width) for _ in range(count)],
        "hidden": [rng.normal(size=width) for _ in range(count)],
        "two": (np.float64(1), np.float64(2)),
    }


def loss_of(params, state, batch, cuts, noise=None):
    """Running means that nobody reads, hidden states that the gradient reads, one key and one counter for all."""
    x, key, norm, hidden = batch["x"], state["key"], [], []
    for i, layer in enumerate(params):
        x = dense(layer, x)
        norm.append(0.9 * state["norm"][i] + 0.1 * x.mean(0))
        hidden.append(jnp.tanh(state["hidden"][i] * x.mean(0)))
        key, mask = jax.random.split(key)
        x = x * hidden[i] * jax.random.bernoulli(mask, 0.5, x.shape) + jax.random.uniform(
            jax.random.fold_in(key, state["count"] + i), x.shape
        )
        if i in cuts:
            x = shardc.stage_boundary(x)
    if noise is not None:
        x = x + jax.random.uniform(noise, x.shape)
    first, second = state["two"]
    after = {
        "key": key, "count": state["count"] + len(params), "norm": norm, "hidden": hidden, "two": (second, first + 1)
    }  # fmt: skip
    loss = ((x - batch["y"]) ** 2).mean()
    return loss, (after, {"seen": state["count"], "largest": x.max()})


def training(cuts, m=M):
    def run(params, state, batch, noise):
        return jax.value_and_grad(loss_of, has_aux=True)(params, state, batch, cuts, noise)

    def step(params, state, batch, noise):
        (loss, (state, more)), grads = shardc.accumulate(
            run,
            microbatches=m,
            in_axes={"batch": 0},
            keys="noise",
            reduce=((None, ("carry:state", {"seen": "stack", "largest": "last"})), None),
        )(params, state, batch, noise)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), state, loss, more

    return step


@jax.jit
def of_one_microbatch(params, state, rows, noise):
    return jax.value_and_grad(loss_of, has_aux=True)(params, state, rows, (), noise)


def by_hand(params, state, batch, noise):
    """The loop that `training` stands for."""
    losses, grads, seen = [], [], []
    for j, key in enumerate(jax.random.split(noise, M)):
        rows = {name: x[j::M] for name, x in batch.items()}
        (loss, (state, more)), grad = of_one_microbatch(params, state, rows, key)
        losses.append(loss)
        grads.append(on_host(grad))
        seen.append(more["seen"])
    mean = jax.tree.map(lambda *xs: sum(xs) / M, *grads)
    new = jax.tree.map(lambda p, g: p - 0.1 * g, params, mean)
    return new, state, sum(losses) / M, {"seen": jnp.stack(seen), "largest": more["largest"]}


def data(count, width=4):
    return layers(count, width), start(count, width), batch(2 * M, width), jax.random.key(7)


def readable(tree):
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return on_host(jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree))


def test_it_is_the_loop_on_one_device_and_on_a_mesh():
    args = data(2)
    want = readable(by_hand(*args))
    assert_same(readable(jax.jit(training(()))(*args)), want)
    mesh = shardc.make_mesh(data=2)
    function = shardc.function(training(()), mesh=mesh, in_placements={"batch": {"data": S(0)}})
    assert function.compile(*args).audit().ok
    assert_same(readable(function(*args)), want)


PIPELINES = {
    "1f1b": (2, {}),
    "three stages": (3, {}),
    "recompute": (2, {"recompute": "full"}),
    "zb-h1": (2, {"schedule": "zb-h1"}),
    "zb-v": (2, {"schedule": "zb-v"}),
    "interleaved": (2, {"schedule": "interleaved", "chunks": 2}),
    "auto": (2, {"stages": "auto"}),
}

SLOW = ("zb-v", "interleaved", "auto", "recompute")
LATER = pytest.mark.sampled(0)


@pytest.mark.parametrize("name", [pytest.param(n, marks=LATER if n in SLOW else []) for n in PIPELINES])
def test_it_is_the_loop_under_a_pipeline(name):
    ranks, options = PIPELINES[name]
    stages = ranks * (2 if name == "zb-v" else options.get("chunks", 1))
    args = data(stages, 200 if name == "auto" else 4)  # a stage has to be worth a message
    cuts = () if name == "auto" else range(stages - 1)
    function = shardc.function(
        training(cuts), mesh=shardc.make_mesh(pipe=ranks), pipeline=shardc.Pipeline(**options), donate_argnames="state"
    )
    assert function.compile(*args).audit().ok
    want = readable(by_hand(*args))
    assert_same(readable(function(*args)), want)


def plan_of(fn, schedule="1f1b"):
    def step(params, h, batch):
        return shardc.accumulate(
            jax.value_and_grad(fn, has_aux=True), microbatches=2, in_axes={"batch": 0}, reduce=((None, "carry:h"), None)
        )(params, h, batch)

    pipeline = shardc.Pipeline(schedule=schedule)
    function = shardc.function(step, mesh=shardc.make_mesh(pipe=2), pipeline=pipeline)
    return function.plan(layers(2), np.ones(4), batch(4))


def test_state_of_one_stage_that_another_reads_is_an_error():
    def late(params, h, batch):
        x = shardc.stage_boundary(dense(params[0], batch["x"]) * h)
        x = dense(params[1], x)
        return ((x - batch["y"]) ** 2).mean(), x.mean(0)

    with pytest.raises(shardc.PipelineError) as error:
        plan_of(late)
    text = str(error.value)
    assert "state that microbatches pass on has to be read and replaced by one task of one stage" in text
    assert "(late), in the forward of stage 0, reads state that test_keep_state.py" in text
    assert "(late) replaces in the backward of stage 1: each microbatch would wait" in text


def test_state_wants_microbatches_in_their_order():
    def early(params, h, batch):
        x = dense(params[0], batch["x"]) * h
        after = x.mean(0)
        return ((dense(params[1], shardc.stage_boundary(x)) - batch["y"]) ** 2).mean(), after

    turned = "turned\nrank 0 | 0F1 0F0 0B1 0B0\nrank 1 | 1F1 1B1 1F0 1B0"
    plan_of(early)
    with pytest.raises(shardc.PipelineError, match=r'"turned" does not\n  stage 0 has them in the order 1, 0'):
        plan_of(early, turned)


def test_what_no_microbatch_changes_is_computed_in_front_of_the_loop():
    def step(w, key, count, mean, x):
        def f(w, state, x):
            key, mask = jax.random.split(state["key"])
            loss = (w * x * jax.random.bernoulli(mask, 0.5, x.shape)).sum() * state["count"]
            after = {"key": key, "count": state["count"] + 1, "mean": 0.9 * state["mean"] + x.mean()}
            return loss, {**after, "fixed": state["fixed"]}

        state = {"key": key, "count": count, "mean": mean, "fixed": np.float64(1)}
        return shardc.accumulate(f, microbatches=4, in_axes={"x": 0}, reduce=("sum", "carry:state"))(w, state, x)

    args = 2.0, jax.random.key(0), np.int32(1), 0.0, np.arange(8.0)
    arguments = Arguments(step, ())
    program = trace(arguments, arguments.bind(args, {}), marks=True)
    after = precompute_state(program, Context())
    loops = [Loop.of(e) for p in (program, after) for e in p.jaxpr.eqns if e.primitive.name == "scan"]
    assert [len(loop.carries) for loop in loops] == [4, 2, 2]  # JAX itself takes "fixed" out
    flat = [jnp.asarray(x) for x in (*jax.tree.leaves(args), *program.captured)]
    got, want = (jaxpr_as_fun(compat.close(p.jaxpr))(*flat) for p in (after, program))
    assert_same(readable(got), readable(want))
