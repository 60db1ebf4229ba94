"""`shardc.trips`: the expected number of rounds of a loop of unknown length."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import jax

from shardc import compat
from shardc.errors import ArgumentError


def trips(n: int) -> AbstractContextManager[Any]:
    """State the expected number of rounds of a `while_loop`, for plans. Without it plans count one round.

    It holds for the loops that are traced inside it, also in the bodies of scans, conditions and remat, but not for
    loops in the body of such a loop. Of two nested contexts the inner one holds. It does not change any result.

    Args:
      n: rounds in one run of the loop, at least one.

    Returns:
      A context, which is a decorator as well.

    Raises:
      ArgumentError: `n` is no positive integer.

    Examples:
      >>> import jax
      >>> def doubled(x):
      ...     with trips(128):
      ...         return jax.lax.while_loop(lambda x: x < 100.0, lambda x: 2 * x, x)
      >>> float(doubled(1.0))
      128.0
    """
    if type(n) is not int or n < 1:
        raise ArgumentError(f"trips: {n!r} is no number of rounds; write a positive integer: with shardc.trips(128):")
    return jax.named_scope(compat.scope_of_rounds(n))
