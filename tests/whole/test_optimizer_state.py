"""The state of an optimizer lies with its parameters: left open it follows them, and their `rules` fit it as well."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardc
from shardc import S

pytestmark = pytest.mark.usefixtures("compiled_fast")

RATE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)
X = np.random.default_rng(0).normal(size=(512, 64)).astype(np.float32)
PARAMS = {
    "up": {"kernel": jnp.full((64, 256), 0.1), "bias": jnp.zeros(256)},
    "down": {"kernel": jnp.full((256, 8), 0.1)},
}


def matrices(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


def label(params):
    return jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "vector", params)


OPTIMIZERS = {
    "adamw with a schedule": optax.adamw(RATE),
    "chain with a mask": optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(),
        optax.masked(optax.add_decayed_weights(0.1), matrices),
        optax.scale_by_learning_rate(RATE),
    ),
    "masked": optax.masked(optax.adam(1e-2), matrices),
    "multi steps": optax.MultiSteps(optax.adamw(RATE), 2),
    "injected": optax.inject_hyperparams(optax.adamw)(learning_rate=RATE),
    "partitioned": optax.multi_transform({"matrix": optax.adam(1e-2), "vector": optax.sgd(1e-2, 0.9)}, label),
    "averaged": optax.chain(optax.adam(1e-2), optax.ema(0.9)),
}
SPLITS = {
    "tensor": {"*up/kernel": {"model": S(1)}, "*up/bias": {"model": S(0)}, "*down/kernel": {"model": S(0)}},
    "fsdp": {"*kernel": {"data": S(0)}, "*bias": {"data": S(0)}},
}


def plan(optimizer, weights, of_state):
    def step(params, opt_state, x):
        def loss_of(params):
            hidden = jnp.tanh(x @ params["up"]["kernel"] + params["up"]["bias"])
            return jnp.mean((hidden @ params["down"]["kernel"]) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    places = {"params": weights, "opt_state": of_state, "x": {"data": S(0)}}
    mesh = shardc.make_mesh(data=4, model=2)
    sharded = shardc.function(step, mesh=mesh, in_placements=places, donate_argnames=("params", "opt_state"))
    return sharded.plan(PARAMS, jax.eval_shape(optimizer.init, PARAMS), X)


def by_path(tree):
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in pairs}


def pairs(made):
    """(path in the state, its placement, that of the parameter) for each leaf that belongs to a parameter."""
    params = by_path(made.in_placements.params)
    state = by_path(made.in_placements.opt_state)
    found = [(s, state[s], params[p]) for s in state for p in params if s.endswith(f"/{p}")]
    assert len(found) >= 4
    return found


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_left_open_it_is_split_as_its_parameter_and_perhaps_further(name, split):
    made = plan(OPTIMIZERS[name], shardc.rules(SPLITS[split]), shardc.AUTO)
    for path, of_state, of_parameter in pairs(made):
        assert of_parameter
        assert {a: of_state[a] for a in of_parameter} == dict(of_parameter), path


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rules_of_parameters_that_begin_with_a_star_are_rules_of_the_state(name):
    patterns = SPLITS["tensor"]
    if name == "masked":  # nothing is kept for the bias, and a pattern without a leaf is an error
        patterns = {pattern: sbp for pattern, sbp in patterns.items() if "bias" not in pattern}
    made = plan(OPTIMIZERS[name], shardc.rules(SPLITS["tensor"]), shardc.rules(patterns))
    for path, of_state, of_parameter in pairs(made):
        assert of_state == of_parameter, path
