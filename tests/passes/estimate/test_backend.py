"""The tables of kinds of operations: every elementwise primitive is in them."""

import jax
import jax.numpy as jnp

from shardc.passes.estimate import backend
from shardc.passes.estimate.backend import CPU, TPU, FusionKind, backend_of, kind_of
from shardc.sbp import rules, signature

LOOPS = {
    "bessel_i0e", "bessel_i1e", "clz", "igamma", "igamma_grad_a", "igammac", "mulhi", "polygamma", "population_count",
    "regularized_incomplete_beta", "threefry2x32", "zeta",
}  # fmt: skip
"""XLA makes loops or calls of these, and fuses them with nothing."""


def test_every_elementwise_primitive_is_fused_into_loops():
    """A primitive that is missing would count as memory that XLA never takes, and other values would be kept for it."""
    elementwise = {n for n, rule in signature._RULES.items() if rule.__module__ == rules.elementwise.__name__}
    assert elementwise - backend._KINDS.keys() == LOOPS


def test_kinds():
    (eqn,) = jax.make_jaxpr(lambda x: x.reshape(-1))(jnp.ones((2, 3))).jaxpr.eqns
    assert kind_of(eqn) is FusionKind.VIEW
    (eqn,) = jax.make_jaxpr(jnp.sin)(1.0).jaxpr.eqns
    assert kind_of(eqn) is FusionKind.COSTLY
    (eqn,) = jax.make_jaxpr(jax.lax.cumsum)(jnp.ones(3)).jaxpr.eqns
    assert kind_of(eqn) is FusionKind.MADE
    assert backend_of("cpu") is CPU and backend_of("tpu") is TPU and not backend_of("gpu").tiles
