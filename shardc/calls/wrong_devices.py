"""The error about arrays that live on other devices than the function's, such as the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from shardc.arrays.placed import PlacedArray, StackedArray, leaf_aval
from shardc.errors import all_offenders
from shardc.machine.devices import is_remote, processes_of
from shardc.machine.mesh import MeshView
from shardc.report.tables import MOST, fold_leaves, mesh_text, numbers_text


def _place_text(x: Any) -> str:
    """`data=2, stage 3 on devices 6, 7`."""
    if isinstance(x, StackedArray):
        mesh, devices = "in pieces", {d for p in x.pieces for d in p.mesh.devices.flat}
    elif isinstance(x, PlacedArray):
        mesh, devices = mesh_text(x.mesh), set(x.mesh.devices.flat)
    else:
        mesh = mesh_text(x.sharding.mesh) if isinstance(x.sharding, NamedSharding) else ""
        devices = x.sharding.device_set
    if is_remote(devices):
        where = f"in process {numbers_text(processes_of(devices))}"
    else:
        where = f"on device{'s' if len(devices) > 1 else ''} {numbers_text(d.id for d in devices)}"
    return f"{mesh} {where}".lstrip()


def _mesh_of(x: Any) -> Any:
    return x.mesh if isinstance(x, PlacedArray) else getattr(x.sharding, "mesh", None)


def wrong_devices_text(
    where: str, mesh: MeshView, found: Sequence[tuple[str, str, Any]], left: Sequence[Mesh] = ()
) -> str:
    """The text of the error about arrays on other devices, alike ones folded.

    Args:
      where: the function.
      mesh: its mesh.
      found: argument, path and array of each.
      left: meshes that a pipeline's ranks were on before they were mapped onto other devices.
    """
    rows = [((leaf_aval(x).str_short(short_dtypes=True),), path, _place_text(x)) for _, path, x in found]
    lines: list[str] = []
    for (kind,), path, places in fold_leaves(rows):
        some = list(dict.fromkeys(places))
        lines.append(f"{path} {kind}: {'; '.join(some if len(some) <= 2 else [some[0], '…', some[-1]])}")
    if len(lines) > MOST:
        lines = [*lines[: MOST - 1], f"and {len(lines) - MOST + 1} more lines"]
    names = list(dict.fromkeys(name for name, _, _ in found))
    one, many = ", ".join(names), names[0] if len(names) == 1 else f"({', '.join(names)})"
    arrays = "1 array lives" if len(found) == 1 else f"{len(found)} arrays live"
    if any(_mesh_of(x) in left for _, _, x in found):
        return all_offenders(
            f"{where}, mesh {mesh}: {arrays} where a rank was before it was mapped onto other devices. Move the state "
            f"with the function that remap returned: move = {where.partition(' ')[0]}.remap(rank, mesh); {one} = "
            f"move({many}).",
            lines,
        )
    several = " All processes have to do that with the same value; with here=True put takes the rows of each."
    return all_offenders(
        f"{where}, mesh {mesh}: {arrays} on other devices, or on another mesh. Move the arguments to this mesh with "
        f"{one} = shardc.put({many}, mesh, {{}}), which replicates them (instead of {{}}, placements as in "
        f"in_placements may stand there), or to the host with {one} = shardc.fetch({many})."
        f"{several if jax.process_count() > 1 else ''}",
        lines,
    )
