"""Axes that are to be cut in sub-axes: where a program reshapes a dimension to one that is shorter than an axis, and
where two axes of unequal sizes change what they split.

    reshape f32[64,d] at {data: S(0)} on data=8 --> f32[4,16,d] at {data[0]: S(0), data[1]: S(1)}, sizes 4 and 2
    f32[8,8] at {a: S(0), b: S(1)} on a=4, b=2 --> {b: S(0), a: S(1)}: all of `a` goes, or its inner half and a permute

Four groups of rows on eight devices: no placement on `data` alone keeps each device's rows where they are. As a cut
mesh has more axes, and a plan on it takes longer, it is planned only where the plan without it moves something over the
axis, and does not split a reshape along it, or boxes so; and it is kept only if it is cheaper (`shardc.plan.make`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from shardc.compat import Eqn
from shardc.ir.box import box_p
from shardc.ir.constrain import pin_of
from shardc.ir.user_shard_map import is_unit
from shardc.ir.walk import all_eqns, operation_of
from shardc.machine.mesh import MeshView
from shardc.plan.plan import SpmdPlan
from shardc.sbp.placement import REPLICATED, Placement, S
from shardc.sbp.signature import find_rule
from shardc.sbp.sub_axes import keeps_pieces

MOST_AXES: Final = 3
"""Axes of a cut mesh, at most: the placements of a value grow with each one."""


def cut_axes(plan: SpmdPlan) -> Mapping[str, tuple[int, ...]]:
    """The devices of the sub-axes of each axis that is to be cut, the outermost first; empty if none is."""
    mesh, moved = plan.mesh, dict[str, float]()
    for c in plan.collectives:
        for axis in c.axes:
            moved[axis] = moved.get(axis, 0) + c.bytes
    eqns = all_eqns(plan.boxed.jaxpr) if moved else []
    if any(map(is_unit, eqns)):
        return {}
    found: dict[str, tuple[int, ...]] = {}
    free = MOST_AXES - sum(n > 1 for _, n in mesh.axes)
    for axis in sorted(moved, key=lambda a: -moved[a]):
        sizes = {s for e in eqns for s in _asked(plan, e, axis)}
        if free > 0 and sizes:
            counts = _in_chain(mesh.sizes[axis], sizes, free)
            if _may_be_cut(plan, mesh.cut({axis: counts}), eqns):
                found[axis] = counts
                free -= len(counts) - 1
    return found


def _asked(plan: SpmdPlan, eqn: Eqn, axis: str) -> Iterator[int]:
    """The devices of an outer sub-axis with which an equation could do better."""
    if eqn.primitive.name == "reshape":
        yield from _by_reshape(plan, eqn, axis)
    elif eqn.primitive is box_p:
        yield from _by_boxing(plan.mesh, eqn.params["src"], eqn.params["dst"], axis)


def _by_boxing(mesh: MeshView, src: Placement, dst: Placement, axis: str) -> Iterator[int]:
    """The devices of a shorter axis, if both change what they split: a part of the longer one can take its place."""
    changed = [a for a in mesh.sizes if src[a] != dst[a] and any(isinstance(s, S) for s in (src[a], dst[a]))]
    if axis in changed:
        yield from (k for a in changed if 1 < (k := mesh.sizes[a]) < mesh.sizes[axis] and mesh.sizes[axis] % k == 0)


def _by_reshape(plan: SpmdPlan, eqn: Eqn, axis: str) -> Iterator[int]:
    """The devices of an outer sub-axis with which a reshape could be split along an axis that does not split it."""
    mesh, at = plan.mesh, plan.boxed.placements
    n, op = mesh.sizes[axis], operation_of(eqn)
    others = [k for a, k in mesh.axes if a != axis and k > 1]
    before = [math.prod(some) for k in range(len(others) + 1) for some in itertools.combinations(others, k)]
    result = at[eqn.outvars[0]]
    for run in find_rule(op).runs:
        if any(axis in result.axes_of(d) for d in run.result):
            continue
        for dims, shape in ((run.operand, op.operands[0].shape), (run.result, op.results[0].shape)):
            for size in itertools.accumulate((shape[d] for d in dims), initial=1, func=lambda a, b: a * b):
                yield from (size // k for k in before if size % k == 0 and 1 < size // k < n and n % (size // k) == 0)


def _in_chain(n: int, sizes: set[int], most: int) -> tuple[int, ...]:
    """The devices of sub-axes: their products from the outermost on are these sizes, as far as each divides the next.

    Examples:
      >>> _in_chain(8, {2, 4}, 2), _in_chain(8, {4}, 2), _in_chain(12, {4, 6}, 1)
      ((2, 2, 2), (4, 2), (4, 3))
    """
    found = [1]
    for size in sorted(sizes):
        if size % found[-1] == 0 and len(found) <= most:
            found.append(size)
    return tuple(b // a for a, b in itertools.pairwise([*found, n]))


def _may_be_cut(plan: SpmdPlan, mesh: MeshView, eqns: Sequence[Eqn]) -> bool:
    """Whether all that is pinned has the same pieces on the mesh that is cut: an axis that splits an uneven dimension
    stays whole."""
    program, request = plan.program, plan.request
    pinned: list[tuple[Placement, Sequence[int]]] = []
    for a, aval in zip(request.arguments, program.in_avals, strict=False):
        pinned += [(p, aval.shape) for p in (a.pin and a.pin.placement, a.arrival) if p is not None]
    for pin, aval in zip(request.results, program.out_avals, strict=True):
        pinned.append((pin.placement if pin is not None else REPLICATED, aval.shape))
    for eqn in eqns:
        if (pin := pin_of(eqn)) is not None:
            pinned.append((pin.placement, eqn.outvars[0].aval.shape))
    return all(keeps_pieces(p, shape, mesh) for p, shape in pinned)
