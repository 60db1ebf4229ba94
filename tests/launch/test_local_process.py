"""A process on this machine: its ends, its output, what it has started."""

import signal
import sys
import time
from dataclasses import replace
from queue import SimpleQueue

import pytest

from shardc.errors import ClusterError
from shardc.launch import local_process
from shardc.launch.job import Job, Script
from shardc.launch.local_process import LocalProcess
from shardc.launch.options import RunOptions
from shardc.runtime.cluster import RunConfig
from tests.launch.launching import logged, named, wait_for

JOB = Job(RunConfig(0, 1, 1, "unix:/nowhere", b"", ""))


class Shows:
    def __init__(self):
        self.seen = {1: b"", 2: b""}

    def is_terminal(self, descriptor):
        return False

    def out(self, data):
        self.seen[1] += data

    def err(self, data):
        self.seen[2] += data


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts a process that runs this code in place of a child of a run."""
    made = []

    def call(code, number=1, shows=None, log=None):
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\nexec {sys.executable} {tmp_path}/code.py $3\n")
        python.chmod(0o755)
        (tmp_path / "code.py").write_text(f"import os, signal, subprocess, sys, time\npipe = int(sys.argv[1])\n{code}")
        monkeypatch.setattr(sys, "executable", str(python))
        ends = SimpleQueue()
        options = RunOptions(Script("script.py"), log=log)
        process = LocalProcess(number, options, shows, ends)
        process.start(JOB)
        monkeypatch.undo()
        made.append(process)
        return process, ends

    yield call
    for process in made:
        process.kill()
        assert process.wait(10)
        process.close()
    assert named(str(tmp_path)) == []


def test_ends(start):
    for code, returned in [("", 0), ("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", -9)]:
        _, ends = start(code)
        assert ends.get(timeout=10) == ("ended", 1, 1, returned)


def test_the_job_comes_in_a_pipe_that_ends_with_the_launcher(start):
    shows = Shows()
    process, ends = start("line = os.read(pipe, 10000)\nprint(line.decode(), end='')\n", 0, shows)
    assert ends.get(timeout=10) == ("ended", 0, 1, 0)
    process.close()
    assert Job.from_json(shows.seen[1].decode()) == JOB
    assert JOB.config.secret.hex() == ""


def test_output_is_shown_kept_and_logged(start, tmp_path):
    shows = Shows()
    code = "print('out', flush=True)\nprint('[Gloo] Rank 0 is', flush=True)\nprint('err', file=sys.stderr)"
    process, ends = start(code, 0, shows, tmp_path)
    ends.get(timeout=10)
    assert process.tail() == ["err"]
    assert shows.seen == {1: b"out\n", 2: b"err\n"}
    log = logged(tmp_path / "process-0.log")
    assert (tmp_path / "process-0.log").stat().st_mode & 0o777 == 0o600
    assert len(log) == len("out\n[Gloo] Rank 0 is\nerr\n")
    assert all(text in log for text in ("out", "[Gloo] Rank 0 is\n", "err"))


def test_what_it_has_started_ends_with_it(start, tmp_path):
    _, ends = start(f"subprocess.Popen(['sleep', '1000', '{tmp_path}'][:2])\nprint(1)")
    ends.get(timeout=10)  # the fixture finds nothing that is left


def test_kill_and_interrupt(start):
    process, ends = start("time.sleep(100)")
    process.kill()
    assert ends.get(timeout=10)[3] == -9
    process, ends = start(
        "signal.signal(2, lambda *_: sys.exit(5))\nprint('ready', flush=True)\ntime.sleep(100)", 0, shows := Shows()
    )
    wait_for(lambda: shows.seen[1])
    process.interrupt()
    assert ends.get(timeout=10)[3] == 5
    process.kill()  # nothing happens


def test_a_stopped_process_is_killed(start):
    process, ends = start("os.kill(os.getpid(), signal.SIGSTOP)")
    time.sleep(0.2)
    process.kill()
    assert ends.get(timeout=10)[3] == -signal.SIGKILL


def test_a_start_ends_the_one_before(start, monkeypatch):
    process, ends = start("print('ready', file=sys.stderr, flush=True)\ntime.sleep(100)")
    first = process._popen
    monkeypatch.setattr(sys, "executable", "true")
    begin = time.monotonic()
    process.start(replace(JOB, start=2))
    assert ends.get(timeout=10) == ("ended", 1, 1, -9) and first.returncode == -9
    assert ends.get(timeout=10) == ("ended", 1, 2, 0)
    assert time.monotonic() - begin < 5


def test_a_process_that_cannot_be_killed_is_not_started_again(start, monkeypatch):
    process, _ = start("time.sleep(100)")
    with monkeypatch.context() as patch, pytest.raises(ClusterError, match="its last start was killed, and has not"):
        patch.setattr(process, "kill", lambda: None)
        patch.setattr(local_process, "_END_SECONDS", 0.2)
        process.start(replace(JOB, start=2))
