"""GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"), in flax, over bytes.

Sizes: B rows, T and S positions, D width, H heads, K width of a head, V vocabulary.
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
    seq: int
    vocab: int = 256
    scan_layers: bool = False  # one traced block, its parameters stacked along a new dimension 0
    remat: bool = False  # recompute each block in the backward pass
    dtype: Any = None  # of activations; None: that of the parameters, which is float32, or float64 under x64
    learning_rate: float = 1e-3


CONFIGS = {
    "tiny": Config(layers=2, d_model=128, heads=8, seq=128, learning_rate=3e-3),
    "test": Config(layers=2, d_model=32, heads=4, seq=16, learning_rate=1e-2),
    "small124m": Config(layers=12, d_model=768, heads=12, seq=1024, vocab=50257, learning_rate=6e-4),
}


class Attention(nn.Module):
    cfg: Config

    @nn.compact
    def __call__(self, x_BTD):
        cfg = self.cfg
        B, T, D = x_BTD.shape
        q_BTHK, k_BSHK, v_BSHK = (
            dense(cfg, D, name=name)(x_BTD).reshape(B, T, cfg.heads, D // cfg.heads) for name in ("q", "k", "v")
        )
        scores_BHTS = jnp.einsum("bthk,bshk->bhts", q_BTHK, k_BSHK) / (D // cfg.heads) ** 0.5
        causal_TS = jnp.tril(jnp.ones((T, T), bool))
        scores_BHTS = jnp.where(causal_TS, scores_BHTS.astype(float), -jnp.inf)
        weights_BHTS = jax.nn.softmax(scores_BHTS).astype(x_BTD.dtype)
        out_BTHK = jnp.einsum("bhts,bshk->bthk", weights_BHTS, v_BSHK)
        return dense(cfg, D, name="out", residual=True)(out_BTHK.reshape(B, T, D))


class MLP(nn.Module):
    cfg: Config

    @nn.compact
    def __call__(self, x_BTD):
        D = x_BTD.shape[-1]
        h_BTF = jax.nn.gelu(dense(self.cfg, 4 * D, name="up")(x_BTD))
        return dense(self.cfg, D, name="down", residual=True)(h_BTF)


class Block(nn.Module):
    cfg: Config

    @nn.compact
    def __call__(self, x_BTD):
        x_BTD = x_BTD + Attention(self.cfg, name="attn")(norm(self.cfg, name="ln_1")(x_BTD))
        x_BTD = x_BTD + MLP(self.cfg, name="mlp")(norm(self.cfg, name="ln_2")(x_BTD))
        return x_BTD, None  # the carry of a scan, and nothing that it would stack


class GPT2(nn.Module):
    """Logits (B, T, V) for the token after each of tokens (B, T), T at most `cfg.seq`.

    `between(i, x)` is called after every block i but the last, and gives what the next one reads.
    """

    cfg: Config

    @nn.compact
    def __call__(self, tokens_BT, between: Callable = lambda i, x: x):
        cfg = self.cfg
        wte = embed(cfg, cfg.vocab, name="wte")
        wpe = embed(cfg, cfg.seq, name="wpe")
        x_BTD = wte(tokens_BT) + wpe(jnp.arange(tokens_BT.shape[1]))
        block = nn.remat(Block, prevent_cse=not cfg.scan_layers) if cfg.remat else Block
        if cfg.scan_layers:
            refuse_cuts(cfg, between, x_BTD)
            stacked = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=cfg.layers)
            x_BTD, _ = stacked(cfg, name="blocks")(x_BTD)
        else:
            for i in range(cfg.layers):
                x_BTD, _ = block(cfg, name=f"blocks_{i}")(x_BTD)
                x_BTD = between(i, x_BTD) if i < cfg.layers - 1 else x_BTD
        return wte.attend(norm(cfg, name="ln_f")(x_BTD))  # the head is the embedding once more


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
    return nn.Dense(features, name=name, dtype=cfg.dtype, param_dtype=float, kernel_init=init)


def embed(cfg: Config, rows: int, name: str):
    init = nn.initializers.normal(0.02)
    return nn.Embed(rows, cfg.d_model, name=name, dtype=cfg.dtype, param_dtype=float, embedding_init=init)


def norm(cfg: Config, name: str):
    return nn.LayerNorm(name=name, dtype=cfg.dtype, param_dtype=float, epsilon=1e-5)


def loss(params, batch, cfg: Config, between: Callable = lambda i, x: x):
    """Mean cross entropy of the next token."""
    logits_BTV = GPT2(cfg).apply({"params": params}, batch["inputs"], between).astype(float)
    return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, batch["targets"]).mean()


def make_step(cfg: Config, accumulate: Callable = lambda fn: fn, between: Callable = lambda i, x: x):
    """`init_fn(key)` and `step_fn(params, opt_state, batch)`, which returns both anew and the loss.

    `accumulate` may replace `fn(params, batch)` by its mean over parts of the batch; `between` may mark where the
    model is cut.
    """
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(cfg.learning_rate))

    def init_fn(key):
        params = GPT2(cfg).init(key, jnp.zeros((1, cfg.seq), int))["params"]
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
