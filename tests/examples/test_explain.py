"""What `plan.explain()` says of each model of the zoo under one of its plans, word for word.

`pytest --update-golden` writes the texts anew. Nothing is compiled and nothing runs.
"""

from __future__ import annotations

import jax
import pytest

import shardc
from examples.zoo import MODELS

ROWS = 16
PLANS = {
    "mlp": "tensor", "resnet": "zero1", "vit": "data_tensor", "bert": "data_tensor", "gpt2": "fsdp",
    "llama": "data_tensor", "moe": "gshard", "t5": "tensor", "dlrm": "hybrid", "unet": "data", "ppo": "data",
    "mixer": "tensor",
}  # fmt: skip


def test_every_model_has_its_text():
    assert PLANS.keys() == MODELS.keys()


@pytest.mark.sampled(3)
@pytest.mark.plans_eagerly
@pytest.mark.parametrize("model", PLANS)
def test_a_plan_of_the_zoo(model, golden):
    zoo, mesh = MODELS[model], shardc.make_mesh(data=4, model=2)
    cfg = zoo.configs["test"]
    init_fn, step_fn = zoo.make_step(cfg, lambda fn: fn)
    step = shardc.function(mesh=mesh, **zoo.plans[PLANS[model]]())(step_fn)
    state = jax.eval_shape(init_fn, jax.random.key(0))
    golden(model, step.plan(*state, next(zoo.batches(cfg, ROWS, 0))).explain())
