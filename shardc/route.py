"""The short way of a call that was made before: no paths, no lookups, JAX's own dispatch checks the arguments.

    f(*args)  --first-->  take apart, plan, compile, run; leaves a Route
    f(*args)  --again-->  flatten, pick in the executable's order, run

JAX's compiled program holds shapes, dtypes and shardings against those that it was compiled for, and refuses others
before anything runs; what it does not look at, weak types and JAX's settings, is compared here. A call that is not the
same goes the long way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Protocol

import jax

from shardc import compat
from shardc.executable import looks_for_nans
from shardc.passes.trace import Arguments, is_array, settings
from shardc.placed import PlacedArray, StackedArray


class Runs(Protocol):
    """What a route ends in: an executable of a plan."""

    plan: Any
    settings: tuple[Any, ...]

    def is_plain_input(self, i: int) -> bool: ...
    def enter(self, i: int, x: Any) -> Any: ...
    def launch(self, args: Sequence[Any]) -> list[Any]: ...


class _Slot:
    """Stands for leaf `index` of a flattened call."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class Route:
    """From the leaves of `jax.tree.flatten((args, kwargs))` to a result.

    Args:
      tree, leaves: of the call that went the long way.
      arguments: how the function's arguments are named.
      executable: what that call ran.
    """

    def __init__(self, tree: Any, leaves: Sequence[Any], arguments: Arguments, executable: Runs) -> None:
        self.executable = executable
        args, kwargs = jax.tree.unflatten(tree, [_Slot(i) for i in range(len(leaves))])
        slots = arguments.take_apart(args, kwargs).leaves
        self._order: list[int] = []  # in the leaves, then in the defaults
        self._defaults: list[Any] = []
        self._unlike: list[tuple[int, int]] = []  # place in the order and the leaf: pieces that JAX cannot say
        self._stacked: list[tuple[int, StackedArray]] = []  # place in the order, and the slots of the pieces
        traced: set[int] = set()
        for slot in slots:
            placed = isinstance(slot, PlacedArray)
            if isinstance(slot, StackedArray):
                self._stacked.append((len(self._order), slot))
                traced |= {piece.index for piece in slot.physical}
                slot = slot.physical[0]
            elif placed:
                slot = slot.physical
            if not isinstance(slot, _Slot):  # an argument that the call did not give
                if is_array(slot):
                    self._order.append(len(leaves) + len(self._defaults))
                    self._defaults.append(slot)
            elif placed or is_array(leaves[slot.index]):
                if not placed and not executable.is_plain_input(len(self._order)):
                    self._unlike.append((len(self._order), slot.index))
                traced.add(slot.index)
                self._order.append(slot.index)
        pool = [*leaves, *self._defaults]
        self._weak = [_is_weak(pool[i]) for i in self._order]
        self._constants = [(i, x) for i, x in enumerate(leaves) if i not in traced]

    def run(self, leaves: Sequence[Any]) -> tuple[Any] | None:
        """The result, in a tuple; None if the call has to go the long way."""
        for i, x in self._constants:
            if type(leaves[i]) is not type(x) or leaves[i] != x:
                return None
        if any(getattr(leaves[i], "committed", False) for _, i in self._unlike):
            return None
        pool = [*leaves, *self._defaults]
        args = [pool[i] for i in self._order]
        if [_is_weak(x) for x in args] != self._weak or settings() != self.executable.settings or looks_for_nans():
            return None
        try:
            for k, stack in self._stacked:
                args[k] = stack.with_physical([leaves[piece.index] for piece in stack.physical])
            for k, _ in self._unlike:
                args[k] = self.executable.enter(k, args[k])
            out = self.executable.launch(args)
        except (TypeError, ValueError):  # nothing has run
            return None
        return (self.executable.plan.program.out_tree.unflatten(out),)


class Routes:
    """The routes of one function, by the structure of its arguments and the mesh in context."""

    def __init__(self, arguments: Arguments) -> None:
        self._arguments = arguments
        self._by_tree: dict[tuple[Any, Any], list[Route]] = {}

    def run(self, tree: Any, leaves: Sequence[Any]) -> tuple[Any] | None:
        known = self._by_tree.get((tree, jax.sharding.get_abstract_mesh()), ())
        if known and not has_tracers(leaves):
            for route in known:
                if (out := route.run(leaves)) is not None:
                    return out
        return None

    def add(self, tree: Any, leaves: Sequence[Any], executable: Runs) -> None:
        known = self._by_tree.setdefault((tree, jax.sharding.get_abstract_mesh()), [])
        if all(route.executable is not executable for route in known):
            known.append(Route(tree, leaves, self._arguments, executable))


def has_tracers(leaves: Iterable[Any]) -> bool:
    return compat.inside_trace() or any(map(_is_tracer_type, set(map(type, leaves))))


@lru_cache(maxsize=256)
def _is_tracer_type(kind: type) -> bool:
    return issubclass(kind, compat.Tracer)


def _is_weak(x: Any) -> bool:
    """Whether a leaf's type gives way to that of what it meets, as a Python number's does."""
    return getattr(x, "weak_type", False) if isinstance(x, jax.Array) else isinstance(x, int | float | complex)
