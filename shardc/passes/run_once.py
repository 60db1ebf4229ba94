"""Operations that run once, on the first device, on whole operands: calls back into Python, draws from a state.

    y = pure_callback x  -->  y = cond (every axis index is 0) (pure_callback x) 0

Their results are partial: the first device has them, the others hold what a sum (or, for booleans, a maximum) does not
notice. So bringing them to all is a planned collective like any other.

A device that failed alone would leave the others waiting in a collective. So what a callback raises is kept, its
results are zeros, and the call raises it when all devices are done.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardc import compat
from shardc.compat import Eqn
from shardc.placed import narrow
from shardc.sbp.placement import B, P, ReduceOp
from shardc.sbp.signature import Signature, neutral_value

CALLBACKS: Final = frozenset(("pure_callback", "io_callback", "debug_callback", "debug_print"))
_ONCE: Final = CALLBACKS | {"rng_uniform"}


def runs_once(eqn: Eqn) -> bool:
    return eqn.primitive.name in _ONCE


def result_op(aval: Any) -> ReduceOp:
    """What brings a result that the first device alone has to all."""
    return "max" if aval.dtype == np.bool_ else "sum"


def once_signature(eqn: Eqn) -> Signature:
    """`B, ... -> P, ...`: the only one on any axis."""
    return Signature((B,) * len(eqn.invars), tuple(P(result_op(v.aval)) for v in eqn.outvars))


class Guarded:
    """A callback that does not raise: what it would is added to `raised`, and its results are zeros.

    A loop that waits for what a failed callback does not say would not end: after so many failures it does raise.
    """

    MOST = 1000

    def __init__(
        self, callback: Callable[..., Sequence[Any]], results: Sequence[Any], raised: list[BaseException]
    ) -> None:
        self.callback, self.results, self.raised = callback, results, raised

    def __call__(self, *args: Any) -> Sequence[Any]:
        try:
            return _checked(self.callback(*args), self.results)
        except BaseException as error:
            self.raised.append(error)
            if len(self.raised) > self.MOST:
                raise
            return [np.zeros(a.shape, a.dtype) for a in self.results]


def _checked(values: Sequence[Any], avals: Sequence[Any]) -> Sequence[Any]:
    """What JAX asks of the results of a callback, asked where it can be told."""
    if len(values) != len(avals):
        raise RuntimeError(
            f"Mismatched number of outputs from callback. Expected: {len(avals)}, Actual: {len(values)}"
        )
    arrays = [narrow(np.asarray(v)) for v in values]
    for i, (array, aval) in enumerate(zip(arrays, avals, strict=True)):
        for what in ("shape", "dtype"):
            want, found = getattr(aval, what), getattr(array, what)
            if want != found:
                raise RuntimeError(
                    f"Incorrect output {what} for return value #{i}: Expected: {want}, Actual: {found}"
                )
    return arrays


def raise_kept(raised: list[BaseException]) -> None:
    """Raises the first of what callbacks raised in a call that is over, in the type that JAX has for it."""
    if raised:
        first, raised[:] = raised[0], ()
        text = "".join(traceback.format_exception(first))
        raise jax.errors.JaxRuntimeError(f"INTERNAL: CpuCallback error calling callback: {text}") from first


def run_once(
    eqn: Eqn, operands: Sequence[Any], sizes: Mapping[str, int], raised: list[BaseException]
) -> Sequence[Any]:
    """The results on the first device, neutral values on the others. Runs inside shard_map.

    What a callback raises is added to `raised`.
    """
    params: dict[str, Any] = {**eqn.params, **({"sharding": None} if "sharding" in eqn.params else {})}
    arrays = [jnp.asarray(x, v.aval.dtype) for x, v in zip(operands, eqn.invars, strict=True)]
    if not sizes:
        return compat.bind_with(eqn.primitive, params)(*arrays)
    if "callback" in params:
        params["callback"] = Guarded(params["callback"], [v.aval for v in eqn.outvars], raised)
    bind = compat.bind_with(eqn.primitive, params)

    def elsewhere(*_: Any) -> list[jax.Array]:
        kinds: Mapping[ReduceOp, Any] = {"sum": "zero", "max": "lowest"}
        neutral = [neutral_value(kinds[result_op(v.aval)], v.aval.dtype) for v in eqn.outvars]
        return [lax.full(v.aval.shape, x) for v, x in zip(eqn.outvars, neutral, strict=True)]

    return lax.cond(sum(map(lax.axis_index, sizes)) == 0, bind, elsewhere, *arrays)
