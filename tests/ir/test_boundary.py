"""Marks of cuts: identities that differentiate, transpose and batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardc.errors import ArgumentError
from shardc.ir.boundary import mark_cut, stage_boundary


def _marks(jaxpr):
    return [(e.params["cut"], e.params["backward"]) for e in jaxpr.eqns if e.primitive.name == "stage_boundary"]


def test_identity_with_a_number_of_its_own():
    x = {"a": np.ones(3, np.float32), "b": np.float32(2)}
    got = stage_boundary(x)
    np.testing.assert_array_equal(got["a"], x["a"])
    assert got["b"] == 2
    first, second = _marks(jax.make_jaxpr(lambda x: stage_boundary(stage_boundary(x)))(1.0).jaxpr)
    assert first != second


def test_equal_numbers_are_one_cut():
    jaxpr = jax.make_jaxpr(lambda x: mark_cut((x, 2 * x), 7))(1.0).jaxpr
    assert _marks(jaxpr) == [(7, False), (7, False)]


def test_the_gradient_crosses_the_same_cut():
    jaxpr = jax.make_jaxpr(jax.grad(lambda x: jnp.sin(mark_cut(jnp.sin(x), 3))))(1.0).jaxpr
    assert _marks(jaxpr) == [(3, False), (3, True)]


def test_batches():
    x = np.arange(3, dtype=np.float32)
    np.testing.assert_array_equal(jax.vmap(stage_boundary)(x), x)


def test_nothing_to_cross():
    with pytest.raises(ArgumentError, match="stage_boundary: there is no array in"):
        stage_boundary(())
