"""Memory of a plan, per device: the bytes that a boxed program needs while it runs.

`passes/estimate/live_ranges.py` says which values are in memory, and when. Here they get their bytes, and products
whose pieces go around a ring get their buffers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardc import compat
from shardc.compat import Eqn, Jaxpr, Var
from shardc.ir.box import Boxed
from shardc.ir.nested import NESTED, bodies_of
from shardc.ir.walk import all_eqns, bytes_of, local_bytes, operation_of, setting_of
from shardc.passes.estimate.backend import GPU, TPU, Backend
from shardc.passes.estimate.live_ranges import LiveRanges, Product, live_ranges
from shardc.passes.estimate.sizes import allotted_bytes, piece_bytes, table_bytes
from shardc.passes.estimate.softmax import RecomputedExp
from shardc.sbp.placement import REPLICATED, AxisSizes, Placement, local_shape
from shardc.sbp.ring import ring_buffers, ring_of
from shardc.sbp.signature import find_rule


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes per device.

    Attributes:
      arguments: of all.
      results: of all, with those that replace donated arguments.
      temporaries: the most that is live at one time besides the arguments: results with memory of their own, and values
        between. `peak` is this and the arguments.
      host: in the memory of the host, which counts nowhere else.
    """

    arguments: int
    results: int
    temporaries: int
    host: int = 0

    @property
    def peak(self) -> int:
        """The most at one time, as XLA allots it."""
        return self.arguments + self.temporaries


GAPS: Final = 1.08
"""XLA packs live values into one block of memory and leaves gaps; its order is not quite the program's. The temporaries
of the zoo on 8 CPU devices took up to 7.8 % more than is counted here (benchmarks/memory.md)."""


_PLAIN: Final = replace(GPU, workspace=0, batched_workspace=0)
"""A device that only fuses: no tiles, no workspaces."""
POINTER: Final = 8
"""Bytes per result in XLA's table of results."""


class Around(NamedTuple):
    """The memory of a product whose pieces go around a ring, or are exchanged, besides its operands and its result.

    Attributes:
      bytes: on a device.
      operand: the operand whose pieces go around; None: the result's do.
      in_blocks: the result is put together from blocks.
    """

    bytes: int
    operand: int | None
    in_blocks: bool


def around(eqn: Eqn, placements: Mapping[Var, Placement], sizes: AxisSizes, backend: Backend) -> Around | None:
    """The buffers of a product; None if its pieces do not communicate."""
    rule, setting = find_rule(operation_of(eqn)), setting_of(eqn, placements, sizes)
    ring = ring_of(rule, setting)
    if ring is None:
        return Around(rule.held(setting), None, False) if rule.held is not None and rule.crossed(setting) else None
    held = ring_buffers(ring, rule, setting, backend.eager)
    bytes_ = sum(b.number * allotted_bytes(b.shape, b.dtype.itemsize, backend) for b in held)
    return Around(bytes_, ring.operand, ring.operand is not None and ring.factor in rule.results[0])


def _arounds(
    products: Iterable[Product], placements: Mapping[Var, Placement], sizes: AxisSizes, backend: Backend
) -> Iterator[tuple[Product, Around]]:
    """The products whose pieces go around. Equal products, as in layers, are computed once."""
    known: dict[Hashable, Around | None] = {}
    for product in products:
        eqn = product.eqn
        lie = tuple(None if compat.is_literal(a) else placements[a] for a in (*eqn.invars, *eqn.outvars))
        alike = eqn.primitive, tuple(eqn.params.items()), tuple(a.aval for a in eqn.invars), lie
        if alike not in known:
            known[alike] = around(eqn, placements, sizes, backend)
        if (found := known[alike]) is not None:
            yield product, found


@dataclass(frozen=True)
class Profile:
    """The memory of a device while a boxed program runs.

    Attributes:
      live_ranges: of its values.
      sizes: (values,) bytes of each on one device.
      bytes: (points,) bytes in use at each point, as `Memory` counts.
      memory: the same in three figures.
    """

    live_ranges: LiveRanges
    sizes: NDArray[np.int64]
    bytes: NDArray[np.float64]
    memory: Memory

    @property
    def peak(self) -> int:
        return self.memory.peak

    def largest(self) -> list[tuple[Var, int]]:
        """The values that are live at the peak, with their bytes, the largest first."""
        at, found = int(self.bytes.argmax()), self.live_ranges
        there = np.flatnonzero((found.begin <= at) & (at < found.end))
        return [(found.values[k], int(self.sizes[k])) for k in there[np.argsort(-self.sizes[there], kind="stable")]]


def profile_memory(
    jaxpr: Jaxpr, placements: Mapping[Var, Placement], sizes: AxisSizes, aside: Collection[Var] = (),
    ties: Mapping[int, int] = MappingProxyType({}), backend: Backend = TPU,
) -> Profile:  # fmt: skip
    """The bytes of all live ranges in the order of the program, with `GAPS`.

    Args:
      jaxpr: boxed.
      placements: of its values.
      sizes: of the mesh's axes.
      aside: values that are counted elsewhere.
      ties: for results the number of the donated argument whose buffer each takes.
      backend: of the device.
    """
    known: dict[tuple[Any, int], int] = {}

    def size(var: Var) -> int:
        if var in aside:
            return 0
        placement = placements[var]
        alike = var.aval, id(placement)
        if alike not in known:
            known[alike] = piece_bytes(var.aval, placement, sizes, backend)
        return known[alike]

    found = live_ranges(jaxpr, ties, backend)
    held = np.fromiter(map(size, found.values), np.int64, len(found.values))
    arguments = int(held[: found.arguments].sum())
    results = sum(size(v) for v in jaxpr.outvars if not compat.is_literal(v))
    between: NDArray[np.float64] = (found.live(size) - arguments).astype(np.float64)
    for begin, end, more in _besides(found, placements, sizes, backend, size):
        between[begin:end] += more
    table = POINTER * len(jaxpr.outvars)
    most = Memory(arguments, results, math.ceil(GAPS * int(between.max())) + table)
    return Profile(found, held, arguments + GAPS * between + table, most)


def profile_boxed(boxed: Boxed, sizes: AxisSizes, ties: Mapping[int, int], backend: Backend) -> Profile:
    """The profile of a boxed program of which some values may live on the host."""
    found = profile_memory(boxed.jaxpr, boxed.placements, sizes, boxed.host, ties, backend)
    if not boxed.host:
        return found

    stacks = {v for e in all_eqns(boxed.jaxpr) if e.primitive.name in NESTED for v in e.outvars}
    whole = boxed.host & {*boxed.jaxpr.invars, *compat.variables(boxed.jaxpr.outvars), *stacks}  # rows are in stacks

    def on_host(v: Var) -> int:
        return local_bytes(v, boxed.placements[v], sizes) if v in whole else 0

    held = int(found.live_ranges.live(on_host).max())
    return replace(found, memory=replace(found.memory, host=held))


def _besides(
    found: LiveRanges,
    placements: Mapping[Var, Placement],
    sizes: AxisSizes,
    backend: Backend,
    size: Callable[[Var], int],
) -> Iterator[tuple[int, int, int]]:
    """Memory beyond plain live ranges (workspaces, ring buffers, values kept longer, row padding) as (begin, end,
    bytes)."""
    if backend.workspace:
        yield from _workspaces(found.products, backend)
    blocks = set[Var]()
    for product, ring in _arounds(found.products, placements, sizes, backend):
        begin = product.at
        if backend.eager and product.ready:  # pieces are sent as soon as they are there
            begin = min(max(product.ready) if ring.operand is None else product.ready[ring.operand], begin)
        yield begin, product.at + 1, ring.bytes
        if ring.in_blocks and backend.pieces_stay:
            blocks.add(product.eqn.outvars[0])
            if product.over is not None:
                yield product.over, product.over + 1, size(product.eqn.outvars[0])
    for wait in found.extended:
        ends = [end for over, end in wait.ends.items() if over in blocks]
        yield wait.begin, max(ends, default=0), size(wait.value)
    for again in found.recomputed:
        yield from _of_softmax(again, blocks, placements, sizes, size)
    for table in found.tables:
        yield table.begin, table.end, table_bytes(table, placements[table.value], sizes)


def _workspaces(products: Iterable[Product], backend: Backend) -> Iterator[tuple[int, int, int]]:
    """The workspaces of matrix products, as (begin, end, bytes)."""
    for product in products:
        if product.eqn.primitive.name == "dot_general":
            _, (batched, _) = product.eqn.params["dimension_numbers"]
            yield product.at, product.at + 1, backend.batched_workspace if batched else backend.workspace


def _of_softmax(
    again: RecomputedExp, blocks: set[Var], placements: Mapping[Var, Placement], sizes: AxisSizes,
    size: Callable[[Var], int],
) -> Iterator[tuple[int, int, int]]:  # fmt: skip
    """Memory of a softmax that XLA recomputes, as (begin, end, bytes)."""
    kept = again.scores.kept
    if blocks.isdisjoint(again.scores.products):
        yield again.last, again.last + 1, size(kept)  # the softmax, if it is multiplied after that loop
        if len(again.scores.products) > 1 and local_shape(kept.aval.shape, placements[kept], sizes)[0] == 1:
            yield again.last, again.until, size(kept) - size(again.value)  # the gradient, once in the smaller type
        return
    yield again.begin, again.last + 1, size(again.value) - size(kept)
    if again.scores.written:
        yield again.begin, again.begin + 1, size(again.scores.rows)


def estimate_memory(
    jaxpr: Jaxpr, placements: Mapping[Var, Placement], sizes: AxisSizes, aside: Collection[Var] = (),
    ties: Mapping[int, int] = MappingProxyType({}), backend: Backend = TPU,
) -> Memory:  # fmt: skip
    """The three figures of `profile_memory`, which has the arguments."""
    return profile_memory(jaxpr, placements, sizes, aside, ties, backend).memory


def working_bytes(eqn: compat.Eqn) -> int:
    """Bytes of the results of an equation and of the peak inside its bodies, on one device that holds everything."""
    whole: Mapping[Var, Placement] = defaultdict(lambda: REPLICATED)
    inside = max((estimate_memory(body, whole, {}, backend=_PLAIN).temporaries for body in bodies_of(eqn)), default=0)
    return sum(bytes_of(v) for v in eqn.outvars) + inside
