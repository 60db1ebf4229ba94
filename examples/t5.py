"""T5 version 1.0 (Raffel et al. 2020, "Exploring the Limits of Transfer Learning ..."), in flax, over bytes.

An encoder reads text with holes; a decoder, every layer of which looks at what the encoder wrote, says what stood in
them. Sizes: B rows, S positions of the encoder, T of the decoder (Q and P: of either), D width, H heads, K width of a
head, F hidden, V vocabulary.
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

START = 0
"""The token before the decoder's first: a byte that no text has."""


@dataclass(frozen=True)
class Config:
    layers: int  # of the encoder, and of the decoder
    d_model: int
    heads: int
    d_head: int
    hidden: int
    seq: int  # of the text before it gets its holes
    spans: int  # holes in a row of text
    span: int  # tokens in a hole
    vocab: int = 264  # bytes, and a name for each hole
    buckets: int = 32  # distances that are told apart
    farthest: int = 128  # distances from here on are one
    scan_layers: bool = False  # one traced block of each kind, their parameters stacked along a new dimension 0
    remat: bool = False  # recompute each block in the backward pass
    dtype: Any = None  # of activations; None: that of the parameters, which is float32, or float64 under x64
    learning_rate: float = 1e-3


CONFIGS = {
    "tiny": Config(layers=2, d_model=128, heads=8, d_head=16, hidden=512, seq=128, spans=8, span=3, learning_rate=3e-3),
    "test": Config(
        layers=2, d_model=32, heads=4, d_head=8, hidden=64, seq=24, spans=2, span=3, buckets=8, farthest=16,
        learning_rate=1e-2,
    ),
    "small60m": Config(
        layers=6, d_model=512, heads=8, d_head=64, hidden=2048, seq=512, spans=25, span=3, vocab=32128
    ),
}  # fmt: skip


def distances(cfg: Config, queries: int, both_ways: bool):
    """The bucket of each pair (query, key) of a text: near distances have one each, far ones share by their logarithm.

    Where both ways are looked, keys after the query have the upper half of the buckets.
    """
    after_QP = jnp.arange(queries)[None, :] - jnp.arange(queries)[:, None]
    buckets = cfg.buckets // 2 if both_ways else cfg.buckets
    far_QP = jnp.abs(after_QP) if both_ways else jnp.maximum(-after_QP, 0)
    near = buckets // 2
    log_QP = jnp.log(jnp.maximum(far_QP, 1).astype(float) / near) / jnp.log(cfg.farthest / near)
    shared_QP = jnp.minimum(near + (log_QP * (buckets - near)).astype(int), buckets - 1)
    bucket_QP = jnp.where(far_QP < near, far_QP, shared_QP)
    return bucket_QP + buckets * (after_QP > 0) if both_ways else bucket_QP


class Attention(nn.Module):
    """Queries of x (B, Q, D) look at y (B, P, D); `bias_HQP` is added to their scores."""

    cfg: Config

    @nn.compact
    def __call__(self, x_BQD, y_BPD, bias_HQP=None):
        cfg = self.cfg

        def heads(name, z, scale=1.0):
            out = dense(cfg, cfg.heads * cfg.d_head, name=name, scale=scale)(z)
            return out.reshape(*z.shape[:2], cfg.heads, cfg.d_head)

        q_BQHK = heads("q", x_BQD, scale=1 / cfg.d_head)  # instead of a division of the scores
        k_BPHK, v_BPHK = heads("k", y_BPD), heads("v", y_BPD)
        scores_BHQP = jnp.einsum("bqhk,bphk->bhqp", q_BQHK, k_BPHK).astype(float)
        scores_BHQP = scores_BHQP if bias_HQP is None else scores_BHQP + bias_HQP
        weights_BHQP = jax.nn.softmax(scores_BHQP).astype(x_BQD.dtype)
        out_BQHK = jnp.einsum("bhqp,bphk->bqhk", weights_BHQP, v_BPHK)
        return dense(cfg, cfg.d_model, name="out")(out_BQHK.reshape(*x_BQD.shape[:2], -1))


class MLP(nn.Module):
    cfg: Config

    @nn.compact
    def __call__(self, x_BTD):
        h_BTF = jax.nn.relu(dense(self.cfg, self.cfg.hidden, name="up")(x_BTD))
        return dense(self.cfg, self.cfg.d_model, name="down")(h_BTF)


class EncoderBlock(nn.Module):
    cfg: Config

    @nn.compact
    def __call__(self, x_BSD, bias_HSS):
        h_BSD = norm(self.cfg, name="norm_1")(x_BSD)
        x_BSD = x_BSD + Attention(self.cfg, name="attn")(h_BSD, h_BSD, bias_HSS)
        x_BSD = x_BSD + MLP(self.cfg, name="mlp")(norm(self.cfg, name="norm_2")(x_BSD))
        return x_BSD, None  # the carry of a scan, and nothing that it would stack


class DecoderBlock(nn.Module):
    cfg: Config

    @nn.compact
    def __call__(self, x_BTD, encoded_BSD, bias_HTT):
        h_BTD = norm(self.cfg, name="norm_1")(x_BTD)
        x_BTD = x_BTD + Attention(self.cfg, name="attn")(h_BTD, h_BTD, bias_HTT)
        x_BTD = x_BTD + Attention(self.cfg, name="cross")(norm(self.cfg, name="norm_2")(x_BTD), encoded_BSD)
        x_BTD = x_BTD + MLP(self.cfg, name="mlp")(norm(self.cfg, name="norm_3")(x_BTD))
        return x_BTD, None


class Distance(nn.Module):
    """What each head adds to the score of two positions (H, Q, P): one number for each bucket of distances.

    One table serves all layers of the encoder, another all of the decoder. Looking back only, all after is -inf.
    """

    cfg: Config

    @nn.compact
    def __call__(self, queries: int, both_ways: bool):
        cfg = self.cfg
        table_UH = self.param("table", nn.initializers.normal(cfg.d_model**-0.5), (cfg.buckets, cfg.heads), float)
        bias_HQP = table_UH[distances(cfg, queries, both_ways)].transpose(2, 0, 1)
        return bias_HQP if both_ways else jnp.where(jnp.tril(jnp.ones((queries, queries), bool)), bias_HQP, -jnp.inf)


class T5(nn.Module):
    """Logits (B, T, V) for the token after each of `said` (B, T), when `text` (B, S) is what was read.

    `between(i, x)` is called after every block i but the last, and gives what the next one reads; blocks are counted
    through the encoder (0 to layers - 1) and on through the decoder. After the encoder's last block x is the encoder's
    output, which all blocks of the decoder read.
    """

    cfg: Config

    @nn.compact
    def __call__(self, text_BS, said_BT, between: Callable = lambda i, x: x):
        cfg = self.cfg
        wte = nn.Embed(cfg.vocab, cfg.d_model, name="wte", dtype=cfg.dtype, param_dtype=float,
                       embedding_init=nn.initializers.normal(1.0))  # fmt: skip

        x_BSD, bias_HSS = wte(text_BS), Distance(cfg, name="encoder_distance")(text_BS.shape[1], both_ways=True)
        x_BSD = run(cfg, EncoderBlock, "encoder", x_BSD, bias_HSS, between=between)
        encoded_BSD = between(cfg.layers - 1, norm(cfg, name="encoder_norm")(x_BSD))

        x_BTD, bias_HTT = wte(said_BT), Distance(cfg, name="decoder_distance")(said_BT.shape[1], both_ways=False)
        x_BTD = run(
            cfg, DecoderBlock, "decoder", x_BTD, encoded_BSD, bias_HTT, between=lambda i, x: between(cfg.layers + i, x)
        )
        return wte.attend(norm(cfg, name="decoder_norm")(x_BTD) * cfg.d_model**-0.5)  # the head is the embedding


def run(cfg: Config, kind: type[nn.Module], name: str, x, *same, between: Callable):
    """All blocks of a kind, one after the other; each reads `same` too."""
    block: Any = nn.remat(kind, prevent_cse=not cfg.scan_layers) if cfg.remat else kind
    if cfg.scan_layers:
        refuse_cuts(cfg, between, x)
        stacked = nn.scan(
            block, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=nn.broadcast, length=cfg.layers
        )
        return stacked(cfg, name=name)(x, *same)[0]
    for i in range(cfg.layers):
        x, _ = block(cfg, name=f"{name}_{i}")(x, *same)
        x = between(i, x) if i < cfg.layers - 1 else x
    return x


def refuse_cuts(cfg: Config, between: Callable, x):
    """Scanned blocks are one equation: there is nothing between them."""
    cut = [i for i in range(cfg.layers - 1) if between(i, x) is not x]
    if cut:
        raise ValueError(
            f"between changes what follows block {cut[0]}, and scan_layers=True leaves no place between blocks; "
            "take scan_layers=False."
        )


def dense(cfg: Config, features: int, name: str, scale: float = 1.0):
    """A dense layer without bias; its kernel's variance is scale / (its inputs)."""
    init = nn.initializers.variance_scaling(scale, "fan_in", "normal")
    return nn.Dense(features, use_bias=False, name=name, dtype=cfg.dtype, param_dtype=float, kernel_init=init)


def norm(cfg: Config, name: str):
    return nn.RMSNorm(name=name, dtype=cfg.dtype, param_dtype=float, epsilon=1e-6)


def loss(params, batch, cfg: Config, between: Callable = lambda i, x: x):
    """Mean cross entropy of each token of what stood in the holes, when those before it are known."""
    said_BT = jnp.pad(batch["targets"][:, :-1], ((0, 0), (1, 0)), constant_values=START)
    logits_BTV = T5(cfg).apply({"params": params}, batch["inputs"], said_BT, between).astype(float)
    return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, batch["targets"]).mean()


def make_step(cfg: Config, accumulate: Callable = lambda fn: fn, between: Callable = lambda i, x: x):
    """`init_fn(key)` and `step_fn(params, opt_state, batch)`, which returns both anew and the loss.

    `accumulate` may replace `fn(params, batch)` by its mean over parts of the batch; `between` may mark where the
    model is cut.
    """
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(cfg.learning_rate))

    def init_fn(key):
        params = T5(cfg).init(key, jnp.zeros((1, 1), int), jnp.zeros((1, 1), int))["params"]
        return params, optimizer.init(params)

    def step_fn(params, opt_state, batch):
        loss_, grads = accumulate(jax.value_and_grad(partial(loss, cfg=cfg, between=between)))(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss_

    return init_fn, step_fn


def stack_blocks(params, cfg: Config):
    """Parameters of `scan_layers=False` --> those of the same model with `scan_layers=True`."""
    params = dict(params)
    for name in ("encoder", "decoder"):
        blocks = [params.pop(f"{name}_{i}") for i in range(cfg.layers)]
        params[name] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
    return params


def decode(params, cfg: Config, text_BS, length: int):
    """The `length` likeliest next tokens (B, length), one after the other, for text with holes."""

    @jax.jit
    def choose(params, said_BT, last):
        return T5(cfg).apply({"params": params}, text_BS, said_BT)[:, last].argmax(-1)

    said_BT = jnp.full((len(text_BS), length + 1), START)
    for i in range(length):
        said_BT = said_BT.at[:, i + 1].set(choose(params, said_BT, i))
    return said_BT[:, 1:]
