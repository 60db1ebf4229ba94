"""The values of a plan by name: arguments and results by their paths, all others by the operation that makes them.

An operation's name is that of the scopes it stands in, which flax makes of its modules and `jax.named_scope` of what a
user says, and of its primitive: `GPT2/blocks_0/attn/q/dot_general`; that of a backward pass begins with `backward/`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr, Var
from shardc.errors import ArgumentError
from shardc.ir.box import Boxed, box_p
from shardc.ir.nested import bodies_of, trips_of
from shardc.ir.program import Program
from shardc.passes.place.problem import Nested, Node, Problem, Scope
from shardc.passes.trace.pins import matcher
from shardc.sbp.placement import Placement


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
    """A value where an operation reads it: its name, or seen from the value the reader's, and the way there."""

    name: str
    line: str
    aval: Any
    at: Placement
    way: tuple[Box, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Named:
    """A value of a plan.

    Attributes:
      kind: argument, result or value.
      name: its path, or the name of the operation that makes it.
      line: of the user's code; empty for an argument.
      aval: its type.
      placement: where it is made; of a result, where it leaves.
      node, port: where it stands in the placement problem.
      made_of: the operands of its operation; of a result, the value that leaves.
      uses: its readers.
    """

    kind: str
    name: str
    line: str
    aval: Any
    placement: Placement
    node: Node
    port: int
    made_of: Sequence[Use]
    uses: Sequence[Use]


@dataclass(frozen=True, slots=True)
class _Origin:
    """The content of a variable: whose value, by what boxings, and the lists of uses that its readers go into."""

    name: str
    line: str
    way: tuple[Box, ...] = ()
    uses: tuple[list[Use], ...] = ()


class _Finder:
    def __init__(self, boxed: Boxed) -> None:
        self.placements = boxed.placements
        self.found: list[Named] = []
        self._origin: dict[Var, _Origin] = {}

    def define(self, var: Var, origin: _Origin, at: tuple[Node, int], made_of: Sequence[Use] | None = None) -> None:
        """A value with its name, made at a port of a node; without `made_of` an argument."""
        uses: list[Use] = []
        kind = "argument" if made_of is None else "value"
        named = Named(kind, origin.name, origin.line, var.aval, self.placements[var], *at, made_of or (), uses)
        self.found.append(named)
        self._origin[var] = replace(origin, uses=(uses,))

    def read(self, atom: Atom, name: str, line: str) -> Use | None:
        """Notes a reader of a value. Gives the value as that sees it; None for a literal."""
        if compat.is_literal(atom):
            return None
        origin, at = self._origin[atom], self.placements[atom]
        for uses in origin.uses:
            uses.append(Use(name, line, atom.aval, at, origin.way))
        return Use(origin.name, origin.line, atom.aval, at, origin.way)

    def box(self, eqn: Eqn, times: int) -> None:
        atom = eqn.invars[0]
        origin = _Origin("a constant", "") if compat.is_literal(atom) else self._origin[atom]
        step = Box(eqn.params["src"], eqn.params["dst"], times, eqn.params["shared"])
        self._origin[eqn.outvars[0]] = replace(origin, way=(*origin.way, step))

    def walk(self, scope: Scope, jaxpr: Jaxpr, times: int, outer: tuple[str, ...], backward: bool) -> None:
        nodes = iter(scope.nodes)
        for eqn in jaxpr.eqns:
            if eqn.primitive is box_p:
                self.box(eqn, times)
                continue
            node, line = next(nodes), compat.source_line(eqn)
            scopes, back = compat.scopes_of(eqn)
            scopes, back = (*outer, *scopes), back or backward
            name = "/".join((*["backward"] * back, *scopes, eqn.primitive.name))
            made_of = [u for a in eqn.invars if (u := self.read(a, name, line)) is not None]
            if isinstance(node, Nested):
                self.bodies(eqn, node, times, scopes, back, line)
            for i, var in enumerate(eqn.outvars):
                at, port = (node.exits[i], -1) if isinstance(node, Nested) else (node, len(node.operands) + i)
                self.define(var, _Origin(name, line), (at, port), made_of)

    def bodies(self, eqn: Eqn, nested: Nested, times: int, scopes: tuple[str, ...], backward: bool, line: str) -> None:
        outside = {n: a for n, a in zip(nested.entries, eqn.invars, strict=True) if not compat.is_literal(a)}
        runs = times * trips_of(eqn)
        for k, (scope, body) in enumerate(zip(nested.scopes, bodies_of(eqn), strict=True)):
            for n, var in zip(nested.entries_into(k), body.invars, strict=True):
                origin = self._origin[outside[n]] if n in outside else _Origin("a constant", "")
                carried = len(n.operands) > 1  # what comes in is another value in every step
                self._origin[var] = _Origin(origin.name, origin.line, (), () if carried else origin.uses)
            self.walk(scope, body, runs, scopes, backward)
            for atom in body.outvars:
                self.read(atom, f"the end of a {eqn.primitive.name}", line)


def values_of(program: Program, problem: Problem, boxed: Boxed) -> list[Named]:
    """All values of a boxed program: arguments, what its operations make, results."""
    finder = _Finder(boxed)
    for path, node, var in zip(program.in_paths, problem.sources, boxed.jaxpr.invars, strict=True):
        finder.define(var, _Origin(path, ""), (node, -1))
    finder.walk(problem.scope, boxed.jaxpr, 1, (), False)
    for path, node, atom in zip(program.out_paths, problem.sinks, boxed.jaxpr.outvars, strict=True):
        use = finder.read(atom, f"result {path}".rstrip(), "")
        if use is not None:
            finder.found.append(Named("result", path or "result", use.line, use.aval, use.at, node, 0, (use,), ()))
    return finder.found


def find_values(values: Sequence[Named], pattern: str) -> list[Named]:
    """The values that a name means: of the ways to mean one the first that any value fits.

    A whole name; a pattern with `*`, which matches any text, `/` included, over names and lines, then over the ends of
    names; the end of a name; a part of one, from `/` to `/`; a line, `model.py:12`.

    Raises:
      ArgumentError: there is none.
    """
    glob, end, parts = matcher(pattern), matcher(f"*/{pattern}"), f"/{pattern.strip('/')}/"
    ways: tuple[Callable[[Named], object], ...] = (
        lambda v: pattern in (v.name, f"{v.kind} {v.name}"),
        lambda v: "*" in pattern and (glob.match(v.name) or glob.match(v.line)),
        lambda v: "*" in pattern and end.match(v.name),
        lambda v: f"/{v.name}/".endswith(parts),
        lambda v: parts in f"/{v.name}/",
        lambda v: v.line.startswith(f"{pattern} (") or v.line == pattern,
    )
    for fits in ways if pattern.strip("/") else ():
        found = [v for v in values if fits(v)]
        if found:
            return found
    raise ArgumentError(
        f"why={pattern!r}: no value of the plan has that name. Values are named by the path of an argument or result, "
        "by the scopes and the primitive of the operation that makes them, or by its line, model.py:12; `*` matches "
        f"any text.{_near(pattern, values)}"
    )


def _near(pattern: str, values: Sequence[Named]) -> str:
    """` Near are ...`: names, or lines, that look like it; some of the names if none does."""
    names = list(dict.fromkeys(v.name for v in values))
    lines = list(dict.fromkeys(v.line.partition(" (")[0] for v in values if v.line))
    word = pattern.replace("*", "").strip("/")
    near = difflib.get_close_matches(word, lines if re.search(r"\.py(:|$)", word) else names, n=3)
    if not near:  # a part of a name may be what is misspelt
        tails = {"/".join(n.split("/")[-k:]): n for n in names for k in range(1, word.count("/") + 3)}
        near = [tails[t] for t in difflib.get_close_matches(word, tails, n=3, cutoff=0.7)]
    some = near or names[:3]
    return f" {'Near are' if near else 'There are'} {', '.join(some)}."
