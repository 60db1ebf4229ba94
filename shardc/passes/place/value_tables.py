"""The placements of each value on all axes of the mesh at once, as rows of tables of its boxings."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardc.ir.walk import itemsize_of
from shardc.machine.mesh import MeshView
from shardc.passes.place.problem import Problem, Value, digit_of
from shardc.sbp.boxing import BoxingTable, all_placements, table_of_some
from shardc.sbp.placement import ReduceOp


@lru_cache(maxsize=4096)
def _by_code(rank: int, axes: tuple[str, ...], op: ReduceOp) -> NDArray[np.int64]:
    """The row of each placement in a boxing table, indexed by the order of its axes and by its code.

    Orders are as in `itertools.permutations`: the order in which axes split a common dimension. The code is the sum
    over axes of digit * (rank + 2)^position.
    """
    every = all_placements(rank, axes, op)
    shape = len(every), len(axes)
    digit = np.asarray([digit_of(p[a]) for p in every for a in axes], np.int64).reshape(shape)
    place = np.asarray([[*p, *axes].index(a) for p in every for a in axes], np.int64).reshape(shape)
    orders = _permutations(len(axes))
    rows = np.empty((len(orders), (rank + 2) ** len(axes)), np.int64)
    codes = digit @ (rank + 2) ** np.arange(len(axes))
    for found, order in zip(rows, orders, strict=True):
        fits = np.ones(len(every), np.bool_)
        for a, b in itertools.combinations(order, 2):
            fits &= (digit[:, a] != digit[:, b]) | (digit[:, a] < 2) | (place[:, a] < place[:, b])
        found[codes[fits]] = np.flatnonzero(fits)
    return rows


@lru_cache(maxsize=64)
def _permutations(count: int) -> NDArray[np.int64]:
    """All orders of `count` axes."""
    every = list(itertools.permutations(range(count)))
    return np.asarray(every, np.int64).reshape(len(every), count)


class ValueTables:
    """The boxing tables of a problem's values, and the conversion of one-axis signatures to rows of these tables.

    Attributes:
      axes, sizes: the mesh axes along which placements are chosen.
      all_orders: all permutations of the axes, by number: the order in which they split a common dimension.
      view: the mesh of these axes alone.
    """

    def __init__(self, problem: Problem, mesh: MeshView, axes: Sequence[str]) -> None:
        self.problem, self.mesh, self.axes = problem, mesh, tuple(axes)
        self.sizes = [mesh.sizes[a] for a in self.axes]
        self.all_orders = _permutations(len(self.axes))
        cuts = tuple(cut for cut in mesh.cuts if set(cut[1]) <= set(self.axes))
        self.view = MeshView(
            tuple(zip(self.axes, self.sizes, strict=True)), mesh.topology, avoids=mesh.avoids, cuts=cuts
        )
        self._tables: dict[
            tuple[int, ReduceOp, bool, frozenset[int]], tuple[BoxingTable, Any]
        ] = {}  # by id of avals, kept alive

    def table(self, value: Value) -> BoxingTable:
        key = (id(value.aval), value.op, value.late, value.unsplit)
        found = self._tables.get(key)
        if found is None:
            view = self.problem.view_for(value, self.view)
            table = table_of_some(value.shape, itemsize_of(value.aval), view, value.op, value.unsplit)
            found = self._tables[key] = table, value.aval
        return found[0]

    def in_all_orders(self, choices: Sequence[Sequence[int] | range]) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
        """All combinations of the choices on each axis, (combinations, axes), with all orders of the axes:
        (combinations,) indices into `all_orders`."""
        products = list(itertools.product(*choices))
        options = np.asarray(products, np.int64).reshape(len(products), len(self.axes))
        orders = np.arange(len(self.all_orders))
        return np.tile(options, (len(orders), 1)), np.repeat(orders, len(options))

    def rows_of(self, value: Value, sbps: NDArray[np.int64], orders: NDArray[np.intp]) -> NDArray[np.int64]:
        """The rows of placements in a value's table. `sbps`: (placements, axes) the sbp on each axis, coded as in
        `digits`; `orders`: (placements,) indices into `all_orders`."""
        rank = value.rank - len(value.unsplit)
        if value.unsplit:
            split = [d + 2 for d in range(value.rank) if d not in value.unsplit]
            sbps = np.searchsorted([0, 1, *split], sbps)
        return _by_code(rank, self.axes, value.op)[orders, sbps @ (rank + 2) ** np.arange(len(self.axes))]

    def splits(self, split: Sequence[str | None], options: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
        """For each factor (choices,) the number of devices that split it. `split`: the factor of each signature."""
        numbers = {factor: k for k, factor in enumerate(dict.fromkeys(split))}
        by = np.asarray([numbers[factor] for factor in split])[options]
        return {
            factor: np.where(by == k, self.sizes, 1).prod(-1, dtype=np.int64) for factor, k in numbers.items() if factor
        }
