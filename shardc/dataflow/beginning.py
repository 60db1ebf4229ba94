"""The values of earlier rounds: before the first one when a run of a flow begins, and of the last ones when it ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax

from shardc.arrays.place import Place
from shardc.arrays.remote_array import RemoteArray
from shardc.dataflow.moves import EnteredValues, LeafMove, copied, entered
from shardc.dataflow.network import Edge, FlowNetwork, HandedLeaf
from shardc.dataflow.plan import PlannedFlow
from shardc.dataflow.round import Fixed, FlowNode
from shardc.dataflow.timing.resources import devices_of
from shardc.dataflow.work import is_like
from shardc.errors import FlowError, all_offenders, number_text
from shardc.machine.devices import is_here
from shardc.runtime.actor import Message

Holder: TypeAlias = tuple[FlowNode, Place]
"""A node that has a value, and where it lies."""


@dataclass(frozen=True, eq=False)
class SpreadValue:
    """An array with pieces in several processes, which nodes on other meshes take too when a run begins.

    Attributes:
      array, mesh: the array, and where it lies.
      value: its logical value.
    """

    array: Any
    mesh: Any
    value: Any


def array_of(x: Any) -> Any:
    """The array of a value with which a run begins."""
    return x.array if isinstance(x, SpreadValue) else x


def value_of(x: Any) -> Any:
    """The value with which a run begins, as a round returns it: each process can read it."""
    return x.value if isinstance(x, SpreadValue) else x


@dataclass(eq=False)
class LateValue:
    """A result of a node, of which later rounds take what earlier ones made.

    Attributes:
      node, index: the node and its result leaf.
      first: what stands for it before the first round: `first[-k]` for what the k-th round before it would have made.
      back: the rounds of which values are taken after a run, counted back from its end: 1 is the last one. With the
        nodes that have them then, each with the place of the value; none where a round returns it, so that all have it.
    """

    node: FlowNode
    index: int
    first: Sequence[int | Fixed]
    back: dict[int, list[Holder]] = field(default_factory=dict[int, "list[Holder]"])

    @property
    def aval(self) -> Any:
        return self.node.results[self.index]

    def home(self, k: int) -> FlowNode | None:
        """The node that hands on what the k-th last round made, of all that have it; None if all processes have it, or
        nobody does."""
        return self.back[k][0][0] if self.back.get(k) else None


class LateValues:
    """The late values of a flow.

    Args:
      built: its network.

    Attributes:
      of_move: by edge and leaf of it, for those that are late.
      of_out, of_state: by number, for results that are returned late, and for leaves that become state late.
    """

    def __init__(self, built: FlowNetwork) -> None:
        self._built, self._values = built, list[LateValue]()
        self.of_move: dict[tuple[int, int], LateValue] = {}
        self.of_out: dict[int, LateValue] = {}
        self.of_state: dict[int, LateValue] = {}
        for number, e in enumerate(built.edges):
            taken = [t for t in range(e.delay) if (t + 1) % e.taker.every == 0]
            for i, m in enumerate(e.moves if e.delay else ()):
                holder = e.taker, e.places(m)[1]
                self.of_move[number, i] = self._value(
                    e.giver, m.output, m.first, {e.delay - t: [holder] for t in taken}
                )
        for i, o in enumerate(built.state):
            if o.node is not None and o.delay > 1:
                holder = o.node, o.node.work.gives[o.index]
                self.of_state[i] = self._value(o.node, o.index, o.first, {k: [holder] for k in range(1, o.delay)})
        for i, o in enumerate(built.outs):
            if o is not None and o.node is not None and o.delay:
                made = [k for k in range(1, o.delay + 1) if (k - 1) % o.node.every == 0]
                value = self.of_out[i] = self._value(o.node, o.index, o.first, {})
                value.back |= {k: [] for k in made}
        for value in self._values:
            value.back = {k: held for k, held in value.back.items() if not self.is_state(value, k)}

    def _value(
        self, node: FlowNode, index: int, first: Sequence[int | Fixed], back: Mapping[int, list[Holder]]
    ) -> LateValue:
        """The value of a node's result whose rounds before the first are those of `first`, counted from its end."""
        for value in self._values:
            known, new = sorted((value.first, first), key=len)
            if (value.node, value.index) == (node, index) and _same(known, new[-len(known) :]):
                value.first = new
                break
        else:
            value = LateValue(node, index, first)
            self._values.append(value)
        for k, holders in back.items():
            known = value.back.setdefault(k, [])
            given = bool(known) and all(n is node is known[0][0] for n, _ in holders)  # a node's own: where it gives it
            value.back[k] = [*holders, *known] if given else [*known, *holders]
        return value

    def is_state(self, value: LateValue, k: int) -> bool:
        """Whether what the k-th last round made is a leaf of the state after a run."""
        first = value.first[-k]
        if isinstance(first, Fixed):
            return False
        o = self._built.state[first]
        return (o.node, o.index, o.delay) == (value.node, value.index, k)

    def __iter__(self) -> Iterator[tuple[str, LateValue]]:
        """The values of which a run leaves something, each with a name of its own."""
        names = set[str]()
        for value in self._values:
            name = f"{value.node}/{value.index}" if len(value.node.results) > 1 else str(value.node)
            count = 1 + sum(known.partition(" (")[0] == name for known in names)
            name += f" ({count})" if count > 1 else ""
            if value.back:
                names.add(name)
                yield name, value

    # -- what a run leaves, and the next one is given

    def shapes(self) -> dict[str, list[jax.ShapeDtypeStruct]]:
        """The shapes and shardings of the late values that a run leaves."""
        found: dict[str, list[jax.ShapeDtypeStruct]] = {}
        for name, value in self:
            sharding = value.node.work.gives[value.index].plain_sharding
            if sharding is not None and not is_here(sharding.device_set):
                sharding = None  # each process that takes the value has it whole
            described = jax.ShapeDtypeStruct(value.aval.shape, value.aval.dtype, sharding=sharding)
            found[name] = [described] * len(value.back)
        return found

    def entries(self) -> list[tuple[LateValue, int]]:
        """The late values that a run leaves, in one order in all processes."""
        return [(value, k) for _, value in self for k in sorted(value.back, reverse=True)]

    def named(self, made: Mapping[tuple[LateValue, int], Any]) -> dict[str, list[Any]]:
        """The late values that a run leaves, by name, the oldest first."""
        return {
            name: [made[value, k] for k in sorted(value.back, reverse=True) if (value, k) in made]
            for name, value in self
        }

    def of(self, pending: Any) -> dict[tuple[LateValue, int], Any] | None:
        """The values by the rounds that made them, counted back from the end of the run that left them; None if nothing
        is given, or only shapes are, as `shapes` gives them.

        Raises:
          FlowError: they are not what a run leaves.
        """
        if pending is None:
            return None
        where = f"{self._built.round.where}: pending="
        if not isinstance(pending, Mapping):
            raise FlowError(
                f"{where} is of type {type(pending).__name__}; give `.pending` of what a run of this flow gave."
            )
        wanted = dict(self)
        strange = [str(name) for name in pending if name not in wanted]
        wrong = [f"{name} is no late value of this flow." for name in strange]
        found: dict[tuple[LateValue, int], Any] = {}
        for name, value in wanted.items():
            given = pending.get(name)
            if not isinstance(given, list | tuple):
                wrong.append(
                    f"{name} is missing."
                    if given is None
                    else f"{name} is of type {type(given).__name__}, and no list."
                )
                continue
            if len(given) != len(value.back):
                wrong.append(f"{name} has {number_text(len(given), 'value')} of {len(value.back)}.")
                continue
            want = f"{value.aval.dtype.name}{list(value.aval.shape)}"
            for k, x in zip(sorted(value.back, reverse=True), given, strict=True):
                if not (hasattr(x, "shape") and hasattr(x, "dtype") and is_like(x, value.aval)):
                    is_array = hasattr(x, "shape") and hasattr(x, "dtype")
                    kind = f"{x.dtype.name}{list(x.shape)}" if is_array else f"something of type {type(x).__name__}"
                    wrong.append(f"{name} has {kind} for {want}.")
                found[value, k] = x
        if wrong:
            raise FlowError(
                all_offenders(f"{where} is not what a run of this flow has left:", wrong) + self._why(strange)
            )
        described = [isinstance(x, jax.ShapeDtypeStruct) for x in found.values()]
        if any(described) and not all(described):
            raise FlowError(f"{where} has arrays and shapes; give one or the other.")
        return None if any(described) else found

    def _why(self, strange: Sequence[str]) -> str:
        """A likely cause."""
        lines: list[str] = []
        if any(" -> " in name or name.startswith(("state ", "returned ")) for name in strange):
            lines.append("It was left by an older shardc, by channels; begin without it.")
        if self._built.period > 1:
            lines.append(f"The run that leaves it has to be of a multiple of {self._built.period} rounds.")
        return "".join(f"\n{line}" for line in lines)


def _same(one: Sequence[int | Fixed], other: Sequence[int | Fixed]) -> bool:
    return len(one) == len(other) and all(
        a.array is b.array if isinstance(a, Fixed) and isinstance(b, Fixed) else a == b
        for a, b in zip(one, other, strict=True)
    )


Made: TypeAlias = Mapping[tuple[LateValue, int], Any]
"""Values of rounds before the first one, by value and round, counted back: 1 is the last one before it."""


class Beginning:
    """The values of the rounds before the first one.

    Args:
      plan: the flow.
      here: the nodes that run in this process.
    """

    def __init__(self, plan: PlannedFlow, here: Collection[FlowNode]) -> None:
        self._plan, self._built, self._here = plan, plan.built, here
        self.late = LateValues(plan.built)
        self._taken = {f for e in plan.built.edges for m in e.moves if e.takes_over(m) for f in m.first}

    def own(self, state: Sequence[Any]) -> list[Any]:
        """The first state, with copies of arrays that stand in it twice and that a node takes over."""
        return [copied(x) if i in self._taken and any(x is y for y in state[:i]) else x for i, x in enumerate(state)]

    def first(self, state: Sequence[Any], made: Made | None) -> dict[Message, list[Any]]:
        """The contents of delayed channels when a run begins.

        Args:
          state: its leaves.
          made: by rounds before, as the run before left it; None: they made what the state is.
        """
        found: dict[Message, list[Any]] = {}
        count: Counter[int] = Counter()
        for message in self._plan.network.first_messages():
            channel, turn = message[0], count[message[0]]
            count[channel] += 1
            edge = self._built.edges[channel]
            if edge.taker in self._here:
                each, back = range(len(edge.moves)), edge.delay - _round(edge, turn)
                values = EnteredValues(self._entered(channel, i, back, state, made) for i in each)
                found.setdefault(message, []).append(values)
        return found

    def past(self, state: Sequence[Any], made: Made | None) -> Made:
        """The values that the first rounds return late, and those that become state late in them; None for a round in
        which the node did not run."""
        found: dict[tuple[LateValue, int], Any] = {}
        returned = set(self.late.of_out.values())
        for value in {*returned, *self.late.of_state.values()}:
            own = value_of if value in returned else array_of
            for k in range(1, len(value.first) + 1):
                first = value.first[-k]
                if made is None or self.late.is_state(value, k):
                    x = own(known(first, state))
                    found[value, k] = copied(x) if first in self._taken else x
                else:
                    found[value, k] = own(made.get((value, k)))
        return found

    def _entered(self, channel: int, i: int, k: int, state: Sequence[Any], made: Made | None) -> Any:
        """Leaf i of a message that the k-th round before the first one made, when a run begins: at its place, and its
        taker's alone if that one overwrites it."""
        edge = self._built.edges[channel]
        move, value = edge.moves[i], self.late.of_move[channel, i]
        first = move.first[-k]
        if made is None or self.late.is_state(value, k):
            x, others = known(first, state), isinstance(first, Fixed) or self._begins_others(edge, move, first)
        else:
            x, others = made[value, k], True
        alone = move.copied or (edge.takes_over(move) and others)
        return begun(edge.places(move)[1], x, alone)

    def _begins_others(self, edge: Edge, move: HandedLeaf, first: int) -> bool:
        """Whether a leaf of the first state is taken in other rounds too, or by others that may find it in the same
        memory."""
        mine = edge.places(move)[1]
        places = [e.places(m)[1] for e in self._built.edges for m in e.moves if m is not move and first in m.first]
        return move.first.count(first) > 1 or any(
            p.mesh is None or None in (p.placement, mine.placement) or devices_of(p.mesh) & devices_of(mine.mesh)
            for p in places
        )

    def left(
        self, left: Mapping[Message, Sequence[Any]], rounds: int, take: Sequence[LeafMove]
    ) -> dict[tuple[LateValue, int], Any]:
        """Values of the last of so many rounds that later ones take, from the contents of delayed channels.

        Args:
          left: the messages.
          rounds: how many there were.
          take: by channel, what makes of a message the leaves that are taken.
        """
        period = self._plan.network.period
        found: dict[tuple[LateValue, int], Any] = {}
        for (channel, key), messages in sorted(left.items()):  # all processes of a taker in one order
            assert isinstance(key, int)
            delay = self._built.edges[channel].delay
            for j, values in enumerate(messages):
                k = delay - (key - rounds) % period - j * period
                for i, x in enumerate(take[channel](values)):
                    value, edge = self.late.of_move[channel, i], self._built.edges[channel]
                    if value.back.get(k) and value.back[k][0] == (edge.taker, edge.places(edge.moves[i])[1]):
                        found[value, k] = x
        return found


def _round(edge: Edge, turn: int) -> int:
    """The round in which an edge's taker runs for the `turn`-th time."""
    return (turn + 1) * edge.taker.every - 1


def known(first: int | Fixed, state: Sequence[Any]) -> Any:
    return first.array if isinstance(first, Fixed) else state[first]


def begun(place: Place, x: Any, alone: bool = False) -> Any:
    """A value with which a run begins, in place: a copy if the taker wants it alone."""
    if isinstance(x, SpreadValue):
        x = x.array if x.mesh == place.mesh else x.value
    elif isinstance(x, RemoteArray) and x.arriving is not None:
        x = x.arriving.wait()
    return entered(place, copied(x) if alone else x)
