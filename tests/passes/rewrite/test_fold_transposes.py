"""Transposes folded into products: the same numbers, and no transposed copy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex

import shardc
from shardc import S, compat
from shardc.ir.nested import bodies_of
from shardc.passes.rewrite.fold_transposes import fold_transposes
from shardc.passes.trace.canonicalize import canonicalize

RNG = np.random.default_rng(0)
W, X = RNG.normal(size=(5, 4)), RNG.normal(size=(3, 2, 4))
FOLDED: dict[str, Callable[[Any, Any], Any]] = {
    "x @ w.T": lambda w, x: x @ w.T,
    "swapaxes": lambda w, x: x @ w.swapaxes(0, 1),
    "twice": lambda w, x: jnp.tensordot(x, w.T.T, ((2,), (1,))),
    "a gradient": jax.grad(lambda w, x: jnp.sum((x @ w.T) ** 2), 1),
    "in a loop": lambda w, x: jax.lax.map(lambda row: row @ w.T, x),
    "with batches": lambda w, x: jax.lax.dot_general(x, x.transpose(2, 0, 1), (((2,), (0,)), ((0,), (1,)))),
}


def program(fn: Callable[..., Any], *args: Any) -> tuple[Any, list[str]]:
    jaxpr = fold_transposes(canonicalize(jax.make_jaxpr(fn)(*args))[0])
    names: list[str] = []

    def walk(jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            names.append(eqn.primitive.name)
            for body in bodies_of(eqn):
                walk(body)

    walk(jaxpr)
    return jaxpr, names


@pytest.mark.parametrize("name", FOLDED)
def test_nothing_is_transposed(name: str) -> None:
    jaxpr, names = program(FOLDED[name], W, X)
    assert "dot_general" in names
    assert "transpose" not in names
    (got,) = jex.jaxpr_as_fun(compat.close(jaxpr))(W, X)
    np.testing.assert_allclose(got, FOLDED[name](W, X), rtol=1e-5, atol=1e-6)


@pytest.mark.sampled(by=lambda order, dims: {order, dims})
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("dims", [((2,), (0,)), ((0,), (1,)), ((1,), (2,))])
def test_any_order_of_dimensions(order: tuple[int, ...], dims: Any) -> None:
    """An operand whose free dimensions change their order stays transposed: the result has them in that order."""
    x = RNG.normal(size=(3, 3, 3))

    def fn(x: Any) -> Any:
        return jax.lax.dot_general(x.transpose(order), x, (dims, ((), ())))

    jaxpr, _ = program(fn, x)
    (got,) = jex.jaxpr_as_fun(compat.close(jaxpr))(x)
    np.testing.assert_allclose(got, fn(x), rtol=1e-5, atol=1e-6)


def test_a_tied_head_sends_what_einsum_sends() -> None:
    """A ring passed quarters of the transposed table around: 768 MiB, and 1 % slower by the cost model."""
    mesh = shardc.make_mesh(topology="v5p:2x4x1", data=4, model=2)
    w, h = jax.ShapeDtypeStruct((131072, 4096), "float32"), jax.ShapeDtypeStruct((64, 1024, 4096), "float32")
    pins = {"mesh": mesh, "in_placements": ({"model": S(0)}, {"data": S(0)}), "out_placements": {"data": S(0)}}
    for head in (lambda w, h: h @ w.T, lambda w, h: h @ w.swapaxes(0, 1), lambda w, h: jnp.einsum("btd,vd->btv", h, w)):
        plan = shardc.function(lambda w, h, head=head: head(w, h).max(-1), **pins).plan(w, h)
        assert plan.bytes_per_device == 2**16
