"""Rows of tensor parallelism: blocks, a split vocabulary (Shoeybi et al. 2019; Korthikanti et al. 2022)."""

from __future__ import annotations

from functools import partial

import jax
import optax
from jax.sharding import PartitionSpec

import shardc
from benchmarks.gold.model import (
    RATE,
    array,
    attention,
    block,
    descend,
    layer,
    mlp,
    norm,
    parallel_block,
    tied,
    tokens,
    unrolled,
    update,
)
from benchmarks.gold.row import Row
from shardc import S

t = 8
MESH = {"model": t}
COLUMN, ROW = {"model": S(1)}, {"model": S(0)}
BLOCK = {"*/q": COLUMN, "*/k": COLUMN, "*/v": COLUMN, "*/up": COLUMN, "*/o": ROW, "*/down": ROW}
MEGATRON = shardc.rules(BLOCK)
WHOLE = {"model": shardc.B}
TOKENS_SPLIT = {"model": S(1)}


def blocks(name, formula, times, x, block=block, inner=None, L=2, B=2, T=64, D=256):
    A = B * T * D * 4
    return Row(
        name, MESH, descend(partial(unrolled, block=block)), ([layer(D)] * L, array(B, T, D)),
        formula=f"{formula} of each layer", gold=L * times * (t - 1) / t * A, unit=A,
        annotated={"in_placements": {"params": MEGATRON, "x": x}, "out_placements": (None, x, None)},
        auto={"in_placements": {"x": x}, "out_placements": (None, x, None)},
        inner=inner, donated=("params",),
    )  # fmt: skip


def sequence_split(pin):
    """Annotated where a block adds up: what is not inside a product lies in pieces of the sequence."""

    def split(x):
        return pin(x, PartitionSpec(None, "model"))

    def block(p, x_BTD):
        x_BTD = split(x_BTD + attention(p, split(norm(p["ln1"], x_BTD))))
        return split(x_BTD + mlp(p, split(norm(p["ln2"], x_BTD))))

    return descend(partial(unrolled, block=block))


def embedding(wte, tokens, dy):
    y, pull = jax.vjp(lambda w: w[tokens], wte)
    return wte - RATE * pull(dy)[0], y


def head(x, wte, dlogits):
    logits, pull = jax.vjp(lambda x, w: x @ w.T, x, wte)
    dx, dw = pull(dlogits)
    return wte - RATE * dw, logits, dx


def cross_entropy(logits, targets):
    losses, pull = jax.vjp(lambda x: optax.softmax_cross_entropy_with_integer_labels(x, targets), logits)
    return losses, pull(losses * 0 + 1 / losses.size)[0]


def vocabulary(B=4, T=32, D=256, V=4096):
    A = B * T * D * 4
    wte, x, y = array(V, D), array(B, T, D), array(B, T, V)
    one_sum = {"formula": "2(t-1)/t·A", "gold": 2 * (t - 1) / t * A, "unit": A, "donated": ("wte",)}
    yield Row(
        "embedding", MESH, embedding, (wte, tokens(B, T), x), **one_sum,
        annotated={"in_placements": {"wte": ROW, "tokens": WHOLE, "dy": WHOLE}, "out_placements": (None, WHOLE)},
        auto={"in_placements": {"wte": ROW, "dy": WHOLE}, "out_placements": (None, WHOLE)},
    )  # fmt: skip
    yield Row(
        "lm_head", MESH, head, (x, wte, y), **one_sum,
        annotated={
            "in_placements": {"x": WHOLE, "wte": ROW, "dlogits": {"model": S(2)}},
            "out_placements": (None, {"model": S(2)}, WHOLE),
        },
        auto={"in_placements": {"x": WHOLE, "wte": ROW}, "out_placements": (None, None, WHOLE)},
    )  # fmt: skip
    sums = B * T * 4
    split = {"model": S(2)}
    yield Row(
        "cross_entropy", MESH, cross_entropy, (y, tokens(B, T)), "3·2(t-1)/t·4bs", 3 * 2 * (t - 1) / t * sums, sums,
        annotated={"in_placements": {"logits": split, "targets": WHOLE}, "out_placements": (WHOLE, split)},
        auto={"in_placements": {"logits": split}, "out_placements": (None, split)},
        note=f"not to come out: gathered logits, {(t - 1) * B * T * V * 4 // t // 1024} KiB",
    )  # fmt: skip


def whole_model(L=2, B=2, T=64, D=256, V=2048):
    """Embedding, blocks, head and loss: the table is used twice, and split by its words."""
    A, params = B * T * D * 4, {"wte": array(V, D), "blocks": [layer(D)] * L}
    return Row(
        "megatron_model", MESH, update(jax.value_and_grad(tied)), (params, tokens(B, T)),
        "(8L+4)(t-1)/t·A + 3·2(t-1)/t·4bs", (t - 1) / t * ((8 * L + 4) * A + 3 * 2 * 4 * B * T), A,
        annotated={"in_placements": {"params": shardc.rules({"wte": ROW, **BLOCK}), "x": WHOLE}},
        auto={"in_placements": {"params": shardc.rules({"wte": ROW}), "x": WHOLE}}, donated=("params",),
    )  # fmt: skip


ROWS = (
    blocks("megatron", "8(t-1)/t·A", 8, WHOLE),
    blocks("megatron_recompute", "12(t-1)/t·A", 12, WHOLE, block=jax.checkpoint(block)),
    blocks("megatron_sequence", "8(t-1)/t·A", 8, TOKENS_SPLIT, inner=sequence_split),
    blocks("parallel_block", "4(t-1)/t·A", 4, WHOLE, block=parallel_block),
    *vocabulary(),
    whole_model(),
)
