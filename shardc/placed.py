"""Arrays on a mesh: `put`, and `PlacedArray` for what a jax.Array cannot say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from shardc.errors import ArgumentError
from shardc.mesh import AnyMesh
from shardc.sbp.layout import is_plain, physical_spec, to_logical, to_physical
from shardc.sbp.placement import Placement


@jax.tree_util.register_pytree_node_class
class PlacedArray:
    """A logical array whose placement JAX cannot say: an uneven split or a partial sum.

    A pytree node over the physical array. shardc functions take it as the logical array.

    Attributes:
      physical: the jax.Array that holds the pieces of all devices.
      shape: the logical shape.
      placement: where it lives on `mesh`.
    """

    __slots__ = ("mesh", "physical", "placement", "shape")

    def __init__(self, physical: Any, shape: tuple[int, ...], placement: Placement, mesh: Mesh) -> None:
        self.physical, self.shape, self.placement, self.mesh = physical, shape, placement, mesh

    @property
    def dtype(self) -> Any:
        return self.physical.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy  # the pieces have to be put together: always a new array
        value = to_logical(np.asarray(self.physical), self.shape, self.placement, dict(self.mesh.shape))
        return value if dtype is None else value.astype(dtype)

    def to_jax(self) -> jax.Array:
        """The logical value as a jax.Array, whole on every device."""
        return jax.device_put(np.asarray(self), NamedSharding(self.mesh, jax.sharding.PartitionSpec()))

    def __repr__(self) -> str:
        dims = ",".join(map(str, self.shape))
        return f"PlacedArray({self.dtype}[{dims}], {self.placement}, {dict(self.mesh.shape)})"

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        return (self.physical,), (self.shape, self.placement, self.mesh)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: tuple[Any, ...]) -> PlacedArray:
        return cls(children[0], *aux)


@jax.tree_util.register_pytree_node_class
class StackedArray(PlacedArray):
    """A logical array whose rows several meshes hold in pieces: parameters of a scan's layers, by a pipeline's stages.

    A pytree node over the physical arrays of the pieces. Pipelines take it as the logical array.

    Attributes:
      pieces: the arrays that follow one another in dimension 0.
      physical: of each piece.
      placement, mesh: of the first.
    """

    __slots__ = ("pieces",)

    def __init__(self, pieces: Sequence[PlacedArray]) -> None:
        self.pieces = tuple(pieces)
        first = self.pieces[0]
        shape = (sum(p.shape[0] for p in pieces), *first.shape[1:])
        super().__init__(tuple(p.physical for p in pieces), shape, first.placement, first.mesh)

    @property
    def dtype(self) -> Any:
        return self.pieces[0].dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy  # the pieces have to be put together: always a new array
        return np.concatenate([p.__array__(dtype) for p in self.pieces])

    def __repr__(self) -> str:
        dims, rows = ",".join(map(str, self.shape)), "+".join(str(p.shape[0]) for p in self.pieces)
        return f"StackedArray({self.dtype}[{dims}], rows {rows}, {self.placement}, {dict(self.mesh.shape)})"

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        return self.physical, tuple((p.shape, p.placement, p.mesh) for p in self.pieces)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: tuple[Any, ...]) -> StackedArray:
        return cls([PlacedArray(x, *known) for x, known in zip(children, aux, strict=True)])

    def with_physical(self, physical: Sequence[Any]) -> StackedArray:
        """The same pieces of other physical arrays."""
        return self.tree_unflatten(self.tree_flatten()[1], tuple(physical))


def is_placed(x: object) -> bool:
    return isinstance(x, PlacedArray)


def narrow(x: Any) -> Any:
    """A NumPy array in the type that JAX has for it: `device_put` forgets to, once it has put another under x64."""
    return np.asarray(x, jax.dtypes.canonicalize_dtype(x.dtype)) if isinstance(x, np.ndarray | np.generic) else x


def put_leaf(x: Any, mesh: Mesh, placement: Placement) -> jax.Array | PlacedArray:
    """One array at `placement`: a jax.Array where JAX can say that, else a PlacedArray."""
    sizes = dict(mesh.shape)
    shape = tuple(np.shape(x)) if not is_placed(x) else x.shape
    placement = placement.resolve(len(shape))
    if is_plain(shape, placement, sizes):
        value = np.asarray(x) if is_placed(x) else x
        return jax.device_put(narrow(value), NamedSharding(mesh, physical_spec(placement)))
    keys = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) if hasattr(x, "dtype") else False
    host = jax.random.key_data(x) if keys else x
    physical = to_physical(narrow(np.asarray(host)), placement, sizes)
    physical = jax.random.wrap_key_data(jax.numpy.asarray(physical), impl=jax.random.key_impl(x)) if keys else physical
    return PlacedArray(jax.device_put(physical, NamedSharding(mesh, physical_spec(placement))), shape, placement, mesh)


def put(tree: Any, mesh: AnyMesh, placements: Any) -> Any:
    """Puts the arrays of a pytree on a mesh.

    Args:
      tree: pytree of arrays; leaves that are no arrays are left as they are.
      mesh: a mesh with devices.
      placements: a pytree of placements of the same structure, or a prefix of it; as `plan.in_placements` gives them.

    Returns:
      The tree with jax.Arrays; where a placement is an uneven split or a partial sum, PlacedArrays.

    Raises:
      ArgumentError: the mesh has no devices, or the two trees do not match.
    """
    if isinstance(mesh, AbstractMesh):
        raise ArgumentError("shardc.put wants a mesh with devices; this one is for planning (it names a topology).")
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_placed)
    if isinstance(tree, tuple) and type(placements) is not type(tree) and isinstance(placements, tuple):
        placements = tuple(placements)  # a plan's in_placements have names besides

    def is_leaf(p: object) -> bool:
        return p is None or isinstance(p, Placement)

    def put_part(placement: Placement | None, part: Any) -> list[Any]:
        found = jax.tree.leaves(part, is_leaf=is_placed)
        return found if placement is None else [put_leaf(x, mesh, placement) for x in found]

    wanted, other = jax.tree.flatten(placements, is_leaf=is_leaf)
    try:
        parts = other.flatten_up_to(tree)
    except ValueError as error:
        raise ArgumentError(
            f"shardc.put: {len(leaves)} arrays of structure {structure} do not match {len(wanted)} placements of "
            f"structure {other}."
        ) from error
    done = [x for p, part in zip(wanted, parts, strict=True) for x in put_part(p, part)]
    return jax.tree.unflatten(structure, done)
