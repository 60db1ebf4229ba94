"""Rows in which tokens lie on all devices: experts (Lepikhin et al. 2020), and attention over a split sequence: heads
exchanged for tokens (Jacobs et al. 2023, Ulysses), keys and values gathered, or a block of them at a time where a ring
would pass them around (Liu et al. 2023)."""

from __future__ import annotations

from functools import partial
from math import ceil

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

import shardc
from benchmarks.gold.model import array, descend, norm
from benchmarks.gold.row import Row
from examples.long_context import attend_in_blocks
from examples.moe import route
from shardc import S

p = 8
SPARE, CHOSEN = 1.25, 2


def experts(rows=16, T=256, D=64, F=512, E=8):
    C = ceil(SPARE * CHOSEN * T / E)

    def layer(w, x_BTD):
        h_BTD = norm(w["ln"], x_BTD)
        dispatch_BTEC, combine_BTEC, _ = route(h_BTD @ w["router"], C)
        x_EBCD = jnp.einsum("btec,btd->ebcd", dispatch_BTEC, h_BTD)
        h_EBCF = jax.nn.gelu(jnp.einsum("ebcd,edf->ebcf", x_EBCD, w["up"]))
        y_EBCD = jnp.einsum("ebcf,efd->ebcd", h_EBCF, w["down"])
        return x_BTD + jnp.einsum("btec,ebcd->btd", combine_BTEC, y_EBCD)

    params = {"ln": array(D), "router": array(D, E), "up": array(E, D, F), "down": array(E, F, D)}
    sent = rows // p * E * C * D * 4
    batch = {"expert": S(0)}
    return Row(
        "experts", {"expert": p}, descend(lambda w, x: (layer(w, x) ** 2).mean()), (params, array(rows, T, D)),
        "4(p-1)/p·c·k·b/p·s·h·e", 4 * (p - 1) / p * sent, sent,
        annotated={
            "in_placements": {"params": shardc.rules({"up": batch, "down": batch, "*": {}}), "x": batch},
            "out_placements": (None, batch, None),
        },
        auto={"in_placements": {"x": batch}, "out_placements": (None, batch, None)}, donated=("params",),
    )  # fmt: skip


def attend(q_BTHK, k_BSIK, v_BSIK):
    """H heads of queries, I of keys and values."""
    rows, T, H, K = q_BTHK.shape
    q_BTIGK = q_BTHK.reshape(rows, T, k_BSIK.shape[2], -1, K)
    scores = jnp.einsum("btigk,bsik->bigts", q_BTIGK, k_BSIK) / K**0.5
    scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -1e9)
    return jnp.einsum("bigts,bsik->btigk", jax.nn.softmax(scores), v_BSIK).reshape(rows, T, H, K)


def with_gradients(attend):
    def step(q, k, v, dy):
        y, pull = jax.vjp(attend, q, k, v)
        return y, *pull(dy)

    return step


def heads_exchanged(pin):
    """Ulysses: annotated where the sequence comes together, and where it is split again."""
    heads = PartitionSpec(None, None, "token")

    def inner(q, k, v):
        return pin(pin(attend(*(pin(x, heads) for x in (q, k, v))), heads), PartitionSpec(None, "token"))

    return with_gradients(inner)


def keys_gathered(pin, outer=lambda f: f):
    def inner(q, k, v):
        return attend(q, pin(k, PartitionSpec()), pin(v, PartitionSpec()))

    return with_gradients(outer(inner))


def sequence(name, formula, times, H, I, K, T, attend=attend, inner=None, hbm=None, note=""):
    """`times`: of A, from the number of keys for each query."""
    q, kv = array(1, T, H, K), array(1, T, I, K)
    A = T * H * K * 4
    split = {"token": S(1)}
    border = {"in_placements": dict.fromkeys(("q", "k", "v", "dy"), split), "out_placements": (split,) * 4}
    return Row(
        name, {"token": p}, with_gradients(attend), (q, kv, kv, q), formula, times(I / H) * (p - 1) / p * A, A // p,
        annotated=border, auto=border, inner=inner, hbm=hbm, note=note,
    )  # fmt: skip


WIDE, NARROW = {"H": 16, "I": 8, "K": 32, "T": 128}, {"H": 2, "I": 1, "K": 64, "T": 256}
"""Sixteen heads that 8 devices can share, and two that they cannot."""
ULYSSES, GATHERED = "(4+4κ)(p-1)/p·A/p", "4κ(p-1)/p·A, gathered keys and values kept"

ROWS = (
    experts(),
    sequence("ulysses", ULYSSES, lambda k: (4 + 4 * k) / p, **WIDE, inner=heads_exchanged),
    sequence("gathered_keys", GATHERED, lambda k: 4 * k, **NARROW, inner=keys_gathered),
    sequence(
        "gathered_keys_again", "6κ(p-1)/p·A", lambda k: 6 * k, **NARROW, attend=jax.checkpoint(attend),
        inner=partial(keys_gathered, outer=jax.checkpoint),
    ),
    sequence(
        "ring_attention", "6κ(p-1)·A/p", lambda k: 6 * k, **NARROW, attend=partial(attend_in_blocks, blocks=p),
        hbm="300KB", note="no device ever has all keys: those of a block of tokens are gathered when its turn comes",
    ),
)  # fmt: skip
