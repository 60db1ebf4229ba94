"""One GPU: a training step of GPT-2 124M under shardc, on a mesh of one device, and under jax.jit.

    PYTHONPATH=. python3 -m benchmarks.gpu

Wants jax with CUDA, flax and optax. Vocabulary 50257, sequences of 1024, 8 rows, activations in bfloat16.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shardc
from benchmarks import dispatch
from benchmarks.measure import Loop, Pair, by_turns, losses_of, operations, seconds
from examples import gpt2
from examples.plans.gpt2 import data


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="small124m", choices=gpt2.CONFIGS)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--steps", type=int, default=5, help="in a turn")
    options = parser.parse_args()
    device = jax.devices()[0]
    print(f"jax {jax.__version__} on {device.device_kind}; {options.config}, {options.rows} rows")
    cfg = replace(gpt2.CONFIGS[options.config], dtype=jnp.bfloat16)
    print_step(cfg, options.rows, options.turns, options.steps)
    for leaves in (1, 16, 256):
        pair = dispatch.compare(leaves, devices=1, turns=options.turns, calls=100)
        print(f"dispatch, {leaves:3d} arrays   {text(pair, 1e6, 'us')}", flush=True)
    return 0


def print_step(cfg: Any, rows: int, turns: int, steps: int) -> None:
    init_fn, step_fn = gpt2.make_step(cfg)
    tokens = np.random.default_rng(0).integers(0, cfg.vocab, (rows, cfg.seq + 1), dtype=np.int32)
    args = (*jax.jit(init_fn)(jax.random.key(0)), {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]})
    args = jax.tree.map(np.asarray, args)  # each side donates arrays of its own

    mesh = shardc.make_mesh(data=1)
    ours = shardc.function(mesh=mesh, **data())(step_fn)
    planning, plan = seconds(lambda: ours.plan(*args))
    compiling, compiled = seconds(lambda: ours.compile(*args))
    peer = jax.jit(lambda *xs: step_fn(*xs), donate_argnums=(0, 1))
    peer_compiling, _ = seconds(lambda: peer.lower(*args).compile())
    print(f"traced and planned in {planning:.1f} s, compiled in {compiling:.1f} s, jit in {peer_compiling:.1f} s")
    audit = compiled.audit()
    print(f"{audit} | ok: {audit.ok} | collectives in the HLO: {sum(operations(compiled.hlo()).values())}")

    *state, batch = shardc.put(args, mesh, plan.in_placements)
    *peer_state, peer_batch = jax.device_put(args)
    loops = Loop(ours, state, batch, steps), Loop(peer, peer_state, peer_batch, steps)
    pair = by_turns(*loops, turns)
    print(f"step   {text(pair, 1e3, 'ms')}")
    per_step = rows * cfg.seq
    print(f"tokens/s   shardc {per_step / pair.ours:,.0f}   jit {per_step / pair.peer:,.0f}")
    losses = [losses_of(loop) for loop in loops]
    print(f"losses     {losses[0][0]:.4f} to {losses[0][-1]:.4f}, apart by at most "
          f"{np.max(np.abs(losses[0] / losses[1] - 1)):.1e} of their size", flush=True)  # fmt: skip


def text(pair: Pair, scale: float, unit: str) -> str:
    return (
        f"shardc {scale * pair.ours:.2f} {unit}   jit {scale * pair.peer:.2f} {unit}   "
        f"ratio {pair.ratio:.3f} ({pair.low:.3f}-{pair.high:.3f})"
    )


if __name__ == "__main__":
    raise SystemExit(main())
