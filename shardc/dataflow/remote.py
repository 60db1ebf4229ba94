"""A flow in several processes: which process runs which actor, messages as bytes, and what all processes get to know.

Every process runs the same script and traces the same round. An actor runs where the devices of its mesh are; Python on
the host runs beside what reads its results, or where `process=` says. The inputs are read by process 0.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from shardc.arrays.fetch import of_words, words
from shardc.arrays.pieces import pack_array, unpack_array
from shardc.arrays.remote import RemoteArray, is_small
from shardc.dataflow.moves import LeafMove, stay, to_place
from shardc.dataflow.network import Edge
from shardc.dataflow.plan import PlannedFlow
from shardc.dataflow.round import FlowNode
from shardc.errors import ClusterError, RoundFailedError
from shardc.execute.process_group import group_of_run, look_at_run
from shardc.execute.remote_values import bring
from shardc.runtime.cluster import Cluster, current
from shardc.runtime.distributed_network import DistributedNetwork
from shardc.runtime.executor import Executor, ProcessShare
from shardc.runtime.transport.link import Packed


class RemoteFlow:
    """The other processes of a flow.

    Args:
      plan: the plan, equal in all processes.
      processes: of each actor.
      wide: whether numbers of 64 bits are on.
    """

    def __init__(self, plan: PlannedFlow, processes: Sequence[int], wide: bool) -> None:
        cluster, group = current(), group_of_run()
        if cluster is None or group is None:
            raise ClusterError(
                f"{plan.round.where}: its nodes are in processes {', '.join(map(str, sorted(set(processes))))}, which "
                "know nothing of each other; start them with python -m shardc run --processes n --islands n script.py."
            )
        self.cluster: Cluster = cluster
        self.epoch = cluster.epoch
        self._built, self._processes, self._where = plan.built, list(processes), plan.round.where
        digest = hashlib.sha256(_text_of(plan).encode()).hexdigest()
        group.agree(f"the flow {plan.name}", {"its plan": digest[:12]})
        links = {p: cluster.link(p) for p in range(cluster.processes) if p != cluster.me}
        number = int.from_bytes(hashlib.sha256(f"{digest} {cluster.count(digest)}".encode()).digest()[:8])
        codec = _Codec(plan.built.edges, wide)
        self.network = DistributedNetwork(plan.network, number, [(p,) for p in processes], links, codec)
        self._finalizer = weakref.finalize(self, self.network.close)

    @property
    def share(self) -> ProcessShare:
        """The actors of this process, for the executor."""
        return ProcessShare(self.network.mine, self.network.ports, self.cluster.config.deadline, look_at_run)

    def open(self, executor: Executor) -> None:
        self.network.open(executor.mailboxes, self.cluster.config.deadline)

    def close(self) -> None:
        self._finalizer()

    def outcome(self, rounds: int, failed: tuple[str, int, str] | None) -> int | tuple[str, int, str]:
        """The rounds that all processes have run; or the failure of a run in any of them, as node, round and text. All
        call it together."""
        group = group_of_run()
        assert group is not None
        said = group.gather(
            "the end of a flow's run", {"failed": "" if failed is None else json.dumps(failed), "rounds": str(rounds)}
        )
        known = [(p, *json.loads(facts["failed"])) for p, facts in enumerate(said) if facts["failed"]]
        if not known:
            return min(int(facts["rounds"]) for facts in said)
        process, node, round, text = min(known, key=lambda k: not k[1])  # who was only stopped knows less
        return node, round, f"process {process}: {text}"

    def agreed(self, rounds: int) -> int:
        """The rounds that all processes have run, which call this together.

        Raises:
          RoundFailedError: the run failed in one of them.
        """
        ended = self.outcome(rounds, None)
        if not isinstance(ended, int):
            raise self.error(*ended)
        return ended

    def failure(self, node: str, round: int, text: str) -> RoundFailedError:
        """The error of a run that failed in one of several processes; all of them raise it."""
        failed = self.outcome(0, (node, round, text))
        assert not isinstance(failed, int)
        return self.error(*failed)

    def error(self, node: str, round: int, text: str) -> RoundFailedError:
        where = f"{node} failed in round {round}, in " if node else ""
        return RoundFailedError(
            f"{self._where}: {where}{text}\nThe run has stopped in all processes; go on from a checkpoint.",
            node, round, 0, None, [],
        )  # fmt: skip

    def brought(self, state: Sequence[Any]) -> list[Any]:
        """The state with those leaves here that several processes read when a run begins."""
        readers: dict[int, set[int]] = {}
        for edge in self._built.edges:
            for i in (f for m in edge.moves for f in m.first if isinstance(f, int)):
                readers.setdefault(i, set()).add(self._process_of(edge.taker))
        for node, constants in self._built.constants.items():
            for i in constants.values():
                readers.setdefault(i, set()).add(self._process_of(node))
        wanted = [i for i, processes in sorted(readers.items()) if len(processes) > 1]
        found = list(state)
        for i, x in zip(wanted, bring([state[i] for i in wanted]), strict=True):
            found[i] = x
        return found

    def last_state(self, leaf: Callable[[int], Any], first: Sequence[Any]) -> list[Any]:
        """The state after a run: of what is in another process its value if it is small.

        Args:
          leaf: gives a leaf that a node of this process has made.
          first: the state before the run.
        """
        origins = list(enumerate(self._built.state))
        made = {i: o.node for i, o in origins if o.node is not None}
        here = {i: leaf(i) for i, n in made.items() if self._process_of(n) == self.cluster.me}
        avals = {i: v.aval for i, v in enumerate(self._built.round.state)}
        sent = {(n.number, i): avals[i] for i, n in made.items() if is_small(avals[i]) or not n.work.meshes}
        told = self.exchange({(n.number, i): [here[i]] for i, n in made.items() if i in here}, sent)
        found: list[Any] = []
        for i, origin in origins:
            if origin.node is None:
                found.append(first[origin.index])
            elif i in here:
                found.append(here[i])
            elif (origin.node.number, i) in told:
                found.append(told[origin.node.number, i][0])
            else:
                place = origin.node.work.gives[origin.index]
                assert isinstance(place.mesh, Mesh) and place.placement is not None
                found.append(RemoteArray(avals[i], place.placement, place.mesh))
        return found

    def _process_of(self, node: FlowNode) -> int:
        return self._processes[self._built.actor[node]]

    def exchange(
        self, mine: Mapping[tuple[int, int], Sequence[Any]], of: Mapping[tuple[int, int], Any]
    ) -> dict[Any, Any]:
        """The results of all nodes in all processes, which call this together.

        Args:
          mine: what nodes of this process gave, by node and result leaf.
          of: the type of each result, by node and leaf, of all processes.
        """
        cluster, tag = self.cluster, f"flow {self.network.number} {self.cluster.count('flow results')}"
        found: dict[Any, Any] = dict(mine)
        for key in sorted(of):
            if self._process_of(self._built.round.nodes[key[0]]) == cluster.me:
                whole = np.stack([np.asarray(words(x)) for x in mine[key]]) if mine[key] else None
                for p in range(cluster.processes):
                    if p != cluster.me:
                        cluster.link(p).send_tagged(tag, (b"", ()) if whole is None else pack_array(whole))
        for key in sorted(of):
            home = self._process_of(self._built.round.nodes[key[0]])
            if home != cluster.me:
                packed = cluster.link(home).receive_tagged(tag, cluster.config.deadline)
                found[key] = [of_words(x, of[key].dtype) for x in unpack_array(packed)] if packed[0] else []
        return found


def _text_of(plan: PlannedFlow) -> str:
    """A text that is equal where the same flow is planned alike."""
    parts = [f"{n.name} every {n.every} {getattr(getattr(n.work, 'plan', None), 'digest', '')}" for n in plan.nodes]
    parts += [
        f"{e.giver}>{e.taker}>{e.delay}>{e.registers}>{[(m.output, m.argument) for m in e.moves]}" for e in plan.edges
    ]
    return "\n".join(parts)


def sender(keep: Sequence[bool]) -> LeafMove:
    """The function that readies a message for a link. `keep`: the values that may be overwritten before they are sent;
    these are copied."""

    def ready(values: tuple[Any, ...]) -> tuple[Any, ...]:
        made = tuple(x.copy() if c and isinstance(x, jax.Array) else x for x, c in zip(values, keep, strict=True))
        for x in made:
            if isinstance(x, jax.Array):
                words(x).copy_to_host_async()
        return made

    return ready


class _Codec:
    """The messages of a flow's channels as bytes (`shardc.runtime.distributed_network.Codec`): logical values."""

    def __init__(self, edges: Sequence[Edge], wide: bool) -> None:
        self._edges, self._wide = edges, wide
        self._entries: dict[int, list[tuple[Any, LeafMove]]] = {}

    def is_ready(self, value: Any) -> bool:
        arrays: list[Any] = [words(x) for x in value if isinstance(x, jax.Array)]
        return all(x.is_ready() for x in arrays)

    def pack(self, channel: int, peer: int, value: Any) -> Packed:
        del channel, peer
        heads: list[tuple[str, int]] = []
        buffers: list[memoryview] = []
        for x in value:
            about, parts = pack_array(np.asarray(words(x)) if isinstance(x, jax.Array) else np.asarray(x))
            heads.append((bytes(about).decode(), len(parts)))
            buffers += parts
        return json.dumps(heads).encode(), buffers

    def unpack(self, channel: int, parts: Mapping[int, Packed]) -> Any:
        ((about, buffers),) = parts.values()
        rest = iter(buffers)
        with jax.enable_x64(self._wide):
            return tuple(
                enter(of_words(unpack_array((head.encode(), [next(rest) for _ in range(count)])), aval.dtype))
                for (head, count), (aval, enter) in zip(json.loads(about), self._ends(channel), strict=True)
            )

    def _ends(self, channel: int) -> list[tuple[Any, LeafMove]]:
        if channel not in self._entries:
            edge = self._edges[channel]
            self._entries[channel] = [
                (
                    edge.giver.results[m.output],
                    stay if (place := edge.places(m)[1]).mesh is None or place.placement is None
                    else to_place(place, edge.giver.results[m.output]),
                )
                for m in edge.moves
            ]  # fmt: skip
        return self._entries[channel]
