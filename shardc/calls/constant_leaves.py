"""Leaves of calls that are constants though they could be arrays, and leaves of results that are no arrays.

As for `equinox.filter_jit`, Python's numbers in modules are constants, and modules in results keep what is no array.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import jax

from shardc.passes.trace.constants import key_of, key_of_static
from shardc.passes.trace.trace import is_array, is_equinox, is_number


@dataclass(frozen=True)
class ConstantNumber:
    """A leaf of a call that stands for a number of Python: no array, so a constant of the trace."""

    value: Any


class KeptLeaf:
    """A leaf of a result that is no array, as a part of the result's structure: unflattened it is the leaf itself."""

    def __init__(self, value: Any) -> None:
        self.value, self.key = value, (key_of_static(value), key_of(value))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeptLeaf) and bool(self.key == other.key)

    def __hash__(self) -> int:
        return hash(self.key[0])

    def __repr__(self) -> str:
        return repr(self.value)


jax.tree_util.register_pytree_node(KeptLeaf, lambda kept: ((), kept), lambda kept, _: kept.value)


@dataclass(frozen=True)
class ConstantLeaves:
    """Which leaves are constants: those of modules of equinox, or all."""

    everywhere: bool

    def marked(self, values: Any) -> Any:
        """Arguments with numbers that are constants marked."""
        return self._each(lambda x: ConstantNumber(x) if is_number(x) else x, values)

    def unmarked(self, values: Any) -> Any:
        """The arguments as they were."""
        if not any(isinstance(x, ConstantNumber) for x in jax.tree.leaves(values)):
            return values
        return jax.tree.map(lambda x: x.value if isinstance(x, ConstantNumber) else x, values)

    def kept(self, result: Any) -> Any:
        """A result whose leaves that are no arrays are a part of its structure."""
        return self._each(lambda x: x if is_array(x) and not is_number(x) else KeptLeaf(x), result)

    def _each(self, change: Any, tree: Any) -> Any:
        if self.everywhere:
            return jax.tree.map(change, tree)
        if "equinox" not in sys.modules or not any(map(is_equinox, jax.tree.leaves(tree, is_leaf=is_equinox))):
            return tree
        return jax.tree.map(lambda x: jax.tree.map(change, x) if is_equinox(x) else x, tree, is_leaf=is_equinox)


@dataclass(frozen=True)
class _Number:
    value: int


def numbered(tree: Any) -> Any:
    """A result's structure with the number of each array, and None for each leaf that is no array."""
    return jax.tree.map(lambda x: x.value if isinstance(x, _Number) else None, _of_numbers(tree))


def array_leaves(tree: Any) -> list[int]:
    """The leaves of results that are arrays; `tree` is the structure of results in a program."""
    return [i for i, x in enumerate(jax.tree.leaves(_of_numbers(tree))) if isinstance(x, _Number)]


def _of_numbers(tree: Any) -> Any:
    return tree.unflatten(map(_Number, range(tree.num_leaves)))
