"""A process of a run that is a child of this one."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
import threading
import tty
from contextlib import suppress
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, Final, Protocol

from shardc.errors import ClusterError
from shardc.launch.activity import Activity
from shardc.launch.job import Job
from shardc.launch.options import RunOptions
from shardc.launch.output import Lines, LogFile, Pump, Tail, Take, WithoutNoise, write_all
from shardc.runtime.status.flight import note_end

_PIPE_BYTES: Final = 1 << 20
"""Size of the output pipe. A process that prints less goes on while its launcher is stopped."""
_F_SETPIPE_SZ: Final = 1031
LINES: Final = 40
"""The most lines of standard error that are shown of a process that failed."""
_END_SECONDS: Final = 10.0
"""Seconds that a killed process may take to end."""
_GUARD: Final = 'trap "" TERM USR1 USR2; read -r line; kill -9 "-$0"; [ -z "$1" ] || rm -rf -- "$1"'
"""Waits for the end of its standard input, which ends with this process; then kills a process group, and removes a
directory. PR_SET_PDEATHSIG would kill the process alone, before it can end what it has started."""


class Shows(Protocol):
    """Shows output to the user."""

    def is_terminal(self, descriptor: int) -> bool: ...
    def out(self, data: bytes) -> None: ...
    def err(self, data: bytes) -> None: ...


class ProcessHandle(Protocol):
    """A place where a process of the run is started, again and again: here, or on a host with an agent."""

    number: int

    @property
    def is_here(self) -> bool:
        """Whether a process can be started now: its host is there."""
        ...

    def replace(self) -> None:
        """Ask for another host in place of the lost one, where the launcher can."""
        ...

    def start(self, job: Job) -> None:
        """Start the process. Its end is reported to the maker of this handle: number, start, return code.

        Raises:
          ClusterError: it cannot be started.
        """
        ...

    def kill(self, why: str = "") -> None:
        """Kill it. `why`: for its flight recorder, if it is the cause of what follows."""
        ...

    def interrupt(self) -> None:
        """Interrupt it, as Ctrl-C does."""
        ...

    def wait(self, seconds: float) -> bool:
        """Wait for its end. False: it has not ended in time."""
        ...

    def tail(self) -> list[str]:
        """The last lines of its standard error."""
        ...

    def activity(self) -> str:
        """The activity of the process, as `Activity.look` gives it. To be called about every second."""
        ...


class LocalProcess:
    """A process that runs a script on this machine, in a session of its own.

    Args:
      number: of its place.
      options: of the run: its script, and the file that the output is appended to.
      screen: shows its output while it is process 0 of the run; None never does.
      events: gets `("ended", number, start, return code)` at each end.
    """

    def __init__(
        self, number: int, options: RunOptions, screen: Shows | None, events: SimpleQueue[tuple[Any, ...]]
    ) -> None:
        self.number = number
        self._script, self._screens, self._events = options.script, screen, events
        self._screen: Shows | None = None
        self._log, self._flight = options.log_of(number), options.flight_of(number)
        self._end: dict[str, Any] = {}
        """Why this launcher has ended the process, if it has."""
        self._ended = threading.Event()
        self._ended.set()
        self._tail = Tail()
        self._pumps: list[Pump] = []
        self._popen: subprocess.Popen[bytes] | None = None
        self._activity: Activity | None = None
        self._lock = threading.Lock()
        self._file: LogFile | None = None

    @property
    def is_here(self) -> bool:
        return True

    def replace(self) -> None:
        """Do nothing: this machine is there."""

    def start(self, job: Job) -> None:
        self.kill()  # an agent may get a start before it has noticed that another one is over
        if not self.wait(_END_SECONDS):
            raise ClusterError(f"its last start was killed, and has not ended within {_END_SECONDS:g} s")
        for pump in self._pumps:
            pump.join(2.0)
        self._ended.clear()
        self._tail = Tail()
        self._screen = None if job.config.me else self._screens
        self._open_log(job.start)
        self._end = {}
        private = f"{job.private}/process-{self.number}.flight" if job.private else ""
        flight = str(self._flight.absolute()) if self._flight else private
        log = str(self._log.absolute()) if self._log else ""
        job = replace(job, log=log, config=replace(job.config, flight=flight))
        job_end, job_start = os.pipe()
        out, err = (self._channel(descriptor) for descriptor in (1, 2))
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "shardc.launch.child", str(job_end), *self._script.command()],
                env=self._script.environment(),
                stdin=subprocess.DEVNULL if job.config.me else None,
                stdout=out[1],
                stderr=err[1],
                pass_fds=[job_end],
                start_new_session=True,
            )
        finally:
            for descriptor in (job_end, out[1], err[1]):
                os.close(descriptor)
        self._pumps = [
            Pump(out[0], self._takes(1), f"shardc output of process {self.number}"),
            Pump(err[0], self._takes(2), f"shardc errors of process {self.number}"),
        ]
        guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, str(self._popen.pid), job.private],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        with suppress(BrokenPipeError):  # it has died already
            write_all(job_start, job.to_json().encode() + b"\n")
        os.close(job_start)
        self._activity = Activity(self._popen.pid)
        name = f"shardc waits for process {self.number}"
        threading.Thread(target=self._watch, args=(self._popen, job, guard), name=name, daemon=True).start()

    def _open_log(self, start: int) -> None:
        if self._log is None:
            return
        self._file = self._file or LogFile(self._log)
        if start > 1:
            self._file(f"== process {self.number}, start {start}".encode())

    def _channel(self, descriptor: int) -> tuple[int, int]:
        """The two ends of a pipe, or of a pseudo-terminal if the output is shown in a terminal."""
        if self._screen is None or not self._screen.is_terminal(descriptor):
            ends = os.pipe()
            with suppress(OSError):  # a limit of the system: then a pipe holds 64 KiB
                fcntl.fcntl(ends[1], _F_SETPIPE_SZ, _PIPE_BYTES)
            return ends
        ends = os.openpty()
        tty.setraw(ends[1])
        with suppress(OSError):
            fcntl.ioctl(ends[1], termios.TIOCSWINSZ, fcntl.ioctl(descriptor, termios.TIOCGWINSZ, b"\0" * 8))
        return ends

    def _takes(self, descriptor: int) -> list[Take]:
        takes: list[Take] = []
        if self._file is not None:
            takes.append(Lines(self._file))
        if descriptor == 2:
            takes.append(self._tail)
        if self._screen is not None:
            takes.append(WithoutNoise(self._screen.out if descriptor == 1 else self._screen.err))
        return takes

    def _watch(self, popen: subprocess.Popen[bytes], job: Job, guard: subprocess.Popen[bytes]) -> None:
        os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOWAIT)
        with self._lock, guard:
            guard.kill()  # while the number of the process is its own
            self._kill_group(popen, signal.SIGKILL)  # what it has started ends with it
            code = popen.wait()
        if job.config.flight:
            note_end(job.config.flight, code=code, **self._end)
        self._events.put(("ended", self.number, job.start, code))
        self._ended.set()

    def _kill_group(self, popen: subprocess.Popen[bytes], number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(popen.pid, number)

    def _signal(self, number: int) -> None:
        with self._lock:
            if self._popen is not None and self._popen.returncode is None:
                self._kill_group(self._popen, number)

    def kill(self, why: str = "") -> None:
        self._end = self._end or {"by": "its launcher", "why": why[:300]}
        self._signal(signal.SIGKILL)

    def interrupt(self) -> None:
        self._end = self._end or {"by": "its launcher", "why": ""}
        self._signal(signal.SIGINT)

    def wait(self, seconds: float) -> bool:
        return self._ended.wait(seconds)

    def activity(self) -> str:
        return "" if self._activity is None else self._activity.look()

    def _drain(self) -> None:
        for pump in self._pumps:
            pump.join(2.0)

    def tail(self) -> list[str]:
        self._drain()
        return self._tail.lines(LINES)

    def close(self) -> None:
        """Wait until all output of the ended process is shown."""
        self._drain()
        if self._file is not None:
            self._file.close()
            self._file = None
