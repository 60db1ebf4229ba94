"""The devices of a run: those of this process's JAX runtime, and those of other runtimes, which only planning sees."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from shardc.runtime.calls import refuse_unlike
from shardc.runtime.cluster import Cluster, current


@dataclass(frozen=True)
class RemoteDevice:
    """A device of another JAX runtime. A mesh may have it; nothing can be compiled for it or put on it here.

    Attributes:
      process: the process that has it.
      number: its number there.
      platform, device_kind: as JAX has them.
      coords: its place on the torus of a slice, if it has one.
      core_on_chip: its number in its chip.
      memory: as `memory_of`.
    """

    process: int
    number: int
    platform: str
    device_kind: str
    coords: tuple[int, ...] | None = None
    core_on_chip: int = 0
    memory: int | None = None

    @property
    def id(self) -> int:
        """A number that no device of this runtime has."""
        return (self.process + 1) * 1_000_000 + self.number

    @property
    def process_index(self) -> int:
        return self.process

    @property
    def client(self) -> Any:
        return jax.devices()[0].client

    def default_memory(self) -> Any:
        return jax.devices()[0].default_memory()

    def addressable_memories(self) -> list[Any]:
        return []

    def __repr__(self) -> str:
        return f"RemoteDevice(process {self.process}, {self.platform} {self.number})"


def devices() -> list[Any]:
    """All devices of the run, in the order of its processes: those of `jax.devices()` if this process runs alone.

    Devices of processes with another JAX runtime can stand in the mesh of a pipeline's rank.
    """
    here, cluster = jax.devices(), current()
    if cluster is None or cluster.config.islands == 1:
        return here
    mine = jax.local_devices()
    said = [
        (d.platform, d.device_kind, getattr(d, "coords", None), getattr(d, "core_on_chip", 0), memory_of(d))
        for d in mine
    ]
    cluster.publish("devices", json.dumps(said))
    return [d for p in range(cluster.processes) for d in _devices_of(p, here, cluster)]


def _devices_of(process: int, here: Iterable[Any], cluster: Cluster) -> list[Any]:
    if process in cluster.config.island(cluster.me):
        return sorted((d for d in here if process_of(d) == process), key=lambda d: d.id)
    told = json.loads(cluster.published("devices", process))
    return [
        RemoteDevice(process, i, platform, kind, None if coords is None else tuple(coords), core, memory)
        for i, (platform, kind, coords, core, memory) in enumerate(told)
    ]


@functools.cache
def memory_of(device: Any) -> int | None:
    """The bytes that JAX may take of a device's memory: of a GPU three quarters, unless it is told otherwise. None if
    it does not say, as on CPU. Another process of one runtime is taken to have what this one has of that kind."""
    if isinstance(device, RemoteDevice):
        return device.memory
    alike = [d for d in jax.local_devices() if d.device_kind == device.device_kind]
    try:
        said = [d.memory_stats() for d in ([device] if device in alike else alike)]
    except jax.errors.JaxRuntimeError:  # of a device that is only compiled for
        return None
    return min((limit for stats in said if stats and (limit := stats.get("bytes_limit"))), default=None)


def process_of(device: Any) -> int:
    """The process of the run that has a device."""
    cluster = current()
    if isinstance(device, RemoteDevice) or cluster is None or cluster.config.islands == 1:
        return device.process_index
    return cluster.config.island(cluster.me)[0] + device.process_index


def domain_of(device: Any) -> int | None:
    """The domain of fast links that a device is in; None if it does not report it: CPU devices say 0 in every process.
    Runtimes that know nothing of each other number their domains alike, so there each process counts as one."""
    cluster = current()
    if cluster is None or cluster.config.islands == 1:
        return None if getattr(device, "platform", "") == "cpu" else getattr(device, "slice_index", None)
    return process_of(device)


def me() -> int:
    """The number of this process."""
    cluster = current()
    return jax.process_index() if cluster is None else cluster.me


def processes_of(devices: Iterable[Any]) -> list[int]:
    """The processes that have these devices, in ascending order."""
    return sorted(set(map(process_of, devices)))


def meet(devices: Iterable[Any], what: str, facts: Mapping[str, str]) -> None:
    """Wait until all processes that have these devices come to the same collective, before any of them launches it. A
    collective that one of them alone launches ends the process, or never ends.

    Args:
      what: the collective.
      facts: of this process, by name; equal in all.

    Raises:
      DisagreementError: a process makes another call, or other facts.
      PeerLostError, ClusterError: as `Cluster.gather`.
    """
    cluster, processes = current(), processes_of(devices)
    if cluster is None or len(processes) == 1 or cluster.config.per_island != jax.process_count():
        return
    among = None if len(processes) == cluster.processes else processes
    said = [json.loads(text) for text in cluster.gather(what, json.dumps(facts), among)]
    refuse_unlike(what, processes, said)


def runtimes_of(devices: Iterable[Any]) -> list[int]:
    """The JAX runtimes that have these devices, each by its first process."""
    cluster, processes = current(), processes_of(devices)
    return processes[:1] if cluster is None else sorted({cluster.config.island(p)[0] for p in processes})


def is_here(devices: Iterable[Any]) -> bool:
    """Whether this process has at least one of these devices."""
    return me() in set(map(process_of, devices))


def is_remote(devices: Iterable[Any]) -> bool:
    """Whether one of these devices belongs to another JAX runtime."""
    return any(isinstance(d, RemoteDevice) for d in devices)
