"""JSON of a file as the dataclasses and named tuples that it stands for, checked against their annotations."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import lru_cache
from types import MappingProxyType, UnionType
from typing import Any, Final, cast, get_args, get_origin, get_type_hints

NO_WORDS: Final[Mapping[Any, Callable[[str], Any]]] = MappingProxyType({})

_hints: Final = lru_cache(maxsize=64)(get_type_hints)


def parsed(text: str) -> Any:
    """The value of a text of JSON.

    Raises:
      ValueError: it is none, or is nested too deep.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def typed(kind: Any, data: Any, words: Mapping[Any, Callable[[str], Any]] = NO_WORDS) -> Any:
    """A value of JSON as one of a type.

    Args:
      kind: a dataclass, all of whose fields stand in an object; a NamedTuple, in a list; a Mapping from str, a Sequence
        or tuple, which becomes a tuple; bool, int, float or str; any of these or None.
      data: the value.
      words: the types that are written as a text, and how it is read.

    Raises:
      TypeError, ValueError: it is none of this type; or what a reader of `words` raises.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if kind in words:
        return words[kind](_of(str, data))
    if origin is UnionType:
        return None if data is None else typed(inner[0], data, words)
    if origin is Mapping:
        return {key: typed(inner[1], x, words) for key, x in _of(dict, data).items()}
    if origin is Sequence or inner[1:] == (...,):
        return tuple(typed(inner[0], x, words) for x in _of(list, data))
    if origin is tuple:
        return _each(inner, data, words)
    if is_dataclass(kind):
        return _fields(kind, _of(dict, data), words)
    if issubclass(kind, tuple):
        return kind(*_each(_hints(kind).values(), data, words))
    if kind is float and type(data) is int and abs(data) < 2**53:
        return data
    return _of(kind, data)


def _of(kind: type, data: Any) -> Any:
    if type(data) is not kind:
        raise TypeError(f"{kind.__name__} expected, not {type(data).__name__}")
    return data


def _each(kinds: Iterable[Any], data: Any, words: Mapping[Any, Callable[[str], Any]]) -> tuple[Any, ...]:
    return tuple(typed(kind, x, words) for kind, x in zip(kinds, _of(list, data), strict=True))


def _fields(kind: Any, data: Mapping[str, Any], words: Mapping[Any, Callable[[str], Any]]) -> Any:
    hints = cast(Mapping[str, Any], _hints(kind))
    if wrong := hints.keys() ^ data.keys():
        raise TypeError(f"{', '.join(sorted(wrong))}: missing or unknown")
    return kind(**{name: typed(hint, data[name], words) for name, hint in hints.items()})
