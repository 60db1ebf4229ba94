"""Rings as additional choices of a matrix product, and their costs.

A ring (`shardc.sbp.ring`) sends pieces of an operand, or of the result, around a mesh axis. It replaces the product and
the all-gather before it, or the product and the reduce-scatter after it. Each ring multiplies the work of the search.
So only rings are offered that take clearly less time than the product and its boxing, and that divide the work over all
axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardc.ir.walk import operation_of, work_dtype
from shardc.passes.place.problem import Node, Value, digits, first_of_alike
from shardc.passes.place.value_tables import ValueTables
from shardc.sbp.cost import avoided_cost, heavy_seconds
from shardc.sbp.placement import S
from shardc.sbp.ring import Ring, ring_price, ring_signatures
from shardc.sbp.signature import Signature

LEAST_SECONDS: Final = 1e-5
"""Seconds that a ring has to save in one execution: less is within the uncertainty of latencies. This and the next two:
docs/design/collective-matmul.md, "Offered where it pays"."""
LEAST_SHARE: Final = 0.1
"""Share of the time of the boxing and the product that it has to save: XLA's products in pieces are some 5 % slower."""
MOST_DEVICES: Final = 16
"""Devices of a ring, at most: a device's program has a product for each."""


@dataclass(frozen=True)
class Rings:
    """The rings of a node as choices; fields are as in `Domain`. `options` number their signatures after the node's
    own."""

    options: NDArray[np.int64]
    orders: NDArray[np.intp]
    seconds: NDArray[np.float64]
    rows: tuple[NDArray[np.int64], ...]


def offer_rings(domains: ValueTables, n: Node) -> Rings | None:
    """The rings that may be worth their cost; None if there are none."""
    if n.kind != "operation" or n.rule is None or n.rule.terms is None or not domains.mesh.topology.overlap("ring"):
        return None
    values = [v for v in (*n.operands, *n.results) if v is not None]
    rings = [s for s in ring_signatures(n.rule, operation_of(n.equation)) if _is_offered(s, (*n.operands, *n.results))]
    axes = [
        k for k, axis in enumerate(domains.axes)
        if 1 < domains.sizes[k] <= MOST_DEVICES and not avoided_cost("permute", (axis,), domains.view)
    ]  # fmt: skip
    if len(values) < 3 or not rings or not axes or not _is_heavy(domains, n):
        return None
    offer = _RingOffer(domains, n, values, (*n.options, *rings))
    found = offer.of([(k, len(n.options) + r) for k in axes for r in range(len(rings))])
    return found if len(found.seconds) else None


def _is_offered(s: Signature, values: Sequence[Value | None]) -> bool:
    sbps = zip((*s.operands, *s.results), values, strict=True)
    return not any(isinstance(sbp, S) and v is not None and sbp.dim in v.unsplit for sbp, v in sbps)


def _is_heavy(domains: ValueTables, n: Node) -> bool:
    """Whether there is enough computation for a ring to overlap with."""
    assert n.rule is not None
    devices, speed = np.prod(domains.sizes), domains.mesh.topology.flops_in(str(work_dtype(n.equation)))
    return n.rule.flops / float(devices) / speed >= LEAST_SECONDS


class _RingOffer:
    """The rings of one node."""

    def __init__(self, domains: ValueTables, n: Node, values: Sequence[Value], signatures: Sequence[Signature]) -> None:
        assert n.rule is not None
        self.domains, self.node, self.values, self.signatures = domains, n, values, signatures
        self.tables = [domains.table(v) for v in values]
        self.rule, self.sizes = n.rule, n.rule.sizes(operation_of(n.equation))
        self.columns = digits(signatures, len(values))
        self.dividing = [i for i, s in enumerate(n.options) if s.split]

    def of(self, offered: Sequence[tuple[int, int]]) -> Rings:
        """The choices of several rings, concatenated. Each ring is a signature on one axis, given as (number of the
        axis, number of the signature)."""
        domains, signatures = self.domains, self.signatures
        rings = [self._ring(axis, signatures[number]) for axis, number in offered]
        choices = [
            domains.in_all_orders([[number] if k == axis else self.dividing for k in range(len(domains.axes))])
            for axis, number in offered
        ]
        options, orders = np.concatenate([o for o, _ in choices]), np.concatenate([o for _, o in choices])
        which = np.repeat(np.arange(len(rings)), [len(o) for _, o in choices])
        factors = {f: k for k, f in enumerate(dict.fromkeys(s.split for s in signatures))}
        factor = np.asarray([factors.get(r.factor, -1) for r in rings])[which]
        others = np.asarray([factors[s.split] for s in signatures])[options] == factor[:, None]
        axis = np.asarray([axis for axis, _ in offered], np.intp)[which]
        pieces = np.where(others, domains.sizes, 1).prod(-1, dtype=np.int64) * np.asarray(domains.sizes)[axis]
        place = np.argsort(domains.all_orders, -1)[orders]  # position of each axis in the order of cutting
        innermost = ~(others & (place > np.take_along_axis(place, axis[:, None], 1))).any(-1)
        keep = innermost & (np.asarray([self.sizes[r.factor] for r in rings])[which] % pieces == 0)
        which, options, orders = which[keep], options[keep], orders[keep]
        rows = [domains.rows_of(v, self.columns[options, p], orders) for p, v in enumerate(self.values)]
        keep = first_of_alike([which, *rows])
        which, options, orders, rows = which[keep], options[keep], orders[keep], [r[keep] for r in rows]
        seconds, saved = self._seconds(rings, which, options, orders, rows)
        keep, weight = saved >= 0, self.node.weight
        return Rings(options[keep], orders[keep], weight * seconds[keep], tuple(r[keep] for r in rows))

    def _ring(self, axis: int, s: Signature) -> Ring:
        assert s.around is not None
        for i, (factors, sbp) in enumerate(zip(self.rule.operands, s.operands, strict=True)):
            if isinstance(sbp, S) and factors[sbp.dim] == s.around:
                return Ring(self.domains.axes[axis], s.around, i)
        return Ring(self.domains.axes[axis], s.around, None)

    def _seconds(
        self, rings: Sequence[Ring], which: NDArray[np.intp], options: NDArray[np.int64], orders: NDArray[np.intp],
        rows: Sequence[NDArray[np.int64]],
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:  # fmt: skip
        """For each choice the seconds of one execution, and the saving over a product with a boxing, minus the required
        saving."""
        mesh, op = self.domains.mesh, operation_of(self.node.equation)
        flops = np.full(len(options), self.rule.flops)
        for factor, counts in self.domains.splits([s.split for s in self.signatures], options).items():
            size = self.sizes[factor]
            flops = flops / (size / -(-size // counts))
        held = [t.local_bytes[r].astype(np.float64) for t, r in zip(self.tables, rows, strict=True)]
        found, boxing, memory = *np.empty((2, len(options))), np.sum(held, 0)
        ends = np.searchsorted(which, np.arange(len(rings) + 1))
        for ring, begin, end in zip(rings, ends, ends[1:], strict=False):
            some, port = slice(begin, end), ring.port(self.rule)
            table, around = self.tables[port], rows[port][some]
            found[some] = ring_price(ring, self.rule, op, [h[some] for h in held], flops[some], mesh).total
            columns = self.columns[:, port].copy()  # without a ring the operand is whole, the result partial
            columns[len(self.node.options) :] = 1 if ring.operand is None else 0
            plain = self.domains.rows_of(self.values[port], columns[options[some]], orders[some])
            boxing[some] = table.seconds[(plain, around) if ring.operand is None else (around, plain)]
            memory[some] += table.local_bytes[plain] - held[port][some]
        for port, share in self.node.traffic:  # a result in pieces is read again, and added by itself
            found += 3 * share * held[port] / mesh.topology.memory_rate
        whole = boxing + heavy_seconds(flops, memory, mesh, work_dtype(self.node.equation), kind=self.rule.kind)
        return found, whole - found - np.maximum(LEAST_SECONDS, LEAST_SHARE * whole)
