"""`shardc.trips`: how often a loop of unknown length is expected to go around."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import jax

from shardc import compat
from shardc.errors import ArgumentError


def trips(n: int) -> AbstractContextManager[Any]:
    """Says how many rounds a `while_loop` is expected to make, for plans: without it one is counted.

    The loops that are traced inside, those in the bodies of scans, conditions and remat too, but not what stands in a
    loop's own body. Of two that are nested the inner one holds. The result of the loop does not depend on it.

    Args:
      n: rounds in one run of the loop, at least one.

    Returns:
      A context, which is a decorator as well.

    Raises:
      ArgumentError: `n` is no positive integer.

    Example:
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
