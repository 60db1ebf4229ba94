"""Sums and similar reductions over values of several stages, before and after."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from shardc.compat import close, new_jaxpr, remove_dead
from shardc.pipeline.cut.regroup import regroup

CASES = {
    "a sum": (lambda a, b, c, d: a + b + (c + d), ["0 add", "1 add", "0 add"]),
    "a product stays": (lambda a, b, c, d: a * b * c * d, ["mul", "mul", "mul"]),
    "a maximum": (lambda a, b, c, d: jnp.maximum(jnp.maximum(a, b), jnp.maximum(c, d)), ["0 max", "1 max", "0 max"]),
    "all of a stack": (
        lambda a, b, c, d: jnp.concatenate([a, b, c, d]).sum(),
        ["0 concatenate", "0 reduce_sum", "1 concatenate", "1 reduce_sum", "0 add"],
    ),
    "a sum that is read": (lambda a, b, c, d: (a + c, a + c + b), ["add", "add", "add"]),
}


@pytest.mark.parametrize("case", CASES)
def test_reductions(case):
    fn, after = CASES[case]
    args = [np.arange(3.0, dtype=np.float32) + i for i in range(4)]
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    anchors = dict(zip(jaxpr.invars, (0, 1, 0, 1) if "stays" in case or "read" in case else (0, 0, 1, 1), strict=True))
    if "read" in case:
        anchors |= dict.fromkeys(jaxpr.invars, 0)
    eqns = regroup(jaxpr.eqns, anchors, jaxpr.outvars)
    found = remove_dead(new_jaxpr(jaxpr.invars, jaxpr.outvars, eqns, jaxpr), [True] * len(jaxpr.outvars))
    assert [f"{anchors.get(e.outvars[0], '')} {e.primitive.name}".strip() for e in found.eqns] == after
    again = jaxpr_as_fun(close(found))(*args)
    np.testing.assert_allclose(np.asarray(again[0]), np.asarray(jax.tree.leaves(fn(*args))[0]), rtol=1e-6)
