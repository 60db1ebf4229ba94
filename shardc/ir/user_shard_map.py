"""A user's own shard_map inside a function: a unit, which is bound as it is.

Its in_specs and out_specs are its signature: operands are boxed to the former, results have the latter. Its body runs
on the pieces. The collectives in it are the user's, and the plan lists them with the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from jax.extend import core as jex
from jax.extend.core.primitives import all_gather_p, psum_p
from jax.sharding import AbstractMesh, AxisType

from shardc import compat
from shardc.compat import Eqn, Jaxpr
from shardc.machine.mesh import MeshView
from shardc.sbp.placement import B, Placement
from shardc.sbp.signature import Signature

CAST: Final = "pvary"
"""Types a value as one that may differ between devices. The body runs where that type is not checked."""
UNTYPED: Final = {"psum_invariant": psum_p, "all_gather_invariant": all_gather_p}
"""Collectives whose results are typed as equal on all devices, and their equivalents without that type."""


def is_unit(eqn: Eqn) -> bool:
    return eqn.primitive.name == "shard_map"


def unit_body(eqn: Eqn) -> Jaxpr:
    """The jaxpr that runs on the pieces."""
    body = eqn.params["jaxpr"]
    return getattr(body, "jaxpr", body)


def unit_placements(eqn: Eqn) -> tuple[Placement, ...]:
    """The placements of a unit's operands and results, from its specs."""
    specs = (*eqn.params["in_specs"], *eqn.params["out_specs"])
    atoms = (*eqn.invars, *eqn.outvars)
    return tuple(Placement.from_spec(s).resolve(len(a.aval.shape)) for s, a in zip(specs, atoms, strict=True))


def unit_signatures(eqn: Eqn) -> dict[str, Signature]:
    """The signature of a unit on each axis that its specs name; on other axes all is B, also on those that its
    axis_names leave out: JAX may split its body over these, here each device runs it."""
    placements = unit_placements(eqn)
    n = len(eqn.invars)
    axes = dict.fromkeys(a for p in placements for a in p)
    return {a: Signature(tuple(p[a] for p in placements[:n]), tuple(p[a] for p in placements[n:])) for a in axes}


def explicit_mesh_of(eqns: Sequence[Eqn], axes: Sequence[tuple[str, int]]) -> AbstractMesh | None:
    """The mesh with Explicit axes, of these names and sizes, of the first unit that has one."""
    meshes = (eqn.params["mesh"] for eqn in eqns if is_unit(eqn))
    of_types = (m for m in meshes if AxisType.Explicit in m.axis_types and tuple(m.shape.items()) == tuple(axes))
    return next((m if isinstance(m, AbstractMesh) else m.abstract_mesh for m in of_types), None)


def whole_signature(eqn: Eqn) -> Signature:
    return Signature((B,) * len(eqn.invars), (B,) * len(eqn.outvars))


def wrong_unit(eqn: Eqn, inside: Sequence[Eqn], mesh: MeshView) -> str:
    """The reason why a unit cannot run on `mesh`; empty if it can. `inside`: the equations of its body, nested ones
    too."""
    theirs = tuple(eqn.params["mesh"].shape.items())
    if sorted(theirs) != sorted(mesh.axes):
        names = ", ".join(f"{a}={n}" for a, n in theirs)
        return f"its mesh ({names}) differs from that of the function; give it the function's mesh"
    grouped = [e for e in inside if e.params.get("axis_index_groups") is not None]
    if grouped:
        lines = ", ".join(dict.fromkeys(f"{e.primitive.name} at {compat.source_line(e)}" for e in grouped))
        return (
            f"axis_index_groups of {lines} follow no axis of the mesh, and a plan counts bytes by axis; give the mesh "
            "an axis for the groups and one for the devices of a group, and name the second"
        )
    if any(p.partial_axes for p in unit_placements(eqn)):
        return "its specs have unreduced axes; sum inside it, with jax.lax.psum"
    return ""


def run_unit(eqn: Eqn, operands: Sequence[Any]) -> list[Any]:
    """The results of a unit on this device's pieces. Call it inside shard_map over the same mesh."""
    body = unit_body(eqn)
    typed = [compat.as_aval(x, v.aval) for x, v in zip(operands, body.invars, strict=True)]
    return jex.jaxpr_as_fun(compat.close(body))(*typed)
