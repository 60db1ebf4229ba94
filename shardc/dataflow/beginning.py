"""The values of earlier rounds: before the first one when a run of a flow begins, and of the last ones when it ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

from shardc.dataflow.moves import copied
from shardc.dataflow.network import Edge, HandedLeaf, devices_of
from shardc.dataflow.pending import LateValue, LateValues
from shardc.dataflow.plan import PlannedFlow
from shardc.dataflow.results import entering, known
from shardc.dataflow.round import Fixed, FlowNode
from shardc.runtime.actor import Message

Made: TypeAlias = Mapping[tuple[LateValue, int], Any]
"""What rounds before the first one made, by value and round, counted back: 1 is the last one before it."""


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
                each = range(len(edge.moves))
                values = tuple(self._entered(channel, i, edge.delay - _round(edge, turn), state, made) for i in each)
                found.setdefault(message, []).append(values)
        return found

    def past(self, state: Sequence[Any], made: Made | None) -> Made:
        """The values that the first rounds return late, and those that become state late in them; None for a round in
        which the node did not run."""
        found: dict[tuple[LateValue, int], Any] = {}
        for value in {*self.late.of_out.values(), *self.late.of_state.values()}:
            for k in range(1, len(value.first) + 1):
                first = value.first[-k]
                if made is None or self.late.is_state(value, k):
                    found[value, k] = copied(known(first, state)) if first in self._taken else known(first, state)
                else:
                    found[value, k] = made.get((value, k))
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
        place, aval = edge.taker.work.takes[move.argument], edge.giver.results[move.output]
        alone = move.copied or (edge.takes_over(move) and others)
        return entering(place, aval)(copied(x) if alone else x)

    def _begins_others(self, edge: Edge, move: HandedLeaf, first: int) -> bool:
        """Whether a leaf of the first state is taken in other rounds too, or by others that may find it in the same
        memory."""
        mine = edge.places(move)[1]
        places = [e.places(m)[1] for e in self._built.edges for m in e.moves if m is not move and first in m.first]
        return move.first.count(first) > 1 or any(
            p.mesh is None or None in (p.placement, mine.placement) or devices_of(p.mesh) & devices_of(mine.mesh)
            for p in places
        )

    def left(self, left: Mapping[Message, Sequence[Any]], rounds: int) -> dict[tuple[LateValue, int], Any]:
        """What the last of so many rounds made and later ones take, from the contents of delayed channels."""
        period = self._plan.network.period
        found: dict[tuple[LateValue, int], Any] = {}
        for (channel, key), messages in left.items():
            assert isinstance(key, int)
            delay = self._built.edges[channel].delay
            for j, values in enumerate(messages):
                k = delay - (key - rounds) % period - j * period
                found |= {(self.late.of_move[channel, i], k): x for i, x in enumerate(values)}
        return found


def _round(edge: Edge, turn: int) -> int:
    """The round in which an edge's taker runs for the `turn`-th time."""
    return (turn + 1) * edge.taker.every - 1
