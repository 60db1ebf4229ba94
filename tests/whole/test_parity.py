"""One device is the truth: training steps of every example under every plan equal those of one device, in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import islice

import jax
import numpy as np
import pytest

import shardc
from examples import data, gpt2, mlp, resnet
from examples.plans import gpt2 as gpt2_plans
from examples.plans import mlp as mlp_plans
from examples.plans import resnet as resnet_plans

STEPS = 3
ROWS = 16
TEXT = gpt2.CONFIGS["test"]
MODELS = {
    "mlp": (mlp, mlp.CONFIGS["test"], mlp_plans.PLANS),
    "resnet": (resnet, resnet.CONFIGS["test"], resnet_plans.PLANS),
    "gpt2": (gpt2, TEXT, gpt2_plans.PLANS),
    "gpt2 scan": (gpt2, replace(TEXT, scan_layers=True), gpt2_plans.PLANS),
    "gpt2 remat": (gpt2, replace(TEXT, remat=True), gpt2_plans.PLANS),
    "gpt2 scan remat": (gpt2, replace(TEXT, scan_layers=True, remat=True), gpt2_plans.PLANS),
    "gpt2 257": (gpt2, replace(TEXT, vocab=257), gpt2_plans.PLANS),
    "gpt2 509 scan": (gpt2, replace(TEXT, vocab=509, scan_layers=True, remat=True), gpt2_plans.PLANS),
}
NUMBERS_OF = {"gpt2 remat": "gpt2", "gpt2 scan remat": "gpt2 scan"}
"""Models with the numbers of another: what is computed again is what it was."""
AXES_OF_PLAN = {"data": {"data"}, "zero1": {"data"}, "fsdp": {"data"}, "tensor": {"model"}}
"""Axes that a plan names; the others name both."""


def meshes(plan):
    axes = AXES_OF_PLAN.get(plan, {"data", "model"})
    found = [{"data": 4, "model": 2}, {"data": 2, "model": 2, "other": 2}]
    return [{axis: 8} for axis in axes if len(axes) == 1] + found


CASES = [(model, plan, mesh) for model, (_, _, plans) in MODELS.items() for plan in plans if plan != "pipeline"
         for mesh in meshes(plan)]  # fmt: skip
AS_USERS = [
    ("mlp", "tensor", {"model": 8}),
    ("mlp", "fsdp", {"data": 4, "model": 2}),
    ("mlp", "data_tensor", {"data": 2, "model": 2, "other": 2}),
    ("mlp", "zero1", {"data": 8}),
    ("resnet", "data", {"data": 8}),
    ("resnet", "spatial", {"data": 4, "model": 2}),
    ("gpt2 scan remat", "data_tensor", {"data": 4, "model": 2}),
    ("gpt2 509 scan", "vocab", {"data": 4, "model": 2}),
]
"""Compiled as users' programs are; the others are compiled fast."""


def batches(module, cfg):
    if module is gpt2:
        return data.text_batches(data.text_bytes(50_000), ROWS, cfg.seq)
    return data.digit_batches(data.digits()[0], ROWS)


@cache
def one_device(model):
    """The states and losses of the first steps on one device, and the start."""
    module, cfg, _ = MODELS[model]
    init_fn, step_fn = module.make_step(cfg)
    state = jax.tree.map(np.asarray, jax.jit(init_fn)(jax.random.key(0)))
    start, step, after = state, jax.jit(step_fn), []
    for batch in islice(batches(module, cfg), STEPS):
        *state, loss = jax.tree.map(np.asarray, step(*state, batch))
        after.append((tuple(state), loss))
    return start, after


def cost_of(case):
    """More for the plans on three axes of a model that is not small."""
    model, _, mesh = case
    return 2 if len(mesh) == 3 and model != "mlp" else 1


def test_the_cases_are_all_there():
    assert len(CASES) == 121
    assert all(case in CASES for case in AS_USERS)


@pytest.mark.sampled(
    by=lambda case: {*case[0].split(), len(case[2])} - {"resnet", "257", "509", "remat", "scan"},
    cost=lambda case: cost_of(case),
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_steps_equal_those_of_one_device(case, request):
    if case not in AS_USERS:
        request.getfixturevalue("compiled_fast")
    model, plan, axes = case
    module, cfg, plans = MODELS[model]
    with jax.enable_x64(True):
        state, after = one_device(NUMBERS_OF.get(model, model))
        step = shardc.function(mesh=shardc.make_mesh(**axes), **plans[plan]())(module.make_step(cfg)[1])
        for batch, (want, want_loss) in zip(batches(module, cfg), after, strict=False):
            if want is after[0][0]:
                audit = step.compile(*state, batch).audit()
                assert audit.ok, str(audit)
            *state, loss = step(*state, batch)
            np.testing.assert_allclose(loss, want_loss, rtol=1e-10)
            assert_close(tuple(state), want)


def assert_close(got, want):
    """To 1e-10 of a leaf's largest value. The keys' biases have no gradient but rounding, and stay at 0: Adam, which
    divides by it, moves them by some 1e-12."""
    got = jax.tree_util.tree_leaves_with_path(got, is_leaf=lambda x: isinstance(x, shardc.PlacedArray))
    for (keys, g), w in zip(got, jax.tree.leaves(want), strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        scale = 0.1 if path.removesuffix("/value").endswith("attn/k/bias") else np.abs(w).max(initial=0.0)
        np.testing.assert_allclose(np.asarray(g), w, rtol=1e-10, atol=1e-10 * scale, err_msg=path)
