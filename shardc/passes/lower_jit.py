"""The same plan as `jit` with shardings, for comparison: XLA's partitioner is told where values live, and moves them.

It cannot be told everything: partial sums and uneven splits have no sharding in JAX, and are left to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from shardc import compat
from shardc.compat import Eqn
from shardc.passes.lower.lower import Lowering
from shardc.plan.plan import Plan
from shardc.sbp.layout import is_plain
from shardc.sbp.placement import Placement


class _Constraining(Lowering):
    """Runs a boxed program on whole values; a boxing becomes a sharding constraint."""

    def __init__(self, plan: Plan, mesh: Mesh) -> None:
        super().__init__(plan.boxed, plan.mesh)
        self.devices = mesh

    def operation(self, eqn: Eqn, operands: list[Any]) -> Sequence[Any]:
        return compat.bind_with(eqn.primitive, eqn.params)(*operands)

    def box(self, eqn: Eqn, x: Any) -> Any:
        return self.constrain(x, eqn.params["dst"])

    def constrain(self, x: Any, placement: Placement) -> Any:
        if not is_plain(x.shape, placement, self.sizes):
            return x
        return jax.lax.with_sharding_constraint(x, placement.to_sharding(self.devices))


def lower_jit(plan: Plan, mesh: Mesh) -> Any:
    """A jitted function of the plan's flat arguments, captured arrays included, that gives its flat results.

    Args:
      plan: a plan for this mesh.
      mesh: its devices.
    """
    low = _Constraining(plan, mesh)

    def run(*leaves: Any) -> list[Any]:
        args = [low.constrain(jax.numpy.asarray(x), p) for x, p in zip(leaves, plan.inputs, strict=True)]
        out = low.run(plan.boxed.jaxpr, args)
        return [low.constrain(jax.numpy.asarray(x), p) for x, p in zip(out, plan.outputs, strict=True)]

    run.__name__ = plan.program.name
    return jax.jit(run)
