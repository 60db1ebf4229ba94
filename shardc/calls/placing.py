"""`shardc.put` and `shardc.constrain`: where arrays are put on a mesh, and values pinned inside a function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding

from shardc import compat
from shardc.arrays.placed import put as put_tree
from shardc.calls.leaves import leaf_of
from shardc.errors import PlacementError, all_offenders
from shardc.ir.constrain import constrain_p
from shardc.machine.mesh import AnyMesh, view
from shardc.passes.trace.pins import Pins, code_text
from shardc.passes.trace.trace import leaves_by_path, path_text
from shardc.sbp.placement import AUTO, Auto, Pin, Placement, S, as_sbp

T = TypeVar("T")


@compat.face
def put(tree: Any, mesh: AnyMesh, placements: Any) -> Any:
    """Puts the arrays of a pytree on a mesh.

    Args:
      tree: pytree of arrays; leaves that are no arrays are left as they are.
      mesh: a mesh with devices.
      placements: as `in_placements` says them, or as `plan.in_placements` gives them: a leaf, `shardc.rules`, or a
        pytree prefix; what is AUTO or None is left as it is.

    Returns:
      The tree with jax.Arrays; where a placement is an uneven split or a partial sum, PlacedArrays.

    Raises:
      ArgumentError: the mesh has no devices.
      PlacementError: a placement does not fit the mesh or its array, or the two trees do not match.
    """
    pairs, structure = leaves_by_path(tree), jax.tree.structure(tree)
    pins = Pins("placements", [leaf_of(p := path_text(path), p, x) for path, x in pairs], view(mesh))
    pins.spread(placements, jax.tree.unflatten(structure, range(len(pairs))))
    if pins.offenders:
        raise PlacementError(all_offenders(f"shardc.put, mesh {view(mesh)}:", pins.offenders))
    placed = [None if pin is None else pin.placement for pin in pins.pins]
    return put_tree(tree, mesh, jax.tree.unflatten(structure, placed))


def constrain(x: T, placement: Any) -> T:
    """Pins a value inside a function: the identity, with a placement that the plan keeps.

    Args:
      x: an array, or a pytree of arrays that are all placed so.
      placement: a dict from axis to sbp, a Placement, a PartitionSpec or a NamedSharding; `{"data": S(0), ...: AUTO}`
        pins one axis. What does not fit the value or the mesh is an error when the function is planned.

    Returns:
      `x`.
    """
    pin = _loose_pin(placement)

    def one(leaf: Any) -> Any:
        rank = np.ndim(leaf)
        splits = [s.dim for s in pin.placement.values() if isinstance(s, S)]
        fits = all(-rank <= dim < rank for dim in splits)  # if not, the plan says so with all that is wrong
        resolved = Pin(pin.placement.resolve(rank) if fits else pin.placement, pin.fixed)
        return constrain_p.bind(jax.numpy.asarray(leaf), pin=resolved)

    return jax.tree.map(one, x)


def _loose_pin(placement: Any) -> Pin:
    """A pin that is not yet held against a mesh: the function that it stands in does that."""
    if isinstance(placement, Placement):
        return Pin(placement)
    if isinstance(placement, NamedSharding):
        return Pin(Placement.from_sharding(placement))
    if isinstance(placement, jax.sharding.PartitionSpec):
        return Pin(Placement.from_spec(placement))
    if isinstance(placement, Mapping) and isinstance(placement.get(..., AUTO), Auto):
        named = {a: as_sbp(s) for a, s in placement.items() if a is not ...}
        return Pin(Placement(named), frozenset(named) if ... in placement else None)
    raise PlacementError(
        f"shardc.constrain: {code_text(placement)} is no placement; write a dict from axis to sbp, as "
        "{'data': S(0)}, with ...: AUTO in it for axes that are to be chosen."
    )
