"""Factorizations, solves and Fourier transforms, one for each matrix of a batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from shardc.sbp.signature import Aval, Operation, Partials, Rule, Site, dims, linear, rule


def batched(op: Operation, core: int, partials: tuple[Partials, ...] = ()) -> Rule:
    """A rule whose factors, in all operands and results, are all but the last `core` dimensions of the first
    operand."""
    batch = dims(len(op.operands[0].shape) - core)

    def names(rank: int) -> tuple[str | None, ...]:
        return (*batch, *(None,) * (rank - len(batch)))

    operands, results = (tuple(names(len(a.shape)) for a in side) for side in (op.operands, op.results))
    return Rule(operands, results, partials=partials)


def _matrices(aval: Aval) -> tuple[int, int, int]:
    """Number of matrices, and their longer and shorter side."""
    *batch, rows, columns = aval.shape
    return math.prod(batch), max(rows, columns), min(rows, columns)


_FLOPS: Final[Mapping[str, Callable[[int, int], float]]] = {
    "cholesky": lambda m, n: n**3 / 3,
    "eig": lambda m, n: 25 * n**3,
    "eigh": lambda m, n: 9 * n**3,
    **dict.fromkeys(("geqrf", "householder_product", "qr"), lambda m, n: 2 * m * n**2 - 2 * n**3 / 3),
    "hessenberg": lambda m, n: 10 * n**3 / 3,
    "lu": lambda m, n: m * n**2 - n**3 / 3,
    "schur": lambda m, n: 25 * n**3,
    "svd": lambda m, n: 20 * m * n**2,
    "tridiagonal": lambda m, n: 4 * n**3 / 3,
}  # fmt: skip
"""Operations for a matrix with sides m >= n (Golub and Van Loan, "Matrix Computations"); for iterative ones a rough
number."""
_SLOWER: Final = 10.0
"""How much longer than a product of as many operations a factorization takes, at least: its steps wait for each other,
and many are bound by memory. On a CPU 6 to 45 times (float32, n = 1,024 and 2,048); `eigh` on an H100 over 33 times
(Wang et al., "Extracting the Potential of Emerging Hardware Accelerators for Symmetric Eigenvalue Decomposition")."""


@rule(
    "cholesky", "eig", "eigh", "geqrf", "hessenberg", "householder_product", "lu", "qr", "schur", "svd",
    "tridiagonal",
)  # fmt: skip
def factorization(op: Operation) -> Rule:
    """Split over the batch only: each step of a factorization needs the whole rest of the matrix."""
    count, m, n = _matrices(op.operands[0])
    return replace(batched(op, 2), flops=float(_SLOWER * count * _FLOPS[op.name](m, n)))


@rule("lu_pivots_to_permutation")
def pivots(op: Operation) -> Rule:
    """Split over the batch only: the last dimension stays whole."""
    return replace(batched(op, 1), passes=1.0)


@rule("triangular_solve")
def triangular_solve(op: Operation) -> Rule:
    """The solution of a x = b or x a = b: linear in b, whose columns (or rows) are independent."""
    found = _each_column(batched(op, 2, linear(2, (1,))), -1 if op.params["left_side"] else -2)
    return replace(found, flops=float(math.prod(op.operands[1].shape) * op.operands[0].shape[-1]))


@rule("tridiagonal_solve")
def tridiagonal_solve(op: Operation) -> Rule:
    """The solution of a x = b: linear in b, whose columns are independent."""
    return replace(_each_column(batched(op, 1, linear(4, (3,))), -1), passes=1.0)


@rule("ormqr")
def product_with_q(op: Operation) -> Rule:
    """q c or c q: linear in c, whose columns (or rows) are independent."""
    found = _each_column(batched(op, 2, linear(3, (2,))), -1 if op.params["left"] else -2)
    return replace(found, flops=4.0 * math.prod(op.operands[2].shape) * op.operands[1].shape[-1])


def _each_column(found: Rule, dim: int) -> Rule:
    """The rule with one more factor: dimension `dim` of the last operand and of the result."""
    *others, last = found.operands
    split = list(last)
    split[dim] = "c"
    return replace(found, operands=(*others, tuple(split)), results=(tuple(split),))


@rule("symmetric_product")
def symmetric_product(op: Operation) -> Rule:
    """alpha a aᵀ + beta c: a sum over the columns of a; c counts once."""
    found = batched(op, 2)
    a, c = found.operands
    return replace(
        found, operands=((*a[:-1], "k"), c), reduced={"k": "sum"}, neutral={0: "zero"}, local=_symmetric_piece,
        flops=2.0 * math.prod(op.operands[1].shape) * op.operands[0].shape[-1],
    )  # fmt: skip


def _symmetric_piece(site: Site, a: Any, c: Any) -> Sequence[Any]:
    axes = site.operands[0].axes_of(a.ndim - 1)
    if axes:
        c = jnp.where(site.linear_index(axes) == 0, c, jnp.zeros((), c.dtype))
    return site.bind(a, c)


@rule("fft")
def fft(op: Operation) -> Rule:
    """Linear, over the last dimensions."""
    lengths = op.params["fft_lengths"]
    size = max(math.prod(a.shape) for a in (*op.operands, *op.results))
    return replace(
        batched(op, len(lengths), linear(1, (0,))), local=_fft_piece,
        flops=5.0 * size * math.log2(max(math.prod(lengths), 2)), passes=float(len(lengths)),
    )  # fmt: skip


def _fft_piece(site: Site, x: Any) -> Sequence[Any]:
    """Row-major in and out: XLA:CPU passes a collective's layout on to the transform, whose kernel then fails."""
    return [_in_rows(y) for y in site.bind(_in_rows(x))]


def _in_rows(x: Any) -> Any:
    return with_layout_constraint(jnp.asarray(x), Layout(tuple(range(x.ndim))))
