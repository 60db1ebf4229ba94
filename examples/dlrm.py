"""DLRM (Naumov et al. 2019, "Deep Learning Recommendation Model for Personalization and Recommendation Systems").

In plain JAX. Categories are looked up in tables, numbers go through an MLP to the same width, every pair of these
vectors is multiplied, and a second MLP says how likely a row is a click. Tables hold most of the parameters, and a
step reads few of their rows. Sizes: N rows, I numbers, J tables, R rows of a table, D width, P = J + 1 vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax


@dataclass(frozen=True)
class Config:
    tables: tuple[int, ...]  # rows of each
    numbers: int
    width: int
    bottom: tuple[int, ...]  # hidden units of the MLP of numbers
    top: tuple[int, ...]  # and of that of the products
    learning_rate: float = 1e-3


CONFIGS = {
    "tiny": Config(tables=(256, 4096, 16384, 16384), numbers=4, width=32, bottom=(64,), top=(128, 64)),
    "test": Config(tables=(256, 50, 64, 37), numbers=4, width=8, bottom=(16,), top=(16,), learning_rate=1e-2),
}


def init(key, cfg: Config):
    """{"tables": [(R, D), ...], "bottom": [...], "top": [...]}; a layer is a kernel and a bias."""

    def layers(key, widths):
        keys = jax.random.split(key, len(widths) - 1)
        return [
            {"kernel": jax.random.normal(k, pair) * (2 / sum(pair)) ** 0.5, "bias": jnp.zeros(pair[1])}
            for k, pair in zip(keys, pairwise(widths), strict=True)
        ]

    bottom, top, *keys = jax.random.split(key, 2 + len(cfg.tables))
    vectors = len(cfg.tables) + 1
    return {
        "tables": [
            jax.random.uniform(k, (rows, cfg.width), minval=-1, maxval=1) * rows**-0.5
            for k, rows in zip(keys, cfg.tables, strict=True)
        ],
        "bottom": layers(bottom, (cfg.numbers, *cfg.bottom, cfg.width)),
        "top": layers(top, (cfg.width + vectors * (vectors - 1) // 2, *cfg.top, 1)),
    }


def mlp(layers, x):
    for layer in layers[:-1]:
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
    return x @ layers[-1]["kernel"] + layers[-1]["bias"]


def forward(params, numbers_NI, categories_NJ):
    """Logits (N,) of a click."""
    dense_ND = jax.nn.relu(mlp(params["bottom"], numbers_NI))
    found = [table_RD[categories_NJ[:, j]] for j, table_RD in enumerate(params["tables"])]
    vectors_NPD = jnp.stack([dense_ND, *found], axis=1)
    products_NPP = jnp.einsum("npd,nqd->npq", vectors_NPD, vectors_NPD)
    pairs = [products_NPP[:, p, :p] for p in range(1, len(found) + 1)]  # each once, none with itself
    return mlp(params["top"], jnp.concatenate([dense_ND, *pairs], axis=1))[:, 0]


def loss(params, batch):
    """Mean cross entropy of click and no click."""
    logits_N = forward(params, batch["numbers"], batch["categories"])
    return optax.sigmoid_binary_cross_entropy(logits_N, batch["click"]).mean()


def make_step(cfg: Config, accumulate: Callable = lambda fn: fn):
    """`init_fn(key)` and `step_fn(params, opt_state, batch)`, which returns both anew and the loss.

    `accumulate` may replace `fn(params, batch)` by its mean over parts of the batch.
    """
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(cfg.learning_rate))

    def init_fn(key):
        params = init(key, cfg)
        return params, optimizer.init(params)

    def step_fn(params, opt_state, batch):
        loss_, grads = accumulate(jax.value_and_grad(loss))(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss_

    return init_fn, step_fn


def ranking(params, batch) -> float:
    """How often a click is ranked above what is none (the area under the ROC curve)."""
    logits_N = np.asarray(jax.jit(forward)(params, batch["numbers"], batch["categories"]))
    clicked = batch["click"] > 0
    return float((logits_N[clicked][:, None] > logits_N[~clicked]).mean())
