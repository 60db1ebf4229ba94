"""Gradient accumulation: the mean over strided microbatches, on one device and on a mesh."""

from __future__ import annotations

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardc
from shardc import S, accumulate
from shardc.ir.loop import Loop

pytestmark = pytest.mark.usefixtures("compiled_fast")

LINE = shardc.make_mesh(data=8)
EVERYWHERE = shardc.rules({"*": {}})


def parts(x, m, axis=0):
    """The strided microbatches of an array."""
    return [np.take(x, range(j, x.shape[axis], m), axis) for j in range(m)]


def mean(values):
    return jax.tree.map(lambda *xs: np.mean(np.stack(xs), 0), *values)


def data(rows=24, width=5):
    rng = np.random.default_rng(0)
    return rng.normal(size=(width, 3)), {"x": rng.normal(size=(rows, width)), "y": rng.normal(size=(rows, 3))}


def loss(w, batch):
    """Not a plain mean over rows: the rows of one microbatch have to be those of one microbatch."""
    return jnp.log(((batch["x"] @ w - batch["y"]) ** 2).mean())


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("m", [1, 2, 3, 24])
def test_it_is_the_mean_over_strided_microbatches(m):
    w, batch = data()
    micro = [{"x": x, "y": y} for x, y in zip(parts(batch["x"], m), parts(batch["y"], m), strict=True)]
    got = jax.jit(accumulate(jax.value_and_grad(loss), microbatches=m))(w, batch)
    want = mean([jax.value_and_grad(loss)(w, b) for b in micro])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), got, want)
    if m > 1:
        assert abs(got[0] - loss(w, batch)) > 1e-6


def test_kinds_of_reduction():
    def f(x):
        return {"mean": x.mean(), "sum": x.sum(0), "rows": x * 2, "count": jnp.int32(x.shape[0])}

    x = np.arange(24.0).reshape(12, 2)
    kinds = {"mean": "mean", "sum": "sum", "rows": "stack", "count": "sum"}
    got = accumulate(f, microbatches=3, reduce=kinds)(x)
    np.testing.assert_allclose(got["mean"], x.mean())
    np.testing.assert_array_equal(got["sum"], x.sum(0))
    np.testing.assert_array_equal(got["rows"], np.stack(parts(x, 3)) * 2)
    assert got["count"] == 12 and got["count"].dtype == np.int32
    stacked = accumulate(f, microbatches=3, reduce="stack")(x)
    assert jax.tree.map(jnp.shape, stacked) == {"mean": (3,), "sum": (3, 2), "rows": (3, 4, 2), "count": (3,)}
    nested = accumulate(lambda x: (f(x), x.sum()), microbatches=3, reduce=("stack", "sum"))(x)
    assert nested[0]["rows"].shape == (3, 4, 2) and nested[1] == x.sum()


def test_in_axes():
    w, batch = data()
    x_t, y = batch["x"].T, batch["y"]

    def f(tree, w, y):
        return loss(w, {"x": tree["x"].T, "y": y}) + tree["shift"]

    tree = {"x": x_t, "shift": np.float64(2)}
    want = np.mean([f({"x": a, "shift": 2.0}, w, b) for a, b in zip(parts(x_t, 4, 1), parts(y, 4), strict=True)])
    for axes in (({"x": 1, "shift": None}, None, 0), ({"x": -1, "shift": None}, None, -2)):
        np.testing.assert_allclose(accumulate(f, microbatches=4, in_axes=axes)(tree, w, y), want, rtol=1e-12)
    same = accumulate(lambda a, b: (a * b).sum(), microbatches=2, in_axes=0, reduce="sum")
    np.testing.assert_allclose(same(y, y), (y * y).sum())
    alone = accumulate(lambda a: (a * a).sum(), microbatches=2, reduce="sum")
    np.testing.assert_allclose(alone(y), (y * y).sum())


WHOLE = "it has to be a whole number of 1 or more."


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (
            lambda: accumulate(loss, microbatches=5)(*data()),
            r"loss \(test_accumulate.py:\d+\): .*\n  argument batch/x: dimension 0 has 24 rows, which 5 .*\n  .*/y",
        ),
        (
            lambda: accumulate(loss, microbatches=2)(data()[0], {"x": 1.0}),
            "argument batch/x has 0 dimensions, and no dimension 0.*Say None in in_axes",
        ),
        (lambda: accumulate(jnp.argmax, microbatches=2)(np.arange(4.0)), 'the result, i64.., is no float.*"sum", "sta'),
        (lambda: accumulate(lambda x: {"n": x}, microbatches=2)(np.arange(4)), "result n, i64.2., is no float"),
        *(
            (lambda m=m: accumulate(loss, microbatches=m), f"^accumulate: microbatches={m!r}; {WHOLE}")
            for m in (0, -1, 2.0, "4", None, True)
        ),
        (lambda: accumulate(loss, microbatches=2, reduce="max")(*data()), "reduce='max'; it is one of mean, sum"),
        (lambda: accumulate(loss, microbatches=2, in_axes=(0,))(*data()), "in_axes has 1 entries.*called with 2"),
    ],
)
def test_errors(run, message):
    with pytest.raises(shardc.ArgumentError, match=message):
        run()


def test_what_any_function_takes():
    """None, leaves that are no arrays, keywords, flags with defaults: in arguments, in a batch and in results."""

    def f(params, batch, scale=1.0, *, square=False, mask=None, name="x"):
        y = params["act"](params["w"] * batch["x"] * scale)
        y = y**2 if square else y
        assert (batch["mask"], mask, params["skip"], name) == (None, None, None, "x")
        return {"loss": y.mean(), "act": params["act"], "none": None}

    params = {"w": np.float64(2), "act": jnp.tanh, "skip": None}
    batch = {"x": np.linspace(0, 1, 8), "mask": None, "kind": "rows", "last": False}
    for kwargs in ({}, {"square": True}, {"scale": 3.0, "square": True, "mask": None, "name": "x"}):
        run = accumulate(f, microbatches=2)
        assert run.__name__ == "f" and str(inspect.signature(run)) == str(inspect.signature(f))
        got = jax.jit(lambda run=run, kwargs=kwargs: run(params, batch, **kwargs)["loss"])()
        want = mean([f(params, {**batch, "x": x}, **kwargs)["loss"] for x in parts(batch["x"], 2)])
        np.testing.assert_allclose(got, want, rtol=1e-12)
        out = run(params, batch=batch, **kwargs)
        assert out["act"] is jnp.tanh and out["none"] is None
    by_name = accumulate(lambda x, w: (w * x).sum(), microbatches=2, in_axes={"x": 0}, reduce="sum")
    assert by_name(w=2.0, x=np.arange(4.0)) == 12
    gradient = jax.grad(lambda w: accumulate(f, microbatches=2)({**params, "w": w}, batch)["loss"])(2.0)
    np.testing.assert_allclose(gradient, jax.grad(lambda w: f({**params, "w": w}, batch)["loss"])(2.0), rtol=1e-12)


@pytest.mark.parametrize("typed", [True, False], ids=["typed", "raw"])
def test_keys_are_split_for_each_microbatch(typed):
    key = jax.random.key(1) if typed else jax.random.PRNGKey(1)
    draw = lambda w, x, key: (w * x * jax.random.normal(key, x.shape)).sum()  # noqa: E731
    x, keys = np.arange(6.0), jax.random.split(key, 3)
    run = accumulate(draw, microbatches=3, keys="key", reduce="sum")
    want = sum(draw(2.0, p, k) for p, k in zip(parts(x, 3), keys, strict=True))
    np.testing.assert_allclose(run(2.0, x, key), want, rtol=1e-12)
    np.testing.assert_allclose(jax.grad(run)(2.0, x, key=key), want / 2, rtol=1e-12)
    bits = accumulate(lambda keys, x: jax.random.bits(keys[1]), microbatches=3, keys=("keys",), reduce="stack")
    pair = jax.random.split(jax.random.key(2))
    np.testing.assert_array_equal(bits(pair, x), jax.vmap(jax.random.bits)(jax.random.split(pair[1], 3)))


def test_state_goes_from_microbatch_to_microbatch():
    def f(params, state, batch):
        after = {"n": state["n"] + 1, "mean": 0.5 * state["mean"] + batch.mean()}
        return (params * batch * state["mean"]).sum(), (after, batch[0], state["n"])

    x, state = np.arange(8.0), {"n": 0, "mean": np.float64(1)}
    run = accumulate(f, microbatches=4, in_axes={"batch": 0}, reduce=("sum", ("carry:state", "last", "stack")))
    total, (after, last, seen) = jax.jit(run)(2.0, state, x)
    want, now = 0.0, state
    for rows in parts(x, 4):
        loss, (now, _, _) = f(2.0, now, rows)
        want += loss
    np.testing.assert_allclose((total, after["mean"], last), (want, now["mean"], 3), rtol=1e-12)
    assert after["n"] == 4 and seen.tolist() == [0, 1, 2, 3]

    def through(p):  # the gradient sees what one microbatch leaves for the next
        return accumulate(
            lambda h, x: (jnp.tanh(p * h + x.sum()), h.sum()), microbatches=4, in_axes={"x": 0},
            reduce=("carry:h", "sum"),
        )(jnp.ones(()), x / 8)[1]  # fmt: skip

    def by_hand(p):
        h, total = jnp.ones(()), 0.0
        for rows in parts(x / 8, 4):
            total, h = total + h.sum(), jnp.tanh(p * h + rows.sum())
        return total

    np.testing.assert_allclose(jax.grad(through)(0.3), jax.grad(by_hand)(0.3), rtol=1e-12)


def two(a, x):
    return a, x.sum()


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda x: accumulate(lambda x: 2 * x, microbatches=2)(x), r"result, f64\[2\], has as many rows .*, 2;"),
        (lambda x: accumulate(two, microbatches=2, reduce=("carry:b", None))(x, x), "reduce names 'b', which is no ar"),
        (lambda x: accumulate(two, microbatches=2, keys="xx")(1.0, x), "'xx', which is no argument. Did you mean"),
        (lambda x: accumulate(two, microbatches=2, keys="a")(1.0, x), r"keys names a, f.*which is no random key"),
        (
            lambda x: accumulate(lambda a, x: (x.sum(), a), microbatches=2, reduce=("carry:a", "last"))(np.int32(1), x),
            r"keep its shape and dtype\n  a: i32\[\] goes into a microbatch, f64\[\] comes out",
        ),
        (
            lambda x: accumulate(lambda a, x: ((x, x), a), microbatches=2, reduce=("carry:a", "last"))(x, x),
            "carried to a has the structure",
        ),
        (lambda x: accumulate(lambda x: jax.random.key(0), microbatches=2)(x), 'a random key; "stack" or "last"'),
        (lambda x: accumulate(lambda x: x.sum() > 0, microbatches=2, reduce="sum")(x), 'is no number; "stack" or "las'),
        (lambda x: accumulate(two, microbatches=2, in_axes={"y": 0})(x, x), "no argument of two .*'y'"),
        (lambda x: accumulate(two, microbatches=2)(2.0, 1.0), "no argument has a batch, by default"),
    ],
)
def test_what_is_unclear_is_an_error(run, message):
    with pytest.raises(shardc.ArgumentError, match=message):
        run(np.arange(4.0))


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_the_gradient_of_an_accumulated_loss(reduce):
    w, batch = data()
    micro = [{"x": x, "y": y} for x, y in zip(parts(batch["x"], 4), parts(batch["y"], 4), strict=True)]
    scale = 1 if reduce == "mean" else 4
    whole = accumulate(loss, microbatches=4, reduce=reduce)
    value, (by_w, by_batch) = jax.jit(jax.value_and_grad(lambda *a: 3 * whole(*a), argnums=(0, 1)))(w, batch)
    want = mean([jax.value_and_grad(loss)(w, b) for b in micro])
    np.testing.assert_allclose(value, 3 * scale * want[0], rtol=1e-12)
    np.testing.assert_allclose(by_w, 3 * scale * want[1], rtol=1e-11)

    def direct(x):
        return 3 * scale / 4 * sum(loss(w, {"x": x[j::4], "y": batch["y"][j::4]}) for j in range(4))

    np.testing.assert_allclose(by_batch["x"], jax.grad(direct)(jnp.asarray(batch["x"])), rtol=1e-11)


def test_integers_and_other_arguments_have_no_gradient():
    def f(w, batch):
        return (w[batch["index"]] * batch["weight"]).mean()

    w = np.arange(5.0)
    batch = {"index": np.arange(8) % 5, "weight": np.linspace(1, 2, 8)}
    got = jax.grad(accumulate(f, microbatches=2))(w, batch)
    np.testing.assert_allclose(got, jax.grad(f)(w, batch), rtol=1e-12)


def test_no_more_than_one_microbatchs_activations_live():
    """In the differentiated loop nothing of an activation's size is stacked."""

    def f(w, x):
        return (jnp.tanh(x @ w) ** 2).mean()

    w, x = np.ones((64, 512)), np.ones((32, 64))
    jaxpr = jax.make_jaxpr(jax.grad(accumulate(f, microbatches=8)))(w, x)
    (scan,) = [e for e in jaxpr.eqns if e.primitive.name == "scan"]
    stacked = [v.aval.shape for v in Loop.of(scan).stacks]
    assert not any(512 in shape for shape in stacked), stacked


# --- on a mesh -----------------------------------------------------------------------------------------------------

OPTIMIZER = optax.adam(1e-2)


def step(accumulated):
    def train_step(w, state, batch):
        value, grads = accumulated(w, batch)
        updates, state = OPTIMIZER.update(grads, state, w)
        return optax.apply_updates(w, updates), state, value

    return train_step


def mlp(w, batch):
    return ((jnp.tanh(batch["x"] @ w["up"]) @ w["down"] - batch["y"]) ** 2).mean()


def mlp_data(rows=64):
    rng = np.random.default_rng(1)
    w = {"up": rng.normal(size=(16, 32)), "down": rng.normal(size=(32, 8))}
    return w, {"x": rng.normal(size=(rows, 16)), "y": rng.normal(size=(rows, 8))}


def sizes(plan, kind, of):
    return [(c.count, c.bytes) for c in plan.collectives if c.kind == kind and c.value in of]


@pytest.mark.plans_eagerly
@pytest.mark.parametrize("inside", [True, False], ids=["value_and_grad inside", "value_and_grad outside"])
@pytest.mark.parametrize("zero1", [False, True], ids=["data", "zero1"])
def test_gradients_are_reduced_once_after_the_loop(inside, zero1):
    m, (w, batch) = 4, mlp_data()
    by_parts = partial(accumulate, microbatches=m)
    outer = by_parts(jax.value_and_grad(mlp)) if inside else jax.value_and_grad(by_parts(mlp))
    state = OPTIMIZER.init(w)
    moments = shardc.rules({"*mu/*": {"data": S(-1)}, "*nu/*": {"data": S(-1)}}) if zero1 else EVERYWHERE
    places = {"w": EVERYWHERE, "state": moments, "batch": {"data": S(0)}}
    f = shardc.function(step(outer), mesh=LINE, in_placements=places, donate_argnames=("w", "state"))
    plan = f.plan(w, state, batch)
    gradients = {"f64[16,32]": 16 * 32 * 8, "f64[32,8]": 32 * 8 * 8}
    reduce = "reduce_scatter" if zero1 else "all_reduce"
    half = 7 / 8
    for value, size in gradients.items():
        assert sizes(plan, reduce, [value]) == [(1, size * half * (1 if zero1 else 2))]
        assert sizes(plan, "all_gather", [value]) == ([(1, size * half)] if zero1 else [])
    other = [c for c in plan.collectives if c.value not in gradients]
    assert sum(c.bytes for c in other) <= 64, other
    assert all(c.kind in ("all_reduce", "all_gather") for c in other)
    compiled = f.compile(w, state, batch)
    assert compiled.audit().ok, str(compiled.audit())
    want = jax.jit(step(outer))(w, state, batch)
    got = f(w, state, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-14), got, want)


def test_strided_microbatches_of_a_split_batch_move_nothing():
    f = shardc.function(
        accumulate(lambda x: x.sum(1), microbatches=4, reduce="stack"), mesh=LINE,
        in_placements={"x": {"data": S(0)}}, out_placements={"data": S(1)},
    )  # fmt: skip
    x = np.arange(64.0 * 3).reshape(64, 3)
    assert f.plan(x).collectives == ()
    np.testing.assert_array_equal(f(x), np.stack([p.sum(1) for p in parts(x, 4)]))
