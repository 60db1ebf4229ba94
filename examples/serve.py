"""Serve a decoder: prefill and decode are two functions, on one mesh or on two, and the cache goes to the other one.

    python -m examples.serve --prefill data=2,model=2 --decode data=4,model=1

Requests of unlike length share a batch. The tokens are those of one device, whatever the meshes.

Sizes: L layers, B rows, T positions, D width, H heads, K width of a head, V vocabulary.
"""

from __future__ import annotations

import argparse
import inspect
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shardc
from shardc import S


@dataclass(frozen=True)
class Config:
    layers: int = 2
    d_model: int = 64
    heads: int = 4
    vocab: int = 256
    longest: int = 64
    """Positions of a row: its prompt and what is written."""
    likeliest: int = 10
    """The number of tokens from which one is drawn."""
    temperature: float = 0.8


PARAMS = shardc.rules({
    "*/qkv": {"model": S(2)}, "*/out": {"model": S(0)}, "*/up": {"model": S(1)}, "*/down": {"model": S(0)}, "embed": {},
})  # fmt: skip
CACHE = {"data": S(1), "model": S(3)}
"""Rows over `data`, heads over `model`."""
ROWS = {"data": S(0)}
END = 0
"""The token after which a row writes nothing more."""


def init(key, cfg: Config):
    D, H, F = cfg.d_model, cfg.heads, 4 * cfg.d_model
    shapes = {"qkv": (3, D, H, D // H), "out": (H, D // H, D), "up": (D, F), "down": (F, D)}
    named = {f"layer_{i}": shapes for i in range(cfg.layers)} | {"embed": (cfg.vocab, D)}
    leaves, tree = jax.tree.flatten(named, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(tree, [jax.random.normal(k, s) / 8 for k, s in zip(keys, leaves, strict=True)])


def norm(x):
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def forward(params, x_BSD, cache_LBTHK, at_BS):
    """Blocks over tokens at positions `at`, which read the cache of all positions up to theirs and write their own."""
    keys, values = cache_LBTHK["k"], cache_LBTHK["v"]
    places_BST = at_BS[:, :, None] == jnp.arange(keys.shape[2])
    may_BST = jnp.arange(keys.shape[2]) <= at_BS[:, :, None]
    new_k, new_v = [], []
    for i in range(keys.shape[0]):
        layer = params[f"layer_{i}"]
        q_BSHK, k_BSHK, v_BSHK = jnp.einsum("bsd,cdhk->cbshk", norm(x_BSD), layer["qkv"])
        k_BTHK, v_BTHK = (
            jnp.where(
                places_BST.any(1)[:, :, None, None], jnp.einsum("bst,bshk->bthk", places_BST.astype(float), new), old
            )
            for new, old in ((k_BSHK, keys[i]), (v_BSHK, values[i]))
        )
        scores_BHST = jnp.einsum("bshk,bthk->bhst", q_BSHK, k_BTHK) / q_BSHK.shape[-1] ** 0.5
        weights_BHST = jax.nn.softmax(jnp.where(may_BST[:, None], scores_BHST, -1e30))
        x_BSD = x_BSD + jnp.einsum("bhst,bthk,hkd->bsd", weights_BHST, v_BTHK, layer["out"])
        x_BSD = x_BSD + jax.nn.gelu(norm(x_BSD) @ layer["up"]) @ layer["down"]
        new_k, new_v = [*new_k, k_BTHK], [*new_v, v_BTHK]
    return norm(x_BSD), {"k": jnp.stack(new_k), "v": jnp.stack(new_v)}


def draw(params, x_BD, at_B, key, cfg: Config):
    """A token for each row, from the likeliest; the bits are those of one device at every placement."""
    best, those = jax.lax.top_k(x_BD @ params["embed"].T / cfg.temperature, cfg.likeliest)
    bits = jax.random.gumbel(key, (len(best), cfg.longest, cfg.likeliest))
    mine = jnp.take_along_axis(bits, at_B[:, None, None], 1)[:, 0]
    return jnp.take_along_axis(those, (best + mine).argmax(-1)[:, None], 1)[:, 0]


def prefill(params, prompt_BS, length_B, key, cfg: Config):
    """The cache of prompts, padded to one length, and the first token after each."""
    B, head = len(prompt_BS), cfg.d_model // cfg.heads
    empty = jnp.zeros((cfg.layers, B, cfg.longest, cfg.heads, head))
    at_BS = jnp.broadcast_to(jnp.arange(prompt_BS.shape[1]), prompt_BS.shape)
    x_BSD, cache = forward(params, params["embed"][prompt_BS], {"k": empty, "v": empty}, at_BS)
    last_BD = jnp.take_along_axis(x_BSD, length_B[:, None, None] - 1, 1)[:, 0]  # what is after it is never read
    return cache, draw(params, last_BD, length_B, key, cfg)


def decode(params, cache, at_B, token_B, key, cfg: Config):
    """One token more for each row, whatever its position."""
    x_BSD, cache = forward(params, params["embed"][token_B][:, None], cache, at_B[:, None])
    new_B = jnp.where(token_B == END, END, draw(params, x_BSD[:, 0], at_B + 1, key, cfg))
    return cache, at_B + 1, new_B


def on(mesh, fn, cfg: Config, donate: Sequence[str] = ()):
    """`prefill` or `decode` on a mesh; on None it is that of one device."""
    fn = partial(fn, cfg=cfg)
    if mesh is None:
        return jax.jit(fn)
    places = {"params": PARAMS, "cache": CACHE, **dict.fromkeys(("prompt_BS", "length_B", "at_B", "token_B"), ROWS)}
    own = {name: places[name] for name in inspect.signature(fn).parameters if name in places}
    return shardc.function(fn, mesh=mesh, in_placements=own, donate_argnames=donate)


class Server:
    """Prefill and decode, each on its mesh; None is one device."""

    def __init__(self, cfg: Config, prefill_mesh: Any, decode_mesh: Any) -> None:
        self.cfg, self.prefill_mesh, self.decode_mesh = cfg, prefill_mesh, decode_mesh
        self.prefill = on(prefill_mesh, prefill, cfg)
        self.decode = on(decode_mesh, decode, cfg, donate=("cache", "at_B", "token_B"))

    def serve(self, params, prompts: Sequence[Sequence[int]], tokens: int, key) -> tuple[np.ndarray, float]:
        """What follows each prompt, and the tokens of a second of decoding, without the first, which compiles."""
        length = np.array([len(p) for p in prompts], np.int32)
        if not 1 <= length.min() <= length.max() <= self.cfg.longest - tokens:
            raise ValueError(f"prompts of 1 to {self.cfg.longest - tokens} tokens leave room for {tokens} more")
        padded = np.array([[*p, *[END] * (length.max() - len(p))] for p in prompts], np.int32)
        cache, token = self.prefill(self._params(params, self.prefill_mesh), padded, length, key)
        params, at, written, begin, rate = self._params(params, self.decode_mesh), length, [token], 0.0, 0.0
        if self.decode_mesh is not None:  # the cache goes to the other mesh on the cheapest way
            cache, at, token = (
                shardc.put(x, self.decode_mesh, p) for x, p in ((cache, CACHE), (at, ROWS), (np.asarray(token), ROWS))
            )
        for n in range(tokens - 1):
            cache, at, token = self.decode(params, cache, at, token, key)
            written.append(np.asarray(token))  # a stream would send it here
            begin = begin or time.perf_counter()
            rate = len(prompts) * n / max(time.perf_counter() - begin, 1e-9)
        return np.stack([np.asarray(t) for t in written], 1), rate

    def planned(self, params, rows: int) -> float:
        """The tokens of a second of decoding that the plan promises."""
        shape = (self.cfg.layers, rows, self.cfg.longest, self.cfg.heads, self.cfg.d_model // self.cfg.heads)
        cache = {n: jax.ShapeDtypeStruct(shape, jnp.float32) for n in "kv"}
        whole = jax.ShapeDtypeStruct((rows,), jnp.int32)
        return rows / self.decode.plan(params, cache, whole, whole, jax.random.key(0)).seconds

    def _params(self, params, mesh):
        return params if mesh is None else shardc.put(params, mesh, PARAMS)


def axes(text: str) -> dict[str, int]:
    return {name: int(size) for name, size in (part.split("=") for part in text.split(","))}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", type=axes, default=axes("data=2,model=2"), help="axes of the mesh of prompts")
    parser.add_argument("--decode", type=axes, default=axes("data=4,model=1"), help="axes of the mesh of tokens")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    options, cfg = parser.parse_args(argv), Config()
    first = math.prod(options.prefill.values())
    count = math.prod(options.decode.values())
    there = jax.devices()[first : first + count] if len(jax.devices()) >= first + count else jax.devices()[:count]
    server = Server(cfg, shardc.make_mesh(**options.prefill), shardc.make_mesh(devices=there, **options.decode))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, cfg.vocab, rng.integers(3, 17)).tolist() for _ in range(options.rows)]
    params = jax.jit(init, static_argnames="cfg")(jax.random.key(0), cfg)
    written, rate = server.serve(params, prompts, options.tokens, jax.random.key(1))
    alone, _ = Server(cfg, None, None).serve(params, prompts, options.tokens, jax.random.key(1))
    print(f"{written.size} tokens, those of one device: {bool((written == alone).all())}")
    print(f"{server.planned(params, options.rows):.0f} tokens a second are planned, {rate:.0f} were measured")


if __name__ == "__main__":
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    os.environ.setdefault("NPROC", "16")
    main()
