"""Section pipeline: two ranks on one device, every schedule by name, beside the same step under jax.jit.

Both ranks' meshes are the same one device. Nothing overlaps there: what is checked is that the executor runs on the
device, and that losses and parameters are those of one program.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shardc
from benchmarks.gpu.batches import Draw
from benchmarks.gpu.child import describe, figure, verdict
from benchmarks.measure import report, seconds
from shardc.pipeline.schedule.methods import METHODS

RANKS, MICROBATCHES, STEPS, RATE = 2, 8, 3, 0.1
TOLERANCE = 1e-4
"""Of the losses' size, and of the parameters'. Products are of float32 in full precision."""
SCHEDULES = (*METHODS, "auto")
TINY = ("gpipe", "zb-v", "pipedream-2bw", "auto")


def make_step(stages: int, layers: int, delayed: bool) -> Callable[..., Any]:
    """`step(params, batch)`, or with delayed weights, as PipeDream-2BW reads them, `step(params, older, batch)`."""
    cuts = {(s + 1) * layers // stages - 1 for s in range(stages - 1)}

    def loss(params, batch):
        x = batch["x"]
        for i, w in enumerate(params):
            x = jnp.tanh(x @ w)
            x = shardc.stage_boundary(x) if i in cuts else x
        return jnp.square(x - batch["y"]).mean()

    grads_of = shardc.accumulate(jax.value_and_grad(loss), microbatches=MICROBATCHES)

    def step(params, batch):
        value, grads = grads_of(params, batch)
        return jax.tree.map(lambda p, g: p - RATE * g, params, grads), value

    def late(params, older, batch):
        value, grads = grads_of(older, batch)
        return jax.tree.map(lambda p, g: p - RATE * g, params, grads), params, value

    return late if delayed else step


def measure(job: str, options: argparse.Namespace) -> None:
    jax.config.update("jax_default_matmul_precision", "highest")
    width, rows = (16, 16) if options.tiny else (1024, 1024)
    for schedule in TINY if options.tiny else SCHEDULES:
        try:
            report(**run(schedule, width, rows))
        except Exception as error:  # noqa: BLE001  a row of the report; the other schedules are run
            report(schedule=schedule, ok=False, error=describe(error))


def run(schedule: str, width: int, rows: int) -> dict[str, Any]:
    """The row of one schedule: some steps under shardc and under jax.jit, and how far they are apart."""
    method = METHODS.get(schedule)
    stages = RANKS * (method.chunks if method else 1)
    delayed = method is not None and method.weight_versions == 2
    draw, layers = Draw(), 4
    params = [draw.normal(width, width) * width**-0.5 for _ in range(layers)]
    batch = {"x": draw.normal(rows, width), "y": draw.normal(rows, width)}
    state: list[Any] = [params, [w.copy() for w in params]] if delayed else [params]
    step = make_step(stages, layers, delayed)
    mesh = shardc.make_mesh(data=1)
    pipeline = shardc.Pipeline(schedule=schedule, meshes=[mesh] * RANKS)
    ours = shardc.function(step, pipeline=pipeline, donate_argnums=tuple(range(len(state))))
    peer = jax.jit(step)
    compiling, _ = seconds(lambda: ours.compile(*state, batch))
    mine, theirs = tuple(state), tuple(state)
    losses: list[tuple[float, float]] = []
    took: list[float] = []
    for _ in range(STEPS):
        spent, (*mine, a) = seconds(lambda given=mine: jax.block_until_ready(ours(*given, batch)))
        *theirs, b = peer(*theirs, batch)
        losses.append((float(a), float(b)))
        took.append(spent)
    pairs = [*losses, *zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True)]
    apart = float(np.max([off(np.asarray(a), np.asarray(b)) for a, b in pairs]))  # NaN, if one of them is
    wrong = [] if apart <= TOLERANCE else [f"apart by {apart:.1e}, more than {TOLERANCE:.0e}"]
    return {
        "schedule": schedule, "stages": stages, "losses": [figure(a) for a, _ in losses], "apart": figure(apart),
        "compiling": compiling, "call": min(took), **verdict(wrong),
    }  # fmt: skip


def off(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference, as a part of the largest value."""
    return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30))
