"""Runs of scripts by `python -m shardc run`, each under a deadline, with a check that no process is left."""

import os
import platform
import re
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardc.__main__ import main

ROOT = Path(__file__).parents[2]
HEAD = """\
import os, signal, sys, time
from shardc.runtime.cluster import current
c = current()
"""


@dataclass
class Done:
    code: int
    out: str
    err: str
    seconds: float


def script(folder, text, name="script.py", head=HEAD):
    path = Path(folder) / name
    path.write_text(head + textwrap.dedent(text))
    return path


def environment(**more):
    """The environment of a user: that of the tests without their devices."""
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC", "PJRT_NPROC")}
    return {**kept, "PYTHONPATH": str(ROOT), **more}


def command(path, *options, arguments=()):
    return [sys.executable, "-m", "shardc", "run", *map(str, options), str(path), *map(str, arguments)]


@contextmanager
def started(words, mark, **options):
    """A launcher that runs, killed at the end; then nothing that names `mark` is left."""
    default = {"env": environment(), "stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(words, text=True, start_new_session=True, **{**default, **options})
    try:
        yield process
    finally:
        left = []
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        until = time.monotonic() + 10
        while (left := named(mark)) and time.monotonic() < until:
            time.sleep(0.05)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert left == [], "processes are left behind"


@pytest.fixture
def run(capfd):
    """`run(path, *options)`: runs a script with a launcher in this process. Fails if it takes longer than 60 s, or
    leaves a process behind."""

    def late(*_):
        raise TimeoutError("the run does not end")

    def call(path, *options, arguments=(), mark=""):
        before, begin = signal.signal(signal.SIGALRM, late), time.monotonic()
        signal.alarm(60)
        try:
            code = main(command(path, *options, arguments=arguments)[3:])
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
        assert named(mark or str(path)) == [], "processes are left behind"
        return Done(code, *capfd.readouterr(), time.monotonic() - begin)

    return call


def named(mark):
    """Processes with this text in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if mark in words and state != "Z":
                found.append(int(entry.name))
    return found


def wait_for(condition, seconds=30):
    """The first true value of a condition; fails after so long."""
    until = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.02)
    return value


def text_of(path):
    return path.read_text() if path.exists() else ""


def logged(path):
    """The lines of a log, without time and host."""
    stamp = rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d,\d{{3}} {re.escape(platform.node())} "
    return re.sub(f"^{stamp}", "", text_of(path), flags=re.MULTILINE)
