"""The plan of a flow: its nodes, what moves between them, and what a round takes. Needs no devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

from shardc.dataflow.network import Edge, FlowNetwork, NodeStep
from shardc.dataflow.round import FlowNode, Round
from shardc.dataflow.work import FunctionWork, seconds_of_call
from shardc.errors import FlowError, all_offenders
from shardc.machine.mesh import AnyMesh, view
from shardc.pipeline.schedule.simulate import Timeline, seconds_of_rounds, simulate
from shardc.pipeline.schedule.turns import PartlyHeld
from shardc.report.tables import bytes_text
from shardc.runtime.actor import Channel
from shardc.runtime.deadlock import find_deadlock

Seconds: TypeAlias = Mapping[str, Any] | Mapping[FlowNode, Any]
"""The seconds of nodes, or of calls and functions by name."""


class UsedInTurns(NamedTuple):
    """Something that several nodes or messages use by turns.

    Attributes:
      name: of it.
      users: the functions of the nodes, or of messages `giver → taker`, one for each.
      seconds: for which it is in use in a round.
    """

    name: str
    users: Sequence[str]
    seconds: float


class PlannedFlow:
    """A flow with its network.

    Attributes:
      round: the traced round.
      built: its network.
    """

    def __init__(self, round: Round, credits: int) -> None:
        """
        Raises:
          FlowError: the round can never end, or its values do not fit in memory.
        """
        self.round = round
        self.built = FlowNetwork(round, credits)
        self.network = self.built.network
        deadlock = find_deadlock(self.network)
        if deadlock is not None:
            raise FlowError(f"{round.where}: {deadlock}")
        full = [
            f"{name}: {bytes_text(need)} on each device, and it has {bytes_text(most)}."
            for name, need, most in self.memory_by_row
            if most is not None and need > most
        ]
        if full:
            fix = "Give fewer credits, delay less, or split what is sent."
            raise FlowError(f"{all_offenders(f'{round.where} does not fit in memory:', full)}\n{fix}")

    @property
    def name(self) -> str:
        return self.round.name

    @property
    def nodes(self) -> list[FlowNode]:
        """The calls of a round, in order; the first one gives the inputs."""
        return self.round.nodes

    @property
    def edges(self) -> list[Edge]:
        """The values that nodes hand to one another."""
        return self.built.edges

    @property
    def has_inputs(self) -> bool:
        """Whether rounds get an item; the node that gives it is the first one."""
        return bool(self.nodes[0].results)

    @property
    def bytes(self) -> int:
        """Bytes that cross between meshes and the host in a round, a node that runs every n rounds counted at 1/n."""
        return sum(e.bytes // e.taker.every for e in self.edges)

    @cached_property
    def memory_by_row(self) -> list[tuple[str, int, int | None]]:
        """For each actor its name, the bytes that a device needs, and those that it may use if that is known.

        What is taken lies in registers; beside them stands the largest need of a node while it runs.
        """
        found: list[tuple[str, int, int | None]] = []
        for name, row in zip(self.network.names, self.built.rows, strict=True):
            held = sum((e.registers or 1) * e.held_bytes for e in self.edges if e.taker in row)
            meshes = [m for n in row for m in n.work.meshes]
            limits = [limit for m in meshes if (limit := _limit(m)) is not None]
            found.append((name, held + max(n.work.peak for n in row), min(limits, default=None)))
        return found

    # -- time

    def cost(self, seconds: Seconds | None = None) -> Callable[[NodeStep], float]:
        """The seconds of a step by its label.

        Args:
          seconds: of nodes, or of calls and functions by name: a number, or a function that gives those of the next
            run; of a host function also a pair, of a call and of these in Python. Others take what their plan says, and
            host functions nothing.
        """
        known: Mapping[Any, Any] = seconds or {}
        names = {n.name for n in self.nodes} | {n.function for n in self.nodes}
        if strange := sorted(k for k in known if isinstance(k, str) and k not in names):
            raise FlowError(
                f"{self.round.where}: seconds= names {', '.join(strange)}; nodes are {', '.join(sorted(names))}."
            )
        each: dict[int, Any] = {}
        for n in self.nodes:
            each[n.number] = next((known[k] for k in (n, n.name, n.function) if k in known), n.work.seconds or 0.0)

        def cost(label: NodeStep) -> float:
            found: Any = each[label.node]
            now: Any = found() if callable(found) else found
            return seconds_of_call(now)

        return cost

    def link(self, channel: Channel) -> tuple[float, float]:
        """Latency, and seconds that a message of a channel keeps its links busy."""
        return self._edge_of[id(channel)].seconds

    @cached_property
    def _edge_of(self) -> dict[int, Edge]:
        return {id(c): e for c, e in zip(self.network.channels, self.edges, strict=True)}

    def simulate(self, rounds: int = 8, *, seconds: Seconds | None = None) -> Timeline:
        """Some rounds under virtual time: makespan, busy and idle actors, registers in use.

        Args:
          rounds: how many.
          seconds: of nodes by name, as a host function has none: a number, or a function that gives those of the next
            run (a sample of a distribution); of a host function also a pair: the seconds of a call, and those of them
            in Python. `run(...)[1].seconds` has those of a run.
        """
        return simulate(self.network, self.cost(seconds), self.link, rounds)

    def seconds_of(self, rounds: int, *, seconds: Seconds | None = None) -> float:
        """Seconds of so many rounds. Where all actors wait for one another, a million take no longer to find than some
        hundreds."""
        return seconds_of_rounds(self.network, self.cost(seconds), self.link, rounds)

    @property
    def unknown(self) -> list[FlowNode]:
        """The nodes whose seconds nobody has said: they count as nothing, so that a round takes at least `seconds`."""
        return [n for n in self.nodes if n.work.seconds is None and n.number]

    @cached_property
    def seconds(self) -> float:
        """Seconds of a round, averaged over many. A lower bound if some nodes are `unknown`."""
        return self.average()

    def average(self, seconds: Seconds | None = None) -> float:
        """Seconds of a round, averaged over many, with these seconds of nodes."""
        many = 1000 * self.network.period
        return self.seconds_of(many, seconds=seconds) / many

    @cached_property
    def turns(self) -> list[UsedInTurns]:
        """The resources that several nodes or messages use by turns, the busiest first."""
        net, period = self.network, self.network.period
        users: list[list[str]] = [[] for _ in net.resources]
        for n in self.nodes:
            row = ((s.label, s.uses) for s in net.actors[self.built.actor[n]])
            for r in next((uses for label, uses in row if isinstance(label, NodeStep) and label.node == n.number), ()):
                users[r].append(n.function)
        for c, e in zip(net.channels, self.edges, strict=True):
            for r in c.uses:
                ends = e.giver.function, e.taker.function
                users[r].append(" \N{RIGHTWARDS ARROW} ".join(ends))
        held = self.simulate(period).held
        found = [
            UsedInTurns(x.name, who, seconds / period / x.units)
            for x, who, seconds in zip(net.resources, users, held, strict=True)
            if len(who) > 1 and seconds
        ]
        return sorted(found, key=lambda turn: -turn.seconds)

    @cached_property
    def seconds_outside_python(self) -> float | None:
        """Seconds of a round if no host function whose `seconds=` is one number is ever in Python; None if there is no
        such function in a thread."""
        free = {
            n: (n.work.seconds, 0.0)
            for n in self.nodes
            if n.work.where == "thread" and n.work.seconds and not isinstance(n.work.seconds, PartlyHeld)
        }
        return self.average(free) if free else None

    def __repr__(self) -> str:
        return (
            f"FlowPlan({self.name}: {len(self.nodes)} nodes, {len(self.built.rows)} actors, {self.bytes} bytes a "
            f"round, {'at least ' * bool(self.unknown)}{self.seconds:.3g} s)"
        )


def functions_of(plan: PlannedFlow) -> Iterator[tuple[str, FunctionWork, int]]:
    """The planned functions of a flow, each with its name and the number of its calls; one that has several plans under
    the names of their first calls."""
    works = {n: n.work for n in plan.nodes if isinstance(n.work, FunctionWork)}
    plans: dict[tuple[str, str], list[FlowNode]] = {}
    for node, work in works.items():
        plans.setdefault((node.function, work.plan.digest), []).append(node)
    alone = Counter(function for function, _ in plans)
    for (function, _), nodes in plans.items():
        yield function if alone[function] == 1 else nodes[0].name, works[nodes[0]], len(nodes)


def _limit(mesh: AnyMesh) -> int | None:
    return view(mesh).limit
