"""Training steps of the examples, in three types: a check finds nothing where nothing is wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from examples.zoo import MODELS

TYPES = ["float32", "bfloat16", "float64"]
MESHES = [{"data": 2, "model": 2}, {"data": 4, "model": 2}, {"data": 3, "model": 2}]
SMALL = ["mlp", "dlrm"]
"""Of the others XLA compiles the pieces of one device, with their rounding errors, for half a minute and more."""
CASES = [
    (model, plan, MESHES[k % 3], dtype)
    for model, known in MODELS.items()
    for k, plan in enumerate(p for p in known.plans if p != "pipeline")
    for dtype in TYPES
    if (model, dtype) != ("ppo", "bfloat16")  # its dice are float32, and the carts that they move with them
]


def numbers(tree, dtype):
    """Random numbers in place of those of the initialization, which takes long to compile; second moments are
    positive."""
    draw = np.random.default_rng(1)

    def filled(x):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.key(5) if x.shape == () else jax.random.split(jax.random.key(5), x.shape)
        if not jnp.issubdtype(x.dtype, np.floating):
            return np.zeros(x.shape, x.dtype)
        return np.abs(0.1 * draw.normal(size=x.shape)).astype(dtype if x.dtype == np.float32 else x.dtype)

    return jax.tree.map(filled, tree)


def check_of(model, plan, axes, dtype):
    known = MODELS[model]
    cfg = known.configs["test"]
    with jax.enable_x64(dtype == "float64"):
        init, step = known.make_step(cfg)
        state = numbers(jax.eval_shape(init, jax.random.key(0)), jnp.dtype(dtype))
        batch = next(iter(known.batches(cfg, getattr(cfg, "carts", 12), 0)))
        f = shardc.function(mesh=shardc.make_mesh(**axes), **known.plans[plan]())(step)
        report = f.compile(*state, batch).check(*state, batch)
    assert report.ok, str(report)
    assert report.borders and report.results == len(jax.tree.leaves(state)) + 1


@pytest.mark.sampled(0)
@pytest.mark.parametrize("case", [c for c in CASES if c[0] in SMALL], ids=str)
def test_a_check_of_a_training_step_finds_nothing(case):
    check_of(*case)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("case", [c for c in CASES if c[0] not in SMALL], ids=str)
def test_nor_does_one_of_a_larger_model(case):
    check_of(*case)
