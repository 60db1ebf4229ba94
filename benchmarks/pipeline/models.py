"""The models of the pipeline benchmarks, each as one loss with marks (for shardc) and as stages (for who cuts by hand).

(a) 8 layers of 256 x 256 with tanh, 32 rows; (b) GPT-2 tiny with a block for each of the four stages, 16 rows of 128.
A step is the mean loss of 8 microbatches, its gradient, and p -= 0.1 g.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shardc
from examples import gpt2

STAGES, MICROBATCHES, RATE = 4, 8, 0.1
WIDTH, LAYERS, ROWS = 256, 8, 32
GPT2 = replace(gpt2.CONFIGS["tiny"], layers=STAGES)
GPT2_ROWS = 16
HAND = "hand-written 1F1B"


@dataclass(frozen=True)
class Workload:
    """A model, a batch, and how it is cut.

    Attributes:
      params: by the name that stages ask for; batch: {"x", "y"}, on the host.
      loss: of (params, batch, cut): calls `cut(i, x)` between stage i and the next.
      stages: of (its params, x): what the next stage reads; the last is called with (its params, x, y), gives the loss.
      keys: the names of each stage's params. A name that several stages have is one parameter: gradients add.
    """

    params: dict[str, Any]
    batch: dict[str, np.ndarray]
    loss: Callable[..., Any]
    stages: Sequence[Callable[..., Any]]
    keys: Sequence[Sequence[str]]

    def part(self, params: dict[str, Any], stage: int) -> dict[str, Any]:
        return {k: params[k] for k in self.keys[stage]}

    def step(self, cut: Callable[[int, Any], Any] = lambda i, x: x, microbatches: int = MICROBATCHES) -> Callable:
        """The training step: of (params, batch), new params and the loss."""

        def step(params, batch):
            grad = jax.value_and_grad(lambda p, b: self.loss(p, b, cut))
            loss, grads = shardc.accumulate(grad, microbatches=microbatches)(params, batch)
            return jax.tree.map(lambda p, g: p - RATE * g, params, grads), loss

        return step


def mlp() -> Workload:
    per_stage = LAYERS // STAGES
    keys = [tuple(f"w{i}" for i in range(s * per_stage, (s + 1) * per_stage)) for s in range(STAGES)]

    def stage(params, x, *, names):
        for name in names:
            x = jnp.tanh(x @ params[name])
        return x

    def last(params, x, y):
        return jnp.square(stage(params, x, names=keys[-1]) - y).mean()

    def loss(params, batch, cut):
        x = batch["x"]
        for s in range(STAGES - 1):
            x = cut(s, stage(params, x, names=keys[s]))
        return last(params, x, batch["y"])

    draw = np.random.default_rng(0).standard_normal
    params = {f"w{i}": (draw((WIDTH, WIDTH)) * WIDTH**-0.5).astype(np.float32) for i in range(LAYERS)}
    batch = {"x": draw((ROWS, WIDTH)).astype(np.float32), "y": draw((ROWS, WIDTH)).astype(np.float32)}
    return Workload(params, batch, loss, [*(partial(stage, names=k) for k in keys[:-1]), last], keys)


def gpt2_tiny() -> Workload:
    cfg = GPT2
    block = gpt2.Block(cfg)

    def embed(params, tokens):
        x = params["wte"]["embedding"][tokens] + params["wpe"]["embedding"][: tokens.shape[1]]
        return middle(params, x, number=0)

    def middle(params, x, *, number):
        return block.apply({"params": params[f"blocks_{number}"]}, x)[0]

    def last(params, x, y):
        x = gpt2.norm(cfg, "ln_f").apply({"params": params["ln_f"]}, middle(params, x, number=STAGES - 1))
        logits = x @ params["wte"]["embedding"].T
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[..., None], -1).mean()

    def loss(params, batch, cut):
        return gpt2.loss(params, {"inputs": batch["x"], "targets": batch["y"]}, cfg, between=cut)

    params = gpt2.GPT2(cfg).init(jax.random.key(0), jnp.zeros((1, cfg.seq), int))["params"]
    tokens = np.random.default_rng(0).integers(0, cfg.vocab, (GPT2_ROWS, cfg.seq + 1), dtype=np.int32)
    keys = [("wte", "wpe", "blocks_0"), *((f"blocks_{i}",) for i in range(1, STAGES - 1)),
            (f"blocks_{STAGES - 1}", "ln_f", "wte")]  # fmt: skip
    stages = [embed, *(partial(middle, number=i) for i in range(1, STAGES - 1)), last]
    batch = {"x": tokens[:, :-1], "y": tokens[:, 1:]}
    return Workload(jax.tree.map(np.asarray, params), batch, loss, stages, keys)


WORKLOADS: dict[str, Callable[[], Workload]] = {"mlp": mlp, "gpt2": gpt2_tiny}
