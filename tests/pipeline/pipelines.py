"""A chain of dense layers for tests of pipelines, and the comparison with one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import shardc


def layers(count, width=4, seed=0):
    rng = np.random.default_rng(seed)
    return [{"w": rng.normal(size=(width, width)) / width**0.5, "b": rng.normal(size=width)} for _ in range(count)]


def batch(rows, width=4, **more):
    rng = np.random.default_rng(1)
    return {"x": rng.normal(size=(rows, width)), "y": rng.normal(size=(rows, width)), **more}


def dense(layer, x):
    return jnp.tanh(x @ layer["w"] + layer["b"])


def chain(params, x, cuts=(0,)):
    """A stage ends behind each layer whose number is in `cuts`."""
    for i, layer in enumerate(params):
        x = dense(layer, x)
        x = shardc.stage_boundary(x) if i in cuts else x
    return x


def error(x, batch):
    return ((x - batch["y"]) ** 2).mean()


def loss(params, batch, cuts=(0,)):
    return error(chain(params, batch["x"], cuts), batch)


def even_cuts(count, stages):
    """Where `count` layers are cut so that no stage has more than one layer more than another."""
    return tuple(round((s + 1) * count / stages) - 1 for s in range(stages - 1))


def training(loss, microbatches):
    """`step(params, batch)`: the parameters anew, the gradients and the loss."""

    def step(params, batch):
        value, grads = shardc.accumulate(jax.value_and_grad(loss), microbatches=microbatches)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), grads, value

    return step


def on_host(tree):
    return jax.tree.map(np.asarray, tree, is_leaf=lambda x: isinstance(x, shardc.PlacedArray))


def assert_same(got, want, tolerance=1e-10):
    """Floats to `tolerance` of a leaf's largest value (or of a thousandth of all leaves'), the rest exactly."""
    got, want = on_host(got), on_host(want)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)  # noqa: E731
    largest = lambda x: np.abs(x.astype(np.float64)).max(initial=0.0)  # noqa: E731
    top = max((largest(w) for w in jax.tree.leaves(want) if is_float(w)), default=0.0)
    for (path, g), w in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        name = jax.tree_util.keystr(path)
        assert (g.shape, g.dtype) == (w.shape, w.dtype), name
        if not is_float(w):
            np.testing.assert_array_equal(g, w, err_msg=name)
            continue
        close = tolerance * max(largest(w), 1e-3 * top)
        np.testing.assert_allclose(g.astype(np.float64), w.astype(np.float64), rtol=0, atol=close, err_msg=name)


def check(step, args, mesh, schedule="1f1b", tolerance=1e-10, pipeline=None, **options):
    """A step under a pipeline gives what it gives on one device, and moves what the plan says. Gives the function."""
    want = on_host(jax.jit(step)(*args))
    pipeline = pipeline or shardc.Pipeline(schedule=schedule)
    function = shardc.function(step, mesh=mesh, pipeline=pipeline, **options)
    compiled = function.compile(*args)
    assert_same(function(*args), want, tolerance)
    audit = compiled.audit()
    assert audit.ok, str(audit)
    listed = sum(t.border_bytes for t in compiled.plan.transfers if not t.line.startswith("argument"))
    assert audit.crossed == audit.planned_crossed == listed
    return function
