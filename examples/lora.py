"""LoRA (Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models") of a Llama from files of safetensors.

    python -m examples.lora                          # of a small Llama at random: trains, merges, writes
    python -m examples.lora --from DIR --to DIR      # with the sizes of --config

The base weights are split over all devices and never written to; adapters of q and v train, and alone have optimizer
state.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardc
from examples import data, llama, weights
from examples.train import fake_cpu_devices, positive
from shardc import S

ADAPTED = ("*attn/q/kernel", "*attn/v/kernel")
BASE = shardc.rules({"*embedding": {"data": S(0), "model": S(1)}, "*kernel": {"data": S(0), "model": S(1)}, "*": {}})
ADAPTERS = shardc.rules({"*/b": {"model": S(1)}, "*": {}})


def init_adapters(key: jax.Array, like: Any, rank: int) -> dict[str, Any]:
    """Two thin matrices for each adapted weight, by its path; the second one is zero."""
    chosen = {p: x.shape for p, x in weights.by_path(like).items() if any(fnmatchcase(p, a) for a in ADAPTED)}
    keys = jax.random.split(key, len(chosen))
    return {
        path: {"a": jax.random.normal(k, (inner, rank)) / inner**0.5, "b": jnp.zeros((rank, outer))}
        for k, (path, (inner, outer)) in zip(keys, chosen.items(), strict=True)
    }


def merged(params: Any, adapters: dict[str, Any], scale: float = 2.0) -> Any:
    """The weights with what their adapters add."""
    structure = jax.tree.structure(params)
    leaves = [
        w + scale * (adapters[path]["a"] @ adapters[path]["b"]).astype(w.dtype) if path in adapters else w
        for path, w in weights.by_path(params).items()
    ]
    return jax.tree.unflatten(structure, leaves)


def make(cfg: llama.Config, mesh: jax.sharding.Mesh, rank: int) -> tuple[Any, Any, Any]:
    """`init(key)` gives adapters and their optimizer state; `step` and `merge` are on the mesh."""
    like, optimizer = weights.shapes(llama, cfg), optax.adam(cfg.learning_rate)

    def init(key):
        adapters = init_adapters(key, like, rank)
        return adapters, optimizer.init(adapters)

    def step(adapters, state, params, batch):
        loss, grads = jax.value_and_grad(lambda some: llama.loss(merged(params, some), batch, cfg))(adapters)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(adapters, updates), state, loss

    places = {"adapters": ADAPTERS, "state": ADAPTERS, "params": BASE, "batch": {"data": S(0)}}
    return (
        shardc.function(init, mesh=mesh, out_placements=ADAPTERS),
        shardc.function(step, mesh=mesh, in_placements=places, donate_argnames=("adapters", "state")),
        shardc.function(
            merged, mesh=mesh, in_placements={"params": BASE, "adapters": ADAPTERS}, out_placements=BASE,
            donate_argnames="params",
        ),
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.lora", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="test", choices=sorted(llama.CONFIGS))
    parser.add_argument("--from", dest="source", type=Path, help="a folder with files of safetensors")
    parser.add_argument("--to", type=Path, help="a folder for the merged weights")
    parser.add_argument("--rank", type=positive, default=4)
    parser.add_argument("--steps", type=positive, default=60)
    parser.add_argument("--rows", type=positive, default=16)
    options = parser.parse_args(argv)
    fake_cpu_devices(8)
    cfg, mesh = llama.CONFIGS[options.config], shardc.make_mesh(data=4, model=2)
    like = weights.shapes(llama, cfg)
    with tempfile.TemporaryDirectory() as scratch:
        if options.source is None:
            options.source = Path(scratch)
            weights.write(options.source, weights.random(like), weights.LLAMA)
        params = shardc.put(like, mesh, BASE, read=weights.reader(options.source, weights.LLAMA, like))
    init, step, merge = make(cfg, mesh, options.rank)
    adapters, state = init(jax.random.key(0))
    few, all_ = (sum(x.size for x in jax.tree.leaves(tree)) for tree in (adapters, params))
    print(f"{few:,} of {all_ + few:,} parameters train")
    batches = data.text_batches(data.text_bytes(), options.rows, cfg.seq)
    losses = []
    for batch in islice(batches, options.steps):
        adapters, state, loss = step(adapters, state, params, batch)
        losses.append(loss)
    first, last = (float(np.mean(some)) for some in (losses[:5], losses[-5:]))
    print(f"loss {first:.3f} -> {last:.3f} in {options.steps} steps")
    whole = merge(params, adapters)
    if options.to:
        options.to.mkdir(parents=True, exist_ok=True)
        weights.write(options.to, whole, weights.LLAMA)
    return 0


if __name__ == "__main__":
    sys.exit(main())
