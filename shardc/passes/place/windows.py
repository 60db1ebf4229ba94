"""The computing beside which each boxing can run, as the clock counts it: a boxing that overlaps costs only its rest.

A boxing of a value for a reader can go on from when the value is made until the first computing node that depends on
the reader, and boxings share the links (`shardc.passes.estimate.overlap`). Of one solution, that says for each boxing
which computing it runs beside, and which is left for another one. Then the search knows which boxings are exposed
(`Domains.edge`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from shardc.passes.estimate.overlap import sent_beside
from shardc.passes.place.problem import Nested, Node, Problem, Reader, Scope, Value

Edge: TypeAlias = tuple[int, int, int]
Windows: TypeAlias = Mapping[Edge, float]
"""By `edge_key`, the seconds of one execution that devices compute between the value and the reader."""


def edge_key(value: Value, reader: Reader) -> Edge:
    return id(value), reader.node.number, reader.port


@dataclass(frozen=True)
class OverlapWindows:
    """The walk that finds the windows of all boxings of a problem.

    Args:
      computing: the seconds of one execution of a heavy operation.
      sending: the seconds of one execution of the boxing of a value for a reader.

    Attributes:
      found: the windows.
    """

    computing: Callable[[Node], float]
    sending: Callable[[Value, Reader], float]
    found: dict[Edge, float] = field(default_factory=dict[Edge, float])

    @classmethod
    def of(
        cls, problem: Problem, computing: Callable[[Node], float], sending: Callable[[Value, Reader], float]
    ) -> Windows:
        walk = cls(computing, sending)
        walk.scope(problem.scope)
        return walk.found

    def scope(self, scope: Scope) -> float:
        """Add the windows of a scope and of those in it. Returns the seconds that one execution computes."""
        made, computed = {id(v): 0 for v in scope.inputs}, list[float]()
        steps: list[tuple[Sequence[Value | None], Sequence[Value], Sequence[Node], int | None]] = []
        for item in scope.nodes:
            operands, results, nodes = _parts(item)
            operands = [v if v is None or id(v) in made else v.maker.operands[0] for v in operands]  # not a partial max
            seconds = self.nested(item) if isinstance(item, Nested) else _heavy_seconds(item, self.computing)
            begin = max((made[id(v)] for v in operands if v is not None), default=0)
            steps.append((operands, results, nodes, len(computed) if seconds > 0 else None))
            if seconds > 0:
                computed.append(seconds)
                begin = len(computed)
            made.update({id(v): begin for v in results})
        needed: dict[int, int] = {}
        ends: dict[int, int] = {}
        for operands, results, nodes, at in reversed(steps):
            end = min((needed.get(id(v), len(computed)) for v in results), default=len(computed)) if at is None else at
            ends.update(dict.fromkeys((n.number for n in nodes), end))
            for v in operands:
                if v is not None:
                    needed[id(v)] = min(needed.get(id(v), len(computed)), end)
        edges: dict[Edge, tuple[int, int, float]] = {}
        for v in itertools.chain(scope.inputs, *(results for _, results, _, _ in steps)):
            for value, reader in _edges(v):
                several = reader.node.kind == "hold"
                end = needed.get(id(v), len(computed)) if several else ends.get(reader.node.number, len(computed))
                edges[edge_key(value, reader)] = made[id(v)], end, self.sending(value, reader)
        self.found.update(zip(edges, free_seconds(list(edges.values()), computed), strict=True))
        return sum(computed)

    def nested(self, item: Nested) -> float:
        bodies = zip(item.scopes, item.bodies, strict=True)
        return sum(body.runs * self.scope(scope) for scope, body in bodies)


def free_seconds(edges: Sequence[tuple[int, int, float]], computed: Sequence[float]) -> list[float]:
    """For each boxing the seconds of its steps that no other boxing uses, when that which is needed first goes first.

    Args:
      edges: of each the first step, the one behind the last, and its seconds.
      computed: the seconds of each step.
    """
    sent, idle = sent_beside(edges, computed)
    before = [0.0, *itertools.accumulate(idle)]
    return [
        sum(mine.values()) + max(0.0, before[end] - before[begin])
        for mine, (begin, end, _) in zip(sent, edges, strict=True)
    ]


def _parts(item: Node | Nested) -> tuple[Sequence[Value | None], Sequence[Value], Sequence[Node]]:
    """The operands and results of an equation in its own scope, and the nodes that read the operands."""
    if isinstance(item, Node):
        return item.operands, item.results, [item]
    return [n.operands[0] for n in item.entries], [n.results[-1] for n in item.exits], item.entries


def _heavy_seconds(n: Node, computing: Callable[[Node], float]) -> float:
    return computing(n) if n.kind == "operation" and not n.is_light else 0.0


def _edges(v: Value) -> Iterator[tuple[Value, Reader]]:
    """The value with each of its readers; those of its hold too."""
    for r in v.readers:
        yield v, r
        if r.node.kind == "hold":
            yield from ((r.node.results[0], held) for held in r.node.results[0].readers)
