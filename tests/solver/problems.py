"""Small random problems of several shapes, and their minimum by enumeration."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from shardc.solver import FORBIDDEN, AssignmentCost, Memo, SolverOptions
from shardc.solver.operations import Operations
from shardc.solver.reduce import Reduction
from shardc.solver.search import DEFAULT, Search

Pairs = list[tuple[int, int]]


def tree(rng: np.random.Generator, n: int) -> Pairs:
    return [(int(rng.integers(0, k)), k) for k in range(1, n)]


def cycle(rng: np.random.Generator, n: int) -> Pairs:
    return [(k, k + 1) for k in range(n - 1)] + ([(0, n - 1)] if n > 2 else [])


def grid(rng: np.random.Generator, n: int) -> Pairs:
    rows = range(n // 2)
    return [(2 * k, 2 * k + 1) for k in rows] + [(2 * k + s, 2 * k + 2 + s) for k in rows[:-1] for s in (0, 1)]


def dense(rng: np.random.Generator, n: int) -> Pairs:
    return list(itertools.combinations(range(n), 2))


def sparse(rng: np.random.Generator, n: int) -> Pairs:
    return [p for p in itertools.combinations(range(n), 2) if rng.random() < 0.5]


shapes: dict[str, Callable[[np.random.Generator, int], Pairs]] = {
    f.__name__: f for f in (tree, cycle, grid, dense, sparse)
}


def random_problem(shape: str, seed: int, forbidden: float = 0.0, most: int = 4):
    """Unary tables and tables of pairs, of small whole numbers: sums are exact."""
    rng = np.random.default_rng([seed, *map(ord, shape)])
    n = int(rng.integers(2, 8))
    sizes = rng.integers(1, most + 1, n)

    def table(*size: int) -> np.ndarray:
        costs = rng.integers(0, 12, size).astype(float)
        costs[rng.random(size) < forbidden] = 2 * FORBIDDEN
        return costs

    unary = [table(k) for k in sizes]
    return unary, {(i, j): table(sizes[i], sizes[j]) for i, j in shapes[shape](rng, n)}


def repeated_layers(seed: int, layers: int, width: int = 3, values: int = 3):
    """The same tables again and again, each layer joined to the next."""
    rng = np.random.default_rng(seed)
    own = [rng.integers(0, 9, values).astype(float) for _ in range(width)]
    inner = {p: rng.integers(0, 9, (values, values)).astype(float) for p in itertools.combinations(range(width), 2)}
    outer = [rng.integers(0, 9, (values, values)).astype(float) for _ in range(width)]
    pairwise = {(k * width + i, k * width + j): t for k in range(layers) for (i, j), t in inner.items()}
    for k in range(layers - 1):
        pairwise |= {(k * width + i, (k + 1) * width + i): t for i, t in enumerate(outer)}
    return own * layers, pairwise


def every(unary: Sequence[np.ndarray]):
    return itertools.product(*(range(len(u)) for u in unary))


def cost_of(unary: Sequence[np.ndarray], pairwise: Mapping[tuple[int, int], np.ndarray], x: Sequence[int]) -> float:
    total = sum(u[v] for u, v in zip(unary, x, strict=True)) + sum(t[x[i], x[j]] for (i, j), t in pairwise.items())
    return float(total) if total < FORBIDDEN else np.inf


def minimum(unary, pairwise) -> float:
    return min((cost_of(unary, pairwise, x) for x in every(unary)), default=np.inf)


MESSAGES: SolverOptions = SolverOptions(at_once=0)
"""What is small is not simply eliminated."""


def reduction(unary, pairwise) -> Reduction:
    return Reduction.of(unary, pairwise, Operations(Memo()))


def searched(problem: Reduction, unary, pairwise, options: SolverOptions = DEFAULT) -> Search:
    """A search by turns of messages, at its end."""
    found = Search(problem, AssignmentCost(unary, pairwise), options)
    found.run()
    return found
