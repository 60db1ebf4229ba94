"""What microbatches write to nnx modules: as a loop on one device writes it, under pipelines too."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardc
import shardc.flax
import shardc.passes.accumulate.microbatches
from shardc import S

pytestmark = pytest.mark.usefixtures("compiled_fast")

M = 3
ROWS = np.random.default_rng(0).normal(size=(2 * M, 2, 4))


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


class Net(nnx.Module):
    """Statistics, masks, a carry from batch to batch, and one stream of noise that all parts draw from."""

    def __init__(self, rngs, cuts=(0, 1)):
        double = {"rngs": rngs, "param_dtype": jnp.float64}
        self.first, self.last = nnx.Linear(4, 5, **double), nnx.Linear(3, 2, **double)
        self.norm = nnx.BatchNorm(5, momentum=0.9, **double)
        self.norm.mean, self.norm.var = (nnx.BatchStat(jnp.full(5, x, jnp.float64)) for x in (0, 1))
        self.drops = nnx.List([nnx.Dropout(0.3, rngs=rngs) for _ in range(2)])
        self.rnn = nnx.RNN(nnx.SimpleCell(5, 3, dtype=jnp.float64, **double), rngs=rngs)
        self.hidden = nnx.Variable(jnp.zeros((2, 3), jnp.float64))
        self.rngs, self.cuts = rngs, nnx.static(cuts) if hasattr(nnx, "static") else cuts

    def cut(self, x, number):
        return shardc.stage_boundary(x) if number in self.cuts else x

    def noise(self, x):
        return x + 0.1 * jax.random.uniform(self.rngs.noise(), x.shape, x.dtype)

    def __call__(self, x):
        x = self.cut(self.noise(self.drops[0](self.norm(jnp.tanh(self.first(x))))), 0)
        hidden, x = self.rnn(x, initial_carry=self.hidden[...], return_carry=True)
        self.hidden[...] = jax.lax.stop_gradient(hidden)
        x = self.cut(self.noise(x), 1)
        return self.noise(self.drops[1](self.last(x)))


def net(cuts=(0, 1)):
    model = Net(nnx.Rngs(0, noise=1), cuts)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), spread=nnx.metrics.Welford("loss"))
    return model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param), metrics


def loss_of(model, metrics, x):
    loss = ((model(x) - 1) ** 2).mean()
    metrics.update(loss=loss.astype(jnp.float32))
    return loss


def step(model, optimizer, metrics, x):
    loss, grads = shardc.accumulate(nnx.value_and_grad(loss_of), microbatches=M)(model, metrics, x)
    optimizer.update(model, grads)
    return loss


of_one_microbatch = nnx.jit(nnx.value_and_grad(loss_of))


def by_hand(model, optimizer, metrics, x):
    pairs = [of_one_microbatch(model, metrics, x[j::M]) for j in range(M)]
    optimizer.update(model, jax.tree.map(lambda *gs: sum(gs) / M, *[g for _, g in pairs]))
    return sum(loss for loss, _ in pairs) / M


def readable(node):
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    state = nnx.to_pure_dict(nnx.state(node))
    return jax.tree.map(lambda x: np.asarray(jax.random.key_data(x) if is_key(x) else x), state)


def assert_same(got, want, loose=1e-6):
    for g, w in zip(map(readable, got), map(readable, want), strict=True):
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(g), jax.tree.leaves(w), strict=True):
            exact = a.dtype.kind in "ui"
            tolerance = 0 if exact else 1e-10 if a.dtype == np.float64 else loose
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=jax.tree_util.keystr(path))


HOW = {
    "mesh": {"mesh": shardc.make_mesh(data=2)},
    "two stages": {"mesh": shardc.make_mesh(pipe=2), "pipeline": shardc.Pipeline()},
    "three stages": {"mesh": shardc.make_mesh(pipe=3), "pipeline": shardc.Pipeline(schedule="zb-h1")},
}


@pytest.fixture(scope="module")
def after_two_steps():
    """The nodes and losses of a loop by hand."""
    with jax.enable_x64(True):
        nodes = net()
        return nodes, [float(by_hand(*nodes, ROWS)) for _ in range(2)]


@pytest.mark.sampled(0)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("function", [shardc.function, shardc.flax.function], ids=["", "flax"])
def test_microbatches_write_what_a_loop_writes(function, how, after_two_steps):
    """On a mesh, and as pipelines of two and three stages: two steps, and all that they write."""
    want, losses = after_two_steps
    nodes = net((0,) if how == "two stages" else (0, 1))
    run = function(step, in_placements={"x": {"data": S(0)} if how == "mesh" else {}}, **HOW[how])
    np.testing.assert_allclose([float(run(*nodes, ROWS)) for _ in range(2)], losses, rtol=1e-10)
    assert_same(nodes, want)


class Small(nnx.Module):
    """A stage with statistics, one with a mask of its own."""

    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(4, 5, rngs=rngs), nnx.Linear(5, 2, rngs=rngs)
        self.norm, self.drop = nnx.BatchNorm(5, rngs=rngs), nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.last(shardc.stage_boundary(self.norm(self.first(x)))))


def test_statistics_and_masks_under_a_pipeline():
    def small():
        model = Small(nnx.Rngs(0))
        metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), metrics

    rows = ROWS.reshape(-1, 4).astype(np.float32)
    got, want = small(), small()
    run = shardc.flax.function(step, mesh=shardc.make_mesh(pipe=2), pipeline=shardc.Pipeline())
    np.testing.assert_allclose(run(*got, rows), by_hand(*want, rows), rtol=1e-6)
    assert int(got[0].drop.rngs.count[...]) == M
    assert_same(got, want, 1e-5)


def test_a_new_variable_and_another_flag_are_errors():
    def new(model, x):
        model.seen = nnx.Variable(x)
        return x.sum()

    def flip(model, x):
        model.drops[0].eval()
        return x.sum()

    said = "in a microbatch.*\n  model/seen is new; create it before the loop"
    for fn, message in ((new, said), (flip, r"as \.train\(\)")):
        with pytest.raises(shardc.ArgumentError, match=message):
            shardc.accumulate(fn, microbatches=M)(net()[0], ROWS)


def test_a_module_has_no_batch_and_what_is_closed_over_cannot_be_written():
    model = net()[0]
    with pytest.raises(shardc.ArgumentError, match="in_axes says a batch dimension for model"):
        shardc.accumulate(lambda model, x: x.sum(), microbatches=M, in_axes=(0, 0))(model, ROWS)
    with pytest.raises(Exception, match="from a different trace level"):
        shardc.accumulate(lambda x: model(x).mean(), microbatches=M)(ROWS)


def test_without_shardc_flax_a_write_is_an_error(monkeypatch):
    monkeypatch.setattr(shardc.passes.accumulate.microbatches, "OPENERS", [])
    model = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    with pytest.raises(shardc.TracingError, match=r"would be lost: .*mean.*Import shardc\.flax"):
        shardc.accumulate(lambda model, x: model(x).mean(), microbatches=M)(model, ROWS.astype(np.float32))
    read = shardc.accumulate(lambda model, x: (x * model.scale[...]).sum(), microbatches=M, reduce="sum")
    np.testing.assert_allclose(read(model, ROWS), ROWS.sum(), rtol=1e-10)
