"""The launch of a call, in the turn of the gang's client that makes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import jax

from shardc import compat
from shardc.execute.agreement import check_call
from shardc.runtime.gang import calling_client

if TYPE_CHECKING:
    from shardc.execute.agreement import Agreement


class Launchable(Protocol):
    """The part of an executable that a turn needs."""

    plan: Any

    @property
    def agreement(self) -> Any: ...
    @property
    def compiled(self) -> Any: ...


def in_turn(executable: Launchable, arrays: Sequence[Any], launch: Callable[[], list[Any]]) -> list[Any]:
    """Check a call with other processes and launch it: in a turn, if a client of a gang makes the call.

    Args:
      executable: the executable.
      arrays: the flat arguments that are arrays.
      launch: launches it on them.
    """
    client = calling_client()
    if client is None:
        check_call(executable, arrays)
        return launch()
    agreement: Agreement | None = executable.agreement
    if agreement is None:
        _ = executable.compiled  # before the turn, as it is long; several processes compile in one order
    members = () if agreement is None else agreement.members
    with client.gang.turn(client, executable.plan.seconds, members) as turn:
        check_call(executable, arrays)
        out = launch()
        turn.launched(partial(wait_for, out))
    return out


def wait_for(results: Any) -> bool:
    """Wait until a program has finished. False: all its results are gone, as another program took their buffers."""
    leaves = [x for x in jax.tree.leaves(results) if isinstance(x, jax.Array) and not isinstance(x, compat.Tracer)]
    known = not leaves
    for x in leaves:
        try:
            x.block_until_ready()
            known = True
        except RuntimeError:  # the buffer is gone; or the program failed, as the reader of its results will see
            known = known or not x.is_deleted()
    return known
