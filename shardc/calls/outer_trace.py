"""A function called inside an outer jit, grad or vmap: its program, with its pins as JAX's sharding constraints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from shardc import compat
from shardc.errors import MeshError, PlacementError
from shardc.ir.constrain import constrain_p, pin_of
from shardc.ir.program import Program
from shardc.machine.mesh import AnyMesh, explicit_axes
from shardc.passes.trace.trace import Call, is_array
from shardc.report.elsewhere import mesh_text
from shardc.sbp.layout import plain_placement
from shardc.sbp.placement import Pin


def run_in_outer_trace(
    call: Call, program: Program, into: Sequence[Pin | None], out: Sequence[Pin | None], mesh: AnyMesh, where: str
) -> Any:
    """Runs the program of a call under the outer trace. No plan is claimed: JAX places the rest.

    Args:
      into: the pin of each leaf of the call.
      out: the pin of each result.
      where: the function, for errors.

    Raises:
      MeshError: the mesh in context is another one.
      PlacementError: a pin is a partial sum, which JAX cannot express.
    """
    at = [(pin, p) for x, pin, p in zip(call.leaves, into, call.paths, strict=True) if is_array(x)]
    at_out = [(pin, f"result {path}") for pin, path in zip(out, program.out_paths, strict=True)]

    def run(*arrays: Any) -> list[Any]:
        return _constrained(_replay(program, _constrained(arrays, at, mesh), mesh), at_out, mesh)

    if explicit_axes():
        there = jax.sharding.get_abstract_mesh()
        if dict(there.shape) != dict(mesh.shape):
            raise MeshError(
                f"{where} is called in an outer jit, grad or vmap, whose mesh in context ({mesh_text(there)}) is "
                f"another than its own ({mesh_text(mesh)}); set that one, with jax.set_mesh, or call it outside."
            )
        specs = [jax.sharding.PartitionSpec() if pin is None else pin.placement.to_spec() for pin, _ in at_out]
        run = jax.jit(jax.sharding.auto_axes(run, out_sharding=specs))
    dynamic = [x for x in call.leaves if is_array(x)]
    return jax.tree.unflatten(program.out_tree, run(*dynamic))


def _constrained(xs: Sequence[Any], at: Sequence[tuple[Pin | None, str]], mesh: AnyMesh) -> list[Any]:
    """Arrays with their pins, if they have any, as sharding constraints."""
    return [x if pin is None else _as_constraint(x, pin, mesh, path) for x, (pin, path) in zip(xs, at, strict=True)]


def _replay(program: Program, leaves: Sequence[Any], mesh: AnyMesh) -> list[Any]:
    """Runs a program under an outer trace, its pins as JAX's sharding constraints."""
    env: dict[Any, Any] = dict(zip(program.jaxpr.invars, [*leaves, *program.captured], strict=True))
    for eqn in program.jaxpr.eqns:
        xs = [a.val if compat.is_literal(a) else env[a] for a in eqn.invars]
        pin = pin_of(eqn)
        if eqn.primitive is constrain_p and pin is not None:
            out = [_as_constraint(xs[0], pin, mesh, "shardc.constrain")]
        else:
            out = compat.bind_with(eqn.primitive, eqn.params)(*xs)
        env |= dict(zip(eqn.outvars, out, strict=True))
    return [a.val if compat.is_literal(a) else env[a] for a in program.jaxpr.outvars]


def _as_constraint(x: Any, pin: Pin, mesh: AnyMesh, path: str) -> Any:
    if pin.placement.partial_axes:
        raise PlacementError(
            f"{path} is pinned at {pin.placement}, but the function is called in an outer jit, grad or vmap, where JAX "
            "cannot say a partial sum; call it outside, or pin it at B or S."
        )
    shape = np.shape(x)
    placement = plain_placement(shape, pin.placement.resolve(len(shape)), dict(mesh.shape))  # JAX takes no uneven split
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, placement.to_spec()))
