"""The writer: beside the run; its errors come out in the thread of the run."""

import logging
import threading
import time

import numpy as np
import pytest

from shardc.checkpoint.orbax import Saver
from shardc.checkpoint.writer import Writer
from shardc.errors import CheckpointError
from tests.runtime.watchdog import within

X = {"x": np.arange(3)}


@pytest.fixture
def writer():
    made = Writer(60)
    yield made
    made.dismiss(60)
    made.close()


def test_it_finishes_beside_the_run(writer, tmp_path):
    may_end, done = threading.Event(), []

    def finish():
        assert may_end.wait(30)
        done.append((tmp_path / "0").is_dir())

    writer.start(1, tmp_path / "0", X, finish)
    assert not writer.wait(0.1) and done == []
    may_end.set()
    assert within(30, writer.wait) and done == [True]
    writer.check()


def test_one_after_the_other(writer, tmp_path):
    order = []

    def slow():
        time.sleep(0.2)
        order.append(1)

    writer.start(1, tmp_path / "1", X, slow)
    within(30, writer.start, 2, tmp_path / "2", X, lambda: order.append(2))
    within(30, writer.wait)
    assert order == [1, 2]


@pytest.mark.parametrize("arrays", [X, {}])
def test_an_error_comes_out_once(writer, tmp_path, arrays):
    def fail():
        raise OSError("disk full")

    writer.start(1, tmp_path / "0", arrays, fail)
    within(30, writer.wait)
    with pytest.raises(CheckpointError) as error:
        writer.check()
    assert str(error.value) == f"The checkpoint of step 1 could not be written to {tmp_path / '0'}: OSError: disk full"
    writer.check()


def test_the_next_start_raises_it_too(writer, tmp_path):
    def fail():
        raise OSError("disk full")

    writer.start(1, tmp_path / "0", X, fail)
    with pytest.raises(CheckpointError, match="step 1"):
        within(30, writer.start, 2, tmp_path / "1", X, lambda: None)


def test_a_folder_that_cannot_be_made(writer, tmp_path, monkeypatch):
    (tmp_path / "file").touch()

    def begin():
        writer.start(1, tmp_path / "file" / "0", X, lambda: None)
        writer.wait()
        writer.check()

    with pytest.raises(CheckpointError, match="The checkpoint of step 1 could not be written"):
        within(60, begin)


def test_a_dismissed_writer_does_not_hang(writer, tmp_path, caplog):
    may_end = threading.Event()
    writer.start(1, tmp_path / "0", X, lambda: may_end.wait(30) and None)
    with caplog.at_level(logging.WARNING, "shardc"):
        within(10, writer.dismiss, 0.1)
    assert "still being written after 0.1 s" in caplog.text
    may_end.set()


def test_a_dismissed_writer_logs_its_error(writer, tmp_path, caplog):
    def fail():
        raise OSError("disk full")

    writer.start(1, tmp_path / "0", X, fail)
    with caplog.at_level(logging.WARNING, "shardc"):
        writer.dismiss(30)
    assert "disk full" in caplog.text
    writer.check()


def test_an_error_of_orbax_names_the_step(writer, tmp_path, monkeypatch):
    def refuse(*_):
        raise RuntimeError("no")

    monkeypatch.setattr(Saver, "start", refuse)
    with pytest.raises(CheckpointError, match=r"step 4 could not be written to .*: RuntimeError: no"):
        writer.start(4, tmp_path / "0", X, lambda: None)
