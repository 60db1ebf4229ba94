"""Text that a trained model writes, for the models of the zoo that read one byte after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def generate(logits_of: Callable, params: Any, seq: int, prompt: bytes, length: int, temperature: float = 0.7) -> bytes:
    """`length` bytes that follow the prompt, drawn from `logits_of(params, tokens)` in a window of `seq` tokens."""

    @jax.jit
    def draw(params, window_T, last, key):
        logits_TV = logits_of(params, window_T[None])[0]
        return jax.random.categorical(key, logits_TV[last, :256].astype(float) / temperature)

    tokens = list(prompt)
    for key in jax.random.split(jax.random.key(0), length):
        window = tokens[-seq:]
        padded = jnp.array(window + [0] * (seq - len(window)))  # no position looks at those after it
        tokens.append(int(draw(params, padded, len(window) - 1, key)))
    return bytes(tokens[len(prompt) :])
