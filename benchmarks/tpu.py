"""Blocks of a large GPT-2 compiled for a v5p slice that is not there: `python -m benchmarks.tpu fsdp`.

Started by run.py, which sets the environment that libtpu wants. XLA:TPU's own HLO, memory and time for one training
step, forward, backward and update, of unrolled layers: its time counts the body of a loop once.

Sizes: B rows, T and S positions, D width, H heads, K width of a head, F hidden.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

import shardc
from benchmarks.measure import moved, operations, report
from benchmarks.peer import jitted
from shardc import S

D, H, K, T, F = 8192, 64, 128, 2048, 4 * 8192
CHIPS = "v5:4x4x2"


def norm(p, x_BTD):
    x_BTD = x_BTD.astype(jnp.float32)
    mean = x_BTD.mean(-1, keepdims=True)
    variance = jnp.square(x_BTD - mean).mean(-1, keepdims=True)
    return ((x_BTD - mean) * jax.lax.rsqrt(variance + 1e-5)).astype(p["scale"].dtype) * p["scale"] + p["bias"]


def attention(p, x_BTD):
    q_BTHK, k_BSHK, v_BSHK = (jnp.einsum("btd,dhk->bthk", x_BTD, p[name]) for name in ("q", "k", "v"))
    scores_BHTS = jnp.einsum("bthk,bshk->bhts", q_BTHK, k_BSHK).astype(jnp.float32) / K**0.5
    scores_BHTS = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores_BHTS, -jnp.inf)
    weights_BHTS = jax.nn.softmax(scores_BHTS).astype(x_BTD.dtype)
    return jnp.einsum("bhts,bshk,hkd->btd", weights_BHTS, v_BSHK, p["out"])


def block(p, x_BTD):
    x_BTD = x_BTD + attention(p["attn"], norm(p["ln_1"], x_BTD))
    h_BTF = jax.nn.gelu(norm(p["ln_2"], x_BTD) @ p["up"])
    return x_BTD + h_BTF @ p["down"]


def loss(params, batch):
    x_BTD = batch["x"]
    for p in params:
        x_BTD = block(p, x_BTD)
    return jnp.square((x_BTD - batch["y"]).astype(jnp.float32)).mean()


def step_fn(params, batch):
    value, grads = jax.value_and_grad(loss)(params, batch)
    return jax.tree.map(lambda p, g: p - jnp.asarray(1e-3, p.dtype) * g, params, grads), value


def shapes(layers: int, rows: int) -> tuple[Any, Any]:
    """Parameters and batch."""

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def one_layer():
        ln = {"scale": array(D), "bias": array(D)}
        attn = {"q": array(D, H, K), "k": array(D, H, K), "v": array(D, H, K), "out": array(H, K, D)}
        return {"ln_1": ln, "attn": attn, "ln_2": ln, "up": array(D, F), "down": array(F, D)}

    return [one_layer() for _ in range(layers)], {"x": array(rows, T, D), "y": array(rows, T, D)}


@dataclass(frozen=True)
class TpuCase:
    axes: dict[str, int]
    rows: int
    params: Any

    @property
    def options(self) -> dict[str, Any]:
        return {"in_placements": {"params": self.params, "batch": {"data": S(0)}}, "donate_argnames": ("params",)}


COLUMN, ROW = {"model": S(1)}, {"model": S(0)}
CASES = {
    "data_tensor": TpuCase(
        {"data": 4, "model": 8},
        16,
        shardc.rules({"*/attn/out": ROW, "*/attn/*": COLUMN, "*/up": COLUMN, "*/down": ROW, "*": {}}),
    ),
    "fsdp_tensor": TpuCase(
        {"data": 4, "model": 8},
        16,
        shardc.rules({
            "*/attn/out": ROW | {"data": S(2)}, "*/attn/*": COLUMN | {"data": S(0)},
            "*/up": COLUMN | {"data": S(0)}, "*/down": ROW | {"data": S(1)}, "*": {},
        }),
    ),
    "fsdp": TpuCase({"data": 32}, 32, shardc.rules({"*": {"data": S(0)}})),
}  # fmt: skip


def measure(name: str, layers: int) -> None:
    case = CASES[name]
    chips = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS).devices
    mesh = Mesh(np.asarray(chips).reshape(*case.axes.values()), tuple(case.axes), (AxisType.Auto,) * len(case.axes))
    args = shapes(layers, case.rows)
    ours = shardc.function(mesh=mesh, **case.options)(step_fn)
    plan = ours.plan(*args)
    compiled = ours.compile(*args)
    audit = compiled.audit()
    report(
        case=name,
        mesh=",".join(f"{a}={n}" for a, n in case.axes.items()),
        layers=layers,
        ours=figures(compiled.executable.compiled),
        peer=figures(jitted(step_fn, plan, mesh, case.options).lower(*args).compile()),
        planned={"bytes": plan.bytes_per_device, "seconds": plan.seconds},
        audit=audit.ok,
        audit_text=str(audit),
    )


def figures(compiled: Any) -> dict[str, Any]:
    hlo, memory = compiled.as_text(), compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return {
        "seconds": compiled.cost_analysis()["optimal_seconds"],
        "flops": compiled.cost_analysis()["flops"],
        "bytes": moved(hlo),
        "operations": operations(hlo),
        "hbm": getattr(memory, "peak_memory_in_bytes", 0) or held + memory.temp_size_in_bytes,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    measure(options.case, options.layers)
