"""Starts the same pytest command in several processes that share one JAX runtime, and makes one report of them.

Each test begins with a barrier. If a process fails and another waits for it in a collective, the barrier of the next
test times out, both are killed by their ids, and the tests that are left run in new processes.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from shardc.runtime.store import StoreServer

ROOT = Path(__file__).parents[2]
FAILED = ("failed", "error", "ended")


@dataclass
class Report:
    """The outcome of each test in each process, and the texts of failures."""

    processes: int
    outcomes: dict[str, list[str]] = field(default_factory=dict)
    texts: dict[str, dict[int, str]] = field(default_factory=dict)
    output: str = ""

    def add(self, process: int, test: str, outcome: str, text: str) -> None:
        row = self.outcomes.setdefault(test, [""] * self.processes)
        row[process] = outcome
        if text:
            self.texts.setdefault(test, {})[process] = text

    @property
    def bad(self) -> list[str]:
        """Tests that failed, did not end, or did not end alike in all processes."""
        return [t for t, row in self.outcomes.items() if len(set(row)) > 1 or row[0] in FAILED]

    def text(self, most: int = 2500) -> str:
        counts: dict[str, int] = {}
        for row in self.outcomes.values():
            said = row[0] if len(set(row)) == 1 else "unlike"
            counts[said] = counts.get(said, 0) + 1
        lines = [", ".join(f"{n} {said}" for said, n in sorted(counts.items())) or "no tests"]
        for test in self.bad:
            lines.append(f"{test}: {', '.join(o or 'not reached' for o in self.outcomes[test])}")
            for process, text in sorted(self.texts.get(test, {}).items()):
                lines.append(f"--- process {process}\n{text[-most:]}")
        return "\n".join(lines)


@dataclass
class _Started:
    process: subprocess.Popen[bytes]
    log: Path


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def environment(devices: int, **more: str) -> dict[str, str]:
    """The environment of a process with so many fake devices."""
    threads = str(max(32, 2 * devices))
    return {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "NPROC": threads,
        "PJRT_NPROC": threads,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
        **more,
    }


def start(
    command: list[str], processes: int, devices: int, folder: Path, server: StoreServer, secret: bytes
) -> list[_Started]:
    """Start a command in several processes. `SEAT` in the environment says who each is."""
    port, found = free_port(), []
    for i in range(processes):
        config = {
            "me": i, "processes": processes, "islands": 1, "store": server.address, "secret": secret.hex(),
            "links": "127.0.0.1:0", "jax": f"127.0.0.1:{port}",
        }  # fmt: skip
        log = folder / f"log{i}.txt"
        with log.open("ab") as out:
            made = subprocess.Popen(
                command,
                env=environment(devices, SEAT=json.dumps(config)),
                cwd=ROOT,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        found.append(_Started(made, log))
    return found


def end(started: list[_Started], seconds: float, grace: float = 5.0) -> list[int | None]:
    """Wait for processes. When one has failed the others have `grace` seconds. None: it was killed."""
    until = time.monotonic() + seconds
    killed: set[int] = set()
    while any(s.process.poll() is None for s in started):
        if any(s.process.poll() not in (None, 0) for s in started):
            until = min(until, time.monotonic() + grace)
        if time.monotonic() > until:
            for i, s in enumerate(started):
                if s.process.poll() is None:
                    killed.add(i)
                    os.kill(s.process.pid, signal.SIGKILL)
                    s.process.wait()
        time.sleep(0.05)
    return [None if i in killed else s.process.returncode for i, s in enumerate(started)]


def run_script(
    script: Path, *, processes: int = 2, devices: int = 4, seconds: float = 120, grace: float = 5.0
) -> list[tuple[int | None, str]]:
    """Run a script in all processes. Returns the exit code of each (None: it was killed) and what it printed."""
    secret = secrets.token_bytes(32)
    server = StoreServer("127.0.0.1:0", secret)
    with tempfile.TemporaryDirectory(prefix="shardc-processes-") as name:
        started = start([sys.executable, str(script)], processes, devices, Path(name), server, secret)
        try:
            codes = end(started, seconds, grace)
        finally:
            server.close()
        return [(c, s.log.read_text(errors="replace")) for c, s in zip(codes, started, strict=True)]


def run_tests(
    arguments: list[str], *, processes: int = 2, devices: int = 4, seconds: float = 600, show: bool = False
) -> Report:
    """Run pytest with these arguments in all processes."""
    report, until = Report(processes), time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="shardc-processes-") as name:
        folder = Path(name)
        while time.monotonic() < until:
            begun = len(report.outcomes)
            done = _round(arguments, folder, report, devices, until, show)
            if done or len(report.outcomes) == begun:
                if not done:
                    report.add(0, "(start)", "error", report.output[-3000:])
                break
            (folder / "done.json").write_text(json.dumps(list(report.outcomes)))
        else:
            report.add(0, "(time)", "ended", f"not done after {seconds:g} s")
    return report


def _round(arguments: list[str], folder: Path, report: Report, devices: int, until: float, show: bool) -> bool:
    """Start all processes once. Returns whether they came to the end of the tests."""
    secret = secrets.token_bytes(32)
    server = StoreServer("127.0.0.1:0", secret)
    for old in folder.glob("results*"):
        old.unlink()
    command = [
        sys.executable, "-m", "pytest", "-p", "tests.processes.plugin", "-p", "no:cacheprovider", "-p", "no:xdist",
        "-q", "--continue-on-collection-errors", "--results", str(folder), *arguments,
    ]  # fmt: skip
    started = start(command, report.processes, devices, folder, server, secret)
    try:
        codes = end(started, until - time.monotonic())
    finally:
        server.close()
    for i, s in enumerate(started):
        path = folder / f"results{i}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        for line in lines:
            report.add(i, **json.loads(line))
        log = s.log.read_text(errors="replace")
        report.output = log if codes[i] not in (0, 1, 5) else report.output or log
        if show:
            sys.stdout.write(f"--- process {i} ended with {codes[i]}\n{log[-1500:]}\n")
    return all(c in (0, 1, 5) for c in codes)
