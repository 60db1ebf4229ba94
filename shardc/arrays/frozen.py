"""NumPy arrays whose value stays, whatever their giver and their readers do."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def frozen(x: Any, dtype: Any = None) -> np.ndarray[Any, Any]:
    """The value of an array in memory that nobody writes to: a read-only copy. An array that is frozen is taken as it
    is."""
    if isinstance(x, np.ndarray) and dtype in (None, x.dtype) and is_frozen(x):
        return x
    made = np.array(x, dtype)
    made.flags.writeable = False
    return made


def is_frozen(x: np.ndarray[Any, Any]) -> bool:
    """Whether an array and all that lies below it is read-only, down to its memory.

    An array that is read-only itself may be a view of one that is not, and one that owns its memory may have views. The
    memory of other libraries is unknown, and of a file everybody writes to it.
    """
    base: Any = x
    while type(base) is np.ndarray:
        if base.flags.writeable:
            return False
        base = base.base
    owner = base.obj if isinstance(base, memoryview) else base
    return owner is None or isinstance(owner, bytes | jax.Array)


def read_only(x: Any) -> Any:
    """A view of a NumPy array that cannot be written to; anything else as it is."""
    if not isinstance(x, np.ndarray):
        return x
    view = x.view()
    view.flags.writeable = False
    return view
