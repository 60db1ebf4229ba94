"""Scans by the roles of their operands and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr, Var
from shardc.ir.nested import bodies_of, scan_params, trips_of
from shardc.ir.walk import reads_of


@dataclass(frozen=True, slots=True, eq=False)
class Carry:
    """A carry of a loop.

    Attributes:
      before, after: its value before and after a round, in the body.
      start, end: the operand that it begins with, and the result that it ends as.
    """

    before: Var
    after: Atom
    start: Atom
    end: Var


@dataclass(frozen=True, slots=True, eq=False)
class Loop:
    """A scan by roles. `dataclasses.replace` gives it other ones; `equation` is the scan that has them.

    Attributes:
      eqn: the scan that was read.
      consts: inputs of the body that are the same in every round, each with its operand.
      carries: the carries.
      rows: inputs of the body that are rows of stacks, each with its stack.
      stacks: results with one row of every round, each with this row.
      eqns: the equations of the body.
      length: the number of rounds.
    """

    eqn: Eqn
    consts: Mapping[Var, Atom]
    carries: Sequence[Carry]
    rows: Mapping[Var, Atom]
    stacks: Mapping[Var, Atom]
    eqns: Sequence[Eqn]
    length: int

    @classmethod
    def of(cls, eqn: Eqn) -> Loop:
        """The roles of a scan."""
        (body,), (consts, carries) = bodies_of(eqn), compat.scan_counts(eqn.params)
        given, made = list(zip(body.invars, eqn.invars, strict=True)), list(zip(eqn.outvars, body.outvars, strict=True))
        carried = zip(given[consts : consts + carries], made, strict=False)
        return cls(
            eqn, dict(given[:consts]), [Carry(v, after, start, end) for (v, start), (end, after) in carried],
            dict(given[consts + carries :]), dict(made[carries:]), body.eqns, trips_of(eqn),
        )  # fmt: skip

    @property
    def reverse(self) -> bool:
        """Whether it begins with the last row."""
        return self.eqn.params["reverse"]

    @property
    def operands(self) -> dict[Var, Atom]:
        """The inputs of the body, each with its operand, in order."""
        return {**self.consts, **{c.before: c.start for c in self.carries}, **self.rows}

    @property
    def results(self) -> dict[Var, Atom]:
        """The results, each with the body's output for it, in order."""
        return {**{c.end: c.after for c in self.carries}, **self.stacks}

    @property
    def body(self) -> Jaxpr:
        """A round."""
        return compat.new_jaxpr([*self.operands], [*self.results.values()], self.eqns, bodies_of(self.eqn)[0])

    def stack_of(self, v: Var) -> Var:
        """A new variable for the stack of a value that every round makes."""
        return compat.fresh_var(v.aval.update(shape=(self.length, *v.aval.shape)))

    def equation(self) -> Eqn:
        """The scan of these roles."""
        body = self.body
        params = scan_params(self.eqn, body, len(self.consts), len(self.carries), self.length)
        invars, outvars = [*self.operands.values()], [*self.results]
        return self.eqn.replace(invars=invars, outvars=outvars, params=params, effects=body.effects)

    def live(self) -> Loop:
        """The loop without equations that no result needs. It keeps its operands."""
        body = self.body
        return replace(self, eqns=compat.remove_dead(body, [True] * len(body.outvars)).eqns)

    def reading(self, eqns: Sequence[Eqn]) -> Loop:
        """The loop with these equations, and without constants and rows that neither they nor results read."""
        read = reads_of(eqns, self.results.values())
        consts, rows = ({v: a for v, a in role.items() if v in read} for role in (self.consts, self.rows))
        return replace(self, eqns=eqns, consts=consts, rows=rows)
