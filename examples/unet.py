"""A diffusion model (Ho et al. 2020, "Denoising Diffusion Probabilistic Models") with a U-Net, in flax, for digits.

It learns to tell the noise in an image that is part signal, part noise. Time runs from 0, all signal, to 1, all noise:
cos(pi t / 2) of the one and sin(pi t / 2) of the other (Nichol and Dhariwal 2021). Sizes: N rows, H and W pixels, C
channels, D width of the embedded time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax


@dataclass(frozen=True)
class Config:
    widths: tuple[int, ...]  # channels of each level; each but the first sees the image at half the size
    blocks: int  # on the way down and on the way up, at each level; one stands at the bottom
    image: tuple[int, int, int] = (8, 8, 1)
    groups: int = 4  # of channels that are normalized together
    learning_rate: float = 1e-3


CONFIGS = {
    "tiny": Config(widths=(32, 64), blocks=2, learning_rate=2e-3),
    "test": Config(widths=(8, 16), blocks=1, learning_rate=1e-2),
}


def embed_time(t_N, width: int):
    """Sines and cosines (N, width) of a time in [0, 1], from slow to fast."""
    rate_D = 1000.0 ** (jnp.arange(width // 2).astype(float) / (width // 2))
    angle_ND = t_N[:, None] * rate_D
    return jnp.concatenate([jnp.sin(angle_ND), jnp.cos(angle_ND)], axis=-1)


def mix(t_N):
    """How much of an image at this time is signal, and how much noise: (N, 1, 1, 1) each."""
    angle_N111 = t_N[:, None, None, None] * (np.pi / 2)
    return jnp.cos(angle_N111), jnp.sin(angle_N111)


class Block(nn.Module):
    """Two convolutions, told the time between them, around a shortcut."""

    cfg: Config
    width: int

    @nn.compact
    def __call__(self, x_NHWC, time_ND):
        h_NHWC = conv(self.width, name="conv_1")(nn.silu(norm(self.cfg, name="norm_1")(x_NHWC)))
        h_NHWC = h_NHWC + dense(self.width, name="time")(time_ND)[:, None, None, :]
        h_NHWC = conv(self.width, name="conv_2")(nn.silu(norm(self.cfg, name="norm_2")(h_NHWC)))
        if x_NHWC.shape != h_NHWC.shape:
            x_NHWC = dense(self.width, name="shortcut")(x_NHWC)
        return x_NHWC + h_NHWC


class UNet(nn.Module):
    """The noise (N, H, W, C) in images (N, H, W, C) at times (N,).

    `between(i, x)` is called after every block i but the last, and gives what the next one reads; blocks are counted
    from the way down over the bottom to the way up. What skips from the one way to the other is not handed to it, nor
    is the embedded time, which all blocks read.
    """

    cfg: Config

    @nn.compact
    def __call__(self, x_NHWC, t_N, between: Callable = lambda i, x: x):
        cfg, block, last = self.cfg, count(), len(self.cfg.widths) - 1
        time_ND = nn.silu(dense(4 * cfg.widths[0], name="time_1")(embed_time(t_N, cfg.widths[0])))
        time_ND = nn.silu(dense(4 * cfg.widths[0], name="time_2")(time_ND))
        channels = x_NHWC.shape[-1]
        x_NHWC, skips = conv(cfg.widths[0], name="stem")(x_NHWC), []
        for level, width in enumerate(cfg.widths):
            for j in range(cfg.blocks):
                x_NHWC = Block(cfg, width, name=f"down{level}_block{j}")(x_NHWC, time_ND)
                skips.append(x_NHWC)
                if j == cfg.blocks - 1 and level < last:
                    x_NHWC = conv(width, stride=2, name=f"down{level}")(x_NHWC)
                x_NHWC = between(next(block), x_NHWC)
        x_NHWC = between(next(block), Block(cfg, cfg.widths[-1], name="bottom")(x_NHWC, time_ND))
        for level, width in reversed(list(enumerate(cfg.widths))):
            for j in range(cfg.blocks):
                x_NHWC = jnp.concatenate([x_NHWC, skips.pop()], axis=-1)
                x_NHWC = Block(cfg, width, name=f"up{level}_block{j}")(x_NHWC, time_ND)
                if j == cfg.blocks - 1 and level > 0:
                    x_NHWC = conv(width, name=f"up{level}")(x_NHWC.repeat(2, axis=1).repeat(2, axis=2))
                x_NHWC = between(next(block), x_NHWC) if skips else x_NHWC
        return conv(channels, name="head")(nn.silu(norm(cfg, name="norm")(x_NHWC)))


def conv(features: int, name: str, stride: int = 1):
    return nn.Conv(features, (3, 3), stride, name=name, param_dtype=float)


def dense(features: int, name: str):
    return nn.Dense(features, name=name, param_dtype=float)


def norm(cfg: Config, name: str):
    return nn.GroupNorm(cfg.groups, name=name, param_dtype=float)


def loss(params, batch, cfg: Config, between: Callable = lambda i, x: x):
    """Mean squared error of the noise. Each row's time and noise are drawn from its `key`, (N, 2) bits."""

    def draw(key):
        time, noise = jax.random.split(key)
        return jax.random.uniform(time, dtype=float), jax.random.normal(noise, cfg.image, dtype=float)

    t_N, noise_NHWC = jax.vmap(draw)(batch["key"])
    signal, noisy = mix(t_N)
    x_NHWC = signal * (2 * batch["image"] - 1) + noisy * noise_NHWC
    return ((UNet(cfg).apply({"params": params}, x_NHWC, t_N, between) - noise_NHWC) ** 2).mean()


def make_step(cfg: Config, accumulate: Callable = lambda fn: fn, between: Callable = lambda i, x: x):
    """`init_fn(key)` and `step_fn(params, opt_state, batch)`, which returns both anew and the loss.

    `accumulate` may replace `fn(params, batch)` by its mean over parts of the batch; `between` may mark where the
    model is cut.
    """
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(cfg.learning_rate))

    def init_fn(key):
        params = UNet(cfg).init(key, jnp.zeros((1, *cfg.image)), jnp.zeros(1))["params"]
        return params, optimizer.init(params)

    def step_fn(params, opt_state, batch):
        loss_, grads = accumulate(jax.value_and_grad(partial(loss, cfg=cfg, between=between)))(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss_

    return init_fn, step_fn


def sample(params, cfg: Config, images: int, steps: int = 50, seed: int = 0):
    """New images (N, H, W, C) in [0, 1]: noise, taken away in `steps` steps (Song et al. 2021, without new noise)."""

    @jax.jit
    def cleaner(params, x_NHWC, t_N, next_t_N):
        noise_NHWC = UNet(cfg).apply({"params": params}, x_NHWC, t_N)
        signal, noisy = mix(t_N)
        clean_NHWC = ((x_NHWC - noisy * noise_NHWC) / signal).clip(-1, 1)
        signal, noisy = mix(next_t_N)
        return signal * clean_NHWC + noisy * noise_NHWC

    x_NHWC = jax.random.normal(jax.random.key(seed), (images, *cfg.image), dtype=float)
    times = np.linspace(0.98, 0.0, steps + 1)  # at 1 nothing is left of the signal to go by
    for t, next_t in pairwise(times):
        x_NHWC = cleaner(params, x_NHWC, jnp.full(images, t), jnp.full(images, next_t))
    return (x_NHWC + 1) / 2
