"""A GPT whose hidden layers are experts (Lepikhin et al. 2020, "GShard"), in flax, over bytes.

Each token goes to the few experts that its router scores highest. An expert takes at most C tokens of a row; those that
come later pass it by. The blocks may be Llama's instead, as in Mixtral (Jiang et al. 2024), and have what DeepSeek-V3
(DeepSeek-AI 2024) adds: an expert that all tokens go to, first blocks without experts, latent attention.

Sizes: B rows, T and S positions, D width, H heads, K width of a head, L of a latent, E experts, C places in an expert,
J experts of a token, F hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from examples import llama


@dataclass(frozen=True)
class Latent:
    """Sizes of latent attention: queries, and keys with values, come out of a few numbers for each token."""

    queries: int
    keys: int
    plain: int  # of a head's width, what knows no positions
    turned: int  # and what is turned by them, the keys of all heads alike
    values: int


@dataclass(frozen=True)
class Config:
    layers: int
    d_model: int
    heads: int
    experts: int
    hidden: int  # of each expert
    seq: int
    chosen: int = 2  # experts of a token
    group: int = 0  # tokens of a row that are dealt out together; 0: all
    spare: float = 1.25  # places in the experts, for each that is needed if all experts are liked equally
    balance: float = 0.01  # weight of the loss that wants them liked equally
    vocab: int = 256
    llama: bool = False  # blocks, positions and head of Llama, with `kv_heads`; experts are gated
    kv_heads: int = 0
    rope_base: float = 10_000.0
    latent: Latent | None = None  # instead of Llama's attention
    shared: int = 0  # hidden units of the expert that all tokens go to
    dense: int = 0  # blocks at the start that have no experts, but one hidden layer
    dense_hidden: int = 0  # of so many units
    scan_layers: bool = False  # one traced block, its parameters stacked along a new dimension 0
    remat: bool = False  # recompute each block in the backward pass
    dtype: Any = None  # of activations; None: that of the parameters, which is float32, or float64 under x64
    learning_rate: float = 1e-3


CONFIGS = {
    "tiny": Config(layers=2, d_model=128, heads=8, experts=8, hidden=256, seq=128, learning_rate=3e-3),
    "test": Config(layers=2, d_model=32, heads=4, experts=4, hidden=64, seq=16, learning_rate=1e-2),
    "test_mixtral": Config(
        layers=2, d_model=32, heads=4, experts=4, hidden=32, seq=16, group=8, llama=True, kv_heads=2, learning_rate=1e-2
    ),
    "test_deepseek": Config(
        layers=3, d_model=32, heads=4, experts=8, hidden=16, seq=16, chosen=3, llama=True,
        latent=Latent(24, 16, 8, 4, 8), shared=16, dense=1, dense_hidden=64, learning_rate=1e-2,
    ),
}  # fmt: skip


def route(scores_BTE, places: int, chosen: int = 2):
    """Which token goes where: `dispatch` (B, T, E, C) of 0 and 1, `combine` (B, T, E, C) of weights, and the imbalance.

    Places are given in the order of the text, so that no token's way depends on a later one. The imbalance is 1 if the
    router likes all experts equally (Fedus et al. 2021, "Switch Transformers"); it is taken row by row, so that its
    mean does not depend on which rows stand together in a batch.
    """
    E = scores_BTE.shape[-1]
    gates_BTE = jax.nn.softmax(scores_BTE)
    _, best_BTJ = jax.lax.top_k(gates_BTE, chosen)
    chosen_BTJE = jax.nn.one_hot(best_BTJ, E, dtype=int)
    chosen_BTE = chosen_BTJE.sum(2)
    place_BTE = jnp.cumsum(chosen_BTE, axis=1) - chosen_BTE
    seat_BTEC = jax.nn.one_hot(place_BTE, places, dtype=gates_BTE.dtype)  # all 0 where the expert is full
    dispatch_BTEC = chosen_BTE[..., None] * seat_BTEC
    weights_BTE = gates_BTE / (gates_BTE * chosen_BTE).sum(-1, keepdims=True)
    first_BE = chosen_BTJE[:, :, 0].astype(gates_BTE.dtype).mean(1)
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


class LatentAttention(nn.Module):
    """DeepSeek-AI 2024, "DeepSeek-V2", section 2.1."""

    cfg: Config

    @nn.compact
    def __call__(self, x_BTD):
        cfg, (B, T, D) = self.cfg, x_BTD.shape
        of, base = cfg.latent, cfg.rope_base

        def heads(name, z_BTL, *widths):
            out = dense(cfg, cfg.heads * sum(widths), name=name)(z_BTL).reshape(B, T, cfg.heads, sum(widths))
            return jnp.split(out, [widths[0]], axis=-1)

        q_BTL = norm(cfg, name="q_norm")(dense(cfg, of.queries, name="q_down")(x_BTD))
        kv_BSL, turned_BSK = jnp.split(dense(cfg, of.keys + of.turned, name="kv_down")(x_BTD), [of.keys], axis=-1)
        q_BTHK, turned_BTHK = heads("q", q_BTL, of.plain, of.turned)
        k_BSHK, v_BSHK = heads("kv", norm(cfg, name="kv_norm")(kv_BSL), of.plain, of.values)
        turned_BTHK = llama.rotate(turned_BTHK, base)
        turned_BSK = llama.rotate(turned_BSK[:, :, None], base)[:, :, 0]
        scores_BHTS = jnp.einsum("bthk,bshk->bhts", q_BTHK, k_BSHK)
        scores_BHTS = scores_BHTS + jnp.einsum("bthk,bsk->bhts", turned_BTHK, turned_BSK)
        scores_BHTS = (scores_BHTS / (of.plain + of.turned) ** 0.5).astype(float)
        scores_BHTS = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores_BHTS, -jnp.inf)
        weights_BHTS = jax.nn.softmax(scores_BHTS).astype(x_BTD.dtype)
        out_BTHK = jnp.einsum("bhts,bshk->bthk", weights_BHTS, v_BSHK)
        return dense(cfg, D, name="out", residual=True)(out_BTHK.reshape(B, T, -1))


class Experts(nn.Module):
    """E hidden layers, their weights stacked along dimension 0, and the imbalance of their router."""

    cfg: Config

    @nn.compact
    def __call__(self, x_BTD):
        cfg, whole = self.cfg, x_BTD.shape
        T, D = cfg.group or whole[1], whole[2]
        x_BTD = x_BTD.reshape(-1, T, D)  # rows, or groups of them
        init, out_init = (nn.initializers.normal(s) for s in (0.02, 0.02 / (2 * cfg.layers) ** 0.5))
        up_EDF = self.param("up", init, (cfg.experts, D, cfg.hidden), float).astype(x_BTD.dtype)
        down_EFD = self.param("down", out_init, (cfg.experts, cfg.hidden, D), float).astype(x_BTD.dtype)
        scores_BTE = dense(cfg, cfg.experts, name="router")(x_BTD).astype(float)
        places = ceil(cfg.spare * cfg.chosen * T / cfg.experts)
        dispatch_BTEC, combine_BTEC, imbalance = route(scores_BTE, places, cfg.chosen)
        x_EBCD = jnp.einsum("btec,btd->ebcd", dispatch_BTEC.astype(x_BTD.dtype), x_BTD)
        h_EBCF = jnp.einsum("ebcd,edf->ebcf", x_EBCD, up_EDF)
        if cfg.llama:
            gate_EDF = self.param("gate", init, (cfg.experts, D, cfg.hidden), float).astype(x_BTD.dtype)
            h_EBCF = h_EBCF * jax.nn.silu(jnp.einsum("ebcd,edf->ebcf", x_EBCD, gate_EDF))
        else:
            h_EBCF = jax.nn.gelu(h_EBCF)
        y_EBCD = jnp.einsum("ebcf,efd->ebcd", h_EBCF, down_EFD)
        y_BTD = jnp.einsum("btec,ebcd->btd", combine_BTEC.astype(x_BTD.dtype), y_EBCD)
        return y_BTD.reshape(whole), imbalance


class Block(nn.Module):
    cfg: Config

    @nn.compact
    def __call__(self, x_BTD):
        x_BTD = x_BTD + attention(self.cfg)(norm(self.cfg, name="ln_1")(x_BTD))
        h_BTD = norm(self.cfg, name="ln_2")(x_BTD)
        y_BTD, imbalance = Experts(self.cfg, name="experts")(h_BTD)
        if self.cfg.shared:
            y_BTD = y_BTD + hidden_layer(self.cfg, self.cfg.shared, name="shared")(h_BTD)
        return x_BTD + y_BTD, imbalance  # the carry of a scan, and what it stacks


class DenseBlock(nn.Module):
    cfg: Config

    @nn.compact
    def __call__(self, x_BTD):
        x_BTD = x_BTD + attention(self.cfg)(norm(self.cfg, name="ln_1")(x_BTD))
        return x_BTD + hidden_layer(self.cfg, self.cfg.dense_hidden, name="mlp")(norm(self.cfg, name="ln_2")(x_BTD))


def attention(cfg: Config):
    kind = LatentAttention if cfg.latent else llama.Attention if cfg.llama else Attention
    return kind(cfg, name="attn")


def hidden_layer(cfg: Config, units: int, name: str):
    return llama.SwiGLU(replace(cfg, hidden=units), name=name)


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
        x_BTD = wte(tokens_BT)
        if not cfg.llama:
            x_BTD = x_BTD + embed(cfg, cfg.seq, name="wpe")(jnp.arange(tokens_BT.shape[1]))
        layers, last = cfg.layers - cfg.dense, cfg.layers - 1
        for i in range(cfg.dense):
            x_BTD = (nn.remat(DenseBlock) if cfg.remat else DenseBlock)(cfg, name=f"dense_{i}")(x_BTD)
            x_BTD = between(i, x_BTD) if i < last else x_BTD
        block = nn.remat(Block, prevent_cse=not cfg.scan_layers) if cfg.remat else Block
        if cfg.scan_layers:
            refuse_cuts(cfg, between, x_BTD)
            stacked = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=layers)
            x_BTD, imbalances = stacked(cfg, name="blocks")(x_BTD)
        else:
            imbalances = []
            for i in range(layers):
                x_BTD, imbalance = block(cfg, name=f"blocks_{i}")(x_BTD)
                x_BTD = between(cfg.dense + i, x_BTD) if cfg.dense + i < last else x_BTD
                imbalances.append(imbalance)
            imbalances = jnp.stack(imbalances)
        x_BTD = norm(cfg, name="ln_f")(x_BTD)
        head = dense(cfg, cfg.vocab, name="head") if cfg.llama else wte.attend
        return head(x_BTD), imbalances.mean()


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
    if cfg.llama:
        return llama.norm(cfg, name)
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
    blocks = [params.pop(f"blocks_{i}") for i in range(cfg.layers - cfg.dense)]
    return {**params, "blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)}
