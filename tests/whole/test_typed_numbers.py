"""Extended dtypes that are no keys, such as flax's float32 whose sum in a gradient is the maximum."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import fp8_ops
from jax import lax

import shardc
from shardc import ArgumentError, S

MESH = shardc.make_mesh(data=8)
RNG = np.random.default_rng(0)
W, X = RNG.normal(size=(16, 8)).astype("f"), RNG.normal(size=(32, 16)).astype("f")
HISTORY = np.abs(RNG.normal(size=64)).astype("f")


def quantized(x, history):
    scale = lax.convert_element_type(jnp.float32(1), fp8_ops.fp32_max_grad)
    typed = lax.convert_element_type(history, fp8_ops.fp32_max_grad)
    return fp8_ops.in_qdq(jnp.float32, jnp.float8_e4m3fn, x, scale, typed)


def step(w, history, x):
    return jax.grad(lambda w, h: jnp.sum((quantized(x, h) @ w) ** 2), (0, 1))(w, history)


def used_twice(w, history, x):
    """The two gradients of the history meet in a maximum."""

    def loss(w, h):
        typed = lax.convert_element_type(h, fp8_ops.fp32_max_grad)
        scale = lax.convert_element_type(jnp.float32(1), fp8_ops.fp32_max_grad)
        one, two = (fp8_ops.in_qdq(jnp.float32, jnp.float8_e4m3fn, k * x, scale, typed) for k in (1.0, 3.0))
        return jnp.sum((one @ w + jnp.sin(two @ w)) ** 2)

    return jax.grad(loss, (0, 1))(w, history)


def in_a_scan(w, history, x):
    def loss(w, h):
        typed = lax.convert_element_type(h, fp8_ops.fp32_max_grad)
        scale = lax.convert_element_type(jnp.float32(1), fp8_ops.fp32_max_grad)

        def one(total, rows):
            y = fp8_ops.in_qdq(jnp.float32, jnp.float8_e4m3fn, rows, scale, typed)
            return total + jnp.sum((y @ w) ** 2), None

        return lax.scan(one, jnp.float32(0), x.reshape(4, 8, 16))[0]

    return jax.grad(loss, (0, 1))(w, history)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("history", [{}, {"data": S(0)}], ids=str)
@pytest.mark.parametrize("fn", [step, used_twice, in_a_scan])
def test_it_equals_jit(fn, history, compiled_fast):
    f = shardc.function(fn, mesh=MESH, in_placements=({}, history, {"data": S(0)}))
    for got, want in zip(f(W, HISTORY, X), jax.jit(fn)(W, HISTORY, X), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


def test_values_are_counted_as_their_numbers():
    plan = shardc.function(used_twice, mesh=MESH, in_placements=({}, {}, {"data": S(0)})).plan(W, HISTORY, X)
    assert {v.aval.dtype for e in plan.program.jaxpr.eqns for v in e.outvars} <= {
        np.dtype(t) for t in ("float32", "float8_e4m3fn", "int32", "bool")
    }


def test_an_argument_or_a_result_of_that_type_is_refused():
    f = shardc.function(lambda x: lax.convert_element_type(x, fp8_ops.fp32_max_grad), mesh=MESH)
    with pytest.raises(ArgumentError, match=r'is of fp8_meta32, .*convert_element_type\(x, "float32"\)'):
        f.plan(X)
    typed = jax.ShapeDtypeStruct((64,), fp8_ops.fp32_max_grad)
    with pytest.raises(ArgumentError, match=r"types for gradients; pass the numbers as they are\n  x: fp8_meta32"):
        f.plan(typed)
