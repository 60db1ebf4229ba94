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
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardc.sbp.piece import placed_at
from shardc.sbp.placement import local_shape
from shardc.sbp.signature import Operation, Passed, Setting, Site, bind_same

Halves: TypeAlias = tuple[Any, Any]
Meet: TypeAlias = Callable[[Any, Any, Sequence[Any]], tuple[Any, list[Any]]]
"""`meet(state, side, keys)`: the state after the queries of a side have met some keys, and the gradients of these."""

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

    rows = [QUERY, SUMS, RESULT, COTANGENT] if gradients else [QUERY]
    found = [a for i in rows for a in dealt(i, tokens_of(op, i))]
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
    if not axes or not (around or is_causal(site.op)):
        return bind_same(site, *operands)
    run = _Meetings(site, operands)
    return run.gradients() if len(operands) > COTANGENT else run.attention()


class _Meetings:
    """The meetings of queries and keys on one device. Its queries, and keys that go around, are stacks of an early and
    a late half, its sides; without a mask they are a stack of one."""

    def __init__(self, site: Site, operands: Sequence[Any]) -> None:
        self.site, self.at, self.causal = site, tokens_of(site.op), is_causal(site.op)
        self.axes, self.is_ring = token_axes(site)
        self.n = math.prod(site.sizes[a] for a in self.axes)
        self.me = site.linear_index(self.axes)
        self.operands, self.keys, self.others = operands, operands[KEY : VALUE + 1], operands[VALUE + 1 : SUMS]
        self.size = operands[QUERY].shape[self.at] // 2

    # where pieces are

    def dealt(self, port: int) -> Any:
        """The pieces of an operand that belong to this device, stacked."""
        if not self.causal:
            return self.operands[port][None]
        parts = jnp.split(self.operands[port], 2, tokens_of(self.site.op, port))
        return jnp.stack(
            self.turned([self.sent(x, route) for x, route in zip(parts, zigzag_routes(self.n), strict=True)])
        )

    def returned(self, stacked: Any, dim: int) -> Any:
        """The results for the block of this device."""
        if not self.causal:
            return stacked[0]
        routes = [[(t, s) for s, t in route] for route in zigzag_routes(self.n)]
        parts = [self.sent(x, route) for x, route in zip(self.turned(stacked), routes, strict=True)]
        return jnp.concatenate(parts, dim)

    def sent(self, x: Any, route: Sequence[tuple[int, int]]) -> Any:
        return self.site.wire.permute(x, self.axes, route) if _moves(route) else x

    def passed(self, x: Any, by: int) -> Any:
        """The `x` of the device `by` places before this one; None stays."""
        return None if x is None else self.sent(x, [(k, (k + by) % self.n) for k in range(self.n)])

    def turned(self, halves: Sequence[Any]) -> Halves:
        """From (even, odd) numbers to (early, late) halves, and back."""
        first, second = halves
        even = self.me % 2 == 0
        return jnp.where(even, first, second), jnp.where(even, second, first)

    def part(self, x: Any, number: Any) -> Any:
        """Half `number` of keys or of what has a row for each of them."""
        return lax.dynamic_slice_in_dim(x, number * self.size, self.size, self.at)

    def own(self) -> list[Any]:
        """The pieces of keys that belong to this device, stacked."""
        if self.is_ring:
            return [self.dealt(port) for port in (KEY, VALUE)]
        return [jnp.stack([self.part(x, self.me), self.part(x, 2 * self.n - 1 - self.me)]) for x in self.keys]

    # kernels

    def bind(self, rows: Sequence[Any], keys: Sequence[Any], causal: bool, **params: Any) -> list[Any]:
        given: Enum = self.site.op.params["mask_type"]
        mask = given if causal else type(given)["NO_MASK"]
        query, *more = rows
        return self.site.bind(query, *keys, *self.others, *more, mask_type=mask, **params)

    def attend(self, q: Any, keys: Sequence[Any], causal: bool = False) -> tuple[Any, Any]:
        """The result, wide, and the logarithms of the sums of exponentials."""
        y, sums = self.bind([q], keys, causal, is_training=True)
        return y.astype(np.float32), sums

    def attention(self) -> list[Any]:
        queries, keys = self.dealt(QUERY), self.own()

        def meet(state: tuple[Any, Any], side: Any, keys: Sequence[Any]) -> tuple[tuple[Any, Any], list[Any]]:
            return self.joined(state, side, self.attend(_at(queries, side), keys)), []

        y, sums = _over_all(lambda q, *keys: self.attend(q, keys, self.causal), queries, *keys)
        (y, sums), _ = self.met(meet, (y, sums), keys, [])
        results = [self.returned(y.astype(queries.dtype), self.at)]
        return [*results, self.returned(sums, 2)] if len(self.site.op.results) > 1 else results

    def joined(self, state: tuple[Any, Any], side: Any, found: tuple[Any, Any]) -> tuple[Any, Any]:
        """The state after the queries of a side have met more keys."""
        y, sums = (_at(x, side) for x in state)
        total = jnp.logaddexp(sums, found[1])
        both = y * self.rows(jnp.exp(sums - total)) + found[0] * self.rows(jnp.exp(found[1] - total))
        return _with(state[0], both, side), _with(state[1], total, side)

    def rows(self, sums: Any) -> Any:
        """[sequence, head, query] in the order of a query's dimensions."""
        return (sums if self.at == 2 else sums.swapaxes(1, 2))[..., None]

    def gradients(self) -> list[Any]:
        rows, keys = [self.dealt(port) for port in (QUERY, SUMS, RESULT, COTANGENT)], self.own()

        def meet(dq: Any, side: Any, keys: Sequence[Any]) -> tuple[Any, list[Any]]:
            more, *part = self.bind([_at(x, side) for x in rows], keys, False)
            return _with(dq, _at(dq, side) + more, side), part

        dq, *own = _over_all(lambda *x: self.bind(x[:4], x[4:], self.causal), *rows, *keys)
        dq, found = self.met(meet, dq.astype(np.float32), keys, own)
        dq = self.returned(dq.astype(rows[0].dtype), self.at)
        return [dq, *found]

    # meetings of queries with the keys of others

    def met(self, meet: Meet, state: Any, keys: Sequence[Any], own: Sequence[Any]) -> tuple[Any, list[Any]]:
        """The state after all meetings, and the gradients of keys: `own` are those of the keys that belong here."""
        return self.around(meet, state, keys, own) if self.is_ring else self.through(meet, state, own)

    def around(self, meet: Meet, state: Any, keys: Sequence[Any], own: Sequence[Any]) -> tuple[Any, list[Any]]:
        """The keys of other devices arrive one after the other, and with them the sums of their gradients. What goes on
        to the next device does not wait for the kernels of a step."""
        hops = ways_of(self.n)
        here, sums = jnp.stack(keys), jnp.stack(own) if own else None
        if self.causal:
            state, sums = self.visited(meet, state, sums, here, [(1, 0)])

        def step(by: int, i: Any, state: Any, sums: Any, here: Any, on: bool = True) -> tuple[Any, Any, Any]:
            sums, coming = self.passed(sums, by), self.passed(here, by) if on else None
            return *self.visited(meet, state, sums, here, self.sides(i * by)), coming

        def both(carry: tuple[Any, Any], i: Any) -> tuple[tuple[Any, Any], None]:
            state, held = carry
            then: dict[int, tuple[Any, Any]] = {}
            for by in held:
                state, *then[by] = step(by, i, state, *held[by])
            return (state, then), None

        held = {1: [sums, self.passed(here, 1)]}
        if hops[-1]:
            held[-1] = [None if sums is None else jnp.zeros_like(sums), self.passed(here, -1)]
        if hops[-1] > 1:
            (state, held), _ = lax.scan(both, (state, held), np.arange(1, hops[-1], dtype=np.int32))
        home: list[Any] = []
        for by, (sums, here) in held.items():
            for i in range(max(hops[-1], 1), hops[by] + 1):
                state, sums, here = step(by, i, state, sums, here, i < hops[by])
            home.append(self.passed(sums, -by * hops[by]))
        if not own:
            return state, []
        total = sum(x.astype(np.float32) for x in home).astype(home[0].dtype)
        return state, [self.returned(x, self.at) for x in total]

    def visited(self, meet: Meet, state: Any, sums: Any, keys: Any, sides: Sequence[Halves]) -> tuple[Any, Any]:
        """The state and the sums of gradients after sides of queries have met sides of `keys`, given in pairs."""
        for pair in sides:
            # The barrier keeps XLA from cutting out the sides of all meetings at once.
            state, (mine, theirs) = lax.optimization_barrier((state, tuple(map(jnp.int32, pair))))
            key, value = _at(keys, theirs, 1)
            state, found = meet(state, mine, [key, value])
            if found:
                sums = _with(sums, _at(sums, theirs, 1) + jnp.stack(found).astype(np.float32), theirs, 1)
        return state, sums

    def sides(self, away: Any) -> list[Halves]:
        """The sides that meet when the keys of the device `away` places before this one are here. The late half meets
        all early ones. The early half meets those of the devices before, the late half the late ones of those after."""
        same = jnp.where((self.me - away) % self.n < self.me, 0, 1)
        return [(1, 0), (same, same)] if self.causal else [(0, 0)]

    def through(self, meet: Meet, state: Any, own: Sequence[Any]) -> tuple[Any, list[Any]]:
        """The keys are whole: the late half meets all early ones at once, the others one by one."""
        state, found = meet(state, 1, [lax.slice_in_dim(x, 0, self.n * self.size, axis=self.at) for x in self.keys])
        rest = [(0, self.n * self.size if d == self.at else 0, 0) for d in range(4)]
        found = [lax.pad(y, jnp.zeros((), y.dtype), rest) for y in found]
        for side, number in enumerate((self.me, 2 * self.n - 1 - self.me)):
            found = self.added(found, [x[side] for x in own], number)

        def step(carry: tuple[Any, Any], i: Any) -> tuple[tuple[Any, Any], None]:
            (state, found), early = carry, i < self.me
            side, number = jnp.where(early, 0, 1), jnp.where(early, i, self.n + i - self.me)
            state, part = meet(state, side, [self.part(x, number) for x in self.keys])
            return (state, self.added(found, part, number)), None

        return lax.scan(step, (state, found), np.arange(self.n - 1, dtype=np.int32))[0]

    def added(self, whole: Sequence[Any], parts: Sequence[Any], number: Any) -> list[Any]:
        """Gradients of all keys, with those of half `number` added. No half gets more than two."""
        found = [self.part(x, number).astype(np.float32) + y for x, y in zip(whole, parts, strict=True)]
        start = number * self.size
        return [
            lax.dynamic_update_slice_in_dim(x, y.astype(x.dtype), start, self.at)
            for x, y in zip(whole, found, strict=True)
        ]


def _over_all(fn: Any, *stacked: Any) -> list[Any]:
    """The results of `fn` for all sides in one batch, stacked."""
    found = fn(*(x.reshape(-1, *x.shape[2:]) for x in stacked))
    return [y.reshape(len(stacked[0]), -1, *y.shape[1:]) for y in found]


def _at(x: Any, side: Any, dim: int = 0) -> Any:
    return lax.dynamic_index_in_dim(x, side, dim, keepdims=False)


def _with(x: Any, part: Any, side: Any, dim: int = 0) -> Any:
    return lax.dynamic_update_index_in_dim(x, part.astype(x.dtype), side, dim)


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
