"""A function called inside an outer jit, grad or vmap: its program, with its pins as constraints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import NamedSharding

from shardc import compat
from shardc.errors import MeshError
from shardc.ir.constrain import constrain_p
from shardc.ir.program import Program
from shardc.machine.mesh import AnyMesh, explicit_axes
from shardc.passes.trace.trace import Call, is_array
from shardc.report.tables import mesh_text
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
      PlacementError: a pin is a partial sum, which JAX cannot express; raised when JAX runs or lowers the trace.
    """
    at = [(pin, p) for x, pin, p in zip(call.leaves, into, call.paths, strict=True) if is_array(x)]
    at_out = [(pin, f"result {path}".rstrip()) for pin, path in zip(out, program.out_paths, strict=True)]

    outer = _Outer(mesh, where)

    def run(*arrays: Any) -> list[Any]:
        return _constrained(_replay(program, _constrained(arrays, at, outer), outer), at_out, outer)

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


def _constrained(xs: Sequence[Any], at: Sequence[tuple[Pin | None, str]], outer: _Outer) -> list[Any]:
    """Arrays with their pins, if they have any, as constraints."""
    said = [(pin, f"{path} of {outer.where}") for pin, path in at]
    return [x if pin is None else outer.constrain(x, pin, text) for x, (pin, text) in zip(xs, said, strict=True)]


def _replay(program: Program, leaves: Sequence[Any], outer: _Outer) -> list[Any]:
    """Runs a program under an outer trace."""
    env: dict[Any, Any] = dict(zip(program.jaxpr.invars, [*leaves, *program.captured], strict=True))
    for eqn in program.jaxpr.eqns:
        xs = [a.val if compat.is_literal(a) else env[a] for a in eqn.invars]
        if eqn.primitive is constrain_p:
            pin = eqn.params["pin"]
            out = [outer.constrain(xs[0], pin, pin.said or f"shardc.constrain in {outer.where}")]
        else:
            out = compat.bind_with(eqn.primitive, eqn.params)(*xs)
        env |= dict(zip(eqn.outvars, out, strict=True))
    return [a.val if compat.is_literal(a) else env[a] for a in program.jaxpr.outvars]


@dataclass(frozen=True)
class _Outer:
    """The form that the pins of a function take in an outer trace.

    In that of another shardc function they are pins by axis name; in JAX's, constraints on the function's own mesh.
    """

    mesh: AnyMesh
    where: str

    def constrain(self, x: Any, pin: Pin, said: str) -> Any:
        x, named = jax.numpy.asarray(x), replace(pin, said=said)
        if pin.placement.partial_axes:
            refused = (
                f"{said} is pinned at {pin.placement}, but the function is called in an outer jit, grad or vmap, where "
                "JAX cannot say a partial sum; call it outside, or pin it at B or S."
            )
            return constrain_p.bind(x, pin=named, refused=refused)
        plain = plain_placement(x.shape, pin.placement.resolve(x.ndim), dict(self.mesh.shape))  # JAX takes none uneven
        sharding = NamedSharding(self.mesh, plain.to_spec())
        outside = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, sharding))(x)
        return constrain_p.bind(x, pin=named, outside=outside)
