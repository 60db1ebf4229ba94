"""Runs whose processes a cluster has started: `srun python -m shardc run script.py`, or the like.

Each of them is a launcher that runs the script in a process of its own. The launcher of process 0 holds the store and
the supervisor, at the address that JAX's detection gives for its coordinator; the others are its agents.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from time import monotonic, sleep
from typing import Final

from shardc.compat import DetectedProcess
from shardc.errors import ClusterError
from shardc.launch.agent import Agents, Post, serve
from shardc.launch.backends.lead import Start, bound, interface_address, interrupts_to, lead
from shardc.launch.job import Job
from shardc.launch.options import RunOptions
from shardc.launch.supervisor import Event
from shardc.runtime.transport.wire import new_secret, write_secret

_SHORTEST: Final = 16
"""Bytes of a secret that a user gives."""


def run_under_a_cluster(options: RunOptions, found: DetectedProcess) -> int:
    """Run a script as one process of several that a cluster has started. Returns the exit code of the run."""
    options.check(found.processes - options.spares)
    folder = Path.home() / ".shardc" / f"{job_name(found)}-programs"
    with suppress(OSError):  # JAX warns if it cannot write there
        for path in (folder.parent, folder) if options.restarts else ():
            path.mkdir(mode=0o700, exist_ok=True)
    visible = "" if options.script.devices or found.local is None else str(found.local)
    visible = os.environ.get("JAX_LOCAL_DEVICE_IDS", visible)

    def prepare(job: Job) -> Job:
        island = job.config.island(job.config.me).start
        cache = str(folder / str(island)) if options.restarts else ""
        return replace(job, cache=cache, visible=visible)

    events: SimpleQueue[Event] = SimpleQueue()
    try:
        with interrupts_to(events):
            if found.me == 0:
                return _lead(options, found, events, prepare)
            return _follow(options, found, events, prepare)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _lead(
    options: RunOptions, found: DetectedProcess, events: SimpleQueue[Event], prepare: Callable[[Job], Job]
) -> int:
    """Supervise the run, as the launcher of process 0."""
    host, port = found.coordinator.rpartition(":")[::2]
    bind = bound(options, host, port)
    file = None if options.secret else default_secret(found)
    secret = read_secret(options.secret) if options.secret else _make_secret(file)

    def drop_secret() -> None:
        if file is not None:
            file.unlink(missing_ok=True)

    def meet(agents: Agents) -> bool:
        met = agents.meet(options.deadline, *options.missing(found.processes))
        drop_secret()
        return met

    in_use = " JAX_COORDINATOR_PORT sets the port, in all processes."
    try:
        return lead(Start(bind, secret, [0], prepare, meet=meet, in_use=in_use), options, found.processes, events)
    finally:
        drop_secret()


def _follow(
    options: RunOptions, found: DetectedProcess, events: SimpleQueue[Event], prepare: Callable[[Job], Job]
) -> int:
    """Serve as the agent of another process than 0."""
    secret = read_secret(options.secret) if options.secret else wait_for_secret(found, options.deadline)
    bind = interface_address(options.bind) if options.bind else ""
    return serve(Post(found.coordinator, secret, found.me, bind), options, events, prepare)


# -- the secret


def job_name(found: DetectedProcess, env: Mapping[str, str] = os.environ) -> str:
    """A name of the job that this process belongs to; each of its processes finds the same."""
    parts = [found.cluster]
    for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "PMIX_NAMESPACE", "OMPI_MCA_orte_hnp_uri"):
        if value := env.get(name):
            parts.append(re.sub(r"\W+", "-", value.partition(";")[0]))
    if len(parts) == 1:
        parts.append(re.sub(r"\W+", "-", found.coordinator))
    return "-".join(parts)


def default_secret(found: DetectedProcess) -> Path:
    """The file of the secret if the user gives none."""
    if found.cluster not in ("slurm", "ompi"):
        raise ClusterError(
            f"the hosts of a run under {found.cluster} share no home directory; give all of them the same secret: "
            "--secret FILE (under Kubernetes, a file of a Secret that is mounted in every pod)."
        )
    return Path.home() / ".shardc" / f"{job_name(found)}.secret"


def read_secret(path: Path) -> bytes:
    secret = path.read_bytes().strip()
    if len(secret) < _SHORTEST:
        raise ClusterError(
            f"--secret {path}: it has {len(secret)} bytes, and at least {_SHORTEST} are needed; make one with: "
            f"openssl rand -hex 32 > {path}"
        )
    return secret


def _make_secret(path: Path | None) -> bytes:
    assert path is not None
    path.parent.mkdir(mode=0o700, exist_ok=True)
    secret = new_secret()
    try:
        write_secret(path, secret)
    except FileExistsError as error:
        raise ClusterError(
            f"the secret of this run is there already: {path}. Another run of this job has made it, or one that was "
            "killed: if none is running, remove the file."
        ) from error
    return secret


def wait_for_secret(found: DetectedProcess, seconds: float) -> bytes:
    """The secret that process 0 makes.

    Raises:
      ClusterError: it did not come in time.
    """
    path, until = default_secret(found), monotonic() + seconds
    while monotonic() < until:
        with suppress(FileNotFoundError):
            if len(secret := path.read_bytes()) == len(new_secret()):
                return secret
        sleep(0.1)
    raise ClusterError(
        f"process {found.me} waited {seconds:g} s for {path}, which process 0 makes. If the hosts of this run share no "
        "home directory, give all processes the same secret: --secret FILE."
    )
