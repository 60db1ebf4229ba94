"""The state that a loop begins with, given as a function: a restart takes the leaves that a first start makes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from shardc import S, make_mesh
from shardc.checkpoint.checkpoints import described_by
from shardc.errors import CheckpointError


def restarted(directory, init, **options):
    """What a first start has, and what a second one restores of it."""
    with shardc.checkpoints(directory) as saved:
        first, start = saved.last(or_else=init, **options)
        assert start == 0
        saved.step(0, first)
    with shardc.checkpoints(directory) as saved:
        again, start = saved.last(or_else=init, **options)
        assert start == 1
    return first, again


def kinds(tree):
    return [
        (type(x), getattr(x, "dtype", None), getattr(x, "shape", None), getattr(x, "weak_type", None))
        for x in jax.tree.leaves(tree)
    ]


def leaves_of_all_kinds():
    return {
        "w": jnp.ones(3, jnp.bfloat16), "weak": jnp.asarray(2.0), "lr": 0.1, "big": 2**40, "on": True, "name": "adam",
        "wide": np.arange(3.0), "scalar": np.int64(7), "key": jax.random.key(0),
    }  # fmt: skip


def test_leaves_of_all_kinds(tmp_path):
    first, again = restarted(tmp_path, leaves_of_all_kinds)
    assert kinds(first) == kinds(again)
    assert (again["lr"], again["big"], again["on"], again["name"]) == (0.1, 2**40, True, "adam")
    assert (again["w"] * again["lr"]).dtype == jnp.bfloat16


@pytest.mark.parametrize("how", ["value", "put", "choice"])
def test_a_function_that_cannot_be_traced(tmp_path, how):
    mesh = make_mesh(a=4)

    def init():
        x = jnp.ones(13)
        if how == "value":
            return {"w": x * float(x.sum())}
        if how == "put":
            return {"w": shardc.put(x, mesh, {"a": S(0)})}
        return {"w": x if x.sum() > 0 else -x}

    first, again = restarted(tmp_path, init)
    assert kinds(first) == kinds(again)
    np.testing.assert_array_equal(np.asarray(first["w"]), np.asarray(again["w"]))


def test_arrays_that_a_function_closes_over_keep_their_sharding():
    x = shardc.put(np.ones(8, np.float32), make_mesh(a=4), {"a": S(0)})
    assert described_by(lambda: {"x": x})["x"].sharding == x.sharding
    assert isinstance(described_by(lambda: jnp.ones(3)), jax.ShapeDtypeStruct)


def test_a_function_that_is_at_fault_says_so():
    with pytest.raises(ZeroDivisionError):
        described_by(lambda: 1 / 0)


def test_numbers_at_a_placement(tmp_path):
    mesh = make_mesh(a=4)
    state, where = {"w": jnp.ones((13, 2)), "n": 3}, {"w": {"a": S(0)}, "n": {}}
    first, again = restarted(tmp_path, lambda: state, mesh=mesh, placements=where)
    assert [str(x.dtype) for x in jax.tree.leaves(first)] == [str(x.dtype) for x in jax.tree.leaves(again)]
    with shardc.checkpoints(tmp_path) as saved:
        got, _ = saved.last(or_else=state, mesh=mesh, placements=where)
    assert int(got["n"]) == 3


def test_a_directory_of_somebody_else(tmp_path):
    (tmp_path / "2024").mkdir()
    (tmp_path / "2024" / "thesis.txt").touch()
    (tmp_path / "0005").mkdir()
    with pytest.raises(CheckpointError, match=r"no checkpoints of shardc: 2024\. Give a directory"):
        shardc.checkpoints(tmp_path).__enter__()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0005", "2024"]


def test_an_old_checkpoint_that_cannot_be_removed(tmp_path, monkeypatch, caplog):
    def busy(directory, keep):
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr("shardc.checkpoint.checkpoints.prune", busy)
    with shardc.checkpoints(tmp_path, keep=1) as saved:
        saved.step(np.int64(0), {"n": 1})
        saved.step(1, {"n": 2})
    assert "could not be removed: [Errno 16] Device or resource busy" in caplog.text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "1"]
