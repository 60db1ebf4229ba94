"""A case: a function of arrays, and how its arguments are made from a seed."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np


@dataclass(frozen=True)
class Case:
    """One call to compare.

    Attributes:
      group: what cases are counted and sampled by; most often the primitive.
      name: unique among all cases.
      fn: of arrays alone.
      make: the arguments, from a random state.
      undefined: why JAX leaves the result open; empty if it does not.
    """

    group: str
    name: str
    fn: Callable[..., Any]
    make: Callable[[np.random.RandomState], Sequence[Any]]
    undefined: str = ""

    def seed(self, *numbers: int) -> list[int]:
        """The case's own seed: what is drawn for it does not hang on the other cases of a run."""
        return [zlib.crc32(self.name.encode()), *numbers]

    def arguments(self, seed: int) -> list[Any]:
        return list(self.make(np.random.RandomState(self.seed(seed))))


@functools.cache
def all_cases() -> tuple[Case, ...]:
    """JAX's cases and ours, by name: the order in which JAX defines its own changes from process to process."""
    from tests.harnesses import jax_cases, own_cases  # noqa: PLC0415  # they know what a case is

    with jax.enable_x64(True):
        found = sorted([*jax_cases.cases(), *own_cases.CASES], key=lambda c: (c.group, c.name))
    assert len({c.name for c in found}) == len(found)
    return tuple(found)


def choose(
    groups: Collection[str] = (), part: tuple[int, int] = (1, 1), limit: int | None = None, seed: int = 0,
    only: str = "",
) -> list[Case]:  # fmt: skip
    """The cases of a run.

    Args:
      groups: names of groups; none is all.
      part: (i, n), from (1, n) to (n, n): every n-th case of each group.
      limit: at most so many of each group, drawn by the seed.
      only: a text that the names contain.
    """
    i, n = part
    kept: dict[str, list[Case]] = {}
    for case in all_cases():
        if (not groups or case.group in groups) and only in case.name:
            kept.setdefault(case.group, []).append(case)
    sampled = [_sample(group[i - 1 :: n], limit, seed) for group in kept.values()]
    return [case for group in sampled for case in group]


def _sample(cases: Sequence[Case], limit: int | None, seed: int) -> Sequence[Case]:
    if limit is None or len(cases) <= limit:
        return cases
    rng = np.random.default_rng([seed, zlib.crc32(cases[0].group.encode())])
    return [cases[k] for k in sorted(rng.choice(len(cases), limit, replace=False))]
