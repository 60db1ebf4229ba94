"""Runs whose processes are started by actors of Ray: `python -m shardc run --ray --processes 2 script.py`.

Each actor is an agent (`agent.py`) in a bundle of a placement group; this process holds the store and the supervisor.
No data of the script goes through Ray.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
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


class _RayProcess(RemoteProcess):
    """A process that an actor starts. A new actor takes the place of one that has died."""

    def __init__(self, number: int, agents: Agents, screen: Screen, make_actor: Callable[[int, str], Any]) -> None:
        super().__init__(number, agents.notifier(number), agents.events, screen)
        agents.add(self)
        self._make = lambda: make_actor(number, agents.server.address)
        self.actor: Any = self._make()

    def replace(self) -> None:
        self.actor = self._make()


def _run(ray: Any, options: RunOptions, processes: int, events: SimpleQueue[Event]) -> int:
    """Place the actors, run, and remove them."""
    gpus = 0 if options.script.devices else int(ray.cluster_resources().get("GPU", 0)) // processes
    secret, bind = new_secret(), bound(options, _reached(ray))
    group = _place(ray, options, processes, {"CPU": 1, **({"GPU": gpus} if gpus else {})})
    try:
        actor = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=0)(_RayAgent)

        def make_actor(place: int, store: str) -> Any:
            strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=place
            )
            made = actor.options(scheduling_strategy=strategy).remote()
            made.serve.remote(Post(store, secret, place), options, os.getcwd())
            return made

        start = Start(bind, secret, add=lambda p, agents, screen: _RayProcess(p, agents, screen, make_actor))
        return lead(start, options, processes, events)
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
