"""Arrays whose buffers are gone: a call that they were donated to took them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from shardc import compat
from shardc.arrays.remote_array import RemoteArray
from shardc.errors import ArgumentError, all_offenders


class GoneError(ArgumentError):
    """Arrays without buffers, given to something that reads them. Nothing has run."""


def refuse_gone(what: str, arrays: Iterable[tuple[str, Any]]) -> None:
    """Raise GoneError if some of the arrays, each with its path, have no buffers any more; it names them."""
    gone = [path for path, x in arrays if _is_gone(x)]
    if gone:
        does = "an earlier call took its buffer; pass that call's result instead."
        raise GoneError(all_offenders(what, [f"{path or 'the array'}: {does}" for path in gone])) from None


def _is_gone(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, RemoteArray | compat.Tracer) and x.is_deleted()
