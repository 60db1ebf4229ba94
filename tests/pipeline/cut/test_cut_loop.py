"""Each equation of a microbatch gets the position of its task: F of stage s at s, B at 2P-1-s."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from shardc.errors import PipelineError
from shardc.passes.trace.trace import Arguments, trace
from shardc.pipeline.cut.cut_loop import backward_position, find_loop, forward_position, place_body, stage_of
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
    assert [(p, e.primitive.name) for p, e in body.eqns if e.primitive.name in ("dot_general", "sin")] == [
        (0, "dot_general"), (0, "sin"), (1, "dot_general"),
    ]  # fmt: skip
    assert not body.backward and [c.position for c in body.carries] == [1]


def test_a_gradient_of_a_fused_last_stage():
    body = placed(jax.grad(loss))
    assert body.backward and body.fused
    found = [(p, e.primitive.name) for p, e in body.eqns if e.primitive.name in ("dot_general", "sin", "cos")]
    assert found == [
        (0, "dot_general"), (0, "sin"), (3, "cos"), (2, "dot_general"), (2, "dot_general"), (3, "dot_general"),
    ], "F of stage 0; its B is at 3; F and B of stage 1 are one task"  # fmt: skip
    assert sorted(c.position for c in body.carries) == [2, 3]


def test_positions_are_those_of_stages():
    for stages in (1, 2, 5):
        for s in range(stages):
            assert stage_of(forward_position(s), stages) == stage_of(backward_position(s, stages), stages) == s


def test_too_few_boundaries():
    with pytest.raises(PipelineError, match="3 stages need 2 stage boundaries, the loop has 1"):
        placed(jax.grad(loss), 3)


def test_no_loop():
    with pytest.raises(PipelineError, match="a pipeline runs over one loop of microbatches, found none"):
        find_loop(traced(loss, WEIGHTS, ROWS), "step")
