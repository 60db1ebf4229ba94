"""Recomputed residuals of loops: the same numbers, fewer stacked bytes; chosen where memory is short."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import check_jaxpr, jaxpr_as_fun

import shardc
from examples import gpt2
from shardc import compat
from shardc.ir.walk import all_eqns
from shardc.passes.estimate.memory import GAPS
from shardc.passes.recompute.recompute import RecomputeChoice, choice_named, names_of
from shardc.passes.recompute.recompute_residuals import Slices, find_residuals, recompute_residuals
from shardc.passes.trace.canonicalize import canonicalize
from shardc.plan.rows import ports_in, rows_of
from tests.passes.programs import before_after

LAYERS, ROWS, WIDTH = 3, 4, 8


def layer(scale, h, w):
    """Products and what follows from them."""
    up = jnp.tanh(h @ w["up"]) * scale
    weights = jax.nn.softmax(up @ up.T)
    return h + (weights @ up) @ w["down"], None


def loss(scale, params, x):
    return (lax.scan(partial(layer, scale), x, params)[0] ** 2).sum()


def both_ways(scale, params, x):
    return jax.value_and_grad(loss, argnums=(0, 1, 2))(scale, params, x)


def in_steps(scale, params, x):
    """The same inside a loop."""
    return lax.scan(lambda c, row: (c + both_ways(scale, params, row)[0], both_ways(scale, params, row)), 0.0, x)


def normed(scale, params, x):
    """No product reads the input of a layer: it is not stacked, and all residuals follow from it."""

    def loss(scale, params, x):
        return (lax.scan(lambda h, w: (h + layer(scale, jnp.sin(h), w)[0], None), x, params)[0] ** 2).sum()

    return lax.map(lambda row: jax.value_and_grad(loss, argnums=(0, 1, 2))(scale, params, row), x)


def twice(scale, params, x):
    """Two loops that read what one has stacked."""

    def forward(h, w):
        y = jnp.sin(h) * scale
        return h + y @ w["up"], (h, y, jnp.cos(y))

    h, (hs, ys, zs) = lax.scan(forward, x, params)
    first = lax.scan(lambda c, r: (c + r[0] * r[1], r[1] + r[0]), h, (ys, zs), reverse=True)
    return first, lax.scan(lambda c, r: (c - r[0], c * r[1]), h, (ys, hs))


def arguments(shape=()):
    rng = np.random.default_rng(0)
    params = {"up": rng.normal(size=(LAYERS, WIDTH, WIDTH)) / 3, "down": rng.normal(size=(LAYERS, WIDTH, WIDTH)) / 3}
    return 1.5, params, rng.normal(size=(*shape, ROWS, WIDTH))


def canonical(fn, *args):
    return canonicalize(jax.make_jaxpr(fn)(*args))[0]


def what_follows(jaxpr):
    """As many residuals as can be recomputed together, the first ones first."""
    found = []
    for r in find_residuals(jaxpr):
        more = [*found, r]
        stacks = {s.stack for s in more}
        if all(Slices(s.maker, stacks).of(s.stack) is not None for s in more):
            found = more
    return [r.stack for r in found]


def same_program(jaxpr, other, again, choice, args):
    """Asserts that `other`, which recomputes a choice, is a program with the numbers of `jaxpr`."""
    check_jaxpr(other)
    made = [v for e in all_eqns(other) for v in e.outvars]
    assert len(made) == len(set(made)), "every variable is made once"
    assert again.keys() <= set(made)
    assert choice_named(jaxpr, names_of(jaxpr, choice)) == choice
    flat = jax.tree.leaves(args)
    want, got = (jaxpr_as_fun(compat.close(j))(*flat) for j in (jaxpr, other))
    for a, b in zip(want, got, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


@pytest.fixture(autouse=True)
def float32_products():
    """Else a TPU keeps residuals in bfloat16, and less has to be recomputed."""
    with jax.default_matmul_precision("highest"):
        yield


def test_the_text(golden):
    def fn(x, c):
        c, r = lax.scan(lambda c, x: (lax.mul(c, lax.tanh(x)), lax.tanh(x)), c, x)
        return lax.scan(lambda d, r: (lax.add(d, r), None), c, r)[0]

    before = canonical(fn, jax.ShapeDtypeStruct((3, 4), np.float32), jax.ShapeDtypeStruct((4,), np.float32))
    after, _ = recompute_residuals(before, [r.stack for r in find_residuals(before)])
    golden("recompute_residuals", before_after(before, after))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("fn", "shape", "least"), [(both_ways, (), 6), (in_steps, (2,), 8), (normed, (2,), 8), (twice, (), 2)]
)
def test_the_same_numbers(fn, shape, least):
    with jax.enable_x64(True):
        args = arguments(shape)
        jaxpr = canonical(fn, *args)
        stacks = what_follows(jaxpr)
        assert len(stacks) >= least
        fewer, again = recompute_residuals(jaxpr, stacks)
        assert not {v for e in all_eqns(fewer) for v in e.outvars} & set(stacks)
        carried = [Slices(r.maker, stacks).carries(r.stack) for r in find_residuals(jaxpr) if r.stack in stacks]
        assert any(carried) == (fn is normed)
        assert set(filter(None, again.values())) == set(stacks)
        same_program(jaxpr, fewer, again, RecomputeChoice(tuple(stacks)), args)


def test_what_is_carried_is_not_there_again():
    """The carry itself is stacked, and all else follows from it; without it nothing does, unless it is stacked anew."""

    def fn(x):
        def forward(h, _):
            y = jnp.sin(h)
            return jnp.cos(y) + 1, (h, y)

        h, (hs, ys) = lax.scan(forward, x, None, length=LAYERS)
        return lax.scan(lambda c, r: (c * r[0] + r[1], None), h, (hs, ys))[0]

    first, second = find_residuals(canonical(fn, np.ones(WIDTH)))
    assert Slices(first.maker, {first.stack}).of(first.stack) is None
    assert [e.primitive.name for e in Slices(second.maker, {second.stack}).of(second.stack)] == ["sin"]
    assert not Slices(second.maker, {second.stack}).carries(second.stack)
    both = Slices(second.maker, {first.stack, second.stack})
    assert both.carries(second.stack) == {both.row_of[first.stack]}


def test_rows_that_another_stack_keeps_are_read_there():
    def fn(x):
        h, (ys, zs) = lax.scan(lambda h, _: (jnp.sin(h), (y := jnp.cos(h), y)), x, None, length=LAYERS)
        return lax.scan(lambda c, r: (c + r[0] * r[1], None), h, (ys, zs))[0]

    args = (np.linspace(0, 1, WIDTH),)
    with jax.enable_x64(True):
        jaxpr = canonical(fn, *args)
        stacks = [r.stack for r in find_residuals(jaxpr)]
        (row,) = {Slices(r.maker, ()).row_of[r.stack] for r in find_residuals(jaxpr)}
        for some, instead in ((stacks[:1], ()), (stacks, (row,))):
            other, again = recompute_residuals(jaxpr, some, instead)
            same_program(jaxpr, other, again, RecomputeChoice(tuple(some), tuple(instead)), args)


def test_a_boxing_of_the_plan_is_not_stacked_instead():
    """The stream of each layer is made whole by a pin: the plan has a boxing there, and the program a constrain."""

    def layer(x, w):
        h = checkpoint_name(shardc.constrain(x, {}) @ w["up"], "up")
        return shardc.constrain(x + checkpoint_name(jax.nn.gelu(h) @ w["down"], "down"), {"model": shardc.S(1)}), None

    def step(ws, x):
        body = jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names("up", "down"))
        return jax.grad(lambda ws: (lax.scan(body, x, ws)[0] ** 2).sum())(ws)

    ws = {
        "up": jax.ShapeDtypeStruct((4, 256, 1024), np.float32),
        "down": jax.ShapeDtypeStruct((4, 1024, 256), np.float32),
    }
    pins = {"ws": {"up": {"model": shardc.S(2)}, "down": {"model": shardc.S(1)}}}
    args = ws, jax.ShapeDtypeStruct((4, 1024, 256), np.float32)

    def plan(hbm):
        mesh = shardc.make_mesh(topology="v5p:2x1x1", model=2, hbm=hbm)
        return shardc.function(step, mesh=mesh, in_placements=pins).plan(*args)

    limit = int(0.95 * plan("95GB").memory.peak)
    try:
        assert plan(limit).memory.peak <= limit
    except shardc.MemoryLimitError as error:
        assert error.plan.memory.peak > limit


def test_what_others_read_is_no_residual():
    def fn(x):
        h, (ys, zs, us) = lax.scan(lambda h, _: (jnp.sin(h), (h * 2, h * 3, h * 4)), x, None, length=LAYERS)
        h, vs = lax.scan(lambda c, r: (c + r[0] + r[1], r[0] * 2), h, (ys, zs))
        return h, zs.sum(), vs, us

    (only,) = find_residuals(canonical(fn, np.ones(WIDTH)))
    assert only.maker.outvars.index(only.stack) == 1


def total(stats):
    taken = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
    return taken - stats.alias_size_in_bytes


@pytest.mark.sampled(0)
def test_what_fits_is_found(golden):
    """On one axis of chips that are not present: the plan that fits is as fast, and says what it recomputes."""
    step, state, batch = training(256)
    free, tight = (
        shardc.function(
            step, mesh=shardc.make_mesh(topology="v5p", data=8, hbm=hbm), donate_argnames=("params", "opt_state"),
            in_placements={"batch": {"data": shardc.S(0)}},
        ).plan(*state, batch)
        for hbm in ("95GB", "240MB")
    )  # fmt: skip
    assert free.memory.peak > 290e6
    assert tight.memory.peak <= 240e6
    assert GAPS * tight.recomputed.bytes >= free.memory.peak - 240e6
    assert tight.seconds < 1.06 * free.seconds
    golden("recomputed_residuals", "\n".join(tight.explain().splitlines()[-4:]))


@pytest.mark.sampled(0)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_no_slower_than_with_checkpoints(microbatches):
    """Within a limit that `jax.checkpoint` around each layer keeps to, our recomputation is no slower."""

    def plan(hbm, remat):
        step, state, batch = training(256, microbatches, layers=6, seq=512, rows=64, remat=remat)
        return shardc.function(
            step, mesh=shardc.make_mesh(topology="v5p", data=8, hbm=hbm), donate_argnames=("params", "opt_state"),
            in_placements={"batch": {"data": shardc.S(0)}},
        ).plan(*state, batch)  # fmt: skip

    by_hand = plan("95GB", remat=True)
    tight = plan(int(1.2 * by_hand.memory.peak), remat=False)
    assert tight.unlimited.peak > 2.9 * by_hand.memory.peak
    assert tight.seconds <= 1.01 * by_hand.seconds


@pytest.mark.sampled(0)
def test_what_checkpoints_fit_in_is_found():
    """Logits take as much as layers do: if they are recomputed for the bytes of the peak, they fill another point."""

    def plan(hbm, remat):
        step, state, batch = training(256, seq=256, rows=32, remat=remat, vocab=8192, dtype=jnp.bfloat16)
        return shardc.function(
            step, mesh=shardc.make_mesh(topology="v5p", data=4, hbm=hbm), donate_argnames=("params", "opt_state"),
            in_placements={"batch": {"data": shardc.S(0)}},
        ).plan(*state, batch)  # fmt: skip

    by_hand = plan("95GB", remat=True)
    tight = plan(by_hand.memory.peak, remat=False)
    assert tight.memory.peak <= by_hand.memory.peak
    assert tight.seconds <= 1.03 * by_hand.seconds


def training(width, microbatches=1, layers=4, seq=64, rows=256, remat=False, **more):
    """A step of GPT-2 with scanned layers, the shapes of its state, and those of a batch."""
    cfg = gpt2.Config(
        layers=layers, d_model=width, heads=4, seq=seq, learning_rate=1e-3, scan_layers=True, remat=remat, **more
    )
    accumulate = partial(shardc.accumulate, microbatches=microbatches) if microbatches > 1 else lambda fn: fn
    init, step = gpt2.make_step(cfg, accumulate)
    batch = {k: jax.ShapeDtypeStruct((rows, seq), np.int32) for k in ("inputs", "targets")}
    return step, jax.eval_shape(init, jax.random.key(0)), batch


@pytest.mark.plans_eagerly
@pytest.mark.sampled(0)
@pytest.mark.parametrize(("microbatches", "part"), [(1, 0.6), (2, 0.5)])
def test_a_training_step_computes_again_what_does_not_fit(microbatches, part, tmp_path):
    cfg = gpt2.Config(layers=4, d_model=32, heads=4, seq=32, learning_rate=1e-3, scan_layers=True)
    accumulate = partial(shardc.accumulate, microbatches=microbatches) if microbatches > 1 else lambda fn: fn
    init, step = gpt2.make_step(cfg, accumulate)
    state = init(jax.random.key(0))
    rng = np.random.default_rng(0)
    batch = {k: rng.integers(0, 256, (64, 32)).astype(np.int32) for k in ("inputs", "targets")}
    want = jax.jit(step)(*state, batch)

    def function(hbm, plan=None):
        mesh = shardc.make_mesh(data=8, hbm=hbm)
        placed = {} if plan else {"in_placements": {"params": {}, "batch": {"data": shardc.S(0)}}}
        return shardc.function(step, mesh=mesh, donate_argnames=("params", "opt_state"), plan=plan, **placed)

    free = function(None)
    limit = int(part * free.plan(*state, batch).memory.peak)
    f = function(limit)
    plan = f.plan(*state, batch)
    assert plan.memory.peak <= limit
    assert plan.unlimited.peak == free.plan(*state, batch).memory.peak
    assert plan.recomputed.bytes > 0.2 * limit
    assert 0 < plan.recomputed.count <= len(plan.recomputed.names)
    assert 0 <= plan.gap < 1
    assert "Recomputed to save memory" in plan.explain()
    rows = rows_of(plan.boxed.jaxpr.eqns, plan.boxed.jaxpr.outvars, plan.boxed.placements)
    assert len(ports_in(plan.counterfactuals[0].problem, plan.inputs, rows)) > len(plan.boxed.jaxpr.eqns)
    compiled = f.compile(*state, batch)
    assert compiled.audit().ok
    assert total(compiled.memory_stats()) <= min(limit, 0.7 * total(free.compile(*state, batch).memory_stats()))
    plan.save(tmp_path / "plan.json")
    saved = function(None, tmp_path / "plan.json").plan(*state, batch)
    assert saved.recomputed == plan.recomputed
    assert (saved.seconds, saved.memory, saved.gap) == (plan.seconds, plan.memory, plan.gap)
    got = f(*jax.tree.map(jnp.copy, state), batch)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-3, atol=3e-4)
