"""Each equation of a microbatch gets its task: F or B of a stage."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from shardc.errors import PipelineError
from shardc.passes.trace.trace import Arguments, trace
from shardc.pipeline.cut.cut_loop import find_loop, place_body
from shardc.sbp import rules

assert rules  # imported for what it registers

WEIGHTS = [np.ones((4, 4), np.float32)] * 2
ROWS = np.ones((8, 4), np.float32)


def traced(step, *args):
    arguments = Arguments(step, ())
    return trace(arguments, arguments.bind(args, {}), marks=True)


def loss(params, x):
    return jnp.sum(shardc.stage_boundary(jnp.sin(x @ params[0])) @ params[1])


def placed(fn, stages=2):
    step = shardc.accumulate(fn, microbatches=4)
    return place_body(find_loop(traced(step, WEIGHTS, ROWS), "step"), stages, "step")


def test_a_forward_pass():
    body = placed(loss)
    assert [(str(p), e.primitive.name) for p, e in body.eqns if e.primitive.name in ("dot_general", "sin")] == [
        ("0F", "dot_general"), ("0F", "sin"), ("1F", "dot_general"),
    ]  # fmt: skip
    assert not body.backward and [str(c.task) for c in body.carries] == ["1F"]


def test_a_gradient_of_a_fused_last_stage():
    body = placed(jax.grad(loss))
    assert body.backward and body.fused
    found = [(str(p), e.primitive.name) for p, e in body.eqns if e.primitive.name in ("dot_general", "sin", "cos")]
    assert found == [
        ("0F", "dot_general"), ("0F", "sin"), ("0B", "cos"), ("1B", "dot_general"), ("1B", "dot_general"),
        ("0B", "dot_general"),
    ], "F and B of stage 1 are one task"  # fmt: skip
    assert sorted(str(c.task) for c in body.carries) == ["0B", "1B"]


def test_too_few_boundaries():
    with pytest.raises(PipelineError, match="3 stages need 2 stage boundaries, the loop has 1"):
        placed(jax.grad(loss), 3)


def test_no_loop():
    with pytest.raises(PipelineError, match="a pipeline runs over one loop of microbatches, found none"):
        find_loop(traced(loss, WEIGHTS, ROWS), "step")
