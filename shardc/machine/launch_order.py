"""The order of programs whose collectives cannot be told apart: those of several processes that compute on CPUs.

A collective between the CPUs of several processes (Gloo, MPI) names its devices and not its program. Of two programs
that run at the same time on the same devices, one takes what the other one's collectives have sent: results are wrong,
or the process ends. All processes launch programs of the same devices in one order, but JAX runs them in the order of
their launches only

  - if each has one device in this process and the same thread launches both, or
  - if each has several devices in this process.

Any other program is launched here when the one before it on its devices has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import lru_cache
from typing import Any, Final, TypeVar

import jax
from jax.sharding import Mesh

T = TypeVar("T")


class _LaunchQueue(threading.local):
    """The queue of a thread: the programs with one device here that it has launched."""

    def __init__(self) -> None:
        self.queue = object()


class _Device:
    """A device of this process.

    Attributes:
      lock: held while a program is launched on the device.
      queue: JAX runs the programs of one queue in their order; here that of the last program.
      token: a value that is ready when the last program has ended; None if it has.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.queue: object = None
        self.token: Any = None


_thread: Final = _LaunchQueue()
_SEVERAL: Final = object()
"""The queue of the programs that have several devices in this process."""
_devices: Final[dict[Any, _Device]] = {}


@lru_cache(maxsize=1024)
def ordered_devices(mesh: Mesh) -> tuple[Any, ...]:
    """The devices of this process in a mesh, if the order of the mesh's programs has to be kept here; else none."""
    devices = list(mesh.devices.flat)
    if devices[0].platform != "cpu" or len({d.process_index for d in devices}) == 1:
        return ()
    me = jax.process_index()
    return tuple(sorted((d for d in devices if d.process_index == me), key=lambda d: d.id))


def all_ordered_devices() -> tuple[Any, ...]:
    """The devices of `ordered_devices` for a program whose devices are not known."""
    return () if jax.process_count() == 1 else ordered_devices(Mesh(jax.devices(), ("devices",)))


def in_launch_order(devices: Sequence[Any], launch: Callable[[], T], token: Callable[[T], Any] | None = None) -> T:
    """Launch a program; before that, wait for an earlier one that JAX might run at the same time.

    Args:
      devices: what `ordered_devices` gives. Programs without a common device do not wait for one another.
      launch: launches the program and returns its results.
      token: picks from the results a value that is ready when the program has ended, and that no later program takes as
        its own (donation). None: the program ends here, as any of the results may be taken.
    """
    if not devices:
        return launch()
    queue = _thread.queue if len(devices) == 1 else _SEVERAL
    with ExitStack() as stack:
        mine = [_devices.setdefault(d, _Device()) for d in devices]
        for device in mine:  # in the order of their numbers
            stack.enter_context(device.lock)
        for device in mine:
            if device.queue is not queue or token is None:
                _wait(device)
        out = launch()
        if token is None:
            jax.block_until_ready(out)
        for device in mine:
            if token is None:
                _wait(device)  # for programs that `launch` has launched by this function
            else:
                device.queue, device.token = queue, token(out)
    return out


def _wait(device: _Device) -> None:
    """Wait until the last program of a device has ended."""
    if device.token is not None:
        with suppress(RuntimeError):  # it failed, as the reader of its results sees
            device.token.block_until_ready()
        device.token = None
