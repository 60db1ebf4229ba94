"""A pipeline that does not fit is an error before anything runs, unless recompute may make it fit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardc
from shardc.errors import PipelineError
from shardc.plan.plan import Unlimited


def loss(params, x):
    for i, (up, down) in enumerate(params):
        x = jnp.sin(jnp.cos(jnp.tanh(x @ up)) ** 2) @ down
        x = shardc.stage_boundary(x) if i < len(params) - 1 else x
    return jnp.mean(x**2)


def step(params, x):
    value, grads = shardc.accumulate(jax.value_and_grad(loss), microbatches=8)(params, x)
    return jax.tree.map(lambda p, g: p - g, params, grads), value


PARAMS = [(np.ones((16, 512), np.float32), np.ones((512, 16), np.float32)) for _ in range(4)]
ROWS = np.ones((2048, 16), np.float32)


def plan(hbm, **options):
    mesh = shardc.make_mesh(topology="v5p", pipe=4, hbm=hbm)
    step_ = shardc.function(step, mesh=mesh, donate_argnames=("params",), pipeline=shardc.Pipeline(**options))
    return step_.plan(PARAMS, ROWS)


def test_stages_recompute_where_they_would_not_fit():
    free = plan("1GB")
    assert set(free.pipeline.recompute) == {"none"}
    least = plan("1GB", recompute="full").memory.peak
    assert least < free.memory.peak
    tight = plan((least + free.memory.peak) // 2)
    assert "full" in tight.pipeline.recompute
    assert tight.memory.peak <= (least + free.memory.peak) // 2


def wide(params, x):
    """Little is computed, and much is sent."""
    x = x @ jnp.ones((8, 4096))
    for i, (down, up) in enumerate(params):
        x = jnp.tanh(x @ down) @ up
        x = shardc.stage_boundary(x) if i < len(params) - 1 else x
    return jnp.mean(x**2)


def wide_plan(hbm, **options):
    def step(params, x):
        value, grads = shardc.accumulate(jax.value_and_grad(wide), microbatches=8)(params, x)
        return jax.tree.map(lambda p, g: p - g, params, grads), value

    shape = lambda *dims: jax.ShapeDtypeStruct(dims, np.float32)  # noqa: E731
    mesh = shardc.make_mesh(topology="v5p", pipe=4, hbm=hbm)
    pipeline = shardc.Pipeline(schedule="eager-1f1b", **options)
    step_ = shardc.function(step, mesh=mesh, donate_argnames=("params",), pipeline=pipeline)
    with jax.default_matmul_precision("highest"):  # else the TPU keeps half of what it could recompute
        return step_.plan([(shape(4096, 64), shape(64, 4096))] * 4, shape(8 * 1024, 8))


def registers(plan):
    return sum(c.registers for c in plan.network.channels if c.source != c.target and c.bytes)


def test_registers_are_given_up_where_memory_has_no_room_for_them():
    free = wide_plan("64GB", recompute="none")
    assert free.squeezed == ()
    room = int(0.9 * free.memory.peak)
    tight = wide_plan(room, recompute="none")
    assert tight.memory.peak <= room and tight.squeezed == (0, 1)
    assert registers(tight) < registers(free) and tight.seconds > free.seconds
    assert "because ranks 0-1 have too little memory for more" in tight.explain()
    assert "too little memory" not in free.explain()


def test_recompute_or_fewer_registers_whatever_is_faster():
    free = wide_plan("64GB", recompute="none")
    room = int(0.99 * free.memory.peak)  # so little is missing that the recompute of one stage gives it
    assert wide_plan(room).squeezed == ()
    assert wide_plan(room).seconds < wide_plan(room, recompute="none").seconds
    both = wide_plan(int(0.8 * free.memory.peak))
    assert both.squeezed and "full" in both.pipeline.recompute


def test_what_does_not_fit_is_named():
    with pytest.raises(PipelineError, match=r"does not fit") as caught:
        plan("100KB")
    text = str(caught.value)
    assert "rank 0: " in text and "its devices have 97.7 KiB" in text and "What would help" in text
    with pytest.raises(PipelineError, match=r"recompute"):
        plan((plan("1GB", recompute="full").memory.peak + plan("1GB").memory.peak) // 2, recompute="none")


def split(hbm, **options):
    """Two layers on two stages of four devices. Where what is not pinned is cheapest is not where it takes least."""
    mesh = shardc.make_mesh(pipe=2, data=4, hbm=hbm)
    return shardc.function(
        adam_step, mesh=mesh, donate_argnames=("params", "moments"),
        in_placements={"params": {}, "x": {"data": shardc.S(0)}}, pipeline=shardc.Pipeline(**options),
    )  # fmt: skip


def adam_step(params, moments, x):
    def loss(params, x):
        for i, (up, down) in enumerate(params):
            x = x + jnp.tanh(x @ up) @ down
            x = shardc.stage_boundary(x) if i < len(params) - 1 else x
        return jnp.mean(x**2)

    value, grads = shardc.accumulate(jax.value_and_grad(loss), microbatches=8)(params, x)
    updates, moments = optax.adam(1e-2).update(grads, moments, params)
    return optax.apply_updates(params, updates), moments, value


def adam_inputs():
    rng = np.random.default_rng(0)
    params = [(rng.normal(size=(256, 1024)) / 16, rng.normal(size=(1024, 256)) / 32) for _ in range(2)]
    params = jax.tree.map(jnp.asarray, params)
    return params, optax.adam(1e-2).init(params), jnp.asarray(rng.normal(size=(512, 256)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("recompute", ["none", "auto"])
def test_stages_are_placed_so_that_their_ranks_have_room(recompute):
    with jax.enable_x64(True):
        free = split("1GB").plan(*adam_inputs())
        assert free.unlimited is None
        room = int(0.9 * free.memory.peak)
        step_ = split(room, recompute=recompute)
        plan = step_.plan(*adam_inputs())
        assert plan.memory.peak <= room and plan.memory.too_full == ()
        assert plan.unlimited == Unlimited(free.seconds, free.memory.peak)
        assert "Memory decided" in plan.explain() and "Memory decided" not in free.explain()
        expected = jax.jit(adam_step)(*adam_inputs())
        for found, value in zip(jax.tree.leaves(step_(*adam_inputs())), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(found, value, rtol=1e-9, atol=1e-12)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("part", [0.67, 0.72, 0.77, 0.82, 0.87, 0.92, 0.97])
def test_where_a_plan_fits_a_larger_limit_is_not_refused(part):
    with jax.enable_x64(True):
        inputs = adam_inputs()
        room = int(part * split("1GB").plan(*inputs).memory.peak)
        assert split(room, recompute="none").plan(*inputs).memory.peak <= room
