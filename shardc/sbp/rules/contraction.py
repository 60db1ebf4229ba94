"""Contractions: c[b, m, n] = sum over k of a[b, m, k] · b[b, n, k]."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from shardc.sbp.signature import Operation, Partials, Rule, dims, linear, rule


def bilinear(op: Operation) -> tuple[Partials, ...]:
    """Linear in each operand, if sums wrap in the operand as they do in the result."""
    result = op.results[0].dtype
    wraps = [jnp.issubdtype(a.dtype, np.integer) and a.dtype != result for a in op.operands]
    return linear(2, *((i,) for i in (0, 1) if not wraps[i]))


@rule("dot_general")
def dot_general(op: Operation) -> Rule:
    """Batch, left, right and contracted dimensions; a split contraction leaves P(sum)."""
    contract, batch = op.params["dimension_numbers"]
    names = [list(dims(len(a.shape), side)) for side, a in zip("mn", op.operands, strict=True)]
    for kind, pairs in (("k", contract), ("b", batch)):
        for j, (left, right) in enumerate(zip(*pairs, strict=True)):
            names[0][left] = names[1][right] = f"{kind}{j}"
    free = [f for side, kind in zip(names, "mn", strict=True) for f in side if f[0] == kind]
    sizes = {f: d for side, a in zip(names, op.operands, strict=True) for f, d in zip(side, a.shape, strict=True)}
    return Rule(
        (tuple(names[0]), tuple(names[1])),
        ((*(f"b{j}" for j in range(len(batch[0]))), *free),),
        reduced={f"k{j}": "sum" for j in range(len(contract[0]))},
        partials=bilinear(op),
        neutral={0: "zero", 1: "zero"},
        flops=2.0 * math.prod(sizes.values()),
    )
