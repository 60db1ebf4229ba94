"""Who does not come: of the processes of a run that are alive, those that others have waited for too long.

    process 0 --waits for--> process 1 --waits for--> process 2, which waits for nobody: it is late

What waits is the script of a process or an actor of a network. A process says its waits with each sign of life, and how
many calls it has made: one that has made fewer calls than another one of their group is awaited by that one, which may
not know it, as it waits in a collective of JAX.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from shardc.runtime.calls import members_of, members_text, processes_text
from shardc.runtime.status.waits import SCRIPT, Wait
from shardc.runtime.transport.connection import BEAT

_GROUP: Final = -1
"""Stands in a node for the process: those members of a group that have made the fewest calls."""
Node: TypeAlias = tuple[int, str]
"""A process, and what waits in it or is awaited: an actor, or the script."""


@dataclass(frozen=True)
class _WaitEdge:
    """A wait of one node for another one, and since when it lasts; without a time it says nothing of its own."""

    to: Node
    why: str = ""
    since: float | None = None


@dataclass(frozen=True)
class LateProcesses:
    """Processes that others have waited for too long.

    Attributes:
      processes: those that are late; none if all wait for one another.
      why: `process 0 waits for it at step, call 4`.
    """

    processes: tuple[int, ...]
    why: str


class Lateness:
    """Looks for late processes, about once a second.

    Args:
      deadline: seconds to wait for a process.
    """

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._epoch = -1
        self._since: dict[Any, tuple[Any, float]] = {}
        """For each wait its seconds by the last sign of life, for each process with too few calls their number; and
        since when it lasts."""

    def begin(self) -> None:
        """Let all waits begin now."""
        self._since.clear()

    def look(
        self, now: float, epoch: int, statuses: Mapping[int, str], ended: Collection[int], paused: bool = False
    ) -> LateProcesses | None:
        """Find who is late.

        Args:
          now: seconds of a clock.
          epoch: of the run. What processes say of an earlier one does not count.
          statuses: the newest sign of life of each process.
          ended: processes whose scripts have ended. Others know that these make no further calls.
          paused: whether the caller itself was paused since the last look: that time does not count.
        """
        if paused or epoch != self._epoch:
            self._epoch = epoch
            self.begin()
        facts = {p: _facts_of(text) for p, text in statuses.items()}
        said = {p: each["run"] for p, each in facts.items() if "run" in each and each["epoch"] == epoch}
        before, self._since = self._since, {}
        edges = self._edges(now, said, ended, before)
        return self._judge(now, edges, said)

    def _edges(
        self, now: float, said: Mapping[int, Any], ended: Collection[int], before: Mapping[Any, tuple[Any, float]]
    ) -> dict[Node, list[_WaitEdge]]:
        found: dict[Node, list[_WaitEdge]] = {}
        for p, run in said.items():
            for wait in map(Wait.from_json, run["waits"]):
                key = p, wait.who, wait.awaited, wait.why
                seconds, at = before.get(key, (math.inf, 0.0))
                if wait.seconds < seconds:  # it was not there, or another one like it
                    at = now - min(wait.seconds, 3 * BEAT)
                self._since[key] = wait.seconds, at
                found.setdefault((p, wait.who), []).extend(_WaitEdge(to, wait.why, at) for to in wait.awaited)
        self._add_calls(now, said, ended, before, found)
        scripts = {p for p, who in found if who == SCRIPT}
        running = {(p, who.partition("/")[0]) for p, who in found if "/" in who}
        for p, who in list(found):
            if "/" in who:  # the script waits for its actors
                found.setdefault((p, SCRIPT), []).append(_WaitEdge((p, who)))
        for p, who in {e.to for es in found.values() for e in es} - found.keys():
            begun = (p, who.partition("/")[0]) in running
            if who != SCRIPT and (p, SCRIPT) in found and (p in scripts or not begun):
                found[p, who] = [_WaitEdge((p, SCRIPT))]  # its network has not begun there, or waits in a collective
        return found

    def _add_calls(
        self,
        now: float,
        said: Mapping[int, Any],
        ended: Collection[int],
        before: Mapping[Any, tuple[Any, float]],
        found: dict[Node, list[_WaitEdge]],
    ) -> None:
        """Add the waits for processes that have made fewer calls than others of their group."""
        groups: dict[str, str] = {name: call[0] for run in said.values() for name, call in run["calls"].items()}
        for name, text in groups.items():
            members = [p for p in members_of(text) if p not in ended]
            if not members:
                continue
            calls = {p: said.get(p, {}).get("calls", {}).get(name, (text, -1, "")) for p in members}
            least = min(number for _, number, _ in calls.values())
            ahead = {p: why for p, (_, number, why) in calls.items() if number > least}
            if not ahead:
                continue
            why = min(ahead.items(), key=lambda pair: calls[pair[0]][1])[1]
            behind = [p for p in members if p not in ahead]
            for p in behind:
                number, at = before.get((name, p), (None, now))
                self._since[name, p] = least, at if number == least else now
            found[_GROUP, name] = [_WaitEdge((p, SCRIPT), why, self._since[name, p][1]) for p in behind]
            for p in ahead:
                found.setdefault((p, SCRIPT), []).append(_WaitEdge((_GROUP, name)))

    def _judge(
        self, now: float, edges: Mapping[Node, Sequence[_WaitEdge]], said: Mapping[int, Any]
    ) -> LateProcesses | None:
        def is_old(edge: _WaitEdge) -> bool:
            return edge.since is None or now - edge.since >= self._deadline

        begun = [
            (node, e) for node, es in edges.items() for e in es
            if e.since is not None and is_old(e) and e.to[0] != node[0]
        ]  # fmt: skip
        reached: dict[Node, tuple[Node, _WaitEdge]] = {}
        """The nodes that are awaited for too long, each with the wait by which it was found first."""
        left = begun
        while left:
            node, edge = left.pop()
            if edge.to in reached:
                continue
            reached[edge.to] = node, edge
            left += [(edge.to, e) for e in edges.get(edge.to, ()) if is_old(e)]
        ends = [node for node in reached if not edges.get(node)]
        if ends:
            processes = tuple(sorted({p for p, _ in ends}))
            return LateProcesses(processes, _why(edges, reached, ends))
        if reached and all(is_old(e) for node in reached for e in edges[node]):
            circle = sorted({p for p, _ in reached if p != _GROUP})
            waits = [Wait.from_json(w) for p in circle if p in said for w in said[p]["waits"]]
            return LateProcesses(
                (), f"{processes_text(circle)} wait for one another: {'; '.join(sorted({w.why for w in waits}))}"
            )
        return None


def _why(
    edges: Mapping[Node, Sequence[_WaitEdge]], reached: Mapping[Node, tuple[Node, _WaitEdge]], ends: Collection[Node]
) -> str:
    """Who waits for what is late, and for what."""
    purposes: dict[str, set[int]] = {}
    for end in ends:
        node, edge = reached[end]
        while not edge.why or node[0] == end[0]:  # not its own actors: those of other processes
            node, edge = reached[node]
        group = {p for (p, _), es in edges.items() for e in es if e.to == node}
        purposes.setdefault(edge.why, set()).update(group if node[0] == _GROUP else {node[0]})
    it = "it" if len({p for p, _ in ends}) == 1 else "them"
    return "; ".join(
        f"{processes_text(sorted(ps))} {'wait' if len(ps) > 1 else 'waits'} for {it} {_in_a_sentence(why)}"
        for why, ps in sorted(purposes.items())
    )


def _in_a_sentence(why: str) -> str:
    """A purpose behind `waits for it`: that of an actor stands in brackets."""
    return why if why.startswith(("at ", "to ", "for ")) else f"({why})"


def last_calls(statuses: Mapping[int, str], processes: Sequence[int]) -> list[str]:
    """Lines that say where processes are: their newest call, and for whom they wait."""
    lines: dict[str, list[int]] = {}
    for p in processes:
        facts = _facts_of(statuses.get(p, ""))
        calls = list(facts.get("run", {}).get("calls", {}).values())
        parts = [f"its last call: {calls[-1][2].removeprefix('at ')}" if calls else "no call yet"]
        parts += [f"waits for {facts['waits']}"] if facts.get("waits") else []
        lines.setdefault("; ".join(parts), []).append(p)
    return [f"process{'es' * (len(ps) > 1)} {members_text(ps)}: {text}" for text, ps in lines.items()]


def _facts_of(text: str) -> dict[str, Any]:
    with suppress(ValueError):  # an error in place of facts: the status line has it
        return json.loads(text)
    return {}
