"""The programs of the sections memory and seconds: training steps of the examples, and a few bare loops of one kind.

Each is small enough that a GPU compiles it in seconds, and large enough that a call takes a millisecond or more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shardc
from benchmarks.gpu.batches import BATCHES, Draw
from examples import bert, dlrm, gpt2, llama, mlp, moe, plans, ppo, resnet, t5, unet, vit


@dataclass(frozen=True)
class Program:
    """A function and its arguments.

    Attributes:
      fn: gives as many results as there are arguments in `state`, in the same order, and one more.
      args: on the host.
      state: so many arguments, the first ones, are donated, and are the results of the call before.
      options: keyword arguments of `shardc.function`.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    state: int
    options: Mapping[str, Any]

    @property
    def shapes(self) -> tuple[Any, ...]:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype), self.args)


MODULES = {
    "mlp": mlp, "resnet": resnet, "vit": vit, "unet": unet, "gpt2": gpt2, "llama": llama, "moe": moe, "t5": t5,
    "bert": bert, "dlrm": dlrm, "ppo": ppo,
}  # fmt: skip


BF16 = {"dtype": jnp.bfloat16}
WIDE = {"d_model": 512, "heads": 8, "seq": 512, "vocab": 8192}
LLAMA = WIDE | {"kv_heads": 4, "hidden": 1408}
MODELS: Mapping[str, tuple[str, int, Mapping[str, Any]]] = {
    "mlp": ("mlp", 8192, {"blocks": 4, "width": 1024, "hidden": 4096}),
    "resnet": ("resnet", 64, {"stages": (2, 2), "width": 64, "image": (56, 56, 3)}),
    "vit": ("vit", 64, {"layers": 4, "d_model": 512, "heads": 8, "patch": 8, "image": (128, 128, 3)} | BF16),
    "unet": ("unet", 128, {"widths": (64, 128), "image": (32, 32, 3)}),
    "gpt2": ("gpt2", 16, {"layers": 4} | WIDE),
    "gpt2 bf16": ("gpt2", 16, {"layers": 4} | WIDE | BF16),
    "gpt2 scan": ("gpt2", 16, {"layers": 8, "scan_layers": True} | WIDE | BF16),
    "gpt2 scan remat": ("gpt2", 16, {"layers": 8, "scan_layers": True, "remat": True} | WIDE | BF16),
    "llama": ("llama", 16, {"layers": 4} | LLAMA | BF16),
    "llama scan": ("llama", 16, {"layers": 8, "scan_layers": True} | LLAMA | BF16),
    "moe": ("moe", 16, {"hidden": 1024} | WIDE | BF16),
    "t5": ("t5", 16, {"d_model": 512, "heads": 8, "d_head": 64, "hidden": 2048, "seq": 512, "vocab": 8192} | BF16),
    "bert": ("bert", 16, {"layers": 4} | WIDE),
    "dlrm": ("dlrm", 8192, {"tables": (256, 65536, 262144, 524288), "width": 64, "bottom": (512,), "top": (1024, 512)}),
    "ppo": ("ppo", 2048, {"carts": 2048, "times": 32, "hidden": 256}),
}
"""By name: the module, rows in a batch, changes to its config "tiny"."""


def training(name: str, *, tiny: bool) -> tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]:
    """An example's function that makes its state from a key, its training step, and a batch."""
    model, rows, changes = MODELS[name]
    if tiny:  # the example's own config for tests
        rows, changes = 8, {k: v for k, v in changes.items() if k in ("dtype", "scan_layers", "remat")}
    cfg = replace(MODULES[model].CONFIGS["test" if tiny else "tiny"], **changes)
    return *MODULES[model].make_step(cfg), BATCHES[model](cfg, rows, Draw())


def parameter(shape: tuple[int, ...], draw: Draw) -> np.ndarray:
    """Random weights that keep the size of what they multiply; ones for biases and scales."""
    if len(shape) < 2:
        return np.ones(shape, np.float32)
    return draw.normal(*shape) * np.float32(math.prod(shape[:-1]) ** -0.5)


def step_of(name: str, *, tiny: bool) -> Program:
    """A training step, with the placements of the example's plan `data`.

    The example's own `init_fn` is not run: it would take seconds to compile, and memory of the device.
    """
    init_fn, step_fn, batch = training(name, tiny=tiny)
    params, *others = jax.eval_shape(init_fn, jax.random.key(0))
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), others)
    draw = Draw(1)
    state = (jax.tree.map(lambda x: parameter(x.shape, draw), params), *zeros)
    return Program(step_fn, (*state, batch), len(state), getattr(plans, MODELS[name][0]).PLANS["data"]())


def bare(fn: Callable[..., Any], *args: np.ndarray, state: int = 0) -> Program:
    options = {"donate_argnums": tuple(range(state))} if state else {}
    return Program(fn, args, state, options)


def matmuls(n: int) -> Program:
    """Eight products of square matrices in bfloat16, one after the other."""

    def fn(x, w):
        for _ in range(8):
            x = x @ w
        return x

    w = (Draw(1).normal(n, n) * n**-0.5).astype(jnp.bfloat16)
    return bare(fn, Draw().normal(n, n).astype(jnp.bfloat16), w)


def elementwise(n: int) -> Program:
    """Passes over an array that no cache holds, and a mean of its rows after each."""

    def fn(x):
        for _ in range(6):
            x = jnp.tanh(x) + x.mean(1, keepdims=True)
        return x, x.sum()

    return bare(fn, Draw().normal(n, n), state=1)


def attention(n: int) -> Program:
    """Attention over n tokens, forward and backward."""

    def loss(q, k, v):
        scores = jnp.einsum("bthk,bshk->bhts", q, k) * 0.125
        weights = jax.nn.softmax(scores.astype(jnp.float32), -1).astype(q.dtype)
        return jnp.einsum("bhts,bshk->bthk", weights, v).astype(jnp.float32).mean()

    qkv = (Draw(i).normal(2, n, 8, 64).astype(jnp.bfloat16) for i in range(3))
    return bare(jax.grad(loss, (0, 1, 2)), *qkv)


def recurrent(n: int) -> Program:
    """A loop of 32 products whose states are kept for its gradient."""

    def loss(w, x):
        def step(h, row):
            h = jnp.tanh(h @ w + row)
            return h, h.mean()

        return jax.lax.scan(step, jnp.zeros_like(x[0]), x)[1].mean()

    return bare(jax.value_and_grad(loss), Draw().normal(n, n) * n**-0.5, Draw(1).normal(32, n, n))


def accumulated(n: int) -> Program:
    """The gradient of a dense layer over eight microbatches."""

    def loss(w, x):
        return jnp.square(jnp.tanh(x @ w) @ w.T).mean()

    def fn(w, x):
        value, grad = shardc.accumulate(jax.value_and_grad(loss), microbatches=8)(w, x)
        return w - 0.1 * grad, value

    return bare(fn, Draw().normal(n, 2 * n) * n**-0.5, Draw(1).normal(8 * n, n), state=1)


BARE: Mapping[str, tuple[Callable[[int], Program], int, int]] = {
    "matmuls": (matmuls, 8192, 64),
    "elementwise": (elementwise, 8192, 64),
    "attention": (attention, 4096, 32),
    "recurrent": (recurrent, 2048, 32),
    "accumulated": (accumulated, 2048, 16),
}
"""By name: what makes it, its size, and its size when it is to be tiny."""

PROGRAMS = (*MODELS, *BARE)
TINY = ("mlp", "elementwise", "matmuls")
"""The programs of the check on CPU."""


def make(name: str, *, tiny: bool) -> Program:
    """A program by its name."""
    if name in MODELS:
        return step_of(name, tiny=tiny)
    build, size, small = BARE[name]
    return build(small if tiny else size)
