"""Requests for plans: a program, a mesh, and what is known of arguments and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import jax

from shardc import compat
from shardc.compat import Jaxpr
from shardc.ir.constrain import constrain_p
from shardc.ir.program import Program
from shardc.ir.walk import renamed, with_atoms
from shardc.machine.mesh import MeshView
from shardc.passes import IMBALANCE, Context
from shardc.sbp.placement import Pin, Placement

Offload: TypeAlias = Literal["never", "auto"] | tuple[str, ...]
"""The choice of `offload=`: nothing, what is needed to fit, or arguments by patterns of their paths."""


@dataclass(frozen=True)
class Argument:
    """One input as it is known before planning.

    Attributes:
      pin: what the user said; None is AUTO.
      arrival: where the array already lives on the mesh; None if it is put where the plan wants it.
      donated: its buffer may be reused for a result.
    """

    pin: Pin | None = None
    arrival: Placement | None = None
    donated: bool = False

    @property
    def moves(self) -> bool:
        """Whether it arrives with another placement than its pin."""
        return self.pin is not None and self.arrival is not None and not self.pin.allows(self.arrival)


class NamedArguments(tuple[Any, ...]):
    """A tuple of arguments whose items may also be had by name."""

    names: tuple[str, ...]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> NamedArguments:
        made = cls(values.values())
        made.names = tuple(values)
        return made

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(self.names.index(key) if isinstance(key, str) else key)

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("names", ()):
            return self[name]
        raise AttributeError(name)

    def __repr__(self) -> str:
        return "(" + ", ".join(f"{n}={v!r}" for n, v in zip(self.names, self, strict=True)) + ")"


jax.tree_util.register_pytree_node(
    NamedArguments,
    lambda a: (tuple(a), a.names),
    lambda names, values: NamedArguments.of(dict(zip(names, values, strict=True))),
)


@dataclass(frozen=True)
class ArgumentsTree:
    """The structure of a call's arguments.

    Attributes:
      tree: pytree structure of a dict from the name of an argument to its value.
      arrays: the numbers of the leaves that are arrays; the others are static.
    """

    tree: Any
    arrays: tuple[int, ...]

    def unflatten(self, placements: Sequence[Placement]) -> Any:
        """Placements of the inputs as the arguments stand in a call; None for a static leaf."""
        leaves: list[Placement | None] = [None] * self.tree.num_leaves
        for i, p in zip(self.arrays, placements, strict=False):
            leaves[i] = p
        return NamedArguments.of(jax.tree.unflatten(self.tree, leaves))


@dataclass(frozen=True, eq=False)
class Request:
    """A request for the plan of one program. Its pins lose the mesh's idle axes; they name the user's axes, also where
    the mesh has sub-axes of them.

    Attributes:
      program: what is to be placed.
      mesh: where.
      arguments: what is known of each input.
      results: what the user said of each result.
      notes: lines for `explain`.
      limit: bytes that each device has; None: unlimited.
      where: the function, for errors.
      tree: structure of the arguments of a call.
      replicate: primitives without a rule for which no signatures are looked for.
      forbids: whether `forbid=` names something. Then a result that may be an argument of the next call is placed where
        that call can take it without a forbidden move.
      offload: what may live on the host: "never", "auto", or the arguments whose paths match these patterns.
      imbalance: rows of the busiest device over the mean, for which an exchange of sorted rows has room.
    """

    program: Program
    mesh: MeshView
    arguments: Sequence[Argument]
    results: Sequence[Pin | None]
    notes: tuple[str, ...] = ()
    limit: int | None = None
    where: str = ""
    tree: ArgumentsTree | None = None
    replicate: tuple[str, ...] = ()
    forbids: bool = False
    offload: Offload = "never"
    imbalance: float = IMBALANCE

    @property
    def context(self) -> Context:
        """The knowledge that passes have of it."""
        return Context(self.mesh, [a.pin for a in self.arguments], self.replicate, imbalance=self.imbalance)

    @property
    def on_host(self) -> tuple[str, ...]:
        """The patterns of the arguments that live on the host in any case."""
        return () if isinstance(self.offload, str) else self.offload

    @cached_property
    def entered(self) -> Jaxpr:
        """The program that constrains arguments which arrive elsewhere than pinned: `f x --> f constrain[pin] x`."""
        jaxpr, arguments = self.program.jaxpr, self.arguments
        moved = {v: compat.fresh_var(v.aval) for v, a in zip(jaxpr.invars, arguments, strict=False) if a.moves}
        if not moved:
            return jaxpr
        pins = dict(zip(jaxpr.invars, (a.pin for a in arguments), strict=False))
        entries = [compat.new_eqn([v], [inside], constrain_p, {"pin": pins[v]}, None) for v, inside in moved.items()]
        body = [with_atoms(e, moved) for e in jaxpr.eqns]
        return compat.new_jaxpr(jaxpr.invars, renamed(jaxpr.outvars, moved), [*entries, *body], jaxpr)

    def __post_init__(self) -> None:
        if idle := self.mesh.idle:
            arguments = tuple(replace(a, pin=a.pin and a.pin.without(idle)) for a in self.arguments)
            object.__setattr__(self, "arguments", arguments)
            object.__setattr__(self, "results", tuple(pin and pin.without(idle) for pin in self.results))
