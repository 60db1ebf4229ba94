"""A vision transformer (Dosovitskiy et al. 2020, "An Image is Worth 16x16 Words"), in flax.nnx, for digits.

An image is cut into patches; each is a token, and one more, the class token, says at the end what the image is. Sizes:
N rows, T tokens and S tokens looked at, D width, H heads, K width of a head, C classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx


@dataclass(frozen=True)
class Config:
    layers: int
    d_model: int
    heads: int
    patch: int  # pixels on each side
    image: tuple[int, int, int] = (8, 8, 1)
    classes: int = 10
    parallel: bool = False  # attention beside the MLP, of normalised queries and keys (Dehghani et al. 2023, ViT-22B)
    scan_layers: bool = False  # one traced block, its parameters stacked along a new dimension 0
    remat: bool = False  # recompute each block in the backward pass
    dtype: Any = None  # of activations; None: that of the parameters, which is float32, or float64 under x64
    learning_rate: float = 1e-3


CONFIGS = {
    "tiny": Config(layers=4, d_model=64, heads=4, patch=2),
    "test": Config(layers=2, d_model=16, heads=2, patch=2, learning_rate=1e-2),
    "base16": Config(layers=12, d_model=768, heads=12, patch=16, image=(224, 224, 3), classes=1000),
}


class Attention(nnx.Module):
    def __init__(self, cfg: Config, rngs: nnx.Rngs):
        self.heads, self.normed = cfg.heads, cfg.parallel
        self.q, self.k, self.v, self.out = (dense(cfg, cfg.d_model, cfg.d_model, rngs) for _ in range(4))
        if cfg.parallel:
            self.q_norm, self.k_norm = (head_norm(cfg, rngs) for _ in range(2))

    def __call__(self, x_NTD):
        N, T, D = x_NTD.shape
        q_NTHK, k_NSHK, v_NSHK = (w(x_NTD).reshape(N, T, self.heads, -1) for w in (self.q, self.k, self.v))
        if self.normed:
            q_NTHK, k_NSHK = self.q_norm(q_NTHK), self.k_norm(k_NSHK)
        scores_NHTS = jnp.einsum("nthk,nshk->nhts", q_NTHK, k_NSHK) / (D // self.heads) ** 0.5
        weights_NHTS = jax.nn.softmax(scores_NHTS.astype(float)).astype(x_NTD.dtype)
        out_NTHK = jnp.einsum("nhts,nshk->nthk", weights_NHTS, v_NSHK)
        return self.out(out_NTHK.reshape(N, T, D))


class MLP(nnx.Module):
    def __init__(self, cfg: Config, rngs: nnx.Rngs):
        self.up = dense(cfg, cfg.d_model, 4 * cfg.d_model, rngs)
        self.down = dense(cfg, 4 * cfg.d_model, cfg.d_model, rngs)

    def __call__(self, x_NTD):
        return self.down(jax.nn.gelu(self.up(x_NTD)))


class Block(nnx.Module):
    def __init__(self, cfg: Config, rngs: nnx.Rngs):
        self.parallel = cfg.parallel
        self.ln_1, self.attn = norm(cfg, rngs), Attention(cfg, rngs)
        if not cfg.parallel:
            self.ln_2 = norm(cfg, rngs)
        self.mlp = MLP(cfg, rngs)

    def __call__(self, x_NTD):
        if self.parallel:
            h_NTD = self.ln_1(x_NTD)
            return x_NTD + self.attn(h_NTD) + self.mlp(h_NTD)
        x_NTD = x_NTD + self.attn(self.ln_1(x_NTD))
        return x_NTD + self.mlp(self.ln_2(x_NTD))


class ViT(nnx.Module):
    """Logits (N, C) of images (N, height, width, channels) whose sides are whole patches.

    `between(i, x)` is called after every block i but the last, and gives what the next one reads.
    """

    def __init__(self, cfg: Config, rngs: nnx.Rngs):
        height, width, channels = cfg.image
        tokens = (height // cfg.patch) * (width // cfg.patch) + 1
        self.cfg = cfg
        self.patch = dense(cfg, cfg.patch**2 * channels, cfg.d_model, rngs)
        self.token = nnx.Param(jnp.zeros(cfg.d_model))
        self.position = nnx.Param(0.02 * jax.random.normal(rngs.params(), (tokens, cfg.d_model), dtype=float))
        if cfg.scan_layers:
            stacked = nnx.split_rngs(splits=cfg.layers)(nnx.vmap(partial(Block, cfg)))
            self.blocks = stacked(rngs)
        else:
            self.blocks = nnx.List([Block(cfg, rngs) for _ in range(cfg.layers)])
        self.ln_f, self.head = norm(cfg, rngs), dense(cfg, cfg.d_model, cfg.classes, rngs)

    def __call__(self, image_NHWC, between: Callable = lambda i, x: x):
        cfg = self.cfg
        x_NTD = self.patch(patches(image_NHWC, cfg.patch))
        token_N1D = jnp.broadcast_to(self.token[...].astype(x_NTD.dtype), (len(x_NTD), 1, x_NTD.shape[-1]))
        x_NTD = jnp.concatenate([token_N1D, x_NTD], axis=1) + self.position[...].astype(x_NTD.dtype)
        if cfg.scan_layers:
            refuse_cuts(cfg, between, x_NTD)
            graph, stacked = nnx.split(self.blocks)
            run = rematerialized(cfg, lambda state, x_NTD: nnx.merge(graph, state)(x_NTD))
            x_NTD, _ = jax.lax.scan(lambda x_NTD, state: (run(state, x_NTD), None), x_NTD, stacked)
        else:
            for i, block in enumerate(self.blocks):
                graph, state = nnx.split(block)
                x_NTD = rematerialized(cfg, lambda state, x, graph=graph: nnx.merge(graph, state)(x))(state, x_NTD)
                x_NTD = between(i, x_NTD) if i < cfg.layers - 1 else x_NTD
        return self.head(self.ln_f(x_NTD[:, 0]))


def rematerialized(cfg: Config, fn: Callable) -> Callable:
    return jax.checkpoint(fn, prevent_cse=not cfg.scan_layers) if cfg.remat else fn


def refuse_cuts(cfg: Config, between: Callable, x):
    """Scanned blocks are one equation: there is nothing between them."""
    cut = [i for i in range(cfg.layers - 1) if between(i, x) is not x]
    if cut:
        raise ValueError(
            f"between changes what follows block {cut[0]}, and scan_layers=True leaves no place between blocks; "
            "take scan_layers=False."
        )


def patches(image_NHWC, side: int):
    """(N, H, W, C) --> (N, patches, side * side * C), by rows."""
    N, H, W, C = image_NHWC.shape
    cut = image_NHWC.reshape(N, H // side, side, W // side, side, C)
    return cut.swapaxes(2, 3).reshape(N, (H // side) * (W // side), side * side * C)


def dense(cfg: Config, d_in: int, d_out: int, rngs: nnx.Rngs):
    init = nnx.initializers.xavier_uniform()
    return nnx.Linear(d_in, d_out, kernel_init=init, dtype=cfg.dtype, param_dtype=float, rngs=rngs)


def norm(cfg: Config, rngs: nnx.Rngs):
    return nnx.LayerNorm(cfg.d_model, epsilon=1e-6, dtype=cfg.dtype, param_dtype=float, rngs=rngs)


def head_norm(cfg: Config, rngs: nnx.Rngs):
    width = cfg.d_model // cfg.heads
    return nnx.LayerNorm(width, epsilon=1e-6, use_bias=False, dtype=cfg.dtype, param_dtype=float, rngs=rngs)


def forward(params, image_NHWC, cfg: Config, between: Callable = lambda i, x: x):
    """Logits (N, C) of a model with these parameters, a dict of its modules'."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: ViT(cfg, nnx.Rngs(0))))
    return nnx.merge(graph, nnx.State(params))(image_NHWC, between)


def loss(params, batch, cfg: Config, between: Callable = lambda i, x: x):
    """Mean cross entropy."""
    logits_NC = forward(params, batch["image"], cfg, between).astype(float)
    return optax.softmax_cross_entropy_with_integer_labels(logits_NC, batch["label"]).mean()


def make_step(cfg: Config, accumulate: Callable = lambda fn: fn, between: Callable = lambda i, x: x):
    """`init_fn(key)` and `step_fn(params, opt_state, batch)`, which returns both anew and the loss.

    `accumulate` may replace `fn(params, batch)` by its mean over parts of the batch; `between` may mark where the
    model is cut.
    """
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(cfg.learning_rate))

    def init_fn(key):
        params = nnx.to_pure_dict(nnx.state(ViT(cfg, nnx.Rngs(key)), nnx.Param))
        return params, optimizer.init(params)

    def step_fn(params, opt_state, batch):
        loss_, grads = accumulate(jax.value_and_grad(partial(loss, cfg=cfg, between=between)))(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss_

    return init_fn, step_fn


def stack_blocks(params, cfg: Config):
    """Parameters of `scan_layers=False` --> those of the same model with `scan_layers=True`."""
    blocks = [params["blocks"][i] for i in range(cfg.layers)]
    return {**params, "blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)}
