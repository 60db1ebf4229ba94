"""MLP-Mixer for 8x8 digits, as modules of equinox (Tolstikhin et al. 2021, "MLP-Mixer: An all-MLP Architecture for
Vision").

Sizes: N rows, T patches of an image, D width of each, F hidden, C classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import equinox as eqx
import jax
import optax


@dataclass(frozen=True)
class Config:
    blocks: int = 4
    patch: int = 2  # pixels of its side
    side: int = 8  # of an image
    width: int = 64  # D
    hidden: int = 256  # F
    classes: int = 10
    learning_rate: float = 1e-3

    @property
    def patches(self) -> int:
        return (self.side // self.patch) ** 2


CONFIGS = {"tiny": Config(), "test": Config(blocks=2, width=16, hidden=32)}


class Mlp(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    act: Callable

    def __init__(self, size: int, hidden: int, key, bias: bool = True):
        up, down = jax.random.split(key)
        self.up = eqx.nn.Linear(size, hidden, key=up)
        self.down = eqx.nn.Linear(hidden, size, use_bias=bias, key=down)
        self.act = jax.nn.gelu

    def __call__(self, x):
        return self.down(self.act(self.up(x)))


class Block(eqx.Module):
    """Mixes the patches of an image, then the features of each patch."""

    norms: list[eqx.nn.LayerNorm]
    patches: Mlp
    features: Mlp

    def __init__(self, cfg: Config, key):
        patches, features = jax.random.split(key)
        self.norms = [eqx.nn.LayerNorm(cfg.width) for _ in range(2)]
        # whoever reads a patch normalizes its features first: what is added to all of them is lost
        self.patches = Mlp(cfg.patches, cfg.hidden, patches, bias=False)
        self.features = Mlp(cfg.width, cfg.hidden, features)

    def __call__(self, x_TD):
        x_TD = x_TD + jax.vmap(self.patches)(jax.vmap(self.norms[0])(x_TD).T).T
        return x_TD + jax.vmap(self.features)(jax.vmap(self.norms[1])(x_TD))


class Mixer(eqx.Module):
    embed: eqx.nn.Linear
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, cfg: Config, key):
        embed, head, *blocks = jax.random.split(key, 2 + cfg.blocks)
        self.embed = eqx.nn.Linear(cfg.patch**2, cfg.width, key=embed)
        self.blocks = [Block(cfg, key) for key in blocks]
        self.norm = eqx.nn.LayerNorm(cfg.width)
        self.head = eqx.nn.Linear(cfg.width, cfg.classes, key=head)

    def __call__(self, patches_NTP, between: Callable):
        x_NTD = jax.vmap(jax.vmap(self.embed))(patches_NTP)
        for i, block in enumerate(self.blocks):
            x_NTD = jax.vmap(block)(x_NTD)
            x_NTD = between(i, x_NTD) if i < len(self.blocks) - 1 else x_NTD
        return jax.vmap(self.head)(jax.vmap(jax.vmap(self.norm))(x_NTD).mean(1))


def model_of(params, cfg: Config) -> Mixer:
    """The module of its arrays alone; what is no array, such as an activation, comes from the config."""
    shapes = eqx.filter_eval_shape(Mixer, cfg, jax.random.key(0))
    return eqx.combine(params, eqx.filter(shapes, lambda x: not isinstance(x, jax.ShapeDtypeStruct)))


def forward(params, image_NHW1, cfg: Config, between: Callable = lambda i, x: x):
    """Logits (N, C). `between(i, x)` is called after every block i but the last, and gives what the next one reads."""
    n, p = image_NHW1.shape[0], cfg.patch
    grid = image_NHW1.reshape(n, cfg.side // p, p, cfg.side // p, p).swapaxes(2, 3)
    return model_of(params, cfg)(grid.reshape(n, cfg.patches, p * p), between)


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
        params = eqx.filter(Mixer(cfg, key), eqx.is_array)
        return params, optimizer.init(params)

    def step_fn(params, opt_state, batch):
        loss_, grads = accumulate(jax.value_and_grad(partial(loss, cfg=cfg, between=between)))(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss_

    return init_fn, step_fn
