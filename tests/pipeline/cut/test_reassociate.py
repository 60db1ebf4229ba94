"""Each stage sums its own terms first."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from shardc.ir.walk import reads_of
from shardc.pipeline.cut.reassociate import reassociate


def groups(fn, *stages):
    """For each stage the primitives that sum its terms of `fn`, whose arguments are made on `stages`."""
    jaxpr = jax.make_jaxpr(fn)(*[1.0] * len(stages)).jaxpr
    made = {v: e for e in jaxpr.eqns for v in e.outvars}
    readers = reads_of(jaxpr.eqns, jaxpr.outvars)
    found = reassociate(jaxpr.outvars[0], lambda a: a, made, readers, dict(zip(jaxpr.invars, stages, strict=True)).get)
    return {stage: [e.primitive.name for e in eqns] for stage, _, eqns in found}


def test_terms_of_one_stage_are_added_there():
    assert groups(lambda a, b, c: a + (b + c), 0, 3, 0) == {0: ["add"], 3: []}


def test_a_conversion_of_the_sum_is_one_of_each_term():
    found = groups(lambda a, b, c: (a + (b + c)).astype(jnp.bfloat16), 0, 3, 0)
    assert found == {0: [*["convert_element_type"] * 2, "add"], 3: ["convert_element_type"]}
    assert groups(lambda a, b: (a + b).astype(jnp.int32), 0, 3) == {0: []}, "rounding is not linear"


def test_a_sum_that_others_read_stays():
    assert groups(lambda a, b, c: (a + (s := b + c), s), 0, 3, 0) == {0: []}


def test_a_term_that_is_everywhere_is_added_on_the_first_stage():
    assert groups(lambda a, b, c: a + b + c, 1, None, 2) == {1: ["add"], 2: []}
