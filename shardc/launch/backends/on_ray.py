"""Runs whose processes are started by actors of Ray: `python -m shardc run --ray --processes 2 script.py`.

Each actor is an agent (`agent.py`) in a bundle of a placement group; this process holds the store and the supervisor.
Ray starts an actor again that is lost, elsewhere if its node is: it knows when, which may take it half a minute.
No data of the script goes through Ray.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from shardc.errors import ClusterError
from shardc.launch.agent import Agents, Post, RemoteProcess, serve
from shardc.launch.backends.lead import LOOPBACK, Start, bound, interrupts_to, lead
from shardc.launch.options import RunOptions
from shardc.launch.output import Screen
from shardc.launch.supervisor import Event
from shardc.runtime.transport.wire import new_secret


def run_on_ray(options: RunOptions, processes: int) -> int:
    """Run a script in actors of Ray. Returns the exit code of the run.

    Raises:
      ClusterError: Ray is not installed, or has no place for so many processes.
    """
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise ClusterError("--ray: Ray is not installed; pip install 'shardc[ray]'.") from error
    started = not ray.is_initialized()
    if started:
        ray.init(log_to_driver=False, configure_logging=False, include_dashboard=False)
    try:
        events: SimpleQueue[Event] = SimpleQueue()
        with interrupts_to(events):
            return _run(ray, options, processes + options.spares, events)
    finally:
        if started:
            ray.shutdown()


def _run(ray: Any, options: RunOptions, processes: int, events: SimpleQueue[Event]) -> int:
    """Place the actors, run, and remove them."""
    gpus = 0 if options.script.devices else int(ray.cluster_resources().get("GPU", 0)) // processes
    secret, bind = new_secret(), bound(options, _reached(ray))
    group = _place(ray, options, processes, {"CPU": 1, **({"GPU": gpus} if gpus else {})})
    actors: list[Any] = []
    try:
        kind = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=-1, max_task_retries=-1)(_RayAgent)

        def add(place: int, agents: Agents, screen: Screen) -> None:
            agents.add(RemoteProcess(place, agents.notifier(place), agents.events, screen))
            strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=place
            )
            actors.append(kind.options(scheduling_strategy=strategy).remote())
            actors[-1].serve.remote(Post(agents.server.address, secret, place), options, os.getcwd())

        return lead(Start(bind, secret, add=add), options, processes, events)
    finally:
        ray.util.remove_placement_group(group)


def _reached(ray: Any) -> str:
    """The address by which actors reach this host."""
    alone = sum(n["Alive"] for n in ray.nodes()) == 1
    return LOOPBACK if alone else ray.util.get_node_ip_address()


def _place(ray: Any, options: RunOptions, processes: int, bundle: Mapping[str, int]) -> Any:
    """A placement group with a bundle for each process."""
    group = ray.util.placement_group([dict(bundle)] * processes, strategy="PACK")
    if not group.wait(options.deadline):
        ray.util.remove_placement_group(group)
        have = {name: ray.cluster_resources().get(name, 0) for name in bundle}
        raise ClusterError(
            f"Ray has no place for {processes} processes of {bundle} within {options.deadline:g} s: it has {have} in "
            "all. Give fewer --processes, or add nodes."
        )
    return group


class _RayAgent:
    """An actor of Ray that serves as an agent."""

    def serve(self, post: Post, options: RunOptions, directory: str) -> int:
        """Serve until the run ends."""
        with suppress(OSError):
            os.chdir(directory)

        return serve(post, options, SimpleQueue(), forwards=True)
