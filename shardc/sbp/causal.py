"""Causal attention whose queries are split, by a kernel whose mask counts queries and keys from 0.

Without a window the first device would look at few keys and the last one at all. Each device cuts its block in two
halves, and they are dealt out in zigzag: of 2n halves the device number d gets d, an early one, and 2n-1-d, a late one.
Keys are whole. Halves of queries meet halves of keys, whole but on the diagonal, as often on every device, and results
are joined by the sums of their exponentials. The results go back to where their queries came from.

                keys 0 1 2 3 4 5         n = 3, device 1
    queries 1        w c                 c: causal, w: whole
            4        w w w w c

With a window each device reads the keys before its block as well, and in the gradients the queries after it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardc.sbp.piece import placed_at
from shardc.sbp.signature import Aval, Operation, Passed, Setting, Site

Halves: TypeAlias = tuple[Any, Any]

QUERY, KEY, VALUE, SUMS, RESULT, COTANGENT = 0, 1, 2, 10, 11, 12
"""Operands of attention, and those that its gradients have besides."""


def is_attention(primitive: str) -> bool:
    """Whether this is cuDNN's attention, or its gradients."""
    return primitive in ("dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper")


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


def zigzag_sends(setting: Setting) -> list[Aval]:
    """The halves that each device sends: of operands with a row for each query, then of results."""
    op, at = setting.op, tokens_of(setting.op)
    gradients = len(op.operands) > COTANGENT
    there = [QUERY, SUMS, RESULT, COTANGENT] if gradients else [QUERY]
    found = [(setting.operand_shape(i), op.operands[i].dtype, tokens_of(op, i)) for i in there]
    back = op.results[:1] if gradients else op.results
    found += [(setting.result_shape(i), a.dtype, at if i == 0 else 2) for i, a in enumerate(back)]
    n = math.prod(setting.sizes[a] for a in setting.operands[QUERY].axes_of(at))
    moved = sum(map(_moves, zigzag_routes(n)))
    return [Passed(_halved(shape, dim), dtype) for shape, dtype, dim in found for _ in range(moved)]


def zigzag_held(setting: Setting) -> int:
    """The bytes of the halves that were dealt out and of the results that go back."""
    return sum(math.prod(a.shape) * np.dtype(a.dtype).itemsize for a in zigzag_sends(setting))


def _moves(route: Sequence[tuple[int, int]]) -> bool:
    return any(source != target for source, target in route)


def _halved(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    return tuple(n // 2 if d == dim else n for d, n in enumerate(shape))


def zigzag(site: Site, *operands: Any) -> Sequence[Any]:
    """The local results of attention, or of its gradients."""
    run = _Zigzag(site, operands)
    return run.gradients() if len(operands) > COTANGENT else run.attention()


class _Zigzag:
    """The part of one device."""

    def __init__(self, site: Site, operands: Sequence[Any]) -> None:
        self.site, self.at = site, tokens_of(site.op)
        self.axes = site.operands[QUERY].axes_of(self.at)
        self.n = math.prod(site.sizes[a] for a in self.axes)
        self.me = site.linear_index(self.axes)
        self.operands, self.keys, self.others = operands, operands[KEY : VALUE + 1], operands[VALUE + 1 : SUMS]
        self.size = operands[QUERY].shape[self.at] // 2

    # where halves are

    def dealt(self, port: int) -> Any:
        """The early and the late half of an operand that belong to this device, stacked."""
        dim = tokens_of(self.site.op, port)
        parts = jnp.split(self.operands[port], 2, dim)
        return jnp.stack(
            self.turned([self.sent(x, route) for x, route in zip(parts, zigzag_routes(self.n), strict=True)])
        )

    def returned(self, halves: Any, dim: int) -> Any:
        """The results for the block of this device."""
        routes = [[(t, s) for s, t in route] for route in zigzag_routes(self.n)]
        parts = [self.sent(x, route) for x, route in zip(self.turned(halves), routes, strict=True)]
        return jnp.concatenate(parts, dim)

    def sent(self, x: Any, route: Sequence[tuple[int, int]]) -> Any:
        return self.site.wire.permute(x, self.axes, route) if _moves(route) else x

    def turned(self, halves: Sequence[Any]) -> Halves:
        """From (even, odd) numbers to (early, late) halves, and back."""
        first, second = halves
        even = self.me % 2 == 0
        return jnp.where(even, first, second), jnp.where(even, second, first)

    def part(self, x: Any, number: Any) -> Any:
        """Half `number` of keys or of what has a row for each of them."""
        return lax.dynamic_slice_in_dim(x, number * self.size, self.size, self.at)

    def own(self, x: Any) -> Any:
        """The early and the late half of keys, stacked."""
        return jnp.stack([self.part(x, self.me), self.part(x, 2 * self.n - 1 - self.me)])

    def met(self, i: Any) -> tuple[Any, Any]:
        """Meeting `i` of n-1: 0 if the early half is met with half `i`, else 1, and the half of keys that is met. The
        late half has met all early ones."""
        early = i < self.me
        return jnp.where(early, 0, 1), jnp.where(early, i, self.n + i - self.me)

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
        queries = self.dealt(QUERY)
        y, sums = _over_both(lambda q, *keys: self.attend(q, keys, True), queries, *map(self.own, self.keys))
        first = [lax.slice_in_dim(x, 0, self.n * self.size, axis=self.at) for x in self.keys]
        state = self.joined((y, sums), 1, self.attend(queries[1], first))

        def step(state: tuple[Any, Any], i: Any) -> tuple[tuple[Any, Any], None]:
            side, number = self.met(i)
            found = self.attend(_at(queries, side), [self.part(x, number) for x in self.keys])
            return self.joined(state, side, found), None

        (y, sums), _ = lax.scan(step, state, np.arange(self.n - 1, dtype=np.int32))
        results = [self.returned(y.astype(queries.dtype), self.at)]
        return [*results, self.returned(sums, 2)] if len(self.site.op.results) > 1 else results

    def joined(self, state: tuple[Any, Any], side: Any, found: tuple[Any, Any]) -> tuple[Any, Any]:
        """The state after one half of the queries, that of `side`, has met more keys."""
        y, sums = (_at(x, side) for x in state)
        total = jnp.logaddexp(sums, found[1])
        both = y * self.rows(jnp.exp(sums - total)) + found[0] * self.rows(jnp.exp(found[1] - total))
        return _with(state[0], both, side), _with(state[1], total, side)

    def rows(self, sums: Any) -> Any:
        """[sequence, head, query] in the order of a query's dimensions."""
        return (sums if self.at == 2 else sums.swapaxes(1, 2))[..., None]

    def gradients(self) -> list[Any]:
        rows = [self.dealt(port) for port in (QUERY, SUMS, RESULT, COTANGENT)]
        first = [lax.slice_in_dim(x, 0, self.n * self.size, axis=self.at) for x in self.keys]
        dq, *own = _over_both(lambda *x: self.bind(x[:4], x[4:], True), *rows, *map(self.own, self.keys))
        more, *found = self.bind([x[1] for x in rows], first, False)
        rest = [
            (0, x.shape[d] - y.shape[d], 0) if d == self.at else (0, 0, 0)
            for x, y in zip(self.keys, found, strict=True)
            for d in range(4)
        ]
        found = [lax.pad(y, jnp.zeros((), y.dtype), rest[:4]) for y in found]
        for side, number in enumerate((self.me, 2 * self.n - 1 - self.me)):
            found = self.added(found, [x[side] for x in own], number)
        dq = dq.astype(np.float32)
        state = _with(dq, dq[1] + more, 1), found

        def step(state: tuple[Any, list[Any]], i: Any) -> tuple[tuple[Any, list[Any]], None]:
            (dq, found), (side, number) = state, self.met(i)
            more, *part = self.bind([_at(x, side) for x in rows], [self.part(x, number) for x in self.keys], False)
            return (_with(dq, _at(dq, side) + more, side), self.added(found, part, number)), None

        (dq, found), _ = lax.scan(step, state, np.arange(self.n - 1, dtype=np.int32))
        return [self.returned(dq.astype(rows[0].dtype), self.at), *found]

    def added(self, whole: Sequence[Any], parts: Sequence[Any], number: Any) -> list[Any]:
        """Gradients of all keys, with those of half `number` added. No half gets more than two."""
        found = [self.part(x, number).astype(np.float32) + y for x, y in zip(whole, parts, strict=True)]
        start = number * self.size
        return [
            lax.dynamic_update_slice_in_dim(x, y.astype(x.dtype), start, self.at)
            for x, y in zip(whole, found, strict=True)
        ]


def _over_both(fn: Any, *stacked: Any) -> list[Any]:
    """The results of `fn` for both halves in one batch, stacked."""
    found = fn(*(x.reshape(-1, *x.shape[2:]) for x in stacked))
    return [y.reshape(2, -1, *y.shape[1:]) for y in found]


def _at(x: Any, side: Any) -> Any:
    return lax.dynamic_index_in_dim(x, side, keepdims=False)


def _with(x: Any, part: Any, side: Any) -> Any:
    return lax.dynamic_update_index_in_dim(x, part.astype(x.dtype), side, 0)


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
