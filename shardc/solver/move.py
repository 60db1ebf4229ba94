"""Better assignments by changes of many variables at a time, each a small problem of its own. They prove nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardc.solver.assignment_cost import Costs
from shardc.solver.cost_tables import Given, Index, Memo, Pair, Table
from shardc.solver.kernels import Kernels
from shardc.solver.search import MOVE_WORK, SETTLED
from shardc.solver.solve import minimize

Among: TypeAlias = Callable[[Sequence[Index]], tuple[Sequence[Table], Mapping[Pair, Given]]]
"""Costs and tables, as those of `minimize`, of some values of each variable, given by number; between variables of one
value each there need be no table."""


def move(
    among: Among,
    start: Sequence[int],
    labels: Sequence[NDArray[np.int64]],
    sweeps: int,
    memo: Memo | None = None,
    together: Sequence[Sequence[int]] | None = None,
    kernels: Kernels | None = None,
) -> list[int]:
    """An assignment that costs no more than the start, whose values come from it by changes in one column of the labels
    after the other.

    Args:
      among: the problem.
      start: an assignment that is allowed.
      labels, memo, together, kernels: as those of `minimize`.
      sweeps: over all columns, at most.
    """
    memo, begin = memo or Memo(), np.asarray(start, np.intp)
    values, columns, settled = begin.copy(), labels[0].shape[1], 0
    for v, *rest in together or ():
        values[rest] = values[v]
    for column in islice(cycle(range(columns)), sweeps * columns):
        offered = [
            memo.do(("like", id(of), column, v), of, lambda of=of, c=column, v=v: _like(of, c, v))
            for of, v in zip(labels, values.tolist(), strict=True)
        ]
        values, before, after = _best_among(among, offered, values, memo, together, kernels)
        settled = settled + 1 if after >= before * (1 - SETTLED) else 1
        if settled == columns:
            break
    if together is not None:  # it may be that those of the start were not
        values, *_ = _best_among(among, choices_of([begin, values]), begin, memo, None, kernels)
    return values.tolist()


def choices_of(assignments: Sequence[Sequence[int] | Index]) -> list[Index]:
    """For each variable the values that some assignments have."""
    found = np.asarray(assignments, np.intp)
    same = (found == found[0]).all(0).tolist()
    return [c[:1] if one else np.unique(c) for one, c in zip(same, np.ascontiguousarray(found.T), strict=True)]


def _like(labels: NDArray[np.int64], column: int, value: int) -> Index:
    """What differs from a value in one column of its labels at most."""
    same = labels == labels[value]
    same[:, column] = True
    return np.flatnonzero(same.all(1))


def _best_among(
    among: Among, offered: Sequence[Index], start: Index, memo: Memo, together: Sequence[Sequence[int]] | None,
    kernels: Kernels | None,
) -> tuple[Index, float, float]:  # fmt: skip
    """The best found of some values, none worse than the start; and what both cost, up to a constant."""
    unary, pairwise = among(offered)
    begin = [int(np.searchsorted(some, v)) for some, v in zip(offered, start, strict=True)]
    before = Costs(unary, pairwise).cost(begin)
    found = minimize(unary, pairwise, begin, memo, MOVE_WORK, SETTLED, together=together, kernels=kernels)
    if not found.cost < before:
        return start, before, before
    return np.asarray([some[v] for some, v in zip(offered, found.values, strict=True)], np.intp), before, found.cost
