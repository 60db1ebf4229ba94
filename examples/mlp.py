"""A residual multilayer perceptron for 8x8 digits, in plain JAX: the parameters are a dict.

Sizes: N rows, D width of the residual stream (an image's 64 pixels), F hidden, C classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import optax


@dataclass(frozen=True)
class Config:
    blocks: int = 2
    width: int = 64  # D: the pixels of an image
    hidden: int = 256
    classes: int = 10
    learning_rate: float = 1e-3


CONFIGS = {"tiny": Config(), "test": Config(hidden=32)}


def init(key, cfg: Config):
    """{"blocks": [{"up", "down"}, ...], "head"}, each a kernel and a bias, in JAX's default float."""

    def dense(key, d_in, d_out):
        return {"kernel": jax.random.normal(key, (d_in, d_out)) / jnp.sqrt(d_in), "bias": jnp.zeros(d_out)}

    *keys, head = jax.random.split(key, 2 * cfg.blocks + 1)
    blocks = [
        {"up": dense(up, cfg.width, cfg.hidden), "down": dense(down, cfg.hidden, cfg.width)}
        for up, down in zip(keys[::2], keys[1::2], strict=True)
    ]
    return {"blocks": blocks, "head": dense(head, cfg.width, cfg.classes)}


def forward(params, image_NHW1, between: Callable = lambda i, x: x):
    """Logits (N, C). `between(i, x)` is called after every block i but the last, and gives what the next one reads."""

    def dense(p, x):
        return x @ p["kernel"] + p["bias"]

    x_ND = image_NHW1.reshape(image_NHW1.shape[0], -1)
    for i, block in enumerate(params["blocks"]):
        h_NF = jax.nn.relu(dense(block["up"], x_ND))
        x_ND = x_ND + dense(block["down"], h_NF)
        x_ND = between(i, x_ND) if i < len(params["blocks"]) - 1 else x_ND
    return dense(params["head"], x_ND)


def loss(params, batch, between: Callable = lambda i, x: x):
    """Mean cross entropy."""
    logits_NC = forward(params, batch["image"], between)
    return optax.softmax_cross_entropy_with_integer_labels(logits_NC, batch["label"]).mean()


def make_step(cfg: Config, accumulate: Callable = lambda fn: fn, between: Callable = lambda i, x: x):
    """`init_fn(key)` and `step_fn(params, opt_state, batch)`, which returns both anew and the loss.

    `accumulate` may replace `fn(params, batch)` by its mean over parts of the batch; `between` may mark where the
    model is cut.
    """
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(cfg.learning_rate))

    def init_fn(key):
        params = init(key, cfg)
        return params, optimizer.init(params)

    def step_fn(params, opt_state, batch):
        loss_, grads = accumulate(jax.value_and_grad(partial(loss, between=between)))(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss_

    return init_fn, step_fn
