"""Which process runs which rank."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from shardc.errors import MeshError
from shardc.execute.rank_processes import RankProcesses
from shardc.machine.devices import RemoteDevice


def mesh(*processes):
    here = iter(jax.devices())
    devices = [next(here) if p == 0 else RemoteDevice(p, i, "cpu", "cpu") for i, p in enumerate(processes)]
    return Mesh(np.array(devices), ("data",))


def test_two_ranks_of_two_processes():
    places = RankProcesses.of([mesh(0, 0), mesh(1, 1)], "step")
    assert places == RankProcesses(((0,), (1,)), 0) and places.are_several and places.all == (0, 1) and places.first
    assert places.is_here(0) and not places.is_here(1) and places.speaks_for(0)
    assert places.text(1) == "process 1"


def test_one_process():
    places = RankProcesses.of([mesh(0, 0)] * 2, "step")
    assert not places.are_several and places.is_here(1) and places.first


def test_of_several_processes_of_a_rank_the_first_speaks():
    assert not RankProcesses(((0, 1), (0, 1)), 1).speaks_for(0) and not RankProcesses(((0, 1),), 1).first


@pytest.mark.parametrize(
    ("meshes", "says"),
    [([mesh(1, 1)], "all ranks run in process 1, and process 0 would have nothing to do"),
     ([mesh(0, 1), mesh(1, 1)], "rank 0 is in processes 0, 1, rank 1 in 1")],
)  # fmt: skip
def test_what_cannot_be(meshes, says):
    with pytest.raises(MeshError, match=says):
        RankProcesses.of(meshes, "step")
