"""What plans count on to be hidden, and what the compiler of a machine hides of it, without the machine.

    JAX_PLATFORMS=cpu python -m benchmarks.overlap h100:8 [CASE ...]

Small training steps, compiled ahead of time; JAX's plugin for the machine has to be installed. For each kind of
collective: milliseconds that could be hidden, and of these what the schedule hides. The quotients of the sums are the
shares of shardc/machine/overlaps.py.

Sizes: L layers, B rows, T and S positions, D width, H heads, K width of a head, F hidden, E experts, C their capacity.
"""

from __future__ import annotations

import argparse
import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

import shardc
from benchmarks.ring import mlp, step_fn, without
from shardc import S
from shardc.machine.overlaps import FULL
from shardc.passes.audit.hlo_overlap import find_overlaps
from shardc.passes.estimate.plan_cost import overlaps_of

T, D, H, F = 1024, 2048, 16, 8192
COLUMN, ROW, DATA = {"model": S(1)}, {"model": S(0)}, {"data": S(0)}
MEGATRON = {"*/[qkv]": COLUMN, "*/o": ROW, "*/gate": COLUMN, "*/up": COLUMN, "*/down": ROW, "*": {}}
MEGATRON_STACKED = {"[qkv]": {"model": S(2)}, "o": COLUMN, "gate": {"model": S(2)}, "up": {"model": S(2)},
                    "down": COLUMN, "*": {}}  # fmt: skip


def array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def batch(rows: int, t: int, d: int) -> Any:
    return {"x": array(rows, t, d), "y": array(rows, t, d)}


def error(x_BTD: Any, y_BTD: Any) -> Any:
    return jnp.square((x_BTD - y_BTD).astype(jnp.float32)).mean()


def norm(scale: Any, x_BTD: Any) -> Any:
    x = x_BTD.astype(jnp.float32)
    return (x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)).astype(x_BTD.dtype) * scale


def layer(p: Any, x_BTD: Any) -> Any:
    h_BTD = norm(p["n1"], x_BTD)
    q_BTHK, k_BSHK, v_BSHK = (jnp.einsum("btd,dhk->bthk", h_BTD, p[name]) for name in ("q", "k", "v"))
    t = x_BTD.shape[1]
    scores_BHTS = jnp.einsum("bthk,bshk->bhts", q_BTHK, k_BSHK).astype(jnp.float32) / q_BTHK.shape[-1] ** 0.5
    weights_BHTS = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores_BHTS, -1e9)).astype(x_BTD.dtype)
    x_BTD = x_BTD + jnp.einsum("bthk,hkd->btd", jnp.einsum("bhts,bshk->bthk", weights_BHTS, v_BSHK), p["o"])
    h_BTD = norm(p["n2"], x_BTD)
    return x_BTD + (jax.nn.silu(h_BTD @ p["gate"]) * (h_BTD @ p["up"])) @ p["down"]


def layer_shapes(d: int, h: int, f: int, *lead: int) -> Any:
    proj = dict.fromkeys("qkv", array(*lead, d, h, d // h)) | {"o": array(*lead, h, d // h, d)}
    return {"n1": array(*lead, d), "n2": array(*lead, d), **proj, "gate": array(*lead, d, f), "up": array(*lead, d, f),
            "down": array(*lead, f, d)}  # fmt: skip


def listed(params: Any, x_BTD: Any) -> Any:
    for p in params:
        x_BTD = layer(p, x_BTD)
    return x_BTD


def scanned(params: Any, x_BTD: Any) -> Any:
    return jax.lax.scan(lambda x, p: (layer(p, x), None), x_BTD, params)[0]


def remat(params: Any, x_BTD: Any) -> Any:
    return jax.lax.scan(lambda x, p: (jax.checkpoint(layer)(p, x), None), x_BTD, params)[0]


def experts(params: Any, x_BTD: Any) -> Any:
    for p in params:
        n = p["r"].shape[-1]
        gates_BTE = jax.nn.softmax((x_BTD @ p["r"]).astype(jnp.float32))
        hot_BTE = jax.nn.one_hot(jnp.argmax(gates_BTE, -1), n)
        at_BT = ((jnp.cumsum(hot_BTE, 1) - 1) * hot_BTE).sum(-1).astype(jnp.int32)
        slot_BTC = jax.nn.one_hot(at_BT, 2 * x_BTD.shape[1] // n)
        sent_BTEC = (slot_BTC[:, :, None, :] * hot_BTE[..., None]).astype(x_BTD.dtype)
        x_EBCD = jnp.einsum("btec,btd->ebcd", sent_BTEC, x_BTD)
        y_EBCD = jnp.einsum("ebcf,efd->ebcd", jax.nn.gelu(jnp.einsum("ebcd,edf->ebcf", x_EBCD, p["up"])), p["down"])
        x_BTD = x_BTD + jnp.einsum("btec,ebcd,bt->btd", sent_BTEC, y_EBCD, gates_BTE.max(-1).astype(x_BTD.dtype))
    return x_BTD


def step_of(model: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def step(params: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(lambda p: error(model(p, batch["x"]), batch["y"]))(params)
        return jax.tree.map(lambda p, g: p - jnp.asarray(1e-3, p.dtype) * g, params, grads), value

    return step


def step_with_momentum(params: Any, momentum: Any, batch: Any) -> Any:
    value, grads = jax.value_and_grad(lambda p: error(listed(p, batch["x"]), batch["y"]))(params)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g.astype(m.dtype), momentum, grads)
    params = jax.tree.map(lambda p, m: (p.astype(m.dtype) - 1e-3 * m).astype(p.dtype), params, momentum)
    return params, momentum, value


@dataclass(frozen=True)
class Case:
    """A step: the axes of its mesh, its arguments and where they lie, and whether products may go around as rings."""

    axes: Any
    step: Callable[..., Any]
    args: Sequence[Any]
    pins: Sequence[Any]
    rings: bool = True


def mlps(layers: int, rows: int, t: int, d: int, f: int) -> Sequence[Any]:
    return [(array(d, f), array(f, d)) for _ in range(layers)], batch(rows, t, d)


_GPT, _STACK, _WIDE = [layer_shapes(D, H, F)] * 3, layer_shapes(D, H, F, 4), [layer_shapes(4096, 32, 16384)] * 2
_MOMENTUM = [jax.tree.map(lambda a: array(*a.shape, dtype=jnp.float32), p) for p in _GPT]
_SPLIT = shardc.rules({"*/0": COLUMN, "*/1": ROW})
_FSDP, _FSDP_STACK = shardc.rules({"*/n?": {}, "*": DATA}), shardc.rules({"n?": {}, "*": {"data": S(1)}})
CASES = {
    "ring_mlp8k": Case({"model": 8}, step_fn, mlps(2, 4, 2048, 8192, 32768), (_SPLIT, COLUMN)),
    "ring_mlp4k": Case({"model": 8}, step_fn, mlps(2, 8, 1024, 4096, 16384), (_SPLIT, COLUMN)),
    "ring_2x4": Case({"data": 2, "model": 4}, step_fn, mlps(2, 8, 2048, 8192, 32768), (_SPLIT, DATA | COLUMN)),
    "noring_mlp8k": Case({"model": 8}, step_fn, mlps(2, 4, 2048, 8192, 32768), (_SPLIT, COLUMN), rings=False),
    "seq_gpt": Case({"model": 8}, step_of(listed), (_WIDE, batch(4, 2048, 4096)), (shardc.rules(MEGATRON), COLUMN)),
    "fsdp_mlp": Case({"data": 8}, step_of(mlp), mlps(3, 16, 1024, 4096, 16384), (DATA, DATA), rings=False),
    "fsdp_mlp_free": Case({"data": 8}, step_of(mlp), mlps(3, 16, 1024, 4096, 16384), (DATA, DATA)),
    "fsdp_list": Case({"data": 8}, step_of(listed), (_GPT, batch(16, T, D)), (_FSDP, DATA), rings=False),
    "fsdp_scan": Case({"data": 8}, step_of(scanned), (_STACK, batch(16, T, D)), (_FSDP_STACK, DATA), rings=False),
    "fsdp_scan_free": Case({"data": 8}, step_of(scanned), (_STACK, batch(16, T, D)), (_FSDP_STACK, DATA)),
    "fsdp_scan_remat": Case({"data": 8}, step_of(remat), (_STACK, batch(32, T, D)), (_FSDP_STACK, DATA), rings=False),
    "dp_list": Case({"data": 8}, step_of(listed), (_GPT, batch(16, T, D)), ({}, DATA)),
    "dp_scan": Case({"data": 8}, step_of(scanned), (_STACK, batch(16, T, D)), ({}, DATA)),
    "zero1": Case({"data": 8}, step_with_momentum, (_GPT, _MOMENTUM, batch(16, T, D)), ({}, _FSDP, DATA)),
    "tp_list": Case({"model": 8}, step_of(listed), (_WIDE, batch(4, T, 4096)), (shardc.rules(MEGATRON), {})),
    "dptp_scan": Case(
        {"data": 2, "model": 4}, step_of(scanned), (layer_shapes(4096, 32, 16384, 3), batch(8, T, 4096)),
        (shardc.rules(MEGATRON_STACKED), DATA),
    ),
    "moe": Case(
        {"data": 8}, step_of(experts),
        ([{"r": array(D, 8), "up": array(8, D, F), "down": array(8, F, D)}] * 2, batch(16, T, D)),
        (shardc.rules({"*/r": {}, "*": DATA}), DATA),
    ),
}  # fmt: skip


def measured(case: Case, topology: str) -> tuple[Any, Any, Mapping[str, float], Mapping[str, float]]:
    """The compiled step, its audit, and by kind of collective seconds that could be hidden and that the schedule
    hides."""
    mesh = shardc.make_mesh(topology=topology, **case.axes)
    given = tuple(range(len(case.args) - 1))
    function = shardc.function(case.step, mesh=mesh, in_placements=case.pins, donate_argnums=given)
    with contextlib.nullcontext() if case.rings else without():
        compiled = function.compile(*case.args)
    plan = compiled.plan
    full = replace(plan.mesh, topology=replace(plan.mesh.topology, overlaps=FULL))
    could, hidden = defaultdict[str, float](float), defaultdict[str, float](float)
    for found in find_overlaps(overlaps_of(plan.boxed, full), [compiled.hlo()], full):
        could[found.planned.kind] += found.planned.hidden
        hidden[found.planned.kind] += found.hidden
    return compiled, compiled.audit(), could, hidden


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("topology")
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], default=list(CASES))
    options = parser.parse_args(argv)
    could, hidden = defaultdict[str, float](float), defaultdict[str, float](float)
    for name in options.cases:
        compiled, audit, one, other = measured(CASES[name], options.topology)
        for kind, seconds in one.items():
            could[kind] += seconds
            hidden[kind] += other[kind]
        planned, found = sum(f.planned.hidden for f in audit.overlaps), sum(f.hidden for f in audit.overlaps)
        peaks = compiled.plan.memory.peak / 2**20, compiled.memory_stats().peak_memory_in_bytes / 2**20
        print(
            f"{name:16} planned {1e3 * compiled.plan.seconds:6.2f} ms, hidden {1e3 * planned:5.2f}, compiled "
            f"{1e3 * found:5.2f}; peak {peaks[0]:.0f} / {peaks[1]:.0f} MiB; {', '.join(rows(one, other))}", flush=True,
        )  # fmt: skip
    print("shares:", ", ".join(f"{kind} {hidden[kind] / could[kind]:.2f}" for kind in could if could[kind] > 0))
    return 0


def rows(could: Mapping[str, float], hidden: Mapping[str, float]) -> Iterator[str]:
    for kind, seconds in could.items():
        yield f"{kind} {1e3 * hidden[kind]:.2f} of {1e3 * seconds:.2f}"


if __name__ == "__main__":
    raise SystemExit(main())
