"""The lock of a directory: held by one run, told to others, and gone with its process."""

import errno
import fcntl
import os
import platform
import signal
import subprocess
import sys

import pytest

from shardc.checkpoint.lock import NAME, DirectoryLock
from shardc.errors import CheckpointError

HOLDER = """
import sys
from pathlib import Path
from shardc.checkpoint.lock import DirectoryLock
DirectoryLock(Path(sys.argv[1])).take(0)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of a directory."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_the_holder_is_named_until_it_is_killed(tmp_path, holder):
    mine = DirectoryLock(tmp_path)
    for _ in range(2):
        with pytest.raises(CheckpointError) as error:
            mine.take(0)
        assert f"another run writes to {tmp_path}: process {holder.pid} on host {platform.node()}, since 2" in str(
            error.value
        )
    holder.send_signal(signal.SIGSTOP)  # a zombie: it computes nothing, and may go on
    with pytest.raises(CheckpointError, match=f"process {holder.pid}"):
        mine.take(0)
    holder.send_signal(signal.SIGKILL)
    mine.take(20)
    assert mine.is_held and (tmp_path / NAME).read_text().startswith(f"process {os.getpid()} ")
    mine.free()
    assert not mine.is_held and os.listdir(tmp_path) == []


def test_two_of_one_process_exclude_each_other(tmp_path):
    one, two = DirectoryLock(tmp_path), DirectoryLock(tmp_path)
    one.take(0)
    for _ in range(2):  # the first try does not free it, as it would if it opened and closed the file
        with pytest.raises(CheckpointError, match="this process itself, in another `with`"):
            two.take(0)
    two.free()
    assert subprocess.run([sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.DEVNULL, check=False,
                          capture_output=True).returncode  # fmt: skip
    one.free()
    one.free()
    two.take(0)
    two.free()


def test_a_file_that_its_holder_removes_meanwhile_is_made_again(tmp_path, monkeypatch):
    real, gone = fcntl.lockf, []

    def lockf(file, flags):
        if not gone:
            gone.append((tmp_path / NAME).unlink())
        return real(file, flags)

    monkeypatch.setattr(fcntl, "lockf", lockf)
    mine = DirectoryLock(tmp_path)
    mine.take(5)
    assert gone and mine.is_held and (tmp_path / NAME).exists()
    mine.free()


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch, caplog):
    def lockf(file, flags):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    mine = DirectoryLock(tmp_path)
    mine.take(0)
    assert f"{tmp_path} has no locks ([Errno 37] No locks available): another run in it is not noticed" in caplog.text
    mine.free()
