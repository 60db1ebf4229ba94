"""`shardc.show`: the placement of arrays, and the part that one device holds, as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from shardc import compat
from shardc.arrays.place import Place, place_of
from shardc.arrays.placed import PlacedArray, StackedArray, leaf_aval
from shardc.errors import ArgumentError, all_offenders, did_you_mean
from shardc.machine.mesh import AnyMesh
from shardc.passes.trace.trace import is_array, leaves_by_path, path_text
from shardc.pipeline.plan import PlanView
from shardc.plan.saved_plan import SavedLeaf, SavedPlan
from shardc.report.tables import (
    MOST,
    Section,
    bytes_text,
    fold_paths,
    fold_rows,
    mesh_text,
    number_text,
    numbers_text,
    placement_text,
    times_text,
)
from shardc.sbp.placement import local_extent
from shardc.sbp.signature import is_extended


def show(x: Any, device: int | Mapping[str, int] | None = None) -> str:
    """The placement of arrays, as text to print.

    Args:
      x: a jax.Array, PlacedArray or StackedArray, a ShapeDtypeStruct with a sharding, or a pytree of them. For one
        array the text says which part each device holds; for a pytree it has a line for each leaf.
      device: show the part of this device, with its values. It is the device's number, or its coordinates on the mesh,
        as in `{"data": 1, "model": 0}`.

    Returns:
      The text. Indices count the elements of the logical array: `[4:8, :]` is rows 4 to 7, all columns.

    Raises:
      ArgumentError: no such device holds a part of any of the arrays.

    Examples:
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> print(show(jax.device_put(np.zeros((4, 2), "int8"), NamedSharding(mesh, jax.P("data"))), device=0))
      i8[4,2] at {data: S(0)} on data=1: a device holds [4,2], 8 bytes
      device 0, at data=0, holds [:, :]
      [[0 0]
       [0 0]
       [0 0]
       [0 0]]
    """
    leaves = [(path_text(path), leaf, _on_mesh(leaf)) for path, leaf in leaves_by_path(x)]
    if device is not None:
        return _on_device(leaves, device)
    if len(leaves) == 1 and not leaves[0][0]:
        _, leaf, parts = leaves[0]
        return _whole(leaf, parts)
    return str(_tree(leaves))


def planned_sections(plan: PlanView, path: str | None = None) -> list[Section]:
    """The arguments and results of a plan: a table of where each lives.

    Args:
      plan: of one program or a pipeline.
      path: asks for the part that each device holds of the arrays of this path; `*` matches any text.

    Raises:
      ArgumentError: no array has this path.
    """
    borders = {"Arguments": plan.in_borders, "Results": [b for b in plan.out_borders if not b.reuses]}
    arrays = {what: [(b.path or "result", b.aval, [LocatedArray(b.place)]) for b in bs] for what, bs in borders.items()}
    if path is None:
        tables = {what: _tree(leaves) for what, leaves in arrays.items() if leaves}
        return [replace(table, title=f"{what}: {table.title}") for what, table in tables.items()]
    every = [array for leaves in arrays.values() for array in leaves]
    if not (found := [a for a in every if fnmatchcase(a[0], path)]):
        names = [a[0] for a in every]
        listed = ", ".join(names[:MOST]) + ", ..." * (len(names) > MOST)
        raise ArgumentError(f"{path} is no argument or result.{did_you_mean(path, names)} There are {listed}.")
    pieces = [(name, _pieces(part)) for name, _, parts in found for part in parts]
    return [replace(section, title=f"{name}: {section.title}") for name, section in pieces]


def saved_sections(saved: SavedPlan) -> list[Section]:
    """Where the arguments and results of a saved plan live."""
    return [_saved("Arguments", saved.arguments), _saved("Results", saved.results)]


def _saved(what: str, leaves: Mapping[str, SavedLeaf]) -> Section:
    rows = [((leaf.type, placement_text(leaf.placement)), path or "result", None) for path, leaf in leaves.items()]
    cells = [(times_text(fold_paths(paths), len(paths)), *map(str, key)) for key, paths, _ in fold_rows(rows)]
    return Section(f"{what}: {number_text(len(leaves), 'array')}", ("path", "type", "placement"), cells)


@dataclass(frozen=True)
class LocatedArray:
    """An array at its place on a mesh; or, of a stacked array, the rows on one stage, from row `first` on."""

    place: Place
    physical: Any = None
    first: int | None = None

    @property
    def mesh(self) -> AnyMesh:
        assert self.place.mesh is not None
        return self.place.mesh

    def extents(self, at: Mapping[str, int]) -> list[tuple[int, int]]:
        """Offset and number of a device's elements in each dimension."""
        place = self.place
        return [local_extent(n, place.at.axes_of(d), place.sizes, at) for d, n in enumerate(place.shape)]

    def holds(self, at: Mapping[str, int]) -> str:
        """`[4:8, :]`."""
        extents = self.extents(at)
        if any(valid == 0 for _, valid in extents):
            return "nothing" if 0 not in self.place.shape else "an empty array"
        pairs = zip(extents, self.place.shape, strict=True)
        ends = [":" if valid == n else f"{start}:{start + valid}" for (start, valid), n in pairs]
        if self.first is not None:
            start, valid = extents[0]
            ends[0] = f"{self.first + start}:{self.first + start + valid}"
        text = f"[{', '.join(ends)}]" if ends else "the whole value"
        return f"a term of {text}" if self.place.at.partial_axes else text

    def padding(self, at: Mapping[str, int]) -> str:
        pieces = zip(self.place.block, self.extents(at), strict=True)
        missing = [(d, n - valid) for d, (n, (_, valid)) in enumerate(pieces)]
        return ", ".join(f"{n} in dimension {d}" for d, n in missing if n)

    def coordinates(self) -> Iterator[dict[str, int]]:
        """The coordinates of each piece: 0 on the axes along which all devices hold the same piece."""
        named = [a for a in self.mesh.axis_names if a in self.place.at]
        for index in np.ndindex(*(self.place.sizes[a] for a in named)):
            yield dict.fromkeys(self.place.sizes, 0) | dict(zip(named, map(int, index), strict=True))

    def devices(self, at: Mapping[str, int]) -> str:
        """The numbers of the devices that hold the piece at these coordinates."""
        assert isinstance(self.mesh, Mesh)
        index = tuple(at[a] if a in self.place.at else slice(None) for a in self.mesh.axis_names)
        return numbers_text(d.id for d in np.asarray(self.mesh.devices[index]).flat)


def _on_mesh(x: Any) -> list[LocatedArray] | str:
    """The array on its mesh, a stacked one in several parts; or the reason why it is on no mesh."""
    if isinstance(x, StackedArray):
        firsts = np.cumsum([0, *(p.shape[0] for p in x.pieces)])
        pairs = zip(x.pieces, firsts[:-1], strict=True)
        return [LocatedArray(place_of(p), p.physical, int(first)) for p, first in pairs]
    if isinstance(x, PlacedArray):
        return [LocatedArray(place_of(x), x.physical)]
    if isinstance(x, compat.Tracer):
        return "is being traced and is on no device yet; plan.explain() shows the placements of a function's values"
    sharding = getattr(x, "sharding", None)
    if isinstance(sharding, NamedSharding) and not sharding.mesh.empty:
        return [LocatedArray(place_of(x), x)]
    if isinstance(sharding, SingleDeviceSharding):
        return f"is not on a mesh: whole on device {next(iter(sharding.device_set)).id}"
    if sharding is not None:
        return f"is not on a mesh with named axes: {sharding}"
    if isinstance(x, np.ndarray | np.generic):
        return "is not on a mesh: a NumPy array, on the host"
    return "is not on a mesh" if is_array(x) else "is not an array"


def _type_text(x: Any) -> str:
    """`f32[13,6]`."""
    if not is_array(x):
        return f"{x!r}, a {type(x).__name__},"
    aval = leaf_aval(x)
    return compat.short_text(tuple(aval.shape), aval.dtype)


def _head(part: LocatedArray) -> str:
    """`f32[13,6] at {data: S(0)} on data=4: a device holds [4,6], 96 bytes`."""
    place = part.place
    return (
        f"{compat.short_text(place.shape, place.dtype)} at {placement_text(place.at)} on {mesh_text(part.mesh)}: "
        f"a device holds [{','.join(map(str, place.block))}], {bytes_text(place.bytes)}"
    )


def _whole(x: Any, parts: list[LocatedArray] | str) -> str:
    """The text of one array: the part that each device holds."""
    if isinstance(parts, str):
        return f"{_type_text(x)} {parts}"
    texts = [str(_pieces(part)) for part in parts]
    if len(parts) > 1:
        texts = [f"{_type_text(x)} in {number_text(len(parts), 'part')}, on the stages of a pipeline", *texts]
    return "\n\n".join(texts)


def _pieces(part: LocatedArray) -> Section:
    placed = isinstance(part.mesh, Mesh)
    padded = any(part.padding(at) for at in part.coordinates())
    columns = (*part.mesh.axis_names, *["devices"] * placed, "holds", *["padding"] * padded)
    rows = [
        (
            *(str(at[a]) if a in part.place.at else "*" for a in part.mesh.axis_names),
            *([part.devices(at)] if placed else []),
            part.holds(at),
            *([part.padding(at)] if padded else []),
        )
        for at in part.coordinates()
    ]
    left_out = len(rows) - 2 * MOST
    if left_out > 0:
        more = ["…"] * len(rows[0])
        more[len(part.mesh.axis_names) + placed] = f"… {left_out + 1} more"
        rows = [*rows[:MOST], tuple(more), *rows[1 - MOST :]]
    title = _head(part)
    if part.place.at.partial_axes:
        over = ", ".join(part.place.at.partial_axes)
        title += f"\nIt is partial: the value is the {part.place.at.partial_op} of what the devices along {over} hold."
    return Section(title, columns, rows)


def _tree(leaves: Sequence[tuple[str, Any, list[LocatedArray] | str]]) -> Section:
    """A table of the arrays of a pytree, alike ones folded; with a column of devices if they differ."""
    placed = [part for _, _, parts in leaves if not isinstance(parts, str) for part in parts]
    devices: dict[AnyMesh, str] = {}
    held = Counter[Any]()
    for part in placed:
        if isinstance(part.mesh, Mesh):
            devices[part.mesh] = numbers_text(d.id for d in part.mesh.devices.flat)
            held.update(dict.fromkeys(part.mesh.devices.flat, part.place.bytes))
    several = len(set(devices.values())) > 1
    rows: list[tuple[tuple[str, ...], str, None]] = []
    for path, x, parts in leaves:
        if isinstance(parts, str):
            rows.append(((_type_text(x), parts.removeprefix("is "), "", *[""] * several, "", ""), path, None))
            continue
        for part in parts:
            block = ",".join(map(str, part.place.block))
            padded = ", padded" if any(part.padding(at) for at in part.coordinates()) else ""
            kind = compat.short_text(part.place.shape, part.place.dtype)
            where = path if part.first is None else f"{path}[{part.first}:{part.first + part.place.shape[0]}]"
            on = [devices.get(part.mesh, "")] if several else []
            key = (kind, placement_text(part.place.at), mesh_text(part.mesh), *on, f"[{block}]{padded}")
            rows.append(((*key, bytes_text(part.place.bytes)), where, None))
    columns = ("path", "type", "placement", "mesh", *["devices"] * several, "a device holds", ">bytes per device")
    cells = [(times_text(fold_paths(paths), len(paths)), *map(str, key)) for key, paths, _ in fold_rows(rows)]
    total = bytes_text(max(held.values()) if several else sum(part.place.bytes for part in placed))
    of = "on the fullest device" if several else "per device"
    return Section(f"{number_text(len(leaves), 'array')}, {total} {of}", columns, cells)


def _on_device(leaves: Sequence[tuple[str, Any, list[LocatedArray] | str]], device: Any) -> str:
    """One device's piece of each array, with its values."""
    texts: list[str] = []
    wrong: list[str] = []
    for path, x, parts in leaves:
        name = f"{path}: " if path else ""
        if isinstance(parts, str):
            texts.append(f"{name}{_type_text(x)} {parts}")
            continue
        found = [(part, at) for part in parts if (at := _coordinates(part.mesh, device, wrong)) is not None]
        if not found:
            texts.append(f"{name}{_type_text(x)}: this device holds no part of it")
        texts += [f"{name}{_head(part)}\n{_piece(part, at)}" for part, at in found]
    if wrong:
        raise ArgumentError(all_offenders("shardc.show: no such device", list(dict.fromkeys(wrong))))
    return "\n\n".join(texts)


def _piece(part: LocatedArray, at: Mapping[str, int]) -> str:
    """`device 3, at data=1, model=1, holds [4:8, :]`, and its values."""
    where = ", ".join(f"{a}={i}" for a, i in at.items())
    padding = f", and {part.padding(at)} of padding" if part.padding(at) else ""
    if not isinstance(part.mesh, Mesh):
        return f"the device at {where} holds {part.holds(at)}{padding}"
    device: Any = part.mesh.devices[tuple(at[a] for a in part.mesh.axis_names)]
    line = f"device {device.id}, at {where}, holds {part.holds(at)}{padding}"
    shards = getattr(part.physical, "addressable_shards", ())
    data = next((s.data for s in shards if s.device == device), None)
    if data is None:
        return f"{line}\nIts values are not on this machine." if shards else line
    if is_extended(data.dtype):
        return f"{line}\n{jax.random.key_data(data)}"
    value = np.asarray(data)
    if value.ndim > len(part.place.shape):
        value = value[0]  # the leading dimension of partial values
    return f"{line}\n{value[tuple(slice(valid) for _, valid in part.extents(at))]}"


def _coordinates(mesh: AnyMesh, device: Any, wrong: list[str]) -> dict[str, int] | None:
    """The coordinates of a device on a mesh; None if it is not on it.

    Adds a line to `wrong` if no mesh of this shape and platform has such a device.
    """
    sizes = dict(mesh.shape)
    if isinstance(device, Mapping):
        given: dict[str, Any] = {str(a): i for a, i in device.items()}
        bad = [f"{a}={i}" for a, i in given.items() if a not in sizes or not 0 <= i < sizes[a]]
        bad += [f"nothing for {a}" for a, n in sizes.items() if a not in given and n > 1]
        if bad:
            near = "".join(did_you_mean(a, sizes) for a in given if a not in sizes)
            wrong.append(f"device={given} has {', '.join(bad)}, but the mesh is {mesh_text(mesh)}.{near}")
            return None
        return {a: int(given.get(a, 0)) for a in sizes}
    if not isinstance(mesh, Mesh):
        wrong.append(
            f"device={device!r}: the mesh {mesh_text(mesh)} is for planning and has no devices; give coordinates."
        )
        return None
    if device not in {d.id for d in jax.devices(mesh.devices.flat[0].platform)}:
        ids = sorted(d.id for d in mesh.devices.flat)
        wrong.append(f"device={device!r}: the mesh {mesh_text(mesh)} has devices {ids[0]} to {ids[-1]}.")
        return None
    index = next((i for i, d in np.ndenumerate(mesh.devices) if d.id == device), None)
    return None if index is None else dict(zip(mesh.axis_names, map(int, index), strict=True))
