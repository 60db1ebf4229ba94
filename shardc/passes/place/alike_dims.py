"""Dimensions that behave alike: more of them than mesh axes offer nothing new.

A dimension of a value is tied to dimensions of other values by the signatures that split them together. Two such sets
are alike if they run through the same ports of the same nodes with the same sizes, and nothing pins them: whatever is
split along one could as well be split along the other, at the same cost. A placement splits at most one dimension for
each mesh axis, so as many sets of a kind are kept as there are axes. The others would only add placements: there are
about as many as the number of dimensions to the power of the number of axes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from shardc.passes.place.problem import Node, Problem, Value
from shardc.sbp.boxing import MANY
from shardc.sbp.placement import S
from shardc.sbp.signature import Signature

_Dim: TypeAlias = tuple[int, int]
"""The id of a value, and one of its dimensions."""


def drop_alike_dims(problem: Problem, axes: int) -> Problem:
    """The problem without the signatures that split superfluous dimensions, whose values have them in `unsplit`."""
    values = [v for n in problem.nodes for v in n.results]
    if max(((v.rank + 2) ** axes for v in values), default=0) > MANY:
        _drop(problem.nodes, values, _Sets.of(problem.nodes), axes)
    return problem


def _drop(nodes: Sequence[Node], values: Iterable[Value], sets: _Sets, axes: int) -> None:
    alike: dict[tuple[object, ...], list[_Dim]] = defaultdict(list)
    for dim, uses in sets.uses.items():
        if dim not in sets.kept:
            alike[tuple(sorted(uses))].append(dim)
    gone = {dim for same in alike.values() for dim in same[axes:]}
    if not gone:
        return
    for v in values:
        v.unsplit = frozenset(d for d in range(v.rank) if sets.first((id(v), d)) in gone)
    known: dict[tuple[int, tuple[int, ...]], tuple[Signature, ...]] = {}
    for n in nodes:
        if n.fixed is None:
            stay = tuple(k for k, s in enumerate(n.options) if not any(sets.first(d) in gone for d in _dims(n, s)))
            options = known.setdefault((id(n.options), stay), tuple(n.options[k] for k in stay))
            n.options = n.options if len(stay) == len(n.options) else options


@dataclass
class _Sets:
    """Sets of dimensions that are split together, each by its first one.

    Attributes:
      leader: for each dimension one of its set, which leads to the first.
      uses: for each set, each of its signatures (`_use`).
      kept: the sets that something pins, or whose pieces do not cost the same.
    """

    leader: dict[_Dim, _Dim] = field(default_factory=dict[_Dim, _Dim])
    uses: dict[_Dim, list[tuple[object, ...]]] = field(default_factory=dict[_Dim, "list[tuple[object, ...]]"])
    kept: set[_Dim] = field(default_factory=set[_Dim])

    @classmethod
    def of(cls, nodes: Sequence[Node]) -> _Sets:
        found = cls()
        for n in nodes:
            for s in n.options:
                dims = _dims(n, s)
                for dim in dims[1:]:
                    found.leader[found.first(dim)] = found.first(dims[0])
        for n in nodes:
            seen = set[_Dim]()
            for s in n.options:
                dims = _dims(n, s)
                if not dims:
                    continue
                mine = found.first(dims[0])
                found.uses.setdefault(mine, []).append(_use(n, s))
                if mine in seen or _is_special(n, s):
                    found.kept.add(mine)
                seen.add(mine)
        return found

    def first(self, dim: _Dim) -> _Dim:
        while (further := self.leader.get(dim, dim)) != dim:
            dim = self.leader[dim] = self.leader.get(further, further)
        return dim


def _ports(n: Node) -> list[Value | None]:
    return [*n.operands, *n.results]


def _dims(n: Node, s: Signature) -> list[_Dim]:
    """The dimensions that a signature splits."""
    sbps = zip(_ports(n), (*s.operands, *s.results), strict=True)
    return [(id(v), sbp.dim) for v, sbp in sbps if v is not None and isinstance(sbp, S)]


def _use(n: Node, s: Signature) -> tuple[object, ...]:
    """A key that is the same for two signatures of a node that differ in the dimensions alone."""
    sbps = zip(_ports(n), (*s.operands, *s.results), strict=True)
    return n.number, *(
        f"S{0 if v is None else v.shape[sbp.dim]}" if isinstance(sbp, S) else str(sbp) for v, sbp in sbps
    )  # fmt: skip


def _is_special(n: Node, s: Signature) -> bool:
    """Whether a signature is pinned, or costs something that depends on more than the sizes."""
    if n.fixed is not None:
        return True
    if n.pin is not None:
        return any(sbp.dim in n.pin.placement.splits for sbp in s.results or s.operands if isinstance(sbp, S))
    return n.rule is not None and bool(s.split in n.rule.crossing or n.rule.granule.get(s.split or ""))
