"""Nested equations: loops, branches and remats, whose bodies are planned in place.

Where one of these keeps its bodies, and how it counts its operands, depends on JAX's version.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from shardc.compat import Atom, Eqn, Jaxpr, Var, close, rounds_of, scan_counts, with_scan_counts

REMAT: Final = ("remat2", "checkpoint", "remat")


NESTED: Final = {
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
    **dict.fromkeys(REMAT, ("jaxpr",)),
    "optimization_barrier": (),
}
"""By primitive, the parameters that hold its bodies. These primitives are planned in place, operand by operand."""


def bodies_of(eqn: Eqn) -> list[Jaxpr]:
    """The bodies of a nested equation, in order; empty for other equations."""
    found: list[Jaxpr] = []
    for key in NESTED.get(eqn.primitive.name, ()):
        body = eqn.params[key]
        found += [getattr(b, "jaxpr", b) for b in (body if isinstance(body, tuple) else (body,))]
    return found


def with_bodies(eqn: Eqn, bodies: Iterable[Jaxpr]) -> dict[str, Any]:
    """The parameters of a nested equation with other bodies, which have the same numbers of inputs and outputs."""
    rest, params = iter(bodies), dict(eqn.params)

    def like(old: Any) -> Any:
        body = next(rest)
        return close(body) if hasattr(old, "consts") else body

    for key in NESTED.get(eqn.primitive.name, ()):
        old = params[key]
        params[key] = tuple(map(like, old)) if isinstance(old, tuple) else like(old)
    return params


def trips_of(eqn: Eqn) -> int:
    """How often one run of an equation runs its bodies: the length of a scan; the expected rounds of a `while`, 1 if
    they are unknown; 1 for other equations."""
    name = eqn.primitive.name
    return eqn.params["length"] if name == "scan" else (rounds_of(eqn) or 1) if name == "while" else 1


@dataclass(frozen=True, slots=True, eq=False)
class Body:
    """One body of a nested equation, and how its values are linked with those outside.

    Its inputs are, in this order: values that are the same in every round (`fixed`; all inputs of a remat and of a
    branch), carries, which take a result of the round before, and rows of stacks.

    Attributes:
      jaxpr: the body.
      operands: for each input, the number of the operand that it takes.
      results: for each output, the number of the result that it gives; empty for the condition of a `while`.
      fixed, carries: numbers of inputs. Output j is the next value of carry j.
      trips: executions in one of the equation, as `trips_of` counts them.
    """

    jaxpr: Jaxpr
    operands: range | tuple[int, ...]
    results: range
    fixed: int
    carries: int = 0
    trips: int = 1

    @property
    def decides(self) -> bool:
        """Whether it is the condition of a `while`."""
        return bool(self.jaxpr.outvars) and not self.results

    @property
    def rows_at(self) -> int:
        """Index of the first input that is a row of a stacked operand (of the `xs` of a scan)."""
        return self.fixed + self.carries

    @property
    def carried(self) -> range | tuple[int, ...]:
        """The numbers of the operands that carries begin with."""
        return self.operands[self.fixed : self.rows_at]

    @property
    def inputs(self) -> list[tuple[Var, int]]:
        """Each input, and the number of the operand that it takes."""
        return list(zip(self.jaxpr.invars, self.operands, strict=True))

    def given(self, eqn: Eqn) -> list[tuple[Var, Atom]]:
        """Each input, and the operand that it takes."""
        return [(v, eqn.invars[n]) for v, n in self.inputs]

    def unchanged(self, eqn: Eqn) -> list[tuple[Var, Atom]]:
        """The inputs that are the same in every round, and their operands."""
        return self.given(eqn)[: self.fixed]


def nested_bodies(eqn: Eqn) -> list[Body]:
    """The bodies of a nested equation, in order; empty for other equations."""
    operands, results = range(len(eqn.invars)), range(len(eqn.outvars))
    match eqn.primitive.name:
        case "scan":
            scan = scan_of(eqn)
            return [Body(scan.body, operands, results, scan.consts, scan.carries, scan.length)]
        case "while":
            loop, trips = while_of(eqn), trips_of(eqn)
            first, carried = operands[: loop.cond_consts], operands[loop.carries_at :]
            return [
                Body(loop.cond, (*first, *carried), range(0), len(first), len(carried), trips),
                Body(loop.body, operands[len(first) :], results, loop.body_consts, len(carried), trips),
            ]
        case "cond":
            operands = operands[1:]
        case _:
            pass
    return [Body(b, operands, results, len(operands)) for b in bodies_of(eqn)]


def with_nested(eqn: Eqn, bodies: Sequence[Jaxpr], fixed: Sequence[int], carries: int) -> dict[str, Any]:
    """The parameters of a nested equation with other bodies, of which those of loops have other numbers of inputs."""
    match eqn.primitive.name:
        case "scan":
            return scan_params(eqn, bodies[0], fixed[0], carries)
        case "while":
            counts = {"cond_nconsts": fixed[0], "body_nconsts": fixed[1]}
            return with_bodies(eqn, bodies) | counts
        case _:
            return with_bodies(eqn, bodies)


@dataclass(frozen=True, slots=True)
class Scan:
    """A scan: its operands are constants, carries and stacked rows; its results are carries and stacked rows.

    Attributes:
      body: takes constants, carries and one row of each stack; gives carries and one row of each stack.
      consts, carries: numbers of operands.
      length: number of rounds.
      reverse: whether it begins with the last row.
      unroll: rounds in one iteration of the compiled loop, as `jax.lax.scan` takes it.
    """

    body: Jaxpr
    consts: int
    carries: int
    length: int
    reverse: bool
    unroll: Any

    @property
    def rows_at(self) -> int:
        """Number of the first operand that is a stack of rows."""
        return self.consts + self.carries


def scan_of(eqn: Eqn) -> Scan:
    """The view of a scan equation."""
    p = eqn.params
    consts, carries = scan_counts(p)
    return Scan(p["jaxpr"].jaxpr, consts, carries, p["length"], p["reverse"], p["unroll"])


def scan_params(eqn: Eqn, body: Jaxpr, consts: int, carries: int, length: int | None = None) -> dict[str, Any]:
    """The parameters of a scan like `eqn` with another body, other numbers of operands, or another length."""
    params = {**eqn.params, "jaxpr": close(body)}
    if length is not None:
        params["length"] = length
    if "linear" in params:
        params["linear"] = (False,) * len(body.invars)
    return params | with_scan_counts(params, consts, carries, (len(body.invars), len(body.outvars)))


@dataclass(frozen=True, slots=True)
class While:
    """A while loop: its operands are constants of the condition, constants of the body, and carries."""

    cond: Jaxpr
    body: Jaxpr
    cond_consts: int
    body_consts: int

    @property
    def carries_at(self) -> int:
        """Number of the first operand that is a carry."""
        return self.cond_consts + self.body_consts


def while_of(eqn: Eqn) -> While:
    """The view of a while equation."""
    p = eqn.params
    return While(p["cond_jaxpr"].jaxpr, p["body_jaxpr"].jaxpr, p["cond_nconsts"], p["body_nconsts"])


def is_recompute(eqn: Eqn) -> bool:
    """Whether a remat is in a backward pass, where its body runs again."""
    return bool(eqn.params["differentiated"])


def is_kept_apart(eqn: Eqn) -> bool:
    """Whether a remat in a backward pass shares no results with the forward pass: its operands pass a barrier."""
    return is_recompute(eqn) and bool(eqn.params["prevent_cse"])
