"""Loops over split rows: each device loops over its own rows, with one device's numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardc
from shardc import S

pytestmark = pytest.mark.usefixtures("compiled_fast")

MESH = shardc.make_mesh(a=4, b=2)


def loss(w: Any, x: Any) -> Any:
    return jnp.sum(jnp.tanh(x @ w) ** 2)


def clipped(w: Any, x: Any) -> Any:
    """The sum of clipped gradients of single examples, and the largest norm."""

    def one(sums: Any, x: Any) -> Any:
        value, g = jax.value_and_grad(loss)(w, x)
        norm = jnp.linalg.norm(g)
        return (sums[0] + g / jnp.maximum(1.0, norm), jnp.maximum(sums[1], norm), sums[2], sums[3] - 1), value

    return lax.scan(one, (0.5 * w, jnp.zeros((), w.dtype), w[0], 7), x, reverse=True)


def with_keys(w: Any, x: Any) -> Any:
    keys = jax.random.split(jax.random.key(0), x.shape[0])
    return lax.map(lambda kx: (kx[1] @ w) * jax.random.bernoulli(kx[0], 0.5, (x.shape[1], w.shape[1])), (keys, x))


def in_a_layer(w: Any, x: Any) -> Any:
    def layer(x: Any, scale: Any) -> Any:
        return jax.checkpoint(lambda x: lax.map(lambda x: jnp.tanh(x * scale), x))(x), None

    return lax.scan(layer, x @ w, jnp.arange(1.0, 4.0))[0]


double = shardc.signature("b d -> b d", linear=(0,))(lambda x: 2 * x)

LOOPS: dict[str, Callable[[Any, Any], Any]] = {
    "map": lambda w, x: lax.map(lambda x: jnp.sin(x @ w).sum(0), x),
    "map of batches": lambda w, x: lax.map(lambda x: jnp.sin(x @ w).sum(0), x, batch_size=3),
    "gradient of map": jax.grad(lambda w, x: jnp.mean(lax.map(lambda x: loss(w, x), x) ** 2), (0, 1)),
    "gradient of map with remat": jax.grad(
        lambda w, x: jnp.mean(lax.map(jax.checkpoint(lambda x: loss(w, x)), x) ** 2)
    ),
    "clipped gradients": clipped,
    "condition": lambda w, x: lax.map(lambda x: lax.cond(x[0, 0] > 0, jnp.sin, lambda x: 2 * x, x) @ w, x),
    "inner scan": lambda w, x: lax.map(lambda x: lax.scan(lambda c, r: (c * 0.5 + r, c), w[:, 0], x), x),
    "layers": in_a_layer,
    "an operation of the user's": lambda w, x: lax.map(lambda x: double(x) @ w, x),
    "keys": with_keys,
}
WAITS: dict[str, Callable[[Any, Any], Any]] = {
    "running sum": lambda w, x: lax.scan(lambda c, x: (c + x.sum(), c), jnp.zeros((), x.dtype), x),
    "recurrence": lambda w, x: lax.scan(lambda c, x: (jnp.tanh(c + x @ w), None), jnp.zeros((3, 4), x.dtype), x)[0],
    "mixed": lambda w, x: lax.scan(lambda c, x: (jnp.maximum(c + x.sum(), 0), None), jnp.zeros((), x.dtype), x)[0],
    "counter": lambda w, x: lax.scan(lambda c, x: (c + 1, c * x), 0, x),
    "doubled": lambda w, x: lax.scan(lambda c, x: (c + c + x, None), x[0], x)[0],
}


def operands(rows: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(rows)
    return rng.normal(size=(5, 4)), rng.normal(size=(rows, 3, 5))


def lengths(jaxpr: Any) -> list[int]:
    return [e.params["length"] for e in jaxpr.eqns if e.primitive.name == "scan"]


def check(fn: Callable[..., Any], w: Any, x: Any, *placements: Any) -> Any:
    placed = shardc.function(fn, mesh=MESH, in_placements=placements)
    for a, b in zip(jax.tree.leaves(placed(w, x)), jax.tree.leaves(jax.jit(fn)(w, x)), strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-10, atol=1e-12)
    audit = placed.compile(w, x).audit()
    assert audit.ok, audit
    return placed.plan(w, x)


@pytest.mark.plans_eagerly
@pytest.mark.sampled(by=lambda name, rows: {rows, (name, rows) if name == "map" else name})
@pytest.mark.parametrize("rows", [16, 13])
@pytest.mark.parametrize("name", LOOPS)
def test_each_device_goes_through_its_own_rows(name: str, rows: int) -> None:
    with jax.enable_x64(True):
        w, x = operands(rows)
        plan = check(LOOPS[name], w, x, {}, {"a": S(0), "b": S(0)})
    assert all(c.count == 1 for c in plan.collectives), plan.collectives
    if name not in ("layers", "map of batches"):
        assert max(lengths(plan.program.jaxpr)) == 2
    if name == "map" and rows == 16:
        assert not plan.collectives


@pytest.mark.parametrize("name", [*LOOPS, *WAITS])
def test_at_other_placements(name: str) -> None:
    rng = np.random.default_rng(len(name))
    with jax.enable_x64(True):
        w, x = operands(11)
        one, other = {"a": S(0)}, {a: S(int(rng.integers(3))) for a in ("a", "b")}
        check({**LOOPS, **WAITS}[name], w, x, {"b": S(int(rng.integers(2)))}, one if rng.integers(2) else other)


@pytest.mark.parametrize("name", WAITS)
def test_rounds_that_wait_for_each_other_stay_as_they_are(name: str) -> None:
    w, x = operands(16)
    f = shardc.function(WAITS[name], mesh=MESH, in_placements=({}, {"a": S(0)}))
    assert lengths(f.plan(w, x).program.jaxpr) == [16]


def test_under_accumulate() -> None:
    with jax.enable_x64(True):
        w, x = operands(16)
        grad = jax.grad(lambda w, x: jnp.mean(lax.map(lambda x: loss(w, x), x)))
        plan = check(shardc.accumulate(grad, microbatches=2), w, x, {}, {"a": S(0)})
    assert lengths(plan.program.jaxpr) == [2]
    assert plan.bytes_per_device < 2000


def test_a_saved_plan_of_a_shared_loop(tmp_path: Any) -> None:
    w, x = operands(13)
    f = shardc.function(clipped, mesh=MESH, in_placements=({}, {"a": S(0)}))
    f.plan(w, x).save(tmp_path / "plan.json")
    again = shardc.function(clipped, mesh=MESH, plan=shardc.load_plan(tmp_path / "plan.json"))
    assert again.plan(w, x).collectives == f.plan(w, x).collectives
    for a, b in zip(jax.tree.leaves(again(w, x)), jax.tree.leaves(f(w, x)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
