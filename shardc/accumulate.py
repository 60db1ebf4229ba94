"""Gradient accumulation: a function over a batch as a loop over microbatches.

Microbatch j of m is rows j, j+m, j+2m, ... of the batch: contiguous slices of a split batch would have to be gathered,
strided ones lie where the batch lies.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax

from shardc import compat
from shardc.errors import ArgumentError
from shardc.passes.boundary import END, mark_cut, microbatches_p
from shardc.passes.trace import leaves_by_path, path_text

REDUCTIONS: Final = ("mean", "sum", "stack")


def accumulate(
    fn: Callable[..., Any], *, microbatches: int, in_axes: Any = None, reduce: Any = "mean"
) -> Callable[..., Any]:
    """Runs `fn` over microbatches of its batch arguments, one after the other.

    Args:
      fn: a function of a batch.
      microbatches: how many, m; it has to divide the batch.
      in_axes: for each argument the batch dimension, None for one that has none; as in jax.vmap, a tuple with one
        entry an argument, each a pytree prefix. By default every argument but the first has it at 0 (a function of one
        argument: that one).
      reduce: "mean", "sum" or "stack", or a pytree prefix of these for the results; integers need "sum" or "stack".

    Returns:
      A function like `fn`. Its results are reduced over the microbatches. `jax.grad` of it, where `fn` gives one
      scalar, runs value_and_grad in each microbatch, so that no more than one microbatch's activations live.

    Raises:
      ArgumentError: m does not divide a batch, or an integer result has no explicit reduction.

    Example:
      >>> import numpy as np
      >>> f = accumulate(lambda w, x: ((w * x) ** 2).mean(), microbatches=2)
      >>> float(f(2.0, np.arange(4.0)))
      14.0
    """
    if microbatches < 1:
        raise ArgumentError(f"accumulate: microbatches={microbatches}; it has to be 1 or more.")

    def accumulated(*args: Any) -> Any:
        axes = _axes_for(in_axes, args)
        slices, whole = _split(args, axes, microbatches)
        run = partial(_loop, fn, microbatches, reduce, jax.tree.structure(args), whole[1])
        return _with_gradient(run, fn, args, slices, whole[0], microbatches, reduce)

    return accumulated


def _axes_for(in_axes: Any, args: Sequence[Any]) -> list[int | None]:
    """The batch dimension of each leaf of the arguments."""
    if in_axes is None:
        in_axes = (0,) if len(args) == 1 else (None, *([0] * (len(args) - 1)))
    if isinstance(in_axes, int):
        in_axes = (in_axes,) * len(args)
    if len(in_axes) != len(args):
        raise ArgumentError(f"accumulate: in_axes has {len(in_axes)} entries, the function is called with {len(args)}.")
    none = lambda x: x is None  # noqa: E731
    spread = jax.tree.broadcast(tuple(in_axes), tuple(args), is_leaf=none)
    return jax.tree.leaves(spread, is_leaf=none)


def _split(
    args: Sequence[Any], axes: Sequence[int | None], m: int
) -> tuple[list[jax.Array], tuple[list[Any], list[bool]]]:
    """Leaves with a batch as [m, ...] stacks of microbatches, the other leaves, and which leaf is which."""
    leaves = leaves_by_path(tuple(args))
    flat = [
        f"argument {path_text(p)} has {jnp.ndim(x)} dimensions, and no dimension {a}"
        for (p, x), a in zip(leaves, axes, strict=True)
        if a is not None and not -jnp.ndim(x) <= a < jnp.ndim(x)
    ]
    if flat:
        raise ArgumentError(f"accumulate: {'; '.join(flat)}. Say None in in_axes for what has no batch.")
    bad = [
        f"argument {path_text(p)}: dimension {a} has {jnp.shape(x)[a]} rows"
        for (p, x), a in zip(leaves, axes, strict=True)
        if a is not None and jnp.shape(x)[a] % m
    ]
    if bad:
        raise ArgumentError(
            f"accumulate: {m} microbatches do not divide the batch: {'; '.join(bad)}. Take a divisor, or pad the batch."
        )
    slices: list[jax.Array] = []
    whole: list[Any] = []
    for (_, x), axis in zip(leaves, axes, strict=True):
        if axis is None:
            whole.append(x)
        else:
            x = jnp.moveaxis(jnp.asarray(x), axis, 0)
            x = x.reshape(x.shape[0] // m, m, *x.shape[1:]).swapaxes(0, 1)
            slices.append(microbatches_p.bind(jnp.moveaxis(x, 1, axis % (x.ndim - 1) + 1)))
    return slices, (whole, [a is not None for a in axes])


def _rebuild(tree: Any, batched: Sequence[bool], slices: Sequence[Any], whole: Sequence[Any]) -> tuple[Any, ...]:
    pools = (iter(whole), iter(slices))
    return jax.tree.unflatten(tree, [next(pools[b]) for b in batched])


def _reductions(out: Any, reduce: Any) -> list[str]:
    """The reduction of each leaf of the results."""
    kinds = jax.tree.leaves(jax.tree.broadcast(reduce, out))
    leaves = leaves_by_path(out)
    wrong = [k for k in kinds if k not in REDUCTIONS]
    if wrong:
        raise ArgumentError(f"accumulate: reduce={wrong[0]!r}; it is one of {', '.join(REDUCTIONS)}.")
    bad = [
        path_text(p) or "the result"
        for (p, x), k in zip(leaves, kinds, strict=True)
        if k == "mean" and not jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    if bad:
        raise ArgumentError(
            f"accumulate: {', '.join(bad)} is no float, so its mean over microbatches is not of its type; say "
            'reduce="sum" or "stack" for it.'
        )
    return kinds


def _loop(
    fn: Callable[..., Any], m: int, reduce: Any, tree: Any, batched: Sequence[bool], slices: Any, whole: Any
) -> Any:
    """The loop itself: a scan whose carry is the sums."""

    def once(xs: Any) -> Any:
        return fn(*_rebuild(tree, batched, xs, whole))

    out = jax.eval_shape(once, [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in slices])
    kinds = _reductions(out, reduce)
    shapes, out_tree = jax.tree.flatten(out)

    def step(sums: list[Any], xs: Any) -> tuple[list[Any], list[Any]]:
        results = jax.tree.leaves(once(xs))
        summed = [r for r, k in zip(results, kinds, strict=True) if k != "stack"]
        return [s + r for s, r in zip(sums, summed, strict=True)], [
            r for r, k in zip(results, kinds, strict=True) if k == "stack"
        ]

    zeros = [jnp.zeros(s.shape, s.dtype) for s, k in zip(shapes, kinds, strict=True) if k != "stack"]
    sums, stacks = lax.scan(step, zeros, slices, length=m)
    pools = {"stack": iter(stacks), "sum": iter(sums)}
    done = [
        next(pools["stack"]) if k == "stack" else next(pools["sum"]) / m if k == "mean" else next(pools["sum"])
        for k in kinds
    ]
    return jax.tree.unflatten(out_tree, done)


def _with_gradient(
    run: Callable[..., Any], fn: Callable[..., Any], args: Any, slices: Any, whole: Any, m: int, reduce: Any
) -> Any:
    """`run`, differentiated microbatch by microbatch where `fn` gives one float scalar."""
    batched_tree = run.args[3], run.args[4]  # type: ignore[attr-defined]

    def once(xs: Any, rest: Any) -> Any:
        return fn(*_rebuild(*batched_tree, xs, rest))

    compat.traced_as(once, fn, _names(fn, args, batched_tree[1]))
    first = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in slices]
    out = jax.eval_shape(once, first, whole)
    scalar = isinstance(out, jax.ShapeDtypeStruct) and out.shape == () and jnp.issubdtype(out.dtype, jnp.floating)
    if not scalar or reduce == "stack":
        return run(slices, whole)

    @jax.custom_vjp
    def loss(slices: Any, whole: Any) -> Any:
        return run(slices, whole)

    def forward(slices: Any, whole: Any) -> tuple[Any, Any]:
        def both(xs: Any, rest: Any) -> Any:
            value, pullback = jax.vjp(lambda xs, rest: mark_cut(once(xs, rest), END), xs, rest)
            by_slice, by_rest = pullback(jnp.ones_like(value))
            return (value, _floats(by_rest)), _floats(by_slice)

        def step(sums: Any, xs: Any) -> tuple[Any, Any]:
            results, stacked = both(xs, whole)
            return jax.tree.map(jnp.add, sums, results), stacked

        start = (jnp.zeros(out.shape, out.dtype), [jnp.zeros_like(w) if _is_float(w) else None for w in whole])
        (total, by_whole), by_slices = lax.scan(step, start, slices, length=m)
        scale = 1 / m if reduce == "mean" else 1.0
        return total * scale, (by_slices, by_whole, slices, whole, scale)

    def backward(saved: Any, cotangent: Any) -> Any:
        by_slices, by_whole, slices, whole, scale = saved
        factor = cotangent * scale
        return _cotangents(by_slices, slices, factor), _cotangents(by_whole, whole, factor)

    loss.defvjp(forward, backward)
    return loss(slices, whole)


def _names(fn: Callable[..., Any], args: Any, batched: Sequence[bool]) -> list[str]:
    """What JAX calls the leaves of the arguments, those with a batch first."""
    try:
        bound = inspect.signature(fn).bind(*args).arguments
    except (TypeError, ValueError):
        bound = {"args": args}
    named = [(name, path, x) for name, value in bound.items() for path, x in leaves_by_path(value)]
    names = [name + jax.tree_util.keystr(path) for name, path, _ in named]
    pairs = list(zip(names, batched, strict=False))
    return [n for n, b in pairs if b] + [n for n, b in pairs if not b]


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _floats(cotangents: Sequence[Any]) -> list[Any]:
    return [c if c.dtype != jax.dtypes.float0 else None for c in cotangents]


def _cotangents(gradients: Sequence[Any], primals: Sequence[Any], factor: Any) -> list[Any]:
    return [
        jnp.zeros(jnp.shape(x), jax.dtypes.float0) if g is None else (g * factor).astype(g.dtype)
        for g, x in zip(gradients, primals, strict=True)
    ]
