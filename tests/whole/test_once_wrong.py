"""What the runner over JAX's own cases (tests/harnesses) found wrong, each in its smallest form."""

from __future__ import annotations

import pickle
from copy import copy, deepcopy
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardc
from shardc import P, S, equinox, flax

pytestmark = pytest.mark.usefixtures("compiled_fast")

MESH = shardc.make_mesh(a=2)


def test_a_single_update_leaves_the_rows_of_other_devices_alone():
    """XLA made the piece that the scatter reads, at -1 where it drops, a slice of the whole operand at 4 - 1."""
    numbers = lax.ScatterDimensionNumbers((), (0,), (0,))

    def put(x, u):
        return lax.scatter(shardc.constrain(x, {"a": S(0)}), np.array([0]), u, numbers, unique_indices=True)

    x = np.arange(8.0, dtype=np.float32)
    f = shardc.function(put, mesh=MESH, in_placements=({}, {}), out_placements={"a": P})
    assert [eqn.params["dst"]["a"] for eqn in f.plan(x, x[5]).boxed.jaxpr.eqns if "dst" in eqn.params] == [S(0), P()]
    np.testing.assert_array_equal(np.asarray(f(x, x[5])), [5, 1, 2, 3, 4, 5, 6, 7])


STARTS = (np.array([10]), np.array([10], np.uint8), np.array([-9]))
WINDOW = lax.GatherDimensionNumbers((0,), (), (0,))


@pytest.mark.parametrize("start", STARTS, ids=str)
@pytest.mark.parametrize("mode", ["dynamic_slice", "clip", "promise_in_bounds", "fill"])
def test_a_slice_that_starts_too_late_is_moved_before_it_is_split(start, mode):
    """XLA made one slice of the slice and of the boxing, and clamped it as if it were the boxing's."""

    def cut(x, start):
        if mode == "dynamic_slice":
            return lax.dynamic_slice(x, start, (8,))
        return lax.gather(x, start, WINDOW, (8,), mode=mode, fill_value=-1)

    x = np.arange(13.0, dtype=np.float32)
    f = shardc.function(cut, mesh=MESH, in_placements=({}, {}), out_placements={"a": S(0)})
    np.testing.assert_array_equal(f(x, start), jax.jit(cut)(x, start))


def test_empty_results_can_be_read():
    for pin in ({"a": S(0)}, {"a": P}):
        f = shardc.function(lambda x: 2 * x, mesh=MESH, out_placements=pin)
        for shape in ((4, 0), (3, 0), (0, 3)):
            got = f(np.ones(shape, np.float32))
            assert np.asarray(got).shape == shape
    assert jax.typeof(shardc.function(lambda: 2 * np.zeros((4, 0)), mesh=MESH, out_placements={"a": S(0)})()).size == 0


def test_a_transform_of_rows_may_be_gathered_along_another_dimension():
    """XLA:CPU laid the transform out as the all-gather wanted it, and its kernel failed."""
    x = np.random.default_rng(0).normal(size=(4, 6, 5)).astype(np.complex64)
    f = shardc.function(lambda x: jnp.fft.fft(x), mesh=MESH, in_placements=({"a": S(1)},), out_placements={})
    np.testing.assert_allclose(f(x), jnp.fft.fft(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64, jnp.bfloat16, jnp.float16], ids=lambda t: t.__name__)
@pytest.mark.parametrize("op", ["max", "min"])
def test_what_is_no_number_passes_through_partial_maxima(op, dtype):
    """Of a number and what is none an all-reduce takes the number."""
    with jax.enable_x64(True):
        limits = jnp.finfo(dtype)
        x = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, limits.max, limits.min, limits.tiny, -limits.tiny, 1.5, -1.5]
        x = jnp.asarray(x, dtype)
        f = shardc.function(
            lambda x: shardc.constrain(shardc.constrain(x, {"a": P(op)}), {}), mesh=MESH, in_placements=({"a": S(0)},)
        )
        exe = f.compile(x)
        assert [c.kind for c in exe.plan.collectives] == ["all_reduce"]
        assert exe.audit().ok, str(exe.audit())
        got, want = (np.asarray(y, np.float64) for y in (f(x), x))
        np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
        known = slice(2 * (dtype in (jnp.bfloat16, jnp.float16)), None)  # of two bytes it comes out infinite
        np.testing.assert_array_equal(got[known], want[known])


def test_what_is_no_number_keeps_its_place_in_an_order():
    """The NaN of a partial minimum came back with a sign, and top_k has such below all numbers."""
    x = np.array([1, 3, np.nan, np.inf, -np.inf], np.float32)
    f = shardc.function(lambda x: lax.top_k(shardc.constrain(x, {"a": P("min")}), 5), mesh=MESH)
    for got, want in zip(f(x), lax.top_k(x, 5), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("where", ["one device", "mesh"])
def test_one_array_at_two_donated_leaves(where):
    """Weights that an average of them begins as: XLA took one buffer twice, and the process ended."""

    def step(s, x):
        p = s["params"] - 0.1 * jax.grad(lambda w: jnp.mean((x @ w - 1) ** 2))(s["params"])
        return {"params": p, "ema": 0.9 * s["ema"] + 0.1 * p}

    f = shardc.function(step, mesh=MESH, in_placements={"s": {}, "x": {"a": S(0)}}, donate_argnames="s")
    w, x = jnp.ones((6, 5)), np.ones((16, 6), np.float32)
    want = jax.jit(step)({"params": w, "ema": w}, x)
    w = shardc.put(w, MESH, shardc.Placement()) if where == "mesh" else w
    for _ in range(2):
        got = f({"params": w, "ema": w}, x)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)
        w = jnp.ones((6, 5)) if where == "one device" else shardc.put(jnp.ones((6, 5)), MESH, shardc.Placement())


def test_one_array_donated_and_read():
    f = shardc.function(lambda p, frozen: p + frozen, mesh=MESH, in_placements=({}, {}), donate_argnames="p")
    w = shardc.put(np.ones(4, np.float32), MESH, shardc.Placement())
    np.testing.assert_array_equal(f(w, w), 2 * np.ones(4))
    np.testing.assert_array_equal(w, np.ones(4))


def test_a_donated_array_that_is_passed_again_is_an_error():
    x = shardc.put(np.ones(4, np.float32), MESH, shardc.Placement())
    f = shardc.function(lambda x: x + 1, mesh=MESH, in_placements=({},), donate_argnums=0)
    f(x)
    with pytest.raises(
        shardc.ArgumentError, match="x: an earlier call took its buffer; pass that call's result instead"
    ):
        f(x)


def test_a_typed_key_that_a_function_closes_over():
    key = jax.random.key(0)
    x = np.ones(16, np.float32)

    def plain(x):
        return x * jax.random.bernoulli(key, 0.5, x.shape)

    def nested(x):
        body = lambda c, _: (c + jax.random.normal(key, x.shape), None)  # noqa: E731
        return jax.lax.cond(x.sum() > 0, plain, lambda x: x, jax.lax.scan(body, x, None, length=2)[0])

    for fn in (plain, nested):
        f = shardc.function(fn, mesh=MESH, in_placements=({"a": S(0)},))
        np.testing.assert_allclose(f(x), jax.jit(fn)(x), rtol=1e-6, atol=1e-6)


def test_a_placement_for_each_of_many_positional_arguments():
    """`def f(p, *xs)` with one for each, as jax.jit takes shardings; one alone is for all of `xs`."""
    mesh = shardc.make_mesh(a=2, b=2)
    x = np.ones((8, 4), np.float32)

    def add(p, *xs):
        return p + sum(xs)

    f = shardc.function(add, mesh=mesh, in_placements=({}, {"a": S(0)}, {"b": S(1)}))
    np.testing.assert_array_equal(f(x, x, x), 3 * x)
    placed = [str(p) for p in f.plan(x, x, x).inputs]
    assert placed == ["{}", "{a: S(0)}", "{b: S(1)}"]
    every = shardc.function(add, mesh=mesh, in_placements=({}, {"a": S(0)}))
    assert [str(p) for p in every.plan(x, x, x, x).inputs] == ["{}", *["{a: S(0)}"] * 3]
    with pytest.raises(shardc.PlacementError, match=r"2 for the 3 arguments of \*xs; write one for each"):
        f(x, x, x, x)


def test_a_cache_whose_beams_are_picked_by_row_numbers_stays_where_it_is():
    """Its rows were exchanged for another dimension and back, 112 MiB each."""
    rows = {"data": S(0)}
    cache, beam = jax.ShapeDtypeStruct((64, 4, 2048, 1024), "bfloat16"), jax.ShapeDtypeStruct((64, 4), "int32")
    mesh = shardc.make_mesh(topology="v5p:4x2x1", data=8)
    f = shardc.function(
        lambda c, i: c[jnp.arange(64)[:, None], i], mesh=mesh, in_placements=(rows, rows), out_placements=rows
    )
    assert f.plan(cache, beam).collectives == ()


def test_what_is_gathered_in_a_while_and_once_behind_it():
    """Five rounds took both planned gathers, the one of a round and the one behind the loop, which then had none."""

    def f(x):
        def body(c):
            i, x = c
            whole = shardc.constrain(x, {})  # each round needs all of it
            return i + 1, shardc.constrain(jnp.sin(x + jnp.flip(whole).sum()), {"data": S(0)})

        return lax.while_loop(lambda c: c[0] < 5, body, (0, x))[1]

    placed = shardc.function(f, mesh=shardc.make_mesh(data=8), in_placements={"x": {"data": S(0)}}, out_placements={})
    x = np.arange(16, dtype=np.float32)
    np.testing.assert_allclose(placed(x), jax.jit(f)(x), rtol=1e-5)
    report = placed.compile(x).audit()
    assert report.ok and not report.missing, report
    assert sum(a.count for a in report.iterated) == 4


def test_a_loop_over_examples_sends_what_its_vmap_sends():
    """514 collectives and 126 MiB, as the rows were exchanged for something else to split."""
    w, x = jax.ShapeDtypeStruct((1024, 4096), "float32"), jax.ShapeDtypeStruct((512, 64, 1024), "float32")
    mesh = shardc.make_mesh(topology="v5p:4x2x1", data=8)
    for size in (None, 16):

        def losses(w, x, size=size):
            return lax.map(lambda x: jnp.sum((x @ w) ** 2), x, batch_size=size)

        f = shardc.function(losses, mesh=mesh, in_placements=({}, {"data": S(0)}), static_argnames="size")
        assert f.plan(w, x).collectives == ()


LATER = pytest.mark.sampled(0)


@pytest.mark.parametrize(
    "dtype", ["int4", "int2", "float4_e2m1fn", *(pytest.param(t, marks=LATER) for t in ("uint4", "float8_e5m2"))]
)
def test_types_below_a_byte_go_from_function_to_function(dtype):
    """JAX 0.10 compiles for another layout of them than its arrays have; XLA:CPU gathers two bits past their end."""
    mesh = shardc.make_mesh(a=4, b=2)
    x = np.ones((8, 8), np.float32)
    cast = shardc.function(lambda x: x.astype(dtype), mesh=mesh, in_placements=({"a": S(1)},))
    again = shardc.function(lambda w: w * 1, mesh=mesh, donate_argnums=0)
    placed = ({"a": S(0), "b": S(1)}, {})
    product = shardc.function(lambda w, x: x @ w.astype("float32"), mesh=mesh, in_placements=placed, out_placements={})
    once = cast(x)
    for w in (once, jnp.ones((8, 8), dtype), shardc.put(once, mesh, {}), again(again(cast(x)))):
        for _ in range(2):
            np.testing.assert_array_equal(product(w, x), np.full((8, 8), 8.0))
    assert product.compile(once, x).audit().ok
    tall = cast(np.ones((16, 8), np.float32))  # of another shape: planned anew
    np.testing.assert_array_equal(product(tall, np.ones((3, 16), np.float32)), np.full((3, 8), 16.0))
    closed = shardc.function(lambda x: x @ once.astype("float32"), mesh=mesh)
    np.testing.assert_array_equal(closed(x), np.full((8, 8), 8.0))
    rows = {"a": S(0)}
    uneven = shardc.function(lambda x: x.astype(dtype), mesh=mesh, in_placements=(rows,), out_placements=rows)
    w = uneven(np.ones((7, 8), np.float32))
    assert isinstance(w, shardc.PlacedArray) and w.dtype == dtype
    np.testing.assert_array_equal(product(w, x[:, :7]), np.full((8, 8), 7.0))


def test_uneven_results_show_no_padding():
    """They were pytree nodes over their padded pieces: 32 elements of mean 1.625 for 26 of mean 2."""
    mesh, rows = shardc.make_mesh(a=8), {"a": S(0)}
    f = shardc.function(lambda x: x + 1, mesh=mesh, in_placements=(rows,), out_placements=rows)
    y = f(np.ones((13, 2), np.float32))
    assert [(a.size, float(jnp.mean(a))) for a in jax.tree.leaves(y)] == [(26, 2.0)]
    assert jax.jit(jnp.sum)(y) == jax.jit(jnp.sum)(jax.device_get(y)) == (y + 0).sum() == 52
    assert jax.tree.map(jnp.shape, [y]) == [(13, 2)]
    np.testing.assert_allclose(sum(jnp.sum(jnp.exp(a)) for a in jax.tree.leaves(y)), 26 * np.exp(2.0), rtol=1e-6)


def test_uneven_pins_inside_other_transformations():
    """JAX's constraint takes no split that leaves padding; such a pin is the next that it takes."""
    mesh, rows = shardc.make_mesh(a=8), {"a": S(0)}
    x = np.arange(26, dtype=np.float32).reshape(13, 2)

    @shardc.function(mesh=mesh, in_placements=(rows,), out_placements=rows)
    def f(x):
        return (shardc.constrain(2 * x, {"a": S(1)}) ** 2).sum(0)

    want = (4 * x**2).sum(0)
    for got in (jax.jit(f)(x), jax.vmap(f)(x[None])[0], jax.jit(f)(shardc.put(x, mesh, rows))):
        np.testing.assert_allclose(got, want)
    np.testing.assert_allclose(jax.grad(lambda x: f(x).sum())(shardc.put(x, mesh, rows)), 8 * x)


def test_an_uneven_call_and_then_an_even_one():
    """The second was taken for the first until its pieces were made: AssertionError."""
    f = shardc.function(lambda x: 2 * x, mesh=MESH, in_placements=({"a": S(0)},))
    for rows in (5, 4, 0, 5):
        x = np.arange(rows, dtype=np.float32)
        np.testing.assert_array_equal(f(x), 2 * x)


def with_float(p, lr):
    return p * lr


NUMBERS = (0.5, np.float64(0.5), np.float32(0.5), True, np.bool_(True), 2, np.int64(2), 1j, np.complex128(1j))


@pytest.mark.parametrize(("n", "first"), [(2, 0.5), (8, NUMBERS[1]), (2, 1j), (8, NUMBERS[-1])], ids=str)
def test_numbers_of_python_and_of_numpy_have_programs_of_their_own(first, n):
    """np.float64 is a float for Python: whichever came first decided the dtype of bfloat16 weights for both."""
    f = shardc.function(with_float, mesh=shardc.make_mesh(data=n), in_placements={"p": {"data": S(0)}})
    p = jnp.ones(16, "bfloat16")
    for lr in (first, *NUMBERS, first):
        assert f(p, lr).dtype == jax.jit(with_float)(p, lr).dtype, lr
        if isinstance(lr, np.generic) != isinstance(first, np.generic):
            assert jax.jit(lambda p, lr: f(p, lr))(p, lr).dtype == jax.jit(with_float)(p, lr).dtype, lr


class Config:
    def __init__(self):
        self.scale = 1.0


def scaled(x, config):
    return (x * (config["it"] if isinstance(config, dict) else config).scale).sum()


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("make", [Config, lambda: np.random.default_rng(0), lambda: Config().__init__], ids=range(3))
@pytest.mark.parametrize("function", [shardc.function, flax.function, equinox.function], ids=["", "flax", "equinox"])
def test_an_object_that_can_change_is_no_constant(function, make, nested):
    """It was one by its identity: 128.0 again after `config.scale = 10`, the same random number in each call."""
    given = {"it": make()} if nested else make()
    f = function(scaled, mesh=MESH, in_placements={"x": {"a": S(0)}})
    for call in (f, f.plan, f.compile):
        with pytest.raises(shardc.ArgumentError, match=r"config.* can change, and a compiled program would not see it"):
            call(jnp.ones(16), given)


@pytest.mark.parametrize("function", [shardc.function, flax.function, equinox.function], ids=["", "flax", "equinox"])
def test_a_constant_is_known_by_its_value(function):
    @dataclass(frozen=True)
    class Frozen:
        scale: float

    f = function(scaled, mesh=MESH)
    x = jnp.arange(4)
    for value in (2, 2.0, 3.0, 2):
        got = f(x, Frozen(value))
        assert (got.dtype, float(got)) == ((x * value).dtype, 6.0 * value)


@pytest.mark.filterwarnings("ignore:Python iterable type")
def test_an_iterator_is_no_constant():
    with pytest.raises(shardc.ArgumentError, match="config: a list_iterator can change"):
        shardc.function(lambda x, config: x * next(config), mesh=MESH)(jnp.ones(4), iter([1.0, 2.0]))


@pytest.mark.parametrize("function", [shardc.function, flax.function, equinox.function], ids=["", "flax", "equinox"])
def test_what_holds_a_function_can_be_copied(function):
    """`copy.deepcopy` of a trainer ended in `TypeError: cannot pickle 'mappingproxy' object`."""

    class Trainer:
        def __init__(self):
            self.scale = 2.0
            self.step = function(self.scaled, mesh=MESH, in_placements={"x": {"a": S(0)}})

        def scaled(self, x):
            return x * self.scale

    one, x = Trainer(), np.arange(5.0, dtype=np.float32)
    np.testing.assert_array_equal(one.step(x), 2 * x)
    other = deepcopy(one)
    other.scale = 3.0
    np.testing.assert_array_equal(other.step(x), 3 * x)
    np.testing.assert_array_equal(one.step(x), 2 * x)
    assert other.step.__name__ == "scaled" and other.step.__wrapped__.__self__ is other
    assert other.step.plan(x).in_placements == one.step.plan(x).in_placements


def test_plans_are_their_own_copies_and_are_saved_instead_of_pickled(tmp_path):
    def step(p, x):
        loss = shardc.accumulate(lambda p, x: (shardc.stage_boundary(x * p["a"]) * p["b"]).sum(), microbatches=2)
        return jax.grad(loss)(p, x)

    args = {"a": 2.0, "b": 3.0}, np.ones(4, np.float32)
    piped = shardc.function(step, mesh=shardc.make_mesh(pipe=2), pipeline=shardc.Pipeline())
    for f in (shardc.function(step, mesh=MESH), piped):
        plan = f.plan(*args)
        assert deepcopy({"plan": plan})["plan"] is plan and copy(plan) is plan
        with pytest.raises(shardc.ArgumentError, match=r"cannot be pickled.* plan\.save"):
            pickle.dumps(plan)
        plan.save(tmp_path / "plan.json")
        saved = shardc.load_plan(tmp_path / "plan.json")
        assert pickle.loads(pickle.dumps(saved)) == saved == deepcopy(saved)
    again = deepcopy(piped)
    assert jax.tree.map(float, again(*args)) == jax.tree.map(float, step(*args))
