"""Arrays to a folder and back, in pieces; what is donated after the copy does not reach the folder."""

import importlib
import logging
import os
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from shardc import make_mesh
from shardc.checkpoint import orbax
from shardc.errors import CheckpointError
from tests.runtime.watchdog import within

X = {"x": np.arange(3)}


@pytest.fixture
def writer():
    made = orbax.Writer(60)
    yield made
    made.dismiss(60)
    made.close()
    orbax.forget()


def start(writer, folder, arrays):
    writer.start(0, [orbax.OwnersPart(folder, arrays)], lambda: None)


def finish(writer):
    writer.wait()
    writer.check()


def test_pieces(writer, tmp_path, monkeypatch):
    monkeypatch.setattr(orbax, "READ", 48)
    x = np.arange(40, dtype=np.int32).reshape(8, 5)
    sharded = jax.device_put(x, jax.NamedSharding(make_mesh(a=4), jax.P("a")))
    start(writer, tmp_path / "0", {"x": sharded, "0.1": np.float32(3), "z": np.full(3, -0.0), "one": x})
    finish(writer)
    chunk = orbax._opening(tmp_path / "0", "one").result().chunk_layout.read_chunk.shape
    assert 4 * np.prod(chunk) <= 48 and not np.any(x.shape % np.array(chunk))  # one device's array, too
    np.testing.assert_array_equal(orbax.read(tmp_path / "0", "x", ((1, 5), (2, 4))), x[1:5, 2:4])
    np.testing.assert_array_equal(orbax.read(tmp_path / "0", "x", ((7, 8),)), x[7:8])  # the rest is whole
    assert orbax.read(tmp_path / "0", "0.1", ()) == 3
    assert np.signbit(orbax.read(tmp_path / "0", "z", ((0, 3),))).all()
    assert os.listdir(tmp_path) == ["0"]


def test_a_folder_can_be_read_by_orbax_alone(writer, tmp_path):
    start(writer, tmp_path / "0", {"x": np.arange(3)})
    finish(writer)
    with ocp.PyTreeCheckpointer() as plain:
        np.testing.assert_array_equal(plain.restore(tmp_path / "0")["x"], np.arange(3))


@pytest.mark.parametrize("spec", [jax.P("a"), jax.P(("a", "b")), jax.P()])
def test_what_is_donated_at_once_is_saved_as_it_was(writer, tmp_path, spec):
    mesh = make_mesh(a=4, b=2)
    poison = jax.jit(lambda x: {k: v * jnp.nan for k, v in x.items()}, donate_argnums=0)
    value = np.random.default_rng(0).normal(size=(8, 512, 256)).astype(np.float32)
    for trial in range(3):
        x = {str(i): jax.jit(jnp.negative)(jax.device_put(value + i, jax.NamedSharding(mesh, spec))) for i in range(3)}
        start(writer, tmp_path / str(trial), x)
        for _ in range(3):
            x = poison(x)
        jax.block_until_ready(x)
        finish(writer)
        for i in range(3):
            got = orbax.read(tmp_path / str(trial), str(i), ((0, 8),))
            np.testing.assert_array_equal(got, -(value + i))


def test_what_is_not_there_is_an_error(writer, tmp_path):
    with pytest.raises(CheckpointError, match="the array x cannot be read"):
        orbax.read(tmp_path / "none", "x", ((0, 1),))
    start(writer, tmp_path / "0", {"x": np.arange(3)})
    finish(writer)
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


# -- the writer: beside the run; its errors come out in the thread of the run


def test_it_finishes_beside_the_run(writer, tmp_path):
    may_end, done = threading.Event(), []

    def finish():
        assert may_end.wait(30)
        done.append((tmp_path / "0").is_dir())

    writer.start(1, [orbax.OwnersPart(tmp_path / "0", X)], finish)
    assert not writer.wait(0.1) and done == []
    may_end.set()
    assert within(30, writer.wait) and done == [True]
    writer.check()


def test_one_after_the_other(writer, tmp_path):
    order = []

    def slow():
        time.sleep(0.2)
        order.append(1)

    writer.start(1, [orbax.OwnersPart(tmp_path / "1", X)], slow)
    within(30, writer.start, 2, [orbax.OwnersPart(tmp_path / "2", X)], lambda: order.append(2))
    within(30, writer.wait)
    assert order == [1, 2]


@pytest.mark.parametrize("arrays", [X, {}])
def test_an_error_comes_out_once(writer, tmp_path, arrays):
    def fail():
        raise OSError("disk full")

    writer.start(1, [orbax.OwnersPart(tmp_path / "0", arrays)], fail)
    within(30, writer.wait)
    with pytest.raises(CheckpointError) as error:
        writer.check()
    assert str(error.value) == f"The checkpoint of step 1 could not be written to {tmp_path / '0'}: OSError: disk full"
    writer.check()


def test_the_next_start_raises_it_too(writer, tmp_path):
    def fail():
        raise OSError("disk full")

    writer.start(1, [orbax.OwnersPart(tmp_path / "0", X)], fail)
    with pytest.raises(CheckpointError, match="step 1"):
        within(30, writer.start, 2, [orbax.OwnersPart(tmp_path / "1", X)], lambda: None)


def test_a_folder_that_cannot_be_made(writer, tmp_path, monkeypatch):
    (tmp_path / "file").touch()

    def begin():
        writer.start(1, [orbax.OwnersPart(tmp_path / "file" / "0", X)], lambda: None)
        writer.wait()
        writer.check()

    with pytest.raises(CheckpointError, match="The checkpoint of step 1 could not be written"):
        within(60, begin)


def test_a_dismissed_writer_does_not_hang(writer, tmp_path, caplog):
    may_end = threading.Event()
    writer.start(1, [orbax.OwnersPart(tmp_path / "0", X)], lambda: may_end.wait(30) and None)
    with caplog.at_level(logging.WARNING, "shardc"):
        within(10, writer.dismiss, 0.1)
    assert "still being written after 0.1 s" in caplog.text
    may_end.set()


def test_a_dismissed_writer_logs_its_error(writer, tmp_path, caplog):
    def fail():
        raise OSError("disk full")

    writer.start(1, [orbax.OwnersPart(tmp_path / "0", X)], fail)
    with caplog.at_level(logging.WARNING, "shardc"):
        writer.dismiss(30)
    assert "disk full" in caplog.text
    writer.check()


def test_an_error_of_orbax_names_the_step(writer, tmp_path, monkeypatch):
    class Refusing:
        def save(self, *_, **__):
            raise RuntimeError("no")

        def close(self):
            pass

    monkeypatch.setitem(writer._checkpointers, None, Refusing())
    with pytest.raises(CheckpointError, match=r"step 4 could not be written to .*: RuntimeError: no"):
        writer.start(4, [orbax.OwnersPart(tmp_path / "0", X)], lambda: None)
