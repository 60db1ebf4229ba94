"""Runs whose processes are all on this machine, started by this one: `python -m shardc run --processes 2 script.py`."""

from __future__ import annotations

from dataclasses import replace

from shardc.launch.backends.lead import Start, lead, this_host
from shardc.launch.job import Job
from shardc.launch.options import RunOptions
from shardc.runtime.transport.wire import new_secret


def run_on_this_machine(options: RunOptions, processes: int) -> int:
    """Run a script in several processes. Returns the exit code of the run."""
    with this_host(options) as (events, private, prepare):

        def with_links(job: Job) -> Job:
            links = f"unix:{private}/{job.config.me}.{job.start}"
            return prepare(replace(job, config=replace(job.config, links=links)))

        places = processes + options.spares
        start = Start(f"unix:{private}/store", new_secret(), range(places), with_links)
        return lead(start, options, places, events)
