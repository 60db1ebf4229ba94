"""Whether two results are the same, as far as the operation says what its result is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardc import PlacedArray

MOVEMENT = frozenset((
    "argmax", "argmin", "argsort", "bitcast_convert_type", "broadcast_in_dim", "concatenate", "convert_element_type",
    "copy", "cummax", "cummin", "device_put", "dynamic_slice", "dynamic_update_slice", "gather", "iota", "max", "min",
    "pad", "random_bits", "random_categorical", "random_dropout", "random_permutation",
    "random_randint", "random_split", "random_uniform", "reduce_and", "reduce_max", "reduce_min", "reduce_or",
    "reshape", "rev", "rng_bit_generator", "rng_uniform", "scatter", "scatter_max", "scatter_min", "select_n",
    "slice", "sort", "split", "squeeze", "stop_gradient", "tile", "top_k", "transpose",
))  # fmt: skip
"""Groups that choose, move or draw and do not compute: equal to the last bit."""


def on_host(tree: Any) -> list[np.ndarray]:
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, PlacedArray))
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in leaves]


def is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def difference(group: str, args: Sequence[Any], got: Any, want: Any) -> str:
    """What is wrong with `got`; empty if nothing is."""
    got, want = on_host(got), on_host(want)
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        if (g.shape, g.dtype) != (w.shape, w.dtype):
            return f"result {i} is {g.dtype}{list(g.shape)} instead of {w.dtype}{list(w.shape)}"
    slack = 0.0 if group in MOVEMENT else tolerance(*(np.asarray(x).dtype for x in (*args, *want)))
    if group in UNIQUE and all(np.isfinite(x).all() for x in want):
        got, want = (UNIQUE[group](args, xs) for xs in (got, want))
    wrong = [_unlike(g, w, slack) for g, w in zip(got, want, strict=True)]
    return "; ".join(f"result {i}: {text}" for i, text in enumerate(wrong) if text)


def tolerance(*dtypes: Any) -> float:
    """Error, relative to the largest element, that another order of the same sums may cause."""
    floats = [float(jnp.finfo(d).eps) for d in dtypes if jnp.issubdtype(d, np.inexact)]
    return 64 * max(floats, default=0.0)


def _unlike(got: np.ndarray, want: np.ndarray, slack: float) -> str:
    if not jnp.issubdtype(want.dtype, np.inexact):
        return _message(got, want, got != want)
    least = float(jnp.finfo(want.dtype).tiny)
    wide = np.complex128 if want.dtype.kind == "c" else np.float64
    got, want = got.astype(wide), want.astype(wide)
    finite = np.abs(want[np.isfinite(want)])
    close = slack * (np.abs(want) + (finite.max() if finite.size else 0.0))
    with np.errstate(all="ignore"):
        flushed = (got == 0) & (np.abs(want) < least)  # a reduction to all adds zeros, and XLA then drops subnormals
        near = np.isfinite(want) & (np.abs(got - want) <= close)
        endless = ~np.isfinite(want) & np.isnan(got)  # a sum of parts: what others hold of x / 0 is 0 / 0
        same = (got == want) | flushed | near | endless
    return _message(got, want, ~same)


def _message(got: np.ndarray, want: np.ndarray, wrong: np.ndarray) -> str:
    if not wrong.any():
        return ""
    at = tuple(int(k) for k in np.argwhere(wrong)[0])
    return f"{int(wrong.sum())} of {wrong.size} differ, first at {list(at)}: {got[at]!s} instead of {want[at]!s}"


def _dagger(x: np.ndarray) -> np.ndarray:
    return np.conj(np.swapaxes(x, -1, -2))


def _svd(args: Sequence[Any], results: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The singular values, and what the vectors make of them; the vectors themselves have signs at will."""
    s, *uv = results
    if not uv:
        return [s]
    u, v = uv
    k = s.shape[-1]
    return [s, (u[..., :k] * s[..., None, :]) @ v[..., :k, :], _dagger(u) @ u, v @ _dagger(v)]


def _eigh(args: Sequence[Any], results: Sequence[np.ndarray]) -> list[np.ndarray]:
    v, w = sorted(results, key=lambda x: -x.ndim)
    return [w, (v * w[..., None, :]) @ _dagger(v), _dagger(v) @ v]


def _eig(args: Sequence[Any], results: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The eigenvalues, and the matrix with what is left of `a v - v w`, which is rounding; a vector has any phase."""
    a, (w, *vectors) = np.asarray(args[0]), results
    return [w, *(a + _left_over(a, w, v) for v in vectors)]


def _left_over(a: np.ndarray, w: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Of right eigenvectors or of left ones, whichever they are."""
    right = a @ v - v * w[..., None, :]
    left = _dagger(a) @ v - v * np.conj(w)[..., None, :]
    return right if np.abs(right).max(initial=0.0) < np.abs(left).max(initial=0.0) else left


def _qr(args: Sequence[Any], results: Sequence[np.ndarray]) -> list[np.ndarray]:
    if len(results) == 1:
        return [np.abs(results[0])]
    q, r = results
    return [q @ r, _dagger(q) @ q, np.abs(r)]


UNIQUE: dict[str, Callable[[Sequence[Any], Sequence[np.ndarray]], list[np.ndarray]]] = {
    "svd": _svd, "eigh": _eigh, "eig": _eig, "qr": _qr,
}  # fmt: skip
"""Factorizations: what of their results is unique."""
