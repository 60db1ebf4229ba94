"""`shardc.signature`: the sbp signatures of a user's own operation, in factor notation."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, Protocol, runtime_checkable

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from shardc import compat
from shardc.errors import PlacementError, did_you_mean
from shardc.ir.nested import trips_of
from shardc.sbp.placement import REDUCE_OPS, ReduceOp
from shardc.sbp.signature import Factors, Neutral, Operation, Rule, find_rule, linear, parse_factors, rule

user_p: Final = Primitive("user_operation")
user_p.multiple_results = True


def _run(*operands: Any, fn: Callable[..., Any], **_: Any) -> list[Any]:
    return list(jax.tree.leaves(fn(*operands)))


def _abstract(*avals: Any, fn: Callable[..., Any], **_: Any) -> list[Any]:
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    return [compat.shaped_array(s.shape, s.dtype) for s in jax.tree.leaves(jax.eval_shape(fn, *shapes))]


def _check(text: str, operands: Sequence[Any], results: Sequence[Any]) -> None:
    """Check the notation against the shapes."""
    bad: list[str] = []
    sizes: dict[str, int] = {}
    for side, named, avals in zip(("operand", "result"), parse_factors(text), (operands, results), strict=True):
        if len(named) != len(avals):
            bad.append(f"{len(named)} {side}s are named, the operation has {len(avals)}")
            continue
        for i, (factors, aval) in enumerate(zip(named, avals, strict=True)):
            if len(factors) != len(aval.shape):
                names = " ".join(f or "_" for f in factors)
                bad.append(f"{side} {i} has shape {tuple(aval.shape)}, {names!r} names {len(factors)} dimensions")
                continue
            for factor, size in zip(factors, aval.shape, strict=True):
                if factor and sizes.setdefault(factor, size) != size:
                    bad.append(f"{side} {i}: {factor} is {size}, elsewhere {sizes[factor]}")
    if bad:
        raise PlacementError(f"shardc.signature({text!r}): " + "; ".join(bad) + ".")


def _jvp(primals: Any, tangents: Any, *, fn: Callable[..., Any], **_: Any) -> Any:
    """Differentiate the body: the result is placed by the rules of its operations."""
    tangents = [ad.instantiate_zeros(t) for t in tangents]
    return jax.jvp(functools.partial(_run, fn=fn), tuple(primals), tuple(tangents))


def _batch(args: Any, dims: Any, *, fn: Callable[..., Any], text: str, flops: float, **params: Any) -> Any:
    """Batch the operation: the new dimension is a factor of the operands that have it and of all results."""
    into = tuple(None if d is None else 0 for d in dims)
    operands, results = parse_factors(text)
    name = next(n for n in (f"vmap{i}" for i in itertools.count()) if all(n not in fs for fs in (*operands, *results)))
    batched = [(name, *fs) if i == 0 else fs for fs, i in zip(operands, into, strict=True)]
    sides = (batched, [(name, *fs) for fs in results])
    text = " -> ".join(", ".join(" ".join(f or "_" for f in fs) for fs in side) for side in sides)
    fn = fn.batched(into, len(results)) if isinstance(fn, Batches) else jax.vmap(fn, in_axes=into)
    args = [x if d is None else jax.numpy.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]
    rows = next(x.shape[0] for x, i in zip(args, into, strict=True) if i == 0)
    out = user_p.bind(*args, fn=fn, text=text, flops=rows * flops, **params)
    return out, [0] * len(out)


@runtime_checkable
class Batches(Protocol):
    """A function with a batching rule of its own."""

    def batched(self, into: tuple[int | None, ...], results: int) -> Callable[..., Any]:
        """The function batched over dimension 0; `into` is None for an operand without that dimension."""
        ...


user_p.def_impl(_run)
user_p.def_abstract_eval(_abstract)
mlir.register_lowering(user_p, mlir.lower_fun(_run, multiple_results=True))
ad.primitive_jvps[user_p] = _jvp
batching.primitive_batchers[user_p] = _batch


@rule("user_operation")
def _user_rule(op: Operation) -> Rule:
    """The declared rule. A summed factor of an operand in which the operation is not linear has no neutral value: it is
    split only into equal parts. The operation is not fused, and so goes through its memory once."""
    operands, results = parse_factors(op.params["text"])
    groups: tuple[tuple[int, ...], ...] = op.params["linear"]
    reduce: ReduceOp = op.params["reduce"]
    kept = {f for factors in results for f in factors}
    reduced: dict[str, ReduceOp] = {f: reduce for factors in operands for f in factors if f and f not in kept}
    linear_in = {i for group in groups for i in group}
    neutral: dict[int, Neutral] = {
        i: "zero" for i, factors in enumerate(operands) if i in linear_in and any(f in reduced for f in factors)
    }
    return Rule(
        operands,
        results,
        reduced=reduced,
        partials=linear(len(operands), *groups),
        neutral=neutral,
        granule=_granules(op, operands, reduced, neutral),
        flops=op.params["flops"],
        passes=0.0 if op.params["fused"] else 1.0,
        kind=op.params["kind"],
    )


def _granules(
    op: Operation, operands: Sequence[Factors], reduced: dict[str, ReduceOp], neutral: dict[int, Neutral]
) -> dict[str, int]:
    found: dict[str, int] = {}
    for i, (factors, aval) in enumerate(zip(operands, op.operands, strict=True)):
        if i not in neutral:
            found |= {f: size for f, size in zip(factors, aval.shape, strict=True) if f in reduced}
    return found


def _operands(text: Any) -> Sequence[Factors]:
    """The factors of the operands."""
    if not isinstance(text, str):
        raise PlacementError(
            f"shardc.signature wants the factors of its operands and results, got {text!r}; write "
            '@shardc.signature("b d, d f -> b f") above the function.'
        )
    return parse_factors(text)[0]


def _flops_of(jaxpr: Any) -> float:
    """Floating-point operations of the products, factorizations and the like in a body."""
    total = 0.0
    for eqn in jaxpr.eqns:
        bodies = [getattr(b, "jaxpr", b) for b in compat.jaxprs_in(eqn.params.values())]
        operands, results = (tuple(v.aval for v in side) for side in (eqn.invars, eqn.outvars))
        own = 0.0 if bodies else find_rule(Operation(eqn.primitive.name, operands, results, eqn.params)).flops
        total += own + trips_of(eqn) * sum(map(_flops_of, bodies))
    return total


@compat.api_boundary
def signature(
    text: str,
    *,
    linear: Sequence[int | Sequence[int]] = (),
    reduce: ReduceOp = "sum",
    flops: float | Callable[..., float] | None = None,
    kind: Literal["", "attention"] = "",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare how a user's own operation (a Pallas kernel, a custom call) may be placed.

    Args:
      text: factor notation: one group of names for each operand, an arrow, one for each result. A factor in operands
        and results may be split; one in operands only is reduced away, and may be split too, leaving a partial value;
        `_` is a dimension that is never split.
      linear: operands in which the operation is linear, each by its number, so that a partial sum may pass through it;
        a tuple of numbers means linear in these together.
      reduce: the op by which factors are reduced away: "sum", "max" or "min".
      flops: its floating-point operations on whole operands, or a function of the operands that returns them. By
        default those of the products and factorizations in its body, which says little about a kernel.
      kind: "attention" for a kernel of attention, which some machines run slower than products (`Topology.shares`).

    Returns:
      A decorator. The function takes arrays by position, and runs on any pieces as it does on the whole.

    Raises:
      PlacementError: the text is not in factor notation, or does not fit the shapes; `linear` names an operand that is
        not there; no such `reduce`; no such `kind`; a call gives operands by name.

    Examples:
      >>> import numpy as np
      >>> @signature("b d, d f -> b f", linear=(0, 1))
      ... def matmul(x, w):
      ...     return x @ w
      >>> matmul(np.ones((2, 3)), np.ones((3, 4))).shape
      (2, 4)
    """
    count = len(_operands(text))
    groups = tuple((g,) if isinstance(g, int) else tuple(g) for g in linear)
    if unknown := [i for g in groups for i in g if i not in range(count)]:
        raise PlacementError(
            f"shardc.signature({text!r}): linear={linear} names operand {unknown[0]}; there are {count}, numbered from "
            "0."
        )
    if reduce not in REDUCE_OPS:
        near = did_you_mean(str(reduce), REDUCE_OPS) or " For a mean, divide the sum after the call."
        raise PlacementError(
            f"shardc.signature({text!r}): reduce={reduce!r}; what is reduced away is a sum, max or min.{near}"
        )
    if kind not in ("", "attention"):
        raise PlacementError(f'shardc.signature({text!r}): kind={kind!r}; write kind="attention", or leave it out.')

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        @compat.api_boundary
        def call(*operands: Any, **named: Any) -> Any:
            if named:
                raise PlacementError(
                    f"shardc.signature({text!r}): operands are given by position, got {', '.join(named)} by name."
                )
            arrays = [x if isinstance(x, compat.Tracer) else jax.numpy.asarray(x) for x in operands]
            closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*arrays)
            results, structure = jax.tree.flatten(shapes)
            _check(text, arrays, results)
            work = flops(*arrays) if callable(flops) else _flops_of(closed.jaxpr) if flops is None else flops
            out = user_p.bind(
                *arrays, fn=fn, text=text, linear=groups, reduce=reduce, flops=float(work), fused=False,
                kind=kind,
            )  # fmt: skip
            return jax.tree.unflatten(structure, out)

        return call

    return decorate
