"""A cache of calls: a repeated call needs no paths and no lookups, and JAX's own dispatch checks its arguments.

    f(*args)  --first time-->  take apart, plan, compile, run; add a CachedCall
    f(*args)  --next times-->  flatten, pick in the executable's order, run

JAX's compiled program compares shapes, dtypes and shardings with those that it was compiled for, and refuses others
before anything runs. Weak types and JAX's settings, which it does not check, are compared here. So is where arrays live
if they go to a pipeline, which would move them, or if their types have it (Explicit axes). Any other call is made
without the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Protocol

import jax

from shardc import compat
from shardc.arrays.gone import GoneError
from shardc.arrays.placed import is_placed
from shardc.errors import PipelineError
from shardc.execute.executable import looks_for_nans
from shardc.execute.in_turn import Launchable, in_turn
from shardc.passes.trace.constants import key_of, key_of_static
from shardc.passes.trace.trace import Arguments, Call, is_array, settings


class Runnable(Launchable, Protocol):
    """The part of an executable that a cached call uses."""

    settings: tuple[Any, ...]
    moves_arguments: bool

    def is_plain_input(self, i: int) -> bool: ...
    def enter(self, i: int, x: Any) -> Any: ...
    def launch(self, args: Sequence[Any]) -> list[Any]: ...


class _Slot:
    """A placeholder for leaf `index` of a flattened call."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class CachedCall:
    """The way from the leaves of `jax.tree.flatten((args, kwargs))` to a result.

    Args:
      tree, leaves: the tree and the leaves of the first call.
      call: that call, which says which leaves are constants.
      arguments: the names of the function's arguments.
      executable: the executable that the first call ran.
      typed: where arrays live is a part of their types.
    """

    def __init__(  # a call, and what ran it
        self, tree: Any, leaves: Sequence[Any], call: Call, arguments: Arguments, executable: Runnable,
        typed: bool = False,
    ) -> None:  # fmt: skip
        self.executable = executable
        args, kwargs = jax.tree.unflatten(tree, [_Slot(i) for i in range(len(leaves))])
        slots = arguments.flatten(args, kwargs).leaves
        self._order: list[int] = []  # numbers of leaves, then of defaults
        self._defaults: list[Any] = []
        self._unlike: list[int] = []  # places in the order whose placement JAX cannot express
        traced: set[int] = set()
        for slot, x in zip(slots, call.leaves, strict=True):
            if not isinstance(slot, _Slot):  # an argument that the call did not give
                if is_array(slot):
                    self._order.append(len(leaves) + len(self._defaults))
                    self._defaults.append(slot)
            elif is_array(x):
                if is_placed(leaves[slot.index]) or not executable.is_plain_input(len(self._order)):
                    self._unlike.append(len(self._order))
                traced.add(slot.index)
                self._order.append(slot.index)
        pool = [*leaves, *self._defaults]
        self._kind = _kind_and_home if typed or executable.moves_arguments else _kind
        self.kinds = [self._kind(pool[i]) for i in self._order]
        fixed = {slot.index for slot in slots if isinstance(slot, _Slot)} - traced
        keys = [(i, key_of if i in fixed else key_of_static) for i in range(len(leaves)) if i not in traced]
        self._constants = [(i, key_of_one, key_of_one(leaves[i])) for i, key_of_one in keys]

    def run(self, leaves: Sequence[Any]) -> tuple[Any] | None:
        """The result in a tuple; None if this is another call."""
        if any(key_of_one(leaves[i]) != key for i, key_of_one, key in self._constants):
            return None
        pool = [*leaves, *self._defaults]
        args = [pool[i] for i in self._order]
        if [self._kind(x) for x in args] != self.kinds or settings() != self.executable.settings or looks_for_nans():
            return None
        if any(getattr(args[k], "committed", False) and not is_placed(args[k]) for k in self._unlike):
            return None
        try:
            out = in_turn(self.executable, args, lambda: self._launch(args))
        except (GoneError, PipelineError):  # nobody makes a run again that failed, here or in another process
            raise
        except (TypeError, ValueError):  # nothing has run
            return None
        return (self.executable.plan.program.out_tree.unflatten(out),)

    def _launch(self, args: list[Any]) -> list[Any]:
        for k in self._unlike:
            args[k] = self.executable.enter(k, args[k])
        return self.executable.launch(args)


class CallCache:
    """The cached calls of one function, by the structure of its arguments and the mesh in context."""

    def __init__(self, arguments: Arguments) -> None:
        self._arguments = arguments
        self._by_tree: dict[tuple[Any, Any], list[CachedCall]] = {}

    def run(self, tree: Any, leaves: Sequence[Any]) -> tuple[Any] | None:
        try:
            known = self._by_tree.get((tree, jax.sharding.get_abstract_mesh()), ())
        except TypeError:  # an attribute of a module has no hash
            return None
        if known and not has_tracers(leaves):
            for call in known:
                if (out := call.run(leaves)) is not None:
                    return out
        return None

    def add(self, tree: Any, leaves: Sequence[Any], made: Call, executable: Runnable, typed: bool = False) -> None:
        call = CachedCall(tree, leaves, made, self._arguments, executable, typed)
        known = self._by_tree.setdefault((tree, jax.sharding.get_abstract_mesh()), [])
        if all(other.executable is not executable or other.kinds != call.kinds for other in known):
            known.insert(0, call)  # a loop's second call takes the first one's results, as all later calls do


def has_tracers(leaves: Iterable[Any]) -> bool:
    return compat.inside_trace() or any(map(_is_tracer_type, set(map(type, leaves))))


@lru_cache(maxsize=256)
def _is_tracer_type(kind: type) -> bool:
    return issubclass(kind, compat.Tracer)


def _kind(x: Any) -> tuple[bool, bool]:
    """Whether a leaf is weakly typed, as a Python number is; and whether it is placed."""
    if isinstance(x, jax.Array):
        return getattr(x, "weak_type", False), is_placed(x)
    return compat.is_weak(x), False


def _kind_and_home(x: Any) -> tuple[Any, ...]:
    """The kind of a leaf, and where it lives; None if it may be put anywhere."""
    if is_placed(x):
        return *_kind(x), x.placement, x.mesh
    return *_kind(x), x.sharding if getattr(x, "committed", False) else None
