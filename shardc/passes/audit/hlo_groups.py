"""The device groups of a collective: reads them from HLO text, and finds the mesh axes that they follow."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import numpy as np

Groups: TypeAlias = tuple[tuple[int, ...], ...]
_Ids: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


def read_groups(attributes: str, devices: int) -> Groups:
    """Reads `replica_groups=` in any of its three syntaxes; absent or empty, it means all devices.

    {{0,1},{2,3}}                                  as it stands
    [2,4]<=[2,2,2]T(1,0,2)                         arange(8).reshape(2,2,2).transpose(1,0,2).reshape(2,4)
    mesh['a'=4,'b'=2], device_ids=(IDS) {'a':(2)2} groups along a, or along the part of a of size 2 after a part of
                                                   size 2; IDS is a list, or [dims]T(perm) as above, or not there
    """
    for pattern, read in _GROUP_SYNTAXES:
        if m := pattern.search(attributes):
            return read(m)
    return (tuple(range(devices)),)


def _ints(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


def read_pairs(attributes: str) -> Groups:
    """Reads the (source, target) pairs of a permute."""
    m = re.search(r"source_target_pairs=\{(?:\{\d+,\d+\},?)*\}", attributes)
    return _explicit(m) if m else ()


def _explicit(m: re.Match[str]) -> Groups:
    return tuple(_ints(group) for group in re.findall(r"\{([\d,]+)\}", m[0]))


def _iota(dims: str, perm: str | None) -> _Ids:
    sizes = _ints(dims)
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    return ids.transpose(_ints(perm)) if perm else ids


def _from_iota(m: re.Match[str]) -> Groups:
    return _rows(_iota(m[2], m[3]).reshape(_ints(m[1])))


def _from_mesh(m: re.Match[str]) -> Groups:
    sizes = {name: int(size) for name, size in re.findall(r"('[^']*'|[^,=]+)=(\d+)", m[1])}
    ids = np.arange(math.prod(sizes.values()))
    if m[2] is not None:
        tiled = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", m[2])
        ids = _iota(tiled[1], tiled[2]) if tiled else np.array(_ints(m[2]))
    # Every axis is cut into (before, chosen, after): a whole axis is (1, size, 1), one that is not named (size, 1, 1).
    cut = {name: (size, 1, 1) for name, size in sizes.items()}
    for name, before, chosen in re.findall(r"('[^']*'|[^,:]+)(?::\((\d+)\)(\d+))?", m[3]):
        before, chosen = (int(before), int(chosen)) if before else (1, sizes[name])
        cut[name] = (before, chosen, sizes[name] // (before * chosen))
    ids = ids.reshape([part for parts in cut.values() for part in parts])
    inner = range(1, ids.ndim, 3)
    outer = [d for d in range(ids.ndim) if d not in inner]
    return _rows(ids.transpose([*outer, *inner]).reshape(-1, math.prod(ids.shape[d] for d in inner)))


def _rows(array: _Ids) -> Groups:
    return tuple(tuple(int(x) for x in row) for row in array)


_GROUP_SYNTAXES: Final[tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], Groups]], ...]] = (
    (re.compile(r"replica_groups=\{(?:\{[\d,]+\},?)+\}"), _explicit),
    (re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"), _from_iota),
    (
        re.compile(r"replica_groups=mesh\[((?:'[^']*'|[^'\]])*)\](?:, device_ids=\((.*?)\))? \{((?:'[^']*'|[^'}])*)\}"),
        _from_mesh,
    ),
)


def axes_of_groups(groups: Groups, axes: Mapping[str, int]) -> tuple[str, ...] | None:
    """Returns the axes of size > 1, in mesh order, along which a mesh falls into just these groups; else None."""
    wanted = {frozenset(group) for group in groups}
    ids = np.arange(math.prod(axes.values())).reshape(tuple(axes.values()))
    first = np.argwhere(np.isin(ids, groups[0]))
    # The axes along which the members of one group differ are the only candidates.
    spread = [d for d in range(ids.ndim) if len(set(first[:, d].tolist())) > 1]
    rest = [d for d in range(ids.ndim) if d not in spread]
    along = ids.transpose([*rest, *spread]).reshape(-1, math.prod(ids.shape[d] for d in spread))
    names = tuple(axes)
    return tuple(names[d] for d in spread) if {frozenset(row) for row in _rows(along)} == wanted else None


def crossed_axes(groups: Groups, axes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes along which members of a group differ, or the two ends of a permute."""
    at = [np.stack(np.unravel_index(group, tuple(axes.values()))) for group in groups]
    return tuple(a for d, a in enumerate(axes) if any(len(set(ids[d].tolist())) > 1 for ids in at))
