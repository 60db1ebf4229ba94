"""Resources that the nodes of a round use by turns: devices, links, Python's interpreter, cores."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import Mesh

from shardc.dataflow.round import FlowNode
from shardc.machine.mesh import AnyMesh
from shardc.report.tables import mesh_text, numbers_text
from shardc.runtime.actor import Resource


class PlacedNode(NamedTuple):
    """A node with its actor, and the processes that run it."""

    node: FlowNode
    actor: int
    processes: tuple[int, ...]


class Used(NamedTuple):
    """The resources of a round, and the numbers of those that each node and each message uses."""

    resources: tuple[Resource, ...]
    by_node: Mapping[FlowNode, tuple[int, ...]]
    by_message: Sequence[tuple[int, ...]]


Ends = tuple[frozenset[Any], frozenset[Any]]
"""The devices that a message leaves, and those that it enters."""


def devices_of(mesh: AnyMesh | None) -> frozenset[Any]:
    """The devices of a mesh; of one without devices, the mesh itself."""
    return frozenset(mesh.devices.flat) if isinstance(mesh, Mesh) else frozenset([mesh])


def resources_of(nodes: Sequence[PlacedNode], messages: Sequence[Ends]) -> Used:
    """The resources of a round.

    - Devices that several actors use, as the changes of a shared state do: a node holds them while it runs.
    - Links: a message holds those out of the devices that it leaves, and those into the devices that it enters. The
      host's memory is taken to be as fast as all links to its devices.
    - Python's interpreter of a process: host functions in threads hold it while they are in Python.
    - Cores of this machine: host functions in threads and in processes of their own hold one for as long. They are left
      out where the round runs in several processes, or is planned for devices that are not here.

    Devices that the same nodes and messages use are one resource.
    """
    found = _Found()
    uses = {p: frozenset(d for m in p.node.work.meshes for d in devices_of(m)) for p in nodes}
    for devices, who in _alike({p: uses[p] for p in nodes}):
        if len({p.actor for p in who}) > 1:
            found.add(Resource(_device_text(devices)), [p.node for p in who])
    for text, end in (("link out of {}", 0), ("link into {}", 1)):
        for devices, who in _alike({i: ends[end] for i, ends in enumerate(messages)}):
            found.add(Resource(text.format(_device_text(devices))), who)
    processes = {process for p in nodes for process in p.processes}
    for process in sorted(processes) if has_lock() else ():
        of = f" of process {process}" if len(processes) > 1 else ""
        found.add(
            Resource(f"Python's interpreter{of}"),
            [p.node for p in nodes if process in p.processes and p.node.work.where == "thread"],
        )
    if len(processes) == 1 and all(isinstance(m, Mesh) for p in nodes for m in p.node.work.meshes):
        count = cores()
        found.add(
            Resource(f"{count} core{'s' * (count > 1)} of this machine", count),
            [p.node for p in nodes if p.node.work.where in ("thread", "process")],
        )
    return Used(
        tuple(found.resources),
        {p.node: tuple(found.users.get(p.node, ())) for p in nodes},
        [tuple(found.users.get(i, ())) for i in range(len(messages))],
    )


def has_lock() -> bool:
    """Whether only one thread at a time runs Python."""
    is_on: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)
    return is_on()


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Found:
    """Resources, and for each node, and each number of a message, those that it uses."""

    def __init__(self) -> None:
        self.resources: list[Resource] = []
        self.users: dict[Hashable, list[int]] = {}

    def add(self, resource: Resource, users: Iterable[Hashable]) -> None:
        number = len(self.resources)
        for user in (users := list(users)):
            self.users.setdefault(user, []).append(number)
        self.resources += [resource] * bool(users)


def _alike(devices: Mapping[Any, frozenset[Any]]) -> list[tuple[list[Any], list[Any]]]:
    """The devices that the same users use together, with these users."""
    users: dict[Any, list[Any]] = {}
    for who, used in devices.items():
        for d in used:
            users.setdefault(d, []).append(who)
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for d in sorted(users, key=_order):
        groups.setdefault(tuple(users[d]), []).append(d)
    return [(group, list(who)) for who, group in groups.items()]


def _order(device: Any) -> tuple[int, str]:
    return getattr(device, "id", -1), str(device)


def _device_text(devices: Sequence[Any]) -> str:
    """`device 3`, `devices 0-3`; of a mesh without devices `data=4`."""
    numbers = [d.id for d in devices if hasattr(d, "id")]
    if len(numbers) < len(devices):
        return " and ".join(mesh_text(d) for d in devices)
    return f"device{'s' * (len(numbers) > 1)} {numbers_text(numbers)}"
