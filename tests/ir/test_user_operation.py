"""A user's own operation: its signatures, on a mesh and off it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import shardc
from shardc import P, S


@shardc.signature("b s d, d f -> b s f", linear=(0, 1))
def project(x, w):
    return jnp.einsum("bsd,df->bsf", x, w)


@shardc.signature("n -> ", reduce="max")
def largest(x):
    return x.max()


@pytest.fixture(scope="module")
def mesh():
    return shardc.make_mesh(data=4, model=2)


X = np.random.default_rng(0).normal(size=(50, 30, 7)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(7, 2)).astype(np.float32)


def test_a_summed_factor_that_is_split_leaves_a_partial_sum():
    mesh = shardc.make_mesh(model=2)
    f = shardc.function(project, mesh=mesh, in_placements=({"model": S(2)}, {"model": S(0)}), out_placements={})
    plan = f.plan(X, W)
    assert [(c.kind, c.src) for c in plan.collectives] == [("all_reduce", "{model: P(sum)}")]
    np.testing.assert_allclose(f(X, W), X @ W, rtol=1e-5, atol=1e-6)


def test_uneven_splits_are_masked_where_the_operation_is_linear():
    pins = {"data": S(2)}, {"data": S(0)}  # 7 over 4
    f = shardc.function(project, mesh=shardc.make_mesh(data=4), in_placements=pins, out_placements={})
    assert f.plan(X, W).bytes_per_device == 2 * 3 * (50 * 30 * 2 * 4) // 4
    np.testing.assert_allclose(f(X, W), X @ W, rtol=1e-5, atol=1e-6)


def test_partial_sums_pass_where_it_is_linear(mesh):
    f = shardc.function(project, mesh=mesh, in_placements=({"data": P}, {}), out_placements={"data": P})
    assert f.plan(X, W).collectives == ()
    np.testing.assert_allclose(np.asarray(f(X, W)), X @ W, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [8000, 8001])
def test_a_maximum(mesh, size):
    x = np.arange(size, dtype=np.float32)
    f = shardc.function(largest, mesh=mesh, in_placements={"x": {"data": S(0)}})
    assert float(f(x)) == size - 1
    kinds = {c.kind for c in f.plan(x).collectives}
    assert kinds == ({"all_reduce"} if size == 8000 else {"all_gather"})  # nothing says what a maximum does not notice


def test_it_differentiates_and_batches(mesh):
    def loss(x, w):
        return (project(x, w) ** 2).sum()

    want = jax.grad(lambda x, w: ((x @ w) ** 2).sum(), (0, 1))(X, W)
    f = shardc.function(jax.grad(loss, (0, 1)), mesh=mesh, in_placements=({"data": S(0)}, {"model": S(1)}))
    for got, expected in zip(f(X, W), want, strict=True):
        np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(jax.vmap(project, (0, None))(X[:, None], W), (X @ W)[:, None], rtol=1e-5, atol=1e-6)


def test_the_notation_is_held_against_the_shapes():
    with pytest.raises(shardc.PlacementError) as error:
        shardc.signature("b d, d f -> b f")(lambda x, w: (x, w))(np.ones((2, 3, 4)), np.ones((4, 5)))
    assert str(error.value).startswith(
        "shardc.signature('b d, d f -> b f'): operand 0 has shape (2, 3, 4), 'b d' names 2 dimensions; "
        "1 results are named, the operation has 2."
    )
    with pytest.raises(shardc.PlacementError, match="is not in factor notation"):
        shardc.signature("b d")
    with pytest.raises(shardc.PlacementError, match="kind='flash'; write kind=\"attention\", or leave it out"):
        shardc.signature("b d -> b d", kind="flash")  # pyright: ignore


def test_a_kernel_of_attention_takes_longer_than_a_product_where_the_machine_says_so():
    mesh = shardc.make_mesh(topology="h100", data=8)
    x = jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)

    def computing(**kind):
        own = shardc.signature("b _ -> b _", flops=1e15, **kind)(jnp.tanh)
        return shardc.function(own, mesh=mesh, in_placements=({"data": S(0)},)).plan(x).time.compute

    assert computing(kind="attention") == pytest.approx(computing() / 0.72)


def _scaled(x_ref, w_ref, out_ref):
    out_ref[...] = jnp.dot(x_ref[...], w_ref[...]) * 2


@shardc.signature("b d, d f -> b f", linear=(0, 1))
def pallas_matmul(x, w):
    out = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
    return pl.pallas_call(_scaled, out_shape=out, interpret=True)(x, w)


@shardc.signature("b d -> b d")
def pallas_rows(x):
    """A kernel with one program for each row: it runs as many as the piece has rows."""
    row = pl.BlockSpec((1, x.shape[1]), lambda i: (i, 0))

    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...] * jax.nn.sigmoid(x_ref[...])

    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, grid=x.shape[:1], in_specs=[row], out_specs=row, out_shape=out, interpret=True)(x)


@pytest.mark.parametrize(
    ("ins", "kinds"),
    [({"x": {"a": S(0)}, "w": {}}, []), ({"x": {"a": S(1)}, "w": {"a": S(0)}}, ["reduce_scatter"])],
    ids=str,
)
def test_pallas_kernels(ins, kinds):
    mesh = shardc.make_mesh(a=4)
    x, w = np.random.default_rng(0).normal(size=(7, 8)), np.random.default_rng(1).normal(size=(8, 6))
    x, w = x.astype(np.float32), w.astype(np.float32)
    program = lambda x, w: pallas_rows(pallas_matmul(x, w))  # noqa: E731
    exe = shardc.function(program, mesh=mesh, in_placements=ins, out_placements={"a": S(0)}).compile(x, w)
    np.testing.assert_allclose(np.asarray(exe(x, w)), pallas_rows(pallas_matmul(x, w)), rtol=1e-4, atol=1e-5)
    assert [c.kind for c in exe.plan.collectives] == kinds
    assert exe.audit().ok and not exe.plan.gathered


@shardc.signature("b _ _ -> b _ _, b")
def ffi_cholesky(x):
    """A foreign function of LAPACK: the lower triangle of each matrix, by columns."""
    by_columns = {"input_layouts": [(0, 2, 1)], "output_layouts": [(0, 2, 1), (0,)]}
    out = (jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(x.shape[:1], np.int32))
    return jax.ffi.ffi_call("lapack_spotrf_ffi", out, input_output_aliases={0: 0}, **by_columns)(x, uplo=np.uint8(76))


def test_foreign_functions():
    jnp.linalg.cholesky(jnp.eye(2))  # binds LAPACK
    root = np.random.default_rng(0).normal(size=(6, 4, 4)).astype(np.float32)
    x = root @ root.swapaxes(1, 2) + 4 * np.eye(4, dtype=np.float32)
    lower = lambda x: jnp.tril(ffi_cholesky(x)[0])  # noqa: E731
    f = shardc.function(lower, mesh=shardc.make_mesh(a=4), in_placements={"x": {"a": S(0)}})
    exe = f.compile(x)
    np.testing.assert_allclose(np.asarray(exe(x)), np.linalg.cholesky(x), rtol=1e-4, atol=1e-4)
    assert not exe.plan.gathered and exe.audit().ok
