"""Nested equations: loops, branches and remats, whose bodies are planned in place.

Where one of these keeps its bodies, and how it counts its operands, depends on JAX's version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Sized
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, TypeVar

import jax

from shardc.compat import (
    Atom,
    Eqn,
    Jaxpr,
    Var,
    close,
    is_expected,
    rounds_of,
    scan_counts,
    scope_of_rounds,
    with_scan_counts,
)  # fmt: skip
from shardc.errors import ArgumentError

T = TypeVar("T")

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


def in_bodies(eqn: Eqn, change: Callable[[Jaxpr], Jaxpr]) -> Eqn:
    """A nested equation after a change of each of its bodies; itself if none is another object."""
    bodies = bodies_of(eqn)
    changed = [change(b) for b in bodies]
    same = all(new is old for new, old in zip(changed, bodies, strict=True))
    return eqn if same else eqn.replace(params=with_bodies(eqn, changed))


def trips_of(eqn: Eqn) -> int:
    """How often one run of an equation runs its bodies: the length of a scan; the expected rounds of a `while`, 1 if
    they are unknown; 1 for other equations."""
    name = eqn.primitive.name
    return eqn.params["length"] if name == "scan" else (rounds_of(eqn) or 1) if name == "while" else 1


def trips(n: int) -> AbstractContextManager[Any]:
    """State the expected number of rounds of a `while_loop`, for plans. Without it plans count one round.

    It holds for the loops that are traced inside it, also in the bodies of scans, conditions and remat, but not for
    loops in the body of such a loop. Of two nested contexts the inner one holds. It does not change any result.

    Args:
      n: rounds in one run of the loop, at least one.

    Returns:
      A context, which is a decorator as well.

    Raises:
      ArgumentError: `n` is no positive integer.

    Examples:
      >>> import jax
      >>> def doubled(x):
      ...     with trips(128):
      ...         return jax.lax.while_loop(lambda x: x < 100.0, lambda x: 2 * x, x)
      >>> float(doubled(1.0))
      128.0
    """
    if type(n) is not int or n < 1:
        raise ArgumentError(f"trips: {n!r} is no number of rounds; write a positive integer: with shardc.trips(128):")
    return jax.named_scope(scope_of_rounds(n))


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
      chance: that the body runs at all, for the search; 1 where nothing is known.
    """

    jaxpr: Jaxpr
    operands: range | tuple[int, ...]
    results: range
    fixed: int
    carries: int = 0
    trips: int = 1
    chance: float = 1.0

    @property
    def runs(self) -> float:
        """Executions in one of the equation, for the search."""
        return self.trips * self.chance

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
    def befores(self) -> Sequence[Var]:
        """The inputs that are carries."""
        return self.jaxpr.invars[self.fixed : self.rows_at]

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

    def rows(self, eqn: Eqn) -> list[tuple[Var, Atom]]:
        """The inputs that are rows, and their stacks."""
        return self.given(eqn)[self.rows_at :]


def nested_bodies(eqn: Eqn) -> list[Body]:
    """The bodies of a nested equation, in order; empty for other equations."""
    operands, results = range(len(eqn.invars)), range(len(eqn.outvars))
    match eqn.primitive.name:
        case "scan":
            return [Body(bodies_of(eqn)[0], operands, results, *scan_counts(eqn.params), trips_of(eqn))]
        case "while":
            loop, trips = while_of(eqn), trips_of(eqn)
            first, then, carried = parted(operands, loop.cond_consts, loop.body_consts, loop.carries)
            return [
                Body(loop.cond, (*first, *carried), range(0), len(first), len(carried), trips),
                Body(loop.body, (*then, *carried), results, len(then), len(carried), trips),
            ]
        case "cond":
            operands = operands[1:]
        case _:
            pass
    chances = chances_of(eqn)
    return [Body(b, operands, results, len(operands), chance=p) for b, p in zip(bodies_of(eqn), chances, strict=True)]


UNLIKELY: Final = 2.0**-6
"""The chance of a branch of a `cond` that is not expected to run: the search counts it, and exchanges of sorted rows
are made so large that they overflow no more often by chance."""


def chances_of(eqn: Eqn) -> list[float]:
    """For each body of an equation the chance that the search counts for it."""
    count = len(bodies_of(eqn))
    return [*[UNLIKELY] * (count - 1), 1.0] if is_expected(eqn) else [1.0] * count


def with_nested(eqn: Eqn, bodies: Sequence[Jaxpr], fixed: Sequence[int], carries: int) -> dict[str, Any]:
    """The parameters of a nested equation with other bodies, of which those of loops have other numbers of inputs."""
    match eqn.primitive.name:
        case "scan":
            return scan_params(eqn, bodies[0], fixed[0], carries, trips_of(eqn))
        case "while":
            counts = {"cond_nconsts": fixed[0], "body_nconsts": fixed[1]}
            return with_bodies(eqn, bodies) | counts
        case _:
            return with_bodies(eqn, bodies)


def scan_params(eqn: Eqn, body: Jaxpr, consts: int, carries: int, length: int) -> dict[str, Any]:
    """The parameters of a scan like `eqn` with another body, other numbers of operands, and another length."""
    params = {**eqn.params, "jaxpr": close(body), "length": length}
    if "linear" in params:
        params["linear"] = (False,) * len(body.invars)
    return params | with_scan_counts(params, consts, carries, (len(body.invars), len(body.outvars)))


@dataclass(frozen=True, slots=True)
class While:
    """A while loop: its condition, its body, and by role its operands: constants of each, and carries."""

    cond: Jaxpr
    body: Jaxpr
    cond_consts: Sequence[Atom]
    body_consts: Sequence[Atom]
    carries: Sequence[Atom]


def while_of(eqn: Eqn) -> While:
    """The view of a while equation."""
    (cond, body), first, then = bodies_of(eqn), eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    return While(cond, body, eqn.invars[:first], eqn.invars[first : first + then], eqn.invars[first + then :])


def parted(values: Iterable[T], *roles: Sized) -> tuple[list[T], ...]:
    """Values that stand one after the other, in lists as long as these roles."""
    rest = iter(values)
    return tuple(list(islice(rest, len(role))) for role in roles)


def is_recompute(eqn: Eqn) -> bool:
    """Whether a remat is in a backward pass, where its body runs again."""
    return bool(eqn.params["differentiated"])


def is_kept_apart(eqn: Eqn) -> bool:
    """Whether a remat in a backward pass shares no results with the forward pass: its operands pass a barrier."""
    return is_recompute(eqn) and bool(eqn.params["prevent_cse"])
