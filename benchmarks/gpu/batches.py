"""Random batches for the models of `examples/`: the GPU machine has no data sets and no scikit-learn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Batch = dict[str, np.ndarray]


class Draw:
    """Random arrays from one seed."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)

    def normal(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape, np.float32)

    def below(self, high: int, *shape: int) -> np.ndarray:
        return self.rng.integers(high, size=shape, dtype=np.int32)


def images(cfg: Any, rows: int, draw: Draw) -> Batch:
    return {"image": draw.normal(rows, *cfg.image), "label": draw.below(cfg.classes, rows)}


def pixels(cfg: Any, rows: int, draw: Draw) -> Batch:
    return {"image": draw.normal(rows, cfg.width), "label": draw.below(cfg.classes, rows)}


def noisy(cfg: Any, rows: int, draw: Draw) -> Batch:
    key = draw.rng.integers(2**32, size=(rows, 2), dtype=np.uint32)
    return {"image": draw.normal(rows, *cfg.image), "key": key}


def text(cfg: Any, rows: int, draw: Draw) -> Batch:
    tokens = draw.below(cfg.vocab, rows, cfg.seq + 1)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def holed(cfg: Any, rows: int, draw: Draw) -> Batch:
    inputs = draw.below(cfg.vocab, rows, cfg.seq - cfg.spans * (cfg.span - 1))
    return {"inputs": inputs, "targets": draw.below(cfg.vocab, rows, cfg.spans * (cfg.span + 1))}


def hidden(cfg: Any, rows: int, draw: Draw) -> Batch:
    count = round(0.15 * cfg.seq)
    positions = np.sort(np.stack([draw.rng.permutation(cfg.seq)[:count] for _ in range(rows)]), 1).astype(np.int32)
    targets = draw.below(cfg.vocab, rows, count)
    return {"inputs": draw.below(cfg.vocab, rows, cfg.seq), "positions": positions, "targets": targets}


def clicks(cfg: Any, rows: int, draw: Draw) -> Batch:
    categories = np.stack([draw.below(n, rows) for n in cfg.tables], 1)
    click = draw.below(2, rows).astype(np.float32)
    return {"numbers": draw.normal(rows, cfg.numbers), "categories": categories, "click": click}


def dice(cfg: Any, rows: int, draw: Draw) -> Batch:
    """A row for each cart, whatever `rows` says."""
    shapes = {"chance": (cfg.carts, cfg.times), "start": (cfg.carts, cfg.times, 4)}
    return {name: draw.rng.random(shape, np.float32) for name, shape in shapes.items()}


BATCHES: Mapping[str, Callable[[Any, int, Draw], Batch]] = {
    "mlp": pixels, "resnet": images, "vit": images, "unet": noisy, "gpt2": text, "llama": text, "moe": text,
    "t5": holed, "bert": hidden, "dlrm": clicks, "ppo": dice,
}  # fmt: skip
"""By model: of (config, rows, draw)."""
