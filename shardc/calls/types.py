"""The shardings in the types of a call's arguments, as `jax.jit` would trace them on a mesh with Explicit axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from shardc import compat
from shardc.arrays.placed import leaf_aval
from shardc.machine.mesh import AnyMesh
from shardc.passes.trace.trace import Call, is_array
from shardc.sbp.layout import is_plain
from shardc.sbp.placement import Pin, Placement


def argument_types(
    call: Call, pins: Sequence[Pin | None], arrived: Sequence[Placement | None], mesh: AbstractMesh
) -> tuple[NamedSharding | None, ...]:
    """For each array of a call the sharding in its type: that of its pin, else of where it lives.

    None for what the compiler places, as in `jax.jit` for an array that is not committed, and for an uneven split,
    which JAX has no type for.

    Args:
      pins: one for each leaf.
      arrived: for each array its placement, None if it has none.
      mesh: the mesh of the types (`explicit_mesh`).
    """
    arrays = [(x, pin) for x, pin in zip(call.leaves, pins, strict=True) if is_array(x)]
    return tuple(_type_of(x, pin, place, mesh) for (x, pin), place in zip(arrays, arrived, strict=True))


def is_explicit(mesh: AnyMesh) -> bool:
    """Whether a mesh has an axis that types name."""
    return AxisType.Explicit in mesh.axis_types


def explicit_mesh(call: Call, mesh: AnyMesh) -> AbstractMesh | None:
    """The mesh of the types: the one in context, the function's or an argument's, the first with Explicit axes."""
    of_arguments = {s.mesh for x in call.leaves if (s := _sharding_of(x)) is not None}
    meshes = [jax.sharding.get_abstract_mesh(), mesh, *of_arguments]
    same = (m for m in meshes if is_explicit(m) and tuple(m.shape.items()) == tuple(mesh.shape.items()))
    return next((m if isinstance(m, AbstractMesh) else m.abstract_mesh for m in same), None)


def _sharding_of(x: Any) -> NamedSharding | None:
    """The sharding that an array is committed to, or that a traced value has in its type."""
    if isinstance(x, compat.Tracer):
        sharding = getattr(jax.typeof(x), "sharding", None)
    else:
        sharding = compat.sharding_of(x) if getattr(x, "committed", True) else None
    return sharding if isinstance(sharding, NamedSharding) else None


def _type_of(x: Any, pin: Pin | None, place: Placement | None, mesh: AbstractMesh) -> NamedSharding | None:
    own = _sharding_of(x)
    if pin is None and own is not None and tuple(own.mesh.shape.items()) == tuple(mesh.shape.items()):
        return NamedSharding(mesh, own.spec)
    at = place if pin is None else pin.placement
    if at is None:
        return None
    whole = at.without(at.partial_axes)
    if not is_plain(leaf_aval(x).shape, whole, dict(mesh.shape)):
        return None
    return NamedSharding(mesh, PartitionSpec(*whole.to_spec(), unreduced=frozenset(at.partial_axes)))
