"""Collectives that overlap with computation, in programs small enough to do by hand, and in random ones."""

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardc
from shardc import S
from shardc.machine.topology import TOPOLOGIES
from shardc.passes.estimate.overlap import hidden_beside
from shardc.passes.estimate.plan_cost import Time

X = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)


def hidden_seconds(*args: Any) -> list[float]:
    return [sum(beside.values()) for beside in hidden_beside(*args)]


def overlapped(f: Any, seconds: dict[str, float], computing: float = 1.0) -> dict[str, float]:
    """The overlap of the collectives of a function, whose primitives are named; each product takes one second."""
    jaxpr: Any = jax.make_jaxpr(f)(X, X).jaxpr
    names = [e.primitive.name for e in jaxpr.eqns if e.primitive.name in seconds]
    sending = [([e], seconds[e.primitive.name]) for e in jaxpr.eqns if e.primitive.name in seconds]
    products = {e: computing for e in jaxpr.eqns if e.primitive.name == "dot_general"}
    return dict(zip(names, hidden_seconds(jaxpr, sending, products), strict=True))


@pytest.mark.parametrize(("seconds", "found"), [(0.5, 0.5), (3.0, 3.0), (5.0, 3.0)])
def test_a_reduction_overlaps_with_what_follows_its_operand(seconds: float, found: float) -> None:
    def f(x: Any, w: Any) -> Any:
        return jnp.cos(jnp.sin(x)), ((x @ w) @ w) @ w

    assert overlapped(f, {"cos": seconds}) == {"cos": found}


@pytest.mark.parametrize(("seconds", "found"), [(0.5, 0.5), (2.0, 2.0), (5.0, 2.0)])
def test_a_gather_overlaps_with_what_comes_before_its_reader(seconds: float, found: float) -> None:
    def f(x: Any, w: Any) -> Any:
        y = (x @ w) @ w
        return (y @ jnp.tan(jnp.cos(w))) @ w

    assert overlapped(f, {"cos": seconds}) == {"cos": found}


def test_what_is_needed_at_once_overlaps_with_nothing() -> None:
    def f(x: Any, w: Any) -> Any:
        return jnp.cos(x @ w) @ w

    assert overlapped(f, {"cos": 1.0}) == {"cos": 0.0}


def test_collectives_share_the_links_and_the_one_that_is_needed_first_goes_first() -> None:
    def f(x: Any, w: Any) -> Any:
        late, soon = jnp.sin(w), jnp.cos(w)
        return ((x @ w) @ soon) @ w, late

    assert overlapped(f, {"sin": 1.5, "cos": 0.75}) == {"sin": 1.5, "cos": 0.75}
    assert overlapped(f, {"sin": 2.5, "cos": 0.75}) == {"sin": 2.25, "cos": 0.75}
    assert overlapped(f, {"sin": 2.5, "cos": 1.75}) == {"sin": 2.0, "cos": 1.0}


def random_body(choose: random.Random) -> Any:
    """A function of sums (light), products and cosines (collectives) of random values before them."""

    def f(x: Any, w: Any) -> Any:
        values = [x, w]
        for _ in range(choose.randrange(4, 20)):
            a, b = choose.choices(values, k=2)
            values.append(choose.choice([jnp.add, jnp.matmul, lambda a, _: jnp.cos(a)])(a, b))
        return values

    return f


def simulated(jaxpr: Any, seconds: dict[Any, int]) -> int:
    """The time of a body second by second: products run in order, each when its operands are there; the links send one
    collective at a time, of those whose operands are there the one that the first product waits for."""
    products = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    behind: dict[Any, set[Any]] = {}  # all equations that each depends on
    maker = {v: e for e in jaxpr.eqns for v in e.outvars}
    for e in jaxpr.eqns:
        direct = [maker[v] for v in e.invars if v in maker]
        behind[e] = set(direct).union(*(behind[d] for d in direct))
    sending = [e for e in jaxpr.eqns if e.primitive.name == "cos"]
    waits = {e: next((i for i, p in enumerate(products) if e in behind[p]), len(products)) for e in sending}
    left, clock = dict(seconds), 0

    def ready(e: Any) -> bool:
        return not any(left.get(d) for d in behind[e])

    while any(left.values()):
        link = min((e for e in sending if left[e] and ready(e)), key=lambda e: waits[e], default=None)
        unit = next((p for p in products if left[p]), None)
        for busy in (link, unit if unit is not None and ready(unit) else None):
            if busy is not None:
                left[busy] -= 1
        clock += 1
    return clock


@pytest.mark.parametrize("seed", range(60))
def test_random_bodies_take_as_long_as_simulated(seed: int) -> None:
    choose = random.Random(seed)
    jaxpr: Any = jax.make_jaxpr(random_body(choose))(X, X).jaxpr
    seconds = {e: choose.randrange(1, 9) for e in jaxpr.eqns if e.primitive.name in ("dot_general", "cos")}
    products = {e: s for e, s in seconds.items() if e.primitive.name == "dot_general"}
    sending = [([e], s) for e, s in seconds.items() if e not in products]
    found = hidden_seconds(jaxpr, sending, products)
    assert all(0 <= s <= whole for s, (_, whole) in zip(found, sending, strict=True))
    assert sum(seconds.values()) - sum(found) == simulated(jaxpr, seconds)


def test_combined_collectives_start_with_the_last_and_are_needed_by_the_first() -> None:
    def f(x: Any, w: Any) -> Any:
        a = jnp.cos(w)
        y = x @ w
        b = jnp.sin(y)
        return ((y @ w) @ a) @ w, b

    jaxpr: Any = jax.make_jaxpr(f)(X, X).jaxpr
    both = [e for e in jaxpr.eqns if e.primitive.name in ("cos", "sin")]
    products = {e: 1.0 for e in jaxpr.eqns if e.primitive.name == "dot_general"}
    assert hidden_seconds(jaxpr, [(both, 5.0)], products) == [1.0]


LAYERS, D = 6, 4096


def scanned(topology: str, rows: int) -> Time:
    """The time of layers of two products, whose second weights are gathered in each round."""

    def layer(x: Any, w: Any) -> Any:
        h = shardc.constrain(jnp.tanh(x @ w["a"]), {"data": S(0)})
        return shardc.constrain(h @ shardc.constrain(w["b"], {}), {"data": S(0)}), None

    def f(x: Any, ws: Any) -> Any:
        return jax.lax.scan(layer, x, ws)[0]

    pins = {"x": {"data": S(0)}, "ws": {"a": {}, "b": {"data": S(1)}}}
    w = jax.ShapeDtypeStruct((LAYERS, D, D), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((8 * rows, D), jnp.bfloat16)
    mesh = shardc.make_mesh(topology=topology, data=8)
    return shardc.function(f, mesh=mesh, in_placements=pins).plan(x, {"a": w, "b": w}).time


@pytest.mark.parametrize("topology", ["v5e", "v5p", "h100"])
@pytest.mark.parametrize(("rows", "hidden"), [(1024, False), (16384, True)])
def test_a_scanned_gather_overlaps_with_the_product_before_its_reader(topology: str, rows: int, hidden: bool) -> None:
    time = scanned(topology, rows)
    product = time.compute / 2
    assert (0 < time.all_gather < product) is hidden
    share = TOPOLOGIES[topology].overlap("all_gather")
    assert time.overlapped == pytest.approx(share * min(product, time.all_gather))
    assert (time.overlapped_reductions, time.overlapped_rings) == (0, 0)


def test_nothing_overlaps_where_the_machine_cannot() -> None:
    time = scanned("cpu", 256)
    assert time.all_gather > 0
    assert time.overlapped == 0
