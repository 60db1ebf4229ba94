"""Data in and values out, in several processes: run by `test_border.py`, in each of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardc
from shardc import B, P, PlacedArray, S
from shardc.arrays.placed import has_every_piece

ME, ALL = jax.process_index(), jax.process_count()
EACH = jax.local_device_count()
MESH = shardc.make_mesh(data=ALL * EACH // 2, model=2)
PLACEMENTS = [
    {"data": S(0)}, {"model": S(0)}, {"data": S(0), "model": S(0)}, {"data": S(0), "model": S(1)},
    {"model": S(0), "data": S(1)}, {"data": S(1), "model": S(1)}, {},
    {"data": P("sum"), "model": S(0)}, {"data": S(1), "model": P("sum")},
    {"data": P("sum"), "model": P("sum")},
]  # fmt: skip
SHAPES = [(8, 8), (7, 5), (13, 3), (1, 9), (0, 4), (2, 16)]


def value(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def own(x, placement):
    """This process's part of a value, by brute force: the elements that `show` says its devices hold."""
    numbers = np.arange(x.size).reshape(x.shape)
    placement = {a: s for a, s in placement.items() if not isinstance(s, P)}
    placed = shardc.put(numbers, MESH, placement)
    physical = placed.physical if isinstance(placed, PlacedArray) else placed
    wanted = set()
    for shard in physical.addressable_shards:
        wanted |= set(np.asarray(shard.data).ravel().tolist())
    # padding is 0 too, so the first element counts only if this process holds the first piece
    first = any(all((i.start or 0) == 0 for i in s.index) for s in physical.addressable_shards)
    wanted -= set() if first else {0}
    at = [
        np.unique(np.asarray(sorted(wanted), int) // int(np.prod(x.shape[d + 1 :])) % max(1, x.shape[d]))
        for d in range(x.ndim)
    ]
    return x[np.ix_(*at)] if wanted else x[shardc.rows_here(x.shape, MESH, placement)]


def test_the_text_of_an_array_whose_pieces_are_elsewhere():
    x = shardc.put(value((13, 3)), MESH, {"data": S(0)})
    assert str(x) == repr(x) and repr(x).startswith("PlacedArray(float32[13,3], {data: S(0)}")


@pytest.mark.parametrize("placement", PLACEMENTS[:6], ids=lambda p: str(shardc.Placement(p)))
def test_a_process_reads_its_own_pieces(placement):
    x, elements = value((13, 6)), []

    def read(path, at):
        elements.extend(np.arange(x.size).reshape(x.shape)[at].ravel().tolist())
        return x[at]

    placed = shardc.put(jax.ShapeDtypeStruct(x.shape, x.dtype), MESH, placement, read=read)
    np.testing.assert_array_equal(shardc.fetch(placed), x)
    mine = own(np.arange(x.size).reshape(x.shape), placement)
    assert sorted(elements) == sorted(mine.ravel().tolist())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda p: str(shardc.Placement(p)))
def test_put_and_fetch(shape, placement):
    x = value(shape)
    placed = shardc.put(x, MESH, placement)
    np.testing.assert_array_equal(shardc.fetch(placed), x)
    y = jnp.asarray(x)
    np.testing.assert_array_equal(shardc.fetch(shardc.put(y, MESH, placement)), x)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda p: str(shardc.Placement(p)))
def test_rows_of_this_process(shape, placement):
    x = value(shape, 1)
    part = x[shardc.rows_here(shape, MESH, placement)] if 0 in shape else own(x, placement)
    placed = shardc.put({"x": part}, MESH, placement, here=True)["x"]
    assert placed.shape == shape and placed.dtype == x.dtype
    np.testing.assert_array_equal(shardc.fetch(placed), x)
    np.testing.assert_array_equal(x[shardc.rows_here(shape, MESH, placement)], part)


def test_the_rows_of_a_process_may_lie_apart():
    placement = {"model": S(0), "data": S(0)}  # the inner axis crosses the border
    x = value((2 * MESH.size, 3))
    with pytest.raises(shardc.ArgumentError, match="several pieces of an array of shape"):
        shardc.rows_here(x.shape, MESH, placement)
    part = own(x, placement)
    assert part.shape == (2 * EACH, 3)
    np.testing.assert_array_equal(shardc.fetch(shardc.put(part, MESH, placement, here=True)), x)


@pytest.mark.parametrize("old", PLACEMENTS[:5] + PLACEMENTS[7:8], ids=lambda p: str(shardc.Placement(p)))
@pytest.mark.parametrize("new", PLACEMENTS[:5] + PLACEMENTS[7:8], ids=lambda p: str(shardc.Placement(p)))
def test_put_again(old, new):
    for shape in ((8, 8), (7, 5)):
        x = value(shape, 2)
        moved = shardc.put(shardc.put(x, MESH, old), MESH, new)
        want = shardc.put(x, MESH, new)
        assert type(moved) is type(want)
        assert moved.sharding == want.sharding
        np.testing.assert_array_equal(shardc.fetch(moved), x)


@pytest.mark.parametrize("size", [8, 7])
def test_keys(size):
    keys = jax.random.split(jax.random.key(3), size)
    want = jax.random.key_data(keys)
    placed = shardc.put(keys, MESH, {"data": S(0)})
    np.testing.assert_array_equal(jax.random.key_data(shardc.fetch(placed)), want)
    part = keys[shardc.rows_here(keys.shape, MESH, {"data": S(0)})]
    np.testing.assert_array_equal(
        jax.random.key_data(shardc.fetch(shardc.put(part, MESH, {"data": S(0)}, here=True))), want
    )
    moved = shardc.put(placed, MESH, {"data": S(0), "model": S(0)})
    np.testing.assert_array_equal(jax.random.key_data(shardc.fetch(moved)), want)
    draw = shardc.function(lambda k: jax.vmap(jax.random.normal)(k), mesh=MESH, in_placements=({"data": S(0)},))
    np.testing.assert_array_equal(shardc.fetch(draw(placed)), jax.vmap(jax.random.normal)(keys))


@pytest.mark.parametrize("x", [3, 2.5, True, np.float64(1.5), np.int8(4)], ids=repr)
def test_numbers(x):
    alone = shardc.put(x, Mesh(np.asarray(jax.local_devices()), ("data",)), {})
    placed = shardc.put(x, MESH, {})
    assert (placed.dtype, placed.weak_type) == (alone.dtype, alone.weak_type)
    assert float(placed) == float(x)
    assert shardc.fetch(shardc.put(x, MESH, {}, here=True)) == x


def test_what_is_whole_here_is_read_without_the_others():
    x = value((8, 6))
    whole, split = shardc.put(x, MESH, {}), shardc.put(x, MESH, {"model": S(0)})
    uneven = shardc.put(value((7, 6)), MESH, {"model": S(0)})
    if ME == 0:  # the other processes do not come
        np.testing.assert_array_equal(np.asarray(whole), x)
        np.testing.assert_array_equal(np.asarray(split), x)
        np.testing.assert_array_equal(shardc.fetch(split), x)
        np.testing.assert_array_equal(np.asarray(uneven), value((7, 6)))
        assert float(uneven[0, 0]) == value((7, 6))[0, 0]


def test_what_is_elsewhere_is_an_error_that_names_fetch():
    placed = shardc.put(value((7,)), MESH, {"data": S(0)})
    assert isinstance(placed, PlacedArray)
    for read in (np.asarray, float, lambda x: x.tolist(), lambda x: x.item()):
        with pytest.raises(RuntimeError, match=r"pieces in other processes; read it with shardc\.fetch\(x\)"):
            read(placed)
    np.testing.assert_array_equal(np.asarray(placed.to_jax()), value((7,)))
    assert repr(placed).startswith("PlacedArray(float32[7]")


def test_fetch_takes_any_tree_by_one_program():
    tree = {"a": shardc.put(value((8, 2)), MESH, {"data": S(0)}), "b": [shardc.put(value((7,)), MESH, {"data": S(0)})]}
    tree |= {"c": 3, "d": "text", "e": jnp.arange(3), "f": jax.jit(lambda x: x * 2)(tree["a"])}
    got = shardc.fetch(tree)
    np.testing.assert_array_equal(got["f"], 2 * value((8, 2)))
    np.testing.assert_array_equal(got["b"][0], value((7,)))
    assert (got["c"], got["d"]) == (3, "text")


@pytest.mark.skipif(ALL != 2, reason="the texts are those of 2 processes")
def test_rows_that_make_no_array():
    with pytest.raises(shardc.ArgumentError) as error:
        shardc.put({"x": np.ones((4 if ME == 0 else 5, 2))}, MESH, {"data": S(0)}, here=True)
    assert "x: dimension 0: process 0 has 4, process 1 has 5; of 9 elements in 4 pieces process 0 must have 6" in str(
        error.value
    )
    with pytest.raises(shardc.ArgumentError, match="x: the types differ: process 0 has float32, process 1 has int32"):
        shardc.put({"x": np.ones(4, np.float32 if ME == 0 else np.int32)}, MESH, {"data": S(0)}, here=True)
    with pytest.raises(shardc.ArgumentError, match="the parts differ in rank: process 0: "):
        shardc.put({"x": np.ones((4,) * (ME + 1))}, MESH, {"data": S(0)}, here=True)
    with pytest.raises(shardc.ArgumentError, match=r"dimension 1: process 0 has 2, process 1 has 3; processes that"):
        shardc.put({"x": np.ones((4, 2 + ME))}, MESH, {"data": S(0)}, here=True)
    with pytest.raises(shardc.DisagreementError, match="x: processes 0 and 1 hold the same part of it, and have other"):
        shardc.put({"x": np.full((4, 2), ME)}, MESH, {"model": S(0)}, here=True)
    with pytest.raises(shardc.ArgumentError, match="x: process 0 is an array of several processes already"):
        shardc.put({"x": shardc.put(value((8,)), MESH, {"data": S(0)})}, MESH, {"data": S(0)}, here=True)


def test_whole_values_that_differ_are_an_error_of_the_next_call():
    shardc.put({"w": np.full(3, ME)}, MESH, {})
    with pytest.raises(shardc.DisagreementError, match=r"shardc\.put: .*\n  the value of w: process 0: .*process 1: "):
        shardc.fetch(1)
    shardc.put({"w": np.full(3, 1)}, MESH, {})
    shardc.fetch(1)


def test_an_array_that_the_user_changes_later():
    raw = np.empty(4096 + 64, np.uint8)
    x = raw[-raw.ctypes.data % 64 :][:4096].view(np.float32)
    x[:] = 1
    placed = [shardc.put(x, MESH, {"data": S(0)}), shardc.put(x[: 1024 // ALL], MESH, {"data": S(0)}, here=True)]
    jax.block_until_ready(placed)
    x[:] = 2
    assert all((shardc.fetch(p) == 1).all() for p in placed)


def test_arrays_of_this_process_alone_are_put():
    f = shardc.function(lambda x: x * 2, mesh=MESH, in_placements=({"data": S(0)},))
    x = jax.device_put(value((8, 2)), jax.local_devices()[1])
    with pytest.raises(shardc.ArgumentError, match=r"x = shardc.put\(x, mesh, .* same value; with here=True put takes"):
        f(x)
    np.testing.assert_array_equal(shardc.fetch(f(shardc.put(x, MESH, {}))), 2 * value((8, 2)))
    np.testing.assert_array_equal(shardc.fetch(f(shardc.fetch(x))), 2 * value((8, 2)))


def test_arguments_and_results():
    x = value((8, 4))
    f = shardc.function(lambda x, w: (x @ w, x.sum()), mesh=MESH, in_placements=({"data": S(0)}, {"model": S(1)}))
    for arg in (x, shardc.put(x, MESH, {"data": S(0)}), shardc.put(x, MESH, {"model": S(1)}), jnp.asarray(x)):
        y, total = f(arg, np.eye(4, dtype=np.float32))
        np.testing.assert_allclose(shardc.fetch(y), x, rtol=1e-6)
        np.testing.assert_allclose(float(total), x.sum(), rtol=1e-5)


def test_replicated_results_are_read_everywhere():
    f = shardc.function(lambda x: x.sum(), mesh=MESH, in_placements=({"data": S(0)},), out_placements={})
    assert float(f(np.ones(8, np.float32))) == 8
    assert has_every_piece(f(np.ones(8, np.float32)))


def test_local_meshes_are_of_their_process():
    mesh = Mesh(np.asarray(jax.local_devices()), ("data",))
    f = shardc.function(lambda x: x * ME, mesh=mesh, in_placements=({"data": S(0)},))
    np.testing.assert_array_equal(np.asarray(f(np.arange(8))), np.arange(8) * ME)
    assert shardc.rows_here((8,), mesh, {"data": S(0)}) == (slice(0, 8),)
    np.testing.assert_array_equal(np.asarray(shardc.put(np.full(7, ME), mesh, {"data": B}, here=True)), np.full(7, ME))


def test_sharding_of_jax():
    rows = 2 * MESH.shape["data"] // ALL
    x = value((rows * ALL, 4))
    part = x[rows * ME : rows * (ME + 1)]
    given = jax.make_array_from_process_local_data(NamedSharding(MESH, PartitionSpec("data")), part)
    np.testing.assert_array_equal(shardc.fetch(given), x)
