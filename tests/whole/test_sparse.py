"""Products with sparse matrices (jax.experimental.sparse), entries and rows split, padding among the entries."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse

import shardc
from shardc import S

pytestmark = pytest.mark.usefixtures("compiled_fast")

RNG = np.random.default_rng(0)
ROWS, COLUMNS, ENTRIES = 12, 10, 13
WHERE = np.stack([np.sort(RNG.integers(0, ROWS, ENTRIES)), RNG.integers(0, COLUMNS, ENTRIES)], 1).astype(np.int32)
ENDS = np.searchsorted(WHERE[:, 0], np.arange(ROWS + 1)).astype(np.int32)
VALUES, X = RNG.normal(size=ENTRIES).astype(np.float32), RNG.normal(size=(COLUMNS, 5)).astype(np.float32)
W = RNG.normal(size=(ROWS, 5)).astype(np.float32)
SHAPE = ROWS, COLUMNS
SPLIT = {"data": S(0)}


def bcoo(values, where):
    """Its last entry is padding: outside of the matrix."""
    return sparse.BCOO(
        (values, jnp.where(jnp.arange(ENTRIES)[:, None] < ENTRIES - 1, where, jnp.array(SHAPE))), shape=SHAPE
    )


def bcsr(values, where):
    return sparse.BCSR((values, where[:, 1], ENDS), shape=SHAPE)


def gradient(matrix):
    loss = lambda values, where, x: jnp.sum((matrix(values, where) @ x) ** 2)  # noqa: E731
    return jax.grad(loss, argnums=(0, 2))


PRODUCTS = {
    "matrix": lambda values, where, x: bcoo(values, where) @ x,
    "vector": lambda values, where, x: bcoo(values, where) @ x[:, 0],
    "transpose": lambda values, where, x: bcoo(values, where).T @ W,
    "from the right": lambda values, where, x: x.T @ bcoo(values, where).T,
    "gradient": gradient(bcoo),
    "sampled": lambda values, where, x: sparse.bcoo_dot_general_sampled(
        W, x, where, dimension_numbers=(((1,), (1,)), ((), ()))
    ),
    "sum": lambda values, where, x: sparse.bcoo_reduce_sum(bcoo(values, where), axes=(1,)).todense(),
    "csr": lambda values, where, x: bcsr(values, where) @ x,
    "csr gradient": gradient(bcsr),
    "coo": lambda values, where, x: sparse.COO((values, where[:, 0], where[:, 1]), shape=SHAPE) @ x,
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("product", PRODUCTS)
def test_products_give_the_values_of_one_device(product):
    """A bcsr product was tried on random indices, which its kernel reads without a check: the process crashed."""
    want = jax.jit(PRODUCTS[product])(VALUES, WHERE, X)
    for axes, x in (({"data": 8}, {}), ({"data": 2}, {"data": S(1)}), ({"data": 4, "model": 2}, {"data": S(0)})):
        f = shardc.function(PRODUCTS[product], mesh=shardc.make_mesh(**axes), in_placements=(SPLIT, SPLIT, x))
        assert f.compile(VALUES, WHERE, X).audit().ok
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), f(VALUES, WHERE, X), want)


@pytest.mark.parametrize("axes", [{"data": 8}, {"data": 4, "model": 2}], ids=str)
def test_each_device_multiplies_its_own_entries(axes):
    """Everything was whole on every device, 10.5 MiB of entries."""
    entries, rows = 1 << 20, 1 << 12
    mesh = shardc.make_mesh(topology="v5p:2x2x2", **axes)
    f = shardc.function(
        lambda values, where, x: sparse.BCOO((values, where), shape=(rows, rows)) @ x,
        mesh=mesh, in_placements=(SPLIT, SPLIT, {}), out_placements={},
    )  # fmt: skip
    plan = f.plan(*(jax.ShapeDtypeStruct(*a) for a in (((entries,), "f4"), ((entries, 2), "i4"), ((rows,), "f4"))))
    assert [(c.kind, c.bytes) for c in plan.collectives] == [("all_reduce", 2 * 7 * 4 * rows // 8)]
    assert "without a sharding rule: none" in plan.explain()
