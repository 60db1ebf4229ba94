"""Gradient accumulation: a function over a batch as a loop over microbatches.

Microbatch j of m is rows j, j+m, j+2m, ... of the batch: contiguous slices of a split batch would have to be gathered,
strided ones stay on their devices.

    scan over j: results, state = fn(rows[j], keys[j], whole, state)   -->   results reduced over j, the last state

State passes from a microbatch to the next: a result that `reduce` names an argument for, and writes of the function to
objects among its arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardc import compat
from shardc.compat import short_text
from shardc.errors import ArgumentError, all_offenders
from shardc.ir.boundary import END, mark_cut
from shardc.passes.accumulate.microbatches import CARRY, MicrobatchCall, Split, microbatch_call
from shardc.passes.trace.trace import is_array, leaves_by_path, path_text
from shardc.sbp.signature import is_extended

REDUCTIONS: Final = ("mean", "sum", "stack", "last")


@compat.api_boundary
def accumulate(
    fn: Callable[..., Any],
    *,
    microbatches: int,
    in_axes: Any = None,
    reduce: Any = None,
    keys: str | Sequence[str] = (),
) -> Callable[..., Any]:
    """Runs `fn` over microbatches of its batch arguments, one after the other.

    Microbatch j of m is the rows j, j+m, j+2m, ..., so that the parts of a split batch lie where the batch lies.

    Writes of `fn` to nnx modules, optimizers, metrics and random streams among its arguments are visible in the next
    microbatch, and afterwards, as in a loop over the microbatches; outside of a `shardc.function` after
    `import shardc.flax`.

    Args:
      fn: a function of a batch. Its arguments may hold None, and leaves that are no arrays.
      microbatches: their number m, which has to divide the batch.
      in_axes: for each argument the batch dimension, None for one that has none; as in jax.vmap, a tuple with one
        entry an argument, each a pytree prefix, or a dict of these by name, the others None. By default every argument
        but the first has it at 0 (a function of one argument: that one). Flags, keys, carried arguments and modules
        have none.
      reduce: a pytree prefix for the results of
        "mean" or "sum" over the microbatches,
        "stack", all of them in a new first dimension,
        "last", that of the last microbatch, or
        "carry:state", which is the last too, and the argument `state` of the next microbatch.
        By default the mean, for floats that are no rows of a batch; other results need an explicit reduction.
      keys: names of arguments that hold random keys: microbatch j gets `jax.random.split(key, m)[j]`.

    Returns:
      A function like `fn`. Its results are reduced over the microbatches. `jax.grad` of it, where `fn` gives one
      scalar, runs value_and_grad in each microbatch, so that no more than one microbatch's activations live.

    Raises:
      ArgumentError: m does not divide a batch, a result has no clear reduction, or a carried result is not like its
        argument.

    Examples:
      >>> import numpy as np
      >>> f = accumulate(lambda w, x: ((w * x) ** 2).mean(), microbatches=2)
      >>> float(f(2.0, np.arange(4.0)))
      14.0
      >>> def count(seen, x):
      ...     return seen + x.size, x.sum()
      >>> counted = accumulate(count, microbatches=2, reduce=("carry:seen", "sum"))
      >>> seen, total = counted(1, np.ones(4))
      >>> int(seen), float(total)
      (5, 4.0)

      A gradient with an auxiliary result, whose parts are reduced in different ways, and a random key:

      >>> def loss_of(w, mean, x, key):
      ...     x = x * jax.random.bernoulli(key, 0.9, x.shape)
      ...     return ((x @ w) ** 2).mean(), (0.9 * mean + 0.1 * x.mean(0), {"largest": x.max()})
      >>> run = accumulate(
      ...     jax.value_and_grad(loss_of, has_aux=True), microbatches=4, in_axes={"x": 0}, keys="key",
      ...     reduce=((None, ("carry:mean", "stack")), None),
      ... )
      >>> (loss, (mean, more)), grads = run(np.ones((8, 2)), np.zeros(8), np.ones((16, 8)), jax.random.key(0))
      >>> grads.shape, mean.shape, more["largest"].shape
      ((8, 2), (8,), (4,))
    """
    if isinstance(microbatches, bool) or not isinstance(microbatches, int | np.integer) or microbatches < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(f"accumulate: microbatches={microbatches!r}; it has to be a whole number of 1 or more.")
    split = Split(microbatches, in_axes, reduce, (keys,) if isinstance(keys, str) else tuple(keys))

    @functools.wraps(fn, updated=())
    def accumulated(*args: Any, **kwargs: Any) -> Any:
        return _AccumulationLoop(microbatch_call(fn, args, kwargs, split), microbatches, reduce).run()

    return accumulated


@dataclass(frozen=True)
class _Result:
    """The results of `fn`, as it was traced.

    Attributes:
      avals: of its arrays, then of those that the objects hold.
      tree: of the result.
      fixed: for each leaf of the result None, or the leaf if it is no array.
      kinds: of each array its reduction; the carried ones are "state".
      written: numbers of the arrays of the objects that are written to.
    """

    avals: list[Any]
    tree: Any
    fixed: list[Any]
    kinds: list[str]
    written: list[int]


class _AccumulationLoop:
    def __init__(self, call: MicrobatchCall, m: int, reduce: Any) -> None:
        self.call, self.m, self.reduce = call, m, reduce
        self.rows, self.whole, self.given = (call.pools[p] for p in ("row", "whole", "state"))
        self.held = list(call.opened.leaves) if call.opened is not None else []
        self.around: Sequence[Any] = ()  # the values that `fn` closes over
        self.result = self._trace()
        self.start = [jnp.asarray(x) for x in self.given] + [self.held[i] for i in self.result.written]

    def run(self) -> Any:
        result, call = self.result, self.call
        scalar = len(result.fixed) == 1 and result.fixed == [None] and jax.tree_util.treedef_is_leaf(result.tree)
        alone = scalar and not self.start and result.avals[0].shape == () and result.kinds[0] in ("mean", "sum")
        if alone and jnp.issubdtype(result.avals[0].dtype, jnp.floating):
            return self._with_gradient()
        done, state = self._loop(self.rows, self.whole)
        if call.opened is not None:
            call.opened.write(dict(zip(result.written, state[len(self.given) :], strict=True)))
        return self._pack(done)

    def _trace(self) -> _Result:
        found: list[Any] = []

        def once(rows: Any, whole: Any, state: Any, held: Any) -> list[Any]:
            out, after = self.call(rows, whole, state, held)
            arrays = [x for _, x in leaves_by_path(out) if is_array(x)]
            out = jax.tree.map(_without_tracer, out)
            found[:] = [out, leaves_by_path(out), len(arrays)]
            return [*arrays, *after]

        call, held = self.call, self.call.opened.paths if self.call.opened is not None else ()
        compat.traced_as(once, call.fn, [*call.leaf_names, *held])
        first = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in self.rows]
        closed = jax.make_jaxpr(once)(first, self.whole, self.given, self.held)
        out, leaves, count = found
        jaxpr, self.around = closed.jaxpr, closed.consts
        inputs = jaxpr.invars[len(jaxpr.invars) - len(self.held) :] if self.held else []
        written = [i for i, (a, v) in enumerate(zip(inputs, jaxpr.outvars[count:], strict=True)) if a is not v]
        avals = [v.aval for v in jaxpr.outvars]
        fixed = [None if is_array(x) else x for _, x in leaves]
        kinds = self._kinds(out, avals)
        return _Result(avals, jax.tree.structure(out), fixed, kinds, self._checked(written, avals[count:]))

    def _checked(self, written: list[int], avals: Sequence[Any]) -> list[int]:
        """`written`; raises if a written array has another type than before."""
        call = self.call
        assert call.opened is not None or not written
        self._refuse_others((call.opened.paths[i], self.held[i], avals[i]) for i in written if call.opened is not None)
        return written

    def _refuse_others(self, pairs: Any) -> None:
        wrong = [
            f"{path}: {_text(x)} goes into a microbatch, {_text(aval)} comes out."
            for path, x, aval in pairs
            if (jnp.shape(x), jnp.result_type(x)) != (aval.shape, aval.dtype)
        ]
        if wrong:
            raise ArgumentError(
                all_offenders(
                    f"accumulate: {self.call.where}: what microbatches carry has to keep its shape and dtype",
                    wrong,
                )
            )

    def _kinds(self, out: Any, avals: Sequence[Any]) -> list[str]:
        """The reduction of each array of the results."""
        where = self.call.where
        words, prefix = jax.tree.flatten(self.reduce, is_leaf=lambda x: x is None)
        try:
            parts = prefix.flatten_up_to(out)
        except (ValueError, TypeError) as error:
            raise ArgumentError(f"accumulate: {where}: reduce is no prefix of the results: {error}") from None
        known = [w for w in words if w is not None and w not in REDUCTIONS and not str(w).startswith(CARRY)]
        if known:
            raise ArgumentError(
                f'accumulate: reduce={known[0]!r}; it is one of {", ".join(REDUCTIONS)}, or "{CARRY}" with the name of '
                "an argument."
            )
        wide = iter(
            zip(
                [w for w, part in zip(words, parts, strict=True) for _ in jax.tree.leaves(part)],
                leaves_by_path(out),
                strict=True,
            )
        )
        number, found, unclear = 0, list[str](), list[str]()
        for word, (path, x) in wide:
            if not is_array(x):
                continue
            aval = avals[number]
            number += 1
            at = path_text(path)
            problem = "" if word is not None and word.startswith(CARRY) else self._why_unclear(word, aval)
            unclear += [f"{f'result {at}' if at else 'the result'}, {_text(aval)}, {problem}"] if problem else []
            found.append("state" if word is not None and word.startswith(CARRY) else word or "mean")
        if unclear:
            raise ArgumentError(all_offenders(f"accumulate: {where}: say in `reduce` how to combine", unclear))
        self._check_carried(words, parts)
        return found

    def _why_unclear(self, word: str | None, aval: Any) -> str:
        key = is_extended(aval.dtype)
        if key and word not in ("stack", "last"):
            return 'a random key; "stack" or "last".'
        if word in (None, "mean") and not jnp.issubdtype(aval.dtype, jnp.inexact):
            return 'is no float, so its mean over microbatches is not of its type; "sum", "stack" or "last".'
        if word == "sum" and aval.dtype == np.bool_:
            return 'is no number; "stack" or "last".'
        whole = {(jnp.shape(x), jnp.result_type(x)) for x in (*self.whole, *self.given, *self.held, *self.around)}
        rows = aval.shape[:1] and aval.shape[0] in self.call.sizes
        if word is None and rows and (aval.shape, aval.dtype) not in whole:
            return f'has as many rows as a microbatch, {aval.shape[0]}; "stack" them, or say "mean", "sum" or "last".'
        return ""

    def _check_carried(self, words: Sequence[Any], parts: Sequence[Any]) -> None:
        """Sorts the carried results in the order of their arguments; raises if one has another type than its
        argument."""
        call = self.call
        results = {w[len(CARRY) :]: part for w, part in zip(words, parts, strict=True) if w and w.startswith(CARRY)}
        starts = iter(self.given)
        pairs: list[tuple[str, Any, Any]] = []
        for name, count in call.carried.items():
            tree = call.trees[call.names.index(name)]
            mine = [next(starts) for _ in range(count)]
            if jax.tree.structure(results[name]) != tree:
                raise ArgumentError(
                    f"accumulate: {call.where}: the result that is carried to {name} has the structure "
                    f"{jax.tree.structure(results[name])}, the argument {tree}."
                )
            leaves = [(p, x) for p, x in leaves_by_path(results[name]) if is_array(x)]
            pairs += [
                ("/".join(filter(None, (name, path_text(p)))), x, jax.typeof(y))
                for x, (p, y) in zip(mine, leaves, strict=True)
            ]
        self._refuse_others(pairs)
        order = {name: i for i, name in enumerate(call.carried)}
        said = [order[w[len(CARRY) :]] for w in words if w and w.startswith(CARRY)]
        counts = list(call.carried.values())
        starts_at = [sum(counts[:i]) for i in range(len(counts))]
        self.places = [starts_at[i] + k for i in said for k in range(counts[i])]

    def _step(self, rows: Any, whole: Any, state: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The arrays of the results, and the next state."""
        result, held = self.result, list(self.held)
        for i, x in zip(result.written, state[len(self.given) :], strict=True):
            held[i] = x
        out, after = self.call(rows, whole, state[: len(self.given)], held)
        arrays = [x for x in jax.tree.leaves(out) if is_array(x)]
        carried = [x for x, kind in zip(arrays, result.kinds, strict=True) if kind == "state"]
        ordered = [x for _, x in sorted(zip(self.places, carried, strict=True), key=lambda p: p[0])]
        return arrays, [*ordered, *(after[i] for i in result.written)]

    def _loop(self, rows: Any, whole: Any) -> tuple[list[Any], list[Any]]:
        """The loop itself: a scan whose carry is the state, the sums and the last results."""
        kinds, avals = self.result.kinds, self.result.avals
        stacked = [k == "stack" or (k == "last" and is_extended(a.dtype)) for k, a in zip(kinds, avals, strict=False)]

        def step(carry: Any, xs: Any) -> Any:
            state, kept = carry
            arrays, state = self._step(xs, whole, state)
            now = [x if kind == "last" else kept[i] + x for i, (x, kind) in enumerate(_held(arrays, kinds, stacked))]
            return (state, now), [x for x, s in zip(arrays, stacked, strict=True) if s]

        zeros = [jnp.zeros(a.shape, a.dtype) for a, _ in _held(avals[: len(kinds)], kinds, stacked)]
        (state, kept), stacks = lax.scan(step, (self.start, zeros), rows, length=self.m)
        pools = iter(kept), iter(stacks)
        carried = iter([state[i] for i in self.places])
        done: list[Any] = []
        for kind, s in zip(kinds, stacked, strict=True):
            x = next(carried) if kind == "state" else next(pools[s])
            done.append(x / self.m if kind == "mean" else x[-1] if s and kind == "last" else x)
        return done, state

    def _pack(self, arrays: Sequence[Any]) -> Any:
        rest = iter(arrays)
        return jax.tree.unflatten(self.result.tree, [next(rest) if x is None else x for x in self.result.fixed])

    def _with_gradient(self) -> Any:
        """The loop, differentiated microbatch by microbatch: `fn` returns one float scalar, and there is no state."""
        rows, whole, m = self.rows, self.whole, self.m
        scale = 1 / m if self.result.kinds[0] == "mean" else 1.0
        dtype = self.result.avals[0].dtype

        def once(rows: Any, whole: Any) -> Any:
            return self._step(rows, whole, [])[0][0]

        @jax.custom_vjp
        def loss(rows: Any, whole: Any) -> Any:
            return self._loop(rows, whole)[0][0]

        def forward(rows: Any, whole: Any) -> tuple[Any, Any]:
            fixed = [None if _is_float(w) else w for w in whole]

            def both(xs: Any) -> Any:
                still = [None if _is_float(x) else x for x in xs]
                moving = [x if _is_float(x) else None for x in xs], [w if _is_float(w) else None for w in whole]

                def run(moving: Any) -> Any:
                    return mark_cut(once(_merged(moving[0], still), _merged(moving[1], fixed)), END)

                value, pullback = jax.vjp(run, moving)
                return value, *pullback(jnp.ones_like(value))[0]

            def step(sums: Any, xs: Any) -> tuple[Any, Any]:
                value, by_rows, by_whole = both(xs)
                return jax.tree.map(jnp.add, sums, (value, by_whole)), by_rows

            start = (jnp.zeros((), dtype), [jnp.zeros_like(w) if _is_float(w) else None for w in whole])
            (total, by_whole), by_rows = lax.scan(step, start, rows, length=m)
            return total * scale, (by_rows, by_whole, rows, whole)

        def backward(saved: Any, cotangent: Any) -> Any:
            by_rows, by_whole, rows, whole = saved
            factor = cotangent * scale
            return _cotangents(by_rows, rows, factor), _cotangents(by_whole, whole, factor)

        loss.defvjp(forward, backward)
        return self._pack([loss(rows, whole)])


def _held(xs: Sequence[Any], kinds: Sequence[str], stacked: Sequence[bool]) -> list[tuple[Any, str]]:
    """The results that the loop sums or overwrites, with their reduction."""
    return [(x, k) for x, k, s in zip(xs, kinds, stacked, strict=True) if not s and k != "state"]


def _text(x: Any) -> str:
    return short_text(jnp.shape(x), jnp.result_type(x))


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _merged(xs: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    return [other if x is None else x for x, other in zip(xs, others, strict=True)]


def _cotangents(gradients: Sequence[Any], primals: Sequence[Any], factor: Any) -> list[Any]:
    return [
        np.zeros(jnp.shape(x), jax.dtypes.float0) if g is None else (g * factor).astype(g.dtype)
        for g, x in zip(gradients, primals, strict=True)
    ]


def _without_tracer(x: Any) -> Any:
    """The type of an array; what is none stays."""
    if not is_array(x):
        return x
    aval = compat.aval_of(x)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
