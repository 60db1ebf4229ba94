"""Models of the zoo under each of their plans: one step on eight devices is the step of one device, in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import jax
import numpy as np
import pytest

import shardc
from examples import moe
from examples.zoo import MODELS
from tests.whole.test_parity import assert_close

MESH = {"data": 4, "model": 2}
ROWS = 16
ZOO = ("vit", "mixer", "llama", "moe", "bert", "t5", "unet", "dlrm", "ppo")
CONFIGS = {
    **{name: (name, {}) for name in ZOO},
    "llama scan": ("llama", {"scan_layers": True}),
    "llama remat": ("llama", {"remat": True}),
    "moe scan remat": ("moe", {"scan_layers": True, "remat": True}),
    "deepseek scan": ("moe", vars(moe.CONFIGS["test_deepseek"]) | {"scan_layers": True}),
    "mixtral": ("moe", vars(moe.CONFIGS["test_mixtral"])),
    "vit scan": ("vit", {"scan_layers": True, "remat": True, "parallel": True}),
    "t5 scan": ("t5", {"scan_layers": True, "remat": True}),
}
CASES = [
    *((model, plan) for model in ZOO for plan in MODELS[model].plans if plan != "pipeline"),
    *((case, plan) for case in ("llama scan", "llama remat") for plan in ("data_tensor", "fsdp")),
    *((case, plan) for case in ("moe scan remat", "deepseek scan", "mixtral") for plan in ("expert", "gshard")),
    *((case, plan) for case in ("vit scan", "t5 scan") for plan in ("data_tensor", "fsdp")),
]
AS_USERS = [
    ("llama scan", "data_tensor"),
    ("moe scan remat", "expert"),
    ("deepseek scan", "gshard"),
    ("vit scan", "fsdp"),
    ("t5", "tensor"),
    ("vit", "data_tensor"),
    ("bert", "data_tensor"),
    ("dlrm", "hybrid"),
    ("ppo", "data"),
]
"""Compiled as users' programs are; the others are compiled fast."""


def parts(case, accumulate=lambda fn: fn):
    """The step, its plans, and what it is called with."""
    model, changes = CONFIGS[case]
    zoo = MODELS[model]
    cfg = replace(zoo.configs["test"], **changes)
    init_fn, step_fn = zoo.make_step(cfg, accumulate)
    return init_fn, step_fn, zoo.plans, next(zoo.batches(cfg, ROWS, 0))


@cache
def one_device(case):
    """The state on one device before and after the first step, and the loss."""
    init_fn, step_fn, _, batch = parts(case)
    start = jax.tree.map(np.asarray, jax.jit(init_fn)(jax.random.key(0)))
    *after, loss = jax.tree.map(np.asarray, jax.jit(step_fn)(*start, batch))
    return start, tuple(after), loss


def check(case, plan, accumulate=lambda fn: fn):
    _, step_fn, plans, batch = parts(case, accumulate)
    start, want, want_loss = one_device(case)
    step = shardc.function(mesh=shardc.make_mesh(**MESH), **plans[plan]())(step_fn)
    compiled = step.compile(*start, batch)
    audit = compiled.audit()
    assert audit.ok, str(audit)
    assert not compiled.plan.gathered
    *state, loss = step(*start, batch)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-10)
    assert_close(tuple(state), want)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_a_step_equals_that_of_one_device(case, request):
    if case not in AS_USERS:
        request.getfixturevalue("compiled_fast")
    with jax.enable_x64(True):
        check(*case)


@pytest.mark.sampled(0)
@pytest.mark.usefixtures("compiled_fast")
@pytest.mark.parametrize("model", ZOO)
def test_a_step_over_microbatches_equals_that_of_one_device(model):
    with jax.enable_x64(True):
        plan = "data_tensor" if "data_tensor" in MODELS[model].plans else "data"
        check(model, plan, partial(shardc.accumulate, microbatches=4))
