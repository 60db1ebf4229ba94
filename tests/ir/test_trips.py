"""Loops of unknown length: a plan counts one round and says so, or the expected number."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardc
from shardc import S

pytestmark = pytest.mark.usefixtures("compiled_fast")

MESH = shardc.make_mesh(data=8)
COLUMNS = {"data": S(1)}
X, W = (np.random.default_rng(n).normal(size=s).astype(np.float32) / 8 for n, s in ((0, (16, 64)), (1, (64, 64))))


def decode(x: Any, w: Any, rounds: int = 5) -> Any:
    return lax.while_loop(lambda c: c[0] < rounds, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x))[1]


def expecting(n: int, fn: Any = decode) -> Any:
    def told(x: Any, w: Any) -> Any:
        with shardc.trips(n):
            return fn(x, w)

    return told


def placed(fn: Any, **more: Any) -> Any:
    return shardc.function(fn, mesh=MESH, in_placements=(COLUMNS, {"data": S(0)}), **more)


WRAPPED: dict[str, Any] = {
    "plain": decode,
    "jit": jax.jit(decode),
    "remat": jax.checkpoint(lambda x, w: decode(x, w)),
    "condition": lambda x, w: lax.cond(x[0, 0] > 100, lambda x: x, lambda x: decode(x, w), x),
    "vmap": jax.vmap(decode, (0, None)),
    "derivative": lambda x, w: jax.jvp(lambda x: decode(x, w), (x,), (x,))[1],
}


@pytest.mark.parametrize("name", WRAPPED)
def test_the_expected_rounds_are_counted(name: str) -> None:
    fn = WRAPPED[name]
    plans = [placed(expecting(n, fn)).plan(X, W) for n in (1, 1000)]
    assert plans[1].time.computing > 300 * plans[0].time.computing
    f = placed(expecting(1000, fn))
    np.testing.assert_allclose(np.asarray(f(X, W)), jax.jit(fn)(X, W), rtol=1e-5, atol=1e-6)
    report = f.compile(X, W).audit()
    assert report.ok and not report.missing, report


def test_a_long_loop_gathers_its_weights_once_and_a_short_one_sends_what_they_make() -> None:
    """Prefill and decode are weighted by the number of times that they run."""
    short, long = (placed(expecting(n)).plan(X, W) for n in (1, 1000))
    assert any(c.per_iteration for c in short.collectives)
    assert not any(c.per_iteration for c in long.collectives)
    assert long.seconds < 1000 * short.seconds


@pytest.mark.plans_eagerly
def test_what_moves_in_each_round_is_counted_as_often() -> None:
    def fn(x: Any, w: Any) -> Any:
        def body(c: Any) -> Any:
            whole = shardc.constrain(c[1], {})
            return c[0] + 1, shardc.constrain(jnp.sin(c[1] + jnp.flip(whole).sum()), COLUMNS)

        return lax.while_loop(lambda c: c[0] < 5, body, (0, x))[1]

    once, often = placed(fn).plan(X, W), placed(expecting(7, fn)).plan(X, W)
    (a,), (b,) = ([c for c in p.collectives if c.per_iteration] for p in (once, often))
    assert (b.bytes, b.count, b.trips, b.one_round) == (7 * a.bytes, 7 * a.count, 7, False)
    assert a.one_round and a.count == 1
    report = placed(expecting(7, fn)).compile(X, W).audit()
    assert report.ok and not report.missing, report
    assert "1 a round" in once.explain() and "a round" not in often.explain()
    assert "Loops of unknown length, counted as one round in bytes and in time: test_trips.py:" in once.explain()
    assert "Loops of unknown length, counted as shardc.trips says: 7 rounds at test_trips.py:" in often.explain()


def test_the_inner_scope_holds_and_what_is_in_a_loop_is_not_meant() -> None:
    def nested(x: Any) -> Any:
        with shardc.trips(10):
            inner = lambda x: lax.while_loop(lambda c: c.sum() < 9, lambda c: c + 1, x)  # noqa: E731
            outer = lax.while_loop(lambda c: c.sum() < 99, lambda c: inner(c) + 1, x)
            with shardc.trips(3):
                return inner(outer)

    text = shardc.function(nested, mesh=MESH, in_placements=({},)).plan(np.ones(8, np.float32)).explain()
    assert "10 rounds at test_trips.py" in text and "3 rounds at test_trips.py" in text
    assert "counted as one round" in text


@pytest.mark.parametrize("n", [0, -1, 2.5, True, "many"])
def test_no_number_of_rounds(n: Any) -> None:
    with pytest.raises(shardc.ArgumentError, match="is no number of rounds; write a positive integer"):
        shardc.trips(n)
