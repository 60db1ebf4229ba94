"""The command `run`: decides who starts the processes."""

from __future__ import annotations

import argparse

from shardc.launch.on_this_machine import run_on_this_machine
from shardc.launch.options import read_options


def run_command(args: argparse.Namespace) -> int:
    """Run a script in several processes. Returns the exit code of the run.

    Raises:
      ClusterError: options that do not fit, an address in use, a secret that cannot be shared.
      OSError: a file that cannot be written.
    """
    options = read_options(args)
    processes = options.processes or 1
    options.check(processes)
    return run_on_this_machine(options, processes)
