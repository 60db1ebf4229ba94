"""The points at which a folded body may be cut, and the bytes that cross each point.

    forward  0 1 2 . c . . . | fold        values cross a point if they are made before it and read after it;
    backward 9 8 7 . c'. . . |             cotangents, if they are made after it and read before it

A cut is a point c of the forward and a point c' of the backward. For each c the best c' is the one that the fewest
bytes cross: cotangents, and the residuals, parameters and gradients that are then on the other side.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardc.compat import Var
from shardc.ir.walk import bytes_of
from shardc.pipeline.cut_search.fold_body import FoldedBody
from shardc.pipeline.schedule.partition import Floats

Ints: TypeAlias = NDArray[np.int64]


NEVER: Final = 1 << 40
PLACES: Final = 192
"""Number of pieces of equal work in the forward. Each piece offers the points that the fewest bytes cross."""


@dataclass(frozen=True)
class Points:
    """The points at which a body may be cut; the first point is its start, the last its end.

    Attributes:
      ahead: (n,) the number of forward equations before each point.
      back: (n,) the equation, counted from the start of the forward, at which the backward of these equations begins.
      activation, gradient: (n,) bytes that cross for each microbatch, forwards and backwards.
      once: (n,) bytes of inputs, and their gradients, that are needed on both sides.
    """

    ahead: Ints
    back: Ints
    activation: Floats
    gradient: Floats
    once: Floats


def find_points(body: FoldedBody, seconds: Floats, owners: Mapping[int, Sequence[Var]]) -> Points:
    """The points that are good places for a cut.

    Args:
      body: the body to cut.
      seconds: the time of each of its equations.
      owners: for each sum over microbatches the inputs whose gradient it is, if known.
    """
    return _Crossings(body, owners).points(seconds)


class _Crossings:
    """The bytes that cross each possible cut point. All times are indices into `body.eqns`."""

    def __init__(self, body: FoldedBody, owners: Mapping[int, Sequence[Var]]) -> None:
        self.body, self.fold, self.n = body, body.fold, len(body.eqns)
        made, reads = body.made, body.reads
        ahead = [v for v, t in made.items() if t < self.fold and v in reads and v not in body.cheap]
        self.time = _ints(made[v] for v in ahead)
        self.size = _floats(bytes_of(v) for v in ahead)
        self.last_ahead = _ints(max((t for t in reads[v] if t < self.fold), default=-1) for v in ahead)
        self.first_back = _ints(min((t for t in reads[v] if t >= self.fold), default=NEVER) for v in ahead)
        self.last_back = _ints(max((t for t in reads[v] if t >= self.fold), default=-1) for v in ahead)
        back = [v for v, t in made.items() if t >= self.fold and v in reads]
        times = [(made[v] + 1, reads[v][-1]) for v in back]
        self.cotangents = _live(times, [0.0 if v in body.cheap else bytes_of(v) for v in back], self.n)
        self.marked = _live(times, [1.0] * len(back), self.n)
        self._inputs(owners)

    def _inputs(self, owners: Mapping[int, Sequence[Var]]) -> None:
        body, loop = self.body, self.body.loop
        times = {v: list(body.reads.get(v, ())) for v in loop.operands}
        gradients: dict[Var, float] = {}
        for carry, inputs in owners.items():
            for v in inputs:
                for term in body.terms[carry]:
                    times[v].append(body.made[term])
                    gradients[v] = bytes_of(term)
        used = [v for v, t in times.items() if t]
        self.inputs = used
        self.input_size = _floats(
            bytes_of(v) * (loop.length if v in loop.rows else 1) + gradients.get(v, 0) for v in used
        )
        self.input_ahead = [_ints(t for t in times[v] if t < self.fold) for v in used]
        first_last = [(min(a), max(a)) if len(a) else (NEVER, -1) for a in self.input_ahead]
        self.first_input, self.last_input = _ints(a for a, _ in first_last), _ints(b for _, b in first_last)
        self.first_input_back = _ints(min((t for t in times[v] if t >= self.fold), default=NEVER) for v in used)
        self.last_input_back = _ints(max((t for t in times[v] if t >= self.fold), default=-1) for v in used)

    def points(self, seconds: Floats) -> Points:
        waiting = _live(
            [(t + 1, last) for t, last in zip(self.time, self.last_ahead, strict=True)], self.size, self.fold
        )
        rows: list[tuple[float, ...]] = [(0, self.n, 0, 0, 0)]
        for c in self._places(waiting, seconds):
            rows += self._row(c)
        rows.append((self.fold, self.fold, 0, 0, 0))
        columns = list(zip(*rows, strict=True))
        return Points(_ints(columns[0]), _ints(columns[1]), *map(_floats, columns[2:]))

    def _places(self, waiting: Floats, seconds: Floats) -> list[int]:
        """The points that the fewest bytes cross, for each piece of the forward's work."""
        work = np.cumsum([0.0, *seconds[: self.fold]])
        piece = np.minimum((work / max(work[-1], 1e-300) * PLACES).astype(int), PLACES - 1)
        free = np.ones(self.fold + 1, bool)
        for first, last in self.body.state:  # read and replaced on one stage
            free[first + 1 : last + 1] = False
        found: list[int] = []
        for k in np.unique(piece):
            here = np.flatnonzero(piece == k)
            here = here[(waiting[here] > 0) & (work[here] > 0) & free[here]]
            if len(here):
                best = here[waiting[here] == waiting[here].min()]
                found += sorted({int(best[0]), int(best[-1])})
        return found

    def _row(self, c: int) -> list[tuple[float, ...]]:
        """Point c of the forward with the best point of the backward; empty if no gradient crosses it."""
        span = np.arange(self.fold, self.n + 1)
        front = self.time < c
        forward = front & (self.last_ahead >= c)
        early = front & ~forward
        activation = self.size[forward].sum() + _since(self.first_back[early] + 1, self.size[early], span)
        gradient = self.cotangents[span] + _until(self.last_back[~front], self.size[~front], span)
        needed_front, needed_behind = self.first_input < c, self.last_input >= c
        size = self.input_size
        only_front, only_behind = needed_front & ~needed_behind, needed_behind & ~needed_front
        once = (
            size[needed_front & needed_behind].sum()
            + _since(self.first_input_back[only_front] + 1, size[only_front], span)
            + _until(self.last_input_back[only_behind], size[only_behind], span)
        )
        if self.fold == self.n:
            return [(c, self.n, activation[0], 0.0, once[0])]
        total = activation + gradient + once / self.body.loop.length
        total = np.where(self.marked[span] > 0, total, np.inf)
        i = int(total.argmin())
        return [(c, span[i], activation[i], gradient[i], once[i])] if np.isfinite(total[i]) else []


def _live(spans: Sequence[tuple[int, int]], sizes: Sequence[float] | Floats, n: int) -> Floats:
    """(n + 1,) bytes that are live at each place, given spans with their ends included."""
    change = np.zeros(n + 2)
    for (start, end), size in zip(spans, sizes, strict=True):
        if start <= end:
            change[start] += size
            change[end + 1] -= size
    return np.cumsum(change)[: n + 1]


def _since(starts: Ints, sizes: Floats, span: Ints) -> Floats:
    """For each place of a span, the bytes of the values that start there or before."""
    order = np.argsort(starts, kind="stable")
    total = np.concatenate([[0.0], np.cumsum(sizes[order])])
    return total[np.searchsorted(starts[order], span, side="right")]


def _until(ends: Ints, sizes: Floats, span: Ints) -> Floats:
    """For each place of a span, the bytes of the values that end there or after."""
    return _since(-ends, sizes, -span)


def _ints(values: Iterable[Any]) -> Ints:
    return np.asarray(list(values), np.int64).reshape(-1)


def _floats(values: Iterable[Any]) -> Floats:
    return np.asarray(list(values), np.float64).reshape(-1)
