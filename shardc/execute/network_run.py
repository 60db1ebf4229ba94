"""A network that runs in several processes: its part in this one, and values sent besides its messages.

Besides the messages between actors, values go from process to process: arguments that several actors read, small
results, the state after a run. The *home* of a value sends it: of several processes that have it, the first one. All of
them call `send` together where its pieces are spread over them.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Collection, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import Mesh

from shardc.arrays.fetch import of_words, words
from shardc.arrays.pieces import pack_array, unpack_array
from shardc.arrays.remote_array import Arrival, RemoteArray
from shardc.errors import ClusterError
from shardc.execute.process_group import look_at_run
from shardc.execute.remote_values import whole
from shardc.machine.devices import processes_of
from shardc.runtime.actor import Network
from shardc.runtime.cluster import Cluster, current
from shardc.runtime.distributed_network import Codec, DistributedNetwork, Expected
from shardc.runtime.executor import Executor, ProcessShare
from shardc.runtime.transport.link import Packed
from shardc.sbp.placement import Placement

_LOOK: Final = 1.0
"""Seconds between two looks whether a value can still come."""


class NetworkRun:
    """The part of a network that runs in this process, while no process is started again.

    Args:
      net: the network.
      digest: of its plan, equal in all processes.
      places: for each actor the processes that run it.
      codec: of its messages.
      what: what runs in the processes, for errors: `step: its stages`.
      crossing: as in `DistributedNetwork`.
      inner: whether it is a node of another network, in the processes that run its actors alone; else all processes of
        the run open it.

    Raises:
      ClusterError: this process runs alone.
    """

    def __init__(  # noqa: PLR0913  # a network, and where it runs
        self, net: Network, digest: str, places: Sequence[Sequence[int]], codec: Codec, what: str,
        crossing: Collection[int] = (), inner: bool = False,
    ) -> None:  # fmt: skip
        cluster = current()
        if cluster is None or cluster.processes == 1:
            who = ", ".join(map(str, sorted({p for ps in places for p in ps})))
            raise ClusterError(
                f"{what} are in processes {who}, which know nothing of each other; start them with "
                "python -m shardc run --processes n script.py."
            )
        self.cluster: Cluster = cluster
        self._epoch, self._is_inner = cluster.epoch, inner
        self._members = sorted({p for ps in places for p in ps}) if inner else range(cluster.processes)
        links = {p: cluster.link(p) for p in self._members if p != cluster.me}
        number = int.from_bytes(hashlib.sha256(f"{digest} {cluster.count(digest)}".encode()).digest()[:8])
        self.network = DistributedNetwork(net, number, places, links, codec, crossing)
        self._finalizer = weakref.finalize(self, _close, self.network, cluster)

    @property
    def is_over(self) -> bool:
        """Whether processes of the run were started again since."""
        return self._epoch != self.cluster.epoch

    @property
    def share(self) -> ProcessShare:
        """The actors of this process, for the executor."""
        net, look = self.network, None if self._is_inner else look_at_run
        return ProcessShare(net.mine, net.ports, self.cluster.config.patience, look, net.channels, net.others)

    def open(self, executor: Executor) -> None:
        """Open the part of the network here, when all processes do; from now on it says for whom its actors wait."""
        network, waits = self.network, self.cluster.waits
        with waits.during(list(network.links), "to open the network"):
            network.open(executor.mailboxes, self.cluster.config.patience)
        watch = executor.watch()
        waits.networks[network.number] = lambda: network.waits(watch.look())

    def close(self) -> None:
        self._finalizer()

    # -- values besides the messages

    def others(self, places: Sequence[int]) -> list[int]:
        """The processes of the network that are not among these."""
        return [p for p in self._members if p not in places]

    def send(self, run: int, number: int, x: Any, to: Sequence[int]) -> None:
        """Send the logical value of an array that this process has to others. Waits for nothing.

        Args:
          run, number: name the value.
          x: an array; None: there is no value.
          to: the processes.
        """
        value = whole(x) if isinstance(x, jax.Array) else x

        def packed() -> Packed:
            return (b"", ()) if value is None else pack_array(np.asarray(words(value)))

        for peer in to:
            self.network.send_value(run, number, peer, packed)

    def receive(self, run: int, number: int, aval: Any, peer: int) -> Any:
        """Wait for the logical value that another process sends; None if there is none."""
        return _value(_awaited(self.network.expect(run, number, peer), peer, self.cluster), aval)

    def arriving(self, run: int, number: int, aval: Any, placement: Placement, mesh: Mesh) -> RemoteArray:
        """An array of another process whose value is on its way."""
        peer = processes_of(mesh.devices.flat)[0]
        expected, cluster = self.network.expect(run, number, peer), self.cluster
        arrival = Arrival(lambda: _value(_awaited(expected, peer, cluster), aval), lambda: expected.is_there)
        return RemoteArray(aval, placement, mesh, arrival)


def _value(packed: Packed, aval: Any) -> Any:
    return of_words(unpack_array(packed), aval.dtype) if packed[0] else None


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


def _close(network: DistributedNetwork, cluster: Cluster) -> None:
    cluster.waits.networks.pop(network.number, None)
    network.close()
