"""Pins of equations: shardc's own, and JAX's sharding constraints."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import shardc
from shardc.ir.constrain import constrain_p, pin_of
from shardc.sbp.placement import Pin, Placement

PIN = Pin(Placement.parse("{a: S(0)}"))
X = np.ones((8, 4), np.float32)


def _pins(fn, *args):
    return [p for e in jax.make_jaxpr(fn)(*args).jaxpr.eqns if (p := pin_of(e)) is not None]


def test_an_identity_that_keeps_its_pin():
    np.testing.assert_array_equal(constrain_p.bind(X, pin=PIN), X)
    assert _pins(lambda x: constrain_p.bind(x, pin=PIN) + 1, X) == [PIN]


def test_the_cotangent_is_free():
    assert _pins(jax.grad(lambda x: constrain_p.bind(x, pin=PIN).sum()), X) == [PIN]


def test_a_batched_dimension_stays_whole():
    (pin,) = _pins(jax.vmap(lambda x: constrain_p.bind(x, pin=PIN)), np.ones((3, 8, 4), np.float32))
    assert pin.placement == Placement.parse("{a: S(1)}")


def test_jax_constraints():
    mesh = shardc.make_mesh(a=2, b=2)
    whole = NamedSharding(mesh, PartitionSpec(None, "b"))
    part = NamedSharding(mesh, PartitionSpec("a", PartitionSpec.UNCONSTRAINED))
    assert _pins(lambda x: jax.lax.with_sharding_constraint(x, whole), X) == [Pin(Placement.parse("{b: S(1)}"))]
    assert _pins(lambda x: jax.lax.with_sharding_constraint(x, part), X) == [
        Pin(Placement.parse("{a: S(0)}"), frozenset(["a"]))
    ]
