"""A boxed program as rows: for each operation where it reads its operands, by which boxings, and where it makes its
results. Rows are in the order of the canonical program, those of a body behind the operation that has it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr, Var
from shardc.ir.box import box_p
from shardc.ir.nested import bodies_of
from shardc.ir.walk import short_aval
from shardc.passes.place.problem import Node, Problem, Scope
from shardc.sbp.placement import REPLICATED, Placement

Path: TypeAlias = tuple[Placement, ...]
"""The way of a value to one reader: a placement that it has already, then where each boxing takes it."""

BEGIN, END = "{", "}"
"""The texts of the rows around a body. The end of the program is a row, too."""


class Row(NamedTuple):
    """An operation of a boxed program, or the begin or end of a body.

    Attributes:
      text: of the operation, `dot_general f32[8,4] f32[4,2] -> f32[8,2]`; or BEGIN, END.
      reads: for each operand its path; at the end of a body those of its results.
      makes: the placement of each result; at the begin of a body those of its inputs.
    """

    text: str
    reads: tuple[Path, ...]
    makes: tuple[Placement, ...]

    @property
    def is_operation(self) -> bool:
        return self.text not in (BEGIN, END)

    @property
    def at(self) -> tuple[Placement, ...]:
        """The placements of operands and results."""
        return (*(path[-1] for path in self.reads), *self.makes)


def rows_of(eqns: Sequence[Eqn], outputs: Sequence[Atom], placements: Mapping[Var, Placement]) -> list[Row]:
    """The rows of equations, and the end row with the ways to `outputs`."""
    rows: list[Row] = []
    boxes: dict[Var, Eqn] = {}

    def path_to(atom: Atom) -> Path:
        path = [REPLICATED if compat.is_literal(atom) else placements[atom]]
        while not compat.is_literal(atom) and atom in boxes:
            box = boxes.pop(atom)
            path.insert(0, box.params["src"])
            atom = box.invars[0]
        return tuple(path)

    for eqn in eqns:
        if eqn.primitive is box_p:
            boxes[eqn.outvars[0]] = eqn
            continue
        made = tuple(placements[v] for v in eqn.outvars)
        rows.append(Row(operation_text(eqn), tuple(map(path_to, eqn.invars)), made))
        for body in bodies_of(eqn):
            rows.append(Row(BEGIN, (), tuple(placements[v] for v in body.invars)))
            rows += rows_of(body.eqns, body.outvars, placements)
    return [*rows, Row(END, tuple(map(path_to, outputs)), ())]


def ports_in(problem: Problem, inputs: Sequence[Placement], rows: Iterable[Row]) -> dict[Node, dict[int, Placement]]:
    """The placement at each port of each node of a problem but its holds.

    Args:
      problem: the problem.
      inputs: the placements of the program's inputs.
      rows: of the program.
    """
    ports = _Ports(iter(rows))
    ports.note([(n, -1) for n in problem.sources], inputs)
    ports.scope(problem.scope, [(n, 0) for n in problem.sinks])
    return ports.found


class _Ports:
    def __init__(self, rows: Iterator[Row]) -> None:
        self.rows = rows
        self.found: dict[Node, dict[int, Placement]] = {}

    def note(self, ports: Iterable[tuple[Node, int]], placements: Iterable[Placement]) -> None:
        for (node, port), placement in zip(ports, placements, strict=False):  # a while's condition is read by nobody
            self.found.setdefault(node, {})[port] = placement

    def scope(self, scope: Scope, returns: Sequence[tuple[Node, int]]) -> None:
        for node in scope.nodes:
            row = next(self.rows)
            if isinstance(node, Node):
                self.note([(node, port) for port in range(len(row.at))], row.at)
                continue
            self.note([*((n, 0) for n in node.entries), *((n, -1) for n in node.exits)], row.at)
            for k, inner in enumerate(node.scopes):
                self.note([(n, len(n.operands)) for n in node.entries_into(k)], next(self.rows).makes)
                self.scope(inner, node.returns[k])
        self.note(returns, next(self.rows).at)


def placement_word(placement: Placement) -> str:
    """A placement; the one that names no axis is `B`."""
    return str(placement) if placement else "B"


def operation_text(eqn: Eqn) -> str:
    """`dot_general f32[8,4] f32[4,2] -> f32[8,2]`."""
    sides = (" ".join(short_aval(a.aval) for a in side) for side in (eqn.invars, eqn.outvars))
    return " ".join(filter(None, (eqn.primitive.name, " -> ".join(sides))))


def rows_before_placing(jaxpr: Jaxpr) -> list[Row]:
    """The rows of a program that is not placed: all at `B`."""
    return rows_of(jaxpr.eqns, jaxpr.outvars, defaultdict(lambda: REPLICATED))
