"""Calls with modules as calls of arrays: modules of flax.nnx are split, numbers in modules of equinox are constants.

    f(module, x)  --open-->  f(arrays, x, structure)  --run-->  arrays, structure, result  --close-->  result

Neither library is imported for functions that meet none of its objects: a value's class says where it comes from.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax

from shardc.calls.constant_leaves import ConstantLeaves
from shardc.calls.opened import STRUCTURE, OpenedCall, Structure
from shardc.passes.accumulate.microbatches import OPENERS, Opened
from shardc.passes.trace.trace import Arguments, Call, is_nnx, is_nnx_state


class OpenArguments(Arguments):
    """The signature of a function that may be called with modules.

    Args:
      all_constant: Python's numbers are constants everywhere, not in modules of equinox alone.
      states: states of flax.nnx are written to as modules are; else they are pytrees.

    Attributes:
      meets_modules: whether a call had modules of flax.nnx.
    """

    def __init__(
        self, fn: Callable[..., Any], static: Sequence[str], all_constant: bool = False, states: bool = False
    ) -> None:
        super().__init__(fn, static)
        self._constants, self._states = ConstantLeaves(all_constant), states
        self.meets_modules = False
        self._structures: dict[Structure, Structure] = {}

    def _is_whole(self, x: object) -> bool:
        """Whether a value of a call is opened, or left, as a whole."""
        return is_nnx(x) or (is_nnx_state(x) and not self._states)

    @contextmanager
    def opened(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Generator[OpenedCall]:
        """A call as one of arrays, while it runs."""
        values = (args, kwargs) if "flax" in sys.modules else ()
        if not any(map(is_nnx, jax.tree.leaves(values, is_leaf=self._is_whole))):
            yield OpenedCall(args, kwargs)
            return
        from shardc.calls.nnx_modules import opened_modules

        self.meets_modules = True
        with opened_modules(self, self._is_whole, self._structures, args, kwargs) as call:
            yield call

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Call, set[str]]:
        given = dict(kwargs)
        structure = given.pop(STRUCTURE, None)
        call, names = super()._bind(*self._constants.marked((tuple(args), given)))
        return call if structure is None else replace(call, static=(*call.static, (STRUCTURE, structure))), names

    def call(self, values: Mapping[str, Any]) -> Any:
        values = {n: self._constants.unmarked(v) for n, v in values.items()}
        structure = values.pop(STRUCTURE, None)
        made = super().call(values) if structure is None else structure.run(super().call, values)
        return self._constants.kept(made)


def _open_in_loop(where: str, objects: Mapping[str, Any]) -> Opened | None:
    from shardc.calls.nnx_modules import opened_in_loop

    return opened_in_loop(where, objects)


OPENERS.append(_open_in_loop)
