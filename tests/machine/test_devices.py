"""The devices of a run: one process alone, and one of several JAX runtimes with a cluster that is made up."""

import json
from dataclasses import dataclass
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import shardc
from shardc.machine import devices as module
from shardc.machine.devices import RemoteDevice, is_here, is_remote, memory_of, process_of, processes_of
from shardc.machine.mesh import view
from shardc.runtime.cluster import RunConfig


def config(me, processes=2, islands=2):
    return RunConfig(me, processes, islands, "", b"", "")


@pytest.fixture
def second_of_two(monkeypatch):
    """This process is process 1; process 0 has four devices of the same kind."""
    told = {0: json.dumps([("cpu", "cpu", None, 0, None)] * 4)}
    published = {}
    cluster = SimpleNamespace(
        me=1,
        processes=2,
        config=config(1),
        publish=published.__setitem__,
        published=lambda name, process: told[process],
    )
    monkeypatch.setattr(module, "current", lambda: cluster)
    return published


def test_a_process_alone():
    assert shardc.devices() == jax.devices()
    assert processes_of(shardc.devices()) == [0] and is_here(shardc.devices()) and not is_remote(shardc.devices())


def test_devices_of_all_processes(second_of_two):
    found = shardc.devices()
    assert [process_of(d) for d in found] == [0] * 4 + [1] * 8
    assert found[4:] == jax.devices() and found[0] == RemoteDevice(0, 0, "cpu", "cpu")
    assert len(json.loads(second_of_two["devices"])) == 8
    assert is_here(found) and not is_here(found[:4]) and is_remote(found) and not is_remote(found[4:])
    assert repr(found[1]) == "RemoteDevice(process 0, cpu 1)"


def test_a_mesh_has_as_many_devices_of_each_process(second_of_two):
    mesh = shardc.make_mesh(pipe=2, data=4)
    assert [[process_of(d) for d in row] for row in mesh.devices] == [[0] * 4, [1] * 4]
    with pytest.raises(shardc.MeshError, match="the 2 processes of this run have 12"):
        shardc.make_mesh(data=13)
    with pytest.raises(shardc.MeshError, match="cannot each give the same number"):
        shardc.make_mesh(data=3)


def test_far_devices_are_planned_for(second_of_two):
    far = np.array([RemoteDevice(0, i, "cpu", "cpu") for i in range(4)])
    mesh = Mesh(far, ("data",), (AxisType.Auto,))
    assert view(mesh) == view(Mesh(np.array(jax.devices()[:4]), ("data",), (AxisType.Auto,)))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    assert [s[0].start for s in sharding.devices_indices_map((8,)).values()] == [0, 2, 4, 6]


def test_processes_of_an_island(monkeypatch):
    cluster = SimpleNamespace(me=3, processes=4, config=config(3, 4))
    monkeypatch.setattr(module, "current", lambda: cluster)
    assert [process_of(SimpleNamespace(process_index=i)) for i in (0, 1)] == [2, 3]
    assert process_of(RemoteDevice(1, 0, "cpu", "cpu")) == 1


@dataclass(frozen=True)
class Chip:
    """A device of a runtime that says how much of its memory may be taken."""

    process_index: int
    device_kind: str
    limit: int | None
    error: str = ""

    def memory_stats(self):
        if self.error:
            raise jax.errors.JaxRuntimeError(self.error)
        return None if self.limit is None else {"bytes_limit": self.limit, "bytes_in_use": 5}


H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("device", "here", "memory"),
    [
        (Chip(0, H100, 60), [Chip(0, H100, 60), Chip(0, H100, 50)], 60),
        (Chip(1, H100, None, "not here"), [Chip(0, H100, 60), Chip(0, H100, 50), Chip(0, "other", 9)], 50),
        (Chip(1, "TPU v5", None, "not here"), [Chip(0, H100, 60)], None),
        (Chip(0, H100, None, "unimplemented"), [Chip(0, H100, None, "unimplemented")], None),
        (Chip(0, H100, 0), [Chip(0, H100, 0)], None),
        (Chip(0, "cpu", None), [Chip(0, "cpu", None)], None),
        (RemoteDevice(1, 0, "gpu", H100, memory=40), [Chip(0, H100, 60)], 40),
    ],
)
def test_the_memory_that_may_be_taken(monkeypatch, device, here, memory):
    monkeypatch.setattr(module.jax, "local_devices", lambda: here)
    assert memory_of(device) == memory


def test_plans_hold_to_what_may_be_taken():
    """A GPU has 80 GB, and JAX takes three quarters: what needs more is an error before it runs."""

    def mesh_of(*memory):
        gpus = [RemoteDevice(0, i, "gpu", H100, memory=m) for i, m in enumerate(memory)]
        return Mesh(np.array(gpus), ("data",), (AxisType.Auto,))

    assert view(mesh_of(None, None)).topology.hbm == view(mesh_of(None, None)).limit == 80 * 10**9
    mesh = mesh_of(60 * 10**9, 61 * 10**9)
    assert view(mesh).topology.hbm == view(mesh).limit == 60 * 10**9
    large = jax.ShapeDtypeStruct((2, 35 * 10**9), np.uint8)
    step = shardc.function(lambda x: x + 1, mesh=mesh, in_placements=({"data": shardc.S(0)},))
    with pytest.raises(shardc.MemoryLimitError, match=r"fits in 55\.9 GiB per device"):
        step.plan(large)
