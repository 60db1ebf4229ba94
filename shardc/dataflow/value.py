"""The values of a round while it is traced: they stand for arrays that do not exist yet."""

from __future__ import annotations

import math
from typing import Any, Final, NoReturn, Protocol

from shardc.errors import TracingError

INSIDE: Final = (
    "A round is traced once, before its values exist: do this inside a function that the round calls, a "
    "shardc.function or a shardc.host."
)
"""What to do about a use that needs a number."""


class Traced(Protocol):
    """The round of a value: `where` names it for errors."""

    where: str


class Made:
    """The origin of a value that a node makes: result leaf `index` of node `node`."""

    __slots__ = ("index", "node")

    def __init__(self, node: int, index: int) -> None:
        self.node, self.index = node, index


class Held:
    """The origin of a leaf of the state: what the round before gave for it."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class LateOrigin:
    """The origin of a value of `rounds` rounds ago.

    Attributes:
      first: the array that stands for it in the first rounds; None: what `value` begins with.
    """

    __slots__ = ("first", "rounds", "value")

    def __init__(self, value: RoundValue, rounds: int, first: Any = None) -> None:
        self.value, self.rounds, self.first = value, rounds, first


class RoundValue:
    """A leaf of a round: an array that the round will have, of known shape and dtype.

    It is handed to functions, returned, and kept in pytrees. Anything that would need its number is an error.

    Attributes:
      aval: its shape and dtype.
      origin: where it comes from.
      round: the round.
      name: for people: `state/params/w`, `update/0`.
    """

    __slots__ = ("aval", "name", "origin", "round")

    def __init__(self, aval: Any, origin: Made | Held | LateOrigin, round: Traced, name: str) -> None:
        self.aval, self.origin, self.round, self.name = aval, origin, round, name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.aval.shape

    @property
    def dtype(self) -> Any:
        return self.aval.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def __repr__(self) -> str:
        dims = ",".join(map(str, self.shape))
        return f"Value({self.dtype.name}[{dims}], {self.name})"

    def __format__(self, spec: str) -> str:
        return self.refuse("a formatted number from") if spec else repr(self)

    def __getattr__(self, name: str) -> Any:
        if name in _METHODS:
            self.refuse(f".{name} of")
        raise AttributeError(f"{self!r} has no attribute {name!r}")

    def refuse(self, what: str) -> NoReturn:
        """Raise the error for a use that needs a number."""
        raise TracingError(
            f"{self.round.where}: {what} {self.name}, a value of the round ({self.dtype.name}{list(self.shape)}). "
            f"{INSIDE}"
        )


_USES: Final = {
    "__bool__": "a Python branch, or bool(), of",
    "__int__": "int() of",
    "__float__": "float() of",
    "__complex__": "complex() of",
    "__index__": "an index from",
    "__iter__": "a Python loop over",
    "__getitem__": "an item of",
    "__len__": "len() of",
    "__setitem__": "a change of an item of",
    "__contains__": "a search in",
    "__array__": "a NumPy array of",
} | {
    f"__{side}{name}__": f"{text} with"
    for name, text in {
        "add": "a sum", "sub": "a difference", "mul": "a product", "truediv": "a quotient", "floordiv": "a quotient",
        "matmul": "a matrix product", "pow": "a power", "mod": "a remainder", "divmod": "a quotient",
        "and": "a logical and", "or": "a logical or", "xor": "an exclusive or", "lshift": "a shift",
        "rshift": "a shift",
    }.items()
    for side in ("", "r")
} | {f"__{name}__": "a comparison with" for name in ("eq", "ne", "lt", "le", "gt", "ge")} | {
    f"__{name}__": "a sign of" for name in ("neg", "pos", "abs", "invert", "round")
}  # fmt: skip
"""Methods of Python, and what they do with a value."""

_METHODS: Final = frozenset(
    {
        "T", "all", "any", "argmax", "argmin", "argsort", "astype", "at", "clip", "cumsum", "dot", "flatten", "item",
        "max", "mean", "min", "prod", "ravel", "reshape", "round", "sort", "squeeze", "std", "sum", "take", "tolist",
        "transpose", "var",
    }
)  # fmt: skip
"""What people ask of arrays."""


class Nothing:
    """The result of a host function that gives nothing, as a round has it; returned by the round it is None.

    Attributes:
      name: of the host function.
      round: the round.
    """

    __slots__ = ("name", "round")

    def __init__(self, name: str, round: Traced) -> None:
        self.name, self.round = name, round

    def __repr__(self) -> str:
        return f"Nothing({self.name})"

    def text(self, use: str) -> str:
        """A text about a use of it."""
        return (
            f"{self.name} gives nothing (gives=None), and {use}; say what it returns, as "
            f"shardc.host({self.name}, gives=jax.ShapeDtypeStruct(shape, dtype))"
        )

    def refuse(self, what: str) -> NoReturn:
        raise TracingError(f"{self.round.where}: {self.text(f'the round takes {what} it')}.")


def _refused(what: str) -> Any:
    def method(self: RoundValue | Nothing, *_: Any, **__: Any) -> NoReturn:
        self.refuse(what)

    return method


for _name, _what in _USES.items():
    for _kind in (RoundValue, Nothing):
        setattr(_kind, _name, _refused(_what))
RoundValue.__hash__ = Nothing.__hash__ = object.__hash__
setattr(RoundValue, "__jax_array__", property(_refused("a JAX operation on")))  # noqa: B010  # JAX asks if there is one
