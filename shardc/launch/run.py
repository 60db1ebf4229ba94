"""Runs a script in several processes: decides who starts them."""

from __future__ import annotations

from typing import Final

from shardc.compat import detect_process
from shardc.errors import ClusterError
from shardc.launch.backends.hosts import run_on_hosts
from shardc.launch.backends.on_ray import run_on_ray
from shardc.launch.backends.on_this_machine import run_on_this_machine
from shardc.launch.backends.under_a_cluster import run_under_a_cluster
from shardc.launch.options import RunOptions

_PROG: Final = "python -m shardc run"


def run(options: RunOptions) -> int:
    """Run a script in several processes. Returns the exit code of the run.

    Raises:
      ClusterError: options that do not fit, an address in use, a secret that cannot be shared.
      OSError: a file that cannot be written.
    """
    if options.host_0_deadline and not (options.at or (options.secret and not (options.hosts or options.processes))):
        raise ClusterError(
            "--host-0-deadline: other hosts can wait for a new host 0 where something else starts the launchers, and "
            "the secret stays: with --hosts N, --host and --at, or under a cluster with --secret FILE."
        )
    if options.hosts is not None:
        return run_on_hosts(options)
    if options.processes is not None:
        options.check(options.processes)
        return (run_on_ray if options.ray else run_on_this_machine)(options, options.processes)
    if options.ray:
        raise ClusterError("--ray needs the number of processes: --processes N.")
    found = detect_process(options.deadline)
    if found is None:
        if late := [w for w in options.script.arguments if w.partition("=")[0] == "--processes"]:
            raise ClusterError(
                f"{late[0]} stands after the script, so that the script gets it; options of run stand before it: "
                f"{_PROG} --processes N {options.script.name}."
            )
        raise ClusterError(
            "no cluster has started this process: JAX finds neither Slurm, nor Open MPI, nor Kubernetes. Give "
            "--processes N to start N processes on this machine."
        )
    return run_under_a_cluster(options, found)
