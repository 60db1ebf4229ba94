"""What the runner has to know of each model: one record per model, nothing about placements."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from examples import bert, data, dlrm, gpt2, llama, mixer, mlp, moe, plans, ppo, resnet, t5, unet, vit
from examples.generate import generate, pieces_of


@dataclass(frozen=True)
class Model:
    """A model and its input.

    Attributes:
      configs: by name.
      make_step: of (cfg, accumulate): `init_fn(key) -> state` and `step_fn(*state, batch) -> (*state, loss)`. Those of
        models with `blocks` also take `between(i, x)`, called between blocks.
      batches: of (cfg, rows, seed): batches without end.
      units: of cfg: what is counted, and how many of it are in a row.
      result: of (cfg, state on the host): what the trained model can do, for people to read.
      plans: by name; each gives the keyword arguments of `shardc.function`.
      rows: in a batch, if nothing else is said.
      blocks: of cfg: how many there are, for models with `between`, which is called after each but the last.
    """

    configs: Mapping[str, Any]
    make_step: Callable[..., tuple[Callable, Callable]]
    batches: Callable[[Any, int, int], Iterator[data.Batch]]
    units: Callable[[Any], tuple[str, int]]
    result: Callable[[Any, tuple], str]
    plans: Mapping[str, Callable[[], dict[str, Any]]]
    rows: int
    blocks: Callable[[Any], int] | None = None


def accuracy(logits: jax.Array, label: np.ndarray) -> str:
    return f"{(np.asarray(logits).argmax(-1) == label).mean():.1%} of {len(label)} unseen digits are read correctly"


def mlp_result(cfg: mlp.Config, state: tuple) -> str:
    _, test = data.digits()
    return accuracy(jax.jit(mlp.forward)(state[0], test["image"]), test["label"])


def mixer_result(cfg: mixer.Config, state: tuple) -> str:
    _, test = data.digits()
    return accuracy(jax.jit(partial(mixer.forward, cfg=cfg))(state[0], test["image"]), test["label"])


def resnet_result(cfg: resnet.Config, state: tuple) -> str:
    _, test = data.digits()
    variables = {"params": state[0], "batch_stats": state[1]}
    forward = jax.jit(partial(resnet.ResNet(cfg).apply, train=False))
    return accuracy(forward(variables, test["image"]), test["label"])


def vit_result(cfg: vit.Config, state: tuple) -> str:
    _, test = data.digits()
    return accuracy(jax.jit(partial(vit.forward, cfg=cfg))(state[0], test["image"]), test["label"])


def text_result(module: Callable, cfg: Any, state: tuple) -> str:
    def logits_of(params: Any, tokens: jax.Array) -> jax.Array:
        return jax.tree.leaves(module(cfg).apply({"params": params}, tokens))[0]  # the first, where there are more

    prompt, known = b"    def __init__(self, ", pieces_of(data.text_bytes().tobytes(), times=100)
    text = prompt + generate(logits_of, state[0], cfg.seq, prompt, length=400, known=known)
    return "it writes, in words that the text has\n" + quoted(text.decode("utf-8", "replace"))


def t5_result(cfg: t5.Config, state: tuple) -> str:
    batch = next(t5_batches(cfg, 1, seed=1))
    said = t5.decode(state[0], cfg, batch["inputs"], batch["targets"].shape[1])
    read, said, right = (with_names(np.asarray(tokens)[0]) for tokens in (batch["inputs"], said, batch["targets"]))
    return f"it reads\n{quoted(read)}\nand says\n{quoted(said)}\nwhere the text has\n{quoted(right)}"


def bert_result(cfg: bert.Config, state: tuple) -> str:
    batch = next(hidden_batches(cfg, 64, seed=1))
    logits = jax.jit(bert.BERT(cfg).apply)({"params": state[0]}, batch["inputs"], batch["positions"])
    guessed = np.asarray(logits).argmax(-1)
    read, said = batch["inputs"][0].copy(), batch["inputs"][0].copy()
    said[batch["positions"][0]] = guessed[0]
    right = f"{(guessed == batch['targets']).mean():.1%} of {guessed.size} hidden bytes are guessed"
    return f"{right}; it reads\n{quoted(with_names(read))}\nand says\n{quoted(with_names(said))}"


def dlrm_result(cfg: dlrm.Config, state: tuple) -> str:
    rank = dlrm.ranking(state[0], next(click_batches(cfg, 2000, seed=1)))
    return f"a click is ranked above what is none in {rank:.1%} of pairs of 2000 rows"


def ppo_result(cfg: ppo.Config, state: tuple) -> str:
    lives = np.asarray(jax.jit(partial(ppo.lifetimes, cfg=cfg))(state[0]))
    whole = (lives == cfg.limit).sum()
    return f"{len(lives)} carts stand for {lives.mean():.0f} moves on average; {whole} never fall in {cfg.limit}"


def unet_result(cfg: unet.Config, state: tuple) -> str:
    images = np.asarray(unet.sample(state[0], cfg, images=6))[..., 0].clip(0, 1)
    shades = np.array(list(" .:-=+*#%@"))[(images * 9).round().astype(int)]
    rows = ["   ".join("".join(pixel * 2 for pixel in row) for row in line) for line in shades.swapaxes(0, 1)]
    return "it draws\n" + quoted("\n".join(rows))


def with_names(tokens: np.ndarray) -> str:
    """Bytes as they are, the name of a hole as <0>, <1>, ..."""
    return b"".join(bytes([t]) if t < 256 else b"<%d>" % (t - 256) for t in tokens.tolist()).decode("utf-8", "replace")


def quoted(text: str) -> str:
    return textwrap.indent(text, "  | ", lambda line: True)


def text_batches(cfg: Any, rows: int, seed: int) -> Iterator[data.Batch]:
    return data.text_batches(data.text_bytes(), rows, cfg.seq, seed)


def t5_batches(cfg: t5.Config, rows: int, seed: int) -> Iterator[data.Batch]:
    return data.holed_batches(data.text_bytes(), rows, cfg.seq, cfg.spans, cfg.span, seed)


def hidden_batches(cfg: bert.Config, rows: int, seed: int) -> Iterator[data.Batch]:
    return data.hidden_batches(data.text_bytes(), rows, cfg.seq, seed)


def click_batches(cfg: dlrm.Config, rows: int, seed: int) -> Iterator[data.Batch]:
    return data.click_batches(data.text_bytes(), rows, cfg.tables, seed)


def digit_batches(cfg: Any, rows: int, seed: int) -> Iterator[data.Batch]:
    return data.digit_batches(data.digits()[0], rows, seed)


MODELS = {
    "mlp": Model(
        configs=mlp.CONFIGS,
        make_step=mlp.make_step,
        batches=digit_batches,
        units=lambda cfg: ("samples", 1),
        result=mlp_result,
        plans=plans.mlp.PLANS,
        rows=64,
        blocks=lambda cfg: cfg.blocks,
    ),
    "resnet": Model(
        configs=resnet.CONFIGS,
        make_step=resnet.make_step,
        batches=digit_batches,
        units=lambda cfg: ("samples", 1),
        result=resnet_result,
        plans=plans.resnet.PLANS,
        rows=64,
    ),
    "vit": Model(
        configs=vit.CONFIGS,
        make_step=vit.make_step,
        batches=digit_batches,
        units=lambda cfg: ("samples", 1),
        result=vit_result,
        plans=plans.vit.PLANS,
        rows=64,
        blocks=lambda cfg: cfg.layers,
    ),
    "mixer": Model(
        configs=mixer.CONFIGS,
        make_step=mixer.make_step,
        batches=digit_batches,
        units=lambda cfg: ("samples", 1),
        result=mixer_result,
        plans=plans.mixer.PLANS,
        rows=64,
        blocks=lambda cfg: cfg.blocks,
    ),
    "gpt2": Model(
        configs=gpt2.CONFIGS,
        make_step=gpt2.make_step,
        batches=text_batches,
        units=lambda cfg: ("tokens", cfg.seq),
        result=partial(text_result, gpt2.GPT2),
        plans=plans.gpt2.PLANS,
        rows=16,
        blocks=lambda cfg: cfg.layers,
    ),
    "llama": Model(
        configs=llama.CONFIGS,
        make_step=llama.make_step,
        batches=text_batches,
        units=lambda cfg: ("tokens", cfg.seq),
        result=partial(text_result, llama.Llama),
        plans=plans.llama.PLANS,
        rows=16,
        blocks=lambda cfg: cfg.layers,
    ),
    "moe": Model(
        configs=moe.CONFIGS,
        make_step=moe.make_step,
        batches=text_batches,
        units=lambda cfg: ("tokens", cfg.seq),
        result=partial(text_result, moe.MoE),
        plans=plans.moe.PLANS,
        rows=16,
        blocks=lambda cfg: cfg.layers,
    ),
    "t5": Model(
        configs=t5.CONFIGS,
        make_step=t5.make_step,
        batches=t5_batches,
        units=lambda cfg: ("tokens", cfg.seq + 2 * cfg.spans),
        result=t5_result,
        plans=plans.t5.PLANS,
        rows=16,
        blocks=lambda cfg: 2 * cfg.layers,
    ),
    "bert": Model(
        configs=bert.CONFIGS,
        make_step=bert.make_step,
        batches=hidden_batches,
        units=lambda cfg: ("tokens", cfg.seq),
        result=bert_result,
        plans=plans.bert.PLANS,
        rows=16,
    ),
    "dlrm": Model(
        configs=dlrm.CONFIGS,
        make_step=dlrm.make_step,
        batches=click_batches,
        units=lambda cfg: ("samples", 1),
        result=dlrm_result,
        plans=plans.dlrm.PLANS,
        rows=512,
    ),
    "ppo": Model(
        configs=ppo.CONFIGS,
        make_step=ppo.make_step,
        batches=lambda cfg, rows, seed: data.dice_batches(rows, cfg.times, seed),
        units=lambda cfg: ("moves", cfg.times),
        result=ppo_result,
        plans=plans.ppo.PLANS,
        rows=64,
    ),
    "unet": Model(
        configs=unet.CONFIGS,
        make_step=unet.make_step,
        batches=lambda cfg, rows, seed: data.keyed_batches(digit_batches(cfg, rows, seed), seed),
        units=lambda cfg: ("samples", 1),
        result=unet_result,
        plans=plans.unet.PLANS,
        rows=64,
        blocks=lambda cfg: 2 * len(cfg.widths) * cfg.blocks + 1,
    ),
}
