"""A network that runs in several processes: its part in this one, and values sent besides its messages.

Besides the messages between actors, values go from process to process: arguments that several actors read, small
results, the state after a run. The *home* of a value sends it: of several processes that have it, the first one. All of
them call `send` together where its pieces are spread over them.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
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
from shardc.execute.ways import WaysCodec
from shardc.machine.devices import processes_of
from shardc.machine.puts import open_puts
from shardc.runtime.actor import Network
from shardc.runtime.calls import refuse_unlike
from shardc.runtime.cluster import Cluster, current
from shardc.runtime.distributed_network import DistributedNetwork, Expected
from shardc.runtime.executor import Executor, ProcessShare
from shardc.runtime.replaced.replay import Replaceable
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
      replaceable: the processes that may be replaced while a run goes on.
      inner: whether it is a node of another network, in the processes that run its actors alone; else all processes of
        the run open it.

    Attributes:
      first: the first round of the first run that this process runs: not 0 if it has joined the others in it.

    Raises:
      ClusterError: this process runs alone.
    """

    def __init__(  # noqa: PLR0913  # a network, and where it runs
        self, net: Network, digest: str, places: Sequence[Sequence[int]], codec: WaysCodec, what: str,
        crossing: Collection[int] = (), replaceable: Replaceable | None = None, inner: bool = False,
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
        put = codec.put_channels
        senders = dict.fromkeys(put, open_puts(cluster).send) if put else {}
        self.network = DistributedNetwork(net, number, places, links, codec, crossing, senders)
        self.replaceable = replaceable or Replaceable()
        self.first = 0
        cluster.welcomes[number] = self.network.successors.welcome
        self._finalizer = weakref.finalize(self, _close, self.network, cluster)

    @property
    def is_over(self) -> bool:
        """Whether processes of the run were started again since."""
        return self._epoch != self.cluster.epoch

    @property
    def share(self) -> ProcessShare:
        """The actors of this process, for the executor."""
        net, look = self.network, None if self._is_inner else self._look
        unbound = [i for i, c in enumerate(net.net.channels) if c.registers is None and c.target in net.mine]
        return ProcessShare(
            net.mine, net.ports, self.cluster.config.patience, look, net.channels, net.others,
            [i for i in unbound if net.net.channels[i].source not in net.mine and net.me in self.replaceable.processes],
        )  # fmt: skip

    def _look(self) -> None:
        """Raise if the run cannot go on. That of a process that may be replaced is not noticed by its link."""
        look_at_run()
        if self.cluster.replaced:
            self.cluster.check()

    def open(self, executor: Executor, facts: Callable[[], Mapping[str, str]] | None = None) -> None:
        """Open the part of the network here, when all processes do; from now on it says for whom its actors wait.

        A process that was started in place of a lost one joins the run that goes on.

        Args:
          facts: gives what this process knows of the first run, if processes may be replaced in it.

        Raises:
          ClusterError: the run that goes on is not the first one of this process' script.
          DisagreementError: it has other facts.
        """
        network, waits, cluster = self.network, self.cluster.waits, self.cluster
        cluster.recorder.channels[network.number] = [c.name for c in network.net.channels]
        with waits.during(list(network.links), "to open the network"):
            said = self._joined(facts()) if cluster.config.joins and facts is not None else None
            if facts is not None:  # before any message of the run
                cluster.replaced = self.replaceable.processes
                network.successors.begin(executor.runs + 1, self.replaceable)
            if said is None:
                network.open(executor.mailboxes, cluster.config.patience)
            else:
                cluster.join(said["counts"])
                self.first = network.join(executor.mailboxes, cluster.check, cluster.config.patience)
        watch = executor.watch()
        waits.networks[network.number] = lambda: network.waits(watch.look())

    def close(self) -> None:
        self._finalizer()

    def speeds(self, channels: Collection[int]) -> dict[int, tuple[float, float]]:
        """`Link.speed` to each process at the other end of channels of this one."""
        net, me = self.network, self.cluster.me
        ends = [{*net.places[c.source], *net.places[c.target]} for c in (net.net.channels[i] for i in channels)]
        return {p: net.links[p].speed() for p in sorted({p for e in ends if me in e for p in e} - {me})}

    # -- processes that are replaced while a run goes on

    def begin_replaceable(self, facts: Callable[[], Mapping[str, str]]) -> None:
        """From now on processes may be replaced: a new one comes to this run first of all.

        Args:
          facts: gives what this process knows of the run.
        """
        cluster = self.cluster
        if cluster.replaced and cluster.me == self._speaker:
            said = {"network": self.network.number, "counts": cluster.counts(), "facts": dict(facts())}
            cluster.say_run({"replaceable": sorted(self.replaceable.processes), **said})

    def end_replaceable(self) -> None:
        """From now on no process may be replaced.

        Raises:
          PeerLostError: one is lost.
        """
        if self.cluster.replaced:
            if self.cluster.me == self._speaker:
                self.cluster.say_run({})
            self.cluster.replaced = frozenset()
            self.network.successors.end()

    @property
    def _speaker(self) -> int:
        return min(p for p in range(self.cluster.processes) if p not in self.replaceable.processes)

    def _joined(self, facts: Mapping[str, str]) -> Mapping[str, Any]:
        """The others' words about the run that goes on, which this process joins."""
        cluster = self.cluster
        said = json.loads(cluster.wait_for_run(self._speaker))
        if said.get("network") != self.network.number:
            raise ClusterError(
                f"process {cluster.me} was started again and cannot join the others: they run another flow, or none."
            )
        both = sorted(facts.keys() & said["facts"].keys())
        known = [{k: each[k] for k in both} for each in (said["facts"], facts)]
        refuse_unlike("the run that goes on", [self._speaker, cluster.me], known)
        return said

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


def is_first_call() -> bool:
    """Whether the next call that others take part in is the first one of this process' script."""
    cluster = current()
    return cluster is not None and cluster.is_first_call


def joins_others() -> bool:
    """Whether this process was started in place of a lost one, and has not joined the others yet."""
    cluster = current()
    return cluster is not None and cluster.config.joins


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
    cluster.welcomes.pop(network.number, None)
    cluster.recorder.channels.pop(network.number, None)
    network.close()
