"""The names of the values of a plan, the same in every report: an argument or result has its path, any other value the
name of the operation that makes it.

An operation is named by its modules and its primitive, `GPT2/blocks_0/attn/q/dot_general`; in a backward pass its name
begins with `backward/`. Modules are the scopes that flax makes, and those of `jax.named_scope`. The scope that einsum
makes of its subscripts is none. An operation outside of modules has the name of its function, `step/add`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr, Var
from shardc.ir.box import Boxed, box_p
from shardc.ir.memory_move import is_memory_move
from shardc.ir.nested import Body, nested_bodies
from shardc.ir.program import Program
from shardc.ir.walk import is_narrow_copy
from shardc.sbp.placement import Placement

_FUNCTION: Final = re.compile(r" \(([^()]*)\)$")
_EINSUM: Final = re.compile(r"[\w\s.,]*->[\w\s.]*")


@dataclass(frozen=True, slots=True)
class ValueName:
    """The name of a value, or of an operation.

    Attributes:
      kind: argument, result, value, a constant; of what reads a value also "the end of" a body.
      word: the path of an argument or result, else the primitive.
      line: of the user's code; empty for an argument.
      scopes: the operation's, as JAX has them.
      backward: whether it is in a backward pass.
      is_copy: whether it is a copy of the value, which a boxing or a move between the memories makes.
    """

    kind: str
    word: str
    line: str = ""
    scopes: tuple[str, ...] = ()
    backward: bool = False
    is_copy: bool = False

    def __str__(self) -> str:
        text = "/".join((*self.modules, self.word)) if self.kind == "value" else f"{self.kind} {self.word}".rstrip()
        return f"copy of {text}" if self.is_copy else text

    @property
    def original(self) -> ValueName:
        """The name of the value, if this is a copy of it."""
        return replace(self, is_copy=False) if self.is_copy else self

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of its modules, outermost first, after `backward`; without modules that of its function."""
        names = tuple(name for name in self.scopes if not _EINSUM.fullmatch(name))
        if not names and (function := _FUNCTION.search(self.line)):
            names = (function[1],)
        return (*["backward"] * self.backward, *names)

    @property
    def spellings(self) -> tuple[str, ...]:
        """The texts that mean it: the path; or its name, and that with all scopes that JAX has, and these alone."""
        if self.kind != "value":
            return (self.word or self.kind,)
        return str(self), "/".join((*["backward"] * self.backward, *self.scopes, self.word))


@dataclass(frozen=True, slots=True)
class Box:
    """A boxing on the way from a value to a reader, that runs `times` in one call, and `shared` of them count as
    starting as one."""

    src: Placement
    dst: Placement
    times: int
    shared: int


@dataclass(frozen=True, slots=True)
class Use:
    """A value where an operation, or a result, reads it, and the way there."""

    value: ValueName
    reader: ValueName
    aval: Any
    at: Placement
    way: tuple[Box, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Names:
    """The names in a boxed program.

    Attributes:
      values: of every variable, those of nested bodies included.
      operations: of every equation; of one that copies that of the copy.
      made_of: for each argument, and each value that an operation makes, the operands of that.
      uses: the readers of each variable, with those of its copies.
      results: the values that leave; None: a literal.
    """

    values: dict[Var, ValueName] = field(default_factory=dict[Var, ValueName])
    operations: dict[Eqn, ValueName] = field(default_factory=dict[Eqn, ValueName])
    made_of: dict[Var, Sequence[Use]] = field(default_factory=dict[Var, Sequence[Use]])
    uses: dict[Var, list[Use]] = field(default_factory=lambda: defaultdict[Var, list[Use]](list))
    results: list[Use | None] = field(default_factory=list["Use | None"])


def names_of(boxed: Boxed, program: Program, known: Mapping[Var, ValueName] | None = None) -> Names:
    """The names in a boxed program.

    Args:
      boxed: with its boxings and moves between the memories.
      program: has the paths of its arguments and results.
      known: names that some variables have already, as in a part of a named program.
    """
    walk = _NameWalk(boxed.placements, known or {})
    for path, var in zip(program.in_paths, boxed.jaxpr.invars, strict=True):
        walk.define(var, walk.known.get(var) or ValueName("argument", path), ())
    walk.body(boxed.jaxpr, 1, ValueName("value", ""))
    readers = [ValueName("result", path) for path in program.out_paths]
    walk.found.results.extend(map(walk.read, boxed.jaxpr.outvars, readers))
    return walk.found


def copies(eqn: Eqn) -> bool:
    """Whether its result is a copy of its operand, elsewhere or in the type in which the machine multiplies."""
    return eqn.primitive is box_p or is_memory_move(eqn) or is_narrow_copy(eqn)


class _NameWalk:
    """The walk over a program. For each variable so far, `ways` has the boxings from its value to it, and all variables
    that are read where it is."""

    def __init__(self, placements: Mapping[Var, Placement], known: Mapping[Var, ValueName]) -> None:
        self.placements, self.known, self.found = placements, known, Names()
        self.ways: dict[Var, tuple[tuple[Box, ...], tuple[Var, ...]]] = {}

    def name(self, atom: Atom) -> ValueName:
        return ValueName("a constant", "") if compat.is_literal(atom) else self.found.values[atom]

    def way(self, atom: Atom) -> tuple[tuple[Box, ...], tuple[Var, ...]]:
        return ((), ()) if compat.is_literal(atom) else self.ways[atom]

    def define(self, var: Var, name: ValueName, made_of: Sequence[Use]) -> None:
        self.found.values[var], self.found.made_of[var], self.ways[var] = name, made_of, ((), (var,))

    def read(self, atom: Atom, reader: ValueName) -> Use | None:
        """Notes a reader of a value. None for a literal."""
        if compat.is_literal(atom):
            return None
        way, read = self.ways[atom]
        use = Use(self.name(atom).original, reader, atom.aval, self.placements[atom], way)
        for var in read:
            self.found.uses[var].append(use)
        return use

    def body(self, jaxpr: Jaxpr, times: int, outer: ValueName) -> None:
        for eqn in jaxpr.eqns:
            if copies(eqn):
                self.copy(eqn, times)
                continue
            name = self.found.operations[eqn] = self.operation(eqn, outer)
            made_of = [use for a in eqn.invars if (use := self.read(a, name)) is not None]
            for nested in nested_bodies(eqn):
                self.nested(eqn, nested, times, name)
            for var in eqn.outvars:
                self.define(var, name, made_of)

    def operation(self, eqn: Eqn, outer: ValueName) -> ValueName:
        if eqn.outvars and (known := self.known.get(eqn.outvars[0])):
            return known
        scopes, back = compat.scopes_of(eqn)
        line, inside = compat.source_line(eqn), (*outer.scopes, *scopes)
        return ValueName("value", eqn.primitive.name, line, inside, back or outer.backward)

    def copy(self, eqn: Eqn, times: int) -> None:
        source, (var,), made = eqn.invars[0], eqn.outvars, eqn.params
        step = [Box(made["src"], made["dst"], times, made["shared"])] if eqn.primitive is box_p else []
        way, read = self.way(source)
        self.found.values[var] = self.found.operations[eqn] = replace(self.name(source), is_copy=True)
        self.ways[var] = (*way, *step), (*read, var)

    def nested(self, eqn: Eqn, body: Body, times: int, name: ValueName) -> None:
        for i, (var, atom) in enumerate(body.given(eqn)):
            self.found.values[var] = self.name(atom)
            carried = body.fixed <= i < body.rows_at  # another value in every round
            self.ways[var] = (), (*(() if carried else self.way(atom)[1]), var)
        self.body(body.jaxpr, times * body.trips, name)
        for atom in body.jaxpr.outvars:
            self.read(atom, ValueName("the end of", str(name), name.line))
