"""Meshes, and the arrays that live on them, as data of the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardc.errors import number_text
from shardc.ir.walk import short_aval
from shardc.machine.mesh import MeshView
from shardc.plan.borders import Border
from shardc.report.tables import bytes_text, devices_text, fold_leaves, placement_text
from shardc.sbp.placement import Placement


def mesh_data(name: str, mesh: MeshView) -> dict[str, Any]:
    """A mesh: its axes with their sizes, and its devices in words."""
    whole = mesh.size == math.prod(mesh.topology.shape)  # not the mesh of one stage
    devices = (
        devices_text(mesh.topology, mesh.size) if whole else number_text(mesh.size, f"{mesh.topology.kind} device")
    )
    return {"name": name, "axes": list(mesh.axes), "devices": devices}


@dataclass(frozen=True)
class ArrayAt:
    """An array on a mesh.

    Attributes:
      path, kind: its name; its dtype and shape as text.
      mesh: the number of the mesh in the page's list.
      why: why it is there.
      bytes: on each device.
      padded: whether a device's piece is padded.
      on_host: whether it lives in the memory of the host.
    """

    path: str
    kind: str
    shape: Sequence[int]
    placement: Placement
    mesh: int
    why: str
    bytes: int
    padded: bool
    on_host: bool = False


def arrays_data(title: str, arrays: Sequence[ArrayAt]) -> dict[str, Any]:
    """A table of arrays, alike ones in one row. For each the axes that split each of its dimensions, outermost first,
    and those along which it is partial."""
    rows: list[dict[str, Any]] = []
    where = [placement_text(a.placement) + ", on the host" * a.on_host for a in arrays]
    keyed = [((a.kind, at, a.why, a.mesh), a.path, a) for a, at in zip(arrays, where, strict=True)]
    for (kind, placement, why, mesh), path, found in fold_leaves(keyed):
        first, shape = found[0], found[0].shape
        at = first.placement.resolve(len(shape))
        rows.append({
            "path": path, "type": kind, "placement": placement, "why": why, "mesh": mesh, "padded": first.padded,
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
        ArrayAt(
            b.path or "result", short_aval(b.aval), b.aval.shape, b.placement, b.stage * staged, why(b), b.bytes,
            b.is_padded, b.on_host,
        )
        for b in borders
        if not b.reuses
    ]  # fmt: skip
    rest = f"; {len(borders) - len(own)} of them reuse the buffers and placements of donated arguments"
    return arrays_data(f"{title}: {number_text(len(borders), 'array')}{rest * (len(own) < len(borders))}", own)
