"""The training loop of `examples.train`: mesh, plan, audit, steps, result."""

from __future__ import annotations

import argparse
import inspect
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, TextIO

import jax
import numpy as np
from jax.sharding import Mesh

import shardc
from examples.data import Batch
from examples.staging import staging
from examples.zoo import MODELS, Model
from shardc.checkpoint.checkpoints import Checkpoints
from shardc.runtime.cluster import current

TOLERANCE = 1e-4
"""Relative: what another order of float32 sums may change in a loss over some 50 steps."""


def train(options: argparse.Namespace) -> int:
    """Train as the options say. Returns the exit status: 0, or 1 if the audit or the check fails."""
    model = MODELS[options.model]
    cfg = config_of(model, options)
    rows = options.batch or model.rows
    unit, per_row = model.units(cfg)
    shown = partial(shardc.progress, total=options.steps, items=rows * per_row, unit=unit)

    keywords = pick(model.plans, options.plan, "--plan")()
    staged = staging(keywords.pop("pipeline", None), options, model, cfg, rows)
    init_fn, step_fn = model.make_step(cfg, *staged.hooks)

    def start() -> tuple:
        return jax.jit(init_fn)(jax.random.key(options.seed))

    def batches() -> Iterator[Batch]:
        return islice(model.batches(cfg, rows, options.seed), options.steps)

    args = (*start(), next(batches()))
    axes = staged.axes
    if options.mesh == "auto":
        found = shardc.tune(step_fn, *args, devices=math.prod(axes.values()), axes=tuple(axes), pipe=(), **keywords)
        print(f"{found}\n")
        axes = found.best.axes
    mesh = shardc.make_mesh(**axes)
    step = shardc.function(mesh=mesh, pipeline=staged.pipeline, **keywords)(step_fn)
    print(heading(options, model, args[0], mesh, f"{rows * per_row:,} {unit}"))
    try:
        plan = step.plan(*args)
    except shardc.PipelineError as error:
        raise SystemExit(f"\n{error}") from None
    print(f"\n{plan.explain()}\n")
    began = time.perf_counter()
    audit = step.compile(*args).audit()
    print(f"compiled in {time.perf_counter() - began:.1f} s")
    print(audit)
    if not audit.ok:
        return 1
    if not staged.pipeline:  # which puts each array on its stage by itself
        args = shardc.put(args, mesh, plan.in_placements)
    *state, _ = args
    saving = nullcontext()
    if options.checkpoints:
        saving = shardc.checkpoints(options.checkpoints, every=options.every or 10, plan=plan)
    with loss_log(options.loss_log, "a" if options.checkpoints else "w") as log, saving as saved:
        losses, state = run(step, state, batches(), partial(shown, csv=options.csv), log, saved)
    print(f"\nafter {options.steps} steps: {model.result(cfg, shardc.fetch(state))}")
    if not options.check_against_one_device:
        return 0
    print("\nThe same steps on one device:")
    reference, _ = run(jax.jit(step_fn), start(), batches(), shown)
    if not losses:
        return 0  # all steps were done before
    reference = reference[-len(losses) :]  # the others were done before
    apart = np.abs(np.subtract(losses, reference))
    worst = float(np.max(np.divide(apart, np.abs(reference), out=apart.copy(), where=np.asarray(reference) != 0)))
    print(f"check: the losses differ from those of one device by at most {worst:.1e} of their size")
    return int(worst > TOLERANCE)


def run(
    step: Callable, state: Sequence, batches: Iterable[Batch], shown: Callable, log: TextIO | None = None,
    saved: Checkpoints | None = None,
):  # fmt: skip
    """The loop itself: (losses, state) after a step on each batch, of those that are not done according to `saved`."""
    losses: list[Any] = []
    state, start = saved.last(or_else=tuple(state)) if saved else (state, 0)
    planned = step if hasattr(step, "latest") else None  # on one device it is the plain function
    with shown(planned, start=start) as progress:
        for i, batch in enumerate(islice(batches, start, None), start):
            *state, loss = step(*state, batch)
            losses.append(loss)
            progress(loss=loss)
            if log:
                print(json.dumps({"step": i, "loss": float(loss)}), file=log, flush=True)
            if saved:
                saved.step(i, tuple(state))
    return [float(loss) for loss in losses], tuple(state)


def heading(options: argparse.Namespace, model: Model, params: Any, mesh: Mesh, per_step: str) -> str:
    """What is about to be trained, on what, and how it is placed."""
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    device = mesh.devices.flat[0]
    axes = ", ".join(f"{axis}={n}" for axis, n in mesh.shape.items())
    what = (inspect.getdoc(model.plans[options.plan]) or "").partition("\n")[0]
    return (
        f"model: {options.model}, config {options.config}: {size:,} parameters, {per_step} in a step\n"
        f"mesh:  {axes}: {mesh.size} {device.device_kind} device{'s' * (mesh.size != 1)}\n"
        f"plan:  {options.plan}: {what}"
    )


def config_of(model: Model, options: argparse.Namespace) -> Any:
    config = pick(model.configs, options.config, "--config")
    depth = "layers" if hasattr(config, "layers") else "blocks"
    changes = {depth: options.layers, "vocab": options.vocab, "scan_layers": options.scan, "remat": options.remat}
    changes["carts"] = options.batch if hasattr(config, "carts") else None
    return replace(config, **{name: value for name, value in changes.items() if value})


def pick(table: Mapping[str, Any], name: str, option: str) -> Any:
    if name not in table:
        raise SystemExit(f"{option} {name}: this model has {', '.join(table)}.")
    return table[name]


def loss_log(path: str | None, mode: str) -> AbstractContextManager[TextIO | None]:
    """The file for losses. Of several processes the first one writes it; all have the same losses."""
    if path == "-":
        return nullcontext(sys.stdout)
    run = current()
    return open(path, mode, buffering=1) if path and (run is None or run.me == 0) else nullcontext()
