"""`shardc.put`, `shardc.fetch` and `shardc.constrain`: arrays put on a mesh and read, values pinned in a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from shardc import compat
from shardc.arrays.fetch import values
from shardc.arrays.gone import refuse_gone
from shardc.arrays.place import put_leaf
from shardc.arrays.placed import is_placed
from shardc.arrays.process_rows import process_rows
from shardc.arrays.remote_array import put_remote
from shardc.calls.given_rows import GivenRows, put_rows, read_leaves
from shardc.calls.leaves import leaf_of
from shardc.errors import ArgumentError, PlacementError, all_offenders, did_you_mean
from shardc.execute.process_group import group_of_mesh, settle_all, value_facts
from shardc.execute.remote_values import bring
from shardc.ir.constrain import constrain_p
from shardc.machine.devices import is_remote
from shardc.machine.mesh import AnyMesh, view
from shardc.passes.trace.constants import is_foreign_array
from shardc.passes.trace.pins import Leaf, Pins, code_text
from shardc.passes.trace.trace import is_array, leaves_by_path, path_text
from shardc.sbp.placement import AUTO, Auto, Pin, Placement, S, as_sbp

T = TypeVar("T")


@compat.api_boundary
def put(
    tree: Any, mesh: AnyMesh, placements: Any, *, here: bool = False, read: Callable[..., Any] | None = None
) -> Any:
    """Puts the arrays of a pytree on a mesh.

    On a mesh of several processes all of them make the same call. Each gives the whole values, which have to be equal
    (a difference is an error of the next call), and takes the pieces of its devices: nothing is sent. With `here=True`
    each gives its own rows. On a mesh of another JAX runtime (`--islands`) the arrays are put by the processes of that
    one; here they become `RemoteArray`s.

    Args:
      tree: pytree of arrays; leaves that are no arrays are left as they are. With `read`, only the shapes and types of
        the arrays count, as `jax.eval_shape` gives them.
      mesh: a mesh with devices.
      placements: as `in_placements` says them, or as `plan.in_placements` gives them: a leaf, `shardc.rules`, or a
        pytree prefix; what is AUTO or None is left as it is.
      here: whether the arrays are the parts that this process holds: along each dimension the pieces of its devices, in
        order, as `shardc.rows_here` says. The shape of the whole is found by asking the other processes. Parts that
        several processes hold have to be equal.
      read: a function of a leaf's path, as rules see it, and an index, a slice for each dimension; it gives these
        elements, as NumPy has them. It is asked for the pieces of this process's devices, for each once, and a piece is
        on its devices before the next one is read: the host has one piece at a time.

    Returns:
      The tree with jax.Arrays; where a placement is an uneven split or a partial sum, PlacedArrays.

    Raises:
      ArgumentError: `mesh` is no mesh, or has no devices; arrays were donated to a call, or are tensors of another
        library; parts do not make up an array; or `read` gives elements of another shape or type.
      DisagreementError: values, or parts that several processes hold, differ between processes.
      PlacementError: a placement does not fit the mesh or its array, or the two trees do not match; or a leaf to be
        read has none.

    Examples:
      >>> rows = np.arange(8.0).reshape(4, 2)
      >>> like = {"w": jax.ShapeDtypeStruct((4, 2), "float32")}
      >>> put(like, make_mesh(data=1), {}, read=lambda path, at: rows[at].astype("float32"))["w"].sum()
      Array(28., dtype=float32)
    """
    if not isinstance(mesh, Mesh | AbstractMesh):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(
            f"shardc.put: the second argument is a {type(mesh).__name__} and no mesh; write shardc.put(tree, mesh, "
            "placements)."
        )
    pairs, structure = leaves_by_path(tree), jax.tree.structure(tree)
    paths, leaves = [path_text(path) for path, _ in pairs], [x for _, x in pairs]
    _refuse_leaves(paths, leaves, read is None, here)
    placed = _placements(placements, structure, paths, list(map(leaf_of, paths, paths, leaves)), mesh)
    if isinstance(mesh, AbstractMesh):
        raise ArgumentError("shardc.put needs a mesh with devices; this one only plans (it names a topology).")
    if read is not None:
        return jax.tree.unflatten(structure, read_leaves(read, paths, leaves, mesh, placed))
    if is_remote(mesh.devices.flat):
        return jax.tree.unflatten(structure, [put_remote(x, mesh, p) for x, p in zip(leaves, placed, strict=True)])
    group = group_of_mesh(mesh)
    chosen = [i for i, p in enumerate(placed) if p is not None and is_array(leaves[i])]
    if group is not None and not here:
        group.compare("shardc.put", value_facts([paths[i] for i in chosen], [leaves[i] for i in chosen]))
    if group is None or not here:
        pairs = zip(leaves, placed, strict=True)
        return jax.tree.unflatten(structure, [x if p is None else put_leaf(x, mesh, p) for x, p in pairs])
    parts = [GivenRows(paths[i], leaves[i], p) for i in chosen if (p := placed[i]) is not None]
    made = put_rows(parts, mesh, group)
    whole = dict(zip(chosen, made, strict=True))
    leaves = [whole.get(i, x) for i, x in enumerate(leaves)]
    if placed != _placements(placements, structure, paths, list(map(leaf_of, paths, paths, leaves)), mesh):
        raise PlacementError(
            "shardc.put(here=True): a placement that depends on the shape is another one for the whole array than for "
            "this process's part. Give placements as dicts from axis to sbp."
        )
    return jax.tree.unflatten(structure, leaves)


def _refuse_leaves(paths: Sequence[str], leaves: Sequence[Any], needs_values: bool, here: bool) -> None:
    """Raise ArgumentError for leaves that cannot be put."""
    pairs = list(zip(paths, leaves, strict=True))
    refuse_gone("shardc.put: arrays that are gone", pairs)
    if foreign := [
        f"{path}: a {type(x).__name__} is an array of another library; give np.asarray of it"
        for path, x in pairs
        if is_foreign_array(x) and not is_array(x)
    ]:
        raise ArgumentError(all_offenders("shardc.put: arrays that JAX does not know", foreign))
    if here and not needs_values:
        raise ArgumentError("shardc.put: here=True and read= are two ways to give a process's part; leave one out.")
    described = [path for path, x in pairs if isinstance(x, jax.ShapeDtypeStruct)]
    if needs_values and described:
        raise ArgumentError(
            f"shardc.put: {described[0]} is a jax.ShapeDtypeStruct, which has no elements; give an array, or read=, a "
            "function of a path and an index that gives them."
        )


def _placements(
    placements: Any, structure: Any, paths: Sequence[str], leaves: Sequence[Leaf | None], mesh: AnyMesh
) -> list[Placement | None]:
    """The placement of each leaf; None where it stays as it is."""
    seen = view(mesh)
    pins = Pins("placements", leaves, seen)
    pins.spread(placements, jax.tree.unflatten(structure, range(len(paths))))
    if pins.offenders:
        raise PlacementError(all_offenders(f"shardc.put, mesh {seen}:", pins.offenders))
    return [None if pin is None else pin.placement.without(seen.idle) for pin in pins.pins]


@compat.api_boundary
def rows_here(shape: Sequence[int], mesh: Mesh, placement: Any) -> tuple[slice, ...]:
    """The part of an array that this process holds, as an index: what a loader has to read for `put(..., here=True)`.

    Args:
      shape: of the whole array.
      mesh: a mesh with devices.
      placement: a dict from axis to sbp, a Placement, a PartitionSpec or a NamedSharding.

    Returns:
      A slice for each dimension.

    Raises:
      ArgumentError: the part does not lie in one piece of the array, or `mesh` is no mesh with devices.
      PlacementError: the mesh has no such axis.

    Examples:
      >>> rows_here((8, 2), make_mesh(data=1), {"data": S(0)})
      (slice(0, 8, None), slice(0, 2, None))
    """
    if not isinstance(mesh, Mesh):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(f"shardc.rows_here: mesh={mesh!r} is no mesh with devices, as shardc.make_mesh makes it.")
    wanted = _loose_pin(placement).placement
    if unknown := [a for a in wanted if a not in mesh.shape]:
        axes, near = ", ".join(mesh.shape), did_you_mean(unknown[0], mesh.shape)
        raise PlacementError(f"shardc.rows_here: the mesh has no axis {unknown[0]!r}; its axes are {axes}.{near}")
    found = process_rows(mesh, wanted, len(shape), jax.process_index()).slices(shape)
    if found is None:
        raise ArgumentError(
            f"shardc.rows_here: at {wanted} process {jax.process_index()} holds several pieces of an array of shape "
            f"{tuple(shape)} that are no neighbours. Name the axes that cross the border between processes first, or "
            "put the whole value in every process, without here=True."
        )
    return found


@compat.api_boundary
def fetch(tree: Any) -> Any:
    """The values of a pytree's arrays on the host, wherever they live: on a mesh, or on the stages of a pipeline.

    Of an array with pieces in other processes this is a collective: all processes of its mesh have to call `fetch` with
    the same tree, and each gets the whole value. What is whole in this process is read without asking others. In a run
    of several JAX runtimes (`--islands`) all processes of the run call it, and what lives elsewhere comes over links.

    Args:
      tree: pytree of arrays; what is no array is left as it is.

    Returns:
      The tree with NumPy arrays; random keys, which NumPy has no type for, as jax.Arrays on one device.

    Raises:
      ArgumentError: arrays were donated to a call.
      DisagreementError: the call before this one was given values that differ between processes.

    Examples:
      >>> fetch({"name": "w", "w": jax.numpy.arange(3)})
      {'name': 'w', 'w': array([0, 1, 2], dtype=int32)}
    """
    settle_all()
    refuse_gone("shardc.fetch: arrays that are gone", ((path_text(path), x) for path, x in leaves_by_path(tree)))
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_placed)
    return values(jax.tree.unflatten(structure, bring(leaves)))


@compat.api_boundary
def constrain(x: T, placement: Any) -> T:
    """Pins a value inside a function: the identity, with a placement that the plan keeps.

    JAX's `with_sharding_constraint` and `reshard` are pins too. Outside of shardc it has no effect.

    Args:
      x: an array, or a pytree of arrays that are all placed so.
      placement: a dict from axis to sbp, a Placement, a PartitionSpec or a NamedSharding; `{"data": S(0), ...: AUTO}`
        pins one axis. What does not fit the value or the mesh is an error when the function is planned.

    Returns:
      `x`.
    """
    pin = _loose_pin(placement)

    def one(leaf: Any) -> Any:
        rank = np.ndim(leaf)
        splits = [s.dim for s in pin.placement.values() if isinstance(s, S)]
        fits = all(-rank <= dim < rank for dim in splits)  # if not, the plan says so with all that is wrong
        resolved = Pin(pin.placement.resolve(rank) if fits else pin.placement, pin.fixed)
        return constrain_p.bind(jax.numpy.asarray(leaf), pin=resolved)

    return jax.tree.map(one, x)


def _loose_pin(placement: Any) -> Pin:
    """A pin that is not yet held against a mesh: the function that it stands in does that."""
    if isinstance(placement, Placement):
        return Pin(placement)
    if isinstance(placement, NamedSharding):
        return Pin(Placement.from_sharding(placement))
    if isinstance(placement, jax.sharding.PartitionSpec):
        return Pin(Placement.from_spec(placement))
    if isinstance(placement, Mapping) and isinstance(placement.get(..., AUTO), Auto):
        named = {a: as_sbp(s) for a, s in placement.items() if a is not ...}
        return Pin(Placement(named), frozenset(named) if ... in placement else None)
    raise PlacementError(
        f"shardc.constrain: {code_text(placement)} is no placement; write a dict from axis to sbp, as "
        "{'data': S(0)}, with ...: AUTO in it for axes that are to be chosen."
    )
