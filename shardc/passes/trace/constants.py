"""Leaves of arguments that are constants of a trace: values that cannot change between calls."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from numbers import Number
from pathlib import PurePath
from types import FunctionType, GenericAlias, ModuleType
from typing import Any, Final

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.extend.core import Primitive
from jax.sharding import AbstractMesh, Mesh, PartitionSpec, Sharding

from shardc import compat
from shardc.sbp.placement import Auto, Placement

_FIXED: Final[tuple[Any, ...]] = (
    *(type(None), str, bytes, Number, Enum, type, GenericAlias, range, type(...), PurePath, re.Pattern),
    *(FunctionType, ModuleType, np.ufunc, jax.numpy.ufunc, np.dtype, compat.ExtendedDType, Primitive),
    *(Sharding, PartitionSpec, Mesh, AbstractMesh, jax.Device, Format, jax.tree_util.PyTreeDef, Placement, Auto),
)
"""Types whose values cannot change. Code counts as fixed, with the variables that it closes over."""


def is_constant(x: Any) -> bool:
    """Whether a value cannot change: text, numbers, functions, types, and frozen dataclasses and tuples of these."""
    if isinstance(x, _FIXED):
        return True
    if callable(x) and (owner := getattr(x, "__self__", None)) is not None:  # a method, or a function of a module
        return is_constant(owner)
    if isinstance(x, functools.partial):
        return all(isinstance(v, jax.Array) or is_constant(v) for v in (x.func, *x.args, *x.keywords.values()))
    if isinstance(x, tuple | frozenset):
        return all(map(is_constant, x))
    if _is_frozen(x):
        return all(map(is_constant, _values(x)))
    return callable(x) and hasattr(x, "__wrapped__")  # a decorated function, as of jax.jit


def key_of(x: Any) -> Any:
    """A hashable key of a constant that tells `2` from `2.0` and `True`, inside of dataclasses and tuples too."""
    if isinstance(x, tuple):
        return type(x), *map(key_of, x)
    if isinstance(x, frozenset):
        return type(x), frozenset(map(key_of, x))
    return (type(x), x, *map(key_of, _values(x))) if _is_frozen(x) else (type(x), x)


def key_of_static(x: Any) -> Any:
    """A key of a static argument, which is what its `==` and its hash say; a hash that changes tells another value."""
    return type(x), hash(x), x


def snapshot_of(x: Any) -> Any:
    """A hashable key of what a value is now: of one without a hash, as a config that can change, by its contents."""
    if has_hash(x):
        return (key_of if is_constant(x) else key_of_static)(x)
    if isinstance(x, Mapping):
        return type(x), *((snapshot_of(k), snapshot_of(v)) for k, v in x.items())
    if isinstance(x, np.ndarray) and not x.dtype.hasobject:
        return type(x), x.shape, x.dtype, x.tobytes()
    if is_dataclass(x) or hasattr(x, "__dict__"):
        names = [f.name for f in fields(x)] if is_dataclass(x) else []
        return type(x), *((n, snapshot_of(getattr(x, n))) for n in dict.fromkeys([*names, *getattr(x, "__dict__", ())]))
    return (type(x), *map(snapshot_of, x)) if isinstance(x, Collection) else (type(x), id(x))


def has_hash(x: object) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True


def why_no_constant(name: str, inner: str, x: Any) -> str | None:
    """A line for an error about the leaf `inner` of the argument `name`; None if it is a constant."""
    at, kind = "/".join(filter(None, (name, inner))), type(x).__name__
    if isinstance(x, jax.Ref):
        value = f"{_word(inner) if inner else name}[...]"
        return f"{at}: a Ref is written to where it lives; pass its value, {value}, and return the new one."
    if is_foreign_array(x):
        return f"{at}: a {kind} is an array of another library; pass np.asarray({_word(inner) if inner else name})."
    if not has_hash(x):
        frozen = f"write @dataclass(frozen=True) above {kind}, with hashable fields" if is_dataclass(x) else ""
        return f"{at}: a {kind} is neither an array nor a hashable constant; {frozen or 'pass an array'}."
    if is_constant(x):
        return None
    own = f"give it an argument of its own, {_word(inner)}, and " if inner else ""
    return (
        f"{at}: a {kind} can change, and a compiled program would not see it; {own}mark it static, with "
        f'static_argnames="{_word(inner) if inner else name}", or pass its numbers.'
    )


def is_foreign_array(x: Any) -> bool:
    """Whether NumPy can make an array of it: a tensor of another library."""
    return hasattr(x, "__array__") and not isinstance(x, type)


def _word(path: str) -> str:
    last = path.rpartition("/")[2]
    return last if last.isidentifier() else "config"


def _is_frozen(x: Any) -> bool:
    """Whether `x` is a frozen dataclass, or a linen module, whose attributes cannot be set after its setup."""
    parameters = getattr(x, "__dataclass_params__", None)
    return parameters is not None and not isinstance(x, type) and (parameters.frozen or _is_linen(type(x)))


@functools.lru_cache(maxsize=256)
def _is_linen(kind: type) -> bool:
    return any(c.__name__ == "Module" and c.__module__.startswith("flax.linen") for c in kind.__mro__)


def _values(x: Any) -> list[Any]:
    return [getattr(x, f.name) for f in fields(x)]
