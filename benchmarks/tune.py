"""The meshes that `shardc.tune` finds for GPT-2 and GPT-3 on slices of v5p.

    python -m benchmarks.tune gpt2 --devices 64 512
    python -m benchmarks.tune gpt3 --devices 512 --microbatches 1 16 --pipe 4 8

Nothing runs: steps are planned from shapes. The layers are scanned and rematerialised, activations in bfloat16,
parameters and AdamW's moments in float32. Nothing is pinned; with --fsdp the weights and moments are split over an axis
`fsdp`, and over others as the planner likes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import shardc
from examples import gpt2
from shardc import AUTO, S

CONFIGS = {
    "gpt2": gpt2.Config(12, 768, 12, 1024, 50304),  # Radford et al. 2019, with the vocabulary padded
    "gpt2-xl": gpt2.Config(48, 1600, 25, 1024, 50304),
    "gpt3": gpt2.Config(96, 12288, 96, 2048, 50304),  # Brown et al. 2020, all layers dense
}
"""Layers, width, heads, positions, vocabulary."""
TOKENS = {"gpt2": 2**19, "gpt2-xl": 2**19, "gpt3": 3 * 2**20}
"""In a batch, as those papers and their reproductions have it."""
WEIGHTS = shardc.rules({"*kernel": {"fsdp": S(-2), ...: AUTO}, "*embedding": {"fsdp": S(-1), ...: AUTO}})
FSDP = {"axes": ("fsdp", "model"), "in_placements": {"params": WEIGHTS, "opt_state": WEIGHTS}}


def config(name: str) -> gpt2.Config:
    made = CONFIGS[name]
    return gpt2.Config(
        made.layers, made.d_model, made.heads, made.seq, made.vocab, scan_layers=True, remat=True, dtype=jnp.bfloat16
    )


def shapes(name: str) -> tuple[Any, ...]:
    """Parameters, optimizer state, batch."""
    cfg = config(name)
    init_fn, _ = gpt2.make_step(cfg)
    rows = jax.ShapeDtypeStruct((TOKENS[name] // cfg.seq, cfg.seq), jnp.int32)
    return *jax.eval_shape(init_fn, jax.random.key(0)), {"inputs": rows, "targets": rows}


def step_of(name: str, microbatches: int) -> Callable[..., Any]:
    accumulate = partial(shardc.accumulate, microbatches=microbatches)
    return gpt2.make_step(config(name), accumulate if microbatches > 1 else lambda fn: fn)[1]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=CONFIGS)
    parser.add_argument("--devices", type=int, nargs="+", default=[64])
    parser.add_argument("--topology", default="v5p")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1])
    parser.add_argument("--pipe", type=int, nargs="*", help="ranks of pipelines; none after it: no pipelines")
    parser.add_argument("--fsdp", action="store_true", help="axes fsdp and model, weights and moments split over fsdp")
    parser.add_argument("--tries", type=int, default=12)
    options = parser.parse_args(argv)
    for devices in options.devices:
        began = time.perf_counter()
        several = options.microbatches != [1]
        found = shardc.tune(
            partial(step_of, options.model) if several else step_of(options.model, 1), *shapes(options.model),
            devices=devices, topology=options.topology, microbatches=options.microbatches if several else None,
            pipe=options.pipe, tries=options.tries, donate_argnames=("params", "opt_state"),
            **(FSDP if options.fsdp else {}),
        )  # fmt: skip
        print(f"{found}\n\nFound in {time.perf_counter() - began:.0f} s.\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
