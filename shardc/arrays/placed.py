"""Arrays on a mesh: `PlacedArray` for placements that a jax.Array cannot express."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, TypeGuard, cast

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardc import compat
from shardc.machine.devices import meet
from shardc.machine.launch_order import in_launch_order, ordered_devices
from shardc.sbp.layout import (
    bits_of,
    is_plain,
    physical_spec,
    plain_placement,
    to_logical,
    to_physical,
)
from shardc.sbp.placement import Placement
from shardc.sbp.signature import is_extended


class PlacedArray(jax.Array):
    """A logical array whose placement JAX cannot express: an uneven split or a partial sum.

    shardc functions use its pieces as they are. To every other reader it is a jax.Array of the logical shape and value,
    a leaf of pytrees for jnp, jit, grad, NumPy, optax, pickle and orbax; none sees padding. Each read assembles the
    value again by a small program, at the closest placement that JAX can express (`sharding`: another dimension that
    divides, else whole), and keeps nothing.

    Attributes:
      physical: the jax.Array that holds the pieces of all devices, with their padding.
      placement: its placement on `mesh`.
    """

    __slots__ = ("_shape", "mesh", "physical", "placement")
    __hash__ = None  # pyright: ignore[reportAssignmentType]  # as every jax.Array
    __array_priority__ = 100  # NumPy's operators defer to those of this class

    def __init__(self, physical: Any, shape: tuple[int, ...], placement: Placement, mesh: Mesh) -> None:
        self.physical, self._shape, self.placement, self.mesh = physical, shape, placement, mesh

    # -- known without reading the value

    @property
    def parts(self) -> tuple[Any, ...]:
        """The physical arrays."""
        return (self.physical,)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def dtype(self) -> Any:
        return self.parts[0].dtype

    @property
    def weak_type(self) -> bool:
        return bool(getattr(self.parts[0], "weak_type", False))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    @property
    def aval(self) -> Any:
        return compat.aval_of(jax.ShapeDtypeStruct(self.shape, self.dtype, weak_type=self.weak_type))

    @property
    def sharding(self) -> NamedSharding:
        """The sharding of its value when it is read."""
        return _plain_sharding(self.shape, self.placement, self.mesh)

    @property
    def format(self) -> Format:
        return Format(None, self.sharding)  # JAX has a layout of its own for each type

    @property
    def device(self) -> Any:
        return self.sharding

    @property
    def committed(self) -> bool:
        return True

    _committed = committed  # the name that JAX reads of its own arrays

    @property
    def is_fully_addressable(self) -> bool:
        return all(x.is_fully_addressable for x in self.parts)

    @property
    def is_fully_replicated(self) -> bool:
        return self.sharding.is_fully_replicated

    def devices(self) -> set[Any]:
        return set(self.sharding.device_set)

    def is_deleted(self) -> bool:
        return any(x.is_deleted() for x in self.parts)

    def is_ready(self) -> bool:
        return all(x.is_ready() for x in self.parts)

    def on_device_size_in_bytes(self) -> int:
        return sum(x.on_device_size_in_bytes() for x in self.parts)

    # -- applied to the physical arrays

    def delete(self) -> None:
        for x in self.parts:
            x.delete()

    def block_until_ready(self) -> PlacedArray:
        jax.block_until_ready(self.parts)
        return self

    def copy_to_host_async(self) -> None:
        for x in self.parts:
            x.copy_to_host_async()

    def with_physical(self, parts: Sequence[Any]) -> PlacedArray:
        """An array with this placement and other physical arrays."""
        return PlacedArray(parts[0], self.shape, self.placement, self.mesh)

    def copy(self) -> PlacedArray:
        return self.with_physical([x.copy() for x in self._alive()])

    def __copy__(self) -> PlacedArray:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> PlacedArray:
        del memo
        return self.copy()

    def _alive(self) -> tuple[Any, ...]:
        if self.is_deleted():  # JAX's own error, without the padding in its shape
            raise RuntimeError(f"Array has been deleted with shape={self.aval.str_short()}.")
        return self.parts

    # -- the value

    def __array__(self, dtype: Any = None, context: None = None, copy: bool | None = None) -> np.ndarray:
        del context
        value = self._on_host(self._alive())
        return np.array(value, dtype) if copy else np.asarray(value, dtype)

    def _on_host(self, parts: tuple[Any, ...]) -> np.ndarray:
        return to_logical(self._host_piece(parts[0]), self.shape, self.placement, dict(self.mesh.shape))

    def _host_piece(self, part: Any) -> np.ndarray:
        """A physical array on the host.

        Raises:
          RuntimeError: pieces of it are in other processes alone.
        """
        if not part.is_fully_addressable and not has_every_piece(part):
            raise RuntimeError(
                f"{self!r} has pieces in other processes; read it with shardc.fetch(x) in all of them, which gathers "
                "it."
            )
        return on_host(part)

    def to_jax(self) -> jax.Array:
        """The logical value as a plain jax.Array, whole on every device, to keep."""
        return self.read(NamedSharding(self.mesh, PartitionSpec()))

    def read(self, sharding: NamedSharding | None = None) -> jax.Array:
        """The logical value as a plain jax.Array, at `sharding`, by default at `self.sharding`. If pieces of it are in
        other processes, all of them read it together."""
        with compat.at_once():
            return self._on_devices(self._alive(), self.sharding if sharding is None else sharding)

    def _on_devices(self, parts: tuple[Any, ...], sharding: NamedSharding) -> jax.Array:
        if not (parts[0].is_fully_addressable or has_every_piece(parts[0])):
            meet(self.mesh.devices.flat, f"read of {self!r}", {})
        if bits_of(self.dtype) >= 4:
            run = _reader(self.shape, self.placement, self.mesh, sharding)
        elif self.is_fully_addressable:  # XLA:CPU gathers such elements past their end
            return jax.device_put(self._on_host(parts), sharding)
        else:
            run = _mover(self.shape, (self.placement, self.mesh), Placement(), sharding)
        return in_launch_order(ordered_devices(self.mesh), lambda: run(parts[0]))

    def __str__(self) -> str:
        """The value as text, as of any jax.Array; where it is if pieces of it are in other processes alone."""
        here = all(part.is_fully_addressable or has_every_piece(part) for part in self._alive())
        return repr(self) if not here else str(self.read() if self.is_fully_addressable else np.asarray(self))

    def __repr__(self) -> str:
        dims = ",".join(map(str, self.shape))
        return f"PlacedArray({self.dtype}[{dims}], {self.placement}, {dict(self.mesh.shape)})"


class StackedArray(PlacedArray):
    """A logical array whose rows lie in pieces on several meshes: parameters of a scan's layers, by pipeline stages.

    Pipelines use its pieces as they are; every other reader gets its value on the mesh of the first piece.

    Attributes:
      pieces: the arrays that follow one another in dimension 0.
      physical: the physical array of each piece.
      placement, mesh: those of the first piece.
    """

    __slots__ = ("pieces",)

    def __init__(self, pieces: Sequence[PlacedArray]) -> None:
        self.pieces = tuple(pieces)
        first = self.pieces[0]
        shape = (sum(p.shape[0] for p in pieces), *first.shape[1:])
        super().__init__(tuple(p.physical for p in pieces), shape, first.placement, first.mesh)

    @property
    def parts(self) -> tuple[Any, ...]:
        return tuple(x for p in self.pieces for x in p.parts)

    @property
    def dtype(self) -> Any:
        return self.pieces[0].dtype

    @property
    def weak_type(self) -> bool:
        return self.pieces[0].weak_type

    def is_ready(self) -> bool:
        return all(p.is_ready() for p in self.pieces)

    def with_physical(self, parts: Sequence[Any]) -> StackedArray:
        """An array with these pieces and other physical arrays."""
        left = iter(parts)
        return StackedArray([p.with_physical([next(left) for _ in p.parts]) for p in self.pieces])

    def _on_host(self, parts: tuple[Any, ...]) -> np.ndarray:
        del parts
        return np.concatenate([np.asarray(p) for p in self.pieces])

    def _on_devices(self, parts: tuple[Any, ...], sharding: NamedSharding) -> jax.Array:
        if not all(p.parts for p in self.pieces):  # other processes have told what is in these
            return jax.numpy.asarray(self._on_host(parts))
        here = [PlacedArray(p.physical, p.shape, p.placement, self.mesh).sharding for p in self.pieces]

        def joined() -> jax.Array:
            rows = [jax.device_put(p.read(), s) for p, s in zip(self.pieces, here, strict=True)]
            return jax.jit(jax.numpy.concatenate, out_shardings=sharding)(rows)

        return in_launch_order(ordered_devices(self.mesh), joined)

    def __repr__(self) -> str:
        dims, rows = ",".join(map(str, self.shape)), "+".join(str(p.shape[0]) for p in self.pieces)
        return f"StackedArray({self.dtype}[{dims}], rows {rows}, {self.placement}, {dict(self.mesh.shape)})"


@lru_cache(maxsize=4096)
def _plain_sharding(shape: tuple[int, ...], placement: Placement, mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, physical_spec(plain_placement(shape, placement, dict(mesh.shape))))


@lru_cache(maxsize=4096)
def _reader(shape: tuple[int, ...], placement: Placement, mesh: Mesh, sharding: NamedSharding) -> Any:
    """A program from the physical array to the logical one."""
    return jax.jit(lambda x: to_logical(x, shape, placement, dict(mesh.shape)), out_shardings=sharding)


_ON_HOST: Final = frozenset(
    ("__bool__", "__int__", "__float__", "__complex__", "__index__", "__format__", "item", "tolist")
)
"""Attributes that read the value on the host. Of an array with pieces in other processes they raise its own error."""


def has_every_piece(x: jax.Array) -> bool:
    """Whether this process holds a copy of each piece of an array."""
    whole = x.sharding.devices_indices_map(x.shape).values()
    here = x.sharding.addressable_devices_indices_map(x.shape).values()
    return {str(i) for i in whole} == {str(i) for i in here}


def on_host(x: jax.Array) -> np.ndarray:
    """The value of an array of which this process holds every piece."""
    if x.size == 0 and not x.is_fully_addressable:  # JAX finds no piece of it here
        return np.zeros(x.shape, x.dtype)
    return np.asarray(x)


def _forward(name: str, is_property: bool) -> Any:
    """An attribute that is read from the logical value."""

    def forwarded(self: PlacedArray, *args: Any, **kwargs: Any) -> Any:
        if name in _ON_HOST and not self.is_fully_addressable:
            return getattr(np.asarray(self), name)(*args, **kwargs)
        return getattr(self.read(), name)(*map(as_jax, args), **{k: as_jax(x) for k, x in kwargs.items()})

    forwarded.__name__ = name
    return property(lambda self: getattr(self.read(), name)) if is_property else forwarded


for _name, _is_property in compat.array_attributes():
    if _name not in vars(PlacedArray):
        setattr(PlacedArray, _name, _forward(_name, _is_property))
for _kind in (PlacedArray, StackedArray):
    compat.register_array(_kind, PlacedArray.read)


def as_jax(x: Any) -> Any:
    """The logical value of a PlacedArray as a jax.Array; anything else as it is."""
    return x.read() if is_placed(x) else x


def is_placed(x: object) -> TypeGuard[PlacedArray]:
    return isinstance(x, PlacedArray)


def narrow(x: Any) -> Any:
    """A NumPy array in JAX's dtype for it: after JAX has put another one under x64, `device_put` and compiled objects
    now and then put this one as it is (3 in 100 times in jax 0.12)."""
    return np.asarray(x, jax.dtypes.canonicalize_dtype(x.dtype)) if isinstance(x, np.ndarray | np.generic) else x


def handed_over(x: Any, mesh: Mesh) -> Any:
    """A NumPy array as JAX may keep it, in JAX's dtype; anything else as it is. For CPU devices it is a copy: JAX takes
    the caller's memory as it is, and reads it when the call has returned, and the caller may have written to it."""
    if not isinstance(x, np.ndarray | np.generic):
        return x
    copy = mesh.devices.flat[0].platform == "cpu"
    return np.array(x, jax.dtypes.canonicalize_dtype(x.dtype)) if copy else narrow(x)


@lru_cache(maxsize=256)
def weakly(sharding: Any) -> Any:
    """A program that makes an array at a sharding weakly typed."""
    return jax.jit(lambda x: compat.as_aval(x, compat.shaped_array(x.shape, x.dtype, True)), out_shardings=sharding)


def as_placed(x: Any) -> Any:
    """An array with unreduced axes as a PlacedArray, whose physical array are its pieces side by side: no value moves.
    Anything else as it is."""
    sharding = compat.sharding_of(x)
    if not isinstance(sharding, NamedSharding) or not sharding.spec.unreduced or not isinstance(x, jax.Array):
        return x
    placement, mesh = Placement.from_sharding(sharding).resolve(x.ndim), cast(Mesh, sharding.mesh)
    return PlacedArray(_stacker(sharding, physical_spec(placement))(x), tuple(x.shape), placement, mesh)


@lru_cache(maxsize=256)
def _stacker(sharding: NamedSharding, spec: PartitionSpec) -> Any:
    """A program that makes the pieces of an unreduced array those of a plain one with one more dimension."""
    pieces = jax.shard_map(
        lambda x: x[None], mesh=sharding.mesh, in_specs=sharding.spec, out_specs=spec, check_vma=False
    )
    return jax.jit(pieces)


def lies_here(x: Any) -> bool | None:
    """Whether all pieces of an array are on devices of this process; None for what is no jax.Array."""
    return x.is_fully_addressable if isinstance(x, jax.Array) else None


def moved(x: jax.Array, placement: Placement, sharding: NamedSharding) -> jax.Array:
    """The physical array of an array that several processes hold, moved to another placement by a program of all."""
    old = (x.placement, x.mesh) if isinstance(x, PlacedArray) else None
    with compat.at_once(), jax.debug_nans(False), jax.debug_infs(False):  # a copy computes nothing
        run = _mover(x.shape, old, placement, sharding)
        given = x.physical if isinstance(x, PlacedArray) else x
        return in_launch_order(ordered_devices(cast(Mesh, sharding.mesh)), lambda: run(given))


def in_bytes(x: jax.Array) -> jax.Array:
    """An array of elements of a byte or more, in a program that moves it."""
    if bits_of(x.dtype) >= 8:
        return x
    wide = np.int8 if jax.dtypes.issubdtype(x.dtype, np.signedinteger) else np.uint8
    return jax.lax.optimization_barrier(x.astype(wide))


@lru_cache(maxsize=4096)
def _mover(shape: tuple[int, ...], old: tuple[Placement, Mesh] | None, new: Placement, sharding: NamedSharding) -> Any:
    """A program from one physical array to another of the same value.

    Where rows change their places it is whole on every device in between: XLA's partitioner ends the process in some
    such cases, as on 3 x 2 devices (JAX 0.12.0.1).
    """
    sizes = dict(sharding.mesh.shape)
    plain = old is None and is_plain(shape, new, sizes)
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    at = jax.lax.with_sharding_constraint

    def move(x: Any) -> Any:
        keys = is_extended(x.dtype)
        made = jax.random.key_data(x) if keys else in_bytes(x)
        if not plain:
            value = at(made, whole)
            value = value if old is None else to_logical(value, shape, old[0], dict(old[1].shape))
            made = at(to_physical(value, new, sizes), whole)
        if keys:
            return jax.random.wrap_key_data(at(made, sharding), impl=jax.random.key_impl(x))
        return made if made.dtype == x.dtype else jax.lax.optimization_barrier(at(made, sharding)).astype(x.dtype)

    return jax.jit(move, out_shardings=sharding)


def leaf_aval(x: Any) -> Any:
    """Logical shape, dtype and weak type of a leaf."""
    return x.aval if is_placed(x) else compat.aval_of(x)
