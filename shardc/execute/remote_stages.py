"""The part of a pipeline of several processes that runs in this one: its network, and values sent outside of channels.

Besides the messages between stages two kinds of values go from process to process:
- an argument that several stages read, and that lives with one of them: its home sends it when a call begins;
- a small result, such as the loss: its home sends it to all processes, which wait for it only when they read it.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, Final

import jax
import numpy as np

from shardc.arrays.fetch import of_words, words
from shardc.arrays.pieces import pack_array, unpack_array
from shardc.arrays.place import Place
from shardc.arrays.placed import is_placed
from shardc.arrays.remote_array import Arrival, RemoteArray
from shardc.errors import ClusterError
from shardc.execute.process_group import look_at_run
from shardc.execute.rank_processes import RankProcesses
from shardc.execute.remote_values import whole
from shardc.execute.ways import Ways, WaysCodec
from shardc.pipeline.plan import MpmdPlan
from shardc.runtime.cluster import Cluster, current
from shardc.runtime.distributed_network import DistributedNetwork, Expected
from shardc.runtime.executor import Executor, ProcessShare
from shardc.runtime.transport.link import Packed

_LOOK: Final = 1.0
"""Seconds between two looks whether a value can still come."""


class RemoteStages:
    """The other processes of a pipeline.

    Args:
      plan: the plan, equal in all processes.
      ways: of each channel.
      places: which process runs which rank.
    """

    def __init__(self, plan: MpmdPlan, ways: Sequence[Ways | None], places: RankProcesses) -> None:
        cluster, digest = current(), plan.digest
        if cluster is None:
            who = ", ".join(map(str, places.all))
            raise ClusterError(
                f"{plan.program.name}: its stages are in processes {who}, which know nothing of each other; start them "
                "with python -m shardc run --processes n script.py."
            )
        self.cluster: Cluster = cluster
        self.places = places
        self.epoch = cluster.epoch
        links = {p: cluster.link(p) for p in range(cluster.processes) if p != cluster.me}
        number = int.from_bytes(hashlib.sha256(f"{digest} {cluster.count(digest)}".encode()).digest()[:8])
        self.network = DistributedNetwork(plan.network, number, places.of_rank, links, WaysCodec(ways))
        self._finalizer = weakref.finalize(self, close_network, self.network, cluster)

    @property
    def share(self) -> ProcessShare:
        """The actors of this process, for the executor."""
        return ProcessShare(self.network.mine, self.network.ports, self.cluster.config.patience, look_at_run)

    def open(self, executor: Executor) -> None:
        open_network(self.network, executor, self.cluster)

    def close(self) -> None:
        self._finalizer()

    # -- values besides the messages

    def send(self, run: int, number: int, x: Any, to: Sequence[int]) -> None:
        """Send the logical value of an array of this process to others. Waits for nothing."""
        value = whole(x)

        def packed() -> Packed:
            return pack_array(np.asarray(words(value)))

        for peer in to:
            self.network.send_value(run, number, peer, packed)

    def receive(self, run: int, number: int, aval: Any, peer: int) -> Any:
        """Wait for the logical value of an array of another process."""
        packed = _awaited(self.network.expect(run, number, peer), peer, self.cluster)
        return of_words(unpack_array(packed), aval.dtype)

    def arriving(self, run: int, number: int, aval: Any, at: Place) -> RemoteArray:
        """An array of another process whose value is on its way."""
        peer = min(p for p in at.processes if p is not None)
        expected, cluster = self.network.expect(run, number, peer), self.cluster

        def value() -> np.ndarray[Any, Any]:
            return of_words(unpack_array(_awaited(expected, peer, cluster)), aval.dtype)

        return RemoteArray(aval, at.at, at.device_mesh, Arrival(value, lambda: expected.is_there))


def _awaited(expected: Expected, peer: int, cluster: Cluster) -> Packed:
    """Wait for a value of another process. Raises as `Expected.get`, and as soon as the value will never arrive."""
    until = monotonic() + cluster.config.patience
    with cluster.waits.during([peer], "for a result"):
        while (left := until - monotonic()) > _LOOK and not expected.is_there:
            with suppress(ClusterError):  # not yet; if it fails, `get` says so again
                return expected.get(_LOOK)
            if not expected.is_there:
                look_at_run()
        return expected.get(max(0.0, left))


def open_network(network: DistributedNetwork, executor: Executor, cluster: Cluster) -> None:
    """Open the part of a network that runs in this process; from now on it says for whom its actors wait."""
    with cluster.waits.during(list(network.links), "to open the network"):
        network.open(executor.mailboxes, cluster.config.patience)
    watch = executor.watch()
    cluster.waits.networks[network.number] = lambda: network.waits(watch.look())


def close_network(network: DistributedNetwork, cluster: Cluster) -> None:
    """Close the part of a network that runs in this process."""
    cluster.waits.networks.pop(network.number, None)
    network.close()


def lives_on(x: Any, place: Place) -> bool:
    """Whether an array lives on the mesh of a place, and nowhere else."""
    if is_placed(x):
        return x.mesh == place.mesh
    return isinstance(x, jax.Array) and x.committed and x.sharding.device_set == place.sharding.device_set
