"""Runs whose processes are all on this machine, started by this one: `python -m shardc run --processes 2 script.py`."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final

from shardc.launch.job import Job
from shardc.launch.local_process import LocalProcess
from shardc.launch.options import RunOptions
from shardc.launch.output import Screen
from shardc.launch.supervisor import Event, Supervisor
from shardc.runtime.store import StoreServer
from shardc.runtime.transport.wire import new_secret

_SIGNALS: Final[Mapping[signal.Signals, Event]] = {
    signal.SIGINT: ("interrupt",),
    signal.SIGHUP: ("interrupt",),
    signal.SIGTERM: ("terminate",),
    signal.SIGUSR1: ("terminate",),
    signal.SIGUSR2: ("terminate",),
}
"""Signals and their events. Schedulers send SIGTERM some seconds before they kill, Slurm also what `--signal` says."""
_GUARD: Final = 'read -r line; rm -rf -- "$1"'
"""Waits for the end of its standard input, which ends with this process; then removes a directory."""
_LONGEST: Final = 80
"""The longest path of a directory for UNIX sockets: an address has at most 107 bytes."""


def run_on_this_machine(options: RunOptions, processes: int) -> int:
    """Run a script in several processes. Returns the exit code of the run."""
    events: SimpleQueue[Event] = SimpleQueue()
    with private_directory() as private, interrupts_to(events):
        secret, screen = new_secret(), Screen()
        server = StoreServer(
            f"unix:{private}/store", secret, on_report=lambda process, said: events.put(("report", process, said))
        )
        try:
            job = options.job(processes, server.address, secret)
            handles = [LocalProcess(p, options, screen, events) for p in range(processes)]

            prepare = preparing(options, private)

            def job_of(job: Job, place: int) -> Job:
                links = f"unix:{private}/{job.config.me}.{job.start}"
                return prepare(replace(job, config=replace(job.config, links=links)))

            code = Supervisor(job, handles, screen, job_of, server, events).run()
            for handle in handles:
                handle.close()
        finally:
            server.close()
    return code


@contextmanager
def private_directory() -> Generator[Path]:
    """A directory that only this user can enter, for the time of a run. It goes with this process, also if that is
    killed while it runs no other, whose guards would remove it."""
    path = Path(tempfile.mkdtemp(prefix="shardc-"))
    if len(str(path)) > _LONGEST:
        path.rmdir()
        path = Path(tempfile.mkdtemp(prefix="shardc-", dir="/tmp"))
    guard = subprocess.Popen(
        ["/bin/sh", "-c", _GUARD, "sh", path],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        yield path
    finally:
        with guard:
            guard.kill()
        shutil.rmtree(path, ignore_errors=True)


def preparing(options: RunOptions, private: Path) -> Callable[[Job], Job]:
    """A function that completes a job of this host."""

    def prepare(job: Job) -> Job:
        island = job.config.island(job.config.me).start
        cache = str(private / f"programs-{island}") if options.restarts or options.least else ""
        return replace(job, cache=cache, private=str(private))

    return prepare


@contextmanager
def interrupts_to(events: SimpleQueue[Event]) -> Generator[None]:
    """Signals that ask this process to end become events of the supervisor."""

    def put(number: int, _: Any) -> None:
        events.put(_SIGNALS[signal.Signals(number)])

    before = {number: signal.signal(number, put) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def signal_of(events: SimpleQueue[Event]) -> Event | None:
    """Wait a moment for an event. Returns it if it asks this process to end."""
    try:
        event = events.get(timeout=0.05)
    except Empty:
        return None
    return event if event[0] in ("interrupt", "terminate") else None
