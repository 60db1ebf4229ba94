"""Floating-point operations of a program."""

import jax
import jax.numpy as jnp

import shardc

X = jax.ShapeDtypeStruct((16, 16), "float32")


def flops(fn, *args):
    return dict(shardc.function(fn, mesh=shardc.make_mesh(data=8)).plan(*args).flops)


def test_loops_count_with_their_rounds_and_types_apart():
    def fn(x):
        x, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c @ c), None), x, length=5)
        return (x.astype("bfloat16") @ x.astype("bfloat16")).sum()

    assert flops(fn, X) == {"float32": 5 * 2 * 16**3, "bfloat16": 2 * 16**3}


def test_a_gradient_takes_twice_as_many_and_light_operations_none():
    def loss(w, x):
        return ((x @ w) ** 2).sum()

    assert flops(lambda w, x: jax.grad(loss, (0, 1))(w, x), X, X) == {"float32": 3 * 2 * 16**3}
    assert flops(lambda x: x + 1, X) == {}
