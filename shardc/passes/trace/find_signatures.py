"""Signatures of operations that no table has: a primitive of a new JAX release, of a library or of a user.

    y = foo x  -->  y = user_operation[fn=foo text="a b -> a b"] x

Only signatures that can be justified are offered, in this order. Nothing runs: an unknown kernel may end the process
where its operands are not what it expects.

1. A definition in JAX's terms (`compat.definition_of`): it is planned in the operation's place. One with a loop of
   unknown length is tried after 2: all devices would wait for the condition of such a loop in every iteration.
2. The batching rule. A dimension may be split if the operation is the `vmap` of the same primitive without it, because
   then no index along the dimension depends on another. That holds if JAX makes the same equation of the `vmap`.
   Dimensions are removed one by one.

Results depend on the operation alone, and are cached for the process.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import jax
import numpy as np

from shardc import compat
from shardc.compat import ClosedJaxpr, Eqn
from shardc.ir.user_operation import user_p
from shardc.sbp.signature import parse_factors

log = logging.getLogger("shardc")

ShapeDtypeStruct: TypeAlias = jax.ShapeDtypeStruct
Axes: TypeAlias = tuple[int | None, ...]

GUESSES: Final = 96
"""Ways to batch the operands, and parameters without a dimension, that are listed at most."""
TRACES: Final = 256
"""Guesses that are traced for one operation at most."""
BY_BATCHING: Final = "its batching rule"


@dataclass(frozen=True)
class Level:
    """One dimension that an operation is batched over: its number in each operand, None if an operand does not have it,
    and in each result."""

    into: Axes
    out: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class FoundOperation:
    """An operation whose signatures were found, called on arrays of any sizes along the dimensions of `levels`.

    Attributes:
      primitive, params: the operation on arrays without these dimensions; on whole arrays if there are no levels.
      levels: dimensions that it is batched over, the outermost first.
      how: the justification of the signatures.
    """

    primitive: Any
    params: Mapping[str, Any]
    levels: tuple[Level, ...]
    how: str

    def __call__(self, *operands: Any) -> list[Any]:
        fn = compat.bind_with(self.primitive, self.params)
        for level in reversed(self.levels):
            fn = jax.vmap(fn, in_axes=level.into, out_axes=list(level.out))
        return fn(*operands)

    def batched(self, into: Axes, results: int) -> FoundOperation:
        """The operation over one more dimension, the first."""
        return replace(self, levels=(Level(into, (0,) * results), *self.levels))

    def __repr__(self) -> str:
        return f"{self.primitive.name}[{', '.join(f'{k}={v}' for k, v in sorted(self.params.items()))}]"


@dataclass(frozen=True, eq=False)
class OperationSignatures:
    """Signatures that were found for an operation, in the form of `shardc.signature`.

    Attributes:
      text: factor notation.
      flops: floating-point operations of the whole operation, as far as XLA knows.
    """

    fn: FoundOperation
    text: str
    flops: float = 0.0

    @property
    def is_elementwise(self) -> bool:
        """Whether it works element by element, and so may fuse with others."""
        operands, results = parse_factors(self.text)
        return all(fs in ((), results[0]) for fs in (*operands, *results))

    def __str__(self) -> str:
        """The decorator to paste."""
        return f'@shardc.signature("{self.text}")'

    def put_into(self, eqn: Eqn) -> Eqn:
        """The equation with these signatures."""
        params = {"fn": self.fn, "text": self.text, "linear": (), "reduce": "sum", "kind": ""}
        fused = self.is_elementwise
        params |= {"flops": 0.0 if fused else self.flops, "fused": fused}
        return eqn.replace(primitive=user_p, params=params)


def found_of(eqn: Eqn) -> OperationSignatures | None:
    """The signatures that were found for an equation; None if they were not searched for."""
    fn = eqn.params.get("fn") if eqn.primitive is user_p else None
    if not isinstance(fn, FoundOperation):
        return None
    return OperationSignatures(fn, eqn.params["text"], eqn.params["flops"])


_known: Final[dict[Any, list[tuple[Mapping[str, Any], ClosedJaxpr | OperationSignatures | None]]]] = {}
"""Cache by primitive and avals: parameters, and the result."""


def find_signatures(eqn: Eqn) -> ClosedJaxpr | OperationSignatures | None:
    """The body to plan in place of an equation, or its signatures; None if nothing is justified."""
    kind = (eqn.primitive, *((a.aval.shape, a.aval.dtype, a.aval.weak_type) for a in eqn.invars))
    known = _known.setdefault((*kind, bool(jax.config.jax_enable_x64)), [])  # pyright: ignore[reportAttributeAccessIssue]
    for params, found in known:
        if _same_params(params, eqn.params):
            return found
    found = _find(eqn)
    known.append((dict(eqn.params), found))
    said = found if isinstance(found, OperationSignatures) else "replicated" if found is None else "planned as its body"
    log.info("no rule for %s: %s", eqn.primitive.name, said)
    return found


def _find(eqn: Eqn) -> ClosedJaxpr | OperationSignatures | None:
    if eqn.effects or not eqn.invars or any(compat.size_of(v.aval) == 0 for v in (*eqn.invars, *eqn.outvars)):
        return None
    body = compat.definition_of(eqn)
    if body is not None and not _has_while(body.jaxpr):
        return body
    avals = ([ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in side] for side in (eqn.invars, eqn.outvars))
    operation = _BoundPrimitive(eqn.primitive, eqn.params, *avals)
    return _found_by_batching(operation) or body


def _has_while(jaxpr: Any) -> bool:
    return any(
        e.primitive.name == "while" or any(map(_has_while, compat.jaxprs_in(e.params.values()))) for e in jaxpr.eqns
    )


# --- the batching rule -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _BoundPrimitive:
    """A primitive with its parameters, and the types of its operands and results."""

    primitive: Any
    params: Mapping[str, Any]
    operands: list[ShapeDtypeStruct]
    results: list[ShapeDtypeStruct]

    def __call__(self, *operands: Any) -> list[Any]:
        return compat.bind_with(self.primitive, self.params)(*operands)


def _found_by_batching(operation: _BoundPrimitive) -> OperationSignatures | None:
    """The signatures for the dimensions that the primitive can be batched over."""
    levels: list[Level] = []
    core, left = operation, iter(range(TRACES))
    while (found := _without_one(core, left)) is not None:
        level, core = found
        levels.append(level)
    if not levels:
        return None
    fn = FoundOperation(operation.primitive, core.params, tuple(levels), BY_BATCHING)
    factors = _factors_of(operation, levels)
    sizes = {n for a in operation.operands for n in a.shape}
    other = next(n for n in itertools.count(3) if n not in sizes)
    small = [_cut(a, fs, other) for a, fs in zip(operation.operands, factors, strict=False)]
    if all(_is_this(_traced(fn, xs), operation) for xs in (operation.operands, small)):  # whatever the sizes
        fn = FoundOperation(operation.primitive, operation.params, (), BY_BATCHING)
    return OperationSignatures(fn, _text(factors, len(operation.operands)), _flops(operation))


def _without_one(operation: _BoundPrimitive, left: Iterator[int]) -> tuple[Level, _BoundPrimitive] | None:
    """A dimension that an operation is the vmap over, and the operation without it."""
    for into in _ways_to_batch(operation.operands):
        less = [
            a if d is None else ShapeDtypeStruct((*a.shape[:d], *a.shape[d + 1 :]), a.dtype)
            for a, d in zip(operation.operands, into, strict=True)
        ]
        for params, out in _params_without(operation, into):
            if next(left, None) is None:
                return None
            fn = compat.bind_with(operation.primitive, params)
            results = _or_none(jax.eval_shape, fn, *less)
            if results is None or len(results) != len(out):
                continue
            wanted = [(*a.shape[:d], *a.shape[d + 1 :]) for a, d in zip(operation.results, out, strict=True)]
            if [tuple(y.shape) for y in results] != wanted:
                continue
            batched = jax.vmap(fn, in_axes=into, out_axes=list(out))
            if _is_this(_traced(batched, operation.operands), operation):
                types = [ShapeDtypeStruct(y.shape, y.dtype) for y in results]
                return Level(into, out), _BoundPrimitive(operation.primitive, params, less, types)
    return None


def _ways_to_batch(operands: Sequence[ShapeDtypeStruct]) -> list[Axes]:
    """For each operand the dimension to batch over, or None. Ways that batch many operands come first, and those with
    the same dimension in all."""
    ways: list[Axes] = []
    for size in dict.fromkeys(n for a in operands for n in a.shape if n > 1):
        choices = [[*(d for d, n in enumerate(a.shape) if n == size), None] for a in operands]
        ways += itertools.islice(itertools.product(*choices), GUESSES)

    def order(way: Axes) -> tuple[Any, ...]:
        dims = [d for d in way if d is not None]
        return -len(dims), len(set(dims)), dims

    return sorted((w for w in ways if any(d is not None for d in w)), key=order)[:GUESSES]


def _params_without(operation: _BoundPrimitive, into: Axes) -> Iterator[tuple[dict[str, Any], tuple[int, ...]]]:
    """Parameters that the operation may have without a dimension, and the dimension's number in the results. Numbers of
    later dimensions are one less, and lists with an entry for each dimension are shorter."""
    dim = next(d for d in into if d is not None)
    rank = max(len(a.shape) for a, d in zip(operation.operands, into, strict=True) if d is not None)
    ranks = [len(a.shape) for a in operation.results]
    for e in sorted(range(min(ranks, default=0)), key=lambda e: e != dim):
        choices = [[(k, v) for v in _values_without(v, dim, rank, e, ranks[0])] for k, v in operation.params.items()]
        for params in itertools.islice(itertools.product(*choices), GUESSES):
            yield dict(params), (e,) * len(ranks)


def _values_without(value: Any, dim: int, rank: int, out: int, out_rank: int) -> list[Any]:
    """Guesses for a parameter without dimension `dim` of `rank`, and without `out` of `out_rank` of the results."""
    if type(value) is int:
        return _distinct([value, _less(value, dim)])
    if type(value) not in (tuple, list):  # named tuples have a meaning of their own
        return [value]
    found = [value]
    if all(type(v) is int for v in value):
        found.append(type(value)(_less(v, dim) for v in value))
        found.append(type(value)(_less(v, out) for v in value))
        if dim in value:
            found.append(type(value)(_less(v, dim) for v in value if v != dim))
    for d, length in ((dim, rank), (out, out_rank)):
        if len(value) == length:
            rest = [*value[:d], *value[d + 1 :]]
            found.append(type(value)(rest))
            if all(type(v) is int for v in rest):
                found.append(type(value)(_less(v, out) for v in rest))
    return _distinct(found)


def _less(number: int, dim: int) -> int:
    return number - 1 if number > dim else number


def _distinct(values: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for v in values:
        if not any(_equal(v, u) for u in found):
            found.append(v)
    return found


def _traced(fn: Callable[..., Any], operands: Sequence[ShapeDtypeStruct]) -> Any:
    """The jaxpr of a function; None if it cannot be traced."""
    closed = _or_none(jax.make_jaxpr(fn), *operands)
    return None if closed is None else closed.jaxpr


def _is_this(jaxpr: Any, operation: _BoundPrimitive) -> bool:
    """Whether a jaxpr is exactly one operation on its own inputs."""
    if jaxpr is None or len(jaxpr.eqns) != 1:
        return False
    (eqn,) = jaxpr.eqns
    return (
        eqn.primitive is operation.primitive and _same_params(eqn.params, operation.params)
        and all(a is b for a, b in zip(eqn.invars, jaxpr.invars, strict=True))
        and all(a is b for a, b in zip(eqn.outvars, jaxpr.outvars, strict=True))
    )  # fmt: skip


def _factors_of(operation: _BoundPrimitive, levels: Sequence[Level]) -> list[list[str | None]]:
    """The factor of each dimension of each operand and result."""
    ports = [*operation.operands, *operation.results]
    factors: list[list[str | None]] = [[None] * len(a.shape) for a in ports]
    left = [list(range(len(a.shape))) for a in ports]
    for number, level in enumerate(levels):
        for port, d in enumerate((*level.into, *level.out)):
            if d is not None:
                factors[port][left[port].pop(d)] = f"d{number}"
    return factors


def _text(factors: Sequence[Sequence[str | None]], operands: int) -> str:
    words = [" ".join(f or "_" for f in port) for port in factors]
    return f"{', '.join(words[:operands])} -> {', '.join(words[operands:])}"


def _cut(aval: ShapeDtypeStruct, factors: Sequence[str | None], size: int) -> ShapeDtypeStruct:
    """The type with `size` elements in each dimension that may be split."""
    return ShapeDtypeStruct(tuple(size if f else n for n, f in zip(aval.shape, factors, strict=True)), aval.dtype)


def _or_none(fn: Callable[..., Any], *args: Any) -> Any:
    """The result of a call, or None if it raises: an unknown operation may reject a guess with any exception."""
    try:
        return fn(*args)
    except Exception as error:  # noqa: BLE001
        log.debug("a guess failed: %s", error)
        return None


def _flops(operation: _BoundPrimitive) -> float:
    """The floating-point operations that XLA counts; 0 where it does not look inside."""
    lowered = _or_none(jax.jit(lambda *xs: operation(*xs)).lower, *operation.operands)
    known = None if lowered is None else _or_none(lowered.cost_analysis)
    return max(0.0, float((known or {}).get("flops", 0.0)))


def _same_params(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, np.ndarray | jax.Array) or isinstance(b, np.ndarray | jax.Array):
        return type(a) is type(b) and np.array_equal(a, b)
    return type(a) is type(b) and bool(a == b)
