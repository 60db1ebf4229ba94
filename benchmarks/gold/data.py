"""Rows of data parallelism and of split optimizers and weights (Rajbhandari et al. 2020; Zhao et al. 2023)."""

from __future__ import annotations

from functools import partial

import jax

import shardc
from benchmarks.gold.model import (
    OPTIMIZER,
    array,
    block,
    descend,
    layer,
    matrices,
    scanned,
    stacked,
    tied,
    tokens,
    train,
    unrolled,
    update,
)
from benchmarks.gold.row import Row
from benchmarks.gold.tensor import MEGATRON
from shardc import AUTO, B, S

LAYERS = 2
BATCH = {"data": S(0)}
SPLIT = {"data": S(-1)}


def tied_weights(d=8, rows=128, T=16, D=128, V=1024):
    params = {"wte": array(V, D), "blocks": [layer(D)] * LAYERS}
    return Row(
        "data_tied", {"data": d}, update(jax.value_and_grad(tied)), (params, tokens(rows, T)),
        "2(d-1)/d·W", 2 * (d - 1) / d * matrices(params), D * D * 4,
        annotated={"in_placements": {"params": {"data": B}, "x": BATCH}},
        auto={"in_placements": {"x": BATCH}}, donated=("params",),
    )  # fmt: skip


of_microbatches = shardc.accumulate(jax.value_and_grad(unrolled), microbatches=4, in_axes=(None, 0))
"""Loss and gradients; microbatches are to be summed before devices are."""


def accumulated(d=8, rows=128, T=8, D=128):
    return Row(
        "data_accumulated", {"data": d}, update(of_microbatches), ([layer(D)] * LAYERS, array(rows, T, D)),
        "2(d-1)/d·W, once for all microbatches", 2 * (d - 1) / d * LAYERS * matrices(layer(D)), D * D * 4,
        annotated={"in_placements": {"params": {"data": B}, "x": BATCH}},
        auto={"in_placements": {"x": BATCH}}, donated=("params",),
    )  # fmt: skip


def adam(name, mesh, gradients, params, x, formula, gold, annotated, auto):
    state = jax.eval_shape(OPTIMIZER.init, params)
    deep = isinstance(params, dict)  # stacked: what is reduced once is all layers' at once
    return Row(
        name, mesh, train(gradients), (params, state, x), formula, gold, x.shape[-1] ** 2 * 4 * (LAYERS if deep else 1),
        annotated={"in_placements": annotated}, auto={"in_placements": auto}, donated=("params", "state"),
    )  # fmt: skip


def zero(d=8, rows=128, T=8, D=128):
    plain, deep, x = [layer(D)] * LAYERS, stacked(D, LAYERS), array(rows, T, D)
    W = LAYERS * matrices(layer(D))
    moments = shardc.rules({"*mu/*": SPLIT, "*nu/*": SPLIT})
    once, again = (
        jax.value_and_grad(loss)
        for loss in (unrolled, partial(scanned, block=jax.checkpoint(block, prevent_cse=False)))
    )
    state = {"params": {"data": B}, "state": moments, "x": BATCH}, {"state": moments, "x": BATCH}
    weights = {"params": SPLIT, "state": moments, "x": BATCH}, {"params": SPLIT, "x": BATCH}
    both = {"replica": S(0), "data": S(0)}
    mesh, twice, thrice = {"data": d}, 2 * (d - 1) / d * W, 3 * (d - 1) / d * W
    yield adam("zero_1", mesh, once, plain, x, "2(d-1)/d·W", twice, *state)
    yield adam("zero_2", mesh, of_microbatches, plain, x, "2(d-1)/d·W, once for all microbatches", twice, *state)
    yield adam("zero_3_kept", mesh, once, plain, x, "2(d-1)/d·W, gathered weights kept", twice, *weights)
    yield adam("zero_3", mesh, again, deep, x, "3(d-1)/d·W", thrice, *weights)
    r, d = 2, d // 2
    yield adam(
        "hybrid_fsdp", {"replica": r, "data": d}, again, deep, x, "3(d-1)/d·W + 2(r-1)/r·W/d",
        3 * (d - 1) / d * W + 2 * (r - 1) / r * W / d, *({**pins, "x": both} for pins in weights),
    )  # fmt: skip


def data_and_tensor(d=2, t=4, rows=4, T=64, D=256):
    A, W = rows // d * T * D * 4, matrices(layer(D))
    return Row(
        "data_tensor", {"data": d, "model": t}, descend(unrolled), ([layer(D)] * LAYERS, array(rows, T, D)),
        "2(d-1)/d·W/t + 8(t-1)/t·A of each layer", LAYERS * (2 * (d - 1) / d * W / t + 8 * (t - 1) / t * A), A,
        annotated={
            "in_placements": {"params": MEGATRON, "x": BATCH}, "out_placements": (None, BATCH, None),
        },
        auto={"in_placements": {"x": BATCH}, "out_placements": (None, BATCH, None)}, donated=("params",),
    )  # fmt: skip


def fsdp_and_tensor(d=2, t=4, rows=4, T=512, D=256, r=1):
    """With `r` replicas, if there are several."""
    column, row = {"model": S(-1), "data": S(-2)}, {"model": S(-2), "data": S(-1)}
    weights = {"o": row, "down": row, **dict.fromkeys(("q", "k", "v", "up"), column)}
    free = {name: {"data": p["data"], ...: AUTO} for name, p in weights.items()}
    if r > 1:
        free = {name: {"replica": B, **p} for name, p in free.items()}
    name, replicas = ("hybrid_tensor", {"replica": r}) if r > 1 else ("fsdp_tensor", {})
    batch = dict.fromkeys((*replicas, "data"), S(0))
    A, W = rows // (r * d) * T * D * 4, matrices(layer(D))
    sent = 3 * (d - 1) / d * W / t + 2 * (r - 1) / r * W / (d * t) + 8 * (t - 1) / t * A
    return Row(
        name, {**replicas, "data": d, "model": t}, descend(scanned), (stacked(D, LAYERS), array(rows, T, D)),
        f"3(d-1)/d·W/t{' + 2(r-1)/r·W/dt' if replicas else ''} + 8(t-1)/t·A of each layer", LAYERS * sent, A,
        annotated={
            "in_placements": {"params": shardc.rules(weights), "x": batch}, "out_placements": (None, batch, None),
        },
        auto={"in_placements": {"params": shardc.rules(free), "x": batch}, "out_placements": (None, batch, None)},
        donated=("params",),
    )  # fmt: skip


ROWS = (tied_weights(), accumulated(), *zero(), data_and_tensor(), fsdp_and_tensor(), fsdp_and_tensor(d=2, t=2, r=2))
