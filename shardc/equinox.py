"""Functions on a mesh all of whose numbers are constants, as `equinox.filter_jit` makes them for one device.

Import it explicitly, `import shardc.equinox`. Neither shardc nor this module needs equinox: it works for every pytree
with leaves that are not arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Never

from shardc import api, compat
from shardc.calls.options import decorated, options_of

__all__ = ["function"]


@compat.api_boundary
@wraps(api.function, assigned=())
def function(fn: Callable[..., Any] | None = None, *unnamed: Never, **keywords: Any) -> Any:
    """`shardc.function` with Python's numbers as constants, as `equinox.filter_jit` has them.

    `shardc.function` itself takes modules of equinox: their activations, names, numbers and flags are constants, and
    results may be modules. A number of Python outside of a module is an array there. Here all numbers and flags are
    constants, wherever they stand: another value needs another plan. Results may have leaves that are no arrays outside
    of modules too. `equinox.nn.State` passes between the microbatches of `shardc.accumulate` with
    `reduce="carry:state"`.

    Args:
      fn: the function.
      *unnamed: none; all else is given by name.
      **keywords: those of `shardc.function`.

    Returns:
      A `Function`, as from `shardc.function`; `fn` itself with `mesh=None`.

    Raises:
      ArgumentError: as from `shardc.function`.
    """
    options, unknown = options_of(keywords, all_constant=True)
    return decorated(function, (fn, *unnamed), unknown, options, api.function_of)
