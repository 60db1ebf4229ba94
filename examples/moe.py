"""A GPT whose hidden layers are experts (Lepikhin et al. 2020, "GShard"), in flax, over bytes.

Each token goes to the two experts that its router scores highest. An expert takes at most C tokens of a row; those that
come later pass it by. Sizes: B rows, T and S positions, D width, H heads, K width of a head, E experts, C places in an
expert, F hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import ceil
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
    experts: int
    hidden: int  # of each expert
    seq: int
    spare: float = 1.25  # places in the experts, for each that is needed if all experts are liked equally
    balance: float = 0.01  # weight of the loss that wants them liked equally
    vocab: int = 256
    scan_layers: bool = False  # one traced block, its parameters stacked along a new dimension 0
    remat: bool = False  # recompute each block in the backward pass
    dtype: Any = None  # of activations; None: that of the parameters, which is float32, or float64 under x64
    learning_rate: float = 1e-3


CONFIGS = {
    "tiny": Config(layers=2, d_model=128, heads=8, experts=8, hidden=256, seq=128, learning_rate=3e-3),
    "test": Config(layers=2, d_model=32, heads=4, experts=4, hidden=64, seq=16, learning_rate=1e-2),
}


def route(scores_BTE, places: int):
    """Which token goes where: `dispatch` (B, T, E, C) of 0 and 1, `combine` (B, T, E, C) of weights, and the imbalance.

    Places are given in the order of the text, so that no token's way depends on a later one. The imbalance is 1 if the
    router likes all experts equally (Fedus et al. 2021, "Switch Transformers"); it is taken row by row, so that its
    mean does not depend on which rows stand together in a batch.
    """
    E = scores_BTE.shape[-1]
    gates_BTE = jax.nn.softmax(scores_BTE)
    _, best_BT2 = jax.lax.top_k(gates_BTE, 2)
    chosen_BT2E = jax.nn.one_hot(best_BT2, E, dtype=int)
    chosen_BTE = chosen_BT2E.sum(2)
    place_BTE = jnp.cumsum(chosen_BTE, axis=1) - chosen_BTE
    seat_BTEC = jax.nn.one_hot(place_BTE, places, dtype=gates_BTE.dtype)  # all 0 where the expert is full
    dispatch_BTEC = chosen_BTE[..., None] * seat_BTEC
    weights_BTE = gates_BTE / (gates_BTE * chosen_BTE).sum(-1, keepdims=True)
    first_BE = chosen_BT2E[:, :, 0].astype(gates_BTE.dtype).mean(1)
    imbalance = E * (first_BE * gates_BTE.mean(1)).sum(-1).mean()
    return dispatch_BTEC, dispatch_BTEC * weights_BTE[..., None], imbalance


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


class Experts(nn.Module):
    """E hidden layers, their weights stacked along dimension 0, and the imbalance of their router."""

    cfg: Config

    @nn.compact
    def __call__(self, x_BTD):
        cfg, (_, T, D) = self.cfg, x_BTD.shape
        init, out_init = (nn.initializers.normal(s) for s in (0.02, 0.02 / (2 * cfg.layers) ** 0.5))
        up_EDF = self.param("up", init, (cfg.experts, D, cfg.hidden), float).astype(x_BTD.dtype)
        down_EFD = self.param("down", out_init, (cfg.experts, cfg.hidden, D), float).astype(x_BTD.dtype)
        scores_BTE = dense(cfg, cfg.experts, name="router")(x_BTD).astype(float)
        dispatch_BTEC, combine_BTEC, imbalance = route(scores_BTE, ceil(cfg.spare * 2 * T / cfg.experts))
        x_EBCD = jnp.einsum("btec,btd->ebcd", dispatch_BTEC.astype(x_BTD.dtype), x_BTD)
        h_EBCF = jax.nn.gelu(jnp.einsum("ebcd,edf->ebcf", x_EBCD, up_EDF))
        y_EBCD = jnp.einsum("ebcf,efd->ebcd", h_EBCF, down_EFD)
        return jnp.einsum("btec,ebcd->btd", combine_BTEC.astype(x_BTD.dtype), y_EBCD), imbalance


class Block(nn.Module):
    cfg: Config

    @nn.compact
    def __call__(self, x_BTD):
        x_BTD = x_BTD + Attention(self.cfg, name="attn")(norm(self.cfg, name="ln_1")(x_BTD))
        y_BTD, imbalance = Experts(self.cfg, name="experts")(norm(self.cfg, name="ln_2")(x_BTD))
        return x_BTD + y_BTD, imbalance  # the carry of a scan, and what it stacks


class MoE(nn.Module):
    """Logits (B, T, V) for the token after each of tokens (B, T), T at most `cfg.seq`, and the mean imbalance.

    `between(i, x)` is called after every block i but the last, and gives what the next one reads. A block's imbalance
    is not handed to it.
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
            x_BTD, imbalances = stacked(cfg, name="blocks")(x_BTD)
        else:
            imbalances = []
            for i in range(cfg.layers):
                x_BTD, imbalance = block(cfg, name=f"blocks_{i}")(x_BTD)
                x_BTD = between(i, x_BTD) if i < cfg.layers - 1 else x_BTD
                imbalances.append(imbalance)
            imbalances = jnp.stack(imbalances)
        return wte.attend(norm(cfg, name="ln_f")(x_BTD)), imbalances.mean()


def refuse_cuts(cfg: Config, between: Callable, x):
    """Scanned blocks are one equation: there is nothing between them."""
    cut = [i for i in range(cfg.layers - 1) if between(i, x) is not x]
    if cut:
        raise ValueError(
            f"between changes what follows block {cut[0]}, and scan_layers=True leaves no place between blocks; "
            "take scan_layers=False."
        )


def dense(cfg: Config, features: int, name: str, residual: bool = False):
    """A dense layer without bias; one that writes to the residual stream starts smaller, as it is one of 2·layers."""
    init = nn.initializers.normal(0.02 / (2 * cfg.layers) ** 0.5 if residual else 0.02)
    return nn.Dense(features, use_bias=False, name=name, dtype=cfg.dtype, param_dtype=float, kernel_init=init)


def embed(cfg: Config, rows: int, name: str):
    init = nn.initializers.normal(0.02)
    return nn.Embed(rows, cfg.d_model, name=name, dtype=cfg.dtype, param_dtype=float, embedding_init=init)


def norm(cfg: Config, name: str):
    return nn.LayerNorm(name=name, dtype=cfg.dtype, param_dtype=float, epsilon=1e-5)


def loss(params, batch, cfg: Config, between: Callable = lambda i, x: x):
    """Mean cross entropy of the next token, and a little of the imbalance."""
    logits_BTV, imbalance = MoE(cfg).apply({"params": params}, batch["inputs"], between)
    cross_entropy_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV.astype(float), batch["targets"])
    return cross_entropy_BT.mean() + cfg.balance * imbalance


def make_step(cfg: Config, accumulate: Callable = lambda fn: fn, between: Callable = lambda i, x: x):
    """`init_fn(key)` and `step_fn(params, opt_state, batch)`, which returns both anew and the loss.

    `accumulate` may replace `fn(params, batch)` by its mean over parts of the batch; `between` may mark where the
    model is cut.
    """
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(cfg.learning_rate))

    def init_fn(key):
        params = MoE(cfg).init(key, jnp.zeros((1, cfg.seq), int))["params"]
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
