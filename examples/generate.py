"""Text that a trained model writes, for the models of the zoo that read one byte after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

TEMPERATURE = 0.6
"""Below 1 likely bytes are taken more often than the model says."""
LIKELIEST = 10
"""The number of bytes from which one is drawn."""


def generate(logits_of: Callable, params: Any, seq: int, prompt: bytes, length: int) -> bytes:
    """`length` bytes that follow the prompt, drawn from `logits_of(params, tokens)` in a window of `seq` tokens."""

    @jax.jit
    def draw(params, window_T, last, key):
        logits_TV = logits_of(params, window_T[None])[0]
        logits, those = jax.lax.top_k(logits_TV[last, :256].astype(float), LIKELIEST)
        return those[jax.random.categorical(key, logits / TEMPERATURE)]

    tokens = list(prompt)
    for key in jax.random.split(jax.random.key(0), length):
        window = tokens[-seq:]
        padded = jnp.array(window + [0] * (seq - len(window)))  # no position looks at those after it
        tokens.append(int(draw(params, padded, len(window) - 1, key)))
    return bytes(tokens[len(prompt) :])
