"""Llama 3 (Touvron et al. 2023, Dubey et al. 2024, "The Llama 3 Herd of Models"), in flax, over bytes.

Sizes: B rows, T and S positions, D width, G groups of heads that share keys and values, R heads in a group, K width of
a head, F hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax


@dataclass(frozen=True)
class Config:
    layers: int
    d_model: int
    heads: int
    kv_heads: int  # G: each serves heads / kv_heads query heads
    hidden: int
    seq: int
    vocab: int = 256
    rope_base: float = 10_000.0
    scan_layers: bool = False  # one traced block, its parameters stacked along a new dimension 0
    remat: bool = False  # recompute each block in the backward pass
    dtype: Any = None  # of activations; None: that of the parameters, which is float32, or float64 under x64
    learning_rate: float = 1e-3


CONFIGS = {
    "tiny": Config(layers=4, d_model=128, heads=8, kv_heads=4, hidden=384, seq=128, learning_rate=3e-3),
    "test": Config(layers=2, d_model=32, heads=4, kv_heads=2, hidden=64, seq=16, learning_rate=1e-2),
    "llama3_8b": Config(
        layers=32, d_model=4096, heads=32, kv_heads=8, hidden=14336, seq=8192, vocab=128256, rope_base=500_000.0
    ),
}


def rotate(x_BTHK, base: float):
    """Rotary positions (Su et al. 2021): each pair (i, i + K/2) of a head turned by its position times base^(-2i/K)."""
    T, K = x_BTHK.shape[1], x_BTHK.shape[-1]
    turns_K = base ** (-jnp.arange(K // 2).astype(float) / (K // 2))
    angle_T1K = (jnp.arange(T).astype(float)[:, None] * turns_K)[:, None, :]
    cos, sin = jnp.cos(angle_T1K).astype(x_BTHK.dtype), jnp.sin(angle_T1K).astype(x_BTHK.dtype)
    left, right = jnp.split(x_BTHK, 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


class Attention(nn.Module):
    cfg: Config

    @nn.compact
    def __call__(self, x_BTD):
        cfg = self.cfg
        B, T, D = x_BTD.shape
        G, R, K = cfg.kv_heads, cfg.heads // cfg.kv_heads, D // cfg.heads
        q_BTHK = rotate(dense(cfg, D, name="q")(x_BTD).reshape(B, T, G * R, K), cfg.rope_base)
        k_BSGK = rotate(dense(cfg, G * K, name="k")(x_BTD).reshape(B, T, G, K), cfg.rope_base)
        v_BSGK = dense(cfg, G * K, name="v")(x_BTD).reshape(B, T, G, K)
        scores_BGRTS = jnp.einsum("btgrk,bsgk->bgrts", q_BTHK.reshape(B, T, G, R, K), k_BSGK) / K**0.5
        causal_TS = jnp.tril(jnp.ones((T, T), bool))
        scores_BGRTS = jnp.where(causal_TS, scores_BGRTS.astype(float), -jnp.inf)
        weights_BGRTS = jax.nn.softmax(scores_BGRTS).astype(x_BTD.dtype)
        out_BTGRK = jnp.einsum("bgrts,bsgk->btgrk", weights_BGRTS, v_BSGK)
        return dense(cfg, D, name="out", residual=True)(out_BTGRK.reshape(B, T, D))


class SwiGLU(nn.Module):
    """A hidden layer whose units are gated by another (Shazeer 2020, "GLU Variants Improve Transformer")."""

    cfg: Config

    @nn.compact
    def __call__(self, x_BTD):
        cfg = self.cfg
        gate_BTF = jax.nn.silu(dense(cfg, cfg.hidden, name="gate")(x_BTD))
        h_BTF = gate_BTF * dense(cfg, cfg.hidden, name="up")(x_BTD)
        return dense(cfg, x_BTD.shape[-1], name="down", residual=True)(h_BTF)


class Block(nn.Module):
    cfg: Config

    @nn.compact
    def __call__(self, x_BTD):
        x_BTD = x_BTD + Attention(self.cfg, name="attn")(norm(self.cfg, name="norm_1")(x_BTD))
        x_BTD = x_BTD + SwiGLU(self.cfg, name="mlp")(norm(self.cfg, name="norm_2")(x_BTD))
        return x_BTD, None  # the carry of a scan, and nothing that it would stack


class Llama(nn.Module):
    """Logits (B, T, V) for the token after each of tokens (B, T).

    `between(i, x)` is called after every block i but the last, and gives what the next one reads.
    """

    cfg: Config

    @nn.compact
    def __call__(self, tokens_BT, between: Callable = lambda i, x: x):
        cfg = self.cfg
        x_BTD = embed(cfg, name="embed")(tokens_BT)
        block = nn.remat(Block, prevent_cse=not cfg.scan_layers) if cfg.remat else Block
        if cfg.scan_layers:
            refuse_cuts(cfg, between, x_BTD)
            stacked = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=cfg.layers)
            x_BTD, _ = stacked(cfg, name="blocks")(x_BTD)
        else:
            for i in range(cfg.layers):
                x_BTD, _ = block(cfg, name=f"blocks_{i}")(x_BTD)
                x_BTD = between(i, x_BTD) if i < cfg.layers - 1 else x_BTD
        return dense(cfg, cfg.vocab, name="head")(norm(cfg, name="norm")(x_BTD))


def refuse_cuts(cfg: Config, between: Callable, x):
    """Scanned blocks are one equation: there is nothing between them."""
    cut = [i for i in range(cfg.layers - 1) if between(i, x) is not x]
    if cut:
        raise ValueError(
            f"between changes what follows block {cut[0]}, and scan_layers=True leaves no place between blocks; "
            "take scan_layers=False."
        )


def dense(cfg: Config, features: int, name: str, residual: bool = False):
    """A dense layer; one that writes to the residual stream starts smaller, as it is one of 2·layers."""
    init = nn.initializers.normal(0.02 / (2 * cfg.layers) ** 0.5 if residual else 0.02)
    return nn.Dense(features, use_bias=False, name=name, dtype=cfg.dtype, param_dtype=float, kernel_init=init)


def embed(cfg: Config, name: str):
    init = nn.initializers.normal(0.02)
    return nn.Embed(cfg.vocab, cfg.d_model, name=name, dtype=cfg.dtype, param_dtype=float, embedding_init=init)


def norm(cfg: Config, name: str):
    return nn.RMSNorm(name=name, dtype=cfg.dtype, param_dtype=float, epsilon=1e-5)


def loss(params, batch, cfg: Config, between: Callable = lambda i, x: x):
    """Mean cross entropy of the next token."""
    logits_BTV = Llama(cfg).apply({"params": params}, batch["inputs"], between).astype(float)
    return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, batch["targets"]).mean()


def make_step(cfg: Config, accumulate: Callable = lambda fn: fn, between: Callable = lambda i, x: x):
    """`init_fn(key)` and `step_fn(params, opt_state, batch)`, which returns both anew and the loss.

    `accumulate` may replace `fn(params, batch)` by its mean over parts of the batch; `between` may mark where the
    model is cut.
    """
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(cfg.learning_rate))

    def init_fn(key):
        params = Llama(cfg).init(key, jnp.zeros((1, cfg.seq), int))["params"]
        return params, optimizer.init(params)

    def step_fn(params, opt_state, batch):
        loss_, grads = accumulate(jax.value_and_grad(partial(loss, cfg=cfg, between=between)))(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss_

    return init_fn, step_fn


def stack_blocks(params, cfg: Config):
    """Parameters of `scan_layers=False` --> those of the same model with `scan_layers=True`."""
    params = dict(params)
    blocks = [params.pop(f"blocks_{i}") for i in range(cfg.layers)]
    return {**params, "blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)}
