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
from typing import Any, Final

from shardc.errors import ClusterError
from shardc.launch.agent import Agents, Post, RemoteProcess, serve
from shardc.launch.backends.on_this_machine import interrupts_to
from shardc.launch.backends.under_a_cluster import interface_address
from shardc.launch.options import RunOptions
from shardc.launch.output import Screen
from shardc.launch.supervisor import INTERRUPTED, Event, Supervisor
from shardc.runtime.transport.wire import new_secret

_LOOPBACK: Final = "127.0.0.1"


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
            return _RayRun(ray, options, processes, events).run()
    finally:
        if started:
            ray.shutdown()


class _RayProcess(RemoteProcess):
    """A process that an actor starts. A new actor takes the place of one that has died."""

    def __init__(self, number: int, notify: Callable[[Mapping[str, Any]], object], events: SimpleQueue[Event],
                 screen: Screen | None, make_actor: Callable[[int], Any]) -> None:  # fmt: skip
        super().__init__(number, notify, events, screen)
        self._make_actor = make_actor
        self.actor: Any = make_actor(number)

    def replace(self) -> None:
        self.actor = self._make_actor(self.number)


class _RayRun:
    """A run on Ray: the store, the placement group and its actors."""

    def __init__(self, ray: Any, options: RunOptions, processes: int, events: SimpleQueue[Event]) -> None:
        self._ray, self._options, self._processes, self._events = ray, options, processes, events
        self._secret, self._screen = new_secret(), Screen()
        self._nodes = [n for n in ray.nodes() if n["Alive"]]
        self._gpus = 0 if options.script.devices else int(ray.cluster_resources().get("GPU", 0)) // processes
        self._host = self._reached()
        self._agents = Agents(f"{self._host}:0", self._secret, events)

    def _reached(self) -> str:
        """The address by which actors reach this host."""
        if self._options.bind:
            return interface_address(self._options.bind)
        if len(self._nodes) == 1:
            return _LOOPBACK
        return self._ray.util.get_node_ip_address()

    def run(self) -> int:
        """Place the actors, run, and remove them."""
        group = self._place()
        code = INTERRUPTED
        try:
            actor = self._ray.remote(num_cpus=1, num_gpus=self._gpus, max_restarts=0)(_Actor)

            def make_actor(place: int) -> Any:
                strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=place
                )
                made = actor.options(scheduling_strategy=strategy).remote()
                made.serve.remote(self._post(place), self._options, os.getcwd())
                return made

            for p in range(self._processes):
                self._agents.add(_RayProcess(p, self._agents.notifier(p), self._events, self._screen, make_actor))
            if self._agents.meet(self._options.deadline, *self._options.missing(self._processes)):
                code = self._supervise()
        finally:
            self._agents.end(code)
            self._agents.server.close()
            self._ray.util.remove_placement_group(group)
        return code

    def _post(self, place: int) -> Post:
        return Post(self._agents.server.address, self._secret, place)

    def _place(self) -> Any:
        bundle = {"CPU": 1, **({"GPU": self._gpus} if self._gpus else {})}
        group = self._ray.util.placement_group([bundle] * self._processes, strategy="PACK")
        if not group.wait(self._options.deadline):
            self._ray.util.remove_placement_group(group)
            have = {name: self._ray.cluster_resources().get(name, 0) for name in bundle}
            raise ClusterError(
                f"Ray has no place for {self._processes} processes of {bundle} within {self._options.deadline:g} s: it "
                f"has {have} in all. Give fewer --processes, or add nodes."
            )
        return group

    def _supervise(self) -> int:
        server = self._agents.server
        job = self._options.job(self._processes, server.address, self._secret)
        remotes = list(self._agents.remotes.values())
        return Supervisor(job, remotes, self._screen, lambda job, place: job, server, self._events).run()


class _Actor:
    """An actor of Ray that serves as an agent."""

    def serve(self, post: Post, options: RunOptions, directory: str) -> int:
        """Serve until the run ends."""
        with suppress(OSError):
            os.chdir(directory)

        return serve(post, options, SimpleQueue(), forwards=True)
