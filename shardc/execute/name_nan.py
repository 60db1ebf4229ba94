"""Finds the operation that makes the first NaN or infinity, for `jax_debug_nans` and `jax_debug_infs`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardc import compat
from shardc.compat import Eqn
from shardc.ir.user_shard_map import is_unit
from shardc.ir.walk import all_eqns
from shardc.passes.lower.lower import WholeLowering
from shardc.plan.plan import PlacedProgram


def name_first(plan: PlacedProgram, args: Sequence[Any], nans: bool, infs: bool) -> str | None:
    """Run a plan's program operation by operation on one device, up to the first NaN or infinity.

    Callbacks run a second time, as in JAX's own search in a jitted function. In a program with a user's shard_map,
    which needs all devices, nothing is found.

    Args:
      plan: the plan.
      args: its flat arguments, logical values on the host, including captured ones.
      nans, infs: whether to look for NaN, and for infinity.

    Returns:
      A text with the operation and its source line; None if nothing is found.
    """
    if any(map(is_unit, all_eqns(plan.boxed.jaxpr))):
        return None
    with jax.disable_jit(), jax.debug_nans(False), jax.debug_infs(False):
        try:
            _Watching(plan, nans, infs).run(plan.boxed.jaxpr, list(map(jnp.asarray, args)))
        except FloatingPointError as error:
            return str(error)
    return None


class _Watching(WholeLowering):
    """Runs a program on whole values, and looks at each."""

    def __init__(self, plan: PlacedProgram, nans: bool, infs: bool) -> None:
        super().__init__(plan.boxed, plan.mesh)
        self.nans, self.infs = nans, infs

    def operation(self, eqn: Eqn, operands: list[Any]) -> Sequence[Any]:
        out = compat.bind_with(eqn.primitive, eqn.params)(*operands)
        for x in out:
            if not jnp.issubdtype(x.dtype, np.inexact):
                continue
            for kind, looked_for, found in (("nan", self.nans, jnp.isnan), ("inf", self.infs, jnp.isinf)):
                if looked_for and bool(found(x).any()):
                    line = compat.source_line(eqn)
                    raise FloatingPointError(f"invalid value ({kind}) encountered in {eqn.primitive.name} at {line}")
        return out
