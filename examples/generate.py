"""Text that a trained model writes, for the models of the zoo that read one byte after the other."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

TEMPERATURE = 0.8
"""Below 1 likely bytes are taken more often than the model says."""
LIKELIEST = 5
"""The number of bytes from which one is drawn."""
PIECES = re.compile(rb"[^\W_]+|_+|\s+|[^\w\s]+")
"""Words, what joins them, blanks and signs."""


def generate(
    logits_of: Callable, params: Any, seq: int, prompt: bytes, length: int, known: Mapping[bytes, bool] | None = None
) -> bytes:
    """`length` bytes that follow the prompt, drawn from `logits_of(params, tokens)` in a window of `seq` tokens.

    With `known`, as `pieces_of` gives it, every word, indentation or sign is one of those.
    """

    @jax.jit
    def draw(params, window_T, last, may_V, key):
        logits_V = logits_of(params, window_T[None])[0, last, :256].astype(float)
        logits, those = jax.lax.top_k(jnp.where(may_V, logits_V, -jnp.inf), LIKELIEST)
        return those[jax.random.categorical(key, logits / TEMPERATURE)]

    tokens = list(prompt)
    for key in jax.random.split(jax.random.key(0), length):
        window = tokens[-seq:]
        padded = jnp.array(window + [0] * (seq - len(window)))  # no position looks at those after it
        may = np.ones(256, bool) if known is None else continuations(bytes(window), known)
        tokens.append(int(draw(params, padded, len(window) - 1, may, key)))
    return bytes(tokens[len(prompt) :])


def pieces_of(text: bytes, times: int) -> Mapping[bytes, bool]:
    """The pieces that stand in a text at least so many times, and their beginnings: whether each is a whole one."""
    whole = {piece for piece, count in Counter(PIECES.findall(text)).items() if count >= times}
    return {piece[:n]: piece[:n] in whole for piece in whole for n in range(1, len(piece) + 1)}


def continuations(text: bytes, known: Mapping[bytes, bool]) -> np.ndarray:
    """Which bytes may follow a text: those that go on with its last piece, or begin another one after a whole one."""
    end = b"".join(PIECES.findall(text)[-1:])

    def may_follow(byte: int) -> bool:
        *before, last = PIECES.findall(end + bytes([byte]))
        return last in known and (not before or known.get(before[-1], False))

    may = np.array([may_follow(byte) for byte in range(256)])
    return may if may.any() else ~may
