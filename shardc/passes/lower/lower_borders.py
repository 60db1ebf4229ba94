"""Lowers a boxed program so that the pieces at its borders can be seen, and so that one device can run it without the
others.

A border is a place where a device gets what others have: a collective of a boxing or inside an operation, a user's
shard_map, a callback, the end of a `while` with such places inside.

    x ──► all_gather ──► y      recorded: on the mesh; the pieces x and y become results
    x      y ──►                replayed: on one device, in place of any other; x becomes a result, y is given

So each piece of the program is computed from what the piece before it was seen to hand over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardc import compat
from shardc.arrays.fetch import of_words, words
from shardc.compat import Atom, Eqn
from shardc.ir.box import Boxed
from shardc.ir.host_callback import runs_once
from shardc.ir.user_shard_map import is_unit
from shardc.ir.walk import operation_of
from shardc.machine.mesh import MeshView
from shardc.passes.lower.lower import Lowering
from shardc.sbp.boxing import Shape
from shardc.sbp.cost import BoxingStep
from shardc.sbp.placement import Placement
from shardc.sbp.signature import Wire, find_rule

ROUNDS: Final = 16
"""The rounds of a `while` whose borders are kept: how many it will make is not known when it is compiled."""
SIGNS: Final = 65521
"""The signs of rounding errors that are drawn: a prime number, so that no two rows of an array have the same."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A border of a lowered program.

    Attributes:
      kind: of the collective; or "shard_map", "callback", "while".
      eqn: its equation: a boxing, or the operation that it is in.
      axes: of the collective, in the order in which they count devices.
      ports: for each array before it the logical shape and the placement; None: the arrays have no such meaning.
      results: how many arrays are after it.
      loops: the numbers of dimensions that the loops around it add in front.
      step: of a boxing.
      shape: the logical shape of what the step moves.
      pairs: of a permute inside an operation, (source, target) along the axes.
    """

    kind: str
    eqn: Eqn
    axes: tuple[str, ...] = ()
    ports: tuple[tuple[Shape, Placement] | None, ...] = (None,)
    results: int = 1
    loops: int = 0
    step: BoxingStep | None = None
    shape: Shape = ()
    pairs: tuple[tuple[int, int], ...] = ()

    @property
    def is_compared(self) -> bool:
        """Whether it is known what has to come of what goes in."""
        return self.kind not in ("shard_map", "callback", "while")


class _Bordered(Lowering):
    """A lowering that meets its borders in a fixed order, and collects arrays there, also through loops and branches.

    Attributes:
      passages: the borders, in the order of the program.
      tape: the arrays that were collected since the innermost loop or branch began.
      rounds: the numbers of the current rounds of the loops around.
    """

    def __init__(self, boxed: Boxed, mesh: MeshView) -> None:
        super().__init__(boxed, mesh)
        self.wire: Wire = _BorderedWire(self, self.wire)
        self.passages: dict[int, Passage] = {}
        self.tape: list[Any] = []
        self.rounds: tuple[Any, ...] = ()
        self.at = 0  # the number of the next border
        self.eqn: Eqn | None = None  # whose local piece runs

    def begin(self) -> None:
        """Begin to trace."""
        self.tape, self.rounds, self.at = [], (), 0

    def cross(self, passage: Callable[..., Passage], xs: Sequence[Any], run: Callable[[], Sequence[Any]]) -> list[Any]:
        """The arrays after a border; `run` gives them on the mesh."""
        k, self.at = self.at, self.at + 1
        self.passages[k] = passage(loops=len(self.rounds))
        return self._cross(k, [words(jnp.asarray(x)) for x in xs], run)

    def _cross(self, k: int, xs: Sequence[Any], run: Callable[[], Sequence[Any]]) -> list[Any]:
        raise NotImplementedError

    # -- the borders

    def step(self, eqn: Eqn, step: BoxingStep, x: Any, shape: Shape) -> Any:
        if not step.is_collective or 0 in shape:
            return super().step(eqn, step, x, shape)

        def passage(loops: int) -> Passage:
            return Passage(step.kind, eqn, step.axes, ((shape, step.src),), loops=loops, step=step, shape=shape)

        return self.cross(passage, [x], lambda: [super(_Bordered, self).step(eqn, step, x, shape)])[0]

    def operation(self, eqn: Eqn, operands: list[Any]) -> Sequence[Any]:
        kind = "callback" if runs_once(eqn) else "shard_map" if is_unit(eqn) else None
        if kind is None:
            self.eqn = eqn
            return super().operation(eqn, operands)
        run = lambda: super(_Bordered, self).operation(eqn, operands)  # noqa: E731
        return self._made_outside(kind, eqn, eqn.invars, operands, run)

    def _made_outside(
        self, kind: str, eqn: Eqn, ports: Sequence[Atom], xs: Sequence[Any], run: Callable[[], Sequence[Any]]
    ) -> list[Any]:
        """The results of what one device cannot compute."""
        known = tuple((_words_shape(a.aval), self.placement(a)) for a in ports)
        dtypes = [v.aval.dtype for v in eqn.outvars]
        count = len(dtypes)
        made = self.cross(
            lambda loops: Passage(kind, eqn, ports=known, results=count, loops=loops),
            xs,
            lambda: [words(jnp.asarray(y)) for y in run()],
        )
        return [compat.as_aval(of_words(y, d), v.aval) for y, d, v in zip(made, dtypes, eqn.outvars, strict=True)]

    # -- loops and branches

    def taped(self, run: Callable[[], Any], rounds: tuple[Any, ...] | None = None) -> tuple[Any, list[Any]]:
        """A result, and what was collected meanwhile."""
        outer = self.tape, self.rounds
        self.tape, self.rounds = [], self.rounds if rounds is None else rounds
        try:
            return run(), self.tape
        finally:
            self.tape, self.rounds = outer

    def scan(self, step: Callable[..., Any], carry: Any, xs: Any, length: int, reverse: bool, unroll: Any) -> Any:
        first, outside = self.at, self.rounds

        def taped(carry: Any, numbered: Any) -> Any:
            self.at = first
            i, x = numbered
            (carry, ys), tape = self.taped(lambda: step(carry, x), (*outside, i))
            return carry, (ys, tape)

        numbered = jnp.arange(length, dtype=np.int32), xs
        carry, (ys, tapes) = lax.scan(taped, carry, numbered, length=length, reverse=reverse, unroll=unroll)
        self.tape += tapes
        return carry, ys

    def switch(self, index: Any, branches: Sequence[Callable[..., list[Any]]], operands: Sequence[Any]) -> list[Any]:
        starts: list[int] = []
        kinds: list[list[Any]] = []
        for branch in branches:
            starts.append(self.at)
            kinds.append(jax.eval_shape(lambda *xs, b=branch: self.taped(lambda: b(*xs))[1], *operands))

        def made(number: int) -> Callable[..., Any]:
            def run(*xs: Any) -> Any:
                self.at = starts[number]
                found, tape = self.taped(lambda: branches[number](*xs))
                empty = [[jnp.zeros(a.shape, a.dtype) for a in each] for each in kinds]
                return found, [x for k, each in enumerate(empty) for x in (tape if k == number else each)]

            return run

        end = self.at
        found, tape = lax.switch(index, list(map(made, range(len(branches)))), *operands)
        self.at = end
        self.tape += tape
        return found

    def while_loop(self, cond: Callable[..., Any], body: Callable[..., Any], init: list[Any], eqn: Eqn) -> list[Any]:
        """The condition is asked at the end of each round, so that its borders are in rounds too."""
        first, outside = self.at, self.rounds
        again, tape = self.taped(lambda: cond(init))
        start = self.at

        def once(i: Any, state: list[Any]) -> tuple[Any, list[Any]]:
            self.at = start
            inside = (*outside, jnp.minimum(i, ROUNDS - 1))

            def run() -> Any:
                made = body(state)
                return made, cond(made)

            return self.taped(run, inside)

        kinds = jax.eval_shape(lambda state: once(0, state)[1], init)
        if not kinds and not tape:
            self.at = first
            return super().while_loop(cond, body, init, eqn)
        self.tape += tape
        end = self.at
        count = self.count(end)

        def round_of(carry: Any) -> Any:
            i, state, _, kept = carry
            (state, again), tape = once(i, state)
            at = jnp.minimum(i, ROUNDS - 1)
            old = [lax.dynamic_index_in_dim(k, at, keepdims=False) for k in kept]
            rows = [jnp.where(i < ROUNDS, x, o) for x, o in zip(tape, old, strict=True)]
            kept = [lax.dynamic_update_index_in_dim(k, row, at, 0) for row, k in zip(rows, kept, strict=True)]
            return i + 1, state, again, kept

        kept = [jnp.zeros((ROUNDS, *a.shape), a.dtype) for a in kinds]
        more = (lambda c: c[2]) if count is None else (lambda c: c[0] < jnp.minimum(count, ROUNDS))
        i, state, _, kept = lax.while_loop(more, round_of, (jnp.int32(0), init, again, kept))
        self.at = end
        self.tape += kept
        dtypes = [v.aval.dtype for v in eqn.outvars]
        ports = tuple((_words_shape(v.aval), self.placement(v)) for v in eqn.outvars)
        made = self.cross(
            lambda loops: Passage("while", eqn, ports=ports, results=1 + len(ports), loops=loops),
            state,
            lambda: [i, *(words(jnp.asarray(x)) for x in state)],
        )
        return [compat.as_aval(of_words(y, d), v.aval) for y, d, v in zip(made[1:], dtypes, eqn.outvars, strict=True)]

    def count(self, k: int) -> Any:
        """The rounds that the `while` that ends at border `k` makes; None: it asks its condition."""
        raise NotImplementedError


class RecordingLowering(_Bordered):
    """Runs on the mesh. The tape has the arrays before and after each border."""

    def _cross(self, k: int, xs: Sequence[Any], run: Callable[[], Sequence[Any]]) -> list[Any]:
        after = list(run())
        self.tape += [*xs, *after]
        return after

    def count(self, k: int) -> Any:
        return None


class ReplayingLowering(_Bordered):
    """Runs on one device, in place of the device at `coordinates`. The tape has the arrays before each border.

    Args:
      given: for each border the arrays after it; in loops stacked.
    """

    def __init__(
        self, boxed: Boxed, mesh: MeshView, coordinates: Mapping[str, Any], given: Sequence[Sequence[Any]]
    ) -> None:
        super().__init__(boxed, mesh)
        self.index = coordinates.__getitem__
        self.given = given

    def _cross(self, k: int, xs: Sequence[Any], run: Callable[[], Sequence[Any]]) -> list[Any]:
        self.tape += xs
        return [self._row(x) for x in self.given[k]]

    def _row(self, x: Any) -> Any:
        for i in self.rounds:
            x = lax.dynamic_index_in_dim(x, i, keepdims=False)
        return x

    def count(self, k: int) -> Any:
        return self._row(self.given[k][0])

    def memory_move(self, eqn: Eqn, x: Any) -> Any:
        (v,) = eqn.outvars
        return self.hide_padding(x, tuple(v.aval.shape), self.placement(v)) if eqn.params["to"] != "device" else x


class _Noise(Lowering):
    """Moves each result of an operation that rounds by about the most that rounding can move it, up or down by chance.

    A sum of n terms t is off by up to sqrt(n) u sum |t| with high probability (Higham, Mary 2019, "A New Approach to
    Probabilistic Rounding Error Analysis", SIAM J. Sci. Comput. 41(5)), in whatever order; u is the unit roundoff.
    """

    signs: Any = None
    drawn = 0

    def operation(self, eqn: Eqn, operands: list[Any]) -> Sequence[Any]:
        start = self.border_number
        made = list(super().operation(eqn, operands))
        name = eqn.primitive.name
        if name in _EXACT or runs_once(eqn) or is_unit(eqn):
            return made
        terms: Sequence[Any] | None = None
        if name in _SUMS:
            with self.again_from(start):
                terms = super().operation(eqn, list(map(_absolute, operands)))
        self.drawn += 1
        return [self.moved(x, k, eqn, None if terms is None else terms[k]) for k, x in enumerate(made)]

    @property
    def border_number(self) -> int:
        return 0

    @contextmanager
    def again_from(self, start: int) -> Generator[None, None, None]:
        """A context for an operation that runs once more."""
        del start
        yield

    def moved(self, x: Any, k: int, eqn: Eqn, terms: Any) -> Any:
        if not jnp.issubdtype(x.dtype, np.inexact):
            return x
        eps = float(jnp.finfo(x.dtype).eps)
        by = eps * jnp.abs(x)
        if terms is not None:
            wide = eps if eqn.primitive.name not in _PRODUCTS else min(eps, float(jnp.finfo(np.float32).eps))
            by = by + math.sqrt(_terms_of(eqn)) * wide * jnp.abs(terms)
        return x + (by * self.sign(x.shape, 8 * self.drawn + k).astype(by.dtype)).astype(x.dtype)

    def sign(self, shape: Shape, number: int) -> Any:
        """A part of `signs`, over and over. `jax.random` would take XLA:CPU a tenth of a second for each to compile."""
        start = number * 7919 % SIGNS
        end = start + math.prod(shape)
        signs = self.signs if end <= SIGNS else jnp.tile(self.signs, -(-end // SIGNS))
        return lax.slice(signs, (start,), (end,)).reshape(shape)


class NoisyLowering(_Noise, Lowering):
    """Runs on the mesh, with rounding errors of its own: the same ones in equal pieces of all devices."""

    def __init__(self, boxed: Boxed, mesh: MeshView, signs: Any) -> None:
        super().__init__(boxed, mesh)
        self.signs = signs


class NoisyReplaying(_Noise, ReplayingLowering):
    """Runs on one device, with rounding errors of its own."""

    def __init__(
        self, boxed: Boxed, mesh: MeshView, coordinates: Mapping[str, Any], given: Sequence[Sequence[Any]], signs: Any
    ) -> None:
        super().__init__(boxed, mesh, coordinates, given)
        self.signs = signs

    @property
    def border_number(self) -> int:
        return self.at

    @contextmanager
    def again_from(self, start: int) -> Generator[None, None, None]:
        end, tape, self.at = self.at, self.tape, start
        self.tape = []
        yield
        self.at, self.tape = end, tape


_PRODUCTS: Final = frozenset((
    "dot_general", "conv_general_dilated", "conv_of_ranges", "ragged_dot", "ragged_dot_general",
))  # fmt: skip
"""Sums of products, which are added up in float32 at least."""
_SUMS: Final = _PRODUCTS | {
    "reduce_sum", "cumsum", "scatter-add", "scatter_add", "reduce_window_sum", "select_and_scatter_add", "add_any",
}  # fmt: skip
_EXACT: Final = frozenset((
    "abs", "all_gather", "argmax", "argmin", "argsort", "bitcast_convert_type", "broadcast", "broadcast_in_dim",
    "ceil", "clamp", "concatenate", "conj", "copy", "copy_p", "cummax", "cummin", "dynamic_slice",
    "dynamic_update_slice", "expand_dims", "floor", "gather", "imag", "iota", "max", "min", "neg", "pad", "real",
    "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reshape", "rev", "round", "scatter", "scatter_max",
    "scatter_min", "select_n", "sign", "slice", "sort", "split", "squeeze", "stop_gradient", "top_k", "transpose",
))  # fmt: skip
"""Operations whose results are elements of their operands, or exact."""


def _absolute(x: Any) -> Any:
    return jnp.abs(x) if jnp.issubdtype(jnp.asarray(x).dtype, np.inexact) else x


def _terms_of(eqn: Eqn) -> int:
    """How many terms an element of a sum has, at most."""
    op = operation_of(eqn)
    rule = find_rule(op)
    sizes = rule.sizes(op)
    return math.prod(sizes[f] for f in rule.reduced) or max(math.prod(a.shape) for a in op.operands)


def _words_shape(aval: Any) -> Shape:
    """The shape of a value; of random keys that of their words."""
    more = compat.words_of_keys(aval.dtype) if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key) else ()
    return (*aval.shape, *more)


class _BorderedWire:
    """The collectives inside operations as borders."""

    def __init__(self, low: _Bordered, wire: Wire) -> None:
        self.low, self.wire = low, wire

    def all_gather(self, x: Any, axes: tuple[str, ...]) -> Any:
        return self._cross("all_gather", axes, (), x, lambda: self.wire.all_gather(x, axes))

    def all_to_all(self, x: Any, axes: tuple[str, ...]) -> Any:
        return self._cross("all_to_all", axes, (), x, lambda: self.wire.all_to_all(x, axes))

    def permute(self, x: Any, axes: tuple[str, ...], pairs: Sequence[tuple[int, int]]) -> Any:
        return self._cross("permute", axes, tuple(pairs), x, lambda: self.wire.permute(x, axes, pairs))

    def _cross(self, kind: str, axes: tuple[str, ...], pairs: Any, x: Any, run: Callable[[], Any]) -> Any:
        eqn = self.low.eqn
        if not jnp.size(x) or eqn is None:
            return run()
        return self.low.cross(lambda loops: Passage(kind, eqn, axes, loops=loops, pairs=pairs), [x], lambda: [run()])[0]
