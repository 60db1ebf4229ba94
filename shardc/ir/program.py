"""The program: a traced function as one flat jaxpr, with the paths of its arguments and results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardc.compat import Jaxpr, Var


@dataclass(frozen=True, slots=True)
class Recomputation:
    """The recomputed values of a program.

    Attributes:
      names: in the program before.
      variables: the results of recomputing equations; for a row of a residual that residual, for others None.
    """

    names: tuple[str, ...] = ()
    variables: Mapping[Var, Var | None] = field(default_factory=dict[Var, "Var | None"])


@dataclass(frozen=True)
class Program:
    """A traced function.

    Attributes:
      name: the function's name.
      jaxpr: without constants; its inputs are the flat arguments, then the captured arrays.
      in_paths: path of each input, `argument/key/0`; captured arrays are `closure/0`.
      out_paths: path of each result, the results' own path without the argument.
      captured: the values of the captured arrays.
      in_tree, out_tree: pytree structures of (args, kwargs) and of the result.
      shared: for each loop that could be shared (`share_loops`), in order, the devices that share its rounds; empty if
        none does.
      scans: for each kind of associative scan that is in chunks (`chunk_scans`) their number.
      for_speed, to_fit: the values that it recomputes because that is faster, and because memory is short.
      boundary: the line of a stage boundary of the function, if its marks were left out; else empty.
      passed: the name of each pass that made this program, and the jaxpr that it gave, in order.
    """

    name: str
    jaxpr: Jaxpr
    in_paths: tuple[str, ...]
    out_paths: tuple[str, ...]
    captured: tuple[Any, ...]
    in_tree: Any
    out_tree: Any
    shared: tuple[int, ...] = ()
    scans: tuple[tuple[str, int], ...] = ()
    for_speed: Recomputation = Recomputation()
    to_fit: Recomputation = Recomputation()
    boundary: str = ""
    passed: tuple[tuple[str, Jaxpr], ...] = ()

    def after(self, name: str, jaxpr: Jaxpr) -> Program:
        """The program that the pass `name` makes of this one."""
        return replace(self, jaxpr=jaxpr, passed=(*self.passed, (name, jaxpr)))

    @property
    def in_avals(self) -> list[Any]:
        return [v.aval for v in self.jaxpr.invars]

    @property
    def out_avals(self) -> list[Any]:
        return [v.aval for v in self.jaxpr.outvars]

    @property
    def given_avals(self) -> list[Any]:
        """The avals of the arguments, without captured arrays."""
        return self.in_avals[: len(self.in_paths) - len(self.captured)]
