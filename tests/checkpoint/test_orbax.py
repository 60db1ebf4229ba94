"""Arrays to a folder and back, in pieces; what is donated after the copy does not reach the folder."""

import importlib
import os

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from shardc import make_mesh
from shardc.checkpoint import orbax
from shardc.errors import CheckpointError


@pytest.fixture
def saver():
    made = orbax.Saver(60)
    yield made
    made.close()
    orbax.forget()


def test_pieces(saver, tmp_path):
    x = np.arange(40, dtype=np.int32).reshape(8, 5)
    sharded = jax.device_put(x, jax.NamedSharding(make_mesh(a=4), jax.P("a")))
    saver.start(tmp_path / "0", {"x": sharded, "0.1": np.float32(3), "z": np.full(3, -0.0)})
    saver.wait()
    np.testing.assert_array_equal(orbax.read(tmp_path / "0", "x", ((1, 5), (2, 4))), x[1:5, 2:4])
    np.testing.assert_array_equal(orbax.read(tmp_path / "0", "x", ((7, 8),)), x[7:8])  # the rest is whole
    assert orbax.read(tmp_path / "0", "0.1", ()) == 3
    assert np.signbit(orbax.read(tmp_path / "0", "z", ((0, 3),))).all()
    assert os.listdir(tmp_path) == ["0"]


def test_a_folder_can_be_read_by_orbax_alone(saver, tmp_path):
    saver.start(tmp_path / "0", {"x": np.arange(3)})
    saver.wait()
    with ocp.PyTreeCheckpointer() as plain:
        np.testing.assert_array_equal(plain.restore(tmp_path / "0")["x"], np.arange(3))


@pytest.mark.parametrize("spec", [jax.P("a"), jax.P(("a", "b")), jax.P()])
def test_what_is_donated_at_once_is_saved_as_it_was(saver, tmp_path, spec):
    mesh = make_mesh(a=4, b=2)
    poison = jax.jit(lambda x: {k: v * jnp.nan for k, v in x.items()}, donate_argnums=0)
    value = np.random.default_rng(0).normal(size=(8, 512, 256)).astype(np.float32)
    for trial in range(3):
        x = {str(i): jax.jit(jnp.negative)(jax.device_put(value + i, jax.NamedSharding(mesh, spec))) for i in range(3)}
        saver.start(tmp_path / str(trial), x)
        for _ in range(3):
            x = poison(x)
        jax.block_until_ready(x)
        saver.wait()
        for i in range(3):
            got = orbax.read(tmp_path / str(trial), str(i), ((0, 8),))
            np.testing.assert_array_equal(got, -(value + i))


def test_what_is_not_there_is_an_error(saver, tmp_path):
    with pytest.raises(CheckpointError, match="the array x cannot be read"):
        orbax.read(tmp_path / "none", "x", ((0, 1),))
    saver.start(tmp_path / "0", {"x": np.arange(3)})
    saver.wait()
    with pytest.raises(CheckpointError, match="the array x cannot be read"):
        orbax.read(tmp_path / "0", "x", ((0, 4),))


def test_without_orbax_the_extra_is_named(monkeypatch):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(CheckpointError) as error:
        orbax.module("orbax.checkpoint")
    assert str(error.value) == (
        "shardc.checkpoints needs orbax: pip install \"shardc[checkpoints]\" (No module named 'orbax.checkpoint')."
    )
