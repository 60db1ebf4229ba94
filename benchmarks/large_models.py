"""Large models at their published sizes, as shapes: what benchmarks/large.py plans and compiles.

They are the models of `examples/`, their layers scanned and rematerialised, activations in bfloat16, parameters and
Adam's moments in float32. Where a paper's model has what the example has not, the comment at its sizes says so.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

import shardc
from examples import dlrm, gpt2, llama, moe, t5, vit
from shardc import AUTO, S

STACKED: Mapping[str, Any] = {"scan_layers": True, "remat": True, "dtype": jnp.bfloat16}
BOTH = ("params", "opt_state")

Pins = Mapping[str, Any]
"""What is said of arguments, by their names."""


@dataclass(frozen=True)
class Large:
    """One model, its batch, and the slice that it is planned for.

    Attributes:
      module: of the example.
      config: its sizes.
      rows: of the batch.
      published: parameters, as its paper or its own files count them.
      chips: of v5p, along the dimensions of the slice.
      mesh: axes.
      plans: what is pinned, by name.
      work: of (config, parameters): operations of one step of one row, forward and backward, that the model asks for:
        six for each parameter that a token meets, and the products of attention (Chowdhery et al. 2022, "PaLM",
        appendix B). What is computed anew is not counted.
    """

    module: ModuleType
    config: Any
    rows: int
    published: float
    chips: tuple[int, int, int]
    mesh: Mapping[str, int]
    plans: Mapping[str, Pins]
    work: Callable[[Any, Any], float]

    @property
    def topology(self) -> str:
        return f"v5p:{'x'.join(map(str, self.chips))}"

    @property
    def devices(self) -> int:
        return self.chips[0] * self.chips[1] * self.chips[2]

    @property
    def step(self) -> Callable[..., Any]:
        return self.module.make_step(self.config)[1]

    def arguments(self) -> tuple[Any, ...]:
        """Shapes of parameters, optimizer state and batch."""
        state = jax.eval_shape(self.module.make_step(self.config)[0], jax.random.key(0))
        return *state, batch_of(self.config, self.rows)

    def truncated(self, layers: int) -> Large:
        """The same model with fewer layers."""
        return replace(self, config=replace(self.config, layers=layers))


def batch_of(cfg: Any, rows: int) -> dict[str, Any]:
    match cfg:
        case vit.Config():
            shapes = {"image": (cfg.image, jnp.float32), "label": ((), jnp.int32)}
        case dlrm.Config():
            numbers, tables = (cfg.numbers,), (len(cfg.tables),)
            shapes = {
                "numbers": (numbers, jnp.float32), "categories": (tables, jnp.int32), "click": ((), jnp.float32)
            }  # fmt: skip
        case t5.Config():
            kept = cfg.seq - cfg.spans * (cfg.span - 1)
            shapes = {"inputs": ((kept,), jnp.int32), "targets": ((cfg.spans * (cfg.span + 1),), jnp.int32)}
        case _:
            shapes = {"inputs": ((cfg.seq,), jnp.int32), "targets": ((cfg.seq,), jnp.int32)}
    return {name: jax.ShapeDtypeStruct((rows, *shape), dtype) for name, (shape, dtype) in shapes.items()}


# --- operations ------------------------------------------------------------------------------------------------------


def size_of(params: Any, pattern: str = "*") -> float:
    """Parameters whose path a pattern matches."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    named = ((jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves)
    return sum(float(leaf.size) for name, leaf in named if fnmatch.fnmatchcase(name, pattern))


def attention_work(layers: int, queries: int, keys: int, widths: int) -> float:
    """Of the two products of attention with all keys; `widths`: of a head in each of them, times heads."""
    return 6.0 * layers * queries * keys * widths


def gpt2_work(cfg: gpt2.Config, params: Any) -> float:
    used = size_of(params) - size_of(params, "wpe/*")
    return 6 * used * cfg.seq + attention_work(cfg.layers, cfg.seq, cfg.seq, 2 * cfg.d_model)


def llama_work(cfg: llama.Config, params: Any) -> float:
    used = size_of(params) - size_of(params, "embed/*")
    return 6 * used * cfg.seq + attention_work(cfg.layers, cfg.seq, cfg.seq, 2 * cfg.d_model)


def moe_work(cfg: moe.Config, params: Any) -> float:
    experts = sum(size_of(params, f"*/experts/{name}") for name in ("up", "gate", "down"))
    used = size_of(params) - size_of(params, "wte/*") - experts * (1 - cfg.chosen / cfg.experts)
    latent = cfg.latent
    widths = 2 * cfg.d_model if latent is None else cfg.heads * (latent.plain + latent.turned + latent.values)
    return 6 * used * cfg.seq + attention_work(cfg.layers, cfg.seq, cfg.seq, widths)


def vit_work(cfg: vit.Config, params: Any) -> float:
    tokens = (cfg.image[0] // cfg.patch) * (cfg.image[1] // cfg.patch) + 1
    return 6 * size_of(params, "blocks/*") * tokens + attention_work(cfg.layers, tokens, tokens, 2 * cfg.d_model)


def t5_work(cfg: t5.Config, params: Any) -> float:
    batch = batch_of(cfg, 1)
    read, said = (batch[k].shape[1] for k in ("inputs", "targets"))
    keys = size_of(params, "decoder/cross/k/*") + size_of(params, "decoder/cross/v/*")  # of what was read
    linear = size_of(params, "encoder/*") * read + keys * read
    linear += (size_of(params, "decoder/*") - keys + size_of(params, "wte/*")) * said
    pairs = read * read + said * said + said * read
    return 6 * linear + attention_work(cfg.layers, 1, pairs, 2 * cfg.heads * cfg.d_head)


def dlrm_work(cfg: dlrm.Config, params: Any) -> float:
    return 6 * (size_of(params, "bottom/*") + size_of(params, "top/*")) + 6 * (len(cfg.tables) + 1) ** 2 * cfg.width


# --- what is pinned --------------------------------------------------------------------------------------------------


def plans_of(weights: Mapping[str, Any], by_hand: Mapping[str, Any], rows: tuple[str, ...]) -> dict[str, Pins]:
    """`batch`: rows over the first axis, and no more. `fsdp`: weights and moments split as `weights` says, and
    over other axes as the planner likes; rows over `rows`. `hand`: weights and moments as practitioners have them."""
    split = dict.fromkeys(rows, S(0))

    def said(patterns: Mapping[str, Any]) -> Pins:
        return {**dict.fromkeys(BOTH, shardc.rules(patterns)), "batch": split}

    return {"batch": {"batch": {rows[0]: S(0), ...: AUTO}}, "fsdp": said(weights), "hand": said({**by_hand, "*": {}})}


COLUMN, ROW = {"fsdp": S(-2), "model": S(-1)}, {"fsdp": S(-1), "model": S(-2)}
KERNELS, WORDS = {"*kernel": {"fsdp": S(-2), ...: AUTO}}, {"*embedding": {"fsdp": S(-1), ...: AUTO}}
MEGATRON = {"*/out/kernel": ROW, "*/down/kernel": ROW, "*kernel": COLUMN}
"""Heads, hidden units and words over `model`, the other dimension over `fsdp` (Shoeybi et al. 2019; FSDP)."""
IMAGES = plans_of(KERNELS, MEGATRON, ("data", "fsdp"))
TEXT = plans_of(KERNELS | WORDS, MEGATRON | {"*embedding": ROW}, ("data", "fsdp"))

EXPERTS_FSDP = {"*experts/router/*": {...: AUTO}, "*experts/*": {"expert": S(-3), ...: AUTO}, **KERNELS, **WORDS}
EXPERTS_HAND = {
    "*experts/router/*": {}, "*experts/down": {"expert": S(-3)} | ROW, "*experts/*": {"expert": S(-3)} | COLUMN,
    "*/out/kernel": ROW, "*kernel": COLUMN, "*embedding": ROW,
}  # fmt: skip
ROWS = ("fsdp", "expert")
EXPERTS = plans_of(EXPERTS_FSDP, EXPERTS_HAND, ROWS)
"""Rows over `fsdp` and `expert`, and experts over `expert`: tokens travel to their experts and back (GShard)."""
DEEPSEEK = plans_of(EXPERTS_FSDP, {"*/down/kernel": ROW, **EXPERTS_HAND}, ROWS)

ALL = {"data": S(0), "row": S(0), "column": S(0)}
TABLES = {
    "batch": {"batch": {"data": S(0), ...: AUTO}},
    "rows": {**dict.fromkeys(BOTH, shardc.rules({"*tables/*": ALL, "*": {}})), "batch": ALL},
    "grid": {
        **dict.fromkeys(BOTH, shardc.rules({"*tables/*": {"data": S(0), "row": S(0), "column": S(1)}, "*": {}})),
        "batch": ALL,
    },
}
"""Rows of tables over all chips, and indices travel to them (Naumov et al. 2019); or their columns over one axis."""


# --- the models ------------------------------------------------------------------------------------------------------

CRITEO = (
    227605432, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 130229467, 3067956, 405282, 10, 2209, 11938, 155, 4, 976,
    14, 292775614, 40790948, 187188510, 590152, 12973, 108, 36,
)  # fmt: skip
"""Different values of each category in the Criteo Terabyte log, all kept."""

LARGE: Mapping[str, Large] = {
    # Brown et al. 2020, "Language Models are Few-Shot Learners", table 2.1: 96 layers, 12288, 96 heads, 3.2M tokens.
    # All layers dense; the vocabulary padded as Megatron has it.
    "gpt3": Large(
        gpt2, gpt2.Config(96, 12288, 96, 2048, 50304, **STACKED), 1536, 175e9,
        (8, 8, 8), {"data": 2, "fsdp": 32, "model": 8}, TEXT, gpt2_work,
    ),
    # Dubey et al. 2024, "The Llama 3 Herd of Models", table 3 and section 3.4.1: 16M tokens of 8192 in a row.
    "llama405b": Large(
        llama, llama.Config(126, 16384, 128, 8, 53248, 8192, 128256, 500_000.0, **STACKED), 2048, 405.85e9,
        (16, 16, 16), {"data": 8, "fsdp": 64, "model": 8}, TEXT, llama_work,
    ),
    # Mistral AI 2024, config.json of Mixtral-8x22B-v0.1. Its batch is not published: 4M tokens of 4096 in a row. Its
    # experts drop nothing; here they have 1.25 times the places they need, dealt out among 1024 tokens.
    "mixtral": Large(
        moe,
        moe.Config(
            56, 6144, 48, 8, 16384, 4096, group=1024, vocab=32000, llama=True, kv_heads=8, rope_base=1e6, **STACKED
        ),
        1024, 140.6e9, (4, 8, 8), {"fsdp": 8, "expert": 8, "model": 4}, EXPERTS, moe_work,
    ),
    # DeepSeek-AI 2024, "DeepSeek-V3", section 4.2: 61 layers of which 3 are dense, 256 experts and one shared, 8 for
    # each token, 15360 rows of 4096. Gates are a softmax here, and nothing is predicted but the next token. An eighth
    # of the rows: of all of them at once the scores of one layer alone are 120 GiB on each chip.
    "deepseek": Large(
        moe,
        moe.Config(
            61, 7168, 128, 256, 2048, 4096, chosen=8, group=1024, vocab=129280, llama=True,
            latent=moe.Latent(1536, 512, 128, 64, 128), shared=2048, dense=3, dense_hidden=18432, **STACKED,
        ),
        1920, 671e9, (8, 16, 16), {"fsdp": 16, "expert": 32, "model": 4}, DEEPSEEK, moe_work,
    ),
    # Dehghani et al. 2023, "Scaling Vision Transformers to 22 Billion Parameters", table 1 and section 3: 65,536 images
    # of 224 x 224 on 1024 chips. It pools with attention, here a class token does; 29,593 classes of JFT-4B.
    "vit22b": Large(
        vit,
        vit.Config(48, 6144, 48, 14, (224, 224, 3), 29593, parallel=True, **STACKED),
        65536, 21.7e9, (8, 8, 16), {"data": 16, "fsdp": 16, "model": 4}, IMAGES, vit_work,
    ),
    # The MLPs of MLPerf's DLRM (Naumov et al. 2019) and the categories of Criteo Terabyte, with vectors of 256 numbers
    # and one table more of 100 million rows, so that tables are 1 TB. Adam, whose moments are two times as much.
    "dlrm1t": Large(
        dlrm,
        dlrm.Config((*CRITEO, 100_000_000), 13, 256, (512, 256), (1024, 1024, 512, 256)),
        65536, 1e12 / 4, (4, 8, 8), {"data": 16, "row": 4, "column": 4}, TABLES, dlrm_work,
    ),
    # Raffel et al. 2020, "Exploring the Limits of Transfer Learning ...", section 3.7: 24 + 24 layers, hidden layers of
    # 65536, 128 heads of 128; 2048 rows of 512 tokens read and 114 said.
    "t5_11b": Large(
        t5,
        t5.Config(24, 1024, 128, 128, 65536, seq=568, spans=28, span=3, vocab=32128, **STACKED),
        2048, 11.3e9, (4, 8, 8), {"data": 8, "fsdp": 8, "model": 4}, TEXT, t5_work,
    ),
}  # fmt: skip


def pins_of(name: str, plan: str) -> dict[str, Any]:
    """Keyword arguments of `shardc.function`."""
    return {"in_placements": dict(LARGE[name].plans[plan]), "donate_argnames": BOTH}
