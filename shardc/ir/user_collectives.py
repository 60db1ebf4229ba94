"""The collectives that a user writes in a shard_map: those of JAX, and what may move something that no table knows.

psum, all_gather, ...                       their bytes
ragged_all_to_all                           at most the operand: how much moves depends on data
another operation with an axis name,
a kernel that writes to another device,
a call of foreign code                      unknown: a record without a number of bytes
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from shardc import compat
from shardc.compat import Eqn
from shardc.ir.collective import UNKNOWN, Collective, Moves
from shardc.ir.nested import NESTED
from shardc.machine.mesh import MeshView
from shardc.sbp.cost import CollectiveKind, send_price

USERS: Final = "in shard_map"
"""Stands in a report in place of the placement before a boxing, for a user's own collective."""


def _bytes(aval: Any) -> int:
    return math.prod(aval.shape) * int(aval.dtype.itemsize)


@dataclass(frozen=True)
class UserSend:
    """The kind and the bytes of a collective of JAX.

    Attributes:
      kind: which collective it is.
      piece: bytes of a piece from operand, result and number of devices, as `send_price` takes them.
      at_most: how much moves depends on data; `piece` is the most.
    """

    kind: CollectiveKind
    piece: Callable[[Any, Any, int], int]
    at_most: bool = False


_REDUCE: Final = UserSend("all_reduce", lambda x, y, n: _bytes(x))
_GATHER: Final = UserSend("all_gather", lambda x, y, n: _bytes(x))
_SCATTER: Final = UserSend("reduce_scatter", lambda x, y, n: _bytes(y))
_PERMUTE: Final = UserSend("permute", lambda x, y, n: _bytes(x))

SENT: Final[Mapping[str, UserSend]] = {
    "psum": _REDUCE,
    "psum_invariant": _REDUCE,
    "pmax": _REDUCE,
    "pmin": _REDUCE,
    "unreduced_psum": _REDUCE,
    "unreduced_pmax": _REDUCE,
    "unreduced_pmin": _REDUCE,
    "all_gather": _GATHER,
    "all_gather_reduced": _GATHER,
    "reduce_scatter": _SCATTER,
    "unreduced_reduce_scatter": _SCATTER,
    "all_to_all": UserSend("all_to_all", lambda x, y, n: _bytes(x) // n),
    "ragged_all_to_all": UserSend("all_to_all", lambda x, y, n: -(-_bytes(x) // (n - 1)), at_most=True),
    "ppermute": _PERMUTE,
    "pbroadcast": _PERMUTE,
    "pbroadcast_dynamic": _PERMUTE,
    "psend": _PERMUTE,
}
"""JAX's collectives by name; `NAME_start` sends what `NAME` does, and its `_done` nothing."""
STILL: Final = frozenset(
    (
        "axis_index", "precv", "preduced", "pvary", "reduced_vary_cast", "reduced_vary_cast_p", "vary_unreduced_cast",
        "vary_unreduced_cast_p",
    )
)  # fmt: skip
"""Operations with an axis name that send nothing: they ask for a number, change a type, or receive what is sent."""
FOREIGN: Final = frozenset(("ffi_call",))
"""Calls of code that JAX does not see; it may have channels of its own to other devices."""


def user_moves(eqn: Eqn, trips: int, mesh: MeshView) -> Moves:
    """The collectives of an equation in a unit's body that runs `trips` times, and the seconds of one execution. Those
    of its own bodies, if they are planned where they stand, are not counted."""
    sent = SENT.get(eqn.primitive.name.removesuffix("_start"))
    if sent is None:
        return Moves(_unknown(eqn, trips, mesh), {})
    axes = _named(eqn, mesh)
    n = math.prod(mesh.sizes[a] for a in axes)
    found: list[Collective] = []
    seconds = 0.0
    pairs = zip(eqn.invars, eqn.outvars, strict=False)  # the operand comes first; offsets and the like follow
    for x, y in pairs if n > 1 else ():
        result = getattr(y.aval, "inner_aval", y.aval)  # of a start it is a future
        price = send_price(sent.kind, sent.piece(x.aval, result, n), mesh, axes)
        if price.bytes:
            size = min(price.bytes, _bytes(x.aval)) if sent.at_most else price.bytes
            value, line = compat.short_text(x.aval.shape, x.aval.dtype), compat.source_line(eqn)
            found.append(Collective(sent.kind, axes, size * trips, trips, line, value, USERS, at_most=sent.at_most))
            seconds += price.seconds
    return Moves(found, {sent.kind: seconds})


def is_half(eqn: Eqn) -> bool:
    """Whether an equation begins something, or waits for what another has begun: it gives or takes a future or a token,
    no array."""
    return any(hasattr(a.aval, "inner_aval") or not hasattr(a.aval, "shape") for a in (*eqn.invars, *eqn.outvars))


def _unknown(eqn: Eqn, trips: int, mesh: MeshView) -> list[Collective]:
    """The record of an operation in a unit's body that may move what no table knows; none if it moves nothing."""
    axes = tuple(mesh.sizes) if eqn.primitive.name in FOREIGN else kernel_axes(eqn, mesh)
    if eqn.primitive.name not in STILL:
        axes = (*axes, *_named(eqn, mesh))
    axes = tuple(a for a in mesh.sizes if a in axes and mesh.sizes[a] > 1)
    name, line = eqn.primitive.name, compat.source_line(eqn)
    return [Collective(UNKNOWN, axes, math.nan, trips, line, name, USERS)] if axes else []


def kernel_moves(eqn: Eqn, trips: int, mesh: MeshView) -> list[Collective]:
    """The record of an operation outside of units whose kernel may move something."""
    axes, line = kernel_axes(eqn, mesh), compat.source_line(eqn)
    return [Collective(UNKNOWN, axes, math.nan, trips, line, eqn.primitive.name, "in a kernel")] if axes else []


def kernel_axes(eqn: Eqn, mesh: MeshView) -> tuple[str, ...]:
    """The axes over which the bodies of an operation, as of a Pallas kernel, may move something."""
    if eqn.primitive.name in NESTED:
        return ()
    found: set[str] = set()
    for inner in _inside(eqn):
        found |= set(mesh.sizes if _reaches_others(inner) else ())
        if inner.primitive.name not in STILL:
            found |= set(_named(inner, mesh))
    return tuple(a for a in mesh.sizes if a in found and mesh.sizes[a] > 1)


def _inside(eqn: Eqn) -> Iterator[Eqn]:
    """The equations of all jaxprs among an equation's parameters, nested ones too."""
    for body in compat.jaxprs_in(eqn.params.values()):
        for inner in getattr(body, "jaxpr", body).eqns:
            yield inner
            yield from _inside(inner)


_DEVICE_AT: Final = {
    "dma_start": ("tree", 4),
    "semaphore_signal": ("args_tree", 3),
    "semaphore_signal_parallel": ("args_tree", 3),
}
"""Operations of Pallas that may be given another device: the parameter that is the tree of operands, and the number of
the device in it."""
_REMOTE_REFS: Final = ("PeerMemRef", "MulticastRef")
"""Refs of Pallas that lie in the memory of other devices, by the names in trees of operands."""


def _reaches_others(eqn: Eqn) -> bool:
    """Whether an operation in a kernel writes to, reads from or signals another device."""
    tree, number = _DEVICE_AT.get(eqn.primitive.name, ("", 0))
    if tree and any(x is not None for x in _as_list(eqn.params[tree].unflatten(eqn.invars)[number])):
        return True
    return any(
        ref in str(value) for value in eqn.params.values() if hasattr(value, "unflatten") for ref in _REMOTE_REFS
    )


def _as_list(x: Any) -> list[Any]:
    return list(x) if isinstance(x, tuple | list) else [x]


def _named(eqn: Eqn, mesh: MeshView) -> tuple[str, ...]:
    """The axes of the mesh that an operation's parameters name, with more than one device."""
    given = [v for k, v in eqn.params.items() if "axis" in k or "axes" in k]
    names = [a for v in given for a in (v if isinstance(v, tuple | list | frozenset | set) else (v,))]
    return tuple(a for a in names if isinstance(a, str) and mesh.sizes.get(a, 1) > 1)
