"""Modules of flax.nnx and equinox in `shardc.function`: served as by the faces of their names, and as on one device."""

from __future__ import annotations

import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardc
import shardc.equinox
import shardc.flax
from shardc import S

pytestmark = pytest.mark.usefixtures("compiled_fast")

ROWS = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
RULES = shardc.rules({"*up/kernel": {"model": S(1)}, "*down/kernel": {"model": S(0)}})
KEY = jax.random.key(5)
OPTIMIZER = optax.adam(1e-2)


@pytest.fixture
def mesh():
    return shardc.make_mesh(data=4, model=2)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)
        self.drop, self.calls = nnx.Dropout(0.25, rngs=rngs), nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        return self.down(self.drop(jnp.tanh(self.up(x))))


def net():
    model = Net(nnx.Rngs(0))
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param), metrics


def train(model, optimizer, metrics, x):
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - 1) ** 2))(model)
    optimizer.update(model, grads)
    metrics.update(loss=loss)
    return loss


def pinned(function, mesh, **more):
    places = {"model": RULES, "optimizer": RULES, "x": {"data": S(0)}}
    return function(train, mesh=mesh, in_placements=places, donate_argnames=("model", "optimizer"), **more)


def assert_same(got, want):
    for g, w in zip(jax.tree.leaves(nnx.state(got)), jax.tree.leaves(nnx.state(want)), strict=True):
        if jnp.issubdtype(w.dtype, jax.dtypes.prng_key):
            g, w = jax.random.key_data(g), jax.random.key_data(w)
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)


def test_a_step_of_nnx_is_that_of_the_face_and_of_one_device(mesh, tmp_path):
    ours, theirs, alone = net(), net(), net()
    step, face, reference = pinned(shardc.function, mesh), pinned(shardc.flax.function, mesh), nnx.jit(train)
    plan = step.plan(*ours, ROWS)
    assert str(plan.in_placements.model["up"]["kernel"]) == "{model: S(1)}"
    assert plan.digest == face.plan(*theirs, ROWS).digest
    plan.save(tmp_path / "plan.json")
    loaded = pinned(shardc.function, mesh, plan=tmp_path / "plan.json")
    compiled = loaded.compile(*ours, ROWS)
    assert compiled.audit().ok
    for run in (step, step, compiled, loaded):
        got = run(*ours, ROWS)
        assert float(got) == float(face(*theirs, ROWS))
        np.testing.assert_allclose(got, reference(*alone, ROWS), rtol=1e-5)
    for got, also, want in zip(ours, theirs, alone, strict=True):
        assert_same(got, also)
        assert_same(got, want)
    model, optimizer, _ = ours
    assert (int(model.calls[...]), int(optimizer.step[...]), int(model.drop.rngs.count[...])) == (4, 4, 4)
    assert model.up.kernel[...].sharding.spec == jax.P(None, "model")
    assert len(step._programs) == len(step._plans) == 1 and step.latest.plan is not None


def test_the_metadata_of_modules_are_pins(mesh):
    split = nnx.with_partitioning(nnx.initializers.zeros, (None, "model"))
    with nnx.use_eager_sharding(False):
        layer = nnx.Linear(8, 4, kernel_init=split, rngs=nnx.Rngs(0))
    run = shardc.function(lambda layers, x: layers["one"](x), mesh=mesh, in_placements={"x": {"data": S(0)}})
    assert str(run.plan({"one": layer}, ROWS).in_placements.layers["one"]["kernel"]) == "{model: S(1)}"


def test_a_module_may_have_attributes_without_a_hash(mesh):
    class Listed(nnx.Module):
        def __init__(self):
            self.scales, self.weight = nnx.static([2.0]), nnx.Param(jnp.ones(8))

        def __call__(self, x):
            return x @ self.weight[...] * self.scales[0]

    run = shardc.function(lambda module, x: module(x) if callable(module) else module + x, mesh=mesh)
    run(np.ones(8, np.float32), ROWS)
    for scale in (2.0, 3.0):
        module = Listed()
        module.scales[0] = scale
        np.testing.assert_allclose(run(module, ROWS), ROWS.sum(1) * scale, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(run(np.ones(8, np.float32), ROWS), ROWS + 1)


def test_inside_of_an_outer_trace_and_without_jit(mesh):
    step = pinned(shardc.function, mesh)
    ours, alone = net(), net()
    outer = nnx.jit(lambda *nodes: step(*nodes, ROWS))
    np.testing.assert_allclose(outer(*ours), train(*alone, ROWS), rtol=1e-5)
    with jax.disable_jit():
        np.testing.assert_allclose(step(*ours, ROWS), train(*alone, ROWS), rtol=1e-5)
    assert_same(ours[0], alone[0])


def test_shapes_are_planned_for_and_refused_by_a_call(mesh):
    abstract = nnx.eval_shape(net)
    step = pinned(shardc.function, mesh)
    assert step.plan(*abstract, ROWS).digest == step.plan(*net(), ROWS).digest
    with pytest.raises(shardc.ArgumentError, match=r"model/calls is a jax\.ShapeDtypeStruct, which has no values"):
        step(*abstract, ROWS)


def test_errors_name_the_argument_and_the_leaf(mesh):
    wrong = shardc.function(train, mesh=mesh, in_placements={"model": {"up": {"kernel": {"modle": S(0)}}}})
    with pytest.raises(shardc.PlacementError, match=r"in_placements: model/up/kernel.*no axis 'modle'"):
        wrong.plan(*net(), ROWS)
    model, optimizer, metrics = net()
    compiled = pinned(shardc.function, mesh).compile(model, optimizer, metrics, ROWS)
    model.eval()
    with pytest.raises(shardc.ArgumentError, match="the modules' nnx_graph: another constant than it was compiled for"):
        compiled(model, optimizer, metrics, ROWS)
    with pytest.raises(shardc.ArgumentError, match="missing a required argument: 'x'; call train"):
        pinned(shardc.function, mesh)(model, optimizer, metrics)


def test_a_module_in_a_flow(mesh):
    def step(module, x):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(module)
        nnx.update(module, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(module), grads))
        return loss

    fn = shardc.function(step, mesh=mesh, in_placements={"x": {"data": S(0)}})
    module = nnx.Linear(8, 3, rngs=nnx.Rngs(0))
    graph, state = nnx.split(module)

    @shardc.flow
    def rounds(state, x):
        module = nnx.merge(graph, state)
        loss = fn(module, x)
        return nnx.state(module), {"loss": loss}

    items = [ROWS, 2 * ROWS]
    last, given = rounds.run(state, items)
    np.testing.assert_allclose([g["loss"] for g in given], [step(module, x) for x in items], rtol=1e-4)
    np.testing.assert_allclose(last["kernel"][...], module.kernel[...], rtol=1e-4)


def test_modules_are_tuned():
    found = shardc.tune(train, *nnx.eval_shape(net), ROWS, devices=4, topology="v5p", tries=2)
    assert found.best.plan.mesh.size == 4


class Layers(eqx.Module):
    """A module with an activation, numbers, a flag and a name."""

    up: eqx.nn.Linear
    down: eqx.nn.Linear
    drop: eqx.nn.Dropout
    act: object
    scale: float
    name: str

    def __init__(self, key, act=jax.nn.gelu):
        first, last = jax.random.split(key)
        self.up, self.down = eqx.nn.Linear(8, 32, key=first), eqx.nn.Linear(32, 4, key=last)
        self.drop, self.act, self.scale, self.name = eqx.nn.Dropout(0.25), act, 2.0, "layers"

    def __call__(self, x, key):
        x = self.drop(shardc.stage_boundary(self.act(self.up(x))), key=key)
        return self.down(x) * (self.scale if self.scale > 1 else 0.0)


def loss_of(model, x, key):
    return jnp.mean((jax.vmap(model)(x, jax.random.split(key, len(x))) - 1) ** 2)


def fit(model, opt_state, x, key, microbatches=1):
    run = eqx.filter_value_and_grad(loss_of)
    if microbatches > 1:
        run = shardc.accumulate(run, microbatches=microbatches, keys="key")
    loss, grads = run(model, x, key)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), opt_state, loss


def start():
    model = Layers(jax.random.key(0))
    return model, OPTIMIZER.init(eqx.filter(model, eqx.is_array))


def assert_same_tree(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if eqx.is_array(w):
            np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-6)
        else:
            assert type(g) is type(w) and g == w


def test_a_step_of_equinox_is_that_of_the_face_and_of_one_device(mesh):
    columns = shardc.rules({"*up/weight": {"model": S(0)}})
    places = {"model": columns, "opt_state": columns, "x": {"data": S(0)}}
    keywords = {"mesh": mesh, "in_placements": places, "donate_argnames": ("model", "opt_state")}
    step, face = shardc.function(fit, **keywords), shardc.equinox.function(fit, **keywords)
    plan = step.plan(*start(), ROWS, KEY)
    assert str(plan.in_placements.model.up.weight) == "{model: S(0)}"
    assert (plan.in_placements.model.act, plan.in_placements.model.scale) == (None, None)
    assert (plan.out_placements[0].act, plan.out_placements[0].drop.p) == (None, None)
    assert plan.digest == face.plan(*start(), ROWS, KEY).digest
    compiled, reference = step.compile(*start(), ROWS, KEY), eqx.filter_jit(fit)
    assert compiled.audit().ok
    got, also, want = start(), start(), start()
    for run in (step, compiled, step):
        *got, loss = run(*got, ROWS, KEY)
        *also, same = face(*also, ROWS, KEY)
        *want, wanted = reference(*want, ROWS, KEY)
        assert float(loss) == float(same)
        np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    assert_same_tree(got, want)
    assert_same_tree(got, also)
    assert len(step._programs) == 1
    with pytest.raises(shardc.ArgumentError, match="model/scale: another constant than it was compiled for"):
        compiled(eqx.tree_at(lambda m: m.scale, got[0], 3.0), got[1], ROWS, KEY)


def test_a_module_of_equinox_in_stages():
    step = shardc.function(
        fit, mesh=shardc.make_mesh(pipe=2), pipeline=shardc.Pipeline(), donate_argnames="model",
        static_argnames="microbatches",
    )  # fmt: skip
    keys = jax.random.split(KEY, 4)
    model, opt_state = start()
    pairs = [eqx.filter_value_and_grad(loss_of)(model, ROWS[j::4], keys[j]) for j in range(4)]
    grads = jax.tree.map(lambda *gs: sum(gs) / 4, *[g for _, g in pairs])
    updates, _ = OPTIMIZER.update(grads, opt_state, eqx.filter(model, eqx.is_array))
    got, _, loss = step(*start(), ROWS, KEY, microbatches=4)
    np.testing.assert_allclose(loss, sum(one for one, _ in pairs) / 4, rtol=1e-5)
    assert_same_tree(got, eqx.apply_updates(model, updates))


def test_a_module_of_equinox_is_made_on_the_mesh(mesh):
    places = shardc.rules({"up/weight": {"model": S(0)}})
    made = shardc.function(Layers, mesh=mesh, out_placements=places)(jax.random.key(0))
    assert_same_tree(made, Layers(jax.random.key(0)))
    assert made.up.weight.sharding.spec[0] == "model"


def test_numbers_are_constants_in_modules_and_under_the_name_of_equinox_everywhere(mesh):
    traces = []

    def scaled(model, x, by):
        traces.append(by)
        return x * by * model.scale

    model = Layers(jax.random.key(0))
    for function, count in ((shardc.function, 1), (shardc.equinox.function, 2)):
        traces.clear()
        run = function(scaled, mesh=mesh)
        for by in (2.0, 3.0, 2.0):
            np.testing.assert_allclose(run(model, ROWS, by), ROWS * by * 2, rtol=1e-6)
        assert len(traces) == count
        np.testing.assert_allclose(run(eqx.tree_at(lambda m: m.scale, model, 3), ROWS, 2.0), ROWS * 6, rtol=1e-6)
        assert len(traces) == count + 1


def test_a_module_of_equinox_in_a_flow(mesh):
    def step(model, x):
        loss, grads = eqx.filter_value_and_grad(lambda m: jnp.mean(jax.vmap(m)(x) ** 2))(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), loss

    fn = shardc.function(step, mesh=mesh, in_placements={"x": {"data": S(0)}})

    @shardc.flow
    def rounds(model, x):
        model, loss = fn(model, x)
        return model, {"loss": loss}

    model = eqx.nn.MLP(8, 3, 8, 2, key=jax.random.key(0))
    last, given = rounds.run(model, [ROWS, 2 * ROWS])
    for x, g in zip((ROWS, 2 * ROWS), given, strict=True):
        model, loss = step(model, x)
        np.testing.assert_allclose(g["loss"], loss, rtol=1e-4)
    np.testing.assert_allclose(last.layers[0].weight, model.layers[0].weight, rtol=1e-4, atol=1e-6)
    assert last.activation is model.activation


STEP = """
import sys, jax.numpy as jnp, shardc
f = shardc.function(lambda w, x: w - x.sum(), mesh=shardc.make_mesh(data=1))
f(jnp.ones(4), 2.0), f(jnp.ones(4), 3.0)
sys.exit(bool({"flax", "equinox", "shardc.calls.nnx_modules"} & {*sys.modules}))
"""


def test_a_call_without_modules_loads_neither_library():
    assert subprocess.run([sys.executable, "-c", STEP], check=False).returncode == 0
