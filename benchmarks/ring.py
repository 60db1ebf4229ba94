"""What rings of pieces do for a large model: its plan with and without them, and both as XLA:TPU compiles them.

    python -m benchmarks.ring [--topology v5p:4x4x2] [--plan]

Two MLPs as wide as those of benchmarks/tpu.py, forward, backward and update, with tensor and sequence parallelism
(Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models"), and with weights split over
all chips. Without rings nothing that could be one is offered to the planner. With --plan nothing is compiled; else
`tpu_env` of run.py is the environment that libtpu wants. XLA's time is the sum of what its instructions take, as if
none ran beside another: what its schedule tells is how many permutes have a product between their start and end.

Sizes: B rows, T positions, D width, F hidden.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, PartitionSpec

import shardc
from benchmarks.tpu import COLUMN, D, F, T, figures
from shardc import S
from shardc.passes.place import domain

SLICES = {"v5p:4x4x2": "v5:4x4x2", "v5e:8x4": "v5e:8x4"}
"""As libtpu calls them. Both have 32 chips."""
ROW = {"model": S(0)}
ALL_OVER = {"data": S(0), "model": S(0)}


def mlp(params: Any, x_BTD: Any) -> Any:
    for up, down in params:
        x_BTD = x_BTD + jax.nn.gelu(x_BTD @ up) @ down
    return x_BTD


def step_fn(params: Any, batch: Any) -> Any:
    def loss(params):
        return jnp.square((mlp(params, batch["x"]) - batch["y"]).astype(jnp.float32)).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - jnp.asarray(1e-3, p.dtype) * g, params, grads), value


def shapes(layers: int, rows: int) -> tuple[Any, Any]:
    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    return [(array(D, F), array(F, D)) for _ in range(layers)], {"x": array(rows, T, D), "y": array(rows, T, D)}


CASES: dict[str, tuple[dict[str, int], int, Any, Any]] = {
    "sequence": ({"data": 4, "model": 8}, 16, shardc.rules({"*/0": COLUMN, "*/1": ROW}), {"data": S(0), "model": S(1)}),
    "fsdp": ({"data": 4, "model": 8}, 32, shardc.rules({"*": ALL_OVER}), ALL_OVER),
}
"""Mesh, rows, placements of the weights, of the batch."""


@contextmanager
def without() -> Iterator[None]:
    """No ring is offered."""
    with mock.patch.object(domain, "offer_rings", lambda *_: None):
        yield


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ring", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--topology", choices=SLICES, default="v5p:4x4x2")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--plan", action="store_true", help="compile nothing")
    options = parser.parse_args(argv)
    for name in options.case or CASES:
        for rings in (False, True):
            print(f"{options.topology} {name:10} {'rings' if rings else 'plain'}: ", end="", flush=True)
            if rings:
                measure(options, name)
            else:
                with without():
                    measure(options, name)
    return 0


def measure(options: argparse.Namespace, name: str) -> None:
    axes, rows, weights, batch = CASES[name]
    pins: Any = {"in_placements": {"params": weights, "batch": batch}, "donate_argnames": ("params",)}
    args = shapes(options.layers, rows)
    mesh = shardc.make_mesh(topology=options.topology, **axes) if options.plan else slice_of(options.topology, axes)
    function = shardc.function(mesh=mesh, **pins)(step_fn)
    plan = function.plan(*args)
    time, rings = plan.time, [c for c in plan.collectives if "ring" in c.src + c.dst]
    print(
        f"planned {1e3 * time.total:.1f} ms: computing {1e3 * time.computing:.1f}, moving {1e3 * time.moving:.1f}, "
        f"overlapped {1e3 * time.overlapped:.1f}; {plan.bytes_per_device / 2**30:.2f} GiB sent; {len(rings)} rings; "
        f"peak {plan.memory.peak / 2**30:.2f} GiB; gap {plan.gap:.1%}", flush=True,
    )  # fmt: skip
    if options.plan:
        return
    compiled = function.compile(*args)
    audit, found = compiled.audit(), figures(compiled.executable.compiled)
    permutes = beside_products(compiled.hlo())
    print(
        f"    XLA {1e3 * found['seconds']:.1f} ms, peak {found['hbm'] / 2**30:.2f} GiB, "
        f"{sum(found['bytes'].values()) / 2**30:.2f} GiB sent; permutes beside a product: {sum(permutes)} of "
        f"{len(permutes)}, each {1e3 * permute_seconds(mesh, plan):.3f} ms; {str(audit).splitlines()[0]}", flush=True,
    )  # fmt: skip


def slice_of(topology: str, axes: Mapping[str, int]) -> Mesh:
    chips = topologies.get_topology_desc(platform="tpu", topology_name=SLICES[topology]).devices
    return Mesh(np.asarray(chips).reshape(*axes.values()), tuple(axes), (AxisType.Auto,) * len(axes))


def beside_products(hlo: str) -> list[bool]:
    """For each permute of a schedule whether XLA computes a product between its start and its end."""
    running: dict[str, bool] = {}
    ended: list[bool] = []
    for line in hlo[hlo.index("\nENTRY") :].splitlines():
        made = re.match(r"\s+(?:ROOT )?%([\w.\-]+) = .*? ([a-z\-]+)\(%?([\w.\-]*)", line)
        if made and made[2] == "collective-permute-start":
            running[made[1]] = False
        elif made and made[2] == "collective-permute-done":
            ended.append(running.pop(made[3]))
        elif made and ("kind=kOutput" in line or made[2] == "convolution"):
            running = dict.fromkeys(running, True)
    return ended


def permute_seconds(mesh: Mesh, plan: Any) -> float:
    """XLA's time for one permute alone, of the piece that goes around most often."""
    pieces = [c.bytes // c.count for c in plan.collectives for _ in range(c.count) if "ring" in c.src + c.dst]
    if not pieces:
        return 0.0
    n, size = mesh.shape["model"], max(set(pieces), key=pieces.count)
    every = PartitionSpec(mesh.axis_names)
    shift = jax.shard_map(
        lambda x: jax.lax.ppermute(x, "model", [(i, (i + 1) % n) for i in range(n)]),
        mesh=mesh, in_specs=every, out_specs=every,
    )  # fmt: skip
    x = jax.ShapeDtypeStruct((mesh.size * (size // 2048), 1024), jnp.bfloat16)
    return jax.jit(shift).lower(x).compile().cost_analysis()["optimal_seconds"]


if __name__ == "__main__":
    sys.exit(main())
