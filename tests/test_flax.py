"""Flax's metadata as placements, and functions that write to nnx modules."""

from __future__ import annotations

import subprocess
import sys
from copy import deepcopy
from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import shardc
import shardc.flax
from shardc import AUTO, S
from shardc.sbp.placement import Placement

pytestmark = pytest.mark.usefixtures("compiled_fast")

RULES = (("batch", "data"), ("embed", None), ("mlp", "model"), ("vocab", ("data", "model")))
ROWS = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)


@pytest.fixture
def mesh():
    return shardc.make_mesh(data=4, model=2)


def placement(**sbps):
    return Placement(sbps)


def test_shardc_does_without_flax():
    code = "import sys, shardc; sys.exit('flax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_shardc_flax_says_that_flax_is_missing():
    code = "import sys; sys.modules['flax'] = None; import shardc.flax"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    text = 'ModuleNotFoundError: shardc.flax needs flax, which is not installed: pip install "flax>=0.12".'
    assert (done.returncode, done.stderr.strip().splitlines()[-1]) == (1, text)


class Layer(nn.Module):
    """Annotated by axes of the mesh, or by logical names."""

    logical: bool = False

    @nn.compact
    def __call__(self, x, _=None):
        boxed = nn.with_logical_partitioning if self.logical else nn.with_partitioning
        init, (up, down) = jax.nn.initializers.lecun_normal(), (("embed", "mlp"), ("mlp", "embed"))
        if not self.logical:
            up, down = (None, "model"), ("model", None)
        h = nn.relu(nn.Dense(32, name="up", kernel_init=boxed(init, up))(x))
        return x + nn.Dense(8, name="down", kernel_init=boxed(init, down))(h), None


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )  # fmt: skip
        return layers(logical=True, name="layers")(x)[0]


def test_linen_boxes_become_placements():
    shapes = jax.eval_shape(Layer().init, jax.random.key(0), ROWS)
    assert shardc.flax.placements(shapes) == {
        "params": {
            "up": {"kernel": placement(model=S(1)), "bias": AUTO},
            "down": {"kernel": placement(model=S(0)), "bias": AUTO},
        }
    }


def test_logical_names_go_through_rules_and_scans_add_a_dimension():
    shapes = jax.eval_shape(Stack().init, jax.random.key(0), ROWS)
    up, down = ({"kernel": placement(model=S(dim)), "bias": AUTO} for dim in (2, 1))
    want = {"up": up, "down": down}
    assert shardc.flax.placements(shapes, rules=RULES)["params"]["layers"] == want
    with nn.logical_axis_rules(RULES):
        assert shardc.flax.placements(shapes)["params"]["layers"] == want


@pytest.mark.parametrize(
    ("names", "want"),
    [
        (("vocab", "embed"), Placement([("data", S(0)), ("model", S(0))])),
        (("mlp", "vocab"), placement(model=S(0))),  # flax: an axis of the mesh is for the first rule that wants it
        (("heads", "mlp"), placement(model=S(1))),  # no rule
        (("batch", None), placement(data=S(0))),
    ],
)
def test_rules_are_read_as_flax_reads_them(names, want):
    box = nn.LogicallyPartitioned(jnp.zeros((8, 8)), names)
    assert shardc.flax.placements(box, rules=RULES) == want


@pytest.mark.parametrize("axes", [{"data": 4, "model": 2}, {"pipe": 2, "data": 4}], ids=["data", "pipeline"])
def test_a_gradient_in_parts_closes_over_its_train_state(axes):
    """The step of flax's examples, with its gradient as a function of the batch."""

    def apply(params, x):
        return shardc.stage_boundary(jnp.tanh(x @ params["up"])) @ params["down"]

    def gradient_of(state, batch):
        def loss_fn(params):
            out = state.apply_fn(params, batch["x"])
            return jnp.mean((out - batch["y"]) ** 2), jnp.mean(jnp.abs(out))

        return jax.value_and_grad(loss_fn, has_aux=True)(state.params)

    def step(state, batch):
        (loss, size), grads = shardc.accumulate(lambda batch: gradient_of(state, batch), microbatches=2)(batch)
        return state.apply_gradients(grads=grads), (loss, size)

    @jax.jit
    def whole(state, batch):
        metrics, grads = gradient_of(state, batch)
        return state.apply_gradients(grads=grads), metrics

    keys = jax.random.split(jax.random.key(0), 4)
    up, down, x, y = (
        jax.random.normal(k, shape) for k, shape in zip(keys, ((4, 6), (6, 2), (8, 4), (8, 2)), strict=True)
    )
    state = TrainState.create(apply_fn=apply, params={"up": up, "down": down}, tx=optax.adam(1e-2))
    pipeline = shardc.Pipeline(axis="pipe") if "pipe" in axes else None
    f = shardc.function(step, mesh=shardc.make_mesh(**axes), in_placements={"batch": {"data": S(0)}}, pipeline=pipeline)
    batch = {"x": x, "y": y}
    for got, want in zip(jax.tree.leaves(f(state, batch)), jax.tree.leaves(whole(state, batch)), strict=True):
        np.testing.assert_allclose(np.asarray(got), want, 1e-5, 1e-6)


def test_an_axis_twice_is_an_error():
    with pytest.raises(shardc.ArgumentError, match=r"\['w'\] is split twice over model: "):
        shardc.flax.placements({"w": nn.Partitioned(jnp.zeros((8, 8)), ("model", "model"))})


@pytest.mark.sampled(2)
@pytest.mark.parametrize("boxed", [True, False], ids=["boxed", "unboxed"])
@pytest.mark.parametrize("model", [Layer(), Stack()], ids=["axes", "logical names"])
def test_placements_are_pins_of_a_step_with_boxes_and_without(mesh, model, boxed):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))

    def init(key):
        params = model.init(key, ROWS)["params"]
        return params, optimizer.init(params)

    def step(params, opt_state, x):
        def loss_of(params):
            return jnp.mean(jax.tree.leaves(model.apply({"params": params}, x))[0] ** 2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params, opt_state = init(jax.random.key(0))
    places = {
        "params": shardc.flax.placements(params, RULES if isinstance(model, Stack) else None),
        "opt_state": shardc.flax.placements(opt_state, RULES if isinstance(model, Stack) else None),
        "x": {"data": S(0)},
    }
    if not boxed:
        params, opt_state = nn.unbox((params, opt_state))
    sharded = shardc.function(step, mesh=mesh, in_placements=places, donate_argnames=("params", "opt_state"))
    plan = sharded.plan(params, opt_state, ROWS)
    for tree in (plan.in_placements.params, plan.in_placements.opt_state):
        pairs = jax.tree_util.tree_leaves_with_path(tree)
        kernels = {jax.tree_util.keystr(path): p for path, p in pairs if "kernel" in str(path)}
        assert kernels
        assert {p.axes_of(d)[0] for p in kernels.values() for d in p.splits} == {"model"}
        assert all(len(p) == 1 for p in kernels.values()), kernels
    want = jax.jit(step)(params, opt_state, ROWS)
    got = sharded(params, opt_state, ROWS)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6), got, want)
    assert jax.tree.structure(got) == jax.tree.structure(want)


class Net(nnx.Module):
    """A module with every kind of state: parameters, statistics, random streams, a counter of its own."""

    def __init__(self, rngs):
        split = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
        self.up = nnx.Linear(8, 32, rngs=rngs, kernel_init=split)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.drop = nnx.Dropout(0.25, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(32, 32, rngs=rngs) for _ in range(2)])
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        x = self.drop(nnx.relu(self.norm(self.up(x))))
        for layer in self.layers:
            x = layer(x)
        return x


def net():
    with nnx.use_eager_sharding(False):  # no mesh here
        model = Net(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)


def train(model, optimizer, x):
    def loss_of(model):
        return jnp.mean((model(x) - 1) ** 2)

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


def assert_same_state(got, want):
    def value(x):
        return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x)

    got, want = (nnx.to_pure_dict(nnx.state(x)) for x in (got, want))
    jax.tree.map(lambda g, w: np.testing.assert_allclose(value(g), value(w), rtol=1e-4, atol=1e-5), got, want)


def test_what_a_step_writes_to_its_modules_is_kept(mesh):
    step = shardc.flax.function(
        train, mesh=mesh, in_placements={"x": {"data": S(0)}}, donate_argnames=("model", "optimizer")
    )
    ours, theirs = net(), net()
    for _ in range(3):
        loss, want = step(*ours, ROWS), nnx.jit(train)(*theirs, ROWS)
        np.testing.assert_allclose(loss, want, rtol=1e-5)
    for got, want in zip(ours, theirs, strict=True):
        assert_same_state(got, want)
    model, optimizer = ours
    assert (int(model.calls[...]), int(optimizer.step[...]), int(model.drop.rngs.count[...])) == (3, 3, 3)


def test_a_saved_plan_is_that_of_a_step_with_modules(mesh, tmp_path):
    keywords = {"mesh": mesh, "in_placements": {"x": {"data": S(0)}}}
    plan = shardc.flax.function(train, **keywords).plan(*net(), ROWS)
    plan.save(tmp_path / "plan.json")
    again = shardc.flax.function(train, plan=tmp_path / "plan.json", **keywords).plan(*net(), ROWS)
    assert (again.collectives, again.inputs, again.gap) == (plan.collectives, plan.inputs, plan.gap)


def test_metadata_are_pins_that_in_placements_overrides(mesh):
    model, optimizer = net()
    step = shardc.flax.function(train, mesh=mesh, in_placements={"x": {"data": S(0)}})
    places = step.plan(model, optimizer, ROWS).in_placements
    assert places.model["up"]["kernel"] == placement(model=S(1))
    assert places.optimizer["opt_state"][0]["trace"]["up"]["kernel"] == placement(model=S(1))
    rules = shardc.rules({"up/kernel": {"model": S(0)}, "layers/*/kernel": {"model": S(1)}})
    step = shardc.flax.function(train, mesh=mesh, in_placements={"model": rules, "x": {"data": S(0)}})
    places = step.plan(model, optimizer, ROWS).in_placements
    assert places.model["up"]["kernel"] == placement(model=S(0))
    assert places.model["layers"][1]["kernel"] == placement(model=S(1))


def test_a_second_call_is_not_traced_and_keeps_placements(mesh):
    traces = []

    @shardc.flax.function(mesh=mesh, in_placements=(AUTO, AUTO, {"data": S(0)}), donate_argnames=("model", "optimizer"))
    def step(model, optimizer, x):
        traces.append(1)
        return train(model, optimizer, x)

    model, optimizer = net()
    compiled = step.compile(model, optimizer, ROWS)
    assert compiled.audit().ok
    for _ in range(3):
        step(model, optimizer, ROWS)
    assert model.up.kernel[...].sharding.spec == jax.P(None, "model")
    compiled(model, optimizer, ROWS)
    assert int(model.calls[...]) == 4
    assert len(traces) == 1


def test_modules_that_two_arguments_share_stay_one(mesh):
    @shardc.flax.function(mesh=mesh)
    def step(model, first, x):
        first.kernel[...] += 1
        return model(x)

    model, _ = net()
    before = np.asarray(model.layers[0].kernel[...])
    step(model, model.layers[0], ROWS)
    np.testing.assert_allclose(model.layers[0].kernel[...], before + 1, rtol=1e-6)


def test_new_variables_and_modules_come_back(mesh):
    @shardc.flax.function(mesh=mesh)
    def step(model, x):
        model.seen = nnx.Variable(x.sum(0))
        return nnx.Param(x.mean(0)), x.max()

    model, _ = net()
    for _ in range(2):
        mean, largest = step(model, ROWS)
        np.testing.assert_allclose(model.seen[...], ROWS.sum(0), rtol=1e-5)
        np.testing.assert_allclose(mean[...], ROWS.mean(0), rtol=1e-4, atol=1e-6)
        assert isinstance(mean, nnx.Param)
        assert float(largest) == ROWS.max()


def test_static_arguments_defaults_and_no_mesh(mesh):
    @shardc.flax.function(mesh=mesh, static_argnames="train")
    def forward(model, x, train=False):
        (model.train if train else model.eval)()
        return model(x)

    model, _ = net()
    assert forward(model, ROWS).shape == (16, 32)
    assert not np.allclose(forward(model, ROWS), forward(model, ROWS, train=True))
    assert shardc.flax.function(train, mesh=None) is train


def test_modules_in_arguments_for_many(mesh):
    @shardc.flax.function(mesh=mesh)
    def step(*layers, **more):
        for layer in (*layers, more["last"]):
            layer.bias[...] += 1
        return layers[1](more["x"])

    first, second, last = (nnx.Linear(8, 8, rngs=nnx.Rngs(i)) for i in range(3))
    want = second(ROWS) + 1
    np.testing.assert_allclose(step(first, second, x=ROWS, last=last), want, rtol=1e-5, atol=1e-6)
    assert [float(layer.bias[0]) for layer in (first, second, last)] == [1, 1, 1]


@pytest.mark.parametrize("what", ["in_placements", "donate_argnames"])
def test_a_name_that_does_not_fit_is_an_error_before_the_first_call(mesh, what):
    said = {"modle": shardc.rules({"*": {}})} if what == "in_placements" else "modle"
    with pytest.raises(shardc.ArgumentError, match=f"{what} names 'modle', which is no argument of train"):
        shardc.flax.function(train, mesh=mesh, **{what: said})


def increment(state):
    state["bias"][...] += 1
    return state["kernel"].sum()


def test_a_state_is_a_value_for_shardc_function_and_written_to_by_that_of_flax(mesh):
    layer = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)
    with pytest.raises(shardc.TracingError) as error:
        shardc.function(increment, mesh=mesh)(state)
    assert str(error.value) == (
        f"increment (test_flax.py:{increment.__code__.co_firstlineno}) writes to nnx modules among its arguments, and "
        "what it writes would be lost: state/bias. Return the state, or pass the module itself: what is written to it "
        "is kept."
    )
    doubled = shardc.function(lambda state: jax.tree.map(lambda x: 2 * x, state), mesh=mesh)(state)
    np.testing.assert_allclose(nnx.merge(graph, doubled).kernel[...], 2 * layer.kernel[...])
    shardc.flax.function(increment, mesh=mesh)(state)
    np.testing.assert_allclose(state["bias"][...], 1)


def test_shardc_function_takes_modules_that_are_read_or_returned(mesh):
    @shardc.function(mesh=mesh)
    def read(model, x):
        return nnx.relu(model.up(x))

    @shardc.function(mesh=mesh)
    def returned(model, x):
        y = model(x)
        return model, y

    model, other = net()[0], net()[0]
    want = nnx.relu(model.up(ROWS))
    np.testing.assert_allclose(read(model, ROWS), want, rtol=1e-5, atol=1e-6)
    after, y = returned(model, ROWS)
    assert after is model and int(model.calls[...]) == 1
    np.testing.assert_allclose(y, other(ROWS), rtol=1e-4, atol=1e-5)


@dataclass
class Thawed:
    scale: float


@dataclass(frozen=True)
class Holder:
    values: list | dict | np.ndarray


class Configured(nnx.Module):
    def __init__(self, config):
        self.config, self.layer = config, nnx.Linear(8, 3, rngs=nnx.Rngs(0))

    def __call__(self, x):
        config = self.config
        return self.layer(x) * (config.scale if isinstance(config, Thawed) else config.values[0])


CONFIGS = [(2, Thawed(1)), (8, Holder([1, 2])), (2, Holder({0: 1})), (8, Holder(np.ones(2)))]


@pytest.mark.parametrize(("n", "config"), CONFIGS, ids=["dataclass", "list", "dict", "array"])
def test_attributes_without_a_hash_are_compared_by_what_they_hold(n, config):
    """Regression: `TypeError: unhashable type`. What changes in them is seen, also while the object stays."""
    config, rows = deepcopy(config), {"x": {"data": S(0)}}
    f = shardc.flax.function(lambda model, x: model(x), mesh=shardc.make_mesh(data=n), in_placements=rows)
    model, x = Configured(config), ROWS[:13]
    for scale in (1, 10.0, 1):
        if isinstance(config, Thawed):
            config.scale = scale
        else:
            config.values[0] = scale
        np.testing.assert_allclose(f(model, x), model(x), rtol=1e-5, atol=1e-6)
    assert len(f._programs) == 2  # the third call is the first one again
    compiled = f.compile(model, x)
    np.testing.assert_allclose(compiled(model, x), model(x), rtol=1e-5, atol=1e-6)
    with pytest.raises(shardc.ArgumentError, match="nnx_graph: another constant than it was compiled for"):
        compiled(Configured(Thawed(4)), x)


class Two(nnx.Module):
    """Two layers, the first of an odd width, with the end of a stage between them."""

    def __init__(self, rngs):
        self.up = nnx.Linear(8, 7, rngs=rngs)
        self.down = nnx.Linear(7, 2, rngs=rngs)

    def __call__(self, x):
        return self.down(shardc.stage_boundary(jnp.tanh(self.up(x))))


def two():
    model = Two(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def accumulated(model, optimizer, x):
    graph, params = nnx.split(model)

    def loss_of(params, x):
        return jnp.mean((nnx.merge(graph, params)(x) - 1) ** 2)

    loss, grads = shardc.accumulate(jax.value_and_grad(loss_of), microbatches=4)(params, x)
    optimizer.update(model, grads)
    return loss


@pytest.mark.parametrize("kind", ["uneven", "pipeline"])
def test_modules_hold_uneven_splits_and_run_in_stages(kind):
    rows = {"data": S(0)}
    if kind == "pipeline":
        mesh, more = shardc.make_mesh(pipe=2, data=2), {"pipeline": shardc.Pipeline(), "in_placements": {"x": rows}}
    else:
        columns = shardc.rules({"*up/kernel": {"model": S(1)}})
        places = {"model": columns, "optimizer": columns, "x": rows}
        mesh, more = shardc.make_mesh(data=4, model=2), {"in_placements": places}
    step = shardc.flax.function(accumulated, mesh=mesh, donate_argnames=("model", "optimizer"), **more)
    ours, theirs = two(), two()
    for _ in range(2):
        np.testing.assert_allclose(step(*ours, ROWS), nnx.jit(accumulated)(*theirs, ROWS), rtol=1e-5)
    got, want = (np.asarray(model.up.kernel.get_value()) for model, _ in (ours, theirs))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    assert isinstance(ours[0].up.kernel.get_value(), shardc.PlacedArray) == (kind == "uneven")


def test_what_a_box_holds_goes_by_the_name_of_the_box(mesh):
    dense = nn.Dense(8, kernel_init=nn.with_partitioning(nn.initializers.zeros, (None, "model")))
    variables = dense.init(jax.random.key(0), jnp.ones((4, 4)))
    layer = nnx.state(nnx.Linear(4, 8, rngs=nnx.Rngs(0)))
    rules = shardc.rules({"*kernel": {"model": S(1)}, "*bias": {}})
    f = shardc.function(lambda boxed, state: (boxed, state), mesh=mesh, in_placements=(rules, rules))
    program = f.plan(variables, layer).program
    assert program.in_paths == ("boxed/params/bias", "boxed/params/kernel", "state/bias", "state/kernel")
    assert program.out_paths == ("0/params/bias", "0/params/kernel", "1/bias", "1/kernel")
    placed = shardc.put({"boxed": variables, "state": layer}, mesh, rules)
    shown = [line.split()[0] for line in shardc.show(placed).splitlines()[3:]]
    assert shown == list(program.in_paths)
    assert jax.tree.structure(placed["boxed"]) == jax.tree.structure(variables)
