"""Meshes, and the arrays that live on them, as data of the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from shardc.ir.walk import short_aval
from shardc.machine.mesh import MeshView
from shardc.plan.borders import Border
from shardc.report.tables import bytes_text, devices_text, fold_leaves, number_text, placement_text
from shardc.sbp.placement import Placement


def mesh_data(name: str, mesh: MeshView) -> dict[str, Any]:
    """A mesh: its axes with their sizes, and its devices in words."""
    whole = mesh.size == math.prod(mesh.topology.shape)  # not the mesh of one stage
    devices = devices_text(mesh.topology, mesh.size) if whole else number_text(mesh.size, f"{mesh.topology.kind} device")
    return {"name": name, "axes": list(mesh.axes), "devices": devices}


def array_data(shape: Sequence[int], placement: Placement) -> dict[str, Any]:
    """How an array is cut: for each dimension the axes that split it, outermost first, and the axes with partial
    values."""
    placement = placement.resolve(len(shape))
    return {
        "shape": list(shape),
        "cuts": [placement.axes_of(d) for d in range(len(shape))],
        "partial": placement.partial_axes,
        "op": placement.partial_op or "",
    }


def borders_data(title: str, borders: Sequence[Border], why: Callable[[Border], str], stages: bool) -> dict[str, Any]:
    """Arguments or results, those alike in one row, with the mesh that each lives on.

    Args:
      title: what they are.
      borders: all of them.
      why: why one is placed as it is.
      stages: whether they live on the meshes of stages.
    """
    keyed = [
        ((short_aval(b.aval), placement_text(b.placement), why(b), b.stage), b.path or "result", b) for b in borders
    ]
    rows: list[dict[str, Any]] = []
    for (kind, placement, reason, stage), path, found in fold_leaves(keyed):
        size = sum(b.bytes for b in found)
        rows.append(
            array_data(found[0].aval.shape, found[0].placement)
            | {"path": path, "type": kind, "placement": placement, "why": reason, "bytes": bytes_text(size), "size": size}
            | {"mesh": stage if stages else 0, "reuses": all(b.reuses for b in found), "padded": found[0].is_padded}
        )  # fmt: skip
    return {"title": title, "rows": rows}
