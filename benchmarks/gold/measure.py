"""A gold standard planned and compiled: `python -m benchmarks.gold.measure megatron`; with --large planned only.

Bytes are those that a device sends in one call, counted in the optimized HLO; loops are multiplied by their trips.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

import shardc
from benchmarks.gold.large import LARGE, TOPOLOGY
from benchmarks.gold.row import SIDES, Row, Side
from benchmarks.gold.rows import ROWS
from benchmarks.measure import report, seconds
from shardc.passes.audit.hlo import parse_collectives

SMALL = 64
"""What sends less than this part of a row's unit at once is counted apart: gains of norms, losses, routers."""


@dataclass(frozen=True)
class Sent:
    """What a compiled program sends.

    Attributes:
      large: bytes of the collectives that the formula is about, by kind.
      small: bytes of all others.
      flops: floating-point operations of one device, as XLA counts them; None if nothing was compiled.
    """

    large: Mapping[str, int]
    small: int
    flops: float | None

    @property
    def bytes(self) -> int:
        return sum(self.large.values())


@dataclass(frozen=True)
class Measured:
    """One side of a row.

    Attributes:
      sent: what the compiled program sends; of what is planned only, the plan's word.
      audit: whether the two are one; this and the rest are for shardc's sides only.
      gap, cost: the plan's `gap` and `seconds`.
      planning: seconds to trace and plan, once.
      explained: the plan in words.
    """

    sent: Sent
    audit: bool | None = None
    gap: float | None = None
    cost: float | None = None
    planning: float | None = None
    explained: str = ""


def make_plan(row: Row, side: Side, mesh: Any) -> tuple[Any, Any, float]:
    """The step as a shardc function, its plan, and the seconds that this took. Products multiply float32, as formulas
    count it."""
    step = row.inner(shardc.constrain) if row.inner and side == "annotated" else row.step
    options = row.auto if side == "auto" else row.annotated
    ours = shardc.function(step, mesh=mesh, donate_argnames=row.donated, **options)
    with jax.default_matmul_precision("highest"):
        took, plan = seconds(lambda: ours.plan(*row.args))
    return ours, plan, took


def measure(row: Row, side: Side) -> Measured:
    """Plans and compiles one side of a row on the first devices."""
    mesh = shardc.make_mesh(hbm=row.hbm, **row.mesh)
    ours, plan, took = make_plan(row, side, mesh)
    if side == "jit":
        compiled = annotated_jit(row, plan, mesh).lower(*row.args).compile()
        return Measured(sent(compiled, row.unit))
    exe = ours.compile(*row.args)
    found = sent(exe.executable.compiled, row.unit)
    return Measured(found, exe.audit().ok, plan.gap, plan.seconds, took, plan.explain())


def measure_plan(row: Row, side: Side, topology: str) -> Measured:
    """Plans one side of a row for a machine that is not there."""
    _, plan, took = make_plan(row, side, shardc.make_mesh(topology=topology, hbm=row.hbm, **row.mesh))
    moved = [(c.kind, c.bytes // c.count, c.count) for c in plan.collectives]
    return Measured(plan_cost(moved, row.unit), None, plan.gap, plan.seconds, took, plan.explain())


def sent(compiled: Any, unit: int) -> Sent:
    ops = parse_collectives(compiled.as_text())
    moved = [(op.kind, tensor.bytes, op.trips or 1) for op in ops for tensor in op.tensors]  # XLA combines several
    return plan_cost(moved, unit, compiled.cost_analysis()["flops"])


def plan_cost(moved: Iterable[tuple[str, int, int]], unit: int, flops: float | None = None) -> Sent:
    """Kind, bytes and count of each collective, by size."""
    large: Counter[str] = Counter()
    small = 0
    for kind, size, count in moved:
        if size >= unit / SMALL:
            large[kind] += size * count
        else:
            small += size * count
    return Sent(dict(large), small, flops)


def annotated_jit(row: Row, plan: Any, mesh: Any) -> Any:
    """The step under jax.jit with the same annotations; arguments that are updated go back to where they were."""

    def pin_inside(x: Any, spec: PartitionSpec) -> Any:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def sharding(pin: Any) -> Any:
        return pin.placement.to_sharding(mesh) if pin is not None and pin.fixed is None else None

    into = [a.pin for a in plan.arguments]
    said = zip(plan.request.results, plan.ties, strict=True)
    out = [into[tie] if pin is None and tie is not None else pin for pin, tie in said]
    names = plan.in_placements.names
    step = row.inner(pin_inside) if row.inner else row.step
    return jax.jit(
        lambda *args: step(*args),
        in_shardings=jax.tree.unflatten(jax.tree.structure(row.args), [sharding(p) for p in into]),
        out_shardings=jax.tree.unflatten(plan.program.out_tree, [sharding(p) for p in out]),
        donate_argnums=[i for i, name in enumerate(names) if name in row.donated],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("row")
    parser.add_argument("--large", action="store_true")
    options = parser.parse_args()
    if options.large:
        row = LARGE[options.row]
        report(row=row.name, **{side: asdict(measure_plan(row, side, TOPOLOGY)) for side in SIDES[:2]})
        return
    row = ROWS[options.row]
    alone = jax.jit(row.step).lower(*row.args).compile()
    sides = {side: asdict(measure(row, side)) for side in SIDES}
    report(row=row.name, flops=alone.cost_analysis()["flops"], **sides)


if __name__ == "__main__":
    main()
