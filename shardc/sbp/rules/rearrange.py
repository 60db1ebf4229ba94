"""Operations that move elements without computing: reshapes, transposes, broadcasts and the like."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardc.sbp.signature import Factors, OperandWindow, Operation, Rule, Run, Site, dims, is_extended, passes, rule


def local_shape_param(name: str) -> Any:
    """A local piece that binds the primitive with the parameter `name` set to the local shape of its result."""

    def local(site: Site, *operands: Any) -> Sequence[Any]:
        return site.bind(*operands, **{name: site.result_shape()})

    return local


@rule("broadcast_in_dim")
def broadcast_in_dim(op: Operation) -> Rule:
    """Old dimensions keep their factors; a new or stretched one is split: each device builds a part of it."""
    shape = op.results[0].shape
    names = dims(len(shape))
    taken = zip(op.operands[0].shape, op.params["broadcast_dimensions"], strict=True)
    operand = tuple(names[to] if size == shape[to] else None for size, to in taken)
    return Rule((operand,), (names,), partials=passes(1, (0,)), local=local_shape_param("shape"))


@rule("reshape")
def reshape(op: Operation) -> Rule | None:
    """Row-major order cuts both shapes into runs of equal size; the outermost dimensions of a run may be split.

    Where a run is one dimension on either side it is an ordinary factor. In a run (A, B) -> (A·B) each of n devices
    holds A/n rows, which is A·B/n elements, if n divides both outermost sizes. Further axes may go on in a chain.
    """
    old, new = op.operands[0].shape, op.params["new_sizes"]
    order = op.params["dimensions"] or range(len(old))
    if 0 in old:
        return None
    operand: list[str | None] = [None] * len(old)
    result: list[str | None] = [None] * len(new)
    granule: dict[str, int] = {}
    runs: list[Run] = []
    for left, right in _runs([old[d] for d in order], new):
        run = Run(tuple(order[i] for i in left), right)
        i, j = run.operand[0], run.result[0]
        operand[i] = result[j] = name = f"d{j}"
        if old[i] != new[j]:
            granule[name] = math.gcd(old[i], new[j])
            runs.append(run)
    return Rule(
        (tuple(operand),), (tuple(result),), partials=passes(1, (0,)), granule=granule, runs=tuple(runs),
        local=local_shape_param("new_sizes"),
    )  # fmt: skip


def _runs(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The dimensions of each run in both shapes, sizes 1 left out."""
    left = [i for i, d in enumerate(old) if d != 1]
    right = [j for j, d in enumerate(new) if d != 1]
    while left:
        ours, theirs = [left.pop(0)], [right.pop(0)]
        a, b = old[ours[0]], new[theirs[0]]
        while a != b:
            if a < b:
                ours.append(left.pop(0))
                a *= old[ours[-1]]
            else:
                theirs.append(right.pop(0))
                b *= new[theirs[-1]]
        yield tuple(ours), tuple(theirs)


@rule("transpose")
def transpose(op: Operation) -> Rule:
    """Dimension i of the result is dimension permutation[i] of the operand."""
    names = dims(len(op.operands[0].shape))
    return Rule((names,), (tuple(names[p] for p in op.params["permutation"]),), partials=passes(1, (0,)))


@rule("squeeze")
def squeeze(op: Operation) -> Rule:
    """Dimensions of size 1 are removed, the others keep their factors."""
    names = without(dims(len(op.operands[0].shape)), op.params["dimensions"])
    return Rule((names,), (tuple(n for n in names if n),), partials=passes(1, (0,)))


@rule("rev")
def rev(op: Operation) -> Rule:
    """Every dimension. Along a reversed one a device reads the range that mirrors its part of the result."""
    shape, names, turned = op.operands[0].shape, dims(len(op.operands[0].shape)), op.params["dimensions"]
    if is_extended(op.operands[0].dtype):
        names = without(names, turned)
    windows = tuple(OperandWindow(0, f, 1, shape[d] - 1, step=-1) for d in turned if (f := names[d]))
    return Rule((names,), (names,), partials=passes(1, (0,)), windows=windows)


@rule("tile")
def tile(op: Operation) -> Rule:
    """Dimensions that are repeated once are factors."""
    names = tuple(f if n == 1 else None for f, n in zip(dims(len(op.params["reps"])), op.params["reps"], strict=True))
    return Rule((names,), (names,), partials=passes(1, (0,)))


@rule("stack")
def stack(op: Operation) -> Rule:
    """A new dimension, never split; the operands are partial together."""
    names, axis, n = dims(len(op.operands[0].shape)), op.params["axis"], len(op.operands)
    return Rule((names,) * n, ((*names[:axis], None, *names[axis:]),), partials=passes(n, range(n)))


@rule("unstack")
def unstack(op: Operation) -> Rule:
    """One result for each index of `axis`."""
    names = without(dims(len(op.operands[0].shape)), [op.params["axis"]])
    return Rule((names,), (tuple(n for n in names if n),) * len(op.results), partials=passes(1, (0,)))


@rule("empty")
def empty(op: Operation) -> Rule:
    """An uninitialized array: each device makes its own piece."""
    return Rule((), (dims(len(op.results[0].shape)),), local=local_shape_param("shape"))


@rule("iota")
def iota(op: Operation) -> Rule:
    """A count along one dimension; a device counts its own piece from its own offset."""
    return Rule((), (dims(len(op.results[0].shape)),), local=_count)


def _count(site: Site, *operands: Any) -> Sequence[Any]:
    dim = site.op.params["dimension"]
    offset, _ = site.result_extent(0, dim)
    indices = jax.lax.broadcasted_iota(np.int32, site.result_shape(), dim) + jnp.asarray(offset, np.int32)
    return [indices.astype(site.op.params["dtype"])]


def without(names: Factors, dimensions: Sequence[int]) -> Factors:
    """The factors with None at `dimensions`."""
    return tuple(None if i in dimensions else n for i, n in enumerate(names))
