"""Arrays of another JAX runtime: what a process knows of a value that it does not have."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from shardc import compat
from shardc.arrays.placed import PlacedArray, StackedArray, leaf_aval
from shardc.errors import ClusterError
from shardc.machine.devices import is_here, processes_of
from shardc.sbp.placement import Placement
from shardc.sbp.signature import is_extended

SMALL: Final = 1024
"""Bytes of the largest result of a pipeline that comes to every process."""


def is_small(aval: Any) -> bool:
    """Whether every process gets a result of this type."""
    return not is_extended(aval.dtype) and bytes_of(aval) <= SMALL


def bytes_of(aval: Any) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize


@dataclass(frozen=True)
class Arrival:
    """A value that comes from another process.

    Attributes:
      wait: waits for it.
      is_there: whether it has come.
    """

    wait: Callable[[], np.ndarray[Any, Any]]
    is_there: Callable[[], bool] = lambda: True


class RemoteArray(PlacedArray):
    """A logical array that lives in another process. It can be passed on to shardc functions, and not read here.

    A small result, such as a loss, comes to every process: it can be read, once it has arrived.

    Attributes:
      placement, mesh: where it lives.
      arriving: its value, if that comes here.
    """

    __slots__ = ("_dtype", "_weak", "arriving")

    def __init__(self, aval: Any, placement: Placement, mesh: Mesh, arriving: Arrival | None = None) -> None:
        super().__init__(None, tuple(aval.shape), placement, mesh)
        self._dtype, self._weak, self.arriving = aval.dtype, bool(getattr(aval, "weak_type", False)), arriving

    @property
    def parts(self) -> tuple[Any, ...]:
        return ()

    @property
    def dtype(self) -> Any:
        return self._dtype

    @property
    def weak_type(self) -> bool:
        return self._weak

    @property
    def sharding(self) -> Any:
        """The sharding of its value when it is read: on a device of this process.

        Raises:
          ClusterError: it is not here. JAX asks before it compiles a program for the array's devices.
        """
        if self.arriving is None:
            self._refuse()
        return SingleDeviceSharding(jax.local_devices()[0])

    @property
    def committed(self) -> bool:
        return False

    _committed = committed

    @property
    def is_fully_addressable(self) -> bool:
        return self.arriving is not None

    @property
    def is_fully_replicated(self) -> bool:
        return self.arriving is not None

    def is_ready(self) -> bool:
        return self.arriving is None or self.arriving.is_there()

    def block_until_ready(self) -> RemoteArray:
        if self.arriving is not None:
            self.arriving.wait()
        return self

    def with_physical(self, parts: Sequence[Any]) -> RemoteArray:
        return RemoteArray(self.aval, self.placement, self.mesh, self.arriving)

    def _on_host(self, parts: tuple[Any, ...]) -> np.ndarray[Any, Any]:
        return self._refuse() if self.arriving is None else self.arriving.wait()

    def read(self, sharding: NamedSharding | None = None) -> jax.Array:
        """The value as a jax.Array of this process.

        Raises:
          ClusterError: it is not here.
        """
        value = self._refuse() if self.arriving is None else self.arriving.wait()
        with compat.at_once():
            return compat.as_aval(jax.numpy.asarray(value, self.dtype), self.aval)

    def to_jax(self) -> jax.Array:
        return self.read()

    def _refuse(self) -> NoReturn:
        who = ", ".join(map(str, processes_of(self.mesh.devices.flat)))
        dims = ",".join(map(str, self.shape))
        raise ClusterError(
            f"{self.dtype}[{dims}] at {self.placement} lives in process {who} and cannot be read here; "
            "shardc.fetch(x) brings its value to every process."
        )

    def __repr__(self) -> str:
        dims = ",".join(map(str, self.shape))
        who = ", ".join(map(str, processes_of(self.mesh.devices.flat)))
        return f"RemoteArray({self.dtype}[{dims}], {self.placement}, process {who})"

    def __str__(self) -> str:
        return repr(self) if self.arriving is None else super().__str__()


compat.register_array(RemoteArray, RemoteArray.read)


def is_remote(x: object) -> bool:
    """Whether the value of an array, or of a part of it, is in another JAX runtime only."""
    if isinstance(x, StackedArray):
        return any(map(is_remote, x.pieces))
    return isinstance(x, RemoteArray) and x.arriving is None


def home_of(x: Any) -> list[int]:
    """The processes of an array that has no piece in this one; none if it has, or is no array."""
    if isinstance(x, RemoteArray):
        return processes_of(x.mesh.devices.flat)
    physical: Any = x.physical if isinstance(x, PlacedArray) else x
    away = isinstance(physical, jax.Array) and not physical.sharding.addressable_devices
    return processes_of(physical.sharding.device_set) if away else []


def put_remote(x: Any, mesh: Mesh, placement: Placement | None) -> Any:
    """The RemoteArray of an array that other processes put on `mesh`; a leaf without a placement stays as it is."""
    if placement is None or (not hasattr(x, "dtype") and not isinstance(x, bool | int | float | complex)):
        return x
    if is_here(mesh.devices.flat):
        raise ClusterError(
            f"shardc.put: the mesh {dict(mesh.shape)} has devices of several JAX runtimes, on which no array can lie. "
            "Put it on the mesh of one rank; a pipeline puts what it is given in place itself."
        )
    aval = leaf_aval(x)
    value = Arrival(lambda: np.asarray(x)) if is_small(aval) else None
    return RemoteArray(aval, placement.resolve(len(aval.shape)), mesh, value)
