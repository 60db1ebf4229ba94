"""Chains as additional choices of a reshape: several axes that cut one run of its dimensions one after the other.

Row-major order cuts the shapes of a reshape into runs of equal size. An axis may go on behind the others where these
have cut all dimensions before its own into single elements:

    f32[8,d] at {a: S(0), b: S(0)} --> f32[4,2,d] at {a: S(0), b: S(1)}     on a=4, b=2

A device holds the same consecutive elements of the run before and after, so nothing moves. On a mesh with one axis, or
where no product of axes is as large as the dimensions before, there are no chains.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardc.passes.place.problem import Node, digits, first_of_alike
from shardc.passes.place.value_tables import ValueTables
from shardc.sbp.placement import S
from shardc.sbp.signature import Run, Signature


@dataclass(frozen=True)
class Chains:
    """The chains of a node as choices; fields are as in `Domain`. `options` number their signatures after the node's
    own."""

    options: NDArray[np.int64]
    orders: NDArray[np.intp]
    rows: tuple[NDArray[np.int64] | None, ...]


class _Link(NamedTuple):
    """A signature that is legal behind others: it cuts this dimension of the operand, and that one of the result, of a
    run. Dimensions are counted in the run."""

    run: int
    operand: int
    result: int


def offer_chains(domains: ValueTables, n: Node) -> Chains | None:
    """The chains of a reshape; None if there are none."""
    if n.kind != "operation" or n.rule is None or not n.rule.runs or n.operands[0] is None or len(domains.axes) < 2:
        return None
    values, every_run = (n.operands[0], n.results[0]), n.rule.runs
    runs = [_Sizes.of(run, values[0].shape, values[1].shape) for run in every_run]

    def is_offered(link: _Link) -> bool:
        run, (given, made) = every_run[link.run], values
        return run.operand[link.operand] not in given.unsplit and run.result[link.result] not in made.unsplit

    links = [list(filter(is_offered, _links(runs, axis, domains.sizes))) for axis in range(len(domains.axes))]
    every = list(dict.fromkeys(link for found in links for link in found))
    if not every:
        return None
    own = len(n.options)
    signatures = [
        *n.options,
        *(Signature((S(every_run[r].operand[i]),), (S(every_run[r].result[j]),)) for r, i, j in every),
    ]
    choices = [[*range(own), *(own + every.index(link) for link in found)] for found in links]
    options, orders = domains.in_all_orders(choices)
    legal = (options >= own).any(1)
    options, orders = options[legal], orders[legal]
    columns = digits(signatures, 2)
    legal = np.ones(len(options), np.bool_)
    for run, sizes in zip(every_run, runs, strict=True):
        for port, (dims, counts) in enumerate(zip((run.operand, run.result), sizes, strict=True)):
            legal &= _cut_in_order(domains, columns[options, port], orders, dims, counts)
    options, orders = options[legal], orders[legal]
    rows = tuple(domains.rows_of(v, columns[options, p], orders) for p, v in enumerate(values))
    keep = first_of_alike(rows)
    return Chains(options[keep], orders[keep], tuple(r[keep] for r in rows)) if keep.size else None


class _Sizes(NamedTuple):
    """The sizes of a run's dimensions."""

    operand: tuple[int, ...]
    result: tuple[int, ...]

    @classmethod
    def of(cls, run: Run, operand: Sequence[int], result: Sequence[int]) -> _Sizes:
        return cls(tuple(operand[d] for d in run.operand), tuple(result[d] for d in run.result))


def _links(runs: Sequence[_Sizes], axis: int, sizes: Sequence[int]) -> Iterator[_Link]:
    """The links that an axis may be, as far as the sizes tell."""
    others = [n for k, n in enumerate(sizes) if k != axis and n > 1]
    before = {math.prod(some) for k in range(len(others) + 1) for some in itertools.combinations(others, k)}
    for r, run in enumerate(runs):
        left, right = (list(itertools.accumulate(side, initial=1, func=lambda a, b: a * b)) for side in run)
        for i, j in itertools.product(range(len(run.operand)), range(len(run.result))):
            fits = run.operand[i] % sizes[axis] == 0 and run.result[j] % sizes[axis] == 0
            if (i or j) and fits and left[i] in before and right[j] in before:
                yield _Link(r, i, j)


def _cut_in_order(
    domains: ValueTables, sbps: NDArray[np.int64], orders: NDArray[np.intp], dims: Sequence[int], counts: Sequence[int]
) -> NDArray[np.bool_]:
    """For each choice, whether axes cut the dimensions of a run in their order, and all of each but the last."""
    order = domains.all_orders[orders]
    numbers = np.full(int(sbps.max(initial=0)) + 1, -1)
    for at, d in enumerate(dims):
        if d + 2 < len(numbers):
            numbers[d + 2] = at
    at = np.take_along_axis(numbers[sbps], order, 1)  # the number of the dimension in the run, -1 if it is in none
    devices = np.asarray(domains.sizes)[order]
    latest = np.maximum.accumulate(at, 1)
    found = ((at < 0) | (at == latest)).all(1)
    for k, size in enumerate(counts):
        cut = np.where(at == k, devices, 1).prod(1)
        found &= np.where(latest[:, -1] > k, cut == size, size % cut == 0)
    return found
