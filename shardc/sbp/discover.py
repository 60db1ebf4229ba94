"""`shardc.discover`: the signatures of an operation, found by experiment.

The inputs are cut in two as a signature says, the operation runs on both parts, and the joined results are compared
with the result of the whole, on several draws of random data.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from shardc import compat
from shardc.errors import ArgumentError
from shardc.sbp.placement import REDUCE_OPS, SBP, B, P, S
from shardc.sbp.signature import Signature, is_extended

Parts: TypeAlias = tuple[Any, Any]
log = logging.getLogger("shardc")

_JOIN: Final = {"sum": np.add, "max": np.maximum, "min": np.minimum}


@dataclass(frozen=True)
class Discovery:
    """The result of `discover`.

    Attributes:
      signatures: combinations that held on one axis, except all-B. Operands are split, or are partial sums.
      text: the factors of the split signatures, in the notation of `shardc.signature`.
      linear: groups of operands through which a partial sum passes.
      reduce: the op that reduces factors that no result has.
      left_out: signatures that this notation cannot express together with the others.
    """

    signatures: tuple[Signature, ...]
    text: str
    linear: tuple[tuple[int, ...], ...]
    reduce: str
    left_out: tuple[Signature, ...]

    def __str__(self) -> str:
        """The decorator to paste, then the signatures."""
        groups = ", ".join(str(g[0]) if len(g) == 1 else str(g) for g in self.linear)
        linear = f", linear=({groups}{',' if len(self.linear) == 1 else ''})" if self.linear else ""
        reduce = f', reduce="{self.reduce}"' if self.reduce != "sum" else ""
        lines = [f'@shardc.signature("{self.text}"{linear}{reduce})', *(f"  {s}" for s in self.signatures)]
        lines += [f"  {s}    not expressed by the line above" for s in self.left_out]
        return "\n".join(lines)


@compat.api_boundary
def discover(
    fn: Callable[..., Any], *args: Any, draws: int = 4, seed: int = 0,
    draw: Callable[[np.random.Generator], Sequence[Any]] | None = None,
) -> Discovery:  # fmt: skip
    """Find the sbp signatures of an operation by experiment.

    The signatures held on all draws; this is no proof. Those that need more than the pieces (a halo, an offset) are not
    found.

    Args:
      fn: takes arrays by position, of any sizes; its results depend on their values and shapes alone.
      args: arrays of the sizes to try; keys are allowed. Dimensions of one element cannot be cut.
      draws: number of tries of each combination, each with other data.
      seed: of the data.
      draw: makes the arguments of one draw, for arguments whose elements cannot be reordered (a matrix that must stay
        positive definite). By default the elements of `args` are shuffled, and keys are drawn.

    Raises:
      ArgumentError: `fn` is no function.

    Returns:
      A `Discovery`; printed, it is the `@shardc.signature(...)` to paste.

    Examples:
      >>> import numpy as np
      >>> print(discover(lambda x, w: x @ w, np.ones((4, 6)), np.ones((6, 2))).text)
      a b, b c -> a c
    """
    if not callable(fn):  # pyright: ignore[reportUnnecessaryComparison]
        raise ArgumentError(f"shardc.discover wants a function and its arguments, got {fn!r}.")
    rng = np.random.default_rng(seed)
    given = [np.asarray(a) if not is_extended(jnp.asarray(a).dtype) else a for a in args]
    tries = [list(draw(rng)) if draw else [_shuffled(a, rng) for a in given] for _ in range(draws)]
    wholes = [_results(fn, values) for values in tries]
    found: list[Signature] = []
    for combo in _combos(given):
        joins = _joins(fn, combo, tries, wholes, rng)
        if joins is not None:
            found += [Signature(combo, results) for results in joins]
    return _in_notation(given, wholes[0], found)


def _shuffled(x: Any, rng: np.random.Generator) -> Any:
    if not isinstance(x, np.ndarray):
        data = rng.integers(0, 2**32, jax.random.key_data(x).shape, np.uint32)
        return jax.random.wrap_key_data(jnp.asarray(data), impl=jax.random.key_impl(x))
    x = rng.permuted(x.ravel()).reshape(x.shape)
    if x.dtype.kind == "f" or x.dtype.kind == "c":  # equal elements would hide differences
        return (x * rng.uniform(0.7, 1.0, x.shape)).astype(x.dtype)
    return x


def _results(fn: Callable[..., Any], values: Sequence[Any]) -> list[np.ndarray]:
    return [_on_host(y) for y in jax.tree.leaves(fn(*map(jnp.asarray, values)))]


def _on_host(x: Any) -> np.ndarray:
    """The array; for keys, one whose elements are the bytes of each key."""
    if not is_extended(x.dtype):
        return np.asarray(x)
    data = np.ascontiguousarray(jax.random.key_data(x))
    return data.view(np.dtype((np.void, data.itemsize * data.shape[-1])))[..., 0]


def _combos(args: Sequence[Any]) -> Iterator[tuple[SBP, ...]]:
    """Operand placements: splits along dimensions, or partial sums."""
    cuts: list[list[SBP]] = [[B, *(S(d) for d, n in enumerate(np.shape(x)) if n > 1)] for x in args]
    sums: list[list[SBP]] = [[B, P()] if _may_be_partial(x, "sum") else [B] for x in args]
    for choices in (cuts, sums):
        yield from itertools.islice(itertools.product(*choices), 1, None)


def _may_be_partial(x: Any, op: str) -> bool:
    return isinstance(x, np.ndarray) and x.dtype.kind in ("iufc" if op == "sum" else "biuf")


def _parts(x: Any, sbp: SBP, rng: np.random.Generator) -> Parts:
    """The pieces of a value on two devices."""
    if isinstance(sbp, S):
        half = -(-x.shape[sbp.dim] // 2)
        before = (slice(None),) * sbp.dim
        return x[(*before, slice(half))], x[(*before, slice(half, None))]
    if not isinstance(sbp, P):
        return x, x
    if x.dtype.kind in "iu":  # any part will do, as sums wrap
        part = rng.integers(np.iinfo(x.dtype).min, np.iinfo(x.dtype).max, x.shape, x.dtype, endpoint=True)
    else:
        part = rng.normal(size=x.shape).astype(x.dtype)
    with np.errstate(all="ignore"):
        return part, (x - part).astype(x.dtype)


def _joins(
    fn: Callable[..., Any], combo: Sequence[SBP], tries: Sequence[Sequence[Any]],
    wholes: Sequence[Sequence[np.ndarray]], rng: np.random.Generator,
) -> list[tuple[SBP, ...]] | None:  # fmt: skip
    """All result placements that hold for these operand placements; None if there are none."""
    left: list[list[SBP]] | None = None
    for values, whole in zip(tries, wholes, strict=True):
        parts = zip(*(_parts(x, sbp, rng) for x, sbp in zip(values, combo, strict=True)), strict=True)
        try:
            one, two = (_results(fn, part) for part in parts)
        except Exception as error:  # noqa: BLE001  # a function that does not take these shapes may raise anything
            log.debug("%s: %s", ", ".join(map(str, combo)), error)
            return None
        if not len(one) == len(two) == len(whole):
            return None
        if left is None:
            left = [[B, *map(S, range(y.ndim)), *map(P, REDUCE_OPS)] for y in whole]
        left = [
            [sbp for sbp in choices if _holds(sbp, a, b, y)]
            for choices, a, b, y in zip(left, one, two, whole, strict=True)
        ]
        if not all(left):
            return None
    assert left is not None
    best = [choices[:1] if choices[0] == B else choices for choices in left]  # B is the strongest
    return list(itertools.product(*best))


def _holds(sbp: SBP, a: np.ndarray, b: np.ndarray, whole: np.ndarray) -> bool:
    """Whether two parts form the whole in this way."""
    if isinstance(sbp, S):
        d = sbp.dim
        rest = a.shape[:d] == b.shape[:d] and a.shape[d + 1 :] == b.shape[d + 1 :]
        return rest and bool(a.shape[d]) and bool(b.shape[d]) and _close(np.concatenate([a, b], d), whole)
    if a.shape != whole.shape or b.shape != whole.shape:
        return False
    if not isinstance(sbp, P):
        return _close(a, whole) and _close(b, whole)
    if not _may_be_partial(whole, sbp.op):
        return False
    with np.errstate(all="ignore"):
        return _close(_JOIN[sbp.op](a, b), whole)


def _close(got: np.ndarray, want: np.ndarray) -> bool:
    if got.shape != want.shape or not jnp.issubdtype(want.dtype, np.inexact):
        return got.shape == want.shape and bool((got == want).all())
    wide = np.complex128 if want.dtype.kind == "c" else np.float64
    slack = 64 * float(jnp.finfo(want.dtype).eps)
    got, want = got.astype(wide), want.astype(wide)
    scale = max(1.0, float(np.abs(want).max(initial=0.0)))
    return bool(np.isfinite(want).all()) and np.allclose(got, want, rtol=slack, atol=slack * scale)


def _in_notation(args: Sequence[Any], results: Sequence[np.ndarray], found: Sequence[Signature]) -> Discovery:
    factors: list[list[int | None]] = [[None] * np.ndim(x) for x in (*args, *results)]
    left_out: list[Signature] = []
    linear: list[tuple[int, ...]] = []
    reduce: str | None = None
    for number, s in enumerate(found):
        group = tuple(i for i, sbp in enumerate(s.operands) if isinstance(sbp, P))
        if group and all(r == P() for r in s.results):
            linear.append(group)
            continue
        split = [(port, sbp.dim) for port, sbp in enumerate((*s.operands, *s.results)) if isinstance(sbp, S)]
        kept, ops = any(port >= len(args) for port, _ in split), {r.op for r in s.results if isinstance(r, P)}
        one_way = not ops if kept else len(ops) == 1 and ops <= {reduce or next(iter(ops))} and B not in s.results
        if group or not one_way or any(factors[port][dim] is not None for port, dim in split):
            left_out.append(s)
            continue
        reduce = next(iter(ops), reduce)
        for port, dim in split:
            factors[port][dim] = number
    text = _factor_text(factors, len(args))
    return Discovery(tuple(found), text, tuple(sorted(linear)), reduce or "sum", tuple(left_out))


def _factor_text(factors: Sequence[Sequence[int | None]], operands: int) -> str:
    """The notation of numbered factors, operands first, with a letter for each factor."""
    names: dict[int, str] = {}
    for factor in itertools.chain(*factors):
        if factor is not None:
            names.setdefault(factor, chr(ord("a") + len(names)))
    words = [" ".join("_" if f is None else names[f] for f in port) for port in factors]
    return f"{', '.join(words[:operands])} -> {', '.join(words[operands:])}"
