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


@rule("cholesky", "eig", "eigh", "hessenberg", "householder_product", "lu", "qr", "schur", "svd")
def factorization(op: Operation) -> Rule:
    """Of the last two dimensions."""
    return batched(op, 2)


@rule("lu_pivots_to_permutation")
def pivots(op: Operation) -> Rule:
    """Of the last dimension."""
    return batched(op, 1)


@rule("triangular_solve")
def triangular_solve(op: Operation) -> Rule:
    """x of a x = b is linear in b."""
    return batched(op, 2, linear(2, (1,)))


@rule("fft")
def fft(op: Operation) -> Rule:
    """Linear, over the last dimensions."""
    return replace(batched(op, len(op.params["fft_lengths"]), linear(1, (0,))), local=_fft_piece)


def _fft_piece(site: Site, x: Any) -> Sequence[Any]:
    """Row by row: XLA:CPU hands a collective's layout on to the transform, whose kernel then fails."""
    return [_in_rows(y) for y in site.bind(_in_rows(x))]


def _in_rows(x: Any) -> Any:
    return with_layout_constraint(jnp.asarray(x), Layout(tuple(range(x.ndim))))
