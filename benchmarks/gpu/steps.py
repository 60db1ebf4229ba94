"""Section steps: training steps of real models in bfloat16, under shardc on a mesh of one device and under jax.jit.

Both sides donate the same arguments and start from the same numbers. A process measures one model: it compiles both
sides, waits until no other uses the device, and calls them by turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shardc
from benchmarks import dispatch
from benchmarks.gpu.batches import BATCHES, Draw
from benchmarks.gpu.child import figure, verdict, wait_for_turn
from benchmarks.gpu.programs import MODULES
from benchmarks.measure import Loop, Pair, by_turns, losses_of, report, seconds
from examples import gpt2, llama, plans, resnet, vit

BF16 = {"dtype": jnp.bfloat16}
LLAMA = llama.Config(layers=24, d_model=1024, heads=16, kv_heads=8, hidden=2816, seq=1024, vocab=32000)
MODELS: Mapping[str, tuple[str, Any, int]] = {
    "GPT-2 124M": ("gpt2", replace(gpt2.CONFIGS["small124m"], **BF16), 8),
    "Llama 350M": ("llama", replace(LLAMA, scan_layers=True, remat=True, **BF16), 8),
    "ResNet-50": ("resnet", replace(resnet.CONFIGS["resnet50"], **BF16), 128),
    "ViT-B": ("vit", replace(vit.CONFIGS["base16"], **BF16), 64),
}
"""By name: the module, its config, rows in a batch. Llama's layers are scanned and computed again in the backward."""
FIRST = 1e-2
"""How far the first losses may be apart, as a part of their size. Both sides round to bfloat16, each where it likes."""
DISPATCH = "dispatch"
LEAVES = (1, 16, 256)
JOBS = (*MODELS, DISPATCH)
TINY = ("GPT-2 124M", DISPATCH)


def measure(job: str, options: argparse.Namespace) -> None:
    turns, steps = (3, 1) if options.tiny else (11, 5)
    if job != DISPATCH:
        return measure_model(job, options.tiny, turns, steps)
    wait_for_turn()
    for leaves in LEAVES:
        pair = dispatch.compare(leaves, devices=1, turns=turns, calls=10 if options.tiny else 100)
        report(what=f"dispatch, {leaves} arrays", **times(pair), unit="us")
    return None


def measure_model(job: str, tiny: bool, turns: int, steps: int) -> None:
    name, cfg, rows = MODELS[job]
    module = MODULES[name]
    if tiny:
        cfg, rows = replace(module.CONFIGS["test"], dtype=cfg.dtype), 8
    init_fn, step_fn = module.make_step(cfg)
    args = (*jax.jit(init_fn)(jax.random.key(0)), BATCHES[name](cfg, rows, Draw()))
    args = jax.tree.map(np.asarray, args)  # each side donates arrays of its own
    state = range(len(args) - 1)
    mesh = shardc.make_mesh(data=1)
    ours = shardc.function(mesh=mesh, **getattr(plans, name).PLANS["data"]())(step_fn)
    jitted = jax.jit(lambda *xs: step_fn(*xs), donate_argnums=tuple(state))
    planning, plan = seconds(lambda: ours.plan(*args))
    compiling, compiled = seconds(lambda: ours.compile(*args))
    audit = compiled.audit()
    peer_compiling, peer = seconds(lambda: jitted.lower(*args).compile())  # finds the kernels that ours has chosen
    wait_for_turn()
    *ours_state, batch = shardc.put(args, mesh, plan.in_placements)
    *peer_state, peer_batch = jax.device_put(args)
    loops = Loop(ours, ours_state, batch, steps), Loop(peer, peer_state, peer_batch, steps)
    pair = by_turns(*loops, turns)
    losses = [losses_of(loop) for loop in loops]
    apart = np.abs(losses[0] / losses[1] - 1)
    finite = bool(np.isfinite(losses).all())
    wrong = [
        text
        for text, bad in (
            ("a loss is not finite", not finite),
            (f"the first losses are apart by {apart[0]:.1e}, more than {FIRST:.0e}", finite and apart[0] > FIRST),
            (str(audit), not audit.ok),
        )
        if bad
    ]
    report(
        what=job, **times(pair), unit="ms", parameters=sum(x.size for x in jax.tree.leaves(args[0])), rows=rows,
        planning=planning, compiling=compiling, peer_compiling=peer_compiling, audit=audit.ok,
        losses=[losses[0][0], losses[0][-1]] if finite else None, apart=figure(apart.max()), **verdict(wrong),
    )  # fmt: skip


def times(pair: Pair) -> dict[str, float]:
    """Medians of both sides and their ratio; `low` and `high` are of the ratios within a turn."""
    return {"ours": pair.ours, "peer": pair.peer, "ratio": pair.ours / pair.peer, "low": pair.low, "high": pair.high}
