"""The face: what goes in and out of `shardc.function`, on eight fake devices, against the function itself."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

import shardc
from shardc import AUTO, B, P, PlacedArray, Placement, S
from shardc.passes.lower.lower import Lowering

MESH = shardc.make_mesh(data=4, model=2)
LINE = shardc.make_mesh(data=8)


def arange(*shape, dtype=np.float32):
    return np.arange(np.prod(shape), dtype=dtype).reshape(shape)


def plans_of(f):
    """How many plans a function has made."""
    return sum(len(plans) for plans in f._plans.values())


def assert_same(got, want, **tolerance):
    """Two pytrees are equal: structure, shapes, dtypes, values."""
    got = jax.tree.map(np.asarray, got, is_leaf=lambda x: isinstance(x, PlacedArray))
    want = jax.tree.map(lambda x: np.asarray(x if hasattr(x, "shape") else jnp.asarray(x)), want)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        if tolerance:
            np.testing.assert_allclose(g, w, **tolerance)
        else:
            np.testing.assert_array_equal(g, w)


# --- arguments -----------------------------------------------------------------------------------------------------


class Point(NamedTuple):
    x: object
    y: object


@jax.tree_util.register_dataclass
@dataclass
class State:
    weight: object
    bias: object


def test_pytrees_with_none_and_leaves_that_are_no_arrays():
    def f(tree, activation):
        shift = 0.0 if tree["none"] is None else 1.0
        out = activation(tree["point"].x) * tree["state"].weight + shift
        return {"out": out, "none": None, "list": [tree["point"].y, ()]} if tree["name"] == "yes" else out

    tree = {"none": None, "name": "yes", "point": Point(arange(8, 4), 2), "state": State(arange(4), None)}
    g = shardc.function(f, mesh=MESH, in_placements={"tree": AUTO})
    assert_same(g(tree, jnp.sin), f(tree, jnp.sin), rtol=1e-6)
    assert_same(g(tree | {"name": "no"}, jnp.cos), f(tree | {"name": "no"}, jnp.cos), rtol=1e-6)
    assert plans_of(g) == 2
    g(tree, jnp.sin)
    assert plans_of(g) == 2


def test_in_placements_of_an_argument_follow_its_tree():
    def f(tree):
        return tree["a"].sum() + tree["b"][1] * 2

    tree = {"a": arange(8, 4), "b": [arange(3), arange(16)], "c": None}
    g = shardc.function(f, mesh=LINE, in_placements={"tree": {"a": {"data": S(0)}, "b": [AUTO, {"data": S(0)}]}})
    plan = g.plan(tree)
    assert plan.in_placements["tree"]["a"] == Placement({"data": S(0)})
    assert plan.in_placements.tree["b"][1] == Placement({"data": S(0)})
    assert plan.in_placements["tree"]["c"] is None
    assert_same(g(tree), f(tree))


def test_keyword_default_and_variadic_arguments():
    def f(a, *rest, scale=2.0, **named):
        return a + sum(rest) * scale - sum(named.values())

    g = shardc.function(f, mesh=LINE, in_placements={name: {"data": S(0)} for name in ("a", "rest", "named")})
    x, y, z = arange(8), arange(8) + 1, arange(8) * 3
    for args, kwargs in (((x,), {}), ((x, y, z), {}), ((x, y), {"scale": 3.0, "c": z}), ((x,), {"b": y, "c": z})):
        assert_same(g(*args, **kwargs), f(jnp.asarray(args[0]), *args[1:], **kwargs))
    plan = g.plan(x, y, z, scale=3.0, c=y)
    assert plan.program.in_paths == ("a", "rest/0", "rest/1", "scale", "named/c")
    assert set(plan.inputs[:3]) == {Placement({"data": S(0)})}

    @shardc.function(mesh=LINE, in_placements={"c": {"data": S(0)}})
    def h(a, /, b=3.0, *, c):
        return a - b * c

    assert_same(h(x, c=y), x - 3 * y)
    assert_same(h(x, b=z, c=y), x - z * y)


@pytest.mark.parametrize(
    "how", [{"static_argnames": "mode"}, {"static_argnums": 1}, {"static_argnames": ("mode", "power")}]
)
def test_static_arguments(how):
    def f(x, mode, power=2):
        return x**power if mode == "power" else -x

    g = shardc.function(f, mesh=LINE, **how)
    for mode in ("power", "minus", "power"):
        assert_same(g(arange(8), mode), f(arange(8), mode))
    assert plans_of(g) == 2


def test_arrays_of_the_closure_are_arguments_of_the_plan():
    table, scalar = jnp.asarray(arange(8, 16)), jnp.float32(3)

    @shardc.function(mesh=LINE, in_placements={"x": {"data": S(0)}})
    def f(x):
        return (x @ table) * scalar

    plan = f.plan(arange(8, 8))
    assert plan.program.in_paths == ("x", "closure/0")
    assert len(plan.inputs) == 2
    assert_same(f(arange(8, 8)), (arange(8, 8) @ arange(8, 16)) * np.float32(3))
    assert "closure/0" not in str(plan.in_placements)


def test_weak_types_and_python_scalars():
    def f(x, factor):
        return x * factor, factor + 1

    g = shardc.function(f, mesh=LINE, in_placements={"x": {"data": S(0)}})
    half = jnp.arange(8, dtype=jnp.bfloat16)
    for x, factor in ((half, 2.5), (half, np.float32(2.5)), (jnp.arange(8), 3), (jnp.arange(8), True), (half, 1j)):
        got, want = g(x, factor), jax.jit(f)(x, factor)
        assert_same(got, want)
        assert [a.weak_type for a in got] == [a.weak_type for a in want]
    assert plans_of(g) == 5
    assert_same(g(half, 7.0), jax.jit(f)(half, 7.0))
    assert plans_of(g) == 5  # a number is an argument, not a constant


def test_numpy_uncommitted_and_committed_arrays_give_the_same():
    @shardc.function(mesh=LINE, in_placements={"x": {"data": S(0)}})
    def f(x):
        return x * 2, x.sum()

    x = arange(16)
    want = (x * 2, x.sum())
    assert_same(f(x), want)
    assert_same(f(jnp.asarray(x)), want)
    assert_same(f(shardc.put(x, LINE, Placement({"data": S(0)}))), want)
    assert plans_of(f) == 1
    with pytest.raises(shardc.ArgumentError, match=r"x f32\[16\]: on device 3"):
        f(jax.device_put(x, jax.devices()[3]))
    other = Mesh(np.asarray(jax.devices()[::-1]), ("data",))
    with pytest.raises(shardc.ArgumentError, match=r"x f32.*: data=8 on devices 0-7"):
        f(jax.device_put(x, NamedSharding(other, PartitionSpec("data"))))


def test_a_pinned_argument_that_arrives_elsewhere_is_boxed_at_entry():
    @shardc.function(mesh=LINE, in_placements={"x": {"data": S(0)}}, out_placements={"data": S(0)})
    def f(x):
        return x * 2

    x = arange(8, 16)
    here, there = Placement({"data": S(0)}), Placement({"data": S(1)})
    moved = shardc.put(x, LINE, there)
    plan = f.plan(moved)
    (only,) = plan.collectives
    assert (only.kind, only.axes, only.source) == ("all_to_all", ("data",), "argument x")
    assert only.bytes == 7 * x.nbytes // 64
    assert plan.inputs == (there,)
    assert f.compile(moved).audit().ok
    assert_same(f(moved), x * 2)
    assert not f.plan(shardc.put(x, LINE, here)).collectives
    assert not f.plan(x).collectives, "an array that lives nowhere yet is put where the pin wants it"
    assert f.plan(x).inputs == (here,)


def test_an_unpinned_committed_array_keeps_its_placement():
    @shardc.function(mesh=LINE)
    def f(x):
        return x * 2

    there = Placement({"data": S(1)})
    plan = f.plan(shardc.put(arange(8, 16), LINE, there))
    assert plan.inputs == (there,)


def test_explicit_axes_and_foreign_mesh_objects():
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    assert "Explicit" in str(mesh.axis_types)
    x = arange(8, 4)
    explicit = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data", "model")))

    @shardc.function(mesh=mesh, in_placements={"x": {"data": S(0), "model": S(1)}})
    def f(x):
        return x @ x.T, x.sum(0)

    want = (x @ x.T, x.sum(0))
    assert_same(f(x), want)
    assert_same(f(explicit), want)
    assert plans_of(f) == 1
    assert all(a.sharding.mesh.shape == mesh.shape for a in f(explicit))


def test_typed_prng_keys():
    def f(key, keys):
        a, b = jax.random.split(key)
        return jax.random.normal(a, (16, 3)), jax.random.key_data(b), jax.vmap(jax.random.uniform)(keys), b

    key, keys = jax.random.key(7), jax.random.split(jax.random.key(1), 8)
    g = shardc.function(f, mesh=LINE, in_placements={"keys": {"data": S(0)}})
    got, want = g(key, keys), jax.jit(f)(key, keys)
    for a, b in zip(got[:3], want[:3], strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(jax.random.key_data(got[3]), jax.random.key_data(want[3]))


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.bool_, jnp.bfloat16, np.float16, np.complex64])
def test_dtypes(dtype):
    def f(x, y):
        both = x * y if dtype != np.bool_ else x & y
        return both, both.sum(0), x.max(1) if dtype != np.complex64 else x.real, x.real.astype(np.float32), x == y

    x, y = (np.random.default_rng(i).integers(0, 3, (8, 5)).astype(dtype) for i in range(2))
    g = shardc.function(f, mesh=MESH, in_placements={"x": {"data": S(0)}, "y": {"data": S(0), "model": S(1)}})
    assert_same(g(x, y), jax.jit(f)(x, y))
    assert g.compile(x, y).audit().ok


@pytest.mark.parametrize("shape", [(), (1,), (0,), (1, 1), (0, 5), (5, 0), (3, 1)])
def test_scalars_and_dimensions_of_size_zero_and_one(shape):
    def f(x):
        return x + 1, x.sum(), x[None] * jnp.ones((3, *shape), x.dtype), x.reshape(-1), (x * x).sum(0) if shape else x

    pins = [{}] + [{"data": S(d)} for d in range(len(shape))] + [{"data": P}]
    for pin in pins:
        g = shardc.function(f, mesh=MESH, in_placements={"x": pin})
        assert_same(g(arange(*shape) + 1), jax.jit(f)(arange(*shape) + 1))


# --- placements in and out -----------------------------------------------------------------------------------------

SPLIT = Placement({"data": S(0), "model": S(1)})


@pytest.mark.parametrize(
    "leaf",
    [
        {"data": S(0), "model": S(1)},
        {"data": S(-2), "model": S(-1)},
        SPLIT,
        PartitionSpec("data", "model"),
        NamedSharding(MESH, PartitionSpec("data", "model")),
        (S(0), S(1)),
    ],
    ids=repr,
)
def test_all_forms_of_a_leaf(leaf):
    def f(x, y):
        return x + y

    x = arange(8, 4)
    forms = [{"x": leaf}, (leaf,), (leaf, AUTO), leaf, (leaf, None)]
    for form in forms:
        g = shardc.function(f, mesh=MESH, in_placements=form, out_placements=leaf)
        plan = g.plan(x, x)
        assert (plan.inputs[0], plan.out_placements) == (SPLIT, SPLIT), form
        out = g(x, x)
        assert out.sharding.spec == PartitionSpec("data", "model")
        assert_same(out, x + x)


def test_some_axes_may_be_left_open():
    def f(x, w):
        return x @ w

    g = shardc.function(f, mesh=MESH, in_placements={"x": {"data": S(0), ...: AUTO}, "w": {"model": S(1), ...: AUTO}})
    plan = g.plan(arange(8, 4), arange(4, 6))
    assert plan.inputs[0]["data"] == S(0)
    assert plan.inputs[1]["model"] == S(1)
    assert_same(g(arange(8, 4), arange(4, 6)), arange(8, 4) @ arange(4, 6))


def test_forms_of_out_placements():
    def f(x):
        return {"a": x * 2, "b": (x.sum(0), None, x.T)}

    forms = [
        {"a": {"data": S(0)}, "b": AUTO},
        {"a": {"data": S(0)}, "b": (AUTO, None, {"data": S(1)})},
        shardc.rules({"a": {"data": S(0)}, "b/2": {"data": S(1)}}),
        {"a": PartitionSpec("data")},
    ]
    x = arange(8, 4)
    for form in forms:
        g = shardc.function(f, mesh=MESH, out_placements=form)
        assert g.plan(x).out_placements["a"] == Placement({"data": S(0)}), form
        assert g.plan(x).out_placements["b"][1] is None
        assert_same(g(x), f(x))
    assert g(x)["b"][1] is None


def test_auto_results_are_plain_arrays():
    def f(x, y):
        return x.sum(0), x @ y, x[:5]

    g = shardc.function(f, mesh=LINE, in_placements={"x": {"data": S(0)}, "y": {"data": S(0)}})
    x, y = arange(16, 16), arange(16, 3)
    out = g(x, y)
    assert all(isinstance(a, jax.Array) for a in out)
    assert_same(out, f(x, y))


def test_uneven_and_partial_values_at_the_border():
    pins = ({"data": S(0)}, {"data": P, "model": S(0)})

    @shardc.function(mesh=MESH, in_placements={"x": {"data": S(0)}}, out_placements=pins)
    def f(x):
        return x * 2, x.sum(0)

    x = arange(7, 3)
    double, total = f(x)
    assert isinstance(double, PlacedArray) and isinstance(total, PlacedArray)
    assert (double.shape, double.dtype, double.placement) == ((7, 3), np.float32, Placement({"data": S(0)}))
    assert (total.shape, total.placement) == ((3,), Placement({"data": P(), "model": S(0)}))
    assert_same((double, total), (x * 2, x.sum(0)))
    assert isinstance(double.to_jax(), jax.Array)
    assert_same((double.to_jax(), total.to_jax()), (x * 2, x.sum(0)))
    assert f.plan(x).collectives == ()
    assert f.compile(x).audit().ok
    assert_same(f(double), (x * 4, 2 * x.sum(0)))  # fed back in
    assert plans_of(f) == 1
    assert len(jax.tree.leaves((double, total))) == 2


def test_placed_arrays_go_into_functions_without_pins():
    @shardc.function(mesh=MESH, out_placements={"data": P})
    def partial_sum(x):
        return x.sum(0)

    @shardc.function(mesh=MESH)
    def twice(x, y):
        return x * 2 + y

    x = arange(16, 5)
    total = partial_sum(shardc.put(x, MESH, Placement({"data": S(0)})))
    assert total.placement == Placement({"data": P()})
    plan = twice.plan(total, arange(5))
    assert plan.inputs[0] == total.placement
    assert_same(twice(total, arange(5)), x.sum(0) * 2 + arange(5))


def test_a_plain_array_as_a_partial_argument_is_its_logical_value():
    @shardc.function(mesh=MESH, in_placements={"x": {"data": P, "model": S(0)}}, out_placements={})
    def f(x):
        return x * 3

    x = arange(5)
    assert_same(f(x), x * 3)
    assert_same(f(jnp.asarray(x)), x * 3)
    assert [c.kind for c in f.plan(x).collectives] == ["all_reduce", "all_gather"] or f.plan(x).bytes_per_device


def test_put_takes_the_plans_placements():
    def f(params, batch):
        return jax.tree.map(lambda p: (batch @ p).sum(), params)

    g = shardc.function(
        f, mesh=MESH,
        in_placements={"params": shardc.rules({"a": {"model": S(1)}, "*": {"data": S(0)}}), "batch": {"data": S(0)}},
    )  # fmt: skip
    params, batch = {"a": arange(4, 6), "b": arange(4, 3), "n": None}, arange(8, 4)
    plan = g.plan(params, batch)
    whole = shardc.put((params, batch), MESH, plan.in_placements)
    some = shardc.put(params, MESH, plan.in_placements["params"])
    attribute = shardc.put(params, MESH, plan.in_placements.params)
    assert some["a"].sharding.spec == whole[0]["a"].sharding.spec == PartitionSpec(None, "model")
    assert_same(some, params)
    assert_same(attribute, params)
    assert_same(g(*whole), f(params, batch))
    assert_same(g(some, batch), f(params, batch))
    assert plans_of(g) == 1
    uneven = shardc.put(arange(5), MESH, Placement({"data": S(0)}))
    assert isinstance(uneven, PlacedArray)
    assert_same(uneven, arange(5))
    partial_value = shardc.put({"x": uneven, "s": "text"}, MESH, {"x": Placement({"model": P()}), "s": None})
    assert_same(partial_value["x"], arange(5))
    assert partial_value["s"] == "text"


def test_plans_need_no_devices():
    mesh = shardc.make_mesh(data=64, model=32, topology="v5p:16x16x8")
    assert isinstance(mesh, AbstractMesh)

    @shardc.function(mesh=mesh, in_placements=({"data": S(0)}, {"model": S(1)}), out_placements={"data": S(0)})
    def f(x, w):
        return x @ w

    x, w = jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16), jax.ShapeDtypeStruct((4096, 8192), jnp.bfloat16)
    plan = f.plan(x, w)
    (gather,) = plan.collectives
    assert (gather.kind, gather.axes) == ("all_gather", ("model",))
    assert gather.bytes == 8192 // 64 * 8192 * 2 * 31 // 32
    with pytest.raises(shardc.MeshError, match="without devices"):
        f(jnp.zeros(x.shape, x.dtype), jnp.zeros(w.shape, w.dtype))


def init(key):
    keys = jax.random.split(key, 3)
    return {
        "w": jax.random.normal(keys[0], (16, 8)),
        "b": jax.random.truncated_normal(keys[1], -1, 1, (24, 12)),
        "u": jax.random.permutation(keys[2], 8)[:, None] * jnp.ones((8, 8)),
    }


@pytest.mark.parametrize("placements", [{"data": S(0)}, {"data": S(1), "model": S(0)}, {"model": S(0), "data": S(0)}])
def test_sharded_init_is_bit_exact(placements):
    g = shardc.function(init, mesh=MESH, out_placements=placements)
    key = jax.random.key(3)
    out = g(key)
    assert_same(out, jax.jit(init)(key))
    wanted = Placement(placements)
    assert all(Placement.from_sharding(x.sharding) == wanted for x in out.values())


# --- donation and loops --------------------------------------------------------------------------------------------


def train_step(params, opt_state, batch):
    def loss(params):
        return ((jnp.tanh(batch @ params["up"]) @ params["down"]) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(params)
    updates, opt_state = optax.adamw(1e-2).update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


def start():
    rng = np.random.default_rng(0)
    params = {"up": rng.normal(size=(8, 16)).astype(np.float32), "down": rng.normal(size=(16, 8)).astype(np.float32)}
    return params, jax.jit(optax.adamw(1e-2).init)(params), rng.normal(size=(32, 8)).astype(np.float32)


@pytest.mark.parametrize("pinned", [True, False])
def test_a_training_loop_plans_once_and_donates(pinned):
    weights = shardc.rules({"*up": {"model": S(1)}, "*down": {"model": S(0)}})
    places = {"params": weights, "opt_state": weights} if pinned else {}
    f = shardc.function(
        train_step, mesh=MESH, in_placements=places | {"batch": {"data": S(0)}}, donate_argnames=("params", "opt_state")
    )
    params, opt_state, batch = start()
    want = jax.tree.map(jnp.copy, (params, opt_state))
    first = f.plan(params, opt_state, batch)
    assert first.out_placements[0] == first.in_placements["params"]
    assert first.out_placements[1] == first.in_placements["opt_state"]
    for i in range(3):
        before = (params, opt_state)
        params, opt_state, loss = f(params, opt_state, batch)
        *want, want_loss = jax.jit(train_step)(*want, batch)
        assert_same((params, opt_state, loss), (*want, want_loss), rtol=1e-5, atol=1e-6)
        assert plans_of(f) == 1
        assert i == 0 or all(x.is_deleted() for x in jax.tree.leaves(before))
    assert f.plan(params, opt_state, batch) is first
    if pinned:
        assert params["up"].sharding.spec == PartitionSpec(None, "model")


def test_donated_placed_arrays_keep_their_placement():
    @shardc.function(mesh=LINE, in_placements={"state": {"data": S(0)}}, donate_argnames="state")
    def f(state):
        return state * 2

    x = arange(13)
    once = f(x)
    assert isinstance(once, PlacedArray)
    twice = f(once)
    assert once.physical.is_deleted()
    assert_same(twice, x * 4)
    assert plans_of(f) == 1


def test_donating_arguments_that_no_result_can_take_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f = shardc.function(lambda x: x.sum(), mesh=LINE, in_placements={"x": {"data": S(0)}}, donate_argnums=0)
        assert_same(f(arange(16)), arange(16).sum())


def test_x64_and_precision_make_new_plans():
    @shardc.function(mesh=LINE, in_placements={"x": {"data": S(0)}})
    def f(x):
        return x * 2.5

    x = arange(8)
    assert f(x).dtype == np.float32
    with jax.enable_x64(True):
        assert_same(f(x.astype(np.float64)), x.astype(np.float64) * 2.5)
        assert_same(f(x), x * np.float32(2.5))
    assert plans_of(f) == 3
    with jax.default_matmul_precision("float32"):
        f(x)
    assert plans_of(f) == 4
    f(x)
    assert plans_of(f) == 4


def test_compiling_and_all_later_calls_share_one_compilation(monkeypatch):
    lowered = []
    run = Lowering.run
    monkeypatch.setattr(Lowering, "run", lambda self, *args: lowered.append(1) or run(self, *args))

    @shardc.function(mesh=LINE, in_placements={"batch": {"data": S(0)}}, donate_argnames="w")
    def f(w, batch):
        return w + batch.sum(0)

    w, batch = arange(8), arange(16, 8)
    f.compile(w, batch)
    state = f(w, batch)
    for given in (batch, jnp.asarray(batch), shardc.put(batch, LINE, {"data": S(0)})):
        state = f(state, given)
    assert_same(state, arange(8) + 4 * batch.sum(0))
    assert len(lowered) == 1
    assert_same(w, arange(8))  # NumPy's own memory is never given away


def test_numpy_arrays_are_put_in_the_type_that_jax_has_for_them():
    """JAX's device_put takes a float64 array for float32 without converting it, once it has put one under x64."""
    x = np.arange(8.0)
    for wide in (False, True, False):
        with jax.enable_x64(wide):
            for placement in ({"data": S(0)}, {"data": P}):
                put = shardc.put(x, LINE, placement)
                physical = put.physical if isinstance(put, PlacedArray) else put
                want = np.float64 if wide else np.float32
                assert {put.dtype, physical.addressable_shards[0].data.dtype} == {np.dtype(want)}
                assert_same(shardc.function(lambda x: x * 3, mesh=LINE)(put), x.astype(want) * want(3))


# --- inside other things -------------------------------------------------------------------------------------------


def test_rules_for_one_of_several_results_match_inside_it():
    def f(x):
        return x.sum(), {"w": x, "b": x[0]}

    g = shardc.function(f, mesh=MESH, out_placements=(None, shardc.rules({"w": {"data": S(0)}, "b": {}})))
    assert g.plan(arange(8, 4)).out_placements[1] == {"w": Placement({"data": S(0)}), "b": Placement()}


def test_without_a_mesh_it_is_the_function_itself():
    def f(x):
        return x

    assert shardc.function(f, mesh=None, in_placements={"x": {"data": S(0)}}, donate_argnames="x") is f
    assert shardc.function(mesh=None)(f) is f


def test_inside_an_outer_transformation_it_is_the_plain_function():
    def f(x, w):
        h = shardc.constrain(jnp.tanh(x @ w), {"data": S(0)})
        return (h**2).sum()

    g = shardc.function(f, mesh=MESH, in_placements={"x": {"data": S(0)}, "w": {"model": S(1)}})
    x, w = arange(8, 4) / 32, arange(4, 6) / 24
    assert_same(jax.jit(g)(x, w), f(x, w), rtol=1e-6)
    assert_same(jax.grad(g, argnums=1)(x, w), jax.grad(f, argnums=1)(x, w), rtol=1e-5)
    assert_same(jax.jit(jax.value_and_grad(g))(x, w), jax.value_and_grad(f)(x, w), rtol=1e-5)
    xs = np.stack([x, x + 1])
    assert_same(jax.vmap(g, (0, None))(xs, w), jax.vmap(f, (0, None))(xs, w), rtol=1e-5)
    assert plans_of(g) == 0


def test_a_partial_pin_is_an_error_inside_an_outer_jit():
    g = shardc.function(lambda x: x * 2, mesh=MESH, in_placements={"x": {"data": P}})
    with pytest.raises(shardc.PlacementError, match=r"x of .* is pinned at .*in an outer jit, grad or vmap"):
        jax.jit(g)(arange(4))


def test_constrain_pins_inside():
    def f(x, w):
        return shardc.constrain(x @ w, {"data": S(1)}) + 1

    g = shardc.function(f, mesh=LINE, in_placements={"x": {"data": S(0)}, "w": {}}, out_placements={})
    x, w = arange(16, 4), arange(4, 8)
    plan = g.plan(x, w)
    assert [c.dst for c in plan.collectives][-1:] == ["{}"]
    assert any(c.src == "{data: S(1)}" or c.dst == "{data: S(1)}" for c in plan.collectives)
    assert_same(g(x, w), x @ w + 1)
    assert f(x, w).shape == (16, 8)  # and on one device it is the identity
    ours = [e for e in plan.boxed.jaxpr.eqns if e.primitive.name == "constrain"]
    assert [plan.boxed.placements[e.outvars[0]] for e in ours] == [Placement({"data": S(1)})]


def test_constrain_under_grad_vmap_scan_and_remat():
    def layer(h, w):
        h = shardc.constrain(jnp.tanh(h @ w), {"data": S(0)})
        return h, shardc.constrain(h.sum(1), {"data": S(0)})

    def f(x, ws):
        out, sums = jax.lax.scan(jax.checkpoint(layer), x, ws)
        rows = jax.vmap(lambda row: shardc.constrain(row * 2, {"model": S(0)}))(out)
        return (rows**2).sum() + sums.sum()

    step = jax.value_and_grad(f, argnums=(0, 1))
    g = shardc.function(step, mesh=MESH, in_placements={"x": {"data": S(0)}})
    x, ws = arange(8, 4) / 32, arange(3, 4, 4) / 48
    assert_same(g(x, ws), jax.jit(step)(x, ws), rtol=1e-5, atol=1e-6)
    assert g.compile(x, ws).audit().ok


def test_constrain_with_an_axis_that_the_mesh_has_not():
    g = shardc.function(lambda x: shardc.constrain(x, {"dta": S(0)}), mesh=MESH)
    with pytest.raises(shardc.PlacementError, match=r"Did you mean {'data': S"):
        g(arange(8))


def test_jaxs_own_constraints_are_pins():
    def f(x):
        y = jax.lax.with_sharding_constraint(x * 2, NamedSharding(MESH, PartitionSpec("data", "model")))
        return y.sum()

    g = shardc.function(f, mesh=MESH)
    plan = g.plan(arange(8, 4))
    (eqn,) = [e for e in plan.boxed.jaxpr.eqns if e.primitive.name == "sharding_constraint"]
    assert plan.boxed.placements[eqn.outvars[0]] == SPLIT
    assert_same(g(arange(8, 4)), (arange(8, 4) * 2).sum())


def test_methods():
    class Model:
        def __init__(self, scale):
            self.scale = scale

        @shardc.function(mesh=LINE, in_placements={"x": {"data": S(0)}}, static_argnames="self")
        def __call__(self, x):
            return x * self.scale

        @shardc.function(mesh=LINE, in_placements={"x": {"data": S(0)}})
        def plus(self, x):
            return x + self.scale

    @dataclass(frozen=True)
    class Frozen:
        scale: float

        @shardc.function(mesh=LINE)
        def plus(self, x):
            return x + self.scale

    two, three = Model(2), Model(3)
    x = arange(8)
    assert_same((two(x), three(x), Frozen(2).plus(x), Frozen(3).plus(x=x)), (x * 2, x * 3, x + 2, x + 3))
    with pytest.raises(shardc.ArgumentError, match=r'self: a Model can change, .* static_argnames="self"'):
        two.plus(x)


def test_partial_objects_and_lambdas():
    def f(scale, x):
        return x * scale

    g = shardc.function(partial(f, 3.0), mesh=LINE, in_placements={"x": {"data": S(0)}})
    assert_same(g(arange(8)), arange(8) * 3)
    h = shardc.function(lambda x: -x, mesh=LINE)
    assert_same(h(arange(8)), -arange(8))


def test_a_result_that_is_an_argument_or_a_constant():
    def f(x, y):
        return x, 2.0, jnp.zeros(3), y, x, np.arange(4), 7

    g = shardc.function(f, mesh=LINE, in_placements={"x": {"data": S(0)}})
    assert_same(g(arange(8), arange(4)), jax.jit(f)(arange(8), arange(4)))


def test_compiled_is_called_like_the_function():
    g = shardc.function(lambda x, *, y: x + y, mesh=LINE, in_placements={"x": {"data": S(0)}})
    exe = g.compile(jax.ShapeDtypeStruct((8,), np.float32), y=1.0)
    assert_same(exe(arange(8), y=2.0), arange(8) + 2)
    assert exe.audit().ok
    assert exe.plan is g.plan(arange(8), y=5.0)
    assert "HloModule" in exe.hlo()
    assert exe.memory_stats() is not None


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"in_placements": {"params": {"data": S(0)}}}, "in_placements names .params., which is no argument of f"),
        ({"donate_argnames": ("y",)}, "donate_argnames names 'y', which is no argument"),
        ({"static_argnames": "z"}, "static_argnames names 'z', which is no argument"),
    ],
)
def test_misspelt_arguments(keywords, message):
    def f(x):
        return x

    with pytest.raises(shardc.ArgumentError, match=message):
        shardc.function(f, mesh=LINE, **keywords)


def test_wrong_placements_are_all_reported_at_once():
    g = shardc.function(
        lambda x, y, z: x, mesh=MESH, in_placements={"x": {"dat": S(0)}, "y": {"data": S(2)}, "z": {"data": P}}
    )
    with pytest.raises(shardc.PlacementError) as error:
        g(arange(4), arange(4, 4), np.ones(3, bool))
    text = str(error.value)
    for part in ("x f32[4]: {'dat': S(0)}: the mesh has no axis", "y f32[4,4]: {'data': S(2)}", "z bool[3]: "):
        assert part in text
    assert B != P


def test_numbers_that_are_left_out_are_constants():
    mesh = shardc.make_mesh(data=4, model=2)

    def f(x, axis=0, scale=2.0, train=False):
        y = x.sum(axis) * scale
        return -y if train else y

    x = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    for places in (AUTO, {"x": {}, "scale": {}}, ({}, {}, {})):
        g = shardc.function(f, mesh=mesh, in_placements=places)
        np.testing.assert_allclose(g(x), f(x))
        np.testing.assert_allclose(g(x, scale=3.0), f(x, scale=3.0))
        assert g.plan(x, scale=3.0).program.in_paths == ("x", "scale")
    with pytest.raises(jax.errors.TracerBoolConversionError):
        g(x, train=True)
    assert shardc.function(f, mesh=mesh, static_argnames=("axis", "train"))(x, 1, train=True).shape == (3,)


def test_default_numbers_in_a_tuple_are_static():
    x = np.arange(48.0, dtype=np.complex64).reshape(3, 4, 4)
    got = shardc.function(jnp.fft.fft2, mesh=shardc.make_mesh(a=3))(x)
    np.testing.assert_allclose(got, np.fft.fft2(x), rtol=1e-5)
