"""A vision transformer (Dosovitskiy et al. 2020, "An Image is Worth 16x16 Words"), in flax.nnx, for digits.

An image is cut into patches; each is a token, and one more, the class token, says at the end what the image is. Sizes:
N rows, T tokens and S tokens looked at, D width, H heads, K width of a head, C classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

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
    learning_rate: float = 1e-3


CONFIGS = {
    "tiny": Config(layers=4, d_model=64, heads=4, patch=2),
    "test": Config(layers=2, d_model=16, heads=2, patch=2, learning_rate=1e-2),
    "base16": Config(layers=12, d_model=768, heads=12, patch=16, image=(224, 224, 3), classes=1000),
}


class Attention(nnx.Module):
    def __init__(self, cfg: Config, rngs: nnx.Rngs):
        self.heads = cfg.heads
        self.q, self.k, self.v, self.out = (dense(cfg.d_model, cfg.d_model, rngs) for _ in range(4))

    def __call__(self, x_NTD):
        N, T, D = x_NTD.shape
        q_NTHK, k_NSHK, v_NSHK = (w(x_NTD).reshape(N, T, self.heads, -1) for w in (self.q, self.k, self.v))
        scores_NHTS = jnp.einsum("nthk,nshk->nhts", q_NTHK, k_NSHK) / (D // self.heads) ** 0.5
        out_NTHK = jnp.einsum("nhts,nshk->nthk", jax.nn.softmax(scores_NHTS), v_NSHK)
        return self.out(out_NTHK.reshape(N, T, D))


class MLP(nnx.Module):
    def __init__(self, cfg: Config, rngs: nnx.Rngs):
        self.up = dense(cfg.d_model, 4 * cfg.d_model, rngs)
        self.down = dense(4 * cfg.d_model, cfg.d_model, rngs)

    def __call__(self, x_NTD):
        return self.down(jax.nn.gelu(self.up(x_NTD)))


class Block(nnx.Module):
    def __init__(self, cfg: Config, rngs: nnx.Rngs):
        self.ln_1, self.attn = norm(cfg, rngs), Attention(cfg, rngs)
        self.ln_2, self.mlp = norm(cfg, rngs), MLP(cfg, rngs)

    def __call__(self, x_NTD):
        x_NTD = x_NTD + self.attn(self.ln_1(x_NTD))
        return x_NTD + self.mlp(self.ln_2(x_NTD))


class ViT(nnx.Module):
    """Logits (N, C) of images (N, height, width, channels) whose sides are whole patches.

    `between(i, x)` is called after every block i but the last, and gives what the next one reads.
    """

    def __init__(self, cfg: Config, rngs: nnx.Rngs):
        height, width, channels = cfg.image
        tokens = (height // cfg.patch) * (width // cfg.patch) + 1
        self.side = cfg.patch
        self.patch = dense(cfg.patch**2 * channels, cfg.d_model, rngs)
        self.token = nnx.Param(jnp.zeros(cfg.d_model))
        self.position = nnx.Param(0.02 * jax.random.normal(rngs.params(), (tokens, cfg.d_model), dtype=float))
        self.blocks = nnx.List([Block(cfg, rngs) for _ in range(cfg.layers)])
        self.ln_f, self.head = norm(cfg, rngs), dense(cfg.d_model, cfg.classes, rngs)

    def __call__(self, image_NHWC, between: Callable = lambda i, x: x):
        x_NTD = self.patch(patches(image_NHWC, self.side))
        token_N1D = jnp.broadcast_to(self.token[...], (len(x_NTD), 1, x_NTD.shape[-1]))
        x_NTD = jnp.concatenate([token_N1D, x_NTD], axis=1) + self.position[...]
        for i, block in enumerate(self.blocks):
            x_NTD = block(x_NTD)
            x_NTD = between(i, x_NTD) if i < len(self.blocks) - 1 else x_NTD
        return self.head(self.ln_f(x_NTD[:, 0]))


def patches(image_NHWC, side: int):
    """(N, H, W, C) --> (N, patches, side * side * C), by rows."""
    N, H, W, C = image_NHWC.shape
    cut = image_NHWC.reshape(N, H // side, side, W // side, side, C)
    return cut.swapaxes(2, 3).reshape(N, (H // side) * (W // side), side * side * C)


def dense(d_in: int, d_out: int, rngs: nnx.Rngs):
    return nnx.Linear(d_in, d_out, kernel_init=nnx.initializers.xavier_uniform(), param_dtype=float, rngs=rngs)


def norm(cfg: Config, rngs: nnx.Rngs):
    return nnx.LayerNorm(cfg.d_model, epsilon=1e-6, param_dtype=float, rngs=rngs)


def forward(params, image_NHWC, cfg: Config, between: Callable = lambda i, x: x):
    """Logits (N, C) of a model with these parameters, a dict of its modules'."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: ViT(cfg, nnx.Rngs(0))))
    return nnx.merge(graph, nnx.State(params))(image_NHWC, between)


def loss(params, batch, cfg: Config, between: Callable = lambda i, x: x):
    """Mean cross entropy."""
    logits_NC = forward(params, batch["image"], cfg, between)
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
