"""A round as a network: nodes of one mesh are one actor in the order of calls, values between nodes are channels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, NamedTuple

from jax.sharding import Mesh

from shardc.arrays.place import Place, StagesPlace
from shardc.dataflow.round import Fixed, FlowNode, Origin, Round
from shardc.dataflow.timing.resources import Ends, PlacedNode, devices_of, resources_of
from shardc.dataflow.value import RoundValue
from shardc.errors import FlowError, MeshError, all_offenders
from shardc.execute.executable import other_runtimes_text
from shardc.execute.rank_processes import refuse_apart
from shardc.execute.ways import Way, Ways
from shardc.machine.devices import processes_of, runtimes_of
from shardc.machine.mesh import border
from shardc.machine.puts import HERE
from shardc.runtime.actor import Channel, Message, Network, Step
from shardc.runtime.calls import processes_text
from shardc.sbp.way import WayPlan

MOST_STEPS: Final = 100_000
"""The most steps of a period."""


class NodeStep(NamedTuple):
    """The label of a step: one call of a node in the period. It prints as the node's name."""

    name: str
    node: int
    round: int

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class HandedLeaf:
    """A leaf that a channel carries.

    Attributes:
      output: the number of the giver's result leaf.
      argument: the number of the taker's argument leaf.
      first: what stands for it in the first rounds: numbers of state leaves, or arrays.
      copied: whether the taker gets a copy, because another node may overwrite the value before it is read.
    """

    output: int
    argument: int
    first: tuple[int | Fixed, ...]
    copied: bool = False


@dataclass
class Edge:
    """The values that one node hands to another.

    Attributes:
      giver, taker: the nodes.
      delay: in rounds.
      moves: the leaves; none if the taker only waits for the giver.
      registers: of its channel; None: as many as are needed.
      is_gate: whether it only says that there is a round. It holds nobody back who is ahead as far as others let it.
    """

    giver: FlowNode
    taker: FlowNode
    delay: int
    moves: list[HandedLeaf] = field(default_factory=list[HandedLeaf])
    registers: int | None = 1
    is_gate: bool = False

    def places(self, move: HandedLeaf) -> tuple[Place, Place]:
        """Where a leaf is given and taken."""
        return self.giver.work.gives[move.output], self.taker.work.takes[move.argument]

    def stays(self, move: HandedLeaf) -> bool:
        """Whether a leaf is taken where it is given: on the same devices at the same placement, or on the host."""
        here, there = self.places(move)
        if here.mesh != there.mesh:
            return False
        known = here.process is None is there.process  # of a pipeline's stages in several processes
        return here.placement == there.placement or (known and None in (here.placement, there.placement))

    def stays_near(self, move: HandedLeaf) -> bool:
        """Whether a leaf stays on its mesh. Leaves of a pipeline in several processes have several meshes: those that
        stay near have a channel of their own."""
        here, there = self.places(move)
        return here.mesh == there.mesh and (here.process is None) == (there.process is None)

    def takes_over(self, move: HandedLeaf) -> bool:
        """Whether the taker may overwrite a leaf."""
        return move.argument in self.taker.work.donated

    def way(self, move: HandedLeaf) -> Way:
        """The way of a leaf, if both ends are here. One that the taker may overwrite is copied if it comes from outside
        of the flow's meshes: a user's array may lie there already."""
        given, taken = self.places(move)
        if given.process is not None and self.stays(move):  # pieces stay on their stages, each in its process
            given, taken = Place(given.aval, given.mesh), Place(taken.aval, taken.mesh)
        copied = move.copied or (given.mesh is None and self.takes_over(move))
        return Way(given, taken, border(given.mesh, taken.mesh), copied)

    @cached_property
    def plans(self) -> list[WayPlan]:
        """The plans of the leaves that move."""
        return [self.way(m).plan for m in self.moves if not self.stays(m)]

    @property
    def bytes(self) -> int:
        """Bytes of one message that cross the border between its ends: each element once for each device that needs it.
        0 if the values stay where they are."""
        return sum(p.border_bytes for p in self.plans)

    @property
    def boxing_bytes(self) -> int:
        """Bytes of one message that a device sends within the meshes, before the border and behind it."""
        return sum(p.boxing_bytes for p in self.plans)

    @cached_property
    def carrier(self) -> str:
        """The carrier of a message from mesh to mesh, as `Ways.carrier`; `here` too where a leaf goes to a host."""
        ways = [self.way(m) for m in self.moves if not self.stays(m)]
        return HERE if any(w.given.on_host or w.taken.on_host for w in ways) else Ways(ways, False).carrier

    @property
    def held_bytes(self) -> int:
        """Bytes of one message on one device of the taker."""
        return sum(there.bytes for _, there in map(self.places, self.moves))

    @property
    def most_bytes(self) -> int:
        """Bytes of one message that go over the busiest link, into one device or out of one."""
        return sum(p.device_bytes for p in self.plans)

    @property
    def seconds(self) -> tuple[float, float]:
        """Latency, and seconds for which a message keeps its links busy. The boxings on either mesh, which are programs
        of their devices, count as latency."""
        latency = max((p.link.latency for p in self.plans if p.link is not None and p.border_bytes), default=0.0)
        busy = sum(p.device_bytes / p.link.bandwidth for p in self.plans if p.link is not None)
        return latency + sum(p.before.seconds + p.after.seconds for p in self.plans), busy

    @property
    def ends(self) -> Ends:
        """The devices that a message leaves, and those that it enters."""
        pairs = [self.places(m) for m in self.moves if not self.stays(m)]
        left, entered = (
            frozenset(d for p in places if p.mesh is not None for d in devices_of(p.mesh))
            for places in ([here for here, _ in pairs], [there for _, there in pairs])
        )
        return left, entered


class FlowNetwork:
    """The network of a round, and what its channels and steps stand for.

    Args:
      round: the traced round.
      credits: registers of a channel beside those of its delay, where the giver does not say.

    Attributes:
      rows: the nodes of each actor.
      processes: of the run, those of each actor; the first of them speaks for them.
      edges: by channel.
      constants: for each node the state leaves that it takes and that never change, by argument.
      whole: for each node in several processes its results that the first of them gets whole.
      ends: the nodes that end a run by having no more.
      apart: the rounds by which shared states let actors be apart; None: any. If it is 0, no node is in a round that is
        not in the inputs and in all loaders.
    """

    def __init__(self, round: Round, credits: int) -> None:
        self.round, self.credits = round, credits
        self.longest = 0
        """The longest delay: who is so far ahead of others needs as many registers in the channels to them."""
        self.rows = _rows(round.nodes)
        self.actor = {n: a for a, row in enumerate(self.rows) for n in row}
        self.constants: dict[FlowNode, dict[int, int]] = {n: {} for n in round.nodes}
        self.edges = self._edges()
        self.state = [round.origin(v) for v in round.state]
        self.outs: list[Origin | None] = [round.origin(x) if isinstance(x, RoundValue) else None for x in round.outs]
        bounds = [n.work.apart for n in round.nodes]
        self.apart = None if None in bounds else max(b for b in bounds if b is not None)
        self.ends = self._ends()
        self.processes = _processes_of_rows(self)
        self._gate()
        self.period = math.lcm(*(n.every for n in round.nodes))
        self._check_period()
        self.longest = max((e.delay for e in self.edges), default=0)
        self.edges = [self._with_registers(self._safe(e)) for e in self.edges]
        self.network = self._network()
        self.whole = {n: self._given_whole(n) for n in round.nodes if len(self.processes_of(n)) > 1}

    def _edges(self) -> list[Edge]:
        found: dict[tuple[int, int, int, bool], Edge] = {}
        for node in self.round.nodes:
            for at, v in enumerate(node.given):
                if not isinstance(v, RoundValue):
                    continue
                origin = self.round.origin(v)
                if origin.node is None:
                    self.constants[node][at] = origin.index
                    continue
                edge, move = Edge(origin.node, node, origin.delay), HandedLeaf(origin.index, at, tuple(origin.first))
                key = origin.node.number, node.number, origin.delay, edge.stays_near(move)
                found.setdefault(key, edge).moves.append(move)
            for giver, delay in node.work.waits:
                if not any(key[:3] == (giver, node.number, delay) for key in found):
                    found[giver, node.number, delay, True] = Edge(self.round.nodes[giver], node, delay)
        return list(found.values())

    # -- the end of the inputs

    def _makes_state(self) -> list[FlowNode]:
        """The nodes that change what outlives the run."""
        found = {o.node for o in self.state if o.node is not None}
        return [n for n in self.round.nodes if n in found or n.work.changes]

    def _reached(self, node: FlowNode) -> set[FlowNode]:
        """The nodes that need a node's result of the same round."""
        reached, todo = {node}, [node]
        while todo:
            at = todo.pop()
            new = [e.taker for e in self.edges if e.giver is at and not e.delay and e.taker not in reached]
            reached.update(new)
            todo += new
        return reached

    def _before(self, node: FlowNode) -> set[FlowNode]:
        """The nodes that run before a node in each round: those whose results it needs, and those before them in the
        order of their actors."""
        before, todo = set[FlowNode](), [node]
        while todo:
            at = todo.pop()
            row = self.rows[self.actor[at]]
            new = {e.giver for e in self.edges if e.taker is at and not e.delay} | set(row[: row.index(at)])
            todo += new - before
            before |= new
        return before

    def _ends(self) -> list[FlowNode]:
        """The inputs, and the loaders: nodes on the host that the new state of a round needs, with nothing before them
        that changes the state or takes its buffers."""
        makers = set(self._makes_state())
        hosts = [n for n in self.round.nodes[1:] if not n.work.meshes and n not in makers and n.every == 1]
        loaders = [
            n for n in hosts
            if self._reached(n) & makers and not any(m in makers or m.work.donated for m in self._before(n))
        ]  # fmt: skip
        return [self.round.nodes[0], *loaders]

    def _gate(self) -> None:
        """Let no node begin a round that the run's sources may not have, unless a source waits for it.

        Where states let actors be apart, only the inputs have to have it; but the processes of one actor always end
        after the same round.
        """
        early = {m for source in self.ends for m in (source, *self._before(source))}
        for source in self.ends:
            reached = self._reached(source)
            for a, row in enumerate(self.rows):
                gated = self.apart != 0 and source is not self.ends[0] and len(self.processes[a]) == 1
                for node in row:
                    if not (gated or node in reached or (node in early and source.number)):
                        self.edges.append(Edge(source, node, 0, is_gate=True))
                    gated |= node.every == 1

    # -- registers and copies

    def _check_period(self) -> None:
        steps = sum(self.period // n.every for n in self.round.nodes)
        if steps > MOST_STEPS:
            rates = ", ".join(str(r) for r in sorted({n.every for n in self.round.nodes} - {1}))
            raise FlowError(
                f"{self.round.where}: the rates {rates} repeat together only every {self.period:,} rounds; choose "
                "rates that divide one another."
            )

    def _with_registers(self, edge: Edge) -> Edge:
        late = -(-edge.delay // edge.taker.every)  # the most that it holds between two rounds
        same = self.actor[edge.giver] == self.actor[edge.taker]
        apart = self.credits if edge.delay else max(self.credits, self.longest)
        credits = [n.work.credits or apart for n in (self.round.nodes if edge.is_gate else [edge.giver])]
        edge.registers = late + (1 if same else sum(credits))
        if edge.giver.number == 0:  # all read the same inputs
            edge.registers = None if self.apart is None else edge.registers + self.apart
        elif not edge.moves and (edge.giver.number, edge.delay) in edge.taker.work.waits:
            edge.registers = None  # a wait says itself who may be ahead
        return edge

    def _safe(self, edge: Edge) -> Edge:
        """An edge whose values are copied where another node may overwrite them before they are read."""
        edge.moves = [
            HandedLeaf(
                m.output, m.argument, m.first,
                any(self._overwrites(e, edge, m) for e in self.edges) or self._is_again(edge, i)
                or (self.crosses(edge) and self.is_donated(edge.giver, m.output)),
            )
            for i, m in enumerate(edge.moves)
        ]  # fmt: skip
        return edge

    def _is_again(self, edge: Edge, i: int) -> bool:
        """Whether a call takes a value a second time, which it may overwrite."""
        same = [m for m in edge.moves if m.output == edge.moves[i].output]
        return same[0] is not edge.moves[i] and any(edge.takes_over(m) for m in same)

    def processes_of(self, node: FlowNode) -> tuple[int, ...]:
        """The processes that run a node; the first of them speaks for them."""
        return self.processes[self.actor[node]]

    def holders(self, node: FlowNode, place: Place) -> tuple[int, ...]:
        """The processes in which a node takes a value that lies at this place."""
        known = isinstance(place.mesh, Mesh) and not place.on_host
        return tuple(processes_of(place.devices)) if known else self.processes_of(node)

    def homes(self, node: FlowNode, place: Place) -> tuple[int, ...]:
        """The processes that have a value that a node has at this place; the first of them speaks for them."""
        return self.holders(node, place) if place.process is None else (place.process,)

    def _given_whole(self, node: FlowNode) -> set[int]:
        """The results of a pipeline in pieces that others take, or that are kept: not those that stay on its stages as
        a part of the state.

        Raises:
          FlowError: pieces of one are in several processes each.
        """
        edges = [e for e in self.edges if e.giver is node and (e.delay > 1 or e.taker is not node)]
        taken = {m.output for e in edges for m in e.moves}
        taken |= {o.index for o in self.outs if o is not None and o.node is node}
        found = {i: p for i in taken if isinstance(p := node.work.gives[i], StagesPlace)}
        if wrong := [f"result {i}." for i, p in found.items() if any(len(set(x.processes)) > 1 for x in p.pieces)]:
            head = (
                f"{self.round.where}: results of {node} are in pieces, as its layers run in a scan, and its stages are "
                "in several processes each; what others take, or the round returns, cannot be put together then. Give "
                "each stage devices of one process, or write its layers one after the other:"
            )
            raise FlowError(all_offenders(head, wrong))
        return set(found)

    def crosses(self, edge: Edge) -> bool:
        """Whether an edge's values go from process to process: they are sent some time after they are given."""
        giver, taker = self.processes_of(edge.giver), self.processes_of(edge.taker)
        return giver != taker or (len(giver) > 1 and not all(map(edge.stays_near, edge.moves)))

    def is_donated(self, node: FlowNode, output: int, rounds: float = math.inf) -> bool:
        """Whether another node may overwrite a result of this one, less than so many rounds later."""
        return any(
            e.giver is node and m.output == output and e.delay < rounds and e.takes_over(m) and self._shares(e, m)
            for e in self.edges for m in e.moves
        )  # fmt: skip

    def _overwrites(self, other: Edge, edge: Edge, move: HandedLeaf) -> bool:
        """Whether what another edge hands on is donated, and this edge's taker may read it later."""
        if other is edge or other.giver is not edge.giver or not self._shares(edge, move):
            return False
        if not any(m.output == move.output and other.takes_over(m) and self._shares(other, m)
                   for m in other.moves):  # fmt: skip
            return False
        mine, theirs = (edge.delay, edge.taker.number), (other.delay, other.taker.number)
        return self.actor[edge.taker] != self.actor[other.taker] or mine > theirs

    def _shares(self, edge: Edge, move: HandedLeaf) -> bool:
        """Whether the taker's value may lie in the giver's memory."""
        here, there = edge.places(move)
        if here.mesh is None or there.mesh is None:
            return there.mesh is None
        return bool(devices_of(here.mesh) & devices_of(there.mesh))

    # -- the network

    def _network(self) -> Network:
        takes: dict[FlowNode, list[tuple[int, Edge]]] = {n: [] for n in self.round.nodes}
        gives: dict[FlowNode, list[tuple[int, Edge]]] = {n: [] for n in self.round.nodes}
        places = [PlacedNode(n, a, self.processes[a]) for n, a in self.actor.items()]
        nothing = frozenset[Any](), frozenset[Any]()
        used = resources_of(
            places, [nothing if self.actor[e.giver] == self.actor[e.taker] else e.ends for e in self.edges]
        )
        channels: list[Channel] = []
        for number, e in enumerate(self.edges):
            late = f", {e.delay} late" if e.delay else ""
            channels.append(
                Channel(
                    f"{e.giver} -> {e.taker}{late}", self.actor[e.giver], self.actor[e.taker], e.registers,
                    e.most_bytes,
                    e.delay, used.by_message[number],
                )
            )  # fmt: skip
            takes[e.taker].append((number, e))
            gives[e.giver].append((number, e))
        actors = [tuple(self._steps(row, takes, gives, used.by_node)) for row in self.rows]
        names = tuple(map(_row_name, self.rows))
        return Network(tuple(actors), tuple(channels), self.period, names=names, kind="round", resources=used.resources)

    def _steps(
        self, row: Sequence[FlowNode], takes: Mapping[FlowNode, list[tuple[int, Edge]]],
        gives: Mapping[FlowNode, list[tuple[int, Edge]]], uses: Mapping[FlowNode, tuple[int, ...]],
    ) -> Iterator[Step]:  # fmt: skip
        for r in range(self.period):
            for node in row:
                if (r + 1) % node.every:
                    continue
                taken: list[Message] = [(c, r) for c, _ in takes[node]]
                given: list[Message] = [
                    (c, (r + e.delay) % self.period) for c, e in gives[node] if (r + e.delay + 1) % e.taker.every == 0
                ]
                yield Step(NodeStep(node.name, node.number, r), tuple(taken), tuple(given), r, uses[node])


def _row_name(row: Sequence[FlowNode]) -> str:
    """The name of an actor: its first two nodes, and how many more it has."""
    more = f" and {len(row) - 2} more" if len(row) > 2 else ""
    return ", ".join(n.name for n in row[:2]) + more


def _processes_of_rows(built: FlowNetwork) -> list[tuple[int, ...]]:
    """The processes of each actor: those of the devices of its meshes.

    Raises:
      MeshError: a mesh has devices of several JAX runtimes.
      FlowError: nodes that share devices are in unlike processes; or a shared state is in several.
    """
    found: dict[int, tuple[int, ...]] = {}
    where = built.round.where
    for a, row in enumerate(built.rows):
        each = {n: processes for n in row if (processes := _processes_of_node(n, where))}
        if len(set(each.values())) > 1:
            wrong = [f"{n}: {processes_text(ps)}." for n, ps in each.items()]
            head = (
                f"{where}: functions that share devices run in the same processes; give them one mesh, or devices that "
                "no other one has:"
            )
            raise FlowError(all_offenders(head, wrong))
        if each:
            found[a] = next(iter(each.values()))
    for a, row in enumerate(built.rows):
        said = next((p for n in row if (p := n.work.process) is not None), None)
        if said is not None:
            found[a] = (said,)
    found.setdefault(built.actor[built.round.nodes[0]], (0,))
    for node in reversed(built.round.nodes):  # its readers stand behind it
        a = built.actor[node]
        if a not in found:
            near = [e.taker for e in built.edges if e.giver is node] + [e.giver for e in built.edges if e.taker is node]
            found[a] = next((found[built.actor[n]][:1] for n in near if built.actor[n] in found), (0,))
    return [found[a] for a in range(len(built.rows))]


def _processes_of_node(node: FlowNode, where: str) -> tuple[int, ...]:
    """The processes of the devices of a node; none on the host."""
    meshes = [m for m in node.work.meshes if isinstance(m, Mesh)]
    for mesh in meshes:
        if len(runtimes_of(mesh.devices.flat)) > 1:
            raise MeshError(f"{where}: the mesh of {node} {other_runtimes_text(mesh)}")
    refuse_apart(meshes, f"{where}: {node}")
    found = tuple(processes_of(d for m in meshes for d in m.devices.flat))
    if len(found) > 1 and node.work.actor is not None:
        raise FlowError(
            f"{where}: a shared state of a flow lies in one process, and {node} is in {processes_text(found)}; give it "
            "devices of one, or a function on one mesh."
        )
    return found


def _rows(nodes: Sequence[FlowNode]) -> list[list[FlowNode]]:
    """The nodes of each actor: those whose meshes share devices are together, in the order of calls."""
    rows: list[tuple[set[Any], list[FlowNode]]] = []
    for node in nodes:
        devices = {d for m in node.work.meshes for d in devices_of(m)}
        key = devices if node.work.actor is None else {node.work.actor}
        touched = [row for row in rows if key and row[0] & key]
        merged = {d for known, _ in touched for d in known} | key, [n for _, ns in touched for n in ns] + [node]
        first = next((i for i, row in enumerate(rows) if row in touched), len(rows))
        rows = [row for row in rows if row not in touched]
        rows.insert(first, merged)
    return [sorted(ns, key=lambda n: n.number) for _, ns in rows]
