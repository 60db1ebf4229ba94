"""Calls of arrays that were calls of objects, with the structure of these as a static argument."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from shardc.passes.trace.trace import Call

STRUCTURE: Final = "the modules' nnx_graph"
"""The name among static arguments of the structure of modules that are open; no argument of Python is called so."""


class Structure(Protocol):
    """The objects of a call, without their arrays: a static argument of the call of arrays."""

    def run(self, call: Callable[[Mapping[str, Any]], Any], values: Mapping[str, Any]) -> Any:
        """Calls a function, in its trace, with objects that hold the arrays among `values`.

        Returns:
          a triple: the arrays that the objects hold then, their new structure, and the result.
        """
        ...

    def placements(self, spec: Any, names: Sequence[str]) -> Any:
        """`in_placements`, with those that the objects themselves have for arguments that it does not place."""
        ...


@dataclass(frozen=True)
class OpenedCall:
    """A call of arrays.

    Attributes:
      args, kwargs: its arguments, the structure of objects among them.
      close: what makes the caller's result of that of the call, and writes to the caller's objects.
      held: names of the arguments with objects that hold arrays.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    close: Callable[[Any], Any] = lambda made: made
    held: tuple[str, ...] = ()


def structure_of(call: Call) -> Structure | None:
    """The structure of the objects of a call; None: it had none."""
    return dict(call.static).get(STRUCTURE)


def placed_results(call: Call, spec: Any) -> Any:
    """`out_placements` of the call of arrays: the compiler places what objects hold, and their structure is none."""
    return spec if structure_of(call) is None else (None, None, spec)
