"""Arrays that are put on a mesh in parts: each process gives its own rows, or a function reads pieces."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from shardc import compat
from shardc.arrays.place import Place, put_leaf
from shardc.arrays.placed import leaf_aval, narrow
from shardc.arrays.process_rows import ProcessRows, process_rows, whole_shape
from shardc.arrays.remote_array import is_small, put_remote
from shardc.errors import ArgumentError, DisagreementError, PlacementError, all_offenders
from shardc.execute.process_group import ProcessGroup, given_whole, group_of_mesh, value_text
from shardc.machine.devices import is_remote
from shardc.passes.trace.trace import is_array
from shardc.sbp.placement import Placement
from shardc.sbp.signature import is_extended
from shardc.sbp.way import Index


@dataclass(frozen=True)
class GivenRows:
    """A leaf of which this process gives its part.

    Attributes:
      path: of the leaf.
      value: the part, on the host or on devices of this process.
      placement: of the whole.
    """

    path: str
    value: Any
    placement: Placement

    @cached_property
    def is_key(self) -> bool:
        return hasattr(self.value, "dtype") and is_extended(self.value.dtype)

    @cached_property
    def words(self) -> np.ndarray[Any, Any]:
        """The part on the host; of keys their words."""
        if self.is_key:
            return np.asarray(jax.random.key_data(self.value))
        return narrow(np.asarray(self.value))

    def said(self) -> str:
        """A description of the part for the other processes."""
        if not given_whole(self.value):
            return json.dumps("is an array of several processes already; put it without here=True")
        kind = str(self.value.dtype) if self.is_key else str(self.words.dtype)
        return json.dumps([np.shape(self.value), kind, value_text(self.value)])

    def put(self, mesh: Mesh, part: ProcessRows, shape: tuple[int, ...]) -> jax.Array:
        """The array of which this is a part."""
        if not shape:
            return put_leaf(self.value, mesh, self.placement)
        dtype = self.value.dtype if self.is_key else self.words.dtype
        place = Place(compat.shaped_array(shape, dtype), mesh, part.placement)
        return place.made_of(part.cut(self.words, place))


def put_rows(parts: Sequence[GivenRows], mesh: Mesh, group: ProcessGroup) -> list[jax.Array]:
    """The arrays that the parts of all processes make up.

    Raises:
      ArgumentError: they do not make up arrays.
      DisagreementError: processes that hold the same part of an array have other values.
    """
    said = group.gather("shardc.put(here=True)", {p.path: p.said() for p in parts})
    wrong, unlike = list[str](), list[str]()
    shapes: list[tuple[int, ...]] = []
    own: list[ProcessRows] = []
    for part in parts:
        told = {
            k: json.loads(each.get(part.path, '"has no such leaf"'))
            for k, each in zip(group.members, said, strict=True)
        }
        lines = [f"process {k} {fault}" for k, fault in told.items() if isinstance(fault, str)]
        if not lines:
            pieces = {k: process_rows(mesh, part.placement, len(t[0]), k) for k, t in told.items()}
            shape, lines = whole_shape(pieces, {k: t[0] for k, t in told.items()})
            lines += _dtype_line(told)
            unlike += [f"{part.path}: {line}" for line in _unlike(pieces, told)]
            shapes.append(shape)
            own.append(pieces[jax.process_index()])
        wrong += [f"{part.path}: {line}" for line in lines]
    if wrong:
        raise ArgumentError(all_offenders("shardc.put(here=True): parts that do not make up an array", wrong))
    if unlike:
        raise DisagreementError(all_offenders("shardc.put(here=True): parts that have to be equal", unlike))
    return [p.put(mesh, at, shape) for p, at, shape in zip(parts, own, shapes, strict=True)]


def _dtype_line(told: Mapping[int, Sequence[Any]]) -> list[str]:
    if len({t[1] for t in told.values()}) == 1:
        return []
    return [f"the types differ: {', '.join(f'process {k} has {t[1]}' for k, t in told.items())}"]


def _unlike(pieces: Mapping[int, ProcessRows], told: Mapping[int, Sequence[Any]]) -> list[str]:
    """Lines about processes that hold the same part and have other values."""
    first: dict[Any, int] = {}
    found: list[str] = []
    for k, t in told.items():
        other = first.setdefault(pieces[k].pieces, k)
        if told[other][2] != t[2]:
            found.append(f"processes {other} and {k} hold the same part of it, and have other values")
    return found


@dataclass(frozen=True)
class ReadLeaf:
    """A leaf that is read piece by piece.

    Attributes:
      path: of the leaf.
      place: where it goes.
      read: gives the elements at a path and an index; of random keys their words.
    """

    path: str
    place: Place
    read: Callable[[str, tuple[slice, ...]], Any]

    def elements(self, box: Index) -> np.ndarray[Any, Any]:
        """The elements of a box.

        Raises:
          ArgumentError: those that `read` gives are of another shape or type.
        """
        found, (tail, dtype) = np.asarray(self.read(self.path, tuple(slice(*pair) for pair in box))), self.place.words
        shape = (*(stop - start for start, stop in box), *tail)
        if (found.shape, found.dtype) != (shape, dtype):
            at = ", ".join(f"{start}:{stop}" for start, stop in box)
            raise ArgumentError(
                f"shardc.put(read=): {self.path}[{at}] has to be {dtype}{list(shape)}, and read gave {found.dtype}"
                f"{list(found.shape)}."
            )
        return found

    def put(self, mesh: Mesh) -> Any:
        """The array on the mesh; on one of another JAX runtime a RemoteArray, with its value if that is small."""
        if not is_remote(mesh.devices.flat):
            return self.place.read(self.elements)
        small, shape = is_small(self.place.aval), self.place.shape
        whole = self.elements(tuple((0, n) for n in shape)) if small else jax.ShapeDtypeStruct(shape, self.place.dtype)
        return put_remote(whole, mesh, self.place.placement)


def read_leaves(
    read: Callable[..., Any],
    paths: Sequence[str],
    leaves: Sequence[Any],
    mesh: Mesh,
    placed: Sequence[Placement | None],
) -> list[Any]:
    """The leaves of `shardc.put(read=)`: those that are arrays are read, others stay.

    Raises:
      ArgumentError: `read` gives elements of another shape or type.
      PlacementError: an array has no placement.
    """
    found: dict[int, ReadLeaf] = {}
    lines: list[str] = []
    for i, (path, x, placement) in enumerate(zip(paths, leaves, placed, strict=True)):
        if is_array(x) and placement is None:
            lines.append(f"{path}: no placement; say {{}} for a copy on each device")
        elif is_array(x):
            aval = leaf_aval(x)
            dtype = jax.dtypes.canonicalize_dtype(aval.dtype, allow_extended_dtype=True)
            found[i] = ReadLeaf(path, Place(compat.shaped_array(aval.shape, dtype), mesh, placement), read)
    if lines:
        raise PlacementError(all_offenders("shardc.put(read=): leaves that go nowhere", lines))
    group = group_of_mesh(mesh)
    if group is not None:
        group.compare("shardc.put(read=)", {one.path: f"{one.place.aval} at {one.place}" for one in found.values()})
    return [found[i].put(mesh) if i in found else x for i, x in enumerate(leaves)]
