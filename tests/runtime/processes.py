"""Real processes for tests: each runs a function of tests/runtime/roles.py, speaks in lines of JSON, and ends with the
test at the latest.

They import shardc.runtime without shardc, and so without JAX: one starts in 0.2 s and not in 2.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue

import shardc

ROOT = Path(__file__).parents[2]
_START = f"""
import json, sys, types
sys.path.insert(0, {str(ROOT)!r})
bare = types.ModuleType("shardc")
bare.__path__ = [{str(Path(shardc.__file__).parent)!r}]
sys.modules["shardc"] = bare
from tests.runtime import roles
roles.play(*json.loads(sys.argv[1]))
"""


class Child:
    """A process that runs `roles.<role>(*args)`."""

    def __init__(self, role, *args):
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps([role, *args])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._lines = SimpleQueue()
        self.errors = []
        self._threads = [
            threading.Thread(target=self._read, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for t in self._threads:
            t.start()

    def _read(self):
        for line in self.process.stdout:
            self._lines.put(json.loads(line))
        self._lines.put(None)

    def _read_errors(self):
        self.errors += self.process.stderr

    def hear(self, seconds=20.0):
        """The next thing that it says. Fails if it says nothing in time, or ends."""
        try:
            said = self._lines.get(timeout=seconds)
        except Empty:
            raise AssertionError(f"it said nothing for {seconds} s\n{''.join(self.errors)}") from None
        if said is None:
            self._threads[1].join(5)
            raise AssertionError(f"it ended, with code {self.process.wait(5)}\n{''.join(self.errors)}")
        return said

    def say(self, *what):
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def signal(self, number):
        """Send it a signal, and give the time of that."""
        os.kill(self.process.pid, number)
        return time.monotonic()

    def stop(self):
        """Stop it, and wait until it does not run any more."""
        sent = self.signal(signal.SIGSTOP)
        while Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)
        return sent

    def end(self, seconds=20.0):
        """Wait until it has ended; its exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s\n{''.join(self.errors)}") from None

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        for t in self._threads:
            t.join(10)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            with suppress(BrokenPipeError):
                pipe.close()


@contextmanager
def children():
    """A function that starts a child. At the end none is left."""
    started = []

    def start(role, *args):
        started.append(Child(role, *args))
        return started[-1]

    try:
        yield start
    finally:
        for child in started:
            child.close()
