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
from shardc.arrays.placed import is_placed
from shardc.execute.executable import looks_for_nans
from shardc.passes.trace.trace import Arguments, is_array, settings


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
        self._unlike: list[int] = []  # places in the order of what JAX cannot say
        traced: set[int] = set()
        for slot in slots:
            if not isinstance(slot, _Slot):  # an argument that the call did not give
                if is_array(slot):
                    self._order.append(len(leaves) + len(self._defaults))
                    self._defaults.append(slot)
            elif is_array(leaves[slot.index]):
                if is_placed(leaves[slot.index]) or not executable.is_plain_input(len(self._order)):
                    self._unlike.append(len(self._order))
                traced.add(slot.index)
                self._order.append(slot.index)
        pool = [*leaves, *self._defaults]
        self.kinds = [_kind(pool[i]) for i in self._order]
        self._constants = [(i, x) for i, x in enumerate(leaves) if i not in traced]

    def run(self, leaves: Sequence[Any]) -> tuple[Any] | None:
        """The result, in a tuple; None if the call has to go the long way."""
        for i, x in self._constants:
            if type(leaves[i]) is not type(x) or leaves[i] != x:
                return None
        pool = [*leaves, *self._defaults]
        args = [pool[i] for i in self._order]
        if [_kind(x) for x in args] != self.kinds or settings() != self.executable.settings or looks_for_nans():
            return None
        if any(getattr(args[k], "committed", False) and not is_placed(args[k]) for k in self._unlike):
            return None
        try:
            for k in self._unlike:
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
        route = Route(tree, leaves, self._arguments, executable)
        known = self._by_tree.setdefault((tree, jax.sharding.get_abstract_mesh()), [])
        if all(other.executable is not executable or other.kinds != route.kinds for other in known):
            known.insert(0, route)  # a loop's second call, with what the first gave, is as all that follow


def has_tracers(leaves: Iterable[Any]) -> bool:
    return compat.inside_trace() or any(map(_is_tracer_type, set(map(type, leaves))))


@lru_cache(maxsize=256)
def _is_tracer_type(kind: type) -> bool:
    return issubclass(kind, compat.Tracer)


def _kind(x: Any) -> tuple[bool, bool]:
    """Whether a leaf's type gives way to that of what it meets, as a Python number's does; whether it is placed."""
    if isinstance(x, jax.Array):
        return getattr(x, "weak_type", False), is_placed(x)
    return isinstance(x, int | float | complex), False
