"""The programs of the rows: a transformer's parts in plain JAX, which know of no mesh.

Sizes: B rows, T and S positions, D width, H heads, K width of a head, F hidden, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

HEADS = 8
RATE = 1e-3
OPTIMIZER = optax.adam(RATE)


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def tokens(*shape: int) -> jax.ShapeDtypeStruct:
    return array(*shape, dtype=jnp.int32)


def layer(D: int) -> dict[str, Any]:
    """Parameters of one block."""
    return {"ln1": array(D), "ln2": array(D), "up": array(D, 4 * D), "down": array(4 * D, D)} | {
        name: array(D, D) for name in "qkvo"
    }


def stacked(D: int, L: int) -> dict[str, Any]:
    return jax.tree.map(lambda p: array(L, *p.shape), layer(D))


def matrices(params: Any, least_rank: int = 2) -> int:
    """Bytes of the weights that are matrices; stacked ones have one dimension more."""
    return sum(p.size * p.dtype.itemsize for p in jax.tree.leaves(params) if p.ndim >= least_rank)


def norm(gain, x):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5) * gain


def attention(p, h_BTD):
    B, T, D = h_BTD.shape
    q, k, v = (jnp.reshape(h_BTD @ p[name], (B, T, HEADS, D // HEADS)) for name in "qkv")
    scores = jnp.einsum("bthk,bshk->bhts", q, k) / (D // HEADS) ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -1e9)
    return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores), v).reshape(B, T, D) @ p["o"]


def mlp(p, h_BTD):
    return jax.nn.gelu(h_BTD @ p["up"]) @ p["down"]


def block(p, x_BTD):
    x_BTD = x_BTD + attention(p, norm(p["ln1"], x_BTD))
    return x_BTD + mlp(p, norm(p["ln2"], x_BTD))


def parallel_block(p, x_BTD):
    """Both halves read one norm, and are added up at once (Wang and Komatsuzaki 2021, GPT-J)."""
    h_BTD = norm(p["ln1"], x_BTD)
    return x_BTD + attention(p, h_BTD) + mlp(p, h_BTD)


def unrolled(params, x, block=block):
    for p in params:
        x = block(p, x)
    return (x**2).mean()


def scanned(params, x, block=block):
    """`unrolled` over stacked parameters."""
    return (jax.lax.scan(lambda x, p: (block(p, x), None), x, params)[0] ** 2).mean()


def descend(loss: Callable[..., Any]) -> Callable[..., Any]:
    """(params, x) -> new params, the gradient of x, the loss: a stack of layers in the middle of a model."""

    def step(params, x):
        value, (grads, dx) = jax.value_and_grad(loss, argnums=(0, 1))(params, x)
        return jax.tree.map(lambda p, g: p - RATE * g, params, grads), dx, value

    return step


def update(gradients: Callable[..., Any]) -> Callable[..., Any]:
    """(params, x) -> new params, the loss."""

    def step(params, x):
        value, grads = gradients(params, x)
        return jax.tree.map(lambda p, g: p - RATE * g, params, grads), value

    return step


def train(gradients: Callable[..., Any]) -> Callable[..., Any]:
    """(params, state, x) -> new params, new state, the loss: a whole step with Adam."""

    def step(params, state, x):
        value, grads = gradients(params, x)
        updates, state = OPTIMIZER.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def tied(params, tokens):
    """Loss of a language model whose head is its embedding."""
    x = params["wte"][tokens]
    for p in params["blocks"]:
        x = block(p, x)
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["wte"].T, tokens).mean()
