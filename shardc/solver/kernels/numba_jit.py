"""Functions compiled by numba, which is an extra (`shardc[fast]`): only `kernels_numba` imports this module.

The compiled code is kept in `__pycache__`, or in the user's cache folder where that cannot be written: the first plan
of a large problem on a machine makes it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, cast

from numba import njit
from numba.core.registry import cpu_target

F = TypeVar("F", bound=Callable[..., Any])

# numba imports most of itself with the first function that is called, which takes 0.17 s. Now it is part of the import.
_cpu = cast(Any, cpu_target)
_cpu.typing_context.refresh()
_cpu.target_context.refresh()


def compiled(function: F) -> F:
    """As Python has it, but integers are of 64 bits, divisions by zero infinite, and indices of arrays not checked."""
    made = njit(nogil=True, error_model="numpy")(function)
    with suppress(RuntimeError):  # there is no folder to keep it in: each process compiles it
        made.enable_caching()
    return cast(F, made)
