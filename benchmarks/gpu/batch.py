"""The processes of one section: how they start, take turns at the device, and end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measure import results

READY = "ready"
"""A process says `{"ready": true}` when everything is compiled, and then waits for a line on its standard input."""


@dataclass
class Child:
    """A process that measures one job of a section.

    Attributes:
      log: what it prints: `<log>.out` and `<log>.err`.
      begin: when it was started; `released`: when it was allowed to use the device, if it has asked.
      alone: whether every other process had compiled its programs before.
    """

    job: str
    process: subprocess.Popen[str]
    log: Path
    begin: float
    released: float | None = None
    alone: bool = True

    def rows(self) -> list[dict[str, Any]]:
        return results(_read(self.log.with_suffix(".out")))

    @property
    def ready(self) -> bool:
        return any(READY in row for row in self.rows())

    def stop(self) -> None:
        """Ends it, and whatever it has started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@dataclass
class Batch:
    """The processes of one section. Call `step` until it says False; `rows` and `errors` are what was found.

    Attributes:
      section: the module `benchmarks.gpu.<section>`, whose `measure(job, options)` a process calls.
      jobs: the processes, by what each measures.
      seconds: after so many those that still run are ended.
      at_once: at most so many run side by side.
      in_turn: they compile side by side, and then use the device one at a time.
    """

    section: str
    jobs: Sequence[str]
    seconds: float
    at_once: int = 1
    in_turn: bool = False
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    rows: list[dict[str, Any]] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.begin = time.monotonic()
        self.waiting, self.running = list(self.jobs), list[Child]()
        self.folder = tempfile.TemporaryDirectory()

    @property
    def took(self) -> float:
        return time.monotonic() - self.begin

    def step(self) -> bool:
        """Starts, releases and collects processes. False: all have ended."""
        for child in [c for c in self.running if c.process.poll() is not None]:
            self._collect(child)
        if self.took > self.seconds:
            self.stop("Timeout", f"the section's {self.seconds:.0f} s are over")
        while self.waiting and len(self.running) < self.at_once:
            self.running.append(self._start(self.waiting.pop(0)))
        if self.in_turn:
            self._release()
        if self.running or self.waiting:
            return True
        self.folder.cleanup()
        return False

    def stop(self, kind: str, why: str) -> None:
        """Ends all that run. Jobs that have not ended are errors; what they have measured by then is kept."""
        for child in list(self.running):
            child.stop()
            self._collect(child, {"type": kind, "message": f"stopped: {why}"})
        self.errors += [{"job": job, "type": kind, "message": f"not started: {why}"} for job in self.waiting]
        self.waiting.clear()
        self.folder.cleanup()

    def _start(self, job: str) -> Child:
        log = Path(self.folder.name) / f"{len(self.jobs) - len(self.waiting)}"
        command = [sys.executable, "-m", "benchmarks.gpu.child", self.section, job, *self.args]
        with log.with_suffix(".out").open("w") as out, log.with_suffix(".err").open("w") as err:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=out, stderr=err, text=True, env=self.env,
                start_new_session=True, cwd=Path(__file__).parents[2],
            )  # fmt: skip
        return Child(job, process, log, time.monotonic())

    def _release(self) -> None:
        """Lets one process use the device, when all are compiled or half of the section's time is over."""
        if any(c.released is not None for c in self.running):
            return
        ready = [c for c in self.running if c.ready]
        alone = len(ready) == len(self.running)
        if ready and (alone or self.took > self.seconds / 2):
            child = ready[0]
            child.released, child.alone = time.monotonic(), alone
            assert child.process.stdin is not None
            with suppress(BrokenPipeError):  # it has ended in the meantime: its exit status says why
                child.process.stdin.write("go\n")
                child.process.stdin.flush()

    def _collect(self, child: Child, error: Mapping[str, Any] | None = None) -> None:
        self.running.remove(child)
        found = [row for row in child.rows() if READY not in row]
        told = [row for row in found if "type" in row]
        measured = [row for row in found if "type" not in row]
        self.rows += [{"job": child.job, "alone": child.alone, **row} for row in measured]
        code = child.process.returncode
        if code and not told and error is None:
            error = {"type": "Exit", "message": f"exit status {code}"}
        for said in [*told, *([error] if error else [])]:
            self.errors.append({"job": child.job, **said, "stderr": _read(child.log.with_suffix(".err"))[-2000:]})
        if child.process.stdin is not None:
            with suppress(BrokenPipeError):
                child.process.stdin.close()


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
