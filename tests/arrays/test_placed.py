"""A PlacedArray is the logical array to every reader: each reader's result is compared with that for a plain array."""

import copy
import functools
import io
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from jax.sharding import NamedSharding

import shardc
from shardc import P, PlacedArray, Placement, S, StackedArray
from shardc.arrays.place import put_leaf
from shardc.sbp.layout import physical_shape, physical_spec, plain_placement

MESH = shardc.make_mesh(data=4, model=2)
VALUE = (np.arange(26, dtype=np.float32).reshape(13, 2) - 7) / 4
PLACES = {
    "uneven": {"data": S(0)},
    "twice": {"data": S(0), "model": S(0)},
    "both": {"model": S(0), "data": S(1)},
    "partial": {"data": P, "model": S(0)},
}


def poisoned(value, placement, mesh=MESH):
    """A placed array whose padding is NaN, or a large number for integers."""
    placement = Placement(placement)
    padding = np.nan if np.issubdtype(value.dtype, np.floating) else 77
    sizes = dict(mesh.shape)
    out = np.asarray(put_leaf(value, mesh, placement).physical).copy()
    valid = np.asarray(put_leaf(np.ones_like(value), mesh, placement).physical)
    out[(valid if not placement.partial_axes else np.broadcast_to(valid[:1], valid.shape)) == 0] = padding
    assert out.shape == physical_shape(value.shape, placement, sizes)
    return PlacedArray(jax.device_put(out, NamedSharding(mesh, physical_spec(placement))), value.shape, placement, mesh)


def stacked(value, rows=(6, 7)):
    """The rows of a value on the meshes of two stages."""
    devices = np.array(jax.devices())
    meshes = [jax.sharding.Mesh(devices[i : i + 4], ("data",)) for i in (0, 4)]
    parts = np.split(value, np.cumsum(rows)[:-1])
    return StackedArray([poisoned(v, {"data": S(0)}, m) for v, m in zip(parts, meshes, strict=True)])


def placed(kind, value=VALUE):
    return stacked(value) if kind == "stacked" else poisoned(value, PLACES[kind])


def same(got, want):
    got, want = jax.tree.flatten(got), jax.tree.flatten(want)
    assert got[1] == want[1]
    for x, y in zip(got[0], want[0], strict=True):
        if isinstance(y, str | bytes | type):
            assert x == y
            continue
        assert np.shape(x) == np.shape(y) and jnp.result_type(x) == jnp.result_type(y)
        assert getattr(x, "weak_type", False) == getattr(y, "weak_type", False)
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-6)


def loss(w):
    return jnp.sum(jnp.tanh(w) ** 2)


READERS = {
    "+": lambda x: (x + 1, 1 + x, x + x, np.float32(2) + x, x + VALUE, VALUE + x, x - jnp.ones(2)),
    "@": lambda x: (x.T @ x, VALUE.T @ x, x @ np.ones((2, 3), "f")),
    "==": lambda x: (x == x, x != VALUE, x < 0, x <= 0),
    "unary": lambda x: (-x, +x, abs(x), x**2, 2**x, x % 3, divmod(x, 2), round(x)),
    "methods": lambda x: (x.sum(), x.mean(0), x.max(), x.argmin(), x.reshape(2, 13), x.ravel(), x.astype("int32")),
    "attributes": lambda x: (x.shape, x.ndim, x.size, x.nbytes, x.itemsize, str(x.dtype), x.T, x.real, x.mT),
    "at": lambda x: x.at[12].set(0),
    "indexing": lambda x: (x[0], x[-1, 1], x[3:], x[:, None], x[..., 0], x[np.array([12, 0])], x[x > 0]),
    "iteration": lambda x: (list(x), len(x), [row for row in x if row[0] > 0], 1.5 in x[:, 1]),
    "scalars": lambda x: (float(x[3, 0]), int(x[12, 1]), bool(x[0, 0]), x[1, 1].item(), x.tolist()),
    "format": lambda x: (str(x), f"{x}", f"{x.sum():.3f}"),
    "numpy": lambda x: (np.asarray(x), np.array(x, "float64"), np.mean(x), np.concatenate([x, VALUE]), np.shape(x)),
    "jnp": lambda x: (jnp.asarray(x) + 0, jnp.array(x), jnp.sum(x), jnp.linalg.norm(x), jnp.where(x > 0, x, 0)),
    "jnp, of several": lambda x: (jnp.stack([x, x]), jnp.concatenate([x, VALUE]), jnp.einsum("ij,kj->ik", x, x)),
    "like": lambda x: (jnp.zeros_like(x), jnp.ones_like(x), jnp.full_like(x, 3), jnp.shape(x), jnp.size(x)),
    "lax": lambda x: (jax.lax.scan(lambda c, r: (c + r.sum(), r * c), 0.0, x), jax.lax.map(jnp.sum, x)),
    "jit": lambda x: (jax.jit(loss)(x), jax.jit(lambda p: p["w"] * 2)({"w": x}), jax.jit(lambda: x + 1)()),
    "jit of a constant": lambda x: jax.jit(lambda s: (s * x.T, jnp.multiply(s, x), x[0] * s, x.sum()))(2.0),
    "jit, donated": lambda x: (jax.jit(lambda w: w + 1, donate_argnums=0)(x),),
    "grad": lambda x: (jax.grad(loss)(x), jax.value_and_grad(loss)(x), jax.jit(jax.grad(loss))(x)),
    "hessian": lambda x: jax.hessian(loss)(x),
    "jvp, vjp": lambda x: (jax.jvp(loss, (x,), (x,)), jax.vjp(loss, x)[1](1.0), jax.linearize(loss, x)[0]),
    "vmap": lambda x: (jax.vmap(jnp.sum)(x), jax.vmap(lambda r, s: r * s, (1, None))(x, x[0, 0])),
    "jit of vmap": lambda x: jax.jit(jax.vmap(loss))(x),
    "checkpoint": lambda x: jax.grad(jax.checkpoint(loss))(x),
    "control flow": lambda x: (jax.lax.cond(True, jnp.sin, jnp.cos, x), jax.lax.fori_loop(0, 2, lambda i, c: c + x, x)),
    "eval_shape": lambda x: jax.eval_shape(lambda w: {"a": w.T}, x)["a"].shape,
    "make_jaxpr": lambda x: str(jax.make_jaxpr(loss)(x)),
    "ShapeDtypeStruct": lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype).shape,
    "pure_callback": lambda x: jax.pure_callback(np.negative, jax.eval_shape(lambda: VALUE), x),
    "disable_jit": lambda x: _without_jit(lambda: (x + 1, jnp.sum(x))),
    "tree.map": lambda x: (jax.tree.map(jnp.shape, [x]), jax.tree.map(jnp.exp, {"w": x}), len(jax.tree.leaves((x, x)))),
    "tree, counted": lambda x: [(a.size, a.mean()) for a in jax.tree.leaves({"w": x})],
    "tree.structure": lambda x: str(jax.tree.structure({"w": x})),
    "copy": lambda x: (copy.copy(x) + 0, copy.deepcopy(x) + 0, x.copy() + 0),
    "pickle": lambda x: pickle.loads(pickle.dumps({"w": x})),
    "np.save": lambda x: _saved(x),
    "device_get": lambda x: (jax.device_get(x), type(jax.device_get(x))),
    "device_put": lambda x: (jax.device_put(x), jax.device_put(x, jax.devices()[3]), jax.device_put(x, on_two(x))),
    "block_until_ready": lambda x: (jax.block_until_ready(x) + 0, x.block_until_ready() * 1, x.is_deleted()),
    "isinstance": lambda x: (isinstance(x, jax.Array), isinstance(x, jnp.ndarray), jnp.isscalar(x), x.committed),
    "hash": lambda x: _error(lambda: hash(x)),
    "errors": lambda x: (_error(lambda: bool(x)), _error(lambda: float(x)), _error(lambda: x + "text")),
    "assignment": lambda x: _error(lambda: x.__setitem__(0, 1)),
    "flax to_bytes": lambda x: serialization.to_bytes({"w": x}),
    "flax from_bytes": lambda x: serialization.from_bytes({"w": x}, serialization.to_bytes({"w": jnp.asarray(VALUE)})),
    "flax to_state_dict": lambda x: jax.tree.map(jnp.sin, serialization.to_state_dict([x])),
    "nnx": lambda x: _through_nnx(x),
    "optax": lambda x: (optax.tree.norm({"w": x}), optax.tree.add({"w": x}, {"w": x})),
    **{
        f"optax {name}": functools.partial(lambda make, x: _updated(make(), x), make)
        for name, make in {
            "adamw": lambda: optax.adamw(0.1),
            "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
            "muon": lambda: optax.contrib.muon(0.1),
            "masked": lambda: optax.masked(optax.sgd(0.1), lambda p: jax.tree.map(lambda a: a.ndim > 1, p)),
        }.items()
    },
}  # fmt: skip
SOME = "+", "jnp", "jit", "numpy", "tree, counted", "pickle", "indexing", "device_put"


def _without_jit(f):
    with jax.disable_jit():
        return f()


def _saved(x):
    file = io.BytesIO()
    np.save(file, x)
    file.seek(0)
    return np.load(file)


def on_two(x):
    return NamedSharding(jax.make_mesh((2,), ("x",)), jax.P(None, "x"))


def _error(f):
    with pytest.raises((TypeError, ValueError)) as found:
        f()
    return f"{found.type.__name__}: {found.value}".replace("PlacedArray", "jaxlib._jax.ArrayImpl")


def _updated(optimizer, x):
    params = {"w": x, "b": jnp.ones(2)}
    state = optimizer.init(params)
    updates, state = optimizer.update(jax.tree.map(jnp.cos, params), state, params)
    return optax.apply_updates(params, updates), state


def _through_nnx(x):
    module = nnx.Linear(13, 2, rngs=nnx.Rngs(0))
    module.kernel[...] = x
    graph, state = nnx.split(module)
    again = nnx.merge(graph, jax.tree.map(lambda a: a * 2, state))
    return again(VALUE.T), nnx.to_pure_dict(state)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("reader", READERS)
def test_every_reader_gets_the_logical_array(reader):
    plain = jax.device_put(VALUE, NamedSharding(MESH, jax.P()))
    same(READERS[reader](placed("uneven")), READERS[reader](plain))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["twice", "both", "partial", "stacked"])
def test_however_it_is_placed(kind):
    for reader in SOME:
        same(READERS[reader](placed(kind)), READERS[reader](jnp.asarray(VALUE)))


def test_a_read_that_changes_nothing_copies_nothing():
    x = placed("uneven")
    assert jnp.asarray(x) is x and jax.tree.leaves({"w": x})[0] is x
    assert isinstance(x.copy(), PlacedArray) and isinstance(copy.deepcopy(stacked(VALUE)), StackedArray)
    assert x.copy().physical is not x.physical


def test_where_a_value_is_read_it_is_still_split_if_it_can_be():
    shape, sizes = (13, 8, 6), {"data": 4, "model": 2}
    for placement, want in [
        ({"data": S(0)}, "{data: S(1)}"),
        ({"data": S(0), "model": S(0)}, "{data: S(1), model: S(1)}"),
        ({"data": S(2)}, "{data: S(1)}"),
        ({"model": S(0), "data": S(1)}, "{data: S(1), model: S(1)}"),
        ({"model": S(2), "data": S(0)}, "{data: S(1), model: S(2)}"),
        ({"data": P, "model": S(1)}, "{model: S(1), data: S(1)}"),
    ]:
        assert str(plain_placement(shape, Placement(placement), sizes)) == want
    assert plain_placement((13,), Placement({"data": S(0)}), sizes) == Placement()
    x = shardc.put(np.ones((13, 8), "f"), MESH, {"data": S(0)})
    assert x.sharding == (x + 1).sharding == jax.jit(jnp.sin)(x).sharding == NamedSharding(MESH, jax.P(None, "data"))
    assert x.to_jax().sharding.is_fully_replicated and not x.is_fully_replicated and x.is_fully_addressable
    assert [s.data.shape for s in x.addressable_shards] == [(13, 2)] * 8
    assert jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding).sharding.shard_shape(x.shape) == (13, 2)


def test_keys_and_small_types():
    keys = jax.random.split(jax.random.key(0), 13)
    x = shardc.put(keys, MESH, {"data": S(0)})
    assert isinstance(x, PlacedArray) and x.dtype == keys.dtype
    same(jax.vmap(jax.random.bits)(x), jax.vmap(jax.random.bits)(keys))
    same(jax.random.key_data(x[12]), jax.random.key_data(keys[12]))
    for dtype in ("int4", "int2", "bool", "uint8", "bfloat16", "float8_e4m3fn"):
        value = jnp.arange(13).astype(dtype)
        same(jnp.flip(shardc.put(value, MESH, {"data": S(0)})), jnp.flip(value))


def test_a_deleted_array_says_its_own_shape():
    for x in (placed("uneven"), stacked(VALUE)):
        assert not x.is_deleted()
        x.delete()
        assert x.is_deleted()
        for read in (np.asarray, jnp.sum, lambda x: x + 1, copy.copy):
            with pytest.raises(RuntimeError, match=r"Array has been deleted with shape=float32\[13,2\]"):
                read(x)


def test_under_another_mesh_and_inside_a_trace():
    x = placed("uneven")
    with jax.set_mesh(jax.make_mesh((2, 4), ("a", "b"))):
        same(np.asarray(x.to_jax()), VALUE)
        same(pickle.loads(pickle.dumps(x)), jnp.asarray(VALUE))
    for f in (jax.jit(lambda s: x[12] * s), jax.vmap(lambda s: x[12] * s), jax.grad(lambda s: (x[12] * s).sum())):
        same(f(jnp.ones(2))[0], VALUE[12, 0] * np.ones(()) if f(jnp.ones(2)).ndim == 1 else VALUE[12])


@pytest.mark.parametrize("kind", ["uneven", "partial"])
def test_a_function_closes_over_it(kind):
    x = placed(kind)
    f = shardc.function(lambda y: (y * x + jnp.sum(x), x.T @ y), mesh=MESH, in_placements=({"data": S(0)},))
    same(f(VALUE), (VALUE * VALUE + VALUE.sum(), VALUE.T @ VALUE))
    assert f.compile(VALUE).audit().ok
    same(jax.jit(lambda y: f(y * 1))(VALUE), (VALUE * VALUE + VALUE.sum(), VALUE.T @ VALUE))


def test_functions_tell_shapes_apart_whose_pieces_are_alike():
    f = shardc.function(lambda x: x.sum(), mesh=MESH, in_placements=({"data": S(0)},))
    for n in (13, 14, 15, 14, 13, 13, 15):
        assert f(shardc.put(np.ones((n, 2), "f"), MESH, {"data": S(0)})) == 2 * n


def test_weak_types_come_and_go():
    f = shardc.function(lambda x: x * 2, mesh=MESH, in_placements=({"data": S(0)},), out_placements={"data": S(0)})
    x = jax.lax.full((13,), 3.0)
    assert x.weak_type
    y = f(f(x))
    assert isinstance(y, PlacedArray) and y.weak_type and (y + jnp.bfloat16(1)).dtype == "bfloat16"
    assert f(f(np.ones(13, "f"))).weak_type is False


def test_no_gather_in_a_loop(monkeypatch):
    """State that stays in a training loop is passed in pieces, its buffers donated."""
    reads = []
    monkeypatch.setattr(PlacedArray, "read", lambda self, *args: reads.append(self))
    rows = {"data": S(0)}
    step = shardc.function(
        lambda p: jax.tree.map(lambda x: x + 1, p), mesh=MESH, in_placements=rows, out_placements=rows,
        donate_argnames="p",
    )  # fmt: skip
    state = step([np.zeros((13, 2), "f"), np.zeros(7, "f")])
    for _ in range(3):
        last, state = state, step(state)
        assert all(x.is_deleted() for x in last) and not any(x.is_deleted() for x in state)
    assert not reads and step.plan(state).collectives == ()
    np.testing.assert_array_equal(state[1], np.full(7, 4))


@pytest.mark.filterwarnings("ignore:Sharding info not provided")  # orbax, of a checkpoint without a target
def test_orbax_saves_and_restores_the_logical_array(tmp_path):
    checkpoint = pytest.importorskip("orbax.checkpoint")
    tree = {name: placed(name) for name in (*PLACES, "stacked")} | {"plain": jnp.ones(3)}
    want = jax.tree.map(jnp.asarray, dict.fromkeys((*PLACES, "stacked"), VALUE) | {"plain": np.ones(3, "f")})
    with checkpoint.StandardCheckpointer() as saver:
        saver.save(tmp_path / "it", tree)
        saver.wait_until_finished()
        two = NamedSharding(jax.make_mesh((2,), ("rows",)), jax.P(None))
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=two), tree)
        for found in (saver.restore(tmp_path / "it", target), saver.restore(tmp_path / "it", tree)):
            same(found, want)
    with checkpoint.PyTreeCheckpointer() as reader:
        same(jax.tree.map(jnp.asarray, reader.restore(tmp_path / "it")), want)
    again = shardc.put(found, MESH, {"data": S(0)})
    assert isinstance(again["uneven"], PlacedArray)
    same(jax.tree.map(lambda x: x + 0, again), want)


def aligned(shape):
    """A NumPy array that XLA:CPU can read in place."""
    size = int(np.prod(shape)) * 4
    memory = np.zeros(size + 64, np.uint8)
    at = -memory.ctypes.data % 64
    return memory[at : at + size].view(np.float32).reshape(shape)


@pytest.mark.parametrize("placement", [{}, {"data": S(0)}, {"data": P}])
def test_the_caller_may_write_to_what_was_put(placement):
    x = aligned((64, 64))
    x[:] = 1
    placed = shardc.put(x, shardc.make_mesh(data=8), placement)
    x[:] = 2
    np.testing.assert_array_equal(np.asarray(placed), np.ones((64, 64)))


@pytest.mark.parametrize("pipeline", [None, shardc.Pipeline()])
def test_the_caller_may_write_to_what_a_call_was_given(pipeline):
    def loss(w, x):
        y = x.sum()
        for _ in range(30):
            w = jnp.tanh(w @ w)
        return y + 0 * shardc.stage_boundary(w).sum() + w.mean()

    mesh = shardc.make_mesh(data=8) if pipeline is None else shardc.make_mesh(pipe=2, data=2)
    fn = loss if pipeline is None else shardc.accumulate(loss, microbatches=2, in_axes=(None, 0))
    f = shardc.function(fn, mesh=mesh, pipeline=pipeline)
    w, x = np.zeros((256, 256), np.float32), aligned((64, 64))
    for _ in range(10):
        x[:] = 1
        got = f(w, x)
        x[:] = 2
        assert float(got) == (64 * 64 if pipeline is None else 64 * 32)
