"""The equations of a plan in program order: module, source line, seconds, what moves at each, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardc import compat
from shardc.compat import Eqn, Jaxpr, Var
from shardc.ir.box import box_p
from shardc.ir.collective import Collective
from shardc.ir.memory_move import is_memory_move
from shardc.ir.nested import nested_bodies
from shardc.ir.walk import bytes_of, short_aval
from shardc.passes.estimate.plan_cost import EquationCost, Time, equation_costs
from shardc.plan.names import Names, ValueName, copies, names_of
from shardc.plan.plan import PlacedProgram
from shardc.report.tables import placement_text


@dataclass(frozen=True, slots=True)
class EquationRow:
    """One equation, or a point before the body of one, where nothing is computed.

    Attributes:
      scopes: names of its modules, `backward` first if it is of a backward pass; the function that it is in, if the
        program names no scope.
      line: of the user's code.
      operation: the primitive, or where a move between the memories goes; empty for a point before a body.
      count: executions in one call.
      time: of all of them.
      collectives: that it takes.
      makes: type and placement of its largest result.
      size: bytes of that on all devices together.
      why: for a boxing, who makes the value and who reads it, each with its placement.
    """

    scopes: tuple[str, ...]
    line: str
    operation: str
    count: int
    time: Time
    collectives: Sequence[Collective] = ()
    makes: str = ""
    size: int = 0
    why: str = ""


@dataclass(frozen=True)
class ProgramRows:
    """A program as rows.

    Attributes:
      rows: one for each point of time of `live_ranges`, in that order.
      names: of every variable.
    """

    rows: Sequence[EquationRow]
    names: Mapping[Var, ValueName]


def program_rows(placed: PlacedProgram, known: Mapping[Var, ValueName] | None = None) -> ProgramRows:
    """The rows of a placed program; `known`: as for `names_of`."""
    names = names_of(placed.boxed, placed.program, known)
    return ProgramRows(list(_RowWalk(placed, names).body(placed.boxed.jaxpr, 1)), names.values)


def _operation(eqn: Eqn) -> str:
    return f"move to the {eqn.params['to']}" if is_memory_move(eqn) else eqn.primitive.name


class _RowWalk:
    """The walk from the first equation to the last. `costs`: by equation."""

    def __init__(self, placed: PlacedProgram, names: Names) -> None:
        self.placements, self.names = placed.boxed.placements, names
        self.mesh, self.costs = placed.mesh, equation_costs(placed.boxed, placed.mesh)
        self.makes: dict[tuple[object, int], str] = {}

    def body(self, jaxpr: Jaxpr, count: int) -> Iterator[EquationRow]:
        for eqn in jaxpr.eqns:
            place = self.place(eqn)
            scopes, line = place.modules, place.line or (eqn.params.get("source", "") if copies(eqn) else "")
            for body in nested_bodies(eqn):
                yield EquationRow(scopes, line, "", 0, Time())
                yield from self.body(body.jaxpr, count * body.trips)
            yield self.row(eqn, scopes, line, count)

    def place(self, eqn: Eqn) -> ValueName:
        """The operation in whose modules an equation stands: for a copy the one that makes the value; where that is an
        argument, its reader."""
        name = self.names.operations[eqn]
        return name if name.line or not copies(eqn) else self.reader(eqn) or name

    def reader(self, eqn: Eqn) -> ValueName | None:
        """The operation that reads the result of a copy first; None if it is a result of its body."""
        uses = self.names.uses[eqn.outvars[0]]
        return uses[0].reader if uses and uses[0].reader.kind == "value" else None

    def row(self, eqn: Eqn, scopes: tuple[str, ...], line: str, count: int) -> EquationRow:
        cost = self.costs.get(eqn) or EquationCost(Time(), ())
        largest = max(eqn.outvars, key=bytes_of, default=None)
        return EquationRow(
            scopes, line, _operation(eqn), count, cost.time, [c for c in cost.collectives if c.bytes],
            "" if largest is None else self.made_text(largest), 0 if largest is None else bytes_of(largest),
            self.why(eqn) if eqn.primitive is box_p else f"{eqn.primitive.name} needs pieces of other devices",
        )  # fmt: skip

    def made_text(self, v: Var) -> str:
        placement = self.placements[v]
        key = v.aval, id(placement)
        if key not in self.makes:
            self.makes[key] = f"{short_aval(v.aval)} at {placement_text(placement, self.mesh)}"
        return self.makes[key]

    def why(self, eqn: Eqn) -> str:
        """`dot_general leaves it at {model: P(sum)}; add reads it at B`."""
        name, atom, reader = self.names.operations[eqn], eqn.invars[0], self.reader(eqn)
        is_made = name.kind == "value"
        made = name.word if is_made else str(name.original)
        leaves = f"{made} {'leaves it' if is_made else 'is'}"
        if not compat.is_literal(atom) and self.names.values[atom].is_copy:
            leaves = f"a copy of {f'what {made} makes' if is_made else made} is"
        reads = "it leaves the program, or its loop," if reader is None else f"{reader.word} reads it"
        src, dst = (placement_text(eqn.params[end], self.mesh) for end in ("src", "dst"))
        return f"{leaves} at {src}; {reads} at {dst}"
