"""The equations of a plan in program order: module, source line, seconds, what moves at each, and why."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final

from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr, Var
from shardc.ir.box import box_p
from shardc.ir.collective import Collective
from shardc.ir.memory_move import is_memory_move
from shardc.ir.nested import NESTED, nested_bodies, trips_of
from shardc.ir.walk import all_eqns, bytes_of, short_aval
from shardc.passes.estimate.plan_cost import EquationCost, Time, equation_costs
from shardc.plan.plan import PlacedProgram
from shardc.report.tables import placement_text

_FUNCTION: Final = re.compile(r" \(([^()]*)\)$")
_EINSUM: Final = re.compile(r"[\w\s.,]*->[\w\s.]*")
"""The scope that `jnp.einsum` makes of its subscripts. It is no module: what is in it belongs to the caller."""


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


@dataclass(frozen=True, slots=True)
class Maker:
    """The maker of a value: an operation in its scopes; an argument, which has no line."""

    name: str
    line: str = ""
    names: tuple[str, ...] = ()
    backward: bool = False

    def __str__(self) -> str:
        return "/".join((*shown(self.names, self.line, self.backward), self.name))


def shown(names: tuple[str, ...], line: str, backward: bool) -> tuple[str, ...]:
    """The scopes of an equation as they are shown."""
    names = tuple(name for name in names if not _EINSUM.fullmatch(name))
    if not names and (found := _FUNCTION.search(line)):
        names = (found[1],)
    return (*["backward"] * backward, *names)


@dataclass(frozen=True)
class ProgramRows:
    """A program as rows.

    Attributes:
      rows: one for each point of time of `live_ranges`, in that order.
      makers: the maker of each value; of a copy that a boxing makes, that of the value itself.
      copies: the values that boxings and moves between the memories make.
    """

    rows: Sequence[EquationRow]
    makers: Mapping[Var, Maker]
    copies: Set[Var]

    def name(self, var: Var) -> str:
        """`GPT2/blocks_0/attn/dot_general`, `copy of argument params/w`."""
        return f"{'copy of ' * (var in self.copies)}{self.makers.get(var, 'a value of shardc')}"


def program_rows(placed: PlacedProgram) -> ProgramRows:
    """The rows of a placed program."""
    walk = _RowWalk(placed)
    rows = list(walk.body(placed.boxed.jaxpr, 1, (), False))
    return ProgramRows(rows, walk.makers, walk.copies)


def _copies(eqn: Eqn) -> bool:
    """Whether its result is a copy of its operand, elsewhere."""
    return eqn.primitive is box_p or is_memory_move(eqn)


def _operation(eqn: Eqn) -> str:
    return f"move to the {eqn.params['to']}" if is_memory_move(eqn) else eqn.primitive.name


class _RowWalk:
    """The walk from the first equation to the last.

    Attributes:
      makers: the maker of each value so far.
      readers: the first equation that reads each value.
      copies: the values that boxings and moves between the memories make.
      costs: by equation.
    """

    def __init__(self, placed: PlacedProgram) -> None:
        jaxpr = placed.boxed.jaxpr
        self.placements = placed.boxed.placements
        self.costs = equation_costs(placed.boxed, placed.mesh)
        paths = zip(placed.program.in_paths, jaxpr.invars, strict=False)
        self.makers = {v: Maker(f"argument {path}") for path, v in paths}
        self.readers: dict[Var, Eqn] = {}
        for eqn in all_eqns(jaxpr):
            for v in compat.variables(eqn.invars):
                self.readers.setdefault(v, eqn)
        self.copies = set[Var]()
        self.makes: dict[tuple[object, int], str] = {}

    def body(self, jaxpr: Jaxpr, count: int, outer: tuple[str, ...], back: bool) -> Iterator[EquationRow]:
        for eqn in jaxpr.eqns:
            names, line, backward = self.place(eqn, outer, back)
            scopes = shown(names, line, backward)
            for body in nested_bodies(eqn) if eqn.primitive.name in NESTED else ():
                self.makers |= {v: self.maker(a) for v, a in body.given(eqn)}
                yield EquationRow(scopes, line, "", 0, Time())
                yield from self.body(body.jaxpr, count * trips_of(eqn), names, backward)
            yield self.row(eqn, scopes, line, count)
            if not _copies(eqn):
                made = Maker(eqn.primitive.name, line, names, backward)
                self.makers |= dict.fromkeys(eqn.outvars, made)
            else:
                self.makers[eqn.outvars[0]] = self.maker(eqn.invars[0])
                self.copies.add(eqn.outvars[0])

    def maker(self, atom: Atom) -> Maker:
        return Maker("a constant") if compat.is_literal(atom) else self.makers[atom]

    def place(self, eqn: Eqn, outer: tuple[str, ...], back: bool) -> tuple[tuple[str, ...], str, bool]:
        """The names of an equation's scopes, its line, and whether it is in a backward pass. A boxing, or a move
        between the memories, stands where its value is made; where that is an argument, with its reader."""
        if _copies(eqn):
            made = self.maker(eqn.invars[0])
            if made.line or (reader := self.reader(eqn)) is None:
                return made.names, made.line or eqn.params["source"], made.backward
            return self.place(reader, outer, back)
        names, backward = compat.scopes_of(eqn)
        return (*outer, *names), compat.source_line(eqn), backward or back

    def reader(self, eqn: Eqn) -> Eqn | None:
        """The operation that reads the result of a copy first; None if it is a result of its body."""
        found = self.readers.get(eqn.outvars[0])
        while found is not None and _copies(found):
            found = self.readers.get(found.outvars[0])
        return found

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
            self.makes[key] = f"{short_aval(v.aval)} at {placement_text(placement)}"
        return self.makes[key]

    def why(self, eqn: Eqn) -> str:
        """`dot_general leaves it at {model: P(sum)}; add reads it at B`."""
        made, reader = self.maker(eqn.invars[0]), self.reader(eqn)
        leaves = f"{made.name} leaves it" if made.line else f"{made.name} is"
        if not compat.is_literal(eqn.invars[0]) and eqn.invars[0] in self.copies:
            leaves = f"a copy of what {made.name} makes is" if made.line else f"a copy of {made.name} is"
        reads = "it leaves the program, or its loop," if reader is None else f"{reader.primitive.name} reads it"
        src, dst = placement_text(eqn.params["src"]), placement_text(eqn.params["dst"])
        return f"{leaves} at {src}; {reads} at {dst}"
