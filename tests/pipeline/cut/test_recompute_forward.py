"""The backward of a stage repeats what it reads of the forward."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from shardc.pipeline.cut.cut_loop import PlacedBody
from shardc.pipeline.cut.recompute_forward import recompute_forward
from shardc.pipeline.schedule.action import TaskId


def tasks(stages, fused=False, recomputed=(0,)):
    """(task, primitive) of: y = sin x; z = cos y; u = tanh z, read by the next stage alone; dx = y z."""
    jaxpr = jax.make_jaxpr(lambda x: ((y := jnp.sin(x)), (z := jnp.cos(y)), jnp.tanh(z), y * z))(1.0).jaxpr
    forward, backward = TaskId(0, "F"), TaskId(0, "B")
    placed = zip([forward, forward, forward, backward], jaxpr.eqns, strict=True)
    body = PlacedBody(stages, fused, True, tuple(placed), (), ())
    after = recompute_forward(body, recomputed).eqns
    assert (
        not {v for p, e in after if p == backward for v in e.invars} & {v for p, e in after[:3] for v in e.outvars}
        or fused
    )
    return [(p.kind, e.primitive.name) for p, e in after]


FORWARD = [("F", "sin"), ("F", "cos"), ("F", "tanh")]


def test_what_the_backward_reads_is_repeated_in_it():
    assert tasks(2) == [*FORWARD, ("B", "sin"), ("B", "cos"), ("B", "mul")]


def test_a_last_stage_whose_forward_is_in_its_backward_has_nothing_to_repeat():
    assert tasks(1, fused=True) == [*FORWARD, ("B", "mul")]
