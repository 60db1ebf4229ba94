"""Flax on a mesh: placements from the partitioning metadata of linen and nnx, and `function` as `nnx.jit` takes states.

Import it explicitly, `import shardc.flax`: shardc itself does not need flax, and `shardc.function` takes its modules.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Never

from shardc import api, compat
from shardc.calls.options import decorated, options_of

try:
    from shardc.calls.flax_metadata import LogicalRules, placements
except ModuleNotFoundError as error:
    if error.name is None or error.name.split(".")[0] != "flax":
        raise
    text = 'shardc.flax needs flax, which is not installed: pip install "flax>=0.12".'
    raise ModuleNotFoundError(text, name=error.name) from None

__all__ = ["LogicalRules", "function", "placements"]


@compat.api_boundary
@wraps(api.function, assigned=())
def function(fn: Callable[..., Any] | None = None, *unnamed: Never, **keywords: Any) -> Any:
    """`shardc.function`, which also writes to states of nnx, as `nnx.jit` does.

    `shardc.function` itself writes to modules, optimizers, metrics, random streams and variables. A state, as
    `nnx.state` and `nnx.split` give it, is a pytree there: new values are what a function returns. Here the variables
    in a state are written to as those in a module.

    Args:
      fn: the function.
      *unnamed: none; all else is given by name.
      **keywords: those of `shardc.function`.

    Returns:
      A `Function`, as from `shardc.function`; `fn` itself with `mesh=None`.

    Raises:
      ArgumentError: as from `shardc.function`.
    """
    options, unknown = options_of(keywords, states=True)
    return decorated(function, (fn, *unnamed), unknown, options, api.function_of)
