"""All meshes of a number of devices, each once up to the names of axes and the orientation in the machine."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import permutations
from typing import Final, TypeAlias

from shardc.errors import MeshError
from shardc.ir.constrain import pin_of
from shardc.ir.program import Program
from shardc.ir.user_shard_map import is_unit
from shardc.ir.walk import all_eqns
from shardc.machine.mesh import MeshView
from shardc.machine.topology import AxisSpan, Topology, default_shape, parse_topology
from shardc.sbp.placement import Pin, S

Sizes: TypeAlias = tuple[tuple[str, int], ...]
"""The axes of a mesh with their sizes, outermost first, including those of size 1."""
Roles: TypeAlias = Mapping[str, Hashable]
"""The pins that name each axis. Axes of equal roles are interchangeable."""

NAMES: Final = ("data", "fsdp", "model")
"""The default names of axes."""


# --- machines --------------------------------------------------------------------------------------------------------


def slice_of(topology: str, devices: int | None) -> tuple[str, int]:
    """A topology with the shape of a slice of `devices` devices, and the number of devices.

    If the topology has no shape, it gets one. On a torus this is the most compact shape, in as few slices as hold the
    devices. Otherwise it has as many devices in a fast domain as possible.

    Raises:
      MeshError: there is no such topology, it has fewer devices, or the number of devices is not given.
    """
    machine = parse_topology(topology)
    if devices is None and not machine.shape:
        raise MeshError(
            f'topology={topology!r} has no number of devices: give one, tune(..., devices=64, topology="v5p"), or a '
            'shape, topology="v5p:4x4x4".'
        )
    devices = math.prod(machine.shape) if devices is None else devices
    if machine.shape and devices > math.prod(machine.shape):
        raise MeshError(f"devices={devices}: topology {topology} has {math.prod(machine.shape)}.")
    if machine.shape or topology.startswith("{") or topology.endswith(".json") or len(machine.fabrics) == 1:
        return topology, devices
    return f"{topology}:{'x'.join(map(str, _shape(machine, devices)))}", devices


def _shape(machine: Topology, devices: int) -> tuple[int, ...]:
    if not machine.pod:
        return default_shape(machine, devices)
    for slices in (n for n in range(1, devices + 1) if devices % n == 0):
        inside = [tuple(sorted(s, reverse=True)) for s in factorizations(devices // slices, len(machine.pod))]
        largest = sorted(machine.pod, reverse=True)
        fit = [s for s in inside if all(n <= most for n, most in zip(s, largest, strict=True))]
        if fit:
            best = min(fit, key=lambda s: (sum(s), s))
            return best if slices == 1 else (*best, slices)
    raise AssertionError(devices)  # one device fits


# --- meshes ----------------------------------------------------------------------------------------------------------


def factorizations(n: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `n` as an ordered product of `parts` numbers.

    Examples:
      >>> list(factorizations(4, 2))
      [(4, 1), (2, 2), (1, 4)]
    """
    if parts == 1:
        yield (n,)
        return
    for first in (d for d in range(n, 0, -1) if n % d == 0):
        yield from ((first, *rest) for rest in factorizations(n // first, parts - 1))


def all_sizes(devices: int, names: Sequence[str]) -> list[Sizes]:
    """All meshes with these axes. Those with few axes longer than 1 come first; of these, those that use the outermost
    and the innermost axis."""
    used = [names[0], names[-1], *names[1:-1]]

    def key(sizes: Sizes) -> tuple[int, list[int]]:
        mine = [used.index(a) for a, n in sizes if n > 1]
        return len(mine), sorted(mine)

    found = [tuple(zip(names, sizes, strict=True)) for sizes in factorizations(devices, len(names))]
    return sorted(found, key=key)


def merged_sizes(sizes: Sizes, names: Sequence[str]) -> Iterator[Sizes]:
    """The meshes in which two axes are merged. A mesh can do all that its merged meshes can."""
    long = [a for a, n in sizes if n > 1 and a in names]
    of = dict(sizes)
    for a, b in permutations(long, 2):
        yield tuple({**of, a: of[a] * of[b], b: 1}.items())


def is_grid(mesh: MeshView) -> bool:
    """Whether each axis of a mesh lies along whole parts of the machine's dimensions."""
    counts: dict[int, int] = {}
    for axis, n in mesh.axes:
        for span in mesh.spans[axis] if n > 1 else ():
            counts[span.dim] = counts.get(span.dim, 1) * span.count
    below = 1
    for dim, most in enumerate(mesh.topology.shape):  # devices are numbered along the first dimension first
        if counts.get(dim, 1) != min(most, -(-mesh.size // below)):
            return False
        below *= most
    return True


def shape_key(mesh: MeshView, roles: Roles) -> Hashable:
    """A key that is equal for equivalent meshes.

    These differ only in the names of axes of equal roles and in the order of the machine's dimensions. Their plans and
    costs are the same.
    """
    dims = sorted({s.dim for spans in mesh.spans.values() for s in spans})

    def turned(numbers: Mapping[int, int]) -> list[tuple[str, list[str]]]:
        return sorted(
            (repr(roles[a]), sorted(_span_text(s, numbers[s.dim]) for s in mesh.spans[a]))
            for a, n in mesh.axes
            if n > 1
        )

    return repr(min(turned(dict(zip(dims, order, strict=True))) for order in permutations(range(len(dims)))))


def _span_text(s: AxisSpan, dim: int) -> str:
    return f"{dim} {s.count} {s.stride} {s.closed} {s.fabric}"


def roles_of(names: Iterable[str], program: Program, pins: Iterable[Pin | None]) -> Roles:
    """The roles of axes: how the pins of a program's arguments, results and inner values name each axis."""
    names = list(names)
    eqns = list(all_eqns(program.jaxpr))
    if any(map(is_unit, eqns)):  # its body names axes
        return {a: a for a in names}
    found: dict[str, list[Hashable]] = {a: [] for a in names}
    for pin in (*pins, *map(pin_of, eqns)):
        if pin is None:
            continue
        for axis in names:
            sbp = pin.placement[axis]
            along = pin.placement.splits.get(sbp.dim, ()) if isinstance(sbp, S) else ()
            free = pin.fixed is not None and axis not in pin.fixed
            found[axis].append((str(sbp), along.index(axis) if along else 0, free))
    return {a: tuple(words) for a, words in found.items()}
