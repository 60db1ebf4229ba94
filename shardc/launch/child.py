"""The main program of a process of a run: joins the run, prepares JAX, runs the script and leaves with the others.

    python -m shardc.launch.child DESCRIPTOR [-m] script arguments...

The descriptor is a pipe from the launcher: it carries one line, the job.
"""

from __future__ import annotations

import atexit
import io
import logging
import os
import runpy
import shutil
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NoReturn

import jax

from shardc import compat
from shardc.arrays.buffers import allocate
from shardc.errors import (
    ClusterError,
    DisagreementError,
    PeerLostError,
    RunEnds,
    ShardcError,
    StepFailedError,
    is_of_another_process,
)
from shardc.execute.process_group import settle_all
from shardc.launch.failure import DISAGREE, LOST
from shardc.launch.job import Job
from shardc.launch.output import write_all
from shardc.launch.prepare import prepare_jax
from shardc.launch.threads import is_of_launcher, threads_text
from shardc.runtime import cluster as runs
from shardc.runtime.cluster import Cluster

_ACKNOWLEDGE_SECONDS: Final = 5.0
_CAUSE_SECONDS: Final = 1.0
_SAID: Final = 400
"""Characters of an error that the flight recorder keeps."""

_log: Final = logging.getLogger("shardc")


def main() -> None:
    """Run the process that the job describes."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore it
    leave_to_launcher(signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    job = Job.from_json(_line(int(sys.argv[1])))
    with suppress(AttributeError):  # a script may be started without them
        sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        cluster = runs.join(job.config, allocate)
    except ClusterError as error:
        sys.exit(f"process {job.config.me} cannot join the run: {error}")
    cluster.on_orphaned = lambda: _orphaned(job)
    cluster.on_wrong = lambda error: fail(cluster, job, error.with_traceback(where_main_is()))
    cluster.on_show = threads_text
    atexit.register(runs.leave)
    saved = None
    try:
        cluster.store.report({"what": "joined", "start": job.start})
        cluster.adopt()
        prepare_jax(cluster, job)
        run_script(sys.argv[2:])
        settle_all()  # the values of the last call
    except RunEnds as end:
        saved = end.step
    except BaseException as error:  # noqa: BLE001 - reported to the launcher; Python's own end would wait in a barrier
        if not (isinstance(error, SystemExit) and error.code in (None, 0)):
            fail(cluster, job, cause_of(cluster, error))
    _end(cluster, job, saved)


def leave_to_launcher(*numbers: signal.Signals) -> None:
    """Take no notice of signals that ask a run to end: Slurm and systemd send them to all processes of a job, and the
    launchers let all save. What this process forks is ended by them."""
    me = os.getpid()

    def ignore(number: int, _: Any) -> None:
        if os.getpid() != me:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    for number in numbers:
        signal.signal(number, ignore)


def _line(pipe: int) -> str:
    with os.fdopen(pipe, "rb") as file:
        text = file.read()
    if not text.endswith(b"\n"):
        os._exit(1)  # whoever started it is gone
    return text.decode()


def _orphaned(job: Job) -> None:
    """Kill this process and its children: its launcher has ended."""
    if job.private:
        shutil.rmtree(job.private, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


# -- the script


def run_script(words: list[str]) -> dict[str, Any]:
    """Run a script, or with `-m` a module, as `python` does with these arguments. Returns its globals."""
    is_module = words[0] == "-m"
    name, *arguments = words[is_module:]
    sys.argv = [name, *arguments]
    if is_module:
        if not sys.flags.safe_path:
            sys.path.insert(0, os.getcwd())  # a console command has its own folder first
        return runpy.run_module(name, run_name="__main__", alter_sys=True)
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(name).resolve().parent)  # Python has put the working directory there
    return runpy.run_path(name, run_name="__main__")


def _end(cluster: Cluster, job: Job, saved: int | None) -> None:
    """Wait until all scripts have ended, then return: an exit waits in the barrier of `jax.distributed`.

    Args:
      saved: the step at which the script has saved because the run was asked to end.
    """
    _flush()
    cluster.recorder.end()
    cluster.store.report({"what": "done", "start": job.start, "calls": cluster.calls(), "saved": saved})
    if not cluster.wait_to_leave():
        os._exit(0)


# -- failures

_failing: Final = threading.Lock()


def cause_of(cluster: Cluster, error: BaseException) -> BaseException:
    """An error, or what caused it: a collective whose members come from other calls fails with words of its own."""
    if not isinstance(error, StepFailedError | jax.errors.JaxRuntimeError) or is_of_another_process(error):
        return error
    found = cluster.error_within(_CAUSE_SECONDS)
    return error if found is None else found.with_traceback(error.__traceback__)


def where_main_is() -> TracebackType | None:
    """The traceback of an error that the main thread would raise where it is."""
    frame, trace = sys._current_frames().get(threading.main_thread().ident or 0), None  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        frame, trace = frame.f_back, TracebackType(trace, frame, frame.f_lasti, frame.f_lineno)
    return trace


def fail(cluster: Cluster, job: Job, error: BaseException) -> NoReturn:
    """Report an error to the launcher, and end at once. Of several threads the first one does."""
    _failing.acquire()
    text, code = error_text(error)
    _flush()
    if job.log and text:
        with suppress(OSError), Path(job.log).open("a", encoding="utf-8") as file:
            file.write(text)
    report, noticed = report_of(error, text, code), False
    cluster.recorder.end(why=report["why"], follows=report["follows"], said=str(error)[:_SAID])
    with suppress(ClusterError):
        noticed = cluster.store.report({**report, "start": job.start}, _ACKNOWLEDGE_SECONDS)
    if not noticed:  # the launcher is stopped
        with suppress(OSError):
            write_all(2, text.encode(errors="replace"))
    os._exit(code)


def report_of(error: BaseException, text: str, code: int) -> dict[str, Any]:
    kind = type(error).__name__
    first = str(error).partition("\n")[0]
    why = f"ended with exit code {code}" if isinstance(error, SystemExit) else f"{kind}: {first}" if first else kind
    return {
        "what": "failed",
        "code": code,
        "text": text,
        "why": why,
        "follows": is_of_another_process(error),
        "final": isinstance(error, SystemExit | KeyboardInterrupt | DisagreementError),
    }


def error_text(error: BaseException) -> tuple[str, int]:
    """The text that Python prints for an uncaught error, and its exit code."""
    if isinstance(error, SystemExit):
        if isinstance(error.code, int):
            return "", error.code & 0xFF
        return f"{error.code}\n", 1
    _drop_notes(error)
    stderr, sys.stderr = sys.stderr, io.StringIO()
    try:
        trace = _of_script(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        text = sys.stderr.getvalue()
    finally:
        sys.stderr = stderr
    kinds = {KeyboardInterrupt: 130, DisagreementError: DISAGREE, PeerLostError: LOST}
    return text, next((code for kind, code in kinds.items() if isinstance(error, kind)), 1)


def _drop_notes(error: BaseException | None) -> None:
    """Drop JAX's note that it has removed frames of its own: errors of shardc say all, and it stands between lines."""
    while error is not None:
        if isinstance(error, ShardcError) and compat.FRAMES_NOTE in getattr(error, "__notes__", ()):
            error.__notes__.remove(compat.FRAMES_NOTE)
        error = error.__cause__ or error.__context__


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of the launcher."""
    while trace is not None:
        if not is_of_launcher(trace.tb_frame.f_code.co_filename):
            return trace
        trace = trace.tb_next
    return None


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()


if __name__ == "__main__":
    main()
