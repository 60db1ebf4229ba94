"""Factorizations, solves and Fourier transforms: each matrix of a batch for itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from shardc.sbp.signature import Operation, Partials, Rule, Site, dims, linear, rule


def batched(op: Operation, core: int, partials: tuple[Partials, ...] = ()) -> Rule:
    """All but the last `core` dimensions of the first operand are factors of everything."""
    batch = dims(len(op.operands[0].shape) - core)

    def names(rank: int) -> tuple[str | None, ...]:
        return (*batch, *(None,) * (rank - len(batch)))

    operands, results = (tuple(names(len(a.shape)) for a in side) for side in (op.operands, op.results))
    return Rule(operands, results, partials=partials)


@rule(
    "cholesky", "eig", "eigh", "geqrf", "hessenberg", "householder_product", "lu", "qr", "schur", "svd",
    "tridiagonal",
)  # fmt: skip
def factorization(op: Operation) -> Rule:
    """Of the last two dimensions: each step needs all that is left of the matrix."""
    return batched(op, 2)


@rule("lu_pivots_to_permutation")
def pivots(op: Operation) -> Rule:
    """Of the last dimension."""
    return batched(op, 1)


@rule("triangular_solve")
def triangular_solve(op: Operation) -> Rule:
    """x of a x = b is linear in b, and each column of b (row, of x a = b) is solved for itself."""
    return _each_column(batched(op, 2, linear(2, (1,))), -1 if op.params["left_side"] else -2)


@rule("tridiagonal_solve")
def tridiagonal_solve(op: Operation) -> Rule:
    """As with a triangular matrix."""
    return _each_column(batched(op, 1, linear(4, (3,))), -1)


@rule("ormqr")
def product_with_q(op: Operation) -> Rule:
    """q c or c q: linear in c, whose columns or rows are multiplied each for itself."""
    return _each_column(batched(op, 2, linear(3, (2,))), -1 if op.params["left"] else -2)


def _each_column(found: Rule, dim: int) -> Rule:
    """The rule with a factor more: dimension `dim` of the last operand, and of the result."""
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
        found, operands=((*a[:-1], "k"), c), reduced={"k": "sum"}, neutral={0: "zero"}, local=_symmetric_piece
    )


def _symmetric_piece(site: Site, a: Any, c: Any) -> Sequence[Any]:
    axes = site.operands[0].axes_of(a.ndim - 1)
    if axes:
        c = jnp.where(site.linear_index(axes) == 0, c, jnp.zeros((), c.dtype))
    return site.bind(a, c)


@rule("fft")
def fft(op: Operation) -> Rule:
    """Linear, over the last dimensions."""
    return replace(batched(op, len(op.params["fft_lengths"]), linear(1, (0,))), local=_fft_piece)


def _fft_piece(site: Site, x: Any) -> Sequence[Any]:
    """Row by row: XLA:CPU hands a collective's layout on to the transform, whose kernel then fails."""
    return [_in_rows(y) for y in site.bind(_in_rows(x))]


def _in_rows(x: Any) -> Any:
    return with_layout_constraint(jnp.asarray(x), Layout(tuple(range(x.ndim))))
