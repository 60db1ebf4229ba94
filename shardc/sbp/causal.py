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
from collections.abc import Sequence
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
"""What queries have so far, in float32: the result and the logarithms of the sums of exponentials, or their gradient."""

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
    axes, keys = (setting.operands[i].axes_of(tokens_of(setting.op)) for i in (QUERY, KEY))
    return axes, bool(axes) and axes == keys


def token_sends(setting: Setting) -> list[Passed]:
    """What each device sends: pieces of operands that are dealt out or go around, then those of results."""
    op, at, count = setting.op, tokens_of(setting.op), len(setting.op.operands)
    axes, around = token_axes(setting)
    n, gradients = math.prod(setting.sizes[a] for a in axes), len(setting.op.operands) > COTANGENT
    routes = zigzag_routes(n) if is_causal(op) else ()

    def dealt(port: int, dim: int) -> list[Passed]:
        aval, placement = setting.port(port)
        shape = list(local_shape(aval.shape, placement, setting.sizes))
        shape[dim] //= 2
        return [Passed(tuple(shape), aval.dtype)] * sum(map(_moves, routes))

    found = [a for i in rows_of(op) for a in dealt(i, tokens_of(op, i))]
    if around:
        found += [a for i in (KEY, VALUE) for a in dealt(i, at)]
        piece = key_piece(setting)
        found += [replace(piece, beside=True)] * ((n - 1) * (1 + gradients))
        found += [piece] * (gradients * sum(hops > 0 for hops in ways_of(n).values()))
        found += [a for i in (1, 2) if gradients for a in dealt(count + i, at)]
    found += dealt(count, at)
    return found if gradients or len(op.results) == 1 else found + dealt(count + 1, 2)


def ways_of(n: int) -> dict[int, int]:
    """How many times pieces are passed on to the next device, and to the one before."""
    return {1: n // 2, -1: (n - 1) // 2}


def key_piece(setting: Setting) -> Passed:
    """The piece of keys and values that goes around, in halves."""
    parts, shape = 1 + is_causal(setting.op), list(setting.operand_shape(KEY))
    shape[tokens_of(setting.op)] //= parts
    return Passed((2, parts, *shape), setting.op.operands[KEY].dtype)


def tokens_held(setting: Setting) -> int:
    """The bytes of what was dealt out and of the results that go back, and of pieces that go around: for each way those
    that are met and those that arrive."""
    axes, around = token_axes(setting)
    pieces = sum(min(hops, 2) for hops in ways_of(math.prod(setting.sizes[a] for a in axes)).values())
    there = [a for a in token_sends(setting) if not a.beside] + [key_piece(setting)] * (around * pieces)
    return sum(math.prod(a.shape) * np.dtype(a.dtype).itemsize for a in there)


def _moves(route: Sequence[tuple[int, int]]) -> bool:
    return any(source != target for source, target in route)


def over_tokens(site: Site, *operands: Any) -> Sequence[Any]:
    """The local results of attention, or of its gradients, whose tokens are split."""
    axes, around = token_axes(site)
    return _Meetings(site, operands).run() if around or axes and is_causal(site.op) else bind_same(site, *operands)


class _Meetings:
    """The meetings of queries and keys on one device. Its queries, and keys that go around, have two sides, an early and
    a late half, or without a mask one.

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

        def step(states: Any, i: Any, by: int, sums: Any, here: Any, on: bool = True) -> tuple[Any, list[Any]]:
            sums, coming = self.passed(sums, by), self.passed(here, by) if on else None
            states, sums = self.visited(states, sums, here, i * by)
            return states, [sums, coming]

        def both(carry: tuple[Any, Any], i: Any) -> tuple[tuple[Any, Any], None]:
            states, held = carry[0], dict[int, list[Any]]()
            for by, pieces in carry[1].items():
                states, held[by] = step(states, i, by, *pieces)
            return (states, held), None

        held = {1: [sums, self.passed(here, 1)]}
        if hops[-1]:
            held[-1] = [None if sums is None else jnp.zeros_like(sums), self.passed(here, -1)]
        if hops[-1] > 1:
            (states, held), _ = lax.scan(both, (states, held), np.arange(1, hops[-1], dtype=np.int32))
        home: list[Any] = []
        for by, pieces in held.items():
            for i in range(max(hops[-1], 1), hops[by] + 1):
                states, pieces = step(states, i, by, *pieces, i < hops[by])
            home.append(self.passed(pieces[0], -by * hops[by]))
        total = sum(x.astype(np.float32) for x in home).astype(here.dtype) if own[0] else ()
        return states, [self.returned(x, self.at) for x in total]

    def visited(self, states: list[State], sums: Any, here: Any, away: Any) -> tuple[list[State], Any]:
        """The states, and the sums of gradients, after queries have met the keys of the device `away` places before
        this one: the late half all early ones, and besides the early half the early ones of devices before, the late
        half the late ones of those after."""
        side: Any = 0
        if self.causal:
            side = jnp.where((self.me - away) % self.n < self.me, 0, 1)
            states, here, side = lax.optimization_barrier((states, here, side))  # else XLA begins all meetings at once
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
