"""Attention whose tokens are split, by a kernel whose mask counts queries and keys from 0.

Under a causal mask the first device would look at few keys and the last one at all. Each device cuts its block in two
halves, and they are dealt out in zigzag: of 2n halves the device number d gets d, an early one, and 2n-1-d, a late one.
Halves of queries meet halves of keys, whole but on the diagonal, as often on every device, and results are joined by
the sums of their exponentials. The results go back to where their queries came from.

                keys 0 1 2 3 4 5         n = 3, device 1
    queries 1        w c                 c: causal, w: whole
            4        w w w w c

Keys are whole on every device, or go around a ring: they are dealt out as well, half of the pieces come from either
side, and while they are met, they go on to the next device. In the gradients the sums for these keys go with them, and
then home. Without a mask blocks go around as they are.

With a window each device reads the keys before its block as well, and in the gradients the queries after it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardc.sbp.piece import placed_at
from shardc.sbp.placement import local_shape
from shardc.sbp.signature import Operation, Passed, Setting, Site, bind_same

State: TypeAlias = tuple[Any, ...]
"""The state of queries in float32: their result and the logarithms of sums of exponentials, or their gradient."""

QUERY, KEY, VALUE, SUMS, RESULT, COTANGENT = 0, 1, 2, 10, 11, 12
"""Operands of attention, and those that its gradients have besides."""


def is_attention(primitive: str) -> bool:
    """Whether this is cuDNN's attention, or its gradients."""
    return primitive in ("dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper")


def is_causal(op: Operation) -> bool:
    """Whether no query looks at the keys after it."""
    return "CAUSAL" in op.params["mask_type"].name or op.params["sliding_window_length"] is not None


def tokens_of(op: Operation, port: int = QUERY) -> int:
    """The dimension of tokens of an operand; sums are [sequence, head, token]."""
    return 2 if port == SUMS or op.params["layout"] else 1


def rows_of(op: Operation) -> list[int]:
    """The operands that have a row for each query, besides a bias."""
    return [QUERY, SUMS, RESULT, COTANGENT] if len(op.operands) > COTANGENT else [QUERY]


# --- without a window


def zigzag_routes(n: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """For the first halves of the blocks and the second ones, from which device each goes to which.

    Examples:
      >>> zigzag_routes(3)
      (((0, 0), (1, 2), (2, 1)), ((0, 1), (1, 2), (2, 0)))
    """
    return tuple(
        tuple((half // 2, half if half < n else 2 * n - 1 - half) for half in range(first, 2 * n, 2))
        for first in (0, 1)
    )


def token_axes(setting: Setting) -> tuple[tuple[str, ...], bool]:
    """The axes that split the queries, and whether the keys go around them."""
    splits = (setting.operands[i].axes_of(tokens_of(setting.op)) for i in (QUERY, KEY))
    axes, keys = (tuple(a for a in split if setting.sizes[a] > 1) for split in splits)
    return axes, bool(axes) and axes == keys


def token_sends(setting: Setting) -> list[Passed]:
    """The arrays that each device sends: pieces of operands that are dealt out or go around, then those of results."""
    op, at, count = setting.op, tokens_of(setting.op), len(setting.op.operands)
    axes, around = token_axes(setting)
    n, gradients = math.prod(setting.sizes[a] for a in axes), len(setting.op.operands) > COTANGENT
    halves = sum(map(_moves, zigzag_routes(n))) if is_causal(op) else 0
    found = [_half(setting, i, tokens_of(op, i)) for i in rows_of(op) for _ in range(halves)]
    if around:
        found += [_half(setting, i, at) for i in (KEY, VALUE) for _ in range(halves)]
        piece = key_piece(setting)
        found += [replace(piece, beside=True)] * ((n - 1) * (1 + gradients))
        found += [piece] * (gradients * len(ways_of(n)))
        found += [_half(setting, count + i, at) for i in (1, 2) if gradients for _ in range(halves)]
    found += [_half(setting, count, at)] * halves
    return found if gradients or len(op.results) == 1 else found + [_half(setting, count + 1, 2)] * halves


def ways_of(n: int) -> dict[int, int]:
    """How many times pieces are passed on: to the next device, and to the one before.

    Examples:
      >>> ways_of(8), ways_of(2)
      ({1: 4, -1: 3}, {1: 1})
    """
    return {by: hops for by, hops in ((1, n // 2), (-1, (n - 1) // 2)) if hops}


def key_piece(setting: Setting) -> Passed:
    """The piece of keys and values that goes around."""
    op, sides, at = setting.op, 1 + is_causal(setting.op), tokens_of(setting.op)
    shape = (n // sides if d == at else n for d, n in enumerate(setting.operand_shape(KEY)))
    return Passed((2, sides, *shape), op.operands[KEY].dtype)


def tokens_held(setting: Setting) -> int:
    """The bytes of what was dealt out and of the results that go back. If keys go around, also those of the pieces that
    are met and that arrive each way, and of the rows that meet them."""
    (axes, around), op = token_axes(setting), setting.op
    there = [a for a in token_sends(setting) if not a.beside]
    if around:
        for hops in ways_of(math.prod(setting.sizes[a] for a in axes)).values():
            there += [key_piece(setting)] * min(hops, 2) + [_half(setting, i, tokens_of(op, i)) for i in rows_of(op)]
    return sum(map(_bytes, there))


def tokens_moved(setting: Setting) -> int:
    """The bytes that a device reads and writes beside the kernels, about: what is dealt out and back, and in each step
    the states in float32, what kernels add to them, and the rows, which are chosen from both sides where only the
    device knows which one meets. What two pieces of a ring add in one step is one pass over the states. Keys are
    copied for a kernel, and so are their gradients. As XLA:GPU compiles it."""
    op, at, gradients = setting.op, tokens_of(setting.op), len(setting.op.operands) > COTANGENT
    (axes, around), causal = token_axes(setting), is_causal(setting.op)
    n, twice = math.prod(setting.sizes[a] for a in axes), 1 if causal else 2  # without a mask a side is the block
    if n == 1 or not (around or causal):
        return 0
    made = [_half(setting, len(op.operands) + i, 2 if i else at) for i in range(1 if gradients else len(op.results))]
    rows = twice * sum(_bytes(_half(setting, i, tokens_of(op, i))) for i in rows_of(op))
    found, state = (twice * sum(size(x) for x in made) for size in (_bytes, lambda x: 4 * math.prod(x.shape)))
    keys = 2 * math.prod(setting.operand_shape(KEY)) * op.operands[KEY].dtype.itemsize  # and values
    side = keys * twice // (2 if around else 2 * n)
    if not causal:
        return (n - 1) * (state + found) + n * side * (5 if gradients else 2)
    step = 2 * (state + found + rows) if around else 4 * state + found + 3 * rows
    dealt = rows + found + around * (1 + gradients) * side
    return 2 * state + found + (n - 1) * step + 2 * n * side * (5 if gradients else 2) + 4 * dealt


def _bytes(a: Passed) -> int:
    return math.prod(a.shape) * np.dtype(a.dtype).itemsize


def _half(setting: Setting, port: int, dim: int) -> Passed:
    aval, placement = setting.port(port)
    shape = enumerate(local_shape(aval.shape, placement, setting.sizes))
    return Passed(tuple(n // 2 if d == dim else n for d, n in shape), aval.dtype)


def _moves(route: Sequence[tuple[int, int]]) -> bool:
    return any(source != target for source, target in route)


def over_tokens(site: Site, *operands: Any) -> Sequence[Any]:
    """The local results of attention, or of its gradients, whose tokens are split."""
    axes, around = token_axes(site)
    return _Meetings(site, operands).run() if around or (axes and is_causal(site.op)) else bind_same(site, *operands)


class _Meetings:
    """The meetings of queries and keys on one device. Its queries, and keys that go around, have two sides, an early
    and a late half, or without a mask one.

    Attributes:
      rows: for each side what has a row for each query.
    """

    def __init__(self, site: Site, operands: Sequence[Any]) -> None:
        self.site, self.at, self.causal = site, tokens_of(site.op), is_causal(site.op)
        self.axes, self.is_ring = token_axes(site)
        self.n = math.prod(site.sizes[a] for a in self.axes)
        self.me = site.linear_index(self.axes)
        self.operands, self.keys, self.others = operands, operands[KEY : VALUE + 1], operands[VALUE + 1 : SUMS]
        self.size = operands[QUERY].shape[self.at] // 2
        self.rows = list(zip(*(self.dealt(port) for port in rows_of(site.op)), strict=True))

    def run(self) -> list[Any]:
        """The local results."""
        own = [self.dealt(i) for i in (KEY, VALUE)] if self.is_ring else map(self.halves, self.keys)
        keys = list(zip(*own, strict=True))
        found = [self.met(rows, some, self.causal) for rows, some in zip(self.rows, keys, strict=True)]
        states, more = [state for state, _ in found], [some for _, some in found]
        states, more = self.around(states, keys, more) if self.is_ring else self.through(states, more)
        pairs = zip(zip(*states, strict=True), self.site.op.results, strict=False)
        made = [[x.astype(a.dtype) for x in sides] for sides, a in pairs]
        return [*(self.returned(sides, 2 if i else self.at) for i, sides in enumerate(made)), *more]

    # where pieces are

    def dealt(self, port: int) -> Sequence[Any]:
        """The sides of an operand that belong to this device."""
        if not self.causal:
            return self.operands[port : port + 1]
        parts = jnp.split(self.operands[port], 2, tokens_of(self.site.op, port))
        return self.turned([self.sent(x, route) for x, route in zip(parts, zigzag_routes(self.n), strict=True)])

    def returned(self, sides: Sequence[Any], dim: int) -> Any:
        """The results for the block of this device."""
        if not self.causal:
            return sides[0]
        routes = [[(t, s) for s, t in route] for route in zigzag_routes(self.n)]
        return jnp.concatenate([self.sent(x, r) for x, r in zip(self.turned(sides), routes, strict=True)], dim)

    def sent(self, x: Any, route: Sequence[tuple[int, int]]) -> Any:
        return self.site.wire.permute(x, self.axes, route) if _moves(route) else x

    def passed(self, x: Any, by: int) -> Any:
        """The `x` of the device `by` places before this one; None stays."""
        return None if x is None else self.sent(x, [(k, (k + by) % self.n) for k in range(self.n)])

    def turned(self, halves: Sequence[Any]) -> Sequence[Any]:
        """From (even, odd) numbers to (early, late) halves, and back."""
        first, second = halves
        even = self.me % 2 == 0
        return jnp.where(even, first, second), jnp.where(even, second, first)

    def part(self, x: Any, number: Any) -> Any:
        """Half `number` of whole keys, or of what has a row for each of them."""
        return lax.dynamic_slice_in_dim(x, number * self.size, self.size, self.at)

    def halves(self, x: Any) -> Sequence[Any]:
        """The early and the late half of whole keys that belong to this device."""
        return self.part(x, self.me), self.part(x, 2 * self.n - 1 - self.me)

    # meetings

    def met(self, rows: Sequence[Any], keys: Sequence[Any], causal: bool = False) -> tuple[State, Sequence[Any]]:
        """The state of queries that have met these keys alone, and the gradients of the keys."""
        params: dict[str, Any] = {} if len(rows) > 1 else {"is_training": True}
        given: Enum = self.site.op.params["mask_type"]
        mask = given if causal else type(given)["NO_MASK"]
        y, *found = self.site.bind(rows[0], *keys, *self.others, *rows[1:], mask_type=mask, **params)
        return ((y.astype(np.float32),), found) if len(rows) > 1 else ((y.astype(np.float32), *found), ())

    def joined(self, one: State, other: State) -> State:
        """The state of queries that have met the keys of both."""
        if len(one) == 1:
            return (one[0] + other[0],)
        total = jnp.logaddexp(one[1], other[1])
        shares = [jnp.exp(x[1] - total) for x in (one, other)]
        wide = [(s if self.at == 2 else s.swapaxes(1, 2))[..., None] for s in shares]
        return one[0] * wide[0] + other[0] * wide[1], total

    def meet(self, states: Sequence[State], side: Any, keys: Sequence[Any]) -> tuple[list[State], Sequence[Any]]:
        """The states after a side has met more keys, and the gradients of these."""
        if isinstance(side, int):
            found, more = self.met(self.rows[side], keys)
            return [self.joined(x, found) if k == side else x for k, x in enumerate(states)], more
        found, more = self.met([jnp.where(side == 0, *sides) for sides in zip(*self.rows, strict=True)], keys)
        pairs = [(side == k, zip(self.joined(x, found), x, strict=True)) for k, x in enumerate(states)]
        return [tuple(jnp.where(here, new, old) for new, old in both) for here, both in pairs], more

    # keys that go around

    def around(
        self, states: list[State], keys: Sequence[Sequence[Any]], own: Sequence[Sequence[Any]]
    ) -> tuple[list[State], list[Any]]:
        """The keys of other devices arrive one after the other, and with them the sums of their gradients. What goes on
        to the next device does not wait for the kernels of a step."""
        hops, here, sums = ways_of(self.n), _stacked(keys), _stacked(own) if own[0] else None
        if self.causal:
            states, more = self.meet(states, 1, keys[0])
            sums = _added(sums, more, 0)
        none = None if sums is None else jnp.zeros_like(sums)
        held = {by: (sums if by == 1 else none, self.passed(here, by)) for by in hops}
        common = min(hops.values())

        def step(carry: tuple[Any, Any], i: Any, on: Collection[int] = hops) -> tuple[tuple[Any, Any], None]:
            states, held = carry
            coming = {by: self.passed(here, by) if by in on else None for by, (_, here) in held.items()}
            there = {by: (here, self.side(i * by)) for by, (_, here) in held.items()}
            if self.causal:
                states, there = lax.optimization_barrier((states, there))  # else XLA begins all steps at once
            then: dict[int, tuple[Any, Any]] = {}
            for by, (sums, _) in held.items():
                states, sums = self.visited(states, self.passed(sums, by), *there[by])
                then[by] = sums, coming[by]
            return (states, then), None

        if common > 1:
            (states, held), _ = lax.scan(step, (states, held), np.arange(1, common, dtype=np.int32))
        (states, held), _ = step((states, held), common, [by for by in hops if hops[by] > common])
        if hops[1] > common:
            (states, last), _ = step((states, {1: held[1]}), hops[1], ())
            held |= last
        home = [self.passed(sums, -by * hops[by]) for by, (sums, _) in held.items()]
        total = jnp.stack(home).sum(0, np.float32).astype(here.dtype) if own[0] else ()
        return states, [self.returned(list(x), self.at) for x in total]

    def side(self, away: int) -> Any:
        """The side that meets its own kind of keys of the device `away` places before this one: the early half those of
        devices before this one, the late half those of devices after."""
        return jnp.where((self.me - away) % self.n < self.me, 0, 1) if self.causal else 0

    def visited(self, states: list[State], sums: Any, here: Any, side: Any) -> tuple[list[State], Any]:
        """The states, and the sums of gradients, after a side has met its own kind of the keys that are here, and the
        late half all early ones."""
        if self.causal:
            states, more = self.meet(states, 1, here[:, 0])
            sums = _added(sums, more, 0)
        states, more = self.meet(states, side, lax.dynamic_index_in_dim(here, side, 1, keepdims=False))
        return states, _added(sums, more, side)

    # keys that are whole

    def through(self, states: list[State], own: Sequence[Sequence[Any]]) -> tuple[list[State], list[Any]]:
        """The late half meets all early ones at once, the others meet one by one."""
        early = [lax.slice_in_dim(x, 0, self.n * self.size, axis=self.at) for x in self.keys]
        states, more = self.meet(states, 1, early)
        rest = [(0, self.n * self.size if d == self.at else 0, 0) for d in range(4)]
        found = [lax.pad(y, jnp.zeros((), y.dtype), rest) for y in more]
        for side, number in enumerate((self.me, 2 * self.n - 1 - self.me)):
            found = self.with_part(found, own[side], number)

        def step(carry: tuple[Any, Any], i: Any) -> tuple[tuple[Any, Any], None]:
            (states, found), is_early = carry, i < self.me
            side, number = jnp.where(is_early, 0, 1), jnp.where(is_early, i, self.n + i - self.me)
            states, more = self.meet(states, side, [self.part(x, number) for x in self.keys])
            return (states, self.with_part(found, more, number)), None

        return lax.scan(step, (states, found), np.arange(self.n - 1, dtype=np.int32))[0]

    def with_part(self, whole: Sequence[Any], more: Sequence[Any], number: Any) -> list[Any]:
        """Gradients of all keys, with those of half `number` added. No half gets more than two."""
        found = [self.part(x, number).astype(np.float32) + y for x, y in zip(whole, more, strict=True)]
        start = number * self.size
        return [
            lax.dynamic_update_slice_in_dim(x, y.astype(x.dtype), start, self.at)
            for x, y in zip(whole, found, strict=True)
        ]


def _stacked(sides: Sequence[Sequence[Any]]) -> Any:
    """Keys and values, or their gradients, in one array; the sides are its second dimension."""
    return jnp.stack([jnp.stack(x) for x in zip(*sides, strict=True)])


def _added(sums: Any, more: Sequence[Any], side: Any) -> Any:
    """Sums of gradients with those of a side added; None if there are none."""
    if sums is None:
        return None
    total = lax.dynamic_index_in_dim(sums, side, 1, keepdims=False) + jnp.stack(more).astype(np.float32)
    return lax.dynamic_update_index_in_dim(sums, total.astype(sums.dtype), side, 1)


# --- with a window


def reach_of(op: Operation) -> int:
    """How many tokens before its own a query looks at."""
    return min(op.params["sliding_window_length"], op.operands[QUERY].shape[tokens_of(op)]) - 1


def windowed_held(setting: Setting) -> int:
    """The bytes of operands and results with the tokens around the block."""
    op, at = setting.op, tokens_of(setting.op)
    there = [i for i in (QUERY, KEY, VALUE, SUMS, RESULT, COTANGENT) if i < len(op.operands)]
    found = [(setting.operand_shape(i), op.operands[i].dtype) for i in there]
    found += [(setting.result_shape(i), a.dtype) for i, a in enumerate(op.results)]
    block = setting.operand_shape(QUERY)[at]
    more = reach_of(op) * (2 if len(op.operands) > COTANGENT else 1)
    held = sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in found)
    return held * (block + more) // max(block, 1)


def windowed(site: Site, query: Any, *operands: Any) -> Sequence[Any]:
    """The local results of attention, or of its gradients, whose operands are windows: keys from `reach` tokens before
    the block on, and for gradients rows until `reach` tokens after it."""
    at, reach = tokens_of(site.op), reach_of(site.op)
    block = site.operand_shape(QUERY)[at]
    length = query.shape[at] + reach
    length += length % 2  # JAX asks for even numbers, for gradients
    begin = jnp.clip(site.operand_extent(QUERY, at)[0], 0, reach)  # the block in the kernel's tokens

    def in_kernel(port: int, x: Any) -> Any:
        before = begin - reach if port in (KEY, VALUE) else begin
        return placed_at(x, tokens_of(site.op, port), before, length, 0)

    ports = [QUERY, KEY, VALUE, SUMS, RESULT, COTANGENT]
    given = [in_kernel(i, x) if i in ports else x for i, x in enumerate((query, *operands))]
    gradients = len(given) > COTANGENT
    return [
        lax.dynamic_slice_in_dim(y, begin, block, 2 if i and not gradients else at)
        for i, y in enumerate(site.bind(*given))
    ]
