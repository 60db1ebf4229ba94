"""Loops, branches and derivatives of one's own: planned where they stand, equal to one device in float64."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify
from jax.experimental.custom_partitioning import custom_partitioning

import shardc
from shardc import S

pytestmark = pytest.mark.usefixtures("compiled_fast")

MESHES = {"8": shardc.make_mesh(data=8), "4x2": shardc.make_mesh(data=4, model=2)}
SPLITS = {
    "8": {"rows": {"data": S(0)}, "columns": {"data": S(1)}},
    "4x2": {"rows": {"data": S(0), "model": S(1)}, "columns": {"data": S(1), "model": S(1)}},
}


def while_loop(x, w):
    def body(c):
        return c[0] + 1, jnp.tanh(c[1] @ w) * 2

    return lax.while_loop(lambda c: (c[0] < 4) & (c[1].sum() < 1e6), body, (0, x))


def while_with_constants(x, w):
    limit = jnp.abs(x).sum()
    return lax.while_loop(lambda c: jnp.abs(c).sum() < 3 * limit, lambda c: c + jnp.abs(x) @ jnp.abs(w), x)


def fori(x, w):
    return lax.fori_loop(0, 3, lambda i, c: c.at[i].add(1.0) @ w, x)


def cond(x, w):
    return lax.cond(x.sum() > 0, lambda a: a @ w, lambda a: a * 2, x), lax.cond(x[0, 0] > 99, jnp.sin, jnp.cos, x)


def switch(x, w):
    branches = [lambda a: (a, a.sum(0)), lambda a: (a * 2, a[0]), lambda a: (a @ w, a[1])]
    return lax.switch(x.astype(int)[0, 0] % 3, branches, x)


def branch_without_arguments(x, w):
    return lax.cond(w.sum() > 0, lambda: x.sum(), lambda: jnp.zeros(()))


def scan_of_cond(x, w):
    def body(c, row):
        c = lax.cond(row.sum() > 0, lambda c: c + row, lambda c: c - row, c)
        return c, (c * 2, row.max())

    return lax.scan(body, w[0], x)


def scan_reversed(x, w):
    return lax.scan(lambda c, row: (c @ w + row, c), x[0], x, reverse=True)


def scan_unrolled(x, w):
    return lax.scan(lambda c, row: (c * 0.5 + row, c.sum()), x[0], x, unroll=3)


def scan_of_nothing(x, w):
    return lax.scan(lambda c, row: (c @ w, row), x, x[:0])


def scan_without_xs(x, w):
    return lax.scan(lambda c, _: (c @ w, c.sum(0)), x, None, length=3)


def scan_with_mixed_carry(x, w):
    def body(c, row):
        n, flag, key, total = c
        key, sub = jax.random.split(key)
        noise = jax.random.normal(sub, row.shape, row.dtype)
        return (n + 1, flag ^ (row[0] > 0), key, total + row * noise), n

    (n, flag, key, total), ns = lax.scan(body, (0, True, jax.random.key(0), jnp.zeros_like(x[0])), x)
    return n, flag, jax.random.key_data(key), total, ns


def nested_scans(x, w):
    return lax.scan(lambda c, row: (lax.scan(lambda d, e: (d + e * c, d), c, x)[0], c.sum()), w[0], x[:2])


def mapped(x, w):
    return lax.map(lambda row: jnp.tanh(row @ w), x), lax.map(lambda row: row @ w, x, batch_size=2)


def associative(x, w):
    return lax.associative_scan(jnp.add, x), lax.associative_scan(jnp.maximum, x, axis=1, reverse=True)


def gradient_of_scan(x, w):
    def loss(w, x):
        out, sums = lax.scan(jax.checkpoint(lambda c, row: (jnp.tanh(c @ w + row), c.sum())), x[0], x)
        return (out**2).sum() + sums.sum()

    return jax.value_and_grad(loss, argnums=(0, 1))(w, x)


def gradient_through_cond(x, w):
    return jax.grad(lambda w: lax.cond(w[0, 0] > 0, lambda: (x @ w).sum(), lambda: ((x @ w) ** 2).sum()))(w)


@jax.custom_vjp
def clipped(x):
    return x * 2


clipped.defvjp(lambda x: (clipped(x), x), lambda x, ct: (jnp.clip(ct, -1, 1) + x * 0,))


@jax.custom_jvp
def softened(x):
    return jnp.log1p(jnp.exp(x))


softened.defjvp(lambda primals, tangents: (softened(primals[0]), tangents[0] * jax.nn.sigmoid(primals[0])))


def own_derivatives(x, w):
    return jax.value_and_grad(lambda w: softened(clipped(x @ w)).sum())(w), jax.jvp(softened, (x,), (x,))


def inner_jit(x, w):
    f = jax.jit(lambda a: jax.jit(jnp.sin)(a) @ w)
    return f(x) + f(x * 2)


def second_derivatives(x, w):
    return jax.jvp(jax.grad(lambda w: jnp.tanh(x @ w).sum()), (w,), (w,))[1]


def per_row_gradients(x, w):
    return jax.vmap(jax.grad(lambda row: jnp.tanh(row @ w).sum()))(x)


def linearized(x, w):
    out, push = jax.linearize(lambda a: jnp.tanh(a @ w), x)
    return out, push(x)


def vmapped_cond(x, w):
    return jax.vmap(lambda row: lax.cond(row[0] > 0, jnp.sin, jnp.cos, row))(x)


def vmapped_while(x, w):
    def until(limit, row):
        return lax.while_loop(lambda c: jnp.abs(c[1]).sum() < limit, lambda c: (c[0] + 1, c[1] * 2 + w[0]), (0, row))

    rows = jax.vmap(until, (None, 0))(50.0, x)
    return rows, jax.vmap(jax.vmap(until, (0, None)), (None, 0))(x[:, 0] * 20, x)


def carried_keys(x, w):
    def step(c):
        key, n, total = c
        return jax.random.fold_in(key, n), n + 1, total + jax.random.uniform(key, x.shape)

    key, _, total = lax.while_loop(lambda c: c[1] < 3, step, (jax.random.key(1), 0, x))
    key = lax.cond(total.sum() > 0, lambda k: jax.random.split(k)[0], lambda k: k, key)
    keys = [lambda k: jax.random.split(k, 8), lambda k: jax.random.split(k, 8)[::-1], lambda k: k[None].repeat(8)]
    drawn = jax.vmap(lambda k: jax.random.normal(k, (3,)))(lax.switch(1, keys, key))
    _, rows = lax.scan(lambda k, row: (jax.random.split(k)[1], row + jax.random.bits(k, row.shape) % 7), key, x)
    return drawn, rows, total


def conjugate_gradient(x, w):
    a = x.T @ x + 9 * jnp.eye(6)
    return jax.scipy.sparse.linalg.cg(lambda v: a @ v, w)[0], jax.scipy.sparse.linalg.gmres(lambda v: a @ v, w[0])[0]


def linear_solve(x, w):
    a = x.T @ x + 9 * jnp.eye(6)

    def loss(a):
        return lax.custom_linear_solve(lambda v: a @ v, w, lambda _, b: jnp.linalg.solve(a, b), symmetric=True).sum()

    return jax.value_and_grad(loss)(a)


def root(x, w):
    def loss(a):
        solved = lambda g, y: jnp.linalg.solve(jax.jacobian(g)(y), y)  # noqa: E731
        return lax.custom_root(lambda v: a @ v - w[0], w[1], lambda f, v: jnp.linalg.solve(a, w[0]), solved).sum()

    return jax.value_and_grad(loss)(x.T @ x + 9 * jnp.eye(6))


def barrier(x, w):
    a, b, c = lax.optimization_barrier((x * 2, w.T, x.sum()))
    return a @ b, c, lax.optimization_barrier(x.sum(0))


def put(x, w):
    return jax.device_put({"x": x * 2, "w": w})["x"] + 1


def static_arguments(x, w):
    f = jax.jit(lambda a, n, how: a * n if how == "mul" else a + n, static_argnames=("n", "how"))
    return f(x, 3, how="mul") + f(x, 2, how="add")


def associative_pairs(x, w):
    return lax.associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (jnp.tanh(x), x), axis=0)


PROGRAMS = [
    while_loop, while_with_constants, fori, cond, switch, branch_without_arguments, scan_of_cond, scan_reversed,
    scan_unrolled, scan_of_nothing, scan_without_xs, scan_with_mixed_carry, nested_scans, mapped, associative,
    gradient_of_scan, gradient_through_cond, own_derivatives, inner_jit, second_derivatives, per_row_gradients,
    linearized, vmapped_cond, vmapped_while, carried_keys, conjugate_gradient, linear_solve, root, barrier, put,
    static_arguments, associative_pairs,
]  # fmt: skip


@pytest.mark.usefixtures("compiled_fast")
@pytest.mark.sampled(by=lambda program, mesh, rows, split: {program, (mesh, rows, split)})
@pytest.mark.parametrize("split", ["rows", "columns"])
@pytest.mark.parametrize(("mesh", "rows"), [("4x2", 5), ("8", 8), ("8", 5), ("4x2", 8)])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_it_equals_one_device(program, mesh, rows, split):
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        x, w = rng.normal(size=(rows, 6)), rng.normal(size=(6, 6)) / 3
        want = jax.jit(program)(x, w)
        f = shardc.function(program, mesh=MESHES[mesh], in_placements={"x": SPLITS[mesh][split]})
        exe = f.compile(x, w)
        jax.tree.map(partial(same, exe), exe(x, w), want)
        assert exe.audit().ok, str(exe.audit())


def same(exe, got, want):
    got, want = np.asarray(got), np.asarray(want)
    assert (got.shape, got.dtype) == (want.shape, want.dtype), exe.plan
    if np.issubdtype(want.dtype, np.inexact):
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)
    else:
        np.testing.assert_array_equal(got, want)


@jax.custom_batching.custom_vmap
def _sine(x):
    return jnp.sin(x)


@_sine.def_vmap
def _(_, batched, x):
    return _sine(x), batched[0]


def counted_up(x, w):
    return lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, jnp.tanh(c[1] @ c[1].T)), (0, x))[1]


def counted_down(x, w):
    return lax.while_loop(lambda c: c[0] > 0, lambda c: (c[0] - 1, c[1] * jnp.sum(c[1] @ w)), (5, x / 99))[1]


def counted_twice(x, w):
    def outer(c, _):
        inner = lax.while_loop(lambda d: d[0] < 5, lambda d: (d[0] + 1, d[1] * jnp.sum(d[1])), (0, c))[1]
        return inner / 2, None

    return lax.scan(outer, x / 99, None, length=3)[0]


def in_a_shard_map(x, w):
    def local(x):
        return lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, jnp.tanh(lax.psum(c[1], "data"))), (0, x))[1]

    mesh, spec = MESHES["8"], jax.P("data")
    return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)


@pytest.mark.plans_eagerly
@pytest.mark.parametrize("program", [counted_up, counted_down, counted_twice, in_a_shard_map], ids=lambda f: f.__name__)
def test_a_while_whose_trips_xla_knows_moves_what_is_planned_in_each(program):
    x, w = np.ones((64, 64), np.float32) / 99, np.ones((64, 64), np.float32) / 99
    exe = shardc.function(program, mesh=MESHES["8"], in_placements={"x": {"data": S(0)}}).compile(x, w)
    report = exe.audit()
    assert report.ok and not report.missing, str(report)
    planned = [c for c in exe.plan.collectives if c.per_iteration]
    assert planned and "known_trip_count" in exe.hlo()
    assert sum(f.bytes for f in report.iterated) == 4 * sum(c.bytes for c in planned)


@custom_partitioning
def _softmax(x):
    return jax.nn.softmax(x, -1)


_softmax.def_partition(
    partition=lambda *_: None, infer_sharding_from_operands=lambda *_: None, sharding_rule="... i -> ... i",
    need_replication_factors=("i",),
)  # fmt: skip

CALLS = {
    "custom_vmap": lambda x, w: _sine(x @ w),
    "custom_partitioning": lambda x, w: _softmax(x @ w),
    "composite": lambda x, w: lax.composite(lambda a, b: jnp.tanh(a @ b), "tests.mlp")(x, w),
    "linear_call": lambda x, w: jax.custom_derivatives.linear_call(lambda r, a: a @ r, lambda r, a: a @ r.T, w, x),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_planned_as_their_bodies(name):
    x, w = np.ones((8, 4)) / 3, np.arange(16.0).reshape(4, 4) / 9
    fn = shardc.function(CALLS[name], mesh=MESHES["8"], in_placements=({"data": S(0)}, {}), out_placements={})
    np.testing.assert_allclose(fn(x, w), CALLS[name](x, w), rtol=1e-6)
    assert not fn.plan(x, w).gathered


@pytest.mark.parametrize("rows", [8, 5])
def test_rows_of_a_scan_that_are_split_over_its_steps(rows):
    """Arguments and results live in pieces of what is scanned over, even and uneven."""
    with jax.enable_x64(True):
        x = np.random.default_rng(1).normal(size=(rows, 6))
        program = lambda x: lax.scan(lambda c, row: (c * 0.5 + row, (c * row, row.sum())), x[0], x)  # noqa: E731
        want = program(x)
        for name, mesh in MESHES.items():
            for axes in ({"data": S(0)}, dict.fromkeys(mesh.axis_names, S(0))):
                outs = (None, (axes, axes))
                f = shardc.function(program, mesh=mesh, in_placements={"x": axes}, out_placements=outs)
                exe = f.compile(x)
                got = jax.tree.leaves(exe(x), is_leaf=lambda y: isinstance(y, shardc.PlacedArray))
                for g, w in zip(got, jax.tree.leaves(want), strict=True):
                    same(exe, g, w)
                assert exe.audit().ok, (name, str(exe.audit()))


def test_a_barrier_leaves_each_operand_where_it_is():
    places = ({"data": S(0)}, {"data": S(1)}, {})
    f = shardc.function(
        lambda *xs: lax.optimization_barrier(xs), mesh=MESHES["8"], in_placements={"xs": places}, out_placements=places
    )
    exe = f.compile(np.ones((8, 8)), np.ones((8, 16)), np.ones(3))
    assert not exe.plan.collectives and not exe.plan.gathered and exe.audit().ok


def test_device_put_with_a_sharding_is_a_pin():
    mesh = MESHES["4x2"]
    here = jax.NamedSharding(mesh, jax.P("model", "data"))
    f = shardc.function(lambda x: jax.device_put(x + 1, here), mesh=mesh)
    x = np.ones((8, 4), np.float32)
    assert str(f.plan(x).out_placements) == "{model: S(0), data: S(1)}"
    np.testing.assert_array_equal(f(x), x + 1)
    other = jax.NamedSharding(MESHES["8"], jax.P("data"))
    with pytest.raises(shardc.PlacementError, match=r"the NamedSharding is over another mesh \(data=8\)"):
        shardc.function(lambda x: jax.device_put(x + 1, other), mesh=mesh)(x)


def test_device_put_elsewhere():
    def f(x):
        return jax.device_put(x, jax.devices()[0]), jax.device_put(x + 1, jax.memory.Space.Host)

    with pytest.raises(shardc.TracingError, match="the values of a shardc function live on its mesh") as error:
        shardc.function(f, mesh=MESHES["8"])(np.ones(3))
    assert "device_put to cpu:0 at test_control_flow.py" in str(error.value)
    assert "device_put to MemorySpace.Host at" in str(error.value)


def checked(x, y):
    checkify.check((x > -99).all(), "low: {x}", x=x.min())
    return lax.map(lambda row: row / y, x)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("scale", "divisor"), [(1, 2), (1, 0), (-100, 2)])
def test_errors_of_checkify_come_out_the_same(scale, divisor):
    x, y = jnp.arange(1.0, 17).reshape(8, 2) * scale, jnp.full(2, float(divisor))
    want, out = checkify.checkify(checked, errors=checkify.all_checks)(x, y)
    for mesh in MESHES.values():
        inside = shardc.function(
            checkify.checkify(checked, errors=checkify.all_checks),
            mesh=mesh,
            in_placements={"args": ({"data": S(0)}, shardc.AUTO)},
        )
        around = checkify.checkify(
            shardc.function(checked, mesh=mesh, in_placements={"x": {"data": S(0)}}), errors=checkify.all_checks
        )
        for f in (inside, around, jax.jit(around)):
            error, got = f(x, y)
            np.testing.assert_array_equal(np.isfinite(got), np.isfinite(out))
            np.testing.assert_array_equal(np.where(np.isfinite(out), got, 0), np.where(np.isfinite(out), out, 0))
            assert (error.get() or "").partition(" at")[0] == (want.get() or "").partition(" at")[0]
    assert (want.get() is None) == (scale == 1 and divisor == 2)
