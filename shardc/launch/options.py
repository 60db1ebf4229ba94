"""Options of `python -m shardc run`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shardc.errors import ClusterError
from shardc.launch.job import Job, Script
from shardc.runtime.cluster import RunConfig


@dataclass(frozen=True)
class RunOptions:
    """The options of a run. `python -m shardc run --help` explains each."""

    script: Script
    processes: int | None = None
    """How many to start; the most of them if the run may go on with fewer."""
    least: int | None = None
    """How many the run may go on with; None: with no fewer."""
    islands: int = 1
    restarts: int = 0
    log: Path | None = None
    silence: float = 10.0
    deadline: float = 600.0
    secret: Path | None = None
    bind: str | None = None
    ray: bool = False
    hosts: str | None = None
    host: int | None = None
    at: str | None = None

    def log_of(self, process: int) -> Path | None:
        return self.log / f"process-{process}.log" if self.log else None

    def job(self, processes: int, store: str, secret: bytes) -> Job:
        """The job of process 0 at its first start; the supervisor makes those of the others of it."""
        config = RunConfig(
            me=0, processes=processes, islands=self.islands, store=store, secret=secret, links="",
            restarts=self.restarts, silence=self.silence, deadline=self.deadline, least=self.least or 0,
        )  # fmt: skip
        return Job(config)

    def missing(self, processes: int) -> tuple[int, float]:
        """How many of so many hosts a run can begin without, and how many seconds it waits for these."""
        return processes - (self.least or processes), self.silence

    def check(self, processes: int) -> None:
        """Raise ClusterError for options that do not fit so many processes."""
        if processes % self.islands:
            raise ClusterError(
                f"{processes} process{'es' * (processes != 1)} cannot form {self.islands} islands of one size: "
                f"{processes} / {self.islands} is not a whole number. Give another --islands or --processes."
            )
        if self.least is not None and self.least > processes:
            raise ClusterError(f"--processes: at least {self.least} are asked for, and there are {processes}.")


_EPILOG: Final = """\
examples: python -m shardc run --hosts a,b train.py --steps 100
          python -m shardc run --processes 2 --devices 4 train.py --steps 100
          srun python -m shardc run train.py --steps 100
"""


def add_run(commands: Any) -> argparse.ArgumentParser:
    """Add the command `run` to a command line."""
    run = commands.add_parser(
        "run",
        help="run a script in several processes",
        usage="%(prog)s [options] [-m] script [arguments ...]",
        description="Runs the same script in several processes: on this machine, on hosts that ssh reaches, or under "
        "Slurm, Open MPI, Kubernetes or Ray.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = run.add_argument
    processes = "start so many, here or on all --hosts, without it the cluster has started them; 2:4: go on with 2"
    add("--processes", type=_processes, default=(None, None), metavar="N or LEAST:N", help=processes)
    hosts = "start on these hosts by ssh; a number N: this host is one of N, and --host and --at say the rest"
    add("--hosts", metavar="A,B", help=hosts)
    add("--host", type=_count, metavar="I", help="with --hosts N: the number of this host, from 0")
    add("--at", type=_address, metavar="ADDRESS:PORT", help="with --hosts N: an address of host 0, and a port there")
    add("--devices", type=_positive, metavar="D", help="CPU devices of each process; without it those that JAX finds")
    add(
        "--islands", type=_positive, default=1, metavar="K", help="independent JAX runtimes, for pipelines (default: 1)"
    )
    add("--restarts", type=_count, default=0, metavar="K", help="losses after which processes are started again")
    add("--log", type=Path, metavar="DIR", help="keep the output of each process in DIR/process-N.log")
    silence = "a process without a sign of life for so long is lost (default: 10)"
    add("--silence", type=_seconds, default=10.0, metavar="SECONDS", help=silence)
    deadline = "wait so long for a process that does not come (default: 600)"
    add("--deadline", type=_seconds, default=600.0, metavar="SECONDS", help=deadline)
    secret = "a file that all hosts can read, whose content lets processes in; without it one in ~/.shardc"
    add("--secret", type=Path, metavar="FILE", help=secret)
    add("--bind", metavar="HOST", help="address of this host that others reach")
    add("--ray", action="store_true", help="start the processes as actors of Ray")
    add("-m", dest="module", action="store_true", help="the script is the name of a module")
    add("script")
    add("arguments", nargs=argparse.REMAINDER).required = False  # an error does not name them
    return run


def read_options(args: argparse.Namespace) -> RunOptions:
    """The options of a command line.

    Raises:
      ClusterError: the script does not exist, or options exclude each other.
    """
    if not args.module and not Path(args.script).exists():
        hint = f" Or is it a module: -m {args.script}?" if "/" not in args.script and "." not in args.script else ""
        raise ClusterError(f"there is no script {args.script}.{hint}")
    if args.log:
        args.log.mkdir(mode=0o700, parents=True, exist_ok=True)
    if args.secret and not args.secret.is_file():
        raise ClusterError(
            f"--secret: there is no file {args.secret}; make one with: openssl rand -hex 32 > {args.secret}"
        )
    if args.hosts is None and (args.at or args.host is not None):
        raise ClusterError("--host and --at need the number of hosts: --hosts N.")
    if args.hosts is not None and args.ray:
        raise ClusterError("--hosts and --ray exclude each other.")
    script = Script(args.script, tuple(args.arguments), args.module, args.devices)
    least, most = args.processes
    return RunOptions(
        script, most, least, args.islands, args.restarts, args.log, args.silence, args.deadline,
        args.secret, args.bind, args.ray, args.hosts, args.host, args.at,
    )  # fmt: skip


def _number(text: str, least: int, wanted: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f'"{text}" is not {wanted}')
    return int(text)


def _processes(text: str) -> tuple[int | None, int | None]:
    """The least number of processes, and the number to start: of `2:4`, of `4`, or under a cluster of `2:`."""
    least, colon, most = text.rpartition(":")
    wanted = "a whole number of 1 or more, or two, the least and the most: 2:4"
    found = (
        _number(least, 1, wanted) if colon else None,
        _number(most, 1, wanted) if most or not colon else None,
    )
    if found[0] and found[1] and found[0] > found[1]:
        raise argparse.ArgumentTypeError(f'"{text}": the least, {found[0]}, is more than the most, {found[1]}')
    return found


def _positive(text: str) -> int:
    return _number(text, 1, "a whole number of 1 or more")


def _count(text: str) -> int:
    return _number(text, 0, "a whole number of 0 or more")


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise argparse.ArgumentTypeError(f'"{text}" is not an address with a port, such as a:4711')
    return text


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f'"{text}" is not a time of more than 0 seconds')
    return seconds
