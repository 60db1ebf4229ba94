"""Signatures of operations that no table has: a primitive of a new JAX release, of a library or of a user.

    y = foo x  -->  y = user_operation[fn=foo text="a b -> a b"] x

Only signatures that can be justified are offered, in this order:

1. A body in the parameters that gives the same results, or a definition in JAX's terms (`compat.definition_of`): the
   body is planned in its place. A body with a loop of unknown length is tried after 2: all devices would wait for the
   condition of such a loop in every iteration.
2. The batching rule. A dimension may be split if the operation is the `vmap` of the same primitive without it, because
   then no index along the dimension depends on another. That holds if JAX makes the same equation of the `vmap`, or if
   both give the same values. Dimensions are removed one by one.
3. An experiment, if shapes suggest that the operation is elementwise: every element of the results is computed from
   operands of one element and compared, on several draws and on edge values.

Partial sums pass through operands along which the derivative is the operation itself, if sums of results hold in
numbers, too. Results depend on the operation alone, and are cached for the process.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from shardc import compat
from shardc.compat import ClosedJaxpr, Eqn
from shardc.ir.user_operation import user_p
from shardc.sbp.rules.elementwise import conversion_ops
from shardc.sbp.signature import is_extended, parse_factors

log = logging.getLogger("shardc")

ShapeDtypeStruct: TypeAlias = jax.ShapeDtypeStruct
Axes: TypeAlias = tuple[int | None, ...]

DRAWS: Final = 6
"""Draws of random operands in an experiment, besides those of edge values."""
MOST_RUN: Final = 2**22
"""Elements of operands and results up to which an operation is run to compare its values."""
GUESSES: Final = 96
"""Ways to batch the operands, and parameters without a dimension, that are listed at most."""
TRACES: Final = 256
"""Guesses that are traced for one operation at most; RUNS: that are compiled and run."""
RUNS: Final = 8
BY_BATCHING: Final = "its batching rule"
BY_EXPERIMENT: Final = "experiment"


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
      linear: groups of operands in which it is linear together.
      flops: floating-point operations of the whole operation, as far as XLA knows.
    """

    fn: FoundOperation
    text: str
    linear: tuple[tuple[int, ...], ...]
    flops: float = 0.0

    @property
    def is_elementwise(self) -> bool:
        """Whether it works element by element, and so may fuse with others."""
        operands, results = parse_factors(self.text)
        return all(fs in ((), results[0]) for fs in (*operands, *results))

    def __str__(self) -> str:
        """The decorator to paste."""
        groups = ", ".join(str(g[0]) if len(g) == 1 else str(g) for g in self.linear)
        linear = f", linear=({groups}{',' if len(self.linear) == 1 else ''})" if self.linear else ""
        return f'@shardc.signature("{self.text}"{linear})'

    def put_into(self, eqn: Eqn) -> Eqn:
        """The equation with these signatures."""
        params = {"fn": self.fn, "text": self.text, "linear": self.linear, "reduce": "sum"}
        fused = self.is_elementwise
        params |= {"flops": 0.0 if fused else self.flops, "fused": fused}
        return eqn.replace(primitive=user_p, params=params)


def found_of(eqn: Eqn) -> OperationSignatures | None:
    """The signatures that were found for an equation; None if they were not searched for."""
    fn = eqn.params.get("fn") if eqn.primitive is user_p else None
    if not isinstance(fn, FoundOperation):
        return None
    return OperationSignatures(fn, eqn.params["text"], eqn.params["linear"], eqn.params["flops"])


_known: Final[dict[Any, list[tuple[Mapping[str, Any], ClosedJaxpr | OperationSignatures | None]]]] = {}
"""Cache by primitive and avals: parameters, and the result."""


def find_signatures(eqn: Eqn) -> ClosedJaxpr | OperationSignatures | None:
    """The body to plan in place of an equation, or its signatures; None if nothing is justified."""
    kind = (eqn.primitive, *((a.aval.shape, a.aval.dtype, a.aval.weak_type) for a in eqn.invars))
    known = _known.setdefault((*kind, bool(jax.config.jax_enable_x64)), [])  # pyright: ignore[reportAttributeAccessIssue]
    for params, found in known:
        if _same_params(params, eqn.params):
            return found
    with jax.ensure_compile_time_eval(), jax.debug_nans(False), jax.debug_infs(False):  # a draw may give a NaN
        found = _find(eqn)
    known.append((dict(eqn.params), found))
    said = found if isinstance(found, OperationSignatures) else "replicated" if found is None else "planned as its body"
    log.info("no rule for %s: %s", eqn.primitive.name, said)
    return found


def _find(eqn: Eqn) -> ClosedJaxpr | OperationSignatures | None:
    if eqn.effects or not eqn.invars or any(compat.size_of(v.aval) == 0 for v in (*eqn.invars, *eqn.outvars)):
        return None
    body = compat.definition_of(eqn) or _body_in_params(eqn)
    if body is not None and not _has_while(body.jaxpr):
        return body
    avals = ([ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in side] for side in (eqn.invars, eqn.outvars))
    operation = _Operation(eqn.primitive, eqn.params, *avals)
    return _found_by_batching(operation) or body or _found_by_experiment(operation)


# --- a body in the parameters ----------------------------------------------------------------------------------------


def _has_while(jaxpr: Any) -> bool:
    return any(
        e.primitive.name == "while" or any(map(_has_while, compat.jaxprs_in(e.params.values()))) for e in jaxpr.eqns
    )


def _body_in_params(eqn: Eqn) -> ClosedJaxpr | None:
    """The one jaxpr among the parameters that has the equation's types and gives the same values."""
    bodies = compat.jaxprs_in(eqn.params.values())
    if len(bodies) != 1:
        return None
    closed = bodies[0] if hasattr(bodies[0], "consts") else compat.close(bodies[0])
    sides = ((closed.jaxpr.invars, eqn.invars), (closed.jaxpr.outvars, eqn.outvars))
    if any(list(map(_type, mine)) != list(map(_type, theirs)) for mine, theirs in sides):
        return None
    avals = [ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    same = _give_the_same(compat.bind_with(eqn.primitive, eqn.params), jex.jaxpr_as_fun(closed), avals)
    return closed if same else None


def _type(atom: Any) -> tuple[Any, ...]:
    return tuple(atom.aval.shape), atom.aval.dtype


# --- the batching rule -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Operation:
    """A primitive with its parameters, and the types of its operands and results."""

    primitive: Any
    params: Mapping[str, Any]
    operands: list[ShapeDtypeStruct]
    results: list[ShapeDtypeStruct]

    def __call__(self, *operands: Any) -> list[Any]:
        return compat.bind_with(self.primitive, self.params)(*operands)


def _found_by_batching(operation: _Operation) -> OperationSignatures | None:
    """The signatures for the dimensions that the primitive can be batched over."""
    levels: list[Level] = []
    core, left = operation, _Left()
    while (found := _without_one(core, left)) is not None:
        level, core = found
        levels.append(level)
    if not levels:
        return None
    fn = FoundOperation(operation.primitive, core.params, tuple(levels), BY_BATCHING)
    factors = _factors_of(operation, levels)
    small = [_cut(a, fs, 3) for a, fs in zip(operation.operands, factors, strict=False)]
    if not _holds_in_pieces(fn, small, factors):
        return None
    if all(_is_this(_traced(fn, xs), operation) for xs in (operation.operands, small)):  # whatever the sizes
        fn = FoundOperation(operation.primitive, operation.params, (), BY_BATCHING)
    linear = _linear_groups(operation, fn, small)
    return OperationSignatures(fn, _text(factors, len(operation.operands)), linear, _flops(operation))


@dataclass
class _Left:
    """The attempts that are left for one operation."""

    traces: int = TRACES
    runs: int = RUNS


def _without_one(operation: _Operation, left: _Left) -> tuple[Level, _Operation] | None:
    """A dimension that an operation is the vmap over, and the operation without it."""
    for into in _ways_to_batch(operation.operands):
        less = [
            a if d is None else ShapeDtypeStruct((*a.shape[:d], *a.shape[d + 1 :]), a.dtype)
            for a, d in zip(operation.operands, into, strict=True)
        ]
        for params, out in _params_without(operation, into):
            if not left.traces:
                return None
            left.traces -= 1
            fn = compat.bind_with(operation.primitive, params)
            results = _or_none(jax.eval_shape, fn, *less)
            if results is None or len(results) != len(out):
                continue
            wanted = [(*a.shape[:d], *a.shape[d + 1 :]) for a, d in zip(operation.results, out, strict=True)]
            if [tuple(y.shape) for y in results] != wanted:
                continue
            batched = jax.vmap(fn, in_axes=into, out_axes=list(out))
            made = _traced(batched, operation.operands)
            same = _is_this(made, operation)
            if made is not None and not same and left.runs:
                left.runs -= 1
                same = _give_the_same(batched, operation, operation.operands)
            if same:
                types = [ShapeDtypeStruct(y.shape, y.dtype) for y in results]
                return Level(into, out), _Operation(operation.primitive, params, less, types)
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


def _params_without(operation: _Operation, into: Axes) -> Iterator[tuple[dict[str, Any], tuple[int, ...]]]:
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


def _is_this(jaxpr: Any, operation: _Operation, operands: Sequence[Any] | None = None) -> bool:
    """Whether a jaxpr is exactly one operation on its own inputs, or on `operands`."""
    if jaxpr is None or len(jaxpr.eqns) != 1:
        return False
    (eqn,) = jaxpr.eqns
    return (
        eqn.primitive is operation.primitive and _same_params(eqn.params, operation.params)
        and all(a is b for a, b in zip(eqn.invars, operands or jaxpr.invars, strict=True))
        and all(a is b for a, b in zip(eqn.outvars, jaxpr.outvars, strict=True))
    )  # fmt: skip


def _factors_of(operation: _Operation, levels: Sequence[Level]) -> list[list[str | None]]:
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


def _holds_in_pieces(
    fn: FoundOperation, operands: Sequence[ShapeDtypeStruct], factors: Sequence[Sequence[str | None]]
) -> bool:
    """Whether pieces of operands give pieces of the results. A batching rule is trusted if arrays are too large to
    run."""
    if not _can_run(operands):
        return True
    rng, count = np.random.default_rng(0), len(operands)
    run = _compiled(fn)
    names = list(dict.fromkeys(f for fs in factors for f in fs if f))
    for make in (_random, _random, _edges):
        values = [_draw(make, a, rng) for a in operands]
        whole = _or_none(run, *values)
        if whole is None:  # it does not run here
            return True
        for ends in itertools.product(((0, 2), (2, 3)), repeat=len(names)):
            at = {f: slice(*e) for f, e in zip(names, ends, strict=True)}
            cut = [tuple(slice(None) if f is None else at[f] for f in fs) for fs in factors]
            part = _or_none(run, *(x[c] for x, c in zip(values, cut, strict=False)))
            if part is None or not all(_same(p, y[c]) for p, y, c in zip(part, whole, cut[count:], strict=True)):
                return False
    return True


# --- linearity -------------------------------------------------------------------------------------------------------


def _linear_groups(
    operation: _Operation, fn: FoundOperation, small: Sequence[ShapeDtypeStruct]
) -> tuple[tuple[int, ...], ...]:
    """The groups of operands that partial sums pass through: the derivative along them is the operation itself, and
    sums that nearly cancel lose no precision in it. (The derivative of rounding to fewer bits is the identity.)"""
    real = [i for i, a in enumerate(operation.operands) if _keeps_sums(a.dtype, operation.results)]
    groups = [*((i,) for i in real), *([tuple(real)] if len(real) > 1 else [])]
    return tuple(g for g in groups if _is_own_derivative(operation, g) and _adds_up(fn, small, g))


def _keeps_sums(dtype: Any, results: Sequence[ShapeDtypeStruct]) -> bool:
    """Whether the results can represent all values of a float dtype."""
    return jnp.issubdtype(dtype, np.inexact) and all("sum" in conversion_ops(dtype, y.dtype) for y in results)


def _is_own_derivative(operation: _Operation, group: Sequence[int]) -> bool:
    def derivative(operands: Sequence[Any], tangents: Sequence[Any]) -> Any:
        def along(*some: Any) -> Any:
            every = list(operands)
            for i, x in zip(group, some, strict=True):
                every[i] = x
            return operation(*every)

        return jax.jvp(along, [operands[i] for i in group], list(tangents))[1]

    made = _or_none(jax.make_jaxpr(derivative), operation.operands, [operation.operands[i] for i in group])
    if made is None:
        return False
    jaxpr = compat.remove_dead(made.jaxpr, [True] * len(made.jaxpr.outvars))
    wanted = list(jaxpr.invars[: len(operation.operands)])
    for i, tangent in zip(group, jaxpr.invars[len(operation.operands) :], strict=True):
        wanted[i] = tangent
    return _is_this(jaxpr, operation, wanted)


def _adds_up(fn: FoundOperation, operands: Sequence[ShapeDtypeStruct], group: Sequence[int]) -> bool:
    """Whether f(a) + f(b) = f(a + b), to the precision of a and b, where a and b nearly cancel."""
    if not _can_run(operands):
        return False
    rng, run = np.random.default_rng(0), _compiled(fn)
    eps = max(float(jnp.finfo(operands[i].dtype).eps) for i in group)
    for _ in range(DRAWS):
        whole = [_draw(_random, a, rng) for a in operands]
        one, two = list(whole), list(whole)
        for i in group:
            shape, dtype = operands[i].shape, operands[i].dtype
            bits = int(jnp.finfo(dtype).nmant) - 1
            large, little = (rng.integers(-(2**b), 2**b, shape) for b in (bits, bits // 2))
            one[i], two[i], whole[i] = (x.astype(dtype) for x in (large, little - large, little))
        parts = [_or_none(run, *xs) for xs in (one, two, whole)]
        if None in parts:
            return False
        for a, b, y in zip(*parts, strict=True):  # pyright: ignore[reportArgumentType]
            wide = np.complex128 if np.dtype(y.dtype).kind == "c" else np.float64
            a, b, y = (x.astype(wide) for x in (a, b, y))
            with np.errstate(all="ignore"):
                scale = (np.abs(a) + np.abs(b) + np.abs(y)).max(initial=0.0)
                if not bool((np.abs(a + b - y) <= 32 * eps * scale).all()):
                    return False
    return True


# --- experiment ------------------------------------------------------------------------------------------------------


def _found_by_experiment(operation: _Operation) -> OperationSignatures | None:
    """The signatures for all dimensions, if each element of the results follows from the same element of the
    operands."""
    every, shape = (*operation.operands, *operation.results), tuple(operation.results[0].shape)
    fits = all(tuple(a.shape) == shape for a in operation.results)
    fits &= all(tuple(a.shape) in ((), shape) for a in operation.operands)
    if not shape or not fits or any(is_extended(a.dtype) for a in every):
        return None
    run, rng = _compiled(operation), np.random.default_rng(0)
    sizes = [tuple(range(2, 2 + len(shape))), tuple(range(1 + len(shape), 1, -1))]
    for size, make in itertools.product(sizes, [_edges] * 2 + [_random] * DRAWS):
        values = [make(size if a.shape else (), a.dtype, rng) for a in operation.operands]
        if not _is_elementwise(run, values, size, len(operation.results)):
            return None
    factors = [[f"d{i}" for i in range(len(a.shape))] for a in every]
    fn = FoundOperation(operation.primitive, operation.params, (), BY_EXPERIMENT)
    small = [ShapeDtypeStruct((3,) * len(a.shape), a.dtype) for a in operation.operands]
    return OperationSignatures(fn, _text(factors, len(operation.operands)), _linear_groups(operation, fn, small))


def _is_elementwise(run: Callable[..., Any], values: Sequence[Any], size: tuple[int, ...], results: int) -> bool:
    whole = _or_none(run, *values)
    if whole is None or [tuple(y.shape) for y in whole] != [size] * results:
        return False
    one = (1,) * len(size)
    for at in np.ndindex(size):
        part = _or_none(run, *(x[at].reshape(one) if x.shape else x for x in values))
        if part is None or not all(p.shape == one and _same(p[(0,) * len(one)], y[at])
                                   for p, y in zip(part, whole, strict=True)):  # fmt: skip
            return False
    return True


# --- runs ------------------------------------------------------------------------------------------------------------


def _or_none(fn: Callable[..., Any], *args: Any) -> Any:
    """The result of a call, or None if it raises: an unknown operation may reject a guess with any exception."""
    try:
        return fn(*args)
    except Exception as error:  # noqa: BLE001
        log.debug("a guess failed: %s", error)
        return None


def _flops(operation: _Operation) -> float:
    """The floating-point operations that XLA counts; 0 where it does not look inside."""
    lowered = _or_none(jax.jit(lambda *xs: operation(*xs)).lower, *operation.operands)
    known = None if lowered is None else _or_none(lowered.cost_analysis)
    return max(0.0, float((known or {}).get("flops", 0.0)))


def _compiled(fn: Callable[..., Any]) -> Callable[..., list[Any]]:
    """The function, compiled, with NumPy results; keys come as their words."""
    jitted = jax.jit(lambda *xs: [jax.random.key_data(y) if is_extended(y.dtype) else y for y in fn(*xs)])
    return lambda *xs: [np.asarray(y) for y in jitted(*xs)]


def _can_run(avals: Sequence[ShapeDtypeStruct]) -> bool:
    return sum(math.prod(a.shape) for a in avals) <= MOST_RUN


def _give_the_same(one: Callable[..., Any], two: Callable[..., Any], operands: Sequence[ShapeDtypeStruct]) -> bool:
    """Whether two functions give the same values on some draws."""
    if not _can_run(operands):
        return False
    rng = np.random.default_rng(0)
    runs = _compiled(one), _compiled(two)
    for make in (_random, _random, _edges):
        values = [_draw(make, a, rng) for a in operands]
        a, b = (_or_none(run, *values) for run in runs)
        if a is None or b is None or len(a) != len(b) or not all(map(_same, a, b)):
            return False
    return True


def _draw(make: Callable[..., np.ndarray], aval: ShapeDtypeStruct, rng: np.random.Generator) -> Any:
    """Values of a type; keys are always random."""
    if not is_extended(aval.dtype):
        return make(tuple(aval.shape), aval.dtype, rng)
    words = jax.eval_shape(jax.random.key_data, aval)
    data = rng.integers(0, 2**32, words.shape, np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(data), impl=compat.generator_of(aval.dtype))


def _random(shape: tuple[int, ...], dtype: Any, rng: np.random.Generator) -> np.ndarray:
    """Random operands of several scales, or positive ones: functions may be defined or behave differently there."""
    kind = np.dtype(dtype).kind
    if kind == "b":
        return rng.integers(0, 2, shape).astype(dtype)
    if jnp.issubdtype(dtype, np.integer):
        info = jnp.iinfo(dtype)
        top = min(int(info.max), 10 ** int(rng.integers(1, 10)))
        return rng.integers(max(int(info.min), -top), top, shape, endpoint=True).astype(dtype)
    scale = 10.0 ** int(rng.integers(-2, 3))
    x = np.asarray(rng.normal(size=shape) * scale)
    if rng.integers(0, 2):
        x = np.abs(x)
    if kind == "c":
        x = x + 1j * rng.normal(size=shape) * scale
    return x.astype(dtype)


def _edges(shape: tuple[int, ...], dtype: Any, rng: np.random.Generator) -> np.ndarray:
    """Operands at which functions change: zeros, ones, the largest and the least, and values that are not finite."""
    kind = np.dtype(dtype).kind
    if kind == "b":
        values: list[Any] = [False, True]
    elif jnp.issubdtype(dtype, np.integer):
        info = jnp.iinfo(dtype)
        low, high = int(info.min), int(info.max)
        values = [v for v in (low, high, high // 2, -2, -1, 0, 1, 2) if low <= v <= high]
    else:
        info = jnp.finfo(dtype)
        top, tiny, eps = float(info.max), float(info.tiny), float(info.eps)
        values = [0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1 + eps, top, -top, tiny, -tiny, math.inf, -math.inf, math.nan]
    every = np.resize(rng.permutation(np.asarray(values)), max(math.prod(shape), 1))
    with np.errstate(all="ignore"):
        return every[: math.prod(shape)].reshape(shape).astype(dtype)


def _same(a: Any, b: Any) -> bool:
    """Whether two results are equal, up to the last bits of floats."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not jnp.issubdtype(a.dtype, np.inexact):
        return bool((a == b).all())
    wide = np.complex128 if np.dtype(a.dtype).kind == "c" else np.float64
    info = jnp.finfo(a.dtype)
    with np.errstate(all="ignore"):
        a, b = a.astype(wide), b.astype(wide)
        return np.allclose(a, b, rtol=16 * float(info.eps), atol=float(info.tiny), equal_nan=True)


def _same_params(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, np.ndarray | jax.Array) or isinstance(b, np.ndarray | jax.Array):
        return type(a) is type(b) and np.array_equal(a, b)
    return type(a) is type(b) and bool(a == b)
