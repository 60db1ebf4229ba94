"""BERT (Devlin et al. 2018, "BERT: Pre-training of Deep Bidirectional Transformers"), in flax, over bytes.

It fills in what is hidden in a text; sentences and their order, its second task, are left out. Every weight has the
names of its dimensions with it, as flax's partitioning metadata, and the layers are scanned. Sizes: B rows, T and S
positions, M hidden ones of them, D width, H heads, K width of a head, F hidden units, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

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
    vocab: int = 257  # the bytes, and last the mark that hides one
    learning_rate: float = 1e-3


CONFIGS = {
    "tiny": Config(layers=2, d_model=128, heads=8, seq=128, learning_rate=3e-3),
    "test": Config(layers=2, d_model=32, heads=4, seq=20, learning_rate=1e-2),
    "base110m": Config(layers=12, d_model=768, heads=12, seq=512, vocab=30522, learning_rate=1e-4),
}


class Attention(nn.Module):
    cfg: Config

    @nn.compact
    def __call__(self, x_BTD):
        B, T, D = x_BTD.shape
        q_BTHK, k_BSHK, v_BSHK = (
            dense(D, ("embed", "heads"), name=name)(x_BTD).reshape(B, T, self.cfg.heads, -1) for name in ("q", "k", "v")
        )
        scores_BHTS = jnp.einsum("bthk,bshk->bhts", q_BTHK, k_BSHK) / (D // self.cfg.heads) ** 0.5
        out_BTHK = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores_BHTS), v_BSHK)
        return dense(D, ("heads", "embed"), name="out")(out_BTHK.reshape(B, T, D))


class MLP(nn.Module):
    cfg: Config

    @nn.compact
    def __call__(self, x_BTD):
        D = x_BTD.shape[-1]
        h_BTF = jax.nn.gelu(dense(4 * D, ("embed", "mlp"), name="up")(x_BTD))
        return dense(D, ("mlp", "embed"), name="down")(h_BTF)


class Block(nn.Module):
    """Each half is normalized after it is added to what it has read."""

    cfg: Config

    @nn.compact
    def __call__(self, x_BTD):
        x_BTD = norm("ln_1")(x_BTD + Attention(self.cfg, name="attn")(x_BTD))
        x_BTD = norm("ln_2")(x_BTD + MLP(self.cfg, name="mlp")(x_BTD))
        return x_BTD, None  # the carry of a scan, and nothing that it would stack


class BERT(nn.Module):
    """Logits (B, M, V) for what stood at the positions (B, M) of tokens (B, T)."""

    cfg: Config

    @nn.compact
    def __call__(self, tokens_BT, positions_BM):
        cfg = self.cfg
        wte = embed(cfg.vocab, cfg.d_model, ("vocab", "embed"), name="wte")
        wpe = embed(cfg.seq, cfg.d_model, ("position", "embed"), name="wpe")
        x_BTD = norm("ln_0")(wte(tokens_BT) + wpe(jnp.arange(tokens_BT.shape[1])))
        scanned = nn.scan(
            Block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=cfg.layers,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x_BTD, _ = scanned(cfg, name="blocks")(x_BTD)
        x_BMD = jnp.take_along_axis(x_BTD, positions_BM[:, :, None], axis=1)
        x_BMD = norm("ln_head")(jax.nn.gelu(dense(cfg.d_model, ("embed", "out"), name="head")(x_BMD)))
        bias = nn.with_logical_partitioning(nn.initializers.zeros, ("vocab",))
        return wte.attend(x_BMD) + self.param("bias", bias, (cfg.vocab,), float)


def dense(features: int, names: tuple[str, str], name: str):
    init = nn.with_logical_partitioning(nn.initializers.normal(0.02), names)
    bias = nn.with_logical_partitioning(nn.initializers.zeros, names[1:])
    return nn.Dense(features, name=name, param_dtype=float, kernel_init=init, bias_init=bias)


def embed(rows: int, features: int, names: tuple[str, str], name: str):
    init = nn.with_logical_partitioning(nn.initializers.normal(0.02), names)
    return nn.Embed(rows, features, name=name, param_dtype=float, embedding_init=init)


def norm(name: str):
    return nn.LayerNorm(name=name, param_dtype=float, epsilon=1e-12)


def loss(params, batch, cfg: Config):
    """Mean cross entropy of what is hidden."""
    logits_BMV = BERT(cfg).apply({"params": params}, batch["inputs"], batch["positions"])
    return optax.softmax_cross_entropy_with_integer_labels(logits_BMV, batch["targets"]).mean()


def make_step(cfg: Config, accumulate: Callable = lambda fn: fn):
    """`init_fn(key)` and `step_fn(params, opt_state, batch)`, which returns both anew and the loss.

    Parameters, and the optimizer's moments of them, are in flax's boxes, which name their dimensions. `accumulate` may
    replace `fn(params, batch)` by its mean over parts of the batch.
    """
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(cfg.learning_rate))

    def init_fn(key):
        params = BERT(cfg).init(key, jnp.zeros((1, cfg.seq), int), jnp.zeros((1, 1), int))["params"]
        return params, optimizer.init(params)

    def step_fn(params, opt_state, batch):
        loss_, grads = accumulate(jax.value_and_grad(partial(loss, cfg=cfg)))(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss_

    return init_fn, step_fn
