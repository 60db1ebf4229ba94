"""Placements: what each mesh axis does to a value.

The three words come from OneFlow (Yuan et al. 2021, "OneFlow: Redesign the Distributed Deep Learning Framework from
Scratch", section 3.1). One mesh axis either splits a value along a dimension, `S(i)`; broadcasts it, `B`; or leaves
it partial, `P(op)`: the value is the op-reduction of what the devices along that axis hold.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Final, Literal, TypeAlias, cast

from jax.sharding import NamedSharding, PartitionSpec

from shardc.errors import PlacementError

ReduceOp: TypeAlias = Literal["sum", "max", "min"]
REDUCE_OPS: Final[tuple[ReduceOp, ...]] = ("sum", "max", "min")
AxisSizes: TypeAlias = Mapping[str, int]
"""Name and size of each mesh axis, in the order of the mesh."""


@dataclass(frozen=True, slots=True)
class S:
    """Split along dimension `dim`; a negative `dim` counts from the last."""

    dim: int

    def __post_init__(self) -> None:
        if isinstance(self.dim, bool) or not isinstance(self.dim, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PlacementError(f"S({self.dim!r}): a split needs the number of a dimension, as in S(0).")

    def __repr__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Every device along the axis holds the whole value. `B` is its one instance."""

    def __repr__(self) -> str:
        return "B"


@dataclass(frozen=True, slots=True, init=False)
class P:
    """Partial: the value is the `op`-reduction (sum, max or min) of what the devices along the axis hold."""

    op: ReduceOp

    def __init__(self, op: ReduceOp = "sum", *rest: object) -> None:
        if rest or op not in REDUCE_OPS:
            arguments = ", ".join(map(repr, (op, *rest)))
            raise PlacementError(
                f"P({arguments}): a partial value is reduced by sum, max or min. Did you mean "
                f"jax.sharding.PartitionSpec({arguments})?"
            )
        object.__setattr__(self, "op", op)

    def __repr__(self) -> str:
        return f"P({self.op})"


B: Final = Broadcast()
SBP: TypeAlias = S | Broadcast | P


class Auto:
    """The type of `AUTO`: the compiler chooses."""

    def __repr__(self) -> str:
        return "AUTO"


AUTO: Final = Auto()


def as_sbp(value: object) -> SBP:
    """`S(i)`, `B` or `P(op)` from a user's notation: `P` alone is `P("sum")`, `None` is `B`."""
    if isinstance(value, S | Broadcast | P):
        return value
    if value is P:
        return P()
    if value is None:
        return B
    raise PlacementError(f"{value!r} is not an sbp; write S(dim), B or P(op).")


class Placement(Mapping[str, SBP]):
    """An sbp for each mesh axis. Axes that are not named are `B`.

    Immutable and hashable. Where several axes split one dimension, the order in which they are written is the order in
    which they cut: `{a: S(0), b: S(0)}` cuts dimension 0 in pieces along `a`, and each piece along `b`.

    Examples:
      >>> p = Placement({"data": S(0), "model": P("sum")})
      >>> str(p)
      '{data: S(0), model: P(sum)}'
      >>> Placement.parse(str(p)) == p
      True
    """

    __slots__ = ("__dict__", "_hash", "items_")

    items_: tuple[tuple[str, SBP], ...]

    def __init__(self, sbps: Mapping[str, object] | Sequence[tuple[str, object]] = ()) -> None:
        try:
            named = [(axis, as_sbp(sbp)) for axis, sbp in (sbps.items() if isinstance(sbps, Mapping) else sbps)]
        except PlacementError:
            raise
        except (TypeError, ValueError) as error:
            raise PlacementError(f"Placement({sbps!r}): write a dict, as Placement({{'data': S(0)}}).") from error
        splits = [(a, s) for a, s in named if isinstance(s, S)]
        partials = [(a, s) for a, s in named if isinstance(s, P)]
        if len({a for a, _ in named}) != len(named):
            raise PlacementError(f"A placement names each axis once, got {[a for a, _ in named]}.")
        if len({s.op for _, s in partials}) > 1:
            raise PlacementError(
                "One placement has one partial op, got "
                + ", ".join(f"{a}: {s}" for a, s in partials)
                + "; a sum and a max over different axes do not commute."
            )
        splits.sort(key=lambda item: item[1].dim)  # stable: the order of the axes of one dimension is kept
        self.items_ = (*splits, *sorted(partials, key=lambda item: item[0]))
        self._hash = hash(self.items_)

    def __getitem__(self, axis: str) -> SBP:
        for a, s in self.items_:
            if a == axis:
                return s
        return B

    def __contains__(self, axis: object) -> bool:
        return any(a == axis for a, _ in self.items_)

    def __iter__(self) -> Iterator[str]:
        return (a for a, _ in self.items_)

    def __len__(self) -> int:
        return len(self.items_)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Placement) and self.items_ == other.items_

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        return "{" + ", ".join(f"{a}: {s}" for a, s in self.items_) + "}"

    def __repr__(self) -> str:
        return f"Placement.parse({str(self)!r})"

    def _repr_html_(self) -> str:
        """The text, and what it says of each axis."""
        words = [
            f"along {axis} " + (f"dimension {s.dim} is split" if isinstance(s, S) else f"the {s.op} is the value")
            for axis, s in self.items_
            if isinstance(s, S | P)
        ]
        said = "; ".join(words) or "every device holds all of it"
        return f"<code>{html.escape(str(self))}</code> {html.escape(said)}"

    def __reduce__(self) -> tuple[type[Placement], tuple[tuple[tuple[str, SBP], ...]]]:
        return Placement, (self.items_,)

    @classmethod
    def parse(cls, text: str) -> Placement:
        """The inverse of `str`: `{data: S(0), model: P(sum)}`."""
        body = re.fullmatch(r"\s*\{(.*)\}\s*", text, re.DOTALL)
        if body is None:
            raise PlacementError(f"{text!r} is not a placement; write {{axis: S(0), other: P(sum)}}.")
        pairs: list[tuple[str, SBP]] = []
        for item in filter(None, (part.strip() for part in body[1].split(","))):
            match = re.fullmatch(r"([^\s:]+)\s*:\s*(?:S\((-?\d+)\)|(B)|P(?:\((sum|max|min)\))?)", item)
            if match is None:
                raise PlacementError(f"{item!r} in {text!r} is not an axis and its sbp; write axis: S(0), B or P(sum).")
            axis, dim, broadcast, op = match.groups()
            pairs.append((axis, S(int(dim)) if dim else B if broadcast else P(cast(ReduceOp, op or "sum"))))
        return cls(pairs)

    @cached_property
    def splits(self) -> dict[int, tuple[str, ...]]:
        """For each split dimension the axes that split it, outermost first."""
        axes: dict[int, list[str]] = {}
        for axis, sbp in self.items_:
            if isinstance(sbp, S):
                axes.setdefault(sbp.dim, []).append(axis)
        return {dim: tuple(names) for dim, names in axes.items()}

    @cached_property
    def partial_axes(self) -> tuple[str, ...]:
        """The axes over which the value is partial, by name."""
        return tuple(a for a, s in self.items_ if isinstance(s, P))

    @cached_property
    def partial_op(self) -> ReduceOp | None:
        """The op of the partial axes; None if there are none."""
        return next((s.op for _, s in self.items_ if isinstance(s, P)), None)

    def axes_of(self, dim: int) -> tuple[str, ...]:
        """The axes that split `dim`, outermost first."""
        return self.splits.get(dim, ())

    def replace(self, axis: str, sbp: SBP) -> Placement:
        """This placement with another sbp on one axis; a new split becomes the innermost of its dimension."""
        return Placement([*((a, s) for a, s in self.items_ if a != axis), (axis, sbp)])

    def moved(self, axes: Sequence[str], sbp: SBP) -> Placement:
        """This placement with `sbp` on all `axes`. As splits they become the innermost of their dimension, in the given
        order."""
        rest, new = [(a, s) for a, s in self.items_ if a not in axes], [(a, sbp) for a in axes]
        if isinstance(sbp, Broadcast):
            return Placement._sorted(tuple(rest))
        if isinstance(sbp, S):
            at = sum(isinstance(s, S) and s.dim <= sbp.dim for _, s in rest)
            return Placement._sorted((*rest[:at], *new, *rest[at:]))
        return Placement([*rest, *new])

    @classmethod
    def _sorted(cls, items: tuple[tuple[str, SBP], ...]) -> Placement:
        """A placement from items that are already in order."""
        found = cls.__new__(cls)
        found.items_, found._hash = items, hash(items)
        return found

    def without(self, axes: Sequence[str]) -> Placement:
        """This placement with `B` on `axes`."""
        return Placement([(a, s) for a, s in self.items_ if a not in axes])

    def resolve(self, rank: int) -> Placement:
        """This placement with non-negative dimensions, for a value of `rank` dimensions."""
        twice = [d for d in self.splits if d < 0 and d + rank in self.splits]
        if twice:
            raise PlacementError(
                f"{self} names dimension {twice[0] + rank} of {rank} also as {twice[0]}, so the order of its axes is "
                "not defined; use one number for it."
            )
        resolved: list[tuple[str, SBP]] = []
        for axis, sbp in self.items_:
            if isinstance(sbp, S) and not -rank <= sbp.dim < rank:
                what = "a scalar cannot be split" if rank == 0 else f"the value has dimensions 0 to {rank - 1}"
                raise PlacementError(f"{axis}: {sbp} does not fit a value of {rank} dimensions: {what}.")
            resolved.append((axis, S(sbp.dim % rank) if isinstance(sbp, S) else sbp))
        return Placement(resolved)

    def to_spec(self) -> PartitionSpec:
        """This placement as a `PartitionSpec`. A partial placement has none."""
        if self.partial_axes:
            raise PlacementError(
                f"{self} has partial axes, which a PartitionSpec cannot express; box them to B or S first, or keep the "
                "value as a shardc.PlacedArray."
            )
        rank = max(self.splits, default=-1) + 1
        names = [self.axes_of(d) for d in range(rank)]
        return PartitionSpec(*(None if not n else n[0] if len(n) == 1 else n for n in names))

    @classmethod
    def from_spec(cls, spec: PartitionSpec) -> Placement:
        """The placement of a `PartitionSpec`, with its `unreduced` axes as partial ones."""
        pairs: list[tuple[str, SBP]] = []
        for dim, entry in enumerate(spec.partitions):
            names = () if entry is None else (entry,) if isinstance(entry, str) else entry
            if not isinstance(names, tuple):
                raise PlacementError(
                    f"PartitionSpec{spec.partitions} leaves dimension {dim} open; shardc needs axis names or "
                    "None there."
                )
            pairs += [(name, S(dim)) for name in names]
        kind = getattr(spec, "unreduced_kind", None)  # JAX 0.10 has sums only
        pairs += [(name, P("sum" if kind is None else kind.name)) for name in sorted(spec.unreduced)]
        return cls(pairs)

    def to_sharding(self, mesh: object) -> NamedSharding:
        """This placement as a `NamedSharding` over `mesh` (a jax Mesh or AbstractMesh)."""
        return NamedSharding(mesh, self.to_spec())  # pyright: ignore[reportArgumentType]

    @classmethod
    def from_sharding(cls, sharding: NamedSharding) -> Placement:
        """The placement of a `NamedSharding`; axes of size 1 that it names are kept."""
        return cls.from_spec(sharding.spec)


REPLICATED: Final = Placement()


def block_sizes(size: int, counts: Sequence[int]) -> tuple[int, ...]:
    """Sizes of the nested blocks of a dimension: `size`, then the piece that each axis in order cuts.

    An axis of n devices cuts a block of k elements into pieces of ceil(k/n): the first pieces are full, then one may be
    partly valid and the rest empty, so the valid elements are a prefix of every piece.

    Examples:
      >>> block_sizes(13, (2, 4))
      (13, 7, 2)
    """
    sizes = [size]
    for n in counts:
        sizes.append(-(-sizes[-1] // n))
    return tuple(sizes)


@lru_cache(maxsize=4096)
def extents(size: int, counts: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Offset and number of valid elements of each piece of a dimension that axes of `counts` devices split, in order.

    Examples:
      >>> extents(5, (2, 2))
      ((0, 2), (2, 1), (3, 2), (5, 0))
    """
    found = [(0, size)]
    for n, block in zip(counts, block_sizes(size, counts)[1:], strict=True):
        found = [(at + k * block, min(max(valid - k * block, 0), block)) for at, valid in found for k in range(n)]
    return tuple(found)


@lru_cache(maxsize=65536)
def _local_shape(shape: tuple[int, ...], placement: Placement, axes: tuple[tuple[str, int], ...]) -> tuple[int, ...]:
    sizes = dict(axes)
    return tuple(block_sizes(d, [sizes[a] for a in placement.axes_of(i)])[-1] for i, d in enumerate(shape))


def local_shape(shape: Sequence[int], placement: Placement, sizes: AxisSizes) -> tuple[int, ...]:
    """Shape of the piece that each device holds, padding included."""
    return _local_shape(tuple(shape), placement, tuple(sizes.items()))


def is_even(shape: Sequence[int], placement: Placement, sizes: AxisSizes) -> bool:
    """Whether no device holds padding."""
    return all(
        d % math.prod(sizes[a] for a in axes) == 0 for i, d in enumerate(shape) if (axes := placement.axes_of(i))
    )


def local_extent(size: int, axes: Sequence[str], sizes: AxisSizes, coords: Mapping[str, int]) -> tuple[int, int]:
    """Offset and number of valid elements of the piece of a dimension at the device coordinates `coords`."""
    offset, valid = 0, size
    for axis, block in zip(axes, block_sizes(size, [sizes[a] for a in axes])[1:], strict=True):
        start = coords[axis] * block
        offset, valid = offset + start, min(max(valid - start, 0), block)
    return offset, valid


@dataclass(frozen=True, slots=True)
class Pin:
    """A user's constraint on one value: the sbp of the `fixed` axes; the compiler chooses those of the others.

    `said` is its origin, as in `in_placements: params '*/kernel'`. It does not count when pins are compared.
    """

    placement: Placement
    fixed: frozenset[str] | None = None  # None: every axis is fixed
    said: str = field(default="", compare=False)

    def without(self, axes: Sequence[str]) -> Pin:
        """This pin with `B` on `axes`."""
        fixed = None if self.fixed is None else self.fixed.difference(axes)
        return Pin(self.placement.without(axes), fixed, self.said)

    def allows(self, placement: Placement) -> bool:
        """Whether `placement` agrees with the pin."""
        if self.fixed is None:
            return placement == self.placement
        return all(placement[a] == self.placement[a] for a in self.fixed)
