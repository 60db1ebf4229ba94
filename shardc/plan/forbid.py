"""`forbid=`: kinds of collectives that may not run over an axis of the mesh.

The search avoids them like what costs more than any step, and a plan that has them all the same is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from shardc.errors import ArgumentError, all_offenders, did_you_mean
from shardc.ir.collective import UNKNOWN
from shardc.machine.mesh import MeshView
from shardc.plan.plan import PlacedProgram
from shardc.sbp.cost import COLLECTIVES, FEMTO, avoided_cost

Forbidden: TypeAlias = frozenset[tuple[str, str]]
"""Kinds of collectives, each with an axis that none of them may run over."""
Forbid: TypeAlias = str | Collection[str] | Mapping[str, str | Collection[str]] | None
"""`"dcn"` and `{"dcn"}`: nothing moves over this axis; `{"model": "all_gather"}`: nothing of this kind does. None and
`()` forbid nothing."""
_FORMS: Final = 'write axes, {"dcn"}, or the kinds for each axis, {"model": ("all_gather", "permute")}.'


def read_forbid(forbid: Forbid, mesh: MeshView, where: str) -> Forbidden:
    """The kinds of collectives that an argument `forbid=` forbids on a mesh, each with its axis.

    Raises:
      ArgumentError: it names an axis that the mesh does not have, or a kind that is none.
    """
    named = _several(forbid) if forbid is not None else ()
    if named is None:
        raise ArgumentError(f"{where}: forbid={forbid!r}: {_FORMS}")
    pairs = {axis: forbid[axis] if isinstance(forbid, Mapping) else COLLECTIVES for axis in named}
    wrong = [f"{kinds!r} are no kinds: {_FORMS}" for kinds in pairs.values() if not _several(kinds)]
    found = [(kind, axis) for axis, kinds in pairs.items() for kind in _several(kinds) or ()]
    if wrong := list(dict.fromkeys([*wrong, *_wrong(found, mesh)])):
        raise ArgumentError(all_offenders(f"{where}, mesh {mesh}: forbid={forbid!r}", wrong))
    return frozenset(found)


def _several(names: Any) -> tuple[Any, ...] | None:
    """The names of one or of a collection; None: it is neither."""
    return (names,) if isinstance(names, str) else tuple(names) if isinstance(names, Collection) else None


def _wrong(pairs: Sequence[tuple[Any, Any]], mesh: MeshView) -> Iterator[str]:
    for kind, axis in pairs:
        if axis == mesh.taken and axis:
            yield f"{axis} is the axis of the pipeline: what stages hand on to each other moves along it."
        elif axis not in mesh.sizes:
            yield f"the mesh has no axis {axis!r}, only {', '.join(mesh.sizes)}.{did_you_mean(str(axis), mesh.sizes)}"
        if kind not in COLLECTIVES:
            near = did_you_mean(str(kind), COLLECTIVES)
            yield f"{kind!r} is no kind of collective; write one of {', '.join(COLLECTIVES)}.{near}"


def forbid_text(forbidden: Forbidden) -> str:
    """`{"dcn"}`, `{"model": ("all_gather", "permute")}`: as a user may write it."""
    kinds: dict[str, list[str]] = {}
    for kind, axis in sorted(forbidden, key=lambda pair: (pair[1], COLLECTIVES.index(pair[0]))):  # pyright: ignore[reportArgumentType]
        kinds.setdefault(axis, []).append(kind)
    if all(len(k) == len(COLLECTIVES) for k in kinds.values()):
        return "{" + ", ".join(f'"{a}"' for a in kinds) + "}"
    said = {
        a: f'"{k[0]}"' if len(k) == 1 else "(" + ", ".join(f'"{kind}"' for kind in k) + ")" for a, k in kinds.items()
    }
    return "{" + ", ".join(f'"{a}": {k}' for a, k in said.items()) + "}"


def is_forbidden(forbidden: Forbidden, kind: str, axes: Collection[str]) -> bool:
    """Whether a collective over these axes of the user's mesh may not run. One that is none of shardc's kinds may run
    over no axis that anything is forbidden on."""
    known = kind in COLLECTIVES
    return any(axis in axes and (kind == other or not known) for other, axis in forbidden)


def avoided_seconds(parts: Iterable[tuple[int, PlacedProgram]]) -> float:
    """Seconds that the search adds to those of a plan for what its meshes avoid."""
    priced = [(part.mesh, c) for _, part in parts if part.mesh.avoids for c in part.collectives if c.bytes]
    return sum(c.count * avoided_cost(c.kind, c.axes, mesh) for mesh, c in priced if c.kind != UNKNOWN) / FEMTO
