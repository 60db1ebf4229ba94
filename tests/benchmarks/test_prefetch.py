"""How long steps of loops wait for gathers of their rows: benchmarks/prefetch.py."""

import jax
import jax.numpy as jnp
import pytest

import shardc
from benchmarks.prefetch import waits_of
from shardc import S

LAYERS, WIDE, HIDDEN = 3, 512, 1024


def loss(params, x):
    @jax.checkpoint
    def layer(x, p):
        return x + jnp.tanh(x @ p["up"]) @ p["down"], None

    return jnp.square(jax.lax.scan(layer, x, params)[0]).sum()


def plan_of(step, rows):
    params = {"up": jnp.zeros((LAYERS, WIDE, HIDDEN)), "down": jnp.zeros((LAYERS, HIDDEN, WIDE))}
    weights = {"up": {"data": S(1)}, "down": {"data": S(1)}}
    mesh = shardc.make_mesh(topology="v5p:4x4", data=16)
    places = {"params": weights, "x": {"data": S(0)}}
    with jax.default_matmul_precision("highest"):  # else the stacks are converted before the loop
        return shardc.function(mesh=mesh, in_placements=places)(step).plan(params, jnp.zeros((rows, WIDE)))


@pytest.mark.parametrize("backward", [False, True])
def test_all_gathers_of_rows_are_found(backward):
    """In the loop's body, and in what it rematerialises."""

    def step(params, x):
        return jax.grad(loss)(params, x) if backward else loss(params, x)

    plan = plan_of(step, 4096)
    found = waits_of(plan)
    assert [(w.trips, w.bytes) for w in found] == [(LAYERS, 2 * WIDE * HIDDEN * 4)] * (1 + backward)
    assert sum(w.trips * w.gathers for w in found) == pytest.approx(plan.time.all_gather)


@pytest.mark.sampled(0)
def test_products_in_front_of_a_reader_hide_its_gather():
    def step(params, x):
        return loss(params, x)

    few, many = (waits_of(plan_of(step, rows))[0] for rows in (4096, 1 << 20))
    assert few.waited == pytest.approx(few.gathers)
    assert many.waited == pytest.approx(many.gathers / 2)  # the first has nothing in front of it
