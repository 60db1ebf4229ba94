"""Axes that are to be cut in sub-axes: where a program reshapes a dimension to one that is shorter than an axis, where
a boxing moves an axis to or from a dimension that an axis of another size splits, and where an axis is longer than
every dimension that it could split.

    reshape f32[64,d] at {data: S(0)} on data=8 --> f32[4,16,d] at {data[0]: S(0), data[1]: S(1)}, sizes 4 and 2
    f32[8,8] at {a: S(0), b: S(1)} on a=4, b=2 --> {b: S(0), a: S(1)}: all of `a` goes, or its inner half and a permute
    sort[2] f32[4,4,9] on a=8: four devices sort for four others, or each sorts two rows on a[0]=4, a[1]=2

Four groups of rows on eight devices: no placement on `data` alone keeps each device's rows where they are. A cut mesh
has more axes, and a plan on it takes longer to find. So it is planned only where boxings of the plan without it ask for
it, beside such a reshape or by themselves, and take a share of its seconds: in what they send, and in what a device
then reads that it did not hold before; or where operations do that no axis divides. It is kept only if it is cheaper
(`shardc.plan.make`).
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from shardc import compat
from shardc.compat import Eqn, Jaxpr, Var
from shardc.ir.box import Boxed, box_p, boxing_of
from shardc.ir.constrain import pin_of
from shardc.ir.nested import NESTED, bodies_of, trips_of
from shardc.ir.user_shard_map import is_unit
from shardc.ir.walk import all_eqns, local_bytes, operation_of
from shardc.machine.mesh import MeshView
from shardc.passes.estimate.plan_cost import whole_seconds
from shardc.sbp.cost import FEMTO, avoided_cost, memory_seconds
from shardc.sbp.placement import P, Placement, S
from shardc.sbp.signature import family_of, find_rule
from shardc.sbp.sub_axes import keeps_pieces

MOST_AXES: Final = 3
"""Axes of a cut mesh, at most: the placements of a value grow with each one."""
LEAST_SHARE: Final = 0.05
"""Share of a call's seconds that the boxings and operations which ask for sub-axes have to take. They are the most that
a second search could save; below it that is not worth its time."""
MOST_VALUES: Final = 32
"""Values between a boxing and a reshape that are looked at."""

_Costs: TypeAlias = dict[Eqn, float]
"""The seconds that boxings, and operations that leave devices idle, take in a call."""
_BUSY: Final = ("", "contraction", "convolution", "elementwise", "random", "rearrange")
"""Families of operations that are light, or have longer dimensions besides."""


def cut_axes(
    boxed: Boxed, mesh: MeshView, seconds: float, pinned: Sequence[tuple[Placement, Sequence[int]]]
) -> Mapping[str, tuple[int, ...]]:
    """The devices of the sub-axes of each axis that is to be cut, the outermost first; empty if none is.

    Args:
      boxed, mesh: a plan.
      seconds: those of a call of it, with those of what the mesh avoids, without its launch.
      pinned: the placements on the user's mesh, and the shapes, that arguments and results have in any case.
    """
    free, least = MOST_AXES - sum(n > 1 for _, n in mesh.axes), LEAST_SHARE * seconds
    costs = _costs(boxed.jaxpr, mesh)
    eqns = all_eqns(boxed.jaxpr)
    if free < 1 or not costs or sum(costs.values()) < least or any(map(is_unit, eqns)):
        return {}
    found: dict[str, tuple[int, ...]] = {}
    inside = [(pin.placement, e.outvars[0].aval.shape) for e in eqns if (pin := pin_of(e)) is not None]
    for axis, (sizes, boxings) in _asked(boxed, mesh, eqns, costs).items():
        if free > 0 and sum(boxings.values()) >= least:
            counts = _in_chain(mesh.sizes[axis], sizes, free)
            cut = mesh.cut({axis: counts})
            if all(keeps_pieces(p, shape, cut) for p, shape in (*pinned, *inside)):
                found[axis] = counts
                free -= len(counts) - 1
    return found


def _costs(jaxpr: Jaxpr, mesh: MeshView, times: int = 1) -> _Costs:
    """The seconds of what may ask in a jaxpr and its loops: boxings, and operations that no axis divides evenly. Of a
    `cond` the branch counts whose seconds are a plan's: the expected one, or the dearest."""
    found: _Costs = {}
    for e in jaxpr.eqns:
        if e.primitive is box_p:
            found[e] = times * _seconds(e, mesh)
        elif sizes := _by_operation(e, mesh):
            found[e] = times * whole_seconds(e, mesh) / max(n for _, n in sizes)
        bodies = [_costs(body, mesh, times * trips_of(e)) for body in bodies_of(e)]
        if e.primitive.name == "cond":
            bodies = [bodies[-1] if compat.is_expected(e) else max(bodies, key=lambda b: sum(b.values()))]
        for body in bodies:
            found |= body
    return found


def _seconds(box: Eqn, mesh: MeshView) -> float:
    """Seconds of one execution of a boxing: of its collectives, and of reading what a device then holds more."""
    boxing = boxing_of(box, mesh)
    there, here = (local_bytes(box.outvars[0], box.params[end], mesh.sizes) for end in ("src", "dst"))
    avoided = sum(avoided_cost(s.kind, s.axes, mesh) for s in boxing.steps) if mesh.avoids else 0
    return boxing.seconds + avoided / FEMTO + memory_seconds(max(0, here - there), mesh)


def _asked(boxed: Boxed, mesh: MeshView, eqns: Sequence[Eqn], costs: _Costs) -> dict[str, tuple[set[int], _Costs]]:
    """For each axis the devices of outer sub-axes that boxings or operations ask for, and these."""
    made, read = dict[Var, list[Eqn]](), dict[Var, list[Eqn]]()
    for e in eqns:
        made |= {v: [e] for v in e.outvars}
        for v in compat.variables(e.invars):
            read.setdefault(v, []).append(e)
    found: dict[str, tuple[set[int], _Costs]] = {}
    for box, cost in costs.items():
        if box.primitive is not box_p:
            for axis, n in _by_operation(box, mesh):
                sizes, eqns_of = found.setdefault(axis, (set(), {}))
                sizes.add(n)
                eqns_of[box] = cost
            continue
        src, dst = box.params["src"], box.params["dst"]
        asked = list[tuple[str, int]]()
        for e in _reshapes(box.outvars, read, lambda e: e.outvars):
            asked += _by_reshape(mesh, e, src, dst, of_operand=True)
        for e in _reshapes(compat.variables(box.invars), made, lambda e: compat.variables(e.invars)):
            asked += _by_reshape(mesh, e, dst, src, of_operand=False)
        for axis, n in (*asked, *_by_boxing(mesh, src, dst)):
            sizes, boxings = found.setdefault(axis, (set(), {}))
            sizes.add(n)
            boxings[box] = cost
        for axis in {axis for axis, _ in asked if isinstance(dst[axis], P)}:
            found[axis][1].update((e, costs[e]) for e in _of_sums(box, axis, read, boxed.placements))
    return found


def _of_sums(
    box: Eqn, axis: str, read: Mapping[Var, Sequence[Eqn]], placements: Mapping[Var, Placement]
) -> Iterator[Eqn]:
    """The boxings of the partial sums that a boxing leads to."""
    seen, waiting = set(box.outvars), list(box.outvars)
    while waiting and len(seen) <= MOST_VALUES:
        for e in read.get(waiting.pop(0), ()):
            if e.primitive is box_p:
                yield e
            else:
                more = [v for v in e.outvars if isinstance(placements[v][axis], P) and v not in seen]
                seen.update(more)
                waiting += more


def _reshapes(
    values: Sequence[Var], following: Mapping[Var, Sequence[Eqn]], others: Callable[[Eqn], Sequence[Var]]
) -> Iterator[Eqn]:  # fmt: skip
    """The reshapes that are reached from values through a few operations that keep their shape."""
    seen, waiting = set(values), list(values)
    while waiting and len(seen) <= MOST_VALUES:
        v = waiting.pop(0)
        for e in following.get(v, ()):
            if e.primitive.name == "reshape":
                yield e
            elif e.primitive is not box_p:
                more = [w for w in others(e) if w.aval.shape == v.aval.shape and w not in seen]
                seen.update(more)
                waiting += more


def _by_boxing(mesh: MeshView, src: Placement, dst: Placement) -> Iterator[tuple[str, int]]:
    """Each axis that gives or takes a split dimension, with the devices of a shorter one that takes, gives or shares
    it: a part of the longer one can take its place."""
    for (axis, n), (other, k) in itertools.permutations(mesh.axes, 2):
        moved = [a for a in (axis, other) if src[a] != dst[a]]
        exchanged = all(isinstance(end[a], S) for a in moved for end in (src, dst))
        ends = (src[axis], dst[other]), (src[other], dst[axis])
        meet = any(isinstance(given, S) and given == taken for given, taken in ends)
        if 1 < k < n and n % k == 0 and meet and (len(moved) == 2 or (moved and exchanged)):
            yield axis, k


def _by_operation(eqn: Eqn, mesh: MeshView) -> list[tuple[str, int]]:
    """Each axis that is longer than all dimensions along which an operation may be split, if there are several, with
    the devices of outer parts of it that one of them has elements for."""
    if eqn.primitive.name in NESTED or family_of(eqn.primitive.name) in _BUSY:
        return []
    op = operation_of(eqn)
    rule = find_rule(op)
    pairs = zip((*rule.operands, *rule.results), (*op.operands, *op.results), strict=True)
    sizes = {f: n for factors, aval in pairs for f, n in zip(factors, aval.shape, strict=True) if f and n > 1}
    if len(sizes) < 2:
        return []
    free = [(axis, n) for axis, n in mesh.axes if n > max(sizes.values())]
    return [(axis, k) for axis, n in free for size in sizes.values() if 1 < (k := math.gcd(size, n)) < n]


def _by_reshape(
    mesh: MeshView, eqn: Eqn, there: Placement, here: Placement, *, of_operand: bool
) -> Iterator[tuple[str, int]]:
    """Each axis that is boxed away from a run of the operand of a reshape, or onto one of its result, with the devices
    of an outer part of it along which the run could be split.

    Args:
      there: the placement of the operand or result on the other side of the boxing.
      here: that beside the reshape.
      of_operand: which of both.
    """
    op = operation_of(eqn)
    for run in find_rule(op).runs:
        for axis, n in mesh.axes:
            dims = run.operand if of_operand else run.result
            summed = isinstance(here[axis], P) and not of_operand
            if summed or not any(there[axis] == S(d) != here[axis] for d in dims):
                continue
            others = [k for a, k in mesh.axes if a != axis and k > 1]
            before = [math.prod(some) for k in range(len(others) + 1) for some in itertools.combinations(others, k)]
            for dims, shape in ((run.operand, op.operands[0].shape), (run.result, op.results[0].shape)):
                for size in itertools.accumulate((shape[d] for d in dims), operator.mul):
                    parts = (math.gcd(size // k, n) for k in before if size % k == 0)
                    yield from ((axis, part) for part in parts if 1 < part < n)


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
