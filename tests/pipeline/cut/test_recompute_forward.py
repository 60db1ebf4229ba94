"""The backward of a stage repeats what it reads of the forward."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from shardc.pipeline.cut.cut_loop import PlacedBody, backward_position
from shardc.pipeline.cut.recompute_forward import recompute_forward


def tasks(stages, fused=False, recomputed=(0,)):
    """(position, primitive) of: y = sin x; z = cos y; u = tanh z, read by the next stage alone; dx = y z."""
    jaxpr = jax.make_jaxpr(lambda x: ((y := jnp.sin(x)), (z := jnp.cos(y)), jnp.tanh(z), y * z))(1.0).jaxpr
    positions = 0, 0, 0, backward_position(0, stages)
    body = PlacedBody(stages, fused, True, tuple(zip(positions, jaxpr.eqns, strict=True)), (), ())
    after = recompute_forward(body, recomputed).eqns
    assert not {v for p, e in after if p for v in e.invars} & {v for p, e in after[:3] for v in e.outvars} or fused
    return [(p, e.primitive.name) for p, e in after]


FORWARD = [(0, "sin"), (0, "cos"), (0, "tanh")]


def test_what_the_backward_reads_is_repeated_in_it():
    assert tasks(2) == [*FORWARD, (3, "sin"), (3, "cos"), (3, "mul")]


def test_a_last_stage_whose_forward_is_in_its_backward_has_nothing_to_repeat():
    assert tasks(1, fused=True) == [*FORWARD, (1, "mul")]
