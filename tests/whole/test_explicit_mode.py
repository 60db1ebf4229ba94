"""Programs for meshes with Explicit axes, and others that read the types of their arguments: as `jax.jit` runs them,
with arguments that lie on the mesh, with pins in place of that, and with neither."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, auto_axes, explicit_axes, reshard
from jax.sharding import PartitionSpec as Spec

import shardc
from shardc import S

pytestmark = pytest.mark.usefixtures("compiled_fast")

AXES = ("data", "model")
EXPLICIT = jax.make_mesh((4, 2), AXES, axis_types=(AxisType.Explicit,) * 2)
AUTO = shardc.make_mesh(data=4, model=2)
MIXED = jax.make_mesh((4, 2), AXES, axis_types=(AxisType.Explicit, AxisType.Auto))
LINE = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 8)).astype(np.float32)
W = RNG.normal(size=(8, 8)).astype(np.float32) / 4
WS = RNG.normal(size=(3, 8, 8)).astype(np.float32) / 4
E = RNG.normal(size=(16, 8)).astype(np.float32)
"""A table of embeddings."""
IDS = np.arange(24, dtype=np.int32).reshape(4, 6) % 16
ROWS, COLUMNS, BOTH, WHOLE = Spec("data"), Spec(None, "model"), Spec("data", "model"), Spec()
PROGRAMS: dict[str, Program] = {}


@dataclass(frozen=True)
class Program:
    """A function, its arguments and where they lie."""

    fn: Callable[..., Any]
    args: tuple[np.ndarray, ...]
    specs: tuple[Spec, ...]

    def placed(self, mesh: Mesh) -> list[jax.Array]:
        return [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(self.args, self.specs, strict=True)]


def program(name: str, *args: tuple[np.ndarray, Spec]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Records a function as a program of these arguments; `x` split by rows if none are given."""

    def record(fn: Callable[..., Any]) -> Callable[..., Any]:
        assert name not in PROGRAMS
        values, specs = zip(*(args or [(X, ROWS)]), strict=True)
        PROGRAMS[name] = Program(fn, values, specs)
        return fn

    return record


def of_x(**fns: Callable[..., Any]) -> None:
    for name, fn in fns.items():
        program(name.replace("_", " "))(fn)


def of_x_and_w(**fns: Callable[..., Any]) -> None:
    for name, fn in fns.items():
        program(name.replace("_", " "), (X, ROWS), (W, COLUMNS))(fn)


def double(x: Any) -> Any:
    return x * 2


# What a type says -----------------------------------------------------------------------------------------------------


of_x(
    typeof_spec=lambda x: x * 2 if jax.typeof(x).sharding.spec[0] == "data" else x * 3,
    typeof_size=lambda x: x * jax.typeof(x).sharding.mesh.size,
    typeof_axes=lambda x: x * len(jax.typeof(x).sharding.mesh.explicit_axes),
    typeof_later=lambda x: (y := jnp.sin(x), y * 2 if jax.typeof(y).sharding.spec[0] == "data" else y * 3)[1],
    typeof_transposed=lambda x: x * 2 if jax.typeof(x.T).sharding.spec[1] == "data" else x * 3,
    typeof_in_a_scan=lambda x: lax.scan(
        lambda c, _: (c * (2 if jax.typeof(c).sharding.spec[0] == "data" else 3), None), x, None, length=2
    )[0],
    typeof_in_vmap=lambda x: jax.vmap(lambda r: r * (2 if jax.typeof(r).sharding.spec == Spec(None) else 3))(x),
    mesh_in_context=lambda x: x * jax.sharding.get_abstract_mesh().size,
    mesh_of_a_spec=lambda x: (
        x * (2 if jax.typeof(x).sharding == NamedSharding(EXPLICIT.abstract_mesh, Spec("data", None)) else 3)
    ),
    ShapeDtypeStruct_of_a_type=lambda x: (
        x + jnp.zeros_like(jax.eval_shape(lambda x: x, x)) + len(jax.eval_shape(jnp.sin, x).sharding.spec)
    ),
)


@program("typeof of several", (X, ROWS), (W, COLUMNS), (W, WHOLE))
def typeof_of_several(x, w, v):
    names = [str(jax.typeof(a).sharding.spec) for a in (x, w, v)]
    return x @ w + (
        names == ["PartitionSpec('data', None)", "PartitionSpec(None, 'model')", "PartitionSpec(None, None)"]
    )


@program("typeof of a tree", (X, ROWS), (W, BOTH))
def typeof_of_a_tree(x, w):
    split = jax.tree.map(lambda a: sum(n is not None for n in jax.typeof(a).sharding.spec), {"x": x, "w": w})
    return x * split["x"], w * split["w"]


# shard_map ------------------------------------------------------------------------------------------------------------


of_x(
    shard_map_without_in_specs=lambda x: jax.shard_map(double, mesh=EXPLICIT, out_specs=ROWS)(x),
    shard_map_with_in_specs=lambda x: jax.shard_map(double, mesh=EXPLICIT, in_specs=ROWS, out_specs=ROWS)(x),
    shard_map_without_mesh=lambda x: jax.shard_map(double, in_specs=ROWS, out_specs=ROWS)(x),
    shard_map_without_mesh_and_in_specs=lambda x: jax.shard_map(double, out_specs=ROWS)(x),
    shard_map_as_a_decorator=lambda x: jax.shard_map(out_specs=ROWS)(double)(x),
    shard_map_that_sums=lambda x: jax.shard_map(lambda b: lax.psum(b.sum(0), "data"), out_specs=WHOLE)(x),
    shard_map_axis_names=lambda x: jax.shard_map(double, out_specs=ROWS, axis_names=set(AXES))(x),
    shard_map_of_the_result=lambda x: jax.shard_map(double, mesh=EXPLICIT, out_specs=ROWS)(jnp.sin(x)),
    shard_map_of_a_reshard=lambda x: jax.shard_map(double, mesh=EXPLICIT, out_specs=BOTH)(reshard(x, BOTH)),
    shard_map_in_grad=lambda x: jax.grad(lambda x: (jax.shard_map(jnp.sin, out_specs=ROWS)(x) ** 2).sum())(x),
    shard_map_in_a_scan=lambda x: lax.scan(
        lambda c, _: (jax.shard_map(jnp.sin, out_specs=ROWS)(c), None), x, None, length=3
    )[0],
    shard_map_of_auto_axes=lambda x: (
        jax.shard_map(double, mesh=AUTO, in_specs=ROWS, out_specs=ROWS)(x)
        if jax.typeof(x).sharding.mesh.empty
        else x * 2
    ),
)
program("sum of two", (X, ROWS), (X, COLUMNS))(lambda x, y: x + y)
program("shard map of two", (X, ROWS), (W, COLUMNS))(
    lambda x, w: jax.shard_map(jnp.dot, mesh=EXPLICIT, out_specs=BOTH)(x, w)
)
program("shard map of columns", (X, BOTH))(lambda x: jax.shard_map(jnp.cos, mesh=EXPLICIT, out_specs=BOTH)(x))


# Shardings of results -------------------------------------------------------------------------------------------------


of_x(
    reshard=lambda x: reshard(x * 2, Spec(None, "model")),
    reshard_and_back=lambda x: reshard(reshard(x, COLUMNS) * 2, ROWS),
    reshard_by_a_NamedSharding=lambda x: reshard(x, NamedSharding(EXPLICIT, BOTH)) + 1,
    reshard_to_a_type=lambda x: reshard(jnp.sin(x), jax.typeof(x).sharding),
    device_put_to_a_type=lambda x: jax.device_put(x * 2, jax.typeof(x).sharding),
    einsum_out=lambda x: jnp.einsum("bd,be->de", x, x, out_sharding=COLUMNS),
    gather_out=lambda x: x.at[jnp.array([0, 3, 5, 1])].get(out_sharding=ROWS),
    reshape_out=lambda x: lax.reshape(x, (4, 4, 8), out_sharding=Spec("data", None, None)),
    jnp_reshape_out=lambda x: jnp.reshape(x, (4, 32), out_sharding=ROWS),
    broadcast_out=lambda x: x + lax.broadcast(jnp.ones(8, x.dtype), (16,), out_sharding=ROWS),
    full_out=lambda x: x + jnp.zeros((16, 8), x.dtype, device=NamedSharding(EXPLICIT, ROWS)),
    iota_out=lambda x: x + lax.broadcasted_iota(x.dtype, (16, 8), 0, out_sharding=ROWS),
    ones_like=lambda x: x + jnp.ones_like(x),
    random_out=lambda x: x + jax.random.uniform(jax.random.key(0), (16, 8), out_sharding=ROWS),
    transposed=lambda x: jnp.dot(x.T, x, out_sharding=WHOLE),
    reshape=lambda x: x.reshape(8, 2, 8),
    concatenate=lambda x: jnp.concatenate([x, x], axis=1),
    where=lambda x: jnp.where(x > 0, x, reshard(x * 2, ROWS)),
    slices=lambda x: x[:, 2:6] * 2,
    cumsum=lambda x: jnp.cumsum(x, axis=1),
    sort=lambda x: jnp.sort(x, axis=1),
    softmax=lambda x: jax.nn.softmax(x, axis=1),
    sums=lambda x: (x.sum(0), x.mean(1), x.max()),
    jax_P=lambda x: reshard(x, jax.P(None, "model")) * 2,
    nested_jit=lambda x: jax.jit(lambda y: reshard(y, COLUMNS))(x) * 2,
    scatter_out=lambda x: x.at[jnp.array([0, 1])].set(1.0, out_sharding=jax.typeof(x).sharding),
)
of_x_and_w(
    dot=lambda x, w: x @ w,
    dot_out=lambda x, w: jnp.dot(x, w, out_sharding=ROWS),
    matmul_out=lambda x, w: jnp.matmul(x, w, out_sharding=BOTH),
    einsum_two_out=lambda x, w: jnp.einsum("bd,de->be", x, w, out_sharding=NamedSharding(EXPLICIT, BOTH)),
    dot_that_sums=lambda x, w: jnp.dot(reshard(x, COLUMNS), reshard(w, Spec("model", None)), out_sharding=ROWS),
    dot_then_reshard=lambda x, w: reshard(x @ w, ROWS) + x,
)


# Loops, branches, transformations -------------------------------------------------------------------------------------


def twice_through(c, w):
    """A layer whose inner value is split over both axes."""
    return jnp.tanh(jnp.dot(jnp.dot(c, w, out_sharding=BOTH), w.T, out_sharding=ROWS)), None


@program("scan", (X, ROWS), (WS, WHOLE))
def scan(x, ws):
    return lax.scan(twice_through, x, ws)[0]


@program("grad of scan", (X, ROWS), (WS, WHOLE))
def grad_of_scan(x, ws):
    return jax.grad(lambda x, ws: lax.scan(twice_through, x, ws)[0].sum(), argnums=(0, 1))(x, ws)


@program("grad of remat in scan", (X, ROWS), (WS, WHOLE))
def grad_of_remat_in_scan(x, ws):
    return jax.grad(lambda x: lax.scan(jax.checkpoint(twice_through), x, ws)[0].sum())(x)


@program("grad of both of remat in scan", (X, ROWS), (WS, WHOLE))
def grad_of_both_of_remat_in_scan(x, ws):
    return jax.grad(lambda x, ws: lax.scan(jax.checkpoint(twice_through), x, ws)[0].sum(), argnums=(0, 1))(x, ws)


@program("grad of remat", (X, ROWS), (W, WHOLE))
def grad_of_remat(x, w):
    return jax.grad(lambda x: jax.checkpoint(twice_through)(x, w)[0].sum())(x)


@program("grad of a policy", (X, ROWS), (WS, WHOLE))
def grad_of_a_policy(x, ws):
    keep = jax.checkpoint(twice_through, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    return jax.grad(lambda x: lax.scan(keep, x, ws)[0].sum())(x)


@program("grad of an embedding", (E, WHOLE))
def grad_of_an_embedding(e):
    return jax.grad(lambda e: (e.at[IDS].get(out_sharding=ROWS) ** 2).sum())(e)


@program("grad of a split embedding", (E, ROWS), (IDS, ROWS))
def grad_of_a_split_embedding(e, ids):
    return jax.grad(lambda e: (e.at[ids].get(out_sharding=Spec("data", None, None)) ** 2).sum())(e)


@program("grad of cond", (X, ROWS), (W, WHOLE))
def grad_of_cond(x, w):
    dot = partial(jnp.dot, out_sharding=ROWS)
    return jax.grad(lambda x: lax.cond(x.sum() > 0, lambda x: dot(x, w), lambda x: x * 2, x).sum())(x)


@program("cond", (X, ROWS), (W, WHOLE))
def cond(x, w):
    return lax.cond(x.sum() > 0, lambda x: jnp.dot(x, w, out_sharding=ROWS), lambda x: x * 2, x)


@program("switch", (X, ROWS))
def switch(x):
    branches = [lambda x: x * 2, lambda x: reshard(reshard(x, COLUMNS), ROWS), jnp.sin]
    return lax.switch(1, branches, x) + lax.switch((x.sum() > 0).astype(int), branches, x)


def carry_einsum(c, _, x):
    return jnp.einsum("ab,cb->cb", x, c, out_sharding=ROWS), None


of_x(
    grad_of_scan_of_einsum=lambda x: jax.grad(
        lambda w: lax.scan(partial(carry_einsum, x=w), w, None, length=3)[0].sum()
    )(x),
    grad_of_a_reshard_to_the_type=lambda x: jax.grad(lambda w: (reshard(w * 2, jax.typeof(w).sharding) ** 2).sum())(x),
    grad_of_reshard=lambda x: jax.grad(lambda x: (reshard(x, COLUMNS) ** 3).sum())(x),
    grad_of_grad=lambda x: jax.grad(lambda x: jax.grad(lambda x: (reshard(x, COLUMNS) ** 3).sum())(x).sum())(x),
    while_loop=lambda x: lax.while_loop(
        lambda c: c[1] < 3, lambda c: (reshard(jnp.sin(reshard(c[0], COLUMNS)), ROWS), c[1] + 1), (x, 0)
    )[0],
    fori_loop=lambda x: lax.fori_loop(0, 3, lambda _, c: jnp.dot(c, W, out_sharding=ROWS), x),
    vmap=lambda x: jax.vmap(jnp.sin)(x),
    vmap_of_dot=lambda x: jax.vmap(lambda r: r @ W)(x),
    vmap_of_columns=lambda x: jax.vmap(lambda r: r * 2, in_axes=1, out_axes=1)(x),
    vmap_of_grad=lambda x: jax.vmap(jax.grad(lambda r: (jnp.sin(r) ** 2).sum()))(x),
    jvp=lambda x: jax.jvp(lambda x: reshard(jnp.sin(x), COLUMNS), (x,), (jnp.ones_like(x),)),
    vjp=lambda x: (pulled := jax.vjp(lambda x: reshard(jnp.sin(x), COLUMNS), x))[1](pulled[0] * 2),
    linearize=lambda x: jax.linearize(lambda x: reshard(jnp.sin(x), COLUMNS), x)[1](x),
    map=lambda x: lax.map(lambda r: r * 2, reshard(x, WHOLE)),
    associative_scan=lambda x: lax.associative_scan(jnp.add, x, axis=1),
    grad_of_fori_loop=lambda x: jax.grad(
        lambda x: lax.fori_loop(0, 3, lambda _, c: jnp.dot(c, W, out_sharding=ROWS), x).sum()
    )(x),
)


@jax.custom_vjp
def scaled(x):
    return reshard(x, COLUMNS) * 2


scaled.defvjp(lambda x: (scaled(x), x), lambda x, g: (reshard(g, jax.typeof(x).sharding) * jnp.cos(x),))


@jax.custom_jvp
def squashed(x):
    return jnp.tanh(x)


squashed.defjvp(lambda xs, ts: (squashed(*xs), reshard(reshard(ts[0], COLUMNS), jax.typeof(xs[0]).sharding) * 3))
of_x(
    custom_vjp=lambda x: scaled(x),
    grad_of_custom_vjp=lambda x: jax.grad(lambda x: (scaled(x) ** 2).sum())(x),
    grad_of_custom_jvp=lambda x: jax.grad(lambda x: (squashed(x) ** 2).sum())(x),
    value_and_grad=lambda x: jax.value_and_grad(lambda x: (scaled(x) ** 2).mean())(x),
)


# Axes of other types inside -------------------------------------------------------------------------------------------


of_x(
    auto_axes=lambda x: auto_axes(lambda x: jnp.sin(x) @ W, out_sharding=ROWS)(x),
    auto_axes_of_one=lambda x: auto_axes(jnp.sin, axes="data", out_sharding=ROWS)(x),
    grad_of_auto_axes=lambda x: jax.grad(lambda x: (auto_axes(jnp.sin, out_sharding=ROWS)(x) ** 2).sum())(x),
    explicit_in_auto_axes=lambda x: auto_axes(
        lambda x: explicit_axes(lambda y: reshard(y * 2, COLUMNS), in_sharding=ROWS)(x), out_sharding=COLUMNS
    )(x),
    constraint_in_auto_axes=lambda x: auto_axes(
        lambda x: lax.with_sharding_constraint(x * 2, COLUMNS), out_sharding=ROWS
    )(x),
)


# Sums that are not taken ----------------------------------------------------------------------------------------------


of_x(
    unreduced_einsum=lambda x: reshard(jnp.einsum("bd,be->de", x, x, out_sharding=Spec(unreduced={"data"})), WHOLE),
    unreduced_result=lambda x: jnp.einsum("bd,be->de", x, x, out_sharding=Spec(unreduced={"data"})),
    grad_of_unreduced_einsum=lambda x: jax.grad(
        lambda x: (reshard(jnp.einsum("bd,be->de", x, x, out_sharding=Spec(unreduced={"data"})), WHOLE) ** 2).sum()
    )(x),
    unreduced_sum_twice=lambda x: reshard(
        jnp.einsum("bd,be->de", x, x, out_sharding=Spec(unreduced={"data"}))
        + jnp.einsum("bd,be->de", x, x * 2, out_sharding=Spec(unreduced={"data"})),
        ROWS,
    ),
)


@program("reduced in grad", (X, ROWS), (W, WHOLE))
def reduced_in_grad(x, w):
    def loss(w):
        return jnp.dot(x, reshard(w, Spec(reduced={"data"}))).sum()

    return jax.grad(loss)(w)


@program("unreduced by reshard", (W, WHOLE))
def unreduced_by_reshard(w):
    u = reshard(w * 2, Spec(unreduced={"data"}))
    return reshard(u + u, WHOLE)


@program("reduced argument", (X, ROWS), (W, Spec(reduced={"data"})))
def reduced_argument(x, w):
    return reshard(jax.grad(lambda w: (x @ w).sum())(w), WHOLE)


# What the tests compare -----------------------------------------------------------------------------------------------


def is_leaf(y: Any) -> bool:
    return isinstance(y, shardc.PlacedArray)


def on_host(y: Any) -> np.ndarray:
    """A result on the host; sums that are not taken yet are taken."""
    if isinstance(y, jax.Array) and isinstance(y.sharding, NamedSharding) and y.sharding.spec.unreduced:
        with jax.set_mesh(y.sharding.mesh):
            y = jax.jit(lambda y: reshard(y, WHOLE))(y)
    return np.asarray(shardc.fetch(y) if is_leaf(y) else y)


def check(got: Any, want: Any) -> None:
    assert jax.tree.structure(got, is_leaf=is_leaf) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got, is_leaf=is_leaf), jax.tree.leaves(want), strict=True):
        a, b = on_host(a), on_host(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def call(given: Program, where: str, mesh: Mesh = EXPLICIT) -> Any:
    """What a shardc function gives, after its compiled program was held against its plan."""
    if where == "placed":
        f, args = shardc.function(given.fn, mesh=mesh), given.placed(EXPLICIT)
    elif where == "pinned":
        f, args = shardc.function(given.fn, mesh=mesh, in_placements=given.specs), given.args
    else:
        f, args = shardc.function(given.fn, mesh=mesh), given.args
    assert f.compile(*args).audit().ok
    return f(*args)


PLACED = pytest.mark.parametrize("where", ["placed", "pinned"])


@pytest.mark.sampled(12)
@PLACED
@pytest.mark.parametrize("name", PROGRAMS)
def test_in_context(name, where):
    given = PROGRAMS[name]
    with jax.set_mesh(EXPLICIT):
        check(call(given, where), jax.jit(given.fn)(*given.placed(EXPLICIT)))


@pytest.mark.sampled(12)
@PLACED
@pytest.mark.parametrize("name", PROGRAMS)
def test_without_a_mesh_in_context(name, where):
    """The types of the arguments have a mesh; what needs one in context fails as in jit, or has its value there."""
    given = PROGRAMS[name]
    args = given.placed(EXPLICIT)
    refusal: tuple[type[Exception], ...] = ()
    try:
        want = jax.jit(given.fn)(*args)
    except Exception as error:  # noqa: BLE001  # jit's own
        refusal = (type(error),)
        with jax.set_mesh(EXPLICIT):
            want = jax.jit(given.fn)(*args)
    with suppress(*refusal):
        check(call(given, where), want)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", PROGRAMS)
def test_of_open_arguments(name):
    """What no one places has no sharding in its type, and fails no program that jit runs."""
    given = PROGRAMS[name]
    with jax.set_mesh(EXPLICIT):
        try:
            want = jax.jit(given.fn)(*given.args)
        except Exception:  # noqa: BLE001  # the types of the others do not fit
            with suppress(Exception):
                check(call(given, "open"), jax.jit(given.fn)(*given.placed(EXPLICIT)))
        else:
            check(call(given, "open"), want)


@pytest.mark.parametrize("where", ["placed", "pinned", "open"])
@pytest.mark.parametrize("context", [None, EXPLICIT], ids=["bare", "in context"])
def test_shapes_of_a_shard_map(context, where):
    """Regression: without `in_specs` the pieces were as large as the whole, and the result four times too long."""
    given = Program(lambda x: jax.shard_map(double, mesh=EXPLICIT, out_specs=ROWS)(x), (X,), (ROWS,))
    with jax.set_mesh(context) if context else nullcontext():
        if where != "open":
            np.testing.assert_array_equal(call(given, where), X * 2)
        assert (
            call(given, where).shape
            == jax.jit(given.fn)(*(given.args if where == "open" else given.placed(EXPLICIT))).shape
        )


@pytest.mark.parametrize("context", [None, EXPLICIT, AUTO], ids=["bare", "explicit", "automatic"])
@pytest.mark.parametrize("in_specs", [{}, {"in_specs": ROWS}], ids=["inferred", "given"])
def test_a_shard_map_over_explicit_axes_in_a_function_on_automatic_ones(context, in_specs):
    """Pins are no types there: what is not placed is for JAX what it is in jit, at times an error."""
    given = Program(lambda x: jax.shard_map(double, mesh=EXPLICIT, out_specs=ROWS, **in_specs)(x), (X,), (ROWS,))
    with jax.set_mesh(context) if context else nullcontext():
        for where, args in (("pinned", given.args), ("placed", given.placed(EXPLICIT))):
            refusal: tuple[type[Exception], ...] = ()
            try:
                jax.jit(given.fn)(*args)
            except ValueError:
                refusal = (ValueError,)
            with suppress(*refusal):
                np.testing.assert_array_equal(call(given, where, AUTO), X * 2)


# A shard_map over some of the axes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["placed", "pinned"])
@pytest.mark.parametrize("in_specs", [{}, {"in_specs": ROWS}], ids=["inferred", "given"])
@pytest.mark.parametrize("mesh", [EXPLICIT, MIXED], ids=["explicit", "one automatic"])
def test_a_shard_map_over_some_axes(mesh, in_specs, where):
    """As jit runs it, or a limit that names the axis."""
    fn = lambda x: jax.shard_map(double, out_specs=ROWS, axis_names={"data"}, **in_specs)(x)  # noqa: E731
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, ROWS))
        np.testing.assert_array_equal(jax.jit(fn)(x), X * 2)
        f = shardc.function(fn, mesh=mesh, in_placements=(ROWS if where == "pinned" else shardc.AUTO,))
        try:
            got = f(x if where == "placed" else X)
        except shardc.PlacementError as error:
            assert "its axis_names leave 'model' to the compiler" in str(error)
        else:
            np.testing.assert_array_equal(got, X * 2)


# Programs that jit refuses --------------------------------------------------------------------------------------------


def split_carry(x):
    return lax.scan(lambda c, _: (reshard(c, COLUMNS), None), x, None, length=2)[0]


REFUSED = {
    "take": (lambda x: jnp.take(x, IDS, axis=0), X[IDS]),
    "index": (lambda x: x[jnp.array([0, 1])], X[:2]),
    "contraction": (lambda x: x.T @ x, X.T @ X),
    "carry": (split_carry, X),
    "branches": (lambda x: lax.cond(x.sum() > 0, lambda x: reshard(x, COLUMNS), lambda x: x, x), X),
    "shard map": (lambda x: jax.shard_map(double, mesh=EXPLICIT, in_specs=COLUMNS, out_specs=COLUMNS)(x), X * 2),
}


@pytest.mark.parametrize("where", ["placed", "pinned"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_jit_refuses(name, where):
    """The error of jit, or the value of one device."""
    fn, want = REFUSED[name]
    given = Program(fn, (X,), (ROWS,))
    with jax.set_mesh(EXPLICIT):
        refusal: type[Exception] = AssertionError
        try:
            jax.jit(fn)(*given.placed(EXPLICIT))
        except Exception as error:  # noqa: BLE001  # jit's own
            refusal = type(error)
        try:
            got = call(given, where)
        except refusal:
            return
        check(got, want)


# Sums that are not taken, as arguments --------------------------------------------------------------------------------


@pytest.fixture
def unreduced():
    """X.T @ X, of which each position on `data` holds a term."""
    with jax.set_mesh(EXPLICIT):
        x = jax.device_put(X, NamedSharding(EXPLICIT, ROWS))
        yield jax.jit(lambda x: jnp.einsum("bd,be->de", x, x, out_sharding=Spec(unreduced={"data"})))(x)


UNREDUCED = {
    "whole": lambda u: reshard(u, WHOLE),
    "rows": lambda u: reshard(u, ROWS),
    "sum": lambda u: reshard(u + u, WHOLE),
    "transposed": lambda u: reshard(u.T, WHOLE),
    "as it is": lambda u: u,
    "type": lambda u: reshard(u, WHOLE) * len(jax.typeof(u).sharding.spec.unreduced),
}


@pytest.mark.parametrize("name", UNREDUCED)
def test_an_unreduced_argument(unreduced, name):
    f = shardc.function(UNREDUCED[name], mesh=EXPLICIT)
    check(f(unreduced), jax.jit(UNREDUCED[name])(unreduced))


def test_an_unreduced_result_is_an_argument_again(unreduced):
    twice = shardc.function(lambda u: u + u, mesh=EXPLICIT)
    whole = shardc.function(lambda u: reshard(u, WHOLE), mesh=EXPLICIT)
    np.testing.assert_allclose(on_host(whole(twice(twice(unreduced)))), 4 * X.T @ X, rtol=1e-5)


def test_a_split_unreduced_argument():
    """Regression: the types of arguments that are split over one axis and unreduced over another."""
    with jax.set_mesh(EXPLICIT):
        x = jax.device_put(X, NamedSharding(EXPLICIT, BOTH))
        out = Spec("model", unreduced={"data"})
        u = jax.jit(lambda x: jnp.einsum("bd,be->de", x, reshard(x, ROWS), out_sharding=out))(x)
        f = lambda u: reshard(u, WHOLE) + 1  # noqa: E731
        check(shardc.function(f, mesh=EXPLICIT)(u), jax.jit(f)(u))


# A language model -----------------------------------------------------------------------------------------------------


OPTIMIZER = optax.adam(1e-2)
VOCABULARY, WIDTH, HIDDEN = 16, 8, 16


def parameters() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    shapes = {"embedding": (VOCABULARY, WIDTH), "up": (3, WIDTH, HIDDEN), "down": (3, HIDDEN, WIDTH)}
    return {n: (rng.normal(size=shape) / 4).astype(np.float32) for n, shape in shapes.items()}


SPECS = {"embedding": Spec("model"), "up": Spec(None, None, "model"), "down": Spec(None, "model")}
TOKENS = np.random.default_rng(2).integers(0, VOCABULARY, (8, 6)).astype(np.int32)


def layer(h, w):
    up, down = w
    inner = jax.nn.gelu(jnp.einsum("btd,df->btf", h, up, out_sharding=Spec("data", None, "model")))
    return h + jnp.einsum("btf,fd->btd", inner, down, out_sharding=Spec("data")), None


def loss_of(p, tokens, wrap):
    h = p["embedding"].at[tokens].get(out_sharding=Spec("data", None, None))
    h, _ = lax.scan(wrap(layer), h, (p["up"], p["down"]))
    logits = jnp.einsum("btd,vd->btv", h, p["embedding"], out_sharding=Spec("data"))
    targets = jax.nn.one_hot(tokens[:, 1:], VOCABULARY)
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits[:, :-1]) * targets, axis=-1))


def train(state, tokens, *, wrap):
    p, opt = state
    loss, g = jax.value_and_grad(loss_of)(p, tokens, wrap)
    updates, opt = OPTIMIZER.update(g, opt, p)
    return (optax.apply_updates(p, updates), opt), loss


@pytest.mark.sampled(0)
@pytest.mark.usefixtures("compiled_fast")
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["plain", "remat"])
@pytest.mark.parametrize("where", ["placed", "pinned", "open"])
def test_a_language_model(where, wrap):
    step = partial(train, wrap=wrap)
    with jax.set_mesh(EXPLICIT):
        put = lambda tree, specs: jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(EXPLICIT, s)), tree, specs)  # noqa: E731
        p, tokens = parameters(), jax.device_put(TOKENS, NamedSharding(EXPLICIT, ROWS))
        placed = put(p, SPECS)
        theirs = placed, OPTIMIZER.init(placed)
        if where == "placed":
            ours, pins = (placed, OPTIMIZER.init(placed)), None
        else:
            opt = OPTIMIZER.init(p)
            split = opt[0]._replace(count=WHOLE, mu=SPECS, nu=SPECS), opt[1]
            ours = (p, jax.tree.map(np.asarray, opt))
            pins = {"state": (SPECS, split), "tokens": ROWS} if where == "pinned" else {"tokens": ROWS}
        f = shardc.function(step, mesh=EXPLICIT, in_placements=pins, donate_argnames="state" if where == "open" else ())
        jitted = jax.jit(step)
        for _ in range(3):
            theirs, want = jitted(theirs, tokens)
            ours, got = f(ours, tokens if where == "placed" else TOKENS)
            np.testing.assert_allclose(got, want, rtol=1e-5)
        for a, b in zip(jax.tree.leaves(ours[0]), jax.tree.leaves(theirs[0]), strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-3, atol=1e-4)


# Automatic axes -------------------------------------------------------------------------------------------------------


AUTO_WHOLE, AUTO_ROWS = NamedSharding(AUTO, WHOLE), NamedSharding(AUTO, ROWS)


def normalized(x, w):
    """A norm by an einsum that says where its result lies."""
    return jnp.einsum("bd,d->bd", x * lax.rsqrt((x**2).mean(-1, keepdims=True)), w, out_sharding=AUTO_WHOLE)


AUTOMATIC = {
    "gather": (lambda w: jax.grad(lambda w: w.at[jnp.array([0, 1])].get(out_sharding=AUTO_WHOLE).sum())(w), (W[0],)),
    "gather forward": (lambda w: w.at[jnp.array([0, 1])].get(out_sharding=AUTO_WHOLE), (W[0],)),
    "device put to the type": (lambda x: jax.device_put(x * 2, jax.typeof(x).sharding), (X,)),
    "constraint to the type": (
        lambda x: x * 2 if jax.typeof(x).sharding.mesh.empty else lax.with_sharding_constraint(x * 2, AUTO_ROWS),
        (X,),
    ),
    "empty mesh": (
        lambda x: jax.device_put(x * 2, NamedSharding(jax.sharding.AbstractMesh((), ()), Spec())),
        (X,),
    ),
    "norm": (lambda x, w: jax.grad(lambda w: (normalized(x, w) ** 2).sum())(w), (X, W[0])),
    "norm of both": (
        lambda x, w: jax.grad(lambda x, w: (normalized(x, w) ** 3).sum(), argnums=(0, 1))(x, w),
        (X, W[0]),
    ),
    "norms in a scan": (
        lambda x, w: jax.grad(lambda w: lax.scan(lambda c, v: (normalized(c, v), None), x, w)[0].sum())(w),
        (X, W),
    ),
    "norms in a scan, remat": (
        lambda x, w: jax.grad(lambda w: lax.scan(jax.checkpoint(lambda c, v: (normalized(c, v), None)), x, w)[0].sum())(
            w
        ),
        (X, W),
    ),
    "norm of a lookup": (
        lambda e, w: jax.grad(
            lambda w: (jnp.einsum("bd,d->bd", e.at[IDS[0]].get(out_sharding=AUTO_WHOLE), w + 0.0) ** 2).sum()
        )(w),
        (E, W[0]),
    ),
    "embedding": (
        lambda e, w: jax.grad(lambda e: (normalized(e.at[IDS[0]].get(out_sharding=AUTO_WHOLE), w) ** 2).sum())(e),
        (E, W[0]),
    ),
}


@pytest.mark.parametrize("context", [None, AUTO], ids=["bare", "in context"])
@pytest.mark.parametrize("pin", [shardc.AUTO, ROWS], ids=["open", "rows"])
@pytest.mark.parametrize("name", AUTOMATIC)
def test_shardings_over_no_mesh_on_automatic_axes(name, pin, context):
    fn, args = AUTOMATIC[name]
    with jax.set_mesh(context) if context else nullcontext():
        want = jax.jit(fn)(*args)
        f = shardc.function(fn, mesh=AUTO, in_placements=(pin, *[shardc.AUTO] * (len(args) - 1)))
        check(f(*args), want)
        assert not f.plan(*args).gathered


# Other meshes ---------------------------------------------------------------------------------------------------------


ON_OTHERS = {
    "typeof": lambda x: x * 2 if jax.typeof(x).sharding.spec[0] == "data" else x * 3,
    "size": lambda x: x * jax.typeof(x).sharding.mesh.size,
    "reshard": lambda x: reshard(reshard(x, WHOLE) * 2, ROWS),
    "grad": lambda x: jax.grad(lambda x: (reshard(jnp.sin(x), jax.typeof(x).sharding) ** 2).sum())(x),
    "gather": lambda x: jax.grad(lambda x: (x.at[jnp.arange(8)].get(out_sharding=ROWS) ** 2).sum())(reshard(x, WHOLE)),
    "typeof of a part": lambda x: x * (2 if jax.typeof(x[:, 2:]).sharding.spec == Spec("data", None) else 3),
    "remat": lambda x: jax.grad(
        lambda x: lax.scan(jax.checkpoint(lambda c, _: (jnp.dot(c, W, out_sharding=ROWS), None)), x, None, length=3)[
            0
        ].sum()
    )(x),
}


@PLACED
@pytest.mark.parametrize("name", ON_OTHERS)
@pytest.mark.parametrize("mesh", [MIXED, LINE], ids=["one automatic", "one axis"])
def test_on_other_meshes(mesh, name, where):
    fn = ON_OTHERS[name]
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, ROWS))
        want = jax.jit(fn)(x)
        f = shardc.function(fn, mesh=mesh, in_placements=(ROWS if where == "pinned" else shardc.AUTO,))
        check(f(x if where == "placed" else X), want)


# What types change ----------------------------------------------------------------------------------------------------


def test_a_function_is_traced_anew_for_other_types():
    f = shardc.function(lambda x: x * (2 if jax.typeof(x).sharding.spec[0] == "data" else 3), mesh=EXPLICIT)
    with jax.set_mesh(EXPLICIT):
        for _ in range(2):
            for spec, factor in ((ROWS, 2), (COLUMNS, 3), (WHOLE, 3), (BOTH, 2)):
                np.testing.assert_array_equal(f(jax.device_put(X, NamedSharding(EXPLICIT, spec))), X * factor)


def test_texts_have_no_types():
    given = PROGRAMS["grad of remat in scan"]
    with jax.set_mesh(EXPLICIT):
        f = shardc.function(given.fn, mesh=EXPLICIT)
        assert "@" not in f.plan(*given.placed(EXPLICIT)).explain()


@pytest.mark.parametrize("name", ["typeof spec", "grad of remat in scan", "shard map without in specs"])
def test_shapes_with_shardings(name):
    """A plan for shapes is that of the arrays."""
    given = PROGRAMS[name]
    with jax.set_mesh(EXPLICIT):
        args = given.placed(EXPLICIT)
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in args]
        f = shardc.function(given.fn, mesh=EXPLICIT)
        assert f.plan(*shapes).explain() == f.plan(*args).explain()


def test_placements_of_a_dict_are_types():
    f = shardc.function(PROGRAMS["typeof spec"].fn, mesh=EXPLICIT, in_placements={"x": {"data": S(0)}})
    with jax.set_mesh(EXPLICIT):
        np.testing.assert_array_equal(f(X), X * 2)
        moved = jax.device_put(X, NamedSharding(EXPLICIT, COLUMNS))
        np.testing.assert_array_equal(f(moved), X * 2)  # a pin says where it is read, wherever it lies
