"""A call in pieces: what each operation and each boxing adds to its time, and for which reason. Data only."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from shardc import compat
from shardc.compat import Eqn, Var
from shardc.ir.box import box_p, boxing_of
from shardc.ir.collective import Collective
from shardc.ir.walk import bytes_of, operation_of, short_aval, work_dtype
from shardc.passes.estimate.plan_cost import EquationCost, equation_costs
from shardc.plan.names import Names, ValueName, names_of
from shardc.plan.plan import PlacedProgram
from shardc.sbp.cost import FEMTO
from shardc.sbp.signature import find_rule
from shardc.sbp.sub_axes import in_whole_axes

Reason: TypeAlias = Literal[
    "argument", "result", "constraint", "sum", "value", "window", "unsplit", "recomputed", "repeated", "computing",
    "memory", "host", "launch", "transfers", "bubble",
]  # fmt: skip
"""Why a piece takes time. A value moves because an argument, a result or a `constrain` has another placement than its
reader or maker, because it is a sum of what devices hold, because two operations want it at different placements, or
because an operation needs pieces of others (a window). `unsplit`: an operation that no rule splits, with the moves of
its operands. Work is `recomputed`, `repeated` by several devices, or else bound by the matrix units (computing) or by
memory. The others are those of `Time`; `transfers` and `bubble` are the wait of a pipeline's rank."""


@dataclass(frozen=True, slots=True)
class UnevenCut:
    """A dimension that is cut over devices that do not divide it: its size, the devices and their axes."""

    size: int
    devices: int
    axes: tuple[str, ...]

    @property
    def most(self) -> int:
        """The largest size that takes as long."""
        return -(-self.size // self.devices) * self.devices

    @property
    def padding(self) -> float:
        """The share of it that is padding."""
        return 1 - self.size / self.most


@dataclass(frozen=True, slots=True)
class TimePiece:
    """The part of a call that an operation, or a boxing, adds.

    Attributes:
      reason: why it takes time.
      of: what pieces have in common that are one cost: axes, or the name of an operation.
      seconds: that it adds to the call.
      hidden: more of it, that overlaps with computing.
      wire: of a boxing, the part of both in which its bytes move: the rest is its start.
      name: the operation, or the value that moves.
      reader: of what moves, the operation that reads it.
      value: the type of the value that moves, or of the largest result.
      src, dst: placements of what moves, as text.
      moves: its collectives.
      devices: that compute the same.
      cut: of work, the dimension with most padding.
      dtype: that it computes in.
      computes: seconds that the matrix units are busy.
      eqn: the equation.
    """

    reason: Reason
    of: tuple[str, ...]
    seconds: float
    hidden: float = 0.0
    wire: float = 0.0
    name: ValueName = field(default_factory=lambda: ValueName("value", ""))
    reader: ValueName | None = None
    value: str = ""
    src: str = ""
    dst: str = ""
    moves: Sequence[Collective] = ()
    devices: int = 1
    cut: UnevenCut | None = None
    dtype: str = ""
    computes: float = 0.0
    eqn: Eqn | None = None


def pieces_of(placed: PlacedProgram, known: Mapping[Var, ValueName] | None = None, times: int = 1) -> list[TimePiece]:
    """The pieces of a call, without its launch; their seconds add up to the rest.

    Args:
      placed: a program.
      known: as for `names_of`.
      times: its executions in one call.
    """
    walk = _Walk(placed, names_of(placed.boxed, placed.program, known))
    found = [piece for eqn, cost in walk.costs.items() for piece in walk.pieces(eqn, cost)]
    return [p if times == 1 else _repeated(p, times) for p in found]


def by_cost(pieces: Iterable[TimePiece]) -> list[list[TimePiece]]:
    """The pieces that are one cost together, the dearest first."""
    groups: dict[tuple[str, tuple[str, ...]], list[TimePiece]] = defaultdict(list)
    for piece in pieces:
        groups[piece.reason, piece.of].append(piece)
    found = [sorted(group, key=lambda p: -p.seconds) for group in groups.values()]
    return sorted((g for g in found if seconds_of(g) > 0), key=lambda g: -seconds_of(g))


def seconds_of(pieces: Iterable[TimePiece]) -> float:
    return math.fsum(p.seconds for p in pieces)


def _repeated(p: TimePiece, times: int) -> TimePiece:
    moves = [replace(c, bytes=c.bytes * times, count=c.count * times) for c in p.moves]
    parts = {name: getattr(p, name) * times for name in ("seconds", "hidden", "wire", "computes")}
    return replace(p, moves=moves, **parts)


class _Walk:
    """The equations of a program with their costs. `unsplit`: the operations that no rule splits."""

    def __init__(self, placed: PlacedProgram, names: Names) -> None:
        self.placements, self.mesh, self.names = placed.boxed.placements, placed.mesh, names
        self.costs = equation_costs(placed.boxed, placed.mesh)
        ruleless = set(placed.without_rule) if placed.mesh.size > 1 else set[Eqn]()
        self.unsplit = {names.operations[e] for e, cost in self.costs.items() if self.is_unsplit(e, cost, ruleless)}

    def is_unsplit(self, eqn: Eqn, cost: EquationCost, ruleless: set[Eqn]) -> bool:
        if eqn in ruleless:
            return True
        if eqn.primitive is box_p or not cost.time.compute or self.copies(eqn) < self.mesh.size or self.mesh.size == 1:
            return False
        rule = find_rule(operation_of(eqn))
        return not any(factor for factors in (*rule.operands, *rule.results) for factor in factors)

    def axes_used(self, eqn: Eqn) -> set[str]:
        """The axes along which devices hold something else of an operand or a result."""
        placements = [self.placements[v] for v in (*compat.variables(eqn.invars), *eqn.outvars)]
        return {a for p in placements for a in (*p.partial_axes, *(a for axes in p.splits.values() for a in axes))}

    def copies(self, eqn: Eqn) -> int:
        """The number of devices that compute the same."""
        used = self.axes_used(eqn)
        return math.prod(n for axis, n in self.mesh.axes if axis not in used)

    def cut(self, eqn: Eqn) -> UnevenCut | None:
        found: set[UnevenCut] = set()
        for v in (*compat.variables(eqn.invars), *eqn.outvars):
            for dim, axes in self.placements[v].splits.items():
                found.add(UnevenCut(v.aval.shape[dim], math.prod(self.mesh.sizes[a] for a in axes), tuple(axes)))
        return max((c for c in found if c.size and c.padding), key=lambda c: c.padding, default=None)

    def pieces(self, eqn: Eqn, cost: EquationCost) -> Iterator[TimePiece]:
        time, name = cost.time, self.names.operations[eqn]
        moves = [c for c in cost.collectives if c.bytes]
        hidden = cost.hidden + time.overlapped
        if time.moving:  # it is 0 in branches that are not counted
            reason, of, reader = self.why_moved(eqn, name, moves)
            src, dst = ("", "") if eqn.primitive is not box_p else self.ends(eqn)
            value = max(moves, key=lambda c: c.bytes).value if moves else ""
            wire = self.wire(eqn) * moves[0].count if eqn.primitive is box_p and moves else 0.0
            yield TimePiece(
                reason, of, time.moving - hidden, hidden, wire, name, reader, value, src, dst, moves, self.mesh.size,
                eqn=eqn,
            )  # fmt: skip
        if time.host:
            yield TimePiece("host", (), time.host, name=name, value=short_aval(eqn.outvars[0].aval), eqn=eqn)
        if time.computing:
            yield self.work(eqn, name, cost)

    def wire(self, eqn: Eqn) -> float:
        """Seconds that the links are busy with the bytes of one boxing."""
        return sum(price.wire for price in boxing_of(eqn, self.mesh).prices) / FEMTO

    def ends(self, eqn: Eqn) -> tuple[str, str]:
        src, dst = (str(in_whole_axes(eqn.params[end], self.mesh)) for end in ("src", "dst"))
        return src, dst

    def why_moved(
        self, eqn: Eqn, name: ValueName, moves: Sequence[Collective]
    ) -> tuple[Reason, tuple[str, ...], ValueName | None]:
        """Why something moves, the cost that it belongs to, and who reads it."""
        axes = tuple(dict.fromkeys(a for c in moves for a in c.axes))
        if eqn.primitive is not box_p:
            return ("unsplit", (name.word,), None) if name in self.unsplit else ("window", axes, None)
        reader = next((u.reader for u in self.names.uses[eqn.outvars[0]]), None)
        for operation in (name.original, reader):
            if operation in self.unsplit:
                return "unsplit", (operation.word,), reader
        src, dst = eqn.params["src"], eqn.params["dst"]
        if src.partial_axes != dst.partial_axes:
            return "sum", axes, reader
        if name.original.kind == "argument":
            return "argument", axes, reader
        if reader is not None and reader.kind == "result":
            return "result", axes, reader
        if reader is not None and reader.word in ("constrain", "sharding_constraint"):
            return "constraint", axes, reader
        return "value", axes, reader

    def work(self, eqn: Eqn, name: ValueName, cost: EquationCost) -> TimePiece:
        time, copies = cost.time, self.copies(eqn)
        largest = max(eqn.outvars, key=bytes_of, default=None)
        reason, of = self.why_computed(eqn, name, cost, copies)
        return TimePiece(
            reason, of, time.computing, name=name, value="" if largest is None else short_aval(largest.aval),
            devices=copies, cut=self.cut(eqn), dtype=str(work_dtype(eqn)), computes=time.compute, eqn=eqn,
        )  # fmt: skip

    def why_computed(
        self, eqn: Eqn, name: ValueName, cost: EquationCost, copies: int
    ) -> tuple[Reason, tuple[str, ...]]:
        if name in self.unsplit:
            return "unsplit", (name.word,)
        if cost.time.recompute:
            return "recomputed", ()
        if copies > 1:
            used = self.axes_used(eqn)
            return "repeated", tuple(a for a, n in self.mesh.axes if n > 1 and a not in used)
        return ("computing" if cost.time.compute else "memory"), ()
