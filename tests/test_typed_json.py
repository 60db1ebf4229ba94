"""JSON as typed values: what is of another type, too deep or not whole is a TypeError or a ValueError."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import pytest

from shardc.typed_json import parsed, typed


class Pair(NamedTuple):
    name: str
    size: int


@dataclass(frozen=True)
class Whole:
    pairs: Sequence[Pair]
    by_name: Mapping[str, tuple[int, ...]]
    gap: float | None
    at: tuple[str, int]
    odd: bool
    number: complex


WORDS = {complex: complex}
DATA = {"pairs": [["a", 1]], "by_name": {"b": [2, 3]}, "gap": None, "at": ["c", 4], "odd": True, "number": "1j"}
WHOLE = Whole((Pair("a", 1),), {"b": (2, 3)}, None, ("c", 4), True, 1j)


def test_what_it_stands_for():
    assert typed(Whole, DATA, WORDS) == WHOLE
    assert asdict(WHOLE)["by_name"] == {"b": (2, 3)}
    for gap in (1, 0.5):
        assert typed(Whole, DATA | {"gap": gap}, WORDS).gap == gap


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("pairs", [["a", True]], "int expected, not bool"),
        ("pairs", [["a"]], "shorter"),
        ("pairs", [["a", 1, 2]], "longer"),
        ("pairs", "ab", "list expected, not str"),
        ("by_name", [1], "dict expected, not list"),
        ("by_name", {"b": 2}, "list expected, not int"),
        ("gap", 10**400, "float expected, not int"),
        ("gap", "1.0", "float expected, not str"),
        ("at", ["c", 4, 5], "longer"),
        ("odd", 1, "bool expected, not int"),
        ("number", 1, "str expected, not int"),
        ("number", "x", "malformed"),
        ("new", 1, "new: missing or unknown"),
    ],
)
def test_what_is_of_another_type(name, value, message):
    with pytest.raises((TypeError, ValueError), match=message):
        typed(Whole, DATA | {name: value}, WORDS)


def test_a_field_that_is_missing():
    with pytest.raises(TypeError, match="gap, odd: missing or unknown"):
        typed(Whole, {k: x for k, x in DATA.items() if k not in ("gap", "odd")}, WORDS)


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000, "1" * 5000, "{", '"'])
def test_what_is_no_json(text):
    with pytest.raises(ValueError):
        parsed(text)
