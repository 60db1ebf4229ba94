"""Minimum of a sum of cost tables over discrete variables, by variable elimination. Pure arrays: knows no placements.

Eliminating a variable minimises it out of the tables it stands in, leaving one table over its neighbours (Bertele and
Brioschi 1972, "Nonserial Dynamic Programming"). The work is exponential in the width of the graph only; a training
step's graph is almost a tree. Where a table would grow over the limit a variable is fixed instead, at the value it had
in the starting assignment, and the result is no longer proved optimal.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]
TABLE_LIMIT = 1 << 20
"""Entries of the largest table that elimination may make."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """The value chosen for each variable, its cost, and whether it is proved to be the minimum."""

    values: list[int]
    cost: float
    exact: bool


def minimize(
    unary: Sequence[Table], pairwise: Mapping[tuple[int, int], Table], start: Sequence[int] | None = None
) -> Assignment:
    """Minimises sum_i unary[i][x_i] + sum_(i,j) pairwise[i,j][x_i, x_j].

    Args:
      unary: for each variable the cost of each of its values; inf forbids one.
      pairwise: tables of pairs i < j.
      start: values at which variables are fixed where exact elimination is too large; by default the cheapest alone.
    """
    count = len(unary)
    factors: list[dict[tuple[int, ...], Table]] = [{} for _ in range(count)]
    neighbours: list[set[int]] = [set() for _ in range(count)]
    for (i, j), table in pairwise.items():
        factors[i][i, j] = factors[j][i, j] = table
        neighbours[i].add(j)
        neighbours[j].add(i)
    own = [np.asarray(u, np.float64).copy() for u in unary]
    alive = [True] * count
    queue = [(len(n), i) for i, n in enumerate(neighbours)]
    heapq.heapify(queue)
    back: list[tuple[int, tuple[int, ...], NDArray[np.intp] | int]] = []
    constant, exact = 0.0, True
    while queue:
        degree, v = heapq.heappop(queue)
        if not alive[v] or degree != len(neighbours[v]):
            continue
        around = tuple(sorted(neighbours[v]))
        if _entries(own, (v, *around)) > TABLE_LIMIT:
            exact = False
            v = max((i for i in (v, *around)), key=lambda i: (len(neighbours[i]) * own[i].size, -i))
            value = int(start[v]) if start is not None else int(np.argmin(own[v]))
            constant += _fix(v, value, own, factors, neighbours)
            back.append((v, (), value))
        else:
            back.append(_eliminate(v, around, own, factors, neighbours))
            if not around:
                constant += float(own[v].min())
        alive[v] = False
        for i in list(neighbours[v]):
            neighbours[i].discard(v)
            heapq.heappush(queue, (len(neighbours[i]), i))
    values = [0] * count
    for v, around, choice in reversed(back):
        values[v] = choice if isinstance(choice, int) else int(choice[tuple(values[i] for i in around)])
    return Assignment(values, constant, exact)


def _entries(own: list[Table], variables: Sequence[int]) -> int:
    entries = 1
    for i in variables:
        entries *= own[i].size
    return entries


def _eliminate(
    v: int, around: tuple[int, ...], own: list[Table], factors: list[dict[tuple[int, ...], Table]],
    neighbours: list[set[int]],
) -> tuple[int, tuple[int, ...], NDArray[np.intp]]:  # fmt: skip
    """Minimises `v` out: its tables --> one table over `around`. Returns what choice of `v` that takes."""
    scope = (*around, v)
    position = {i: p for p, i in enumerate(scope)}
    total = own[v].reshape((1,) * len(around) + (-1,))
    for names, table in factors[v].items():
        order = sorted(range(len(names)), key=lambda k: position[names[k]])
        shape = [1] * len(scope)
        for k in order:
            shape[position[names[k]]] = table.shape[k]
        total = total + table.transpose(order).reshape(shape)
    choice = total.argmin(-1)
    for names in list(factors[v]):
        for i in names:
            factors[i].pop(names, None)
    if len(around) == 1:
        own[around[0]] = own[around[0]] + total.min(-1)
    elif around:
        rest = total.min(-1)
        if around in factors[around[0]]:
            rest = rest + factors[around[0]][around]
        for i in around:
            factors[i][around] = rest
            neighbours[i] |= {j for j in around if j != i}
    return v, around, choice


def _fix(
    v: int, value: int, own: list[Table], factors: list[dict[tuple[int, ...], Table]], neighbours: list[set[int]]
) -> float:
    """Sets `v` to `value`: each of its tables --> its slice at that value. Returns the value's own cost."""
    for names, table in list(factors[v].items()):
        for i in names:
            factors[i].pop(names, None)
        rest = tuple(i for i in names if i != v)
        piece = np.take(table, value, axis=names.index(v))
        if len(rest) == 1:
            own[rest[0]] = own[rest[0]] + piece
        else:
            if rest in factors[rest[0]]:
                piece = piece + factors[rest[0]][rest]
            for i in rest:
                factors[i][rest] = piece
    return float(own[v][value])
