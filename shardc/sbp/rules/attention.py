"""cuDNN's attention, as of `jax.nn.dot_product_attention(..., implementation="cudnn")`: softmax(q kᵀ) v and its
gradients, one operation each, whose scores never reach memory.

Operands are query, key, value, bias, the lengths of both, and four that only packed or paged sequences have; those that
are not given are empty. The gradients read besides: the sums of the exponentials, the result, and its cotangent.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final, Literal

from shardc.sbp.causal import (
    COTANGENT,
    KEY,
    QUERY,
    RESULT,
    SUMS,
    VALUE,
    is_causal,
    over_tokens,
    reach_of,
    token_sends,
    tokens_held,
    tokens_moved,
    windowed,
    windowed_held,
)
from shardc.sbp.placement import ReduceOp
from shardc.sbp.signature import Factors, OperandWindow, Operation, Partials, Rule, linear, rule

_ROWS: Final = {0: "btn_", 1: "bnt_"}
"""Factors of a query by its layout: sequence, query, head."""
_BIAS, _LENGTHS, _PACKED = 3, slice(4, 6), slice(6, 10)


@rule("dot_product_attention_fwd_wrapper")
def attention(op: Operation) -> Rule | None:
    """Split by sequences, heads and queries; linear in the values."""
    if not _is_plain(op):
        return None
    operands, sums = _factors(op)
    partials: tuple[Partials, ...] = linear(len(operands), (VALUE,)) if len(op.results) == 1 else ()
    results = (operands[0], sums)[: len(op.results)]
    return _over_tokens(
        op,
        Rule(
            operands, results, partials=partials, granule=_granule(op, {}), flops=4.0 * _pairs(op), kind="attention",
        ),
    )  # fmt: skip


@rule("dot_product_attention_bwd_wrapper")
def attention_gradients(op: Operation) -> Rule | None:
    """Split by sequences, heads and queries, and by keys if nothing is masked; linear in the cotangent. It multiplies
    five times where the attention does twice, as it computes the scores again."""
    if not _is_plain(op):
        return None
    given, sums = _factors(op)
    operands, results = (*given, sums, given[0], given[0]), given[: len(op.results)]
    kept = dict.fromkeys(f for factors in results for f in factors if f)
    alone = [f for f in kept if f != "s" or _split_of(op) != "zigzag"]
    reduced: dict[str, ReduceOp | None] = {f: "sum" for f in alone if any(f not in factors for factors in results)}
    partials = linear(len(operands), (COTANGENT,))
    granule = _granule(op, reduced)
    return _over_tokens(
        op,
        Rule(
            operands, results, reduced=reduced, partials=partials, granule=granule, flops=10.0 * _pairs(op),
            kind="attention",
        ),
    )  # fmt: skip


def _over_tokens(op: Operation, found: Rule) -> Rule:
    """The rule with what devices do and send if tokens are split."""
    kind = _split_of(op)
    if kind in ("zigzag", "blocks"):
        split = "t" if kind == "zigzag" else "s"
        return replace(
            found, around={"s": "t"}, exchanged={split: token_sends}, across=over_tokens, held=tokens_held,
            moved=tokens_moved,
        )  # fmt: skip
    if kind == "window":
        gradients, reach = len(op.operands) > COTANGENT, reach_of(op)
        after = [QUERY, SUMS, RESULT, COTANGENT] if gradients else []
        windows = [OperandWindow(i, "t", QUERY, start=-reach, width=reach + 1) for i in (KEY, VALUE)]
        windows += [OperandWindow(i, "t", QUERY, width=reach + 1) for i in after]
        # rows before the block see a triangle of keys, those after it a whole window
        margin = {"t": reach // 2 + (reach if gradients else 0)}
        return replace(found, windows=tuple(windows), across=windowed, held=windowed_held, margin=margin)
    return found


def _split_of(op: Operation) -> Literal["", "zigzag", "window", "blocks"]:
    """How devices that share queries do it, where positions count: in zigzag, or with the keys of a window. Blocks meet
    where nothing is masked. Empty if tokens may not be exchanged."""
    sizes, mask = _sizes(op), op.params["mask_type"].name
    if "PADDING" in mask or any(math.prod(a.shape) for a in op.operands[_BIAS : _LENGTHS.stop]):
        return ""
    if not is_causal(op):
        return "blocks" if mask == "NO_MASK" else ""
    if sizes["t"] != sizes["s"]:
        return ""
    if op.params["sliding_window_length"] is not None:
        return "window"
    return "zigzag" if sizes["t"] % 2 == 0 else ""


def _is_plain(op: Operation) -> bool:
    """Whether pieces can be computed alone: no sequences are packed, no scores dropped or changed by a function."""
    packed = any(math.prod(a.shape) for a in op.operands[_PACKED])
    return not (packed or op.params["dropout_rate"] or op.params.get("score_mod"))


def _sizes(op: Operation) -> dict[str, int]:
    """Sequences, heads, queries, keys, and `k`, the heads of keys."""
    row = _ROWS[op.params["layout"]]
    query, key = (dict(zip(row, a.shape, strict=True)) for a in op.operands[:2])
    return {"b": query["b"], "n": query["n"], "t": query["t"], "s": key["t"], "k": key["n"]}


def _factors(op: Operation) -> tuple[tuple[Factors, ...], Factors]:
    """Factors of the operands that attention and gradients share, and of the sums of exponentials."""
    sizes, row, kind = _sizes(op), _ROWS[op.params["layout"]], _split_of(op)
    whole = "" if kind or (not is_causal(op) and op.params["mask_type"].name == "NO_MASK") else "ts"

    def factors(letters: str) -> Factors:
        return tuple(None if f in "_" + whole else f for f in letters)

    key = row if kind == "window" else row.replace("t", "s")
    key = key.replace("n", "_" if sizes["k"] == 1 < sizes["n"] else "n")
    bias = "".join(f if n == sizes[f] else "_" for f, n in zip("bnts", op.operands[_BIAS].shape, strict=False))
    lengths = ["b" if math.prod(a.shape) else "_" for a in op.operands[_LENGTHS]]
    packed = ["_" * len(a.shape) for a in op.operands[_PACKED]]
    return tuple(map(factors, (row, key, key, bias, *lengths, *packed))), factors("bnt")


def _granule(op: Operation, reduced: dict[str, ReduceOp | None]) -> dict[str, int]:
    """Heads stay with the keys that they share. A sum of gradients has no neutral operand, and so equal parts; for
    gradients of a bias cuDNN wants them even."""
    sizes = _sizes(op)
    grouped = {"n": sizes["k"]} if 1 < sizes["k"] < sizes["n"] else {}
    found = {f: sizes[f] for f in reduced} | {f: max(sizes[f] // 2, 1) for f in "ts"} | grouped
    return {f: n for f, n in found.items() if f != "t" or _split_of(op) != "window"}


def _pairs(op: Operation) -> float:
    """Multiplications of queries with the keys that they look at."""
    sizes = _sizes(op)
    queries, keys = sizes["t"], sizes["s"]
    pairs = queries * keys
    if is_causal(op):
        most = min(queries, keys, op.params["sliding_window_length"] or keys)
        pairs = most * (most + 1) // 2 + (queries - most) * most
    return float(sizes["b"] * sizes["n"] * pairs * op.operands[0].shape[-1])
