"""Routes of sorted rows: places, slots, and rows that go there and back, against NumPy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from shardc.passes.rewrite.experts import routes
from shardc.passes.rewrite.experts.routes import Ends, Grid


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_room_is_the_mean_with_its_imbalance_and_its_chance():
    assert routes.room(0.0, 1, 10) == 3  # one row in a rare place may meet others
    assert routes.room(20.0, 4096, 10**6) == pytest.approx(2.9 * 16, rel=0.02)
    assert routes.room(5120.0, 64, 10**6) < 1.33 * 4096
    assert routes.room(12.5, 8, 12) == 12
    assert [Grid(1, 8, 8, 80_000, imbalance).capacity for imbalance in (1, 1.5, 9)] == [10_356, 15_435, 80_000]


def _case(replicas: int, owners: int, groups: int, rows: int, outside: int, rng: np.random.Generator):
    grid = Grid(replicas, owners, groups, rows)
    group = np.sort(rng.integers(0, groups, rows - 3))
    sizes = np.bincount(group, minlength=groups).astype(np.int32)  # the last three rows are of no group
    index = rng.integers(0, outside, rows).astype(np.int32)
    replica = index // (grid.block(outside) * owners)
    where = routes.places(grid, jnp.asarray(sizes), jnp.asarray(replica))
    way = routes.route(grid, where, Ends(outside, jnp.asarray(index), jnp.arange(rows, dtype=np.int32)))
    return grid, sizes, index, where, way


CASES = [(1, 4, 8, 60, 30), (2, 2, 5, 61, 31), (1, 3, 3, 40, 80)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES)
def test_rows_go_to_the_device_of_their_group(case, rng):
    grid, sizes, index, where, way = _case(*case, rng)
    assert bool(where.fits)
    assert bool(way.fits)
    group = np.repeat(np.arange(grid.groups), sizes)
    assert (np.asarray(where.device)[: group.size] % grid.owners == group // grid.own_groups).all()
    assert int(where.sizes.sum()) == group.size
    x = rng.normal(size=(case[-1], 2))
    blocks = routes.send(grid, way, jnp.asarray(x))
    np.testing.assert_array_equal(routes.in_order(grid, where, blocks, 0), np.float32(x[index]))
    np.testing.assert_array_equal(routes.by_position(where, jnp.asarray(x[index]), 0), blocks)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES)
def test_rows_come_back_to_where_they_are_added(case, rng):
    grid, _, index, where, way = _case(*case, rng)
    y, base = rng.normal(size=(grid.rows, 2)), rng.normal(size=(case[-1], 2))
    blocks = routes.by_position(where, jnp.asarray(y), 0)
    want = base.copy()
    np.add.at(want, index, y)
    got = routes.bring_back(grid, way, blocks, jnp.asarray(base), adds=True)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    x = rng.normal(size=(2, grid.rows))
    np.testing.assert_array_equal(routes.unfolded(grid, routes.folded(grid, jnp.asarray(x), 1), 1), np.float32(x))


def test_what_overflows_is_seen():
    grid = Grid(1, 4, 4, 400)
    one = jnp.array([400, 0, 0, 0])
    assert not routes.places(grid, one, jnp.zeros(400, np.int32)).fits
    where = routes.places(grid, jnp.full(4, 100), jnp.zeros(400, np.int32))
    rows = jnp.arange(400, dtype=np.int32)
    assert where.fits
    assert not routes.route(grid, where, Ends(400, rows, rows)).fits  # each source has one target
    mixed = (rows * 7) % 400
    beyond = Ends(400, mixed.at[0].set(401), rows)
    assert routes.route(grid, where, Ends(400, mixed, rows), alone=True).fits
    assert not routes.route(grid, where, beyond).fits
    assert routes.route(grid, where, beyond, drops=True).fits
    assert not routes.route(grid, where, Ends(400, mixed.at[0].set(7), rows), alone=True).fits
