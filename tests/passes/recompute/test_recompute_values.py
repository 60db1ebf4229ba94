"""Recomputed values of unrolled programs: the same numbers, fewer bytes kept."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import shardc
from examples import gpt2
from examples.zoo import MODELS
from shardc import compat
from shardc.ir.nested import bodies_of
from shardc.passes.estimate.backend import backend_of
from shardc.passes.recompute.recompute import RecomputeChoice, RecomputeOptions, recompute
from shardc.passes.recompute.recompute_residuals import NOT_RECOMPUTED
from shardc.passes.recompute.recompute_values import recompute_values
from shardc.passes.trace.canonicalize import canonicalize
from shardc.plan.make import Placing, _Within
from tests.passes.recompute.test_recompute_residuals import same_program

LAYERS, ROWS, WIDTH = 3, 4, 8


def layer(h, w, key):
    up = jnp.tanh(h @ w["up"]) * jax.random.bernoulli(key, 0.9, h.shape)
    weights = jax.nn.softmax(up @ up.T)
    return h + (weights @ up) @ w["down"]


def loss(params, x):
    for w, key in zip(params, jax.random.split(jax.random.key(0), LAYERS), strict=True):
        x = layer(x, w, key)
    return (x**2).sum()


def both_ways(params, x):
    return jax.value_and_grad(loss)(params, x)


def in_steps(params, x):
    """The same for each of two microbatches."""
    return lax.scan(lambda total, row: (jax.tree.map(jnp.add, total, both_ways(params, row)), None),
                    jax.tree.map(jnp.zeros_like, (0.0, params)), jnp.stack([x, 2 * x]))[0]  # fmt: skip


def arguments():
    rng = np.random.default_rng(0)
    ws = [{k: rng.normal(size=(WIDTH, WIDTH)) / 3 for k in ("up", "down")} for _ in range(LAYERS)]
    return ws, rng.normal(size=(ROWS, WIDTH))


def scopes(jaxpr):
    """The program, and bodies of its loops."""
    yield jaxpr
    for e in jaxpr.eqns:
        if e.primitive.name == "scan":
            yield from scopes(bodies_of(e)[0])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fn", [both_ways, in_steps])
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_choice_gives_the_same_numbers(fn, data):
    """Any choice and any point; values that are not chosen are kept."""
    with jax.enable_x64(True):
        args = arguments()
        jaxpr = canonicalize(jax.make_jaxpr(fn)(*args))[0]
        chosen = {}
        for scope in scopes(jaxpr):
            now = data.draw(st.integers(1, len(scope.eqns) - 1))
            since = scope.eqns[now].outvars[0]
            made = [v for e in scope.eqns[:now] if e.primitive.name not in NOT_RECOMPUTED for v in e.outvars]
            chosen |= {v: since for v in made if data.draw(st.booleans())}
        again_too, recomputation = recompute(jaxpr, RecomputeChoice(values=chosen))
        assert set(filter(None, recomputation.variables.values())) <= chosen.keys()
        same_program(jaxpr, again_too, recomputation.variables, RecomputeChoice(values=chosen), args)


def test_what_is_recomputed_waits():
    """Recomputed values pass a barrier with the deepest value so far; values made only for late readers are made
    once."""

    def fn(x, w):
        y = jnp.tanh(x @ w)
        late = jnp.cos(y)
        z = jnp.sin(jnp.exp(y))
        return z * late + y

    jaxpr = canonicalize(jax.make_jaxpr(fn)(np.ones((ROWS, WIDTH)), np.ones((WIDTH, WIDTH))))[0]
    product, tanh, cos, _, sin, mul, _ = jaxpr.eqns
    since = mul.outvars[0]
    fewer, again = recompute_values(jaxpr, {tanh.outvars[0]: since, cos.outvars[0]: since})
    names = [e.primitive.name for e in fewer.eqns]
    assert names == ["dot_general", "tanh", "exp", "sin", "optimization_barrier", "tanh", "cos", "mul", "add"]
    barrier, *_ = (e for e in fewer.eqns if e.primitive.name == "optimization_barrier")
    assert barrier.invars == [product.outvars[0], sin.outvars[0]]
    assert fewer.eqns[5].invars == [barrier.outvars[0]]
    assert fewer.eqns[-1].invars == [fewer.eqns[-2].outvars[0], fewer.eqns[5].outvars[0]]
    assert again.keys() == {fewer.eqns[5].outvars[0], fewer.eqns[6].outvars[0]}


def step_of(layers, width=64, seq=32, rows=64, microbatches=1):
    """A step of GPT-2 with unrolled layers, the shapes of its state, and those of a batch."""
    cfg = gpt2.Config(layers=layers, d_model=width, heads=4, seq=seq, learning_rate=1e-3)
    accumulate = partial(shardc.accumulate, microbatches=microbatches) if microbatches > 1 else lambda fn: fn
    init, step = gpt2.make_step(cfg, accumulate)
    batch = {k: jax.ShapeDtypeStruct((rows, seq), np.int32) for k in ("inputs", "targets")}
    return init, step, batch


def function(step, hbm, topology="v5p", plan=None):
    mesh = shardc.make_mesh(data=8) if topology is None else shardc.make_mesh(topology=topology, data=8, hbm=hbm)
    placed = {} if plan else {"in_placements": {"params": {}, "batch": {"data": shardc.S(0)}}}
    return shardc.function(step, mesh=mesh, donate_argnames=("params", "opt_state"), plan=plan, **placed)


@pytest.mark.sampled(0)
def test_what_fits_is_found(golden):
    """On chips that are not present: plans within a limit recompute values of the layers, and take little longer."""
    init, step, batch = step_of(layers=4, width=256, seq=64, rows=256)
    state = jax.eval_shape(init, jax.random.key(0))
    free = function(step, "95GB").plan(*state, batch)
    for share in (0.8, 0.5):
        limit = int(share * free.memory.peak)
        plan = function(step, limit).plan(*state, batch)
        assert plan.memory.peak <= limit
        assert plan.recomputed.bytes >= 0.7 * (free.memory.peak - limit)
        assert 0 <= plan.gap < 0.3
        assert plan.seconds < 1.35 * free.seconds  # what waits for what is computed again is not combined with the rest
    golden("recomputed_values", "\n".join(plan.explain().splitlines()[-4:]))


def test_not_where_xla_merges_both():
    """XLA:CPU removes barriers before it merges equal operations."""
    init, step, batch = step_of(layers=2)
    state = jax.eval_shape(init, jax.random.key(0))
    plan = function(step, None, topology="cpu").plan(*state, batch)
    assert plan.mesh.topology.kind == "cpu"
    assert not RecomputeOptions(plan.boxed, plan.profile(), plan.mesh, backend_of("cpu")).peaks
    assert RecomputeOptions(plan.boxed, plan.profile(), plan.mesh, backend_of("tpu")).peaks


def test_a_higher_price_frees_more():
    """At the lowest price nothing is freed; the higher the price of a byte, the more is."""
    init, step, batch = step_of(layers=3)
    state = jax.eval_shape(init, jax.random.key(0))
    plan = function(step, "95GB").plan(*state, batch)
    options = RecomputeOptions(plan.boxed, plan.profile(), plan.mesh, backend_of("tpu"))
    (at_peak,) = options.peaks
    assert at_peak.bytes <= plan.memory.peak
    freed = [at_peak.choose(options.typical * p)[1] for p in (1e-9, 1e-6, 1e-3, 1e-1, 1.0, 1e1, 1e3)]
    assert abs(freed[0]) < 1e-3 * at_peak.bytes
    assert freed == sorted(freed)
    assert 0 < options.worth <= options.most < at_peak.bytes
    values, _ = at_peak.choose(options.typical)
    dropped = {v for v in values if at_peak.there.get(v)}
    assert sum(map(at_peak.size, dropped)) >= 0.85 * options.worth
    computed_anyway = {v for v in at_peak.in_loops - at_peak.wanted if v in values}
    for v in computed_anyway:
        operands = at_peak.early[at_peak.maker[v]].invars
        assert any(at_peak.root.get(a, a) in values for a in operands if not compat.is_literal(a))


@pytest.mark.sampled(0)
@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_choice_takes_what_it_was_said_to_take(microbatches):
    """The seconds that a choice costs are those of the plan, also in a loop."""
    init, step, batch = step_of(layers=3, width=256, seq=64, rows=512, microbatches=microbatches)
    state = jax.eval_shape(init, jax.random.key(0))
    free = function(step, "95GB").plan(*state, batch)
    placing = Placing.of(free.request)
    options = RecomputeOptions(placing.plan.boxed, placing.plan.profile(), free.mesh, backend_of("tpu"))
    choice, _ = options.choose(options.worth)
    (at_peak,) = options.peaks
    assert set(choice.values.values()) == {at_peak.since}
    said = sum(at_peak.price[n] for n in {at_peak.maker[v] for v in choice.values})
    plan = placing.search.recomputing(choice).plan
    assert 0.7 * options.worth < plan.recomputed.bytes < 1.4 * options.worth
    assert 0.7 * said < plan.recomputed.seconds < 1.4 * said


@pytest.fixture
def float32_products():
    """A plan for a TPU multiplies bfloat16, on CPU devices too."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.mark.sampled(0)
@pytest.mark.usefixtures("float32_products")
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_training_step_that_recomputes(microbatches, tmp_path):
    """Planned for chips, run on eight CPU devices: the numbers of one device, the collectives of the plan."""
    init, step, batch = step_of(layers=3, microbatches=microbatches)
    state = init(jax.random.key(0))
    rng = np.random.default_rng(0)
    batch = {k: rng.integers(0, 256, v.shape).astype(np.int32) for k, v in batch.items()}
    want = jax.jit(step)(*state, batch)
    free = function(step, "95GB").plan(*state, batch)
    plan = function(step, int(0.5 * free.memory.peak)).plan(*state, batch)
    assert plan.recomputed.count > 10
    assert any(">" in name for name in plan.recomputed.names)
    plan.save(tmp_path / "plan.json")
    f = function(step, None, topology=None, plan=tmp_path / "plan.json")
    saved = f.plan(*state, batch)
    assert saved.recomputed.names == plan.recomputed.names
    assert f.compile(*state, batch).audit().ok
    got = f(*jax.tree.map(jnp.copy, state), batch)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-3, atol=3e-4)


@pytest.mark.sampled(0)
@pytest.mark.usefixtures("float32_products")
@pytest.mark.parametrize("name", ["bert", "moe"])
def test_models_of_the_zoo_recompute(name, tmp_path, monkeypatch):
    """Nothing is split; planned for chips, run on eight CPU devices, with the numbers of one."""
    monkeypatch.setattr(_Within, "may_fit", False)
    zoo = MODELS[name]
    cfg = zoo.configs["test"]
    init, step = zoo.make_step(cfg, lambda f: f)
    state, batch = init(jax.random.key(0)), next(zoo.batches(cfg, 16, 0))
    shapes = {"data": 4, "model": 2}

    def on_chips(hbm):
        return shardc.function(step, mesh=shardc.make_mesh(topology="v5p", hbm=hbm, **shapes)).plan(*state, batch)

    free = on_chips("95GB")
    plan = on_chips(int(0.7 * free.memory.peak))
    assert plan.recomputed.count > 4
    plan.save(tmp_path / "plan.json")
    f = shardc.function(step, mesh=shardc.make_mesh(**shapes), plan=tmp_path / "plan.json")
    assert f.compile(*state, batch).audit().ok
    want, got = jax.jit(step)(*state, batch), f(*state, batch)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-4)
