"""Meshes, and the arrays that live on them, as data of the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardc import compat
from shardc.arrays.place import Place
from shardc.errors import number_text
from shardc.machine.mesh import MeshView
from shardc.plan.borders import Border
from shardc.report.tables import bytes_text, devices_text, fold_leaves, placement_text
from shardc.sbp.placement import is_even


def mesh_data(name: str, mesh: MeshView) -> dict[str, Any]:
    """A mesh: its axes with their sizes, and its devices in words."""
    whole = mesh.size == math.prod(mesh.topology.shape)  # not the mesh of one stage
    devices = (
        devices_text(mesh.topology, mesh.size) if whole else number_text(mesh.size, f"{mesh.topology.kind} device")
    )
    return {"name": name, "axes": list(mesh.whole_axes), "devices": devices}


@dataclass(frozen=True)
class ArrayAt:
    """A row of a table of arrays.

    Attributes:
      path: its name.
      mesh: the number of its mesh in the page's list.
      why: why it is there.
      bytes: that each device allocates.
      on_host: whether it lives in the memory of the host.
    """

    path: str
    place: Place
    mesh: int
    why: str
    bytes: int
    on_host: bool = False


def arrays_data(title: str, arrays: Sequence[ArrayAt]) -> dict[str, Any]:
    """A table of arrays, alike ones in one row. For each the axes that split each of its dimensions, outermost first,
    and those along which it is partial."""
    rows: list[dict[str, Any]] = []
    kinds = [compat.short_text(a.place.shape, a.place.dtype) for a in arrays]
    where = [placement_text(a.place.at) + ", on the host" * a.on_host for a in arrays]
    keyed = [((kind, at, a.why, a.mesh), a.path, a) for kind, at, a in zip(kinds, where, arrays, strict=True)]
    for (kind, placement, why, mesh), path, found in fold_leaves(keyed):
        place = found[0].place
        shape, at, padded = place.shape, place.at, not is_even(place.shape, place.at, place.sizes)
        rows.append({
            "path": path, "type": kind, "placement": placement, "why": why, "mesh": mesh, "padded": padded,
            "bytes": bytes_text(sum(a.bytes for a in found)), "shape": list(shape), "partial": at.partial_axes,
            "op": at.partial_op or "", "cuts": [at.axes_of(d) for d in range(len(shape))],
        })  # fmt: skip
    return {"title": title, "rows": rows}


def borders_data(title: str, borders: Sequence[Border], why: Callable[[Border], str], staged: bool) -> dict[str, Any]:
    """Arguments or results.

    Args:
      title: what they are.
      borders: all of them.
      why: why one is placed as it is.
      staged: whether they live on the meshes of stages.
    """
    own = [
        ArrayAt(b.path or "result", b.place, b.stage * staged, why(b), b.bytes, b.on_host)
        for b in borders
        if not b.reuses
    ]
    rest = f"; {len(borders) - len(own)} of them reuse the buffers and placements of donated arguments"
    return arrays_data(f"{title}: {number_text(len(borders), 'array')}{rest * (len(own) < len(borders))}", own)
