"""Sub-axes: placements on a mesh with axes that are cut, `MeshView.cut`, and on the user's mesh.

    {data: S(0)}  <-->  {data[0]: S(0), data[1]: S(0)}     on data=8, cut in data[0]=4 and data[1]=2

Both give each device the same piece if the axis divides the block that it cuts. Otherwise the sub-axes, one after the
other, cut other pieces than the axis does, and the axis has to stay whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardc.machine.mesh import MeshView
from shardc.sbp.placement import Pin, Placement, block_sizes


def in_sub_axes(p: Placement, mesh: MeshView) -> Placement:
    """A placement on the user's mesh as one on the mesh that is cut."""
    if not mesh.cuts:
        return p
    parts = dict(mesh.cuts)
    return Placement([(a, sbp) for axis, sbp in p.items_ for a in parts.get(axis, (axis,))])


def pin_in_sub_axes(pin: Pin, mesh: MeshView) -> Pin:
    """A pin on the user's mesh as one on the mesh that is cut."""
    if not mesh.cuts:
        return pin
    parts = dict(mesh.cuts)
    fixed = None if pin.fixed is None else frozenset(a for axis in pin.fixed for a in parts.get(axis, (axis,)))
    return Pin(in_sub_axes(pin.placement, mesh), fixed, pin.said)


def in_whole_axes(p: Placement, mesh: MeshView) -> Placement:
    """A placement with whole axes in place of sub-axes, where all of one do the same one after the other."""
    items = p.items_
    for axis, names in mesh.cuts:
        at = next((i for i, (a, _) in enumerate(items) if a == names[0]), len(items))
        there = items[at : at + len(names)]
        if tuple(a for a, _ in there) == names and len(sbps := {s for _, s in there}) == 1:
            items = (*items[:at], (axis, sbps.pop()), *items[at + len(names) :])
    return p if items == p.items_ else Placement(items)


def is_whole(p: Placement, shape: Sequence[int], mesh: MeshView) -> bool:
    """Whether a placement on a mesh that is cut is one on the user's mesh, with the same pieces."""
    whole = in_whole_axes(p, mesh)
    cut = {a for _, names in mesh.cuts for a in names}
    return not any(a in cut for a in whole) and keeps_pieces(whole, shape, mesh)


def keeps_pieces(p: Placement, shape: Sequence[int], mesh: MeshView) -> bool:
    """Whether the sub-axes of a mesh give each device the piece that a placement on the user's mesh gives it."""
    sizes, cut = dict(mesh.whole_axes), dict(mesh.cuts)
    for dim, axes in p.splits.items():
        blocks = block_sizes(shape[dim], [sizes[a] for a in axes])
        if any(a in cut and block % sizes[a] for a, block in zip(axes, blocks, strict=False)):
            return False
    return True
