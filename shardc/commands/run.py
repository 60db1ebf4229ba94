"""The command `run`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click

from shardc.commands import values
from shardc.errors import ClusterError
from shardc.launch.job import Script
from shardc.launch.options import RunOptions
from shardc.launch.run import run

_EPILOG: Final = """\b
Examples: shardc run --hosts a,b train.py --steps 100
          shardc run --processes 2 --devices 4 train.py --steps 100
          srun shardc run train.py --steps 100
"""


@click.command(
    "run", options_metavar="[OPTIONS] [-m]", epilog=_EPILOG, context_settings={"allow_interspersed_args": False}
)
@click.option(
    "--processes",
    type=values.processes,
    metavar="N or LEAST:N",
    help="Start so many, here or on all --hosts; without it the cluster has started them. 2:4: go on with 2.",
)
@click.option(
    "--hosts",
    metavar="A,B",
    help="Start on these hosts by ssh; a number N: this host is one of N, and --host and --at say the rest.",
)
@click.option("--host", type=values.count, metavar="I", help="With --hosts N: the number of this host, from 0.")
@click.option(
    "--at", type=values.address, metavar="ADDRESS:PORT", help="With --hosts N: an address of host 0, and a port there."
)
@click.option(
    "--devices", type=values.positive, metavar="D", help="CPU devices of each process; without it those that JAX finds."
)
@click.option(
    "--islands",
    type=values.positive,
    default=1,
    metavar="K",
    help="Independent JAX runtimes, for pipelines (default: 1).",
)
@click.option(
    "--restarts",
    type=values.restarts,
    default="0",
    metavar="K or K/TIME",
    help="Losses after which processes are started again: in all, or within a time, 3/1h.",
)
@click.option(
    "--spares",
    type=values.count,
    default=0,
    metavar="S",
    help="Places besides, at which nothing runs before a host is lost (default: 0).",
)
@click.option(
    "--log",
    type=Path,
    metavar="DIR",
    help="Keep the output of each process in DIR/process-N.log, and for autopsy what it did last.",
)
@click.option("--status", type=Path, metavar="FILE", help="Write the figures of the run to FILE every second, as JSON.")
@click.option(
    "--metrics", type=values.port, metavar="[HOST:]PORT", help="Serve the figures of the run there for Prometheus."
)
@click.option(
    "--silence",
    type=values.seconds,
    default=10.0,
    metavar="SECONDS",
    help="A process without a sign of life for so long is lost (default: 10).",
)
@click.option(
    "--deadline",
    type=values.seconds,
    default=600.0,
    metavar="SECONDS",
    help="Wait so long for a process that does not come (default: 600).",
)
@click.option(
    "--host-0-deadline",
    type=values.seconds,
    metavar="SECONDS",
    help="If host 0 is lost, the others wait so long for it to be started anew; without it they end.",
)
@click.option(
    "--grace",
    type=values.seconds,
    default=25.0,
    metavar="SECONDS",
    help="After SIGTERM all processes have so long to save at their next step and end (default: 25).",
)
@click.option(
    "--secret",
    type=Path,
    metavar="FILE",
    help="A file that all hosts can read, whose content lets processes in; without it one in ~/.shardc.",
)
@click.option("--plain-data", is_flag=True, help="Large values go to other hosts unencrypted: for trusted networks.")
@click.option(
    "--carrier",
    type=click.Choice(["put", "links"]),
    help="Values go between processes of one JAX runtime from device to device, or as bytes over links (default: by "
    "their devices).",
)
@click.option("--bind", metavar="HOST", help="Address of this host that others reach.")
@click.option("--ray", is_flag=True, help="Start the processes as actors of Ray.")
@click.option("-m", "module", is_flag=True, help="The script is the name of a module.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run_command(
    script: str, arguments: tuple[str, ...], module: bool, devices: int | None,
    processes: tuple[int | None, int | None] | None, restarts: tuple[int, float], **options: Any,
) -> int:  # fmt: skip
    """Run the same script in several processes: on this machine, on hosts that ssh reaches, or under Slurm, Open MPI,
    Kubernetes or Ray."""
    least, most = processes or (None, None)
    program = Script(script, arguments[arguments[:1] == ("--",) :], module, devices)  # one -- ends the options of run
    program.refuse_missing()
    made = RunOptions(program, most, least, restarts=restarts[0], window=restarts[1], **options)
    if made.log:
        made.log.mkdir(mode=0o700, parents=True, exist_ok=True)
    if made.secret and not made.secret.is_file():
        raise ClusterError(
            f"--secret: there is no file {made.secret}; make one with: openssl rand -hex 32 > {made.secret}"
        )
    if made.hosts is None and (made.at or made.host is not None):
        raise ClusterError("--host and --at need the number of hosts: --hosts N.")
    if made.hosts is not None and made.ray:
        raise ClusterError("--hosts and --ray exclude each other.")
    return run(made)
