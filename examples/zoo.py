"""What the runner has to know of each model: one record per model, nothing about placements."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from examples import data, gpt2, mlp, plans, resnet


@dataclass(frozen=True)
class Model:
    """A model and its input.

    Attributes:
      configs: by name.
      make_step: of (cfg, accumulate): `init_fn(key) -> state` and `step_fn(*state, batch) -> (*state, loss)`.
      batches: of (cfg, rows, seed): batches without end.
      units: of cfg: what is counted, and how many of it are in a row.
      result: of (cfg, state on the host): what the trained model can do, for people to read.
      plans: by name; each gives the keyword arguments of `shardc.function`.
      rows: in a batch, if nothing else is said.
    """

    configs: Mapping[str, Any]
    make_step: Callable[..., tuple[Callable, Callable]]
    batches: Callable[[Any, int, int], Iterator[data.Batch]]
    units: Callable[[Any], tuple[str, int]]
    result: Callable[[Any, tuple], str]
    plans: Mapping[str, Callable[[], dict[str, Any]]]
    rows: int


def accuracy(logits: jax.Array, label: np.ndarray) -> str:
    return f"{(np.asarray(logits).argmax(-1) == label).mean():.1%} of {len(label)} unseen digits are read correctly"


def mlp_result(cfg: mlp.Config, state: tuple) -> str:
    _, test = data.digits()
    return accuracy(jax.jit(mlp.forward)(state[0], test["image"]), test["label"])


def resnet_result(cfg: resnet.Config, state: tuple) -> str:
    _, test = data.digits()
    variables = {"params": state[0], "batch_stats": state[1]}
    forward = jax.jit(partial(resnet.ResNet(cfg).apply, train=False))
    return accuracy(forward(variables, test["image"]), test["label"])


def gpt2_result(cfg: gpt2.Config, state: tuple) -> str:
    prompt = b"def "
    text = (prompt + gpt2.generate(state[0], cfg, prompt, length=200)).decode("utf-8", "replace")
    return "it writes\n" + textwrap.indent(text, "  | ", lambda line: True)


MODELS = {
    "mlp": Model(
        configs=mlp.CONFIGS,
        make_step=mlp.make_step,
        batches=lambda cfg, rows, seed: data.digit_batches(data.digits()[0], rows, seed),
        units=lambda cfg: ("samples", 1),
        result=mlp_result,
        plans=plans.mlp.PLANS,
        rows=64,
    ),
    "resnet": Model(
        configs=resnet.CONFIGS,
        make_step=resnet.make_step,
        batches=lambda cfg, rows, seed: data.digit_batches(data.digits()[0], rows, seed),
        units=lambda cfg: ("samples", 1),
        result=resnet_result,
        plans=plans.resnet.PLANS,
        rows=64,
    ),
    "gpt2": Model(
        configs=gpt2.CONFIGS,
        make_step=gpt2.make_step,
        batches=lambda cfg, rows, seed: data.text_batches(data.text_bytes(), rows, cfg.seq, seed),
        units=lambda cfg: ("tokens", cfg.seq),
        result=gpt2_result,
        plans=plans.gpt2.PLANS,
        rows=16,
    ),
}
