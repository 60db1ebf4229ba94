"""cuDNN's attention, as of `jax.nn.dot_product_attention(..., implementation="cudnn")`: softmax(q kᵀ) v and its
gradients, one operation each, whose scores never reach memory.

Operands are query, key, value, bias, the lengths of both, and four that only packed or paged sequences have; those that
are not given are empty. The gradients read besides: the sums of the exponentials, the result, and its cotangent.
"""

from __future__ import annotations

import math
from typing import Final

from shardc.sbp.placement import ReduceOp
from shardc.sbp.signature import Factors, Operation, Partials, Rule, linear, rule

_ROWS: Final = {0: "btn_", 1: "bnt_"}
"""Factors of a query by its layout: sequence, query, head."""
_VALUE, _BIAS, _LENGTHS, _PACKED, _COTANGENT = 2, 3, slice(4, 6), slice(6, 10), 12


@rule("dot_product_attention_fwd_wrapper")
def attention(op: Operation) -> Rule | None:
    """Split by sequences and heads, and by queries if nothing is masked; linear in the values."""
    if not _is_plain(op):
        return None
    operands, sums = _factors(op, whole="s")
    partials: tuple[Partials, ...] = linear(len(operands), (_VALUE,)) if len(op.results) == 1 else ()
    results = (operands[0], sums)[: len(op.results)]
    granule = _granule(op, {})
    return Rule(operands, results, partials=partials, granule=granule, flops=4.0 * _pairs(op), kind="attention")


@rule("dot_product_attention_bwd_wrapper")
def attention_gradients(op: Operation) -> Rule | None:
    """Split by sequences and heads, and by queries or keys if nothing is masked; linear in the cotangent. It multiplies
    five times where the attention does twice, as it computes the scores again."""
    if not _is_plain(op):
        return None
    given, sums = _factors(op)
    operands, results = (*given, sums, given[0], given[0]), given[: len(op.results)]
    kept = dict.fromkeys(f for factors in results for f in factors if f)
    reduced: dict[str, ReduceOp | None] = {f: "sum" for f in kept if any(f not in factors for factors in results)}
    partials = linear(len(operands), (_COTANGENT,))
    granule = _granule(op, reduced)
    return Rule(
        operands, results, reduced=reduced, partials=partials, granule=granule, flops=10.0 * _pairs(op),
        kind="attention",
    )  # fmt: skip


def _is_plain(op: Operation) -> bool:
    """Whether pieces can be computed alone: no sequences are packed, no scores dropped or changed by a function."""
    packed = any(math.prod(a.shape) for a in op.operands[_PACKED])
    return not (packed or op.params["dropout_rate"] or op.params.get("score_mod"))


def _sizes(op: Operation) -> dict[str, int]:
    """Sequences, heads, queries, keys, and `k`, the heads of keys."""
    row = _ROWS[op.params["layout"]]
    query, key = (dict(zip(row, a.shape, strict=True)) for a in op.operands[:2])
    return {"b": query["b"], "n": query["n"], "t": query["t"], "s": key["t"], "k": key["n"]}


def _is_causal(op: Operation) -> bool:
    return "CAUSAL" in op.params["mask_type"].name or op.params["sliding_window_length"] is not None


def _factors(op: Operation, whole: str = "") -> tuple[tuple[Factors, ...], Factors]:
    """Factors of the operands that attention and gradients share, and of the sums of exponentials.

    Args:
      whole: factors that are not split, besides positions that a mask counts.
    """
    sizes, row = _sizes(op), _ROWS[op.params["layout"]]
    masked = "ts" if _is_causal(op) or op.params["mask_type"].name != "NO_MASK" else ""

    def factors(letters: str) -> Factors:
        return tuple(None if f in "_" + whole + masked else f for f in letters)

    key = row.replace("t", "s").replace("n", "_" if sizes["k"] == 1 < sizes["n"] else "n")
    bias = "".join(f if n == sizes[f] else "_" for f, n in zip("bnts", op.operands[_BIAS].shape, strict=False))
    lengths = ["b" if math.prod(a.shape) else "_" for a in op.operands[_LENGTHS]]
    packed = ["_" * len(a.shape) for a in op.operands[_PACKED]]
    return tuple(map(factors, (row, key, key, bias, *lengths, *packed))), factors("bnt")


def _granule(op: Operation, reduced: dict[str, ReduceOp | None]) -> dict[str, int]:
    """Heads stay with the keys that they share. A sum of gradients has no neutral operand, and so equal parts; for
    gradients of a bias cuDNN wants them even."""
    sizes = _sizes(op)
    grouped = {"n": sizes["k"]} if 1 < sizes["k"] < sizes["n"] else {}
    return {f: sizes[f] for f in reduced} | {f: max(sizes[f] // 2, 1) for f in "ts"} | grouped


def _pairs(op: Operation) -> float:
    """Multiplications of queries with the keys that they look at."""
    sizes = _sizes(op)
    queries, keys = sizes["t"], sizes["s"]
    pairs = queries * keys
    if _is_causal(op):
        most = min(queries, keys, op.params["sliding_window_length"] or keys)
        pairs = most * (most + 1) // 2 + (queries - most) * most
    return float(sizes["b"] * sizes["n"] * pairs * op.operands[0].shape[-1])
