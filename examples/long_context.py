"""Causal attention over sequences that are too long for a table of scores: a loop over blocks of keys, with what the
softmax needs of the blocks so far (Milakov and Gimelshein 2018), and a backward pass that computes the weights again
(Dao et al. 2022, "FlashAttention").

Split over devices by tokens, each has its queries, and gathers one block of keys after the other where all of them
would not fit: as much as a ring passes around (Liu et al. 2023, "Ring Attention"), and no more memory. A block has
every `blocks`-th token, so that each device has some of each, and with a causal mask as much to do (Brandon et al.
2023, "Striped Attention").

Letters: B rows, T queries, S keys, H heads of queries, I of keys and values, G queries for each of these, K width.
"""

from __future__ import annotations

from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp

Array: TypeAlias = jax.Array


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def attend_in_blocks(q_BTHK: Array, k_BSIK: Array, v_BSIK: Array, blocks: int) -> Array:
    """softmax(q·k/√K)·v, each query over the keys up to its own. `blocks` divides the number of keys."""
    return _forward(q_BTHK, k_BSIK, v_BSIK, blocks)[0]


def _blocks_of(k_BSIK: Array, v_BSIK: Array, blocks: int) -> tuple[Array, Array, Array]:
    """Keys and values of one block after the other, and the first token of each."""

    def dealt(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(x.shape[0], -1, blocks, *x.shape[2:]), 2, 0)

    return dealt(k_BSIK), dealt(v_BSIK), jnp.arange(blocks)


def _scores(q_BTIGK: Array, k_BSIK: Array, first: Array, blocks: int) -> Array:
    scores = jnp.einsum("btigk,bsik->bigts", q_BTIGK, k_BSIK) / q_BTIGK.shape[-1] ** 0.5
    tokens = first + blocks * jnp.arange(k_BSIK.shape[1])
    return jnp.where(jnp.arange(q_BTIGK.shape[1])[:, None] >= tokens, scores, -1e9)


def _grouped(q_BTHK: Array, heads: int) -> Array:
    return q_BTHK.reshape(*q_BTHK.shape[:2], heads, -1, q_BTHK.shape[-1])


def _forward(q: Array, k: Array, v: Array, blocks: int) -> tuple[Array, tuple[Array, ...]]:
    q_BTIGK = _grouped(q, k.shape[2])
    nothing_BIGT = jnp.zeros((*q_BTIGK.shape[:1], *q_BTIGK.shape[2:4], q.shape[1]), q.dtype)

    def step(carry: tuple[Array, ...], block: tuple[Array, ...]) -> tuple[tuple[Array, ...], None]:
        top, total, sums_BIGTK = carry
        k_BSIK, v_BSIK, first = block
        scores = _scores(q_BTIGK, k_BSIK, first, blocks)
        higher = jnp.maximum(top, scores.max(-1))
        weights, before = jnp.exp(scores - higher[..., None]), jnp.exp(top - higher)
        sums_BIGTK = before[..., None] * sums_BIGTK + jnp.einsum("bigts,bsik->bigtk", weights, v_BSIK)
        return (higher, before * total + weights.sum(-1), sums_BIGTK), None

    begin = nothing_BIGT - 1e9, nothing_BIGT, jnp.zeros((*nothing_BIGT.shape, q.shape[-1]), q.dtype)
    (top, total, sums_BIGTK), _ = jax.lax.scan(step, begin, _blocks_of(k, v, blocks))
    y = jnp.einsum("bigtk->btigk", sums_BIGTK / total[..., None]).reshape(q.shape)
    return y, (q, k, v, y, top + jnp.log(total))


def _backward(blocks: int, kept: tuple[Array, ...], dy: Array) -> tuple[Array, Array, Array]:
    q, k, v, y, normalizer_BIGT = kept
    q_BTIGK, dy_BTIGK = _grouped(q, k.shape[2]), _grouped(dy, k.shape[2])
    mean_BIGT = jnp.einsum("btigk,btigk->bigt", dy_BTIGK, _grouped(y, k.shape[2]))

    def step(dq: Array, block: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        k_BSIK, v_BSIK, first = block
        weights = jnp.exp(_scores(q_BTIGK, k_BSIK, first, blocks) - normalizer_BIGT[..., None])
        dweights = jnp.einsum("btigk,bsik->bigts", dy_BTIGK, v_BSIK)
        dscores = weights * (dweights - mean_BIGT[..., None]) / q.shape[-1] ** 0.5
        dk_BSIK = jnp.einsum("bigts,btigk->bsik", dscores, q_BTIGK)
        dv_BSIK = jnp.einsum("bigts,btigk->bsik", weights, dy_BTIGK)
        return dq + jnp.einsum("bigts,bsik->btigk", dscores, k_BSIK), (dk_BSIK, dv_BSIK)

    dq, (dk, dv) = jax.lax.scan(step, jnp.zeros_like(q_BTIGK), _blocks_of(k, v, blocks))
    return dq.reshape(q.shape), *(jnp.moveaxis(x, 0, 2).reshape(k.shape) for x in (dk, dv))


attend_in_blocks.defvjp(_forward, _backward)
