"""The residuals that loops keep so that least is written and read: the same numbers, and no other choice takes less."""

from itertools import chain, combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardc
from shardc.ir.box import Boxed
from shardc.ir.nested import bodies_of
from shardc.ir.walk import all_eqns
from shardc.machine.mesh import MeshView, view
from shardc.machine.topology import TOPOLOGIES
from shardc.passes.estimate.backend import IN_LOOPS, kind_of
from shardc.passes.estimate.plan_cost import plan_cost
from shardc.passes.recompute.choose_residuals import choose_residuals
from shardc.passes.recompute.recompute import RecomputeChoice, recompute
from shardc.passes.recompute.recompute_residuals import Slices, find_residuals
from shardc.passes.trace.canonicalize import canonicalize
from shardc.sbp.placement import REPLICATED
from tests.passes.recompute.test_recompute_residuals import (
    arguments,
    both_ways,
    canonical,
    in_steps,
    normed,
    same_program,
    training,
    twice,
)

ONE = MeshView((("x", 1),), TOPOLOGIES["v5p"])
LAYERS, ROWS, WIDTH = 3, 64, 128


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("fn", "shape"), [(both_ways, ()), (in_steps, (2,)), (normed, (2,)), (twice, ())])
def test_the_same_numbers(fn, shape):
    with jax.enable_x64(True):
        args = arguments(shape)
        jaxpr = canonical(fn, *args)
        choice = RecomputeChoice(*choose_residuals(jaxpr, ONE))
        assert choice.stacks
        fewer, recomputation = recompute(jaxpr, choice)
        same_program(jaxpr, fewer, recomputation.variables, choice, args)


def gelu(h, w):
    return h + jax.nn.gelu(h @ w["up"]) @ w["down"], None


def softmax(h, w):
    up = h @ w["up"]
    return h + jax.nn.softmax(up @ up.T) @ (up @ w["down"]), None


def norm(h, w):
    h = (h - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-6)
    return jnp.tanh(h) @ w["up"], None


def gate(h, w):
    z = h @ w["up"]
    return h + (jax.nn.sigmoid(z) * jnp.tanh(z)) @ w["down"] * 2.0, None


def step_of(layer):
    def loss(x, params):
        return (lax.scan(layer, x, params)[0] ** 2).sum()

    params = {name: jnp.ones((LAYERS, WIDTH, WIDTH), jnp.float32) for name in ("up", "down")}
    return canonical(jax.value_and_grad(loss, argnums=(0, 1)), jnp.ones((ROWS, WIDTH), jnp.float32), params)


def seconds(jaxpr):
    """Seconds of one device."""
    values = {*jaxpr.invars, *(v for e in all_eqns(jaxpr) for v in e.outvars)}
    values |= {v for e in all_eqns(jaxpr) for b in bodies(e) for v in b.invars}
    return plan_cost(Boxed(jaxpr, dict.fromkeys(values, REPLICATED)), ONE).time.total


def bodies(eqn):
    return bodies_of(eqn) if eqn.primitive.name == "scan" else []


def subsets(values, most):
    return chain.from_iterable(combinations(values, n) for n in range(min(most, len(values)) + 1))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layer", [gelu, gate, softmax, norm])
def test_no_other_choice_takes_less(layer):
    """Compared with all choices that keep up to two other values of a step in the place of any residuals and reduce
    nothing twice."""
    jaxpr = step_of(layer)
    choice = RecomputeChoice(*choose_residuals(jaxpr, ONE))
    least, now = seconds(jaxpr), seconds(recompute(jaxpr, choice)[0])
    assert now < least
    residuals = list(find_residuals(jaxpr))
    maker = residuals[0].maker
    body = bodies_of(maker)[0]
    rows = {Slices(maker, ()).row_of[r.stack] for r in residuals}
    made = [v for e in body.eqns for v in e.outvars if v.aval.size > ROWS and v not in rows]
    for stacks in subsets([r.stack for r in residuals], len(residuals)):
        for instead in subsets(made, 2):
            slices = Slices(maker, stacks)
            slices.keep(instead)
            eqns = [slices.of(v) for v in stacks]
            if stacks and None not in eqns and all(kind_of(e) in IN_LOOPS for e in chain.from_iterable(eqns)):
                least = min(least, seconds(recompute(jaxpr, RecomputeChoice(stacks, instead))[0]))
    assert now <= least * (1 + 1e-6)


def test_parameters_are_not_gathered_twice():
    """What follows from a layer's parameters alone is kept if these may be split."""

    def layer(h, w):
        return jnp.tanh(h @ jnp.sin(w)), None

    def loss(x, params):
        return (lax.scan(layer, x, params)[0] ** 2).sum()

    args = jnp.ones((ROWS, WIDTH)), jnp.ones((LAYERS, WIDTH, WIDTH))
    jaxpr = canonical(jax.value_and_grad(loss, argnums=(0, 1)), *args)
    alone, split = (
        RecomputeChoice(*choose_residuals(jaxpr, m)) for m in (ONE, view(shardc.make_mesh(topology="v5p", data=8)))
    )
    assert [v.aval.shape[1:] for v in alone.stacks if v not in split.stacks] == [(WIDTH, WIDTH)]  # cos w
    assert set(split.stacks) < set(alone.stacks)


def test_what_is_pinned_is_not_done_twice():
    """Nor is a mark of a pipeline."""
    mesh = shardc.make_mesh(topology="v5p", data=8)

    def loss(x, params, twice):
        def layer(h, w):
            h = jnp.arctan(twice(h @ w))
            return jnp.sin(h) * h, None

        return (lax.scan(layer, x, params)[0] ** 2).sum()

    def names(twice):
        args = jnp.ones((ROWS, WIDTH)), jnp.ones((LAYERS, WIDTH, WIDTH))
        step = jax.value_and_grad(lambda x, params: loss(x, params, twice), argnums=(0, 1))
        jaxpr, _ = canonicalize(jax.make_jaxpr(step)(*args), marks=True)
        choice = RecomputeChoice(*choose_residuals(jaxpr, view(mesh)))
        assert choice.stacks
        (*_, backward) = (e for e in recompute(jaxpr, choice)[0].eqns if e.primitive.name == "scan")
        return [e.primitive.name for e in bodies_of(backward)[0].eqns]

    plain = names(lambda h: h)
    assert "atan" in plain
    assert "constrain" not in names(lambda h: shardc.constrain(h, {"data": shardc.S(0)}))
    assert names(shardc.stage_boundary).count("stage_boundary") == 1  # the gradient's


@pytest.fixture
def float32_products():
    """Else a TPU keeps residuals in bfloat16, and all fit."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.mark.usefixtures("float32_products")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("hbm", [None, "40MB"])
def test_a_plan_says_what_it_recomputes(hbm, tmp_path):
    """Also when it is loaded, whether memory was short besides or not."""
    step, state, batch = training(128, layers=3, seq=32)

    def function(**more):
        mesh = shardc.make_mesh(topology="v5p", data=8, hbm=hbm)
        return shardc.function(step, mesh=mesh, donate_argnames=("params", "opt_state"), **more)

    plan = function(in_placements={"batch": {"data": shardc.S(0)}}).plan(*state, batch)
    assert plan.recomputed_for_speed.count > 5
    assert (plan.recomputed is None) == (hbm is None)
    assert "Recomputed for speed: " in plan.explain()
    plan.save(tmp_path / "plan.json")
    saved = function(plan=tmp_path / "plan.json").plan(*state, batch)
    assert (saved.recomputed_for_speed, saved.recomputed) == (plan.recomputed_for_speed, plan.recomputed)
    assert (saved.seconds, saved.memory, saved.gap) == (plan.seconds, plan.memory, plan.gap)


@pytest.mark.sampled(0)
@pytest.mark.filterwarnings("ignore:.*not donated:shardc.ShardcWarning")
def test_less_is_kept_on_devices():
    """The numbers of one device, the collectives of the plan, and less memory than one device's share of `jax.jit`."""
    mesh = shardc.make_mesh(data=4, model=2)
    step, state, batch = training(64, layers=6, seq=64, rows=32)
    rng = np.random.default_rng(0)
    batch = {k: rng.integers(0, 256, v.shape).astype(np.int32) for k, v in batch.items()}
    state = jax.tree.map(lambda v: jnp.asarray(rng.normal(size=v.shape) * 0.02, v.dtype), state)
    want = jax.jit(step)(*state, batch)
    f = shardc.function(step, mesh=mesh, in_placements={"batch": {"data": shardc.S(0)}})
    compiled = f.compile(*state, batch)
    assert compiled.audit().ok
    alone = jax.jit(step).lower(*state, batch).compile().memory_analysis()
    devices = dict(mesh.shape)["data"]
    assert compiled.memory_stats().temp_size_in_bytes < 0.9 * alone.temp_size_in_bytes / devices
    for a, b in zip(jax.tree.leaves(f(*state, batch)), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-3, atol=3e-4)
