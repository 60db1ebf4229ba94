"""What it costs that a result which is left open is a plain jax.Array, and never split unevenly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from shardc import S

ROWS = {"data": S(0)}
U = jax.ShapeDtypeStruct((1024, 1024, 1024), "float32")
STEPS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "neighbours": (lambda u: u[2:] + u[:-2], ROWS),
    "diff": (lambda u: jnp.diff(u, axis=0), ROWS),
    "one row less": (lambda u: u[:-1], ROWS),
    "of several": (lambda u: {"a": u[1:], "b": 2 * u}, shardc.rules({"a": ROWS})),
}


def planned(fn: Callable[[Any], Any], devices: int, **pins: Any) -> Any:
    mesh = shardc.make_mesh(topology=f"v5p:{devices}x1x1", data=devices)
    return shardc.function(fn, mesh=mesh, in_placements=(ROWS,), **pins).plan(U)


@pytest.mark.parametrize("devices", [8, 16])
@pytest.mark.parametrize("name", STEPS)
def test_the_pin_is_named_and_saves_what_is_said(name: str, devices: int) -> None:
    fn, pin = STEPS[name]
    open_, pinned = planned(fn, devices), planned(fn, devices, out_placements=pin)
    found = open_.uneven
    assert found is not None
    assert (found.seconds, found.bytes) == (pinned.seconds, pinned.bytes_per_device)
    assert found.seconds < 0.3 * open_.seconds
    assert f"out_placements={'shardc.rules({' * (name == 'of several')}" in open_.explain()
    assert pinned.uneven is None


def test_the_text() -> None:
    plan = planned(STEPS["neighbours"][0], 8)
    assert (
        "1 result left open would be split unevenly, which a plain jax.Array is not. With "
        "out_placements={'data': S(0)} a call takes 586 us instead of 7.75 ms, sends 8.0 MiB instead of 448.0 MiB, "
        "and gives a shardc.PlacedArray there."
    ) in plan.explain()
    assert "Pinned at {data: S(0)}, an uneven split, it is cheaper." in plan.explain(why="result")


def test_bytes_that_hide_in_a_long_call_are_named() -> None:
    def fn(u: Any) -> Any:
        for _ in range(200):
            u = jnp.sin(u)
        return u[2:] + u[:-2]

    plan = planned(fn, 8)
    assert plan.uneven is not None
    assert 0.5 * plan.seconds < plan.uneven.seconds < plan.seconds
    assert 40 * plan.uneven.bytes < plan.bytes_per_device


@pytest.mark.parametrize("fn", [lambda u: u[:-1].sum(), lambda u: jax.grad(lambda u: jnp.sum(u[1:] * u[:-1]))(u)])
def test_nothing_is_said_where_nothing_is_saved(fn: Callable[[Any], Any]) -> None:
    assert planned(fn, 8).uneven is None


def test_a_call_warns() -> None:
    x = np.ones((1024, 7, 257), np.float32)
    f = shardc.function(lambda x: x[1:], mesh=shardc.make_mesh(data=8), in_placements=(ROWS,))
    with pytest.warns(shardc.ShardcWarning, match=r"out_placements=\{'data': S\(0\)\}"):
        f(shardc.put(x, f.mesh, ROWS))
