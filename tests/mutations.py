"""Mutations of a file of JSON: random flips, cuts and deletions of its bytes, and other values in it."""

import copy
import json

VALUES = [
    None, True, False, 0, -1, 2, 9_999_999_999, 10**400, 1.5, float("nan"), "", "x", "7; x", "../0", "\0", "key<x>",
    "V9", "{data: S(9999999999)}", "{nope: S(0)}", "{model: P(max)}", [], [1], [[]], [None], {}, {"a": 1},
]  # fmt: skip
"""Values that take the place of others."""
DEEP = 200_000


def mutated(text, random):
    """The bytes of a text after one mutation.

    Args:
      text: JSON, an object.
      random: a `random.Random`.
    """
    data = text.encode()
    at, kind = random.randrange(len(data)), random.randrange(8)
    if kind == 0:
        return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]
    if kind == 1:
        return data[:at]
    if kind == 2:
        return data[:at] + data[at + random.randrange(1, 6) :]
    return _replaced(json.loads(text), kind, random)


def _replaced(data, kind, random):
    """A member of any depth that is dropped, another value, swapped with another one, or nested deep."""
    (parent, key), (other, there) = _spot(data, random), _spot(data, random)
    if kind == 3:
        del parent[key]
    elif kind == 4:
        parent[key], other[there] = copy.deepcopy(other[there]), copy.deepcopy(parent[key])
    elif kind == 5:
        parent[key] = "@deep"
    else:
        parent[key] = random.choice(VALUES)
    return json.dumps(data).replace('"@deep"', "[" * DEEP + "]" * DEEP).encode()


def _spot(data, random):
    """A member of a member ... and its key, each key of the top as often as any other."""
    parent, key = data, random.choice(list(data))
    while (inner := parent[key]) and isinstance(inner, dict | list) and random.random() < 0.8:
        parent, key = inner, random.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
    return parent, key
