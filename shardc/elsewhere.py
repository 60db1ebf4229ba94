"""Arrays that live on other devices than a function's, as on the stages of a pipeline: what to do, and `fetch`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import NamedSharding

from shardc.errors import all_offenders
from shardc.mesh import AnyMesh, MeshView, stages_text
from shardc.passes.trace import leaf_aval
from shardc.placed import PlacedArray, StackedArray, is_placed
from shardc.report.tables import fold_leaves

MOST: Final = 8
"""Lines of an error about arrays that live elsewhere, at most."""


def fetch(tree: Any) -> Any:
    """The values of a pytree's arrays on the host, wherever they live: on a mesh, or on the stages of a pipeline.

    Args:
      tree: pytree of arrays; what is no array is left as it is.

    Returns:
      The tree with NumPy arrays; random keys, which NumPy has no type for, as jax.Arrays on one device.

    Example:
      >>> fetch({"w": jax.numpy.arange(3), "name": "w"})
      {'w': array([0, 1, 2], dtype=int32), 'name': 'w'}
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_placed)
    for x in leaves:
        if isinstance(x, jax.Array) and not _is_key(x):
            x.copy_to_host_async()  # all of them are on their way before the first is waited for
    return jax.tree.unflatten(structure, [_value(x) for x in leaves])


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _value(x: Any) -> Any:
    if not isinstance(x, jax.Array):
        return x
    if _is_key(x):
        data = np.asarray(jax.random.key_data(x))
        return jax.random.wrap_key_data(jax.numpy.asarray(data), impl=jax.random.key_impl(x))
    return np.asarray(x)


def _place_text(x: Any) -> str:
    """`data=2, stage 3 on devices 6, 7`."""
    if isinstance(x, StackedArray):
        mesh, devices = "in pieces", {d for p in x.pieces for d in p.mesh.devices.flat}
    elif isinstance(x, PlacedArray):
        mesh, devices = mesh_text(x.mesh), set(x.mesh.devices.flat)
    else:
        mesh = mesh_text(x.sharding.mesh) if isinstance(x.sharding, NamedSharding) else ""
        devices = x.sharding.device_set
    return f"{mesh} on device{'s' if len(devices) > 1 else ''} {numbers_text(d.id for d in devices)}".lstrip()


def mesh_text(mesh: AnyMesh) -> str:
    """`data=4, model=2`; of a pipeline's rank `data=2, stage 3`."""
    return ", ".join([*(f"{a}={n}" for a, n in mesh.shape.items()), *filter(None, [stages_text(mesh)])])


def numbers_text(numbers: Iterable[int]) -> str:
    """`4, 5` or `0-7`."""
    found = sorted(numbers)
    if len(found) > 2 and found == [*range(found[0], found[-1] + 1)]:
        return f"{found[0]}-{found[-1]}"
    return ", ".join(map(str, found if len(found) <= 4 else [*found[:3], "…", found[-1]]))


def elsewhere_text(where: str, mesh: MeshView, found: Sequence[tuple[str, str, Any]]) -> str:
    """The error about arrays that live elsewhere, alike ones folded.

    Args:
      where: the function.
      mesh: its mesh.
      found: argument, path and array of each.
    """
    rows = [((leaf_aval(x).str_short(short_dtypes=True),), path, _place_text(x)) for _, path, x in found]
    lines: list[str] = []
    for (kind,), path, places in fold_leaves(rows):
        some = list(dict.fromkeys(places))
        lines.append(f"{path} {kind}: {'; '.join(some if len(some) <= 2 else [some[0], '…', some[-1]])}")
    if len(lines) > MOST:
        lines = [*lines[: MOST - 1], f"and {len(lines) - MOST + 1} lines more"]
    names = list(dict.fromkeys(name for name, _, _ in found))
    one, many = ", ".join(names), names[0] if len(names) == 1 else f"({', '.join(names)})"
    arrays = "1 array lives" if len(found) == 1 else f"{len(found)} arrays live"
    return all_offenders(
        f"{where}, mesh {mesh}: {arrays} on other devices, or on another mesh. Bring all to this mesh with "
        f"{one} = shardc.put({many}, mesh, {{}}), whole on each device, or placed as in_placements says it; or to the "
        f"host with {one} = shardc.fetch({many}).",
        lines,
    )
