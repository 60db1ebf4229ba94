"""Operations that run once, on the first device, on whole operands: host callbacks, and draws from a state.

    y = pure_callback x  -->  y = cond (every axis index is 0) (pure_callback x) 0

Their results are partial: the first device holds them, the others hold the neutral value of a sum (for booleans, of a
maximum). So their way to all devices is a planned collective like any other.

If one device failed alone, the others would wait in a collective for ever. So the error of a callback is kept, its
results are zeros, and the call raises the error when all devices are done.
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
from shardc.arrays.placed import narrow
from shardc.compat import Eqn
from shardc.sbp.placement import B, P, ReduceOp
from shardc.sbp.signature import Signature, neutral_value

CALLBACKS: Final = frozenset(("pure_callback", "io_callback", "debug_callback", "debug_print"))
ONCE: Final = CALLBACKS | {"rng_uniform"}


def runs_once(eqn: Eqn) -> bool:
    return eqn.primitive.name in ONCE


def result_op(aval: Any) -> ReduceOp:
    """The partial op of a result that only the first device holds."""
    return "max" if aval.dtype == np.bool_ else "sum"


def once_signature(eqn: Eqn) -> Signature:
    """`B, ... -> P, ...`: the only signature on any axis."""
    return Signature((B,) * len(eqn.invars), tuple(P(result_op(v.aval)) for v in eqn.outvars))


class InWords:
    """A callback whose 64-bit numbers come and go as 32-bit words.

    The thread that runs it may not have x64; JAX would narrow the numbers there.
    """

    def __init__(self, callback: Callable[..., Sequence[Any]], eqn: Eqn) -> None:
        self.callback = callback
        self.operands, self.results = [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars]
        self.wide = bool(jax.config.jax_enable_x64)  # pyright: ignore[reportAttributeAccessIssue]

    def __call__(self, *args: Any) -> Sequence[Any]:
        with jax.enable_x64(self.wide):
            made = _checked(self.callback(*map(_of_words, args, self.operands)), self.results)
        return [_words(np.asarray(x, order="C")) for x in made]


class Guarded:
    """A callback in words that does not raise: its error is added to `raised`, and its results are zeros.

    A loop that waits for a value of a failed callback would not end: after `MOST` failures it does raise.
    """

    MOST = 1000

    def __init__(self, callback: InWords, raised: list[BaseException]) -> None:
        self.callback, self.raised = callback, raised

    def __call__(self, *args: Any) -> Sequence[Any]:
        try:
            return self.callback(*args)
        except BaseException as error:
            self.raised.append(error)
            if len(self.raised) > self.MOST:
                raise
            return [_words(np.zeros(a.shape, a.dtype)) for a in self.callback.results]


def words_of(aval: Any) -> int:
    """The 32-bit words of a number that JAX may narrow; 0 for numbers of 32 bits and less, and for complex64."""
    return {"float64": 2, "int64": 2, "uint64": 2, "complex128": 4}.get(str(aval.dtype), 0)


def _words(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """On the host: `f64[2,3] --> u32[2,3,2]`."""
    return x.reshape(*x.shape, 1).view(np.uint32) if words_of(x) else x


def _of_words(x: Any, aval: Any) -> Any:
    """On the host: `u32[2,3,2] --> f64[2,3]`."""
    if not words_of(aval):
        return x
    return jnp.asarray(np.asarray(x, order="C").view(aval.dtype).reshape(aval.shape))


def _to_words(x: Any) -> Any:
    """On a device: `f64[2,3] --> u32[2,3,2]`."""
    if not words_of(x):
        return x
    parts = jnp.stack([x.real, x.imag], -1) if words_of(x) == 4 else x
    return lax.bitcast_convert_type(parts, np.uint32).reshape(*x.shape, words_of(x))


def _from_words(x: Any, aval: Any) -> Any:
    """On a device: `u32[2,3,2] --> f64[2,3]`."""
    if not words_of(aval):
        return x
    if words_of(aval) == 2:
        return lax.bitcast_convert_type(x, aval.dtype)
    parts = lax.bitcast_convert_type(x.reshape(*aval.shape, 2, 2), np.float64)
    return lax.complex(parts[..., 0], parts[..., 1])


def _checked(values: Sequence[Any], avals: Sequence[Any]) -> Sequence[Any]:
    """The results of a callback after JAX's checks. They are made here, because JAX itself sees only words."""
    if len(values) != len(avals):
        raise RuntimeError(f"Mismatched number of outputs from callback. Expected: {len(avals)}, Actual: {len(values)}")
    arrays = [narrow(np.asarray(v)) for v in values]
    for i, (array, aval) in enumerate(zip(arrays, avals, strict=True)):
        for what in ("shape", "dtype"):
            want, found = getattr(aval, what), getattr(array, what)
            if want != found:
                raise RuntimeError(f"Incorrect output {what} for return value #{i}: Expected: {want}, Actual: {found}")
    return arrays


def kept_text(raised: Sequence[BaseException]) -> str:
    """The text of the first error that callbacks left; empty if there is none."""
    return "".join(traceback.format_exception(raised[0])) if raised else ""


def raise_kept(raised: list[BaseException]) -> None:
    """Raise the first error that callbacks left in a finished call, in JAX's type for it."""
    if raised:
        text, first, raised[:] = kept_text(raised), raised[0], ()
        raise jax.errors.JaxRuntimeError(f"INTERNAL: CpuCallback error calling callback: {text}") from first


def run_once(eqn: Eqn, operands: Sequence[Any], sizes: Mapping[str, int], raised: list[BaseException]) -> Sequence[Any]:
    """The results on the first device, neutral values on the others. Runs inside shard_map.

    The error of a callback is added to `raised`.
    """
    params: dict[str, Any] = {**eqn.params, **({"sharding": None} if "sharding" in eqn.params else {})}
    arrays = [jnp.asarray(x, v.aval.dtype) for x, v in zip(operands, eqn.invars, strict=True)]
    bind = compat.bind_with(eqn.primitive, params)
    if "callback" in params:
        callback = InWords(params["callback"], eqn)
        bind = _bind_in_words(eqn, {**params, "callback": Guarded(callback, raised) if sizes else callback})
    if not sizes:  # a single device: the error of a callback ends the call
        return bind(*arrays)

    def elsewhere(*_: Any) -> list[jax.Array]:
        kinds: Mapping[ReduceOp, Any] = {"sum": "zero", "max": "lowest"}
        neutral = [neutral_value(kinds[result_op(v.aval)], v.aval.dtype) for v in eqn.outvars]
        return [lax.full(v.aval.shape, x) for v, x in zip(eqn.outvars, neutral, strict=True)]

    return lax.cond(sum(map(lax.axis_index, sizes)) == 0, bind, elsewhere, *arrays)


def _bind_in_words(eqn: Eqn, params: Mapping[str, Any]) -> Callable[..., list[Any]]:
    more: dict[str, Any] = {}
    avals = [v.aval for v in eqn.outvars]
    if "result_avals" in params:
        more["result_avals"] = tuple(
            compat.shaped_array((*a.shape, words_of(a)), np.dtype(np.uint32)) if words_of(a) else a for a in avals
        )

    def bind(*operands: Any) -> list[Any]:
        made = compat.bind_with(eqn.primitive, {**params, **more})(*map(_to_words, operands))
        return list(map(_from_words, made, avals))

    return bind
