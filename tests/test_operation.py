"""A user's own operation: its signatures, on a mesh and off it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
