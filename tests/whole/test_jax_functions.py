"""Functions of JAX that its releases trace in other ways: the values of one device at any placement, and nothing is
replicated for want of a rule."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from shardc import AUTO, S

pytestmark = pytest.mark.usefixtures("compiled_fast")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(12, 10)).astype(np.float32)
POSITIVE = np.abs(X) + 0.5
UNEVEN = RNG.normal(size=(7, 5)).astype(np.float32)
EDGES = np.sort(RNG.normal(size=9)).astype(np.float32)
COEFFICIENTS = RNG.normal(size=11).astype(np.float32)

SMOOTH = {
    "tanh": jnp.tanh,
    "gelu": jax.nn.gelu,
    "gelu exact": lambda x: jax.nn.gelu(x, approximate=False),
    "erf": jax.scipy.special.erf,
    "erfc": jax.scipy.special.erfc,
    "mish": jax.nn.mish,
    "polyval": lambda x: jnp.polyval(COEFFICIENTS[:4], x),
    "polyval long": lambda x: jnp.polyval(COEFFICIENTS, x),
    "sinc": jnp.sinc,
    "log2": lambda x: jnp.log2(jnp.abs(x) + 0.5),
    "arcsinh": jnp.arcsinh,
    "arctanh": lambda x: jnp.arctanh(x / 8),
    "ndtr": jax.scipy.special.ndtr,
    "interp": lambda x: jnp.interp(x, EDGES, EDGES**2),
    "logsumexp": lambda x: jax.nn.logsumexp(x, axis=-1),
    "softplus": jax.nn.softplus,
}
STEPS = {
    "searchsorted": lambda x: jnp.searchsorted(EDGES, x),
    "searchsorted right": lambda x: jnp.searchsorted(EDGES, x, side="right"),
    "digitize": lambda x: jnp.digitize(x, EDGES),
    "histogram": lambda x: jnp.histogram(x, bins=EDGES)[0],
    "histogram2d": lambda x: jnp.histogram2d(x.ravel(), x.ravel() ** 2, bins=4, range=((-2, 2), (0, 4)))[0],
    "tril_indices_from": lambda x: x[jnp.tril_indices_from(x[:5, :5])],
    "nonzero": lambda x: jnp.nonzero(x > 0.5, size=20, fill_value=-1),
    "frexp": jnp.frexp,
    "ldexp": lambda x: jnp.ldexp(x, 3),
    "empty": lambda x: x + 0 * jnp.zeros_like(jnp.empty(x.shape, x.dtype)),
    "roll": lambda x: jnp.roll(x, 3, axis=0),
    "unstack": lambda x: sum(jnp.unstack(x, axis=1)),
    "lexsort": lambda x: jnp.lexsort((x[:, 0], x[:, 1])),
    "piecewise": lambda x: jnp.piecewise(x, [x < -1, x > 1], [lambda x: -x, lambda x: x**2, 0.5]),
}
WITHOUT_RULE = frozenset()
"""Primitives of these functions that are replicated, with the reason in tests/sbp/test_primitives.py."""
PINS = [{"data": S(0)}, {"data": S(1), "model": S(0)}, {"data": S(0), "model": S(0)}]


@pytest.fixture(scope="module")
def mesh():
    return shardc.make_mesh(data=4, model=2)


def check(mesh, fn, x, pin, out=AUTO):
    f = shardc.function(fn, mesh=mesh, in_placements=(pin,), out_placements=out)
    plan = f.plan(x)
    assert {g.primitive for g in plan.gathered} <= WITHOUT_RULE
    results = jax.tree.leaves(f(x), is_leaf=lambda y: isinstance(y, shardc.PlacedArray))
    for got, want in zip(results, jax.tree.leaves(jax.jit(fn)(x)), strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=2e-5, atol=2e-6)
    return plan


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", SMOOTH)
def test_values_and_gradients(mesh, name):
    fn = SMOOTH[name]
    for x, pin in ((X, PINS[0]), (UNEVEN, PINS[1])):
        whole = name == "logsumexp"
        plans = [check(mesh, f, x, pin, AUTO if whole else pin) for f in (fn, jax.grad(lambda x: (fn(x) ** 2).sum()))]
        assert whole or not any(p.collectives for p in plans), "it works element by element"


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", STEPS)
def test_values(mesh, name):
    for x, pin in itertools.chain(zip((X,) * 3, PINS, strict=True), [(UNEVEN, PINS[0])]):
        check(mesh, STEPS[name], x, pin)


def test_second_gradients_move_nothing(mesh):
    for fn in (jnp.tanh, jax.nn.gelu, lambda x: jax.nn.gelu(x, approximate=False)):
        f = lambda x, fn=fn: jax.grad(lambda x: (jax.grad(lambda x: fn(x).sum())(x) ** 2).sum())(x)  # noqa: E731
        assert not check(mesh, f, X, PINS[2], PINS[2]).collectives


def test_calls_of_a_traced_function(mesh):
    """`eval_jaxpr` since JAX 0.11, `closed_call` before."""
    traced = jax.jit(lambda x: jnp.tanh(x) * 2).trace(X)

    def fn(x):
        return jax.extend.core.jaxpr_as_fun(traced.jaxpr)(x)[0] + traced(x) if callable(traced) else x

    assert not check(mesh, fn, X, PINS[0]).collectives


def test_program_order_is_planned_as_its_body(mesh):
    overlap = pytest.importorskip("jax.experimental.overlap", reason="JAX 0.11 and newer have it")
    fn = overlap.program_order(lambda x: jnp.tanh(x) @ jnp.ones((10, 4), x.dtype), enforce=False)
    assert not check(mesh, fn, X, {"data": S(0)}).collectives
