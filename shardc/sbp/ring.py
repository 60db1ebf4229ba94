"""Ring products: an all-gather before a product, or a reduce-scatter after it, in steps that overlap with the partial
products (Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition in
Large Deep Learning Models", ASPLOS).

    all-gather x along f; x · w      the pieces of x go around the devices of an axis, both ways at once, and each
                                     device multiplies the piece that it holds: one block of the result, or one term
    x · w; reduce-scatter along f    sums go around, one for each piece of the result, and each device adds its term

The placements tell which: on the axis of a ring the sbps of the operands and the result name two factors, on any other
axis one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax import lax

from shardc.machine.mesh import MeshView
from shardc.sbp.cost import RingTime, RingWork, ring_time
from shardc.sbp.placement import S
from shardc.sbp.signature import Operation, Rule, Setting, Signature, Site, may_be_partial


@dataclass(frozen=True, slots=True)
class Ring:
    """The pieces that go around the devices of an axis.

    Attributes:
      axis: mesh axis, the innermost that splits the factor.
      factor: the factor that is cut into the pieces.
      operand: the operand whose pieces go around; None: sums, one for each piece of the result.
    """

    axis: str
    factor: str
    operand: int | None

    def port(self, rule: Rule) -> int:
        """The port that is split by the factor, as `Setting.port` counts."""
        return len(rule.operands) if self.operand is None else self.operand


def ring_signatures(rule: Rule, op: Operation) -> tuple[Signature, ...]:
    """The one-axis signatures with a ring, besides those of `signatures`.

    If the operands are split by f and g, the pieces of f go around, and the result is split by g, which only the other
    operand has. If both are split by a summed factor, sums go around, one for each piece of the result.
    """
    if rule.terms is None:
        return ()
    found: list[Signature] = []
    (result,), sums = rule.results, may_be_partial(op.results[0], "sum")
    for i, (mine, other) in enumerate(zip(rule.operands, reversed(rule.operands), strict=True)):
        kept = [g for g in other if g and g in result and g not in mine]
        for f in (f for f in mine if f and (f in result or sums)):
            for g in kept:
                sides = (S(mine.index(f)), S(other.index(g)))
                found.append(Signature(sides if i == 0 else sides[::-1], (S(result.index(g)),), g, f))
    for k in (k for k in rule.reduced if sums):
        sides = tuple(S(side.index(k)) for side in rule.operands)
        found += [Signature(sides, (S(d),), k, f) for d, f in enumerate(result) if f]
    return tuple(found)


def ring_of(rule: Rule, setting: Setting) -> Ring | None:
    """The ring that the placements of a legal setting imply; None if they imply none."""
    if rule.terms is None:
        return None
    for axis in setting.sizes:
        sbps = [p[axis] for p in (*setting.operands, *setting.results)]
        left, right, result = (
            factors[sbp.dim] if isinstance(sbp, S) else None
            for factors, sbp in zip((*rule.operands, *rule.results), sbps, strict=True)
        )
        if left and right and left != right:
            return Ring(axis, *((left, 0) if result == right else (right, 1)))
        if left and left == right and result and result != left:
            return Ring(axis, result, None)
    return None


def ring_price(ring: Ring, rule: Rule, op: Operation, held: Sequence[Any], flops: Any, mesh: MeshView) -> RingTime:
    """The time of a ring, in numbers or in arrays.

    Args:
      held: bytes of the piece at each port, results last.
      flops: of one device.
    """
    dtype, result = op.operands[0].dtype, op.results[0]
    assert rule.terms is not None
    n, port = mesh.sizes[ring.axis], ring.port(rule)
    pieces = [
        size / n if ring.factor in factors and k != port else size
        for k, (factors, size) in enumerate(zip((*rule.operands, *rule.results), held, strict=True))
    ]
    *read, made = pieces
    if ring.operand is None:
        work = RingWork(held[port], flops / n, sum(read) + made, 2 * made)
    elif ring.factor in rule.results[0]:
        work = RingWork(held[port], flops / n, sum(read) + made, 0)
    else:
        wide = rule.terms.dtype.itemsize / result.dtype.itemsize
        work = RingWork(held[port], flops / n, sum(read), 2 * wide * made)
    return ring_time(work, mesh, ring.axis, dtype, rule.kind)


class Buffer(NamedTuple):
    """A number of arrays of one shape that a device holds at the same time."""

    number: int
    shape: tuple[int, ...]
    dtype: Any

    @property
    def bytes(self) -> int:
        return self.number * math.prod(self.shape) * self.dtype.itemsize


def ring_buffers(ring: Ring, rule: Rule, setting: Setting, eager: bool) -> tuple[Buffer, ...]:
    """The most that a ring holds at one time besides its operands and its result, as `run_ring` runs it.

    Pieces and sums: for each direction the current one and the one that arrives. Terms: the sum so far, and the next
    term. A block is written into the result, and a slice of the other operand is fused into the product.

    Args:
      eager: whether products start as soon as they can, not one after the other. Then all terms, or blocks, exist at
        once, and operands that are read in slices are copied first.
    """
    assert rule.terms is not None
    n, port = setting.sizes[ring.axis], ring.port(rule)
    shape, dtype = setting.result_shape(), setting.op.results[0].dtype
    ways = [n // 2, (n - 1) // 2]
    if ring.operand is None:
        if not eager:
            return (Buffer(2 * sum(hops > 0 for hops in ways), shape, dtype),)
        return (Buffer(n + 1, shape, dtype), *_copied(ring, rule, setting))
    piece = Buffer(sum(min(hops, 2) for hops in ways), setting.operand_shape(port), setting.op.operands[port].dtype)
    if ring.factor in rule.results[0]:
        return (piece._replace(number=-(-n // 2)), Buffer(1, shape, dtype)) if eager else (piece,)
    wide = Buffer(1, shape, rule.terms.dtype)
    if not eager:
        return piece, wide._replace(number=1 + (wide.dtype != dtype))
    late, early = (piece._replace(number=1), wide._replace(number=n - 1)), (piece._replace(number=n - 1), wide)
    return (*max(late, early, key=lambda held: sum(b.bytes for b in held)), *_copied(ring, rule, setting))


def _copied(ring: Ring, rule: Rule, setting: Setting) -> tuple[Buffer, ...]:
    """The operands that are read in slices."""
    return tuple(
        Buffer(1, setting.operand_shape(i), setting.op.operands[i].dtype)
        for i, factors in enumerate(rule.operands) if ring.factor in factors and i != ring.operand
    )  # fmt: skip


# --- on a device -----------------------------------------------------------------------------------------------------


def run_ring(site: Site, rule: Rule, ring: Ring, operands: Sequence[Any]) -> Sequence[Any]:
    """The local results of an operation whose pieces go around."""
    run = _Run(site, rule, ring, list(operands))
    return [run.sums() if ring.operand is None else run.pieces(ring.operand)]


class _Run:
    """The part of one device. Half of the pieces come from either side."""

    def __init__(self, site: Site, rule: Rule, ring: Ring, operands: list[Any]) -> None:
        self.site, self.rule, self.ring, self.operands = site, rule, ring, operands
        self.n, self.me = site.sizes[ring.axis], site.index(ring.axis)
        self.forth, self.back = self.n // 2, (self.n - 1) // 2
        self.dims = [
            side.index(ring.factor) if ring.factor in side else None for side in (*rule.operands, *rule.results)
        ]

    def shift(self, x: Any, by: int) -> Any:
        """The `x` of the device `by` places before this one."""
        return self.site.wire.permute(x, (self.ring.axis,), [(k, (k + by) % self.n) for k in range(self.n)])

    def device(self, by: int) -> Any:
        """The number of the device `by` places after this one."""
        if isinstance(self.me, int):
            return (self.me + by) % self.n
        at = self.me + by % self.n
        return lax.rem(at, lax.full_like(at, self.n))

    def of(self, number: Any, without: int | None = None) -> list[Any]:
        """The parts of the operands that belong to piece `number`."""
        return [
            x if dim is None or k == without else self.part(x, number, dim)
            for k, (x, dim) in enumerate(zip(self.operands, self.dims, strict=False))
        ]

    def part(self, x: Any, number: Any, dim: int) -> Any:
        """Slice `number` of a dimension. XLA:TPU fuses it into the product if no index can count from the end."""
        size = x.shape[dim] // self.n
        return lax.dynamic_slice_in_dim(x, number * size, size, dim, allow_negative_indices=False)

    def pieces(self, operand: int) -> Any:
        """The result, with pieces of an operand going around."""
        # The barrier keeps XLA from holding the pieces of another ring for this one.
        self.operands = list(lax.optimization_barrier(tuple(self.operands)))
        forth = back = self.operands[operand]
        result = self.add(None, operand, forth, self.me)
        for step in range(1, self.forth + 1):
            forth = self.shift(forth, 1)
            back = self.shift(back, -1) if step <= self.back else None
            result = self.add(result, operand, forth, self.device(-step))
            if back is not None:
                result = self.add(result, operand, back, self.device(step))
        return result.astype(self.site.op.results[0].dtype)

    def add(self, result: Any, operand: int, piece: Any, number: Any) -> Any:
        """The result with the contribution of piece `number` of an operand: a block, or a term."""
        parts, dim = self.of(number, operand), self.dims[-1]
        parts[operand] = piece
        if dim is None:
            assert self.rule.terms is not None
            (term,) = self.rule.terms.local(self.site, *parts)
            return (
                term if result is None else lax.optimization_barrier(result + term)
            )  # else XLA keeps all terms to the end
        (block,) = self.rule.local(self.site, *parts)
        if result is None:
            result = self.site.blank(self.site.result_shape(), block.dtype)
        start = number * block.shape[dim]
        return lax.dynamic_update_slice_in_dim(result, block, start, dim, allow_negative_indices=False)

    def sums(self) -> Any:
        """The result, with sums going around. Each starts half way around the ring from its destination, on either
        side, and collects the terms of the devices that it passes."""
        total = self.term(self.me)
        for by, hops in ((1, self.forth), (-1, self.back)):
            if hops:
                found = self.term(self.device(by * hops))
                for left in reversed(range(hops)):
                    found = self.shift(found, by)
                    found = found + self.term(self.device(by * left)) if left else found
                total = total + found
        return total

    def term(self, number: Any) -> Any:
        """This device's contribution to piece `number` of the result."""
        (found,) = self.rule.local(self.site, *self.of(number))
        return found
