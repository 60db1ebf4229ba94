"""The contents of delayed channels when a run of a flow begins, and when it has ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from shardc.dataflow.moves import copied
from shardc.dataflow.network import Edge, HandedLeaf
from shardc.dataflow.plan import PlannedFlow
from shardc.dataflow.results import entering, known, late_parts
from shardc.dataflow.round import Fixed, FlowNode
from shardc.dataflow.timing.resources import devices_of
from shardc.errors import FlowError
from shardc.runtime.actor import Message


class Beginning:
    """The values of the rounds before the first one.

    Args:
      plan: the flow.
      here: the nodes that run in this process.
    """

    def __init__(self, plan: PlannedFlow, here: Collection[FlowNode]) -> None:
        self._plan, self._built, self._here = plan, plan.built, here
        self._taken = {f for e in plan.built.edges for m in e.moves if e.takes_over(m) for f in m.first}

    def own(self, state: Sequence[Any]) -> list[Any]:
        """The first state, with copies of arrays that stand in it twice and that a node takes over."""
        return [copied(x) if i in self._taken and any(x is y for y in state[:i]) else x for i, x in enumerate(state)]

    def first(self, state: Sequence[Any], pending: Mapping[str, Sequence[Any]] | None) -> dict[Message, list[Any]]:
        """The contents of delayed channels when a run begins."""
        found: dict[Message, list[Any]] = {}
        count: Counter[int] = Counter()
        messages = self._plan.network.first_messages()
        if pending is not None:
            self._check_pending(messages, pending)
        for message in messages:
            channel, turn = message[0], count[message[0]]
            count[channel] += 1
            if self._built.edges[channel].taker not in self._here:
                continue
            if pending is not None:
                values = pending[self._plan.network.channels[channel].name][turn]
            else:
                edge = self._built.edges[channel]
                values = tuple(self._entered(edge, i, turn, state) for i in range(len(edge.moves)))
            found.setdefault(message, []).append(values)
        return found

    def past(self, state: Sequence[Any], pending: Mapping[str, Sequence[Any]] | None) -> Mapping[str, Sequence[Any]]:
        """The values that the first rounds return late, and those that become state late in them."""
        if pending is not None:
            return pending
        return {
            name: [copied(known(f, state)) if f in self._taken else known(f, state) for f in firsts]
            for name, (_, _, firsts) in late_parts(self._built, self._here).items()
        }

    def _entered(self, edge: Edge, i: int, turn: int, state: Sequence[Any]) -> Any:
        """Leaf i of message `turn` in a delayed channel when a run begins: at its place, and its taker's alone if that
        one overwrites it."""
        move = edge.moves[i]
        first = move.first[(turn + 1) * edge.taker.every - 1]  # by the round in which it is taken
        alone = move.copied or (
            edge.takes_over(move) and (isinstance(first, Fixed) or self._begins_others(edge, move, first))
        )
        place, aval = edge.taker.work.takes[move.argument], edge.giver.results[move.output]
        x = known(first, state)
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

    def _check_pending(self, messages: Sequence[Message], pending: Mapping[str, Sequence[Any]]) -> None:
        names = self._plan.network.channels
        wanted = Counter(names[c].name for c, _ in messages if self._built.edges[c].taker in self._here)
        wanted.update({name: len(firsts) for name, (_, _, firsts) in late_parts(self._built, self._here).items()})
        if wanted != {name: len(values) for name, values in pending.items()}:
            period = self._plan.network.period
            rule = f", or the run that left it was no multiple of {period} rounds" if period > 1 else ""
            raise FlowError(f"{self._plan.round.where}: pending= is not what a run of this flow has left{rule}.")

    def pending(self, left: Mapping[Message, Sequence[Any]], rounds: int) -> dict[str, list[Any]]:
        """The contents of delayed channels after so many rounds, by channel, in the order of their taking."""
        period = self._plan.network.period
        found: dict[int, list[tuple[int, Any]]] = {}
        for (channel, key), values in left.items():
            assert isinstance(key, int)
            later = (key - rounds) % period
            found.setdefault(channel, []).extend((later + k * period, x) for k, x in enumerate(values))
        names = self._plan.network.channels
        return {names[c].name: [x for _, x in sorted(xs, key=_turn)] for c, xs in found.items()}


def _turn(dated: tuple[int, Any]) -> int:
    return dated[0]
