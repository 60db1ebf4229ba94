"""A run of `training.py` by `python -m shardc run`, in folders of its own: what its processes say, and what is left."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TRAINING = Path(__file__).with_name("training.py")
MARK = "FAULTS_RUN"
"""The environment variable that every process of a run inherits, with a value of the run's own."""


@dataclass(frozen=True)
class Kind:
    """A kind of runs: its processes, and what they train."""

    processes: int
    islands: int
    devices: int
    stages: int
    mesh: Mapping[str, int]
    pipeline: Mapping[str, Any] | None = None

    def island(self, process: int) -> range:
        """The processes that share a JAX runtime with this one."""
        size = self.processes // self.islands
        return range(process // size * size, process // size * size + size)


KINDS = {
    "spmd": Kind(2, 1, 2, 1, {"data": 4}),
    "2 stages": Kind(2, 2, 2, 2, {"pipe": 2, "data": 2}, {"schedule": "1f1b"}),
    "3 stages": Kind(3, 3, 1, 3, {"pipe": 3}, {"schedule": "1f1b"}),
    "zero bubble": Kind(2, 2, 1, 2, {"pipe": 2}, {"schedule": "zb-h1"}),
    "interleaved": Kind(2, 2, 1, 4, {"pipe": 2}, {"schedule": "interleaved", "chunks": 2}),
    "wide stages": Kind(4, 2, 1, 2, {"pipe": 2, "data": 2}, {"schedule": "1f1b"}),
}


@dataclass(frozen=True)
class Options:
    """How a run is made.

    Attributes:
      form: `run`, the loop of `saved.run`; or `loop`, one of the script's own.
      watch: whether the script says what a lost peer does to its state.
      cache: a directory of compiled programs that runs share.
      pause: a process and the step before which it pauses for a minute.
      directory: of the checkpoints; None makes one.
    """

    form: str = "run"
    steps: int = 12
    every: int = 3
    sleep: float = 0.01
    watch: bool = False
    pause: tuple[int, int] | None = None
    restarts: int = 3
    silence: float = 10.0
    deadline: float = 60.0
    cache: Path | None = None
    directory: Path | None = None


@dataclass(frozen=True)
class Fact:
    """A line that a process has written of itself: `begin`, `at 3`, `step 3 0x1.8p+0`, `end`."""

    time: float
    pid: int
    what: str

    @property
    def words(self) -> list[str]:
        return self.what.split()


class Launched:
    """A run that is going on; at the end of a `with` all that is left of it is killed."""

    def __init__(self, kind: Kind, options: Options) -> None:
        self.kind, self.options = kind, options
        self.mark = secrets.token_hex(16)
        self.folder = Path(tempfile.mkdtemp(prefix="faults-", dir="/tmp"))  # addresses of sockets are short
        self.directory = options.directory or self.folder / "saved"
        for name in ("facts", "log", "tmp"):
            (self.folder / name).mkdir()
        said = {
            "stages": kind.stages, "mesh": dict(kind.mesh), "pipeline": kind.pipeline, "form": options.form,
            "steps": options.steps, "every": options.every, "sleep": options.sleep, "watch": options.watch,
            "pause": options.pause,
        }  # fmt: skip
        command = [
            sys.executable, "-m", "shardc", "run", "--processes", kind.processes, "--islands", kind.islands,
            "--devices", kind.devices, "--restarts", options.restarts, "--silence", options.silence,
            "--deadline", options.deadline, "--log", self.folder / "log",
            TRAINING, json.dumps(said), self.directory, self.folder / "facts",
        ]  # fmt: skip
        self.began = time.time()
        with (self.folder / "out").open("wb") as out, (self.folder / "err").open("wb") as err:
            self.launcher = subprocess.Popen(
                [str(word) for word in command],
                env=self._environment(), stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
            )  # fmt: skip
        self.ended: float | None = None

    def _environment(self) -> dict[str, str]:
        """The environment of a user: that of the tests without their devices."""
        kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC", "PJRT_NPROC", "JAX_PLATFORMS")}
        cache = {
            "JAX_COMPILATION_CACHE_DIR": str(self.options.cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        return {
            **kept,
            **(cache if self.options.cache else {}),
            MARK: self.mark,
            "PYTHONPATH": str(ROOT),
            "PYTHONFAULTHANDLER": "1",  # SIGABRT shows where its threads are
            "TMPDIR": str(self.folder / "tmp"),
        }

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- its processes

    def left(self) -> list[int]:
        """Processes of this run that are there: all that has inherited its mark."""
        return [pid for pid in _all() if f"{MARK}={self.mark}" in _environment_of(pid)]

    def kill(self) -> None:
        """End all processes of this run."""
        while pids := self.left():
            for pid in pids:
                _send(pid, signal.SIGKILL)
            time.sleep(0.02)
        self.launcher.wait()

    def pid(self, process: int) -> int | None:
        """The id of a process, if it is there: by its facts; before it has any by the order of starts."""
        known = {p: facts[-1].pid for p in range(self.kind.processes) if (facts := self.facts(p))}
        children = [c for c in _children(self.launcher.pid) if "shardc.launch.child" in _command_of(c)]
        there = {p: pid for p, pid in known.items() if pid in children}
        if process in there:
            return there[process]
        fresh = [c for c in children if c not in known.values()]
        absent = [p for p in range(self.kind.processes) if p not in there]
        place = absent.index(process)
        return fresh[place] if place < len(fresh) else None

    def signal(self, process: int, number: int) -> bool:
        """Send a signal to a process. False: it is not there."""
        pid = self.pid(process)
        return pid is not None and _send(pid, number)

    def wait(self, seconds: float) -> bool:
        """Wait until the launcher has ended. False: it has not ended in time; it then shows where its threads are."""
        try:
            self.launcher.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        self.ended = time.time()
        return True

    def show_threads(self) -> None:
        """Let all processes write to their logs where their threads are, and end."""
        for pid in sorted(self.left(), reverse=True):  # the launcher last: it reads what the others write
            _send(pid, signal.SIGCONT)
            _send(pid, signal.SIGABRT)
            time.sleep(0.5)

    # -- what they say

    def facts(self, process: int) -> list[Fact]:
        path = self.folder / "facts" / str(process)
        if not path.exists():
            return []
        lines = path.read_text().split("\n")[:-1]
        return [Fact(float(at), int(pid), what) for at, pid, what in (line.split(" ", 2) for line in lines)]

    def at(self, process: int, what: str) -> float | None:
        """The time at which a process first said something that begins so."""
        return next((f.time for f in self.facts(process) if f.what == what or f.what.startswith(f"{what} ")), None)

    def wait_for(self, process: int, what: str, seconds: float = 120.0) -> float:
        """Wait until a process says something that begins so. Gives its time."""
        until = time.monotonic() + seconds
        while (at := self.at(process, what)) is None:
            assert time.monotonic() < until and self.launcher.poll() is None, f"no {what!r}\n{self.output()}"
            time.sleep(0.005)
        return at

    def output(self) -> str:
        """The end of what the launcher and its processes have written."""
        files = [self.folder / "out", self.folder / "err", *sorted((self.folder / "log").iterdir())]
        facts = sorted((self.folder / "facts").iterdir())
        texts = [(path, 6000) for path in files] + [(path, 1500) for path in facts]
        return "\n".join(f"--- {p.parent.name}/{p.name}\n{p.read_text(errors='replace')[-n:]}" for p, n in texts)

    def shown(self) -> str:
        """The standard output of the launcher."""
        return (self.folder / "out").read_text()

    def errors(self) -> str:
        """The standard error of the launcher."""
        return (self.folder / "err").read_text(errors="replace")

    def temporary(self) -> list[str]:
        """Directories of the launcher that are there."""
        return [p.name for p in (self.folder / "tmp").glob("shardc-*")]


def _all() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def _environment_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []  # it has ended, or is another user's


def _children(parent: int) -> list[int]:
    """The processes that another one has started and that have not ended, the oldest first."""
    found: list[tuple[int, int]] = []
    for pid in _all():
        try:
            state, above, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(above) == parent and state not in "ZX":
            found.append((int(rest[17]), pid))
    return [pid for _, pid in sorted(found)]


def _command_of(pid: int) -> str:
    """The words of a process, one after the other. A launcher also starts a shell that guards each script."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""  # it has ended


def _send(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
