"""ResNet with bottleneck blocks (He et al. 2015, "Deep Residual Learning for Image Recognition"), in flax.

Sizes: N rows, H and W pixels, C channels. Batch normalization takes its statistics over the whole batch, so that a
training step has a second kind of state beside the parameters: `batch_stats`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax


@dataclass(frozen=True)
class Config:
    stages: tuple[int, ...]  # blocks in each stage; every stage but the first halves the image
    width: int  # channels of the first stage's 3x3 convolutions
    classes: int
    image: tuple[int, int, int]
    large_stem: bool = False  # 7x7 convolution and max pooling: an image of 224 enters the blocks as 56
    dtype: Any = None  # of activations; None: that of the parameters, which is float32, or float64 under x64
    learning_rate: float = 1e-3


CONFIGS = {
    "tiny": Config(stages=(1, 1), width=16, classes=10, image=(8, 8, 1), learning_rate=3e-3),
    "test": Config(stages=(1, 1), width=4, classes=10, image=(8, 8, 1), learning_rate=1e-2),
    "resnet50": Config(stages=(3, 4, 6, 3), width=64, classes=1000, image=(224, 224, 3), large_stem=True),
}

Conv = partial(nn.Conv, use_bias=False, param_dtype=float)
Norm = partial(nn.BatchNorm, momentum=0.9, param_dtype=float)


class Bottleneck(nn.Module):
    """1x1 down, 3x3, 1x1 up to four times the width, around a shortcut."""

    width: int
    stride: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x_NHWC, train: bool):
        conv = partial(Conv, dtype=self.dtype)
        norm = partial(Norm, use_running_average=not train, dtype=self.dtype)
        out = 4 * self.width
        y_NHWC = conv(self.width, (1, 1), name="conv1")(x_NHWC)
        y_NHWC = nn.relu(norm(name="norm1")(y_NHWC))
        y_NHWC = conv(self.width, (3, 3), self.stride, name="conv2")(y_NHWC)
        y_NHWC = nn.relu(norm(name="norm2")(y_NHWC))
        y_NHWC = conv(out, (1, 1), name="conv3")(y_NHWC)
        y_NHWC = norm(name="norm3", scale_init=nn.initializers.zeros)(y_NHWC)  # a block starts as its shortcut
        if x_NHWC.shape != y_NHWC.shape:
            x_NHWC = norm(name="norm0")(conv(out, (1, 1), self.stride, name="conv0")(x_NHWC))
        return nn.relu(x_NHWC + y_NHWC)


class ResNet(nn.Module):
    """Logits (N, classes) of images (N, H, W, C)."""

    cfg: Config

    @nn.compact
    def __call__(self, x_NHWC, train: bool):
        cfg = self.cfg
        kernel, stride = ((7, 7), 2) if cfg.large_stem else ((3, 3), 1)
        x_NHWC = Conv(cfg.width, kernel, stride, dtype=cfg.dtype, name="stem")(x_NHWC)
        x_NHWC = nn.relu(Norm(use_running_average=not train, dtype=cfg.dtype, name="stem_norm")(x_NHWC))
        if cfg.large_stem:
            x_NHWC = nn.max_pool(x_NHWC, (3, 3), (2, 2), padding="SAME")
        for i, blocks in enumerate(cfg.stages):
            for j in range(blocks):
                stride = 2 if i > 0 and j == 0 else 1
                x_NHWC = Bottleneck(cfg.width * 2**i, stride, cfg.dtype, name=f"stage{i}_block{j}")(x_NHWC, train)
        return nn.Dense(cfg.classes, name="head", dtype=cfg.dtype, param_dtype=float)(x_NHWC.mean((1, 2)))


def loss(params, batch_stats, batch, cfg: Config):
    """Mean cross entropy, and the batch statistics moved towards this batch's."""
    logits_NC, updated = ResNet(cfg).apply(
        {"params": params, "batch_stats": batch_stats}, batch["image"], train=True, mutable=["batch_stats"]
    )
    cross_entropy_N = optax.softmax_cross_entropy_with_integer_labels(logits_NC.astype(float), batch["label"])
    return cross_entropy_N.mean(), updated["batch_stats"]


def make_step(cfg: Config, accumulate: Callable = lambda fn: fn):
    """`init_fn(key)` and `step_fn(params, batch_stats, opt_state, batch)`, which returns all three anew and the loss.

    `accumulate` may replace `fn(variables, batch)` by its mean over parts of the batch. Each part is then normalized
    by its own statistics, which is another model: the losses differ from those of the whole batch.
    """
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(cfg.learning_rate))

    def init_fn(key):
        variables = ResNet(cfg).init(key, jnp.zeros((1, *cfg.image)), train=False)
        batch_stats = jax.tree.map(lambda x: x.astype(float), variables["batch_stats"])  # flax: float32 even under x64
        return variables["params"], batch_stats, optimizer.init(variables["params"])

    def loss_and_grads(variables, batch):
        return jax.value_and_grad(partial(loss, cfg=cfg), has_aux=True)(*variables, batch)

    def step_fn(params, batch_stats, opt_state, batch):
        (loss_, batch_stats), grads = accumulate(loss_and_grads)((params, batch_stats), batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), batch_stats, opt_state, loss_

    return init_fn, step_fn
