"""1F1B written by hand: one loop that dispatches `jax.jit` functions and `jax.device_put`, as well as we know how.

For each stage a forward that gives what its backward wants (`jax.vjp`; weights among it are not kept twice) and a
backward that adds to gradients in place (donated); the last stage's forward lies in its backward. With `recompute` a
stage keeps its input alone, and its backward computes the forward again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.pipeline.models import MICROBATCHES, RATE, STAGES, Workload

LAST = STAGES - 1


class ByHand:
    """A training step of (params by stage, batch) --> (params by stage, loss)."""

    def __init__(self, work: Workload, recompute: bool = False) -> None:
        self.work = work
        self.devices = jax.devices()[:STAGES]
        self.order = list(one_f1b(STAGES, MICROBATCHES))
        pairs = [_recomputed(f) if recompute else _stashed(f) for f in work.stages[:LAST]]
        self.forward = [jax.jit(f) for f, _ in pairs]
        self.backward = [jax.jit(b, donate_argnums=3) for _, b in pairs]
        self.final = jax.jit(_final(work.stages[LAST]), donate_argnums=3)
        self.update = jax.jit(_update, donate_argnums=(0, 1))
        self.shared = {k for k in work.keys[0] if any(k in keys for keys in work.keys[1:])}
        self.sums: list[Any] = []
        self.peak = [0] * LAST + [1]  # the last stage's forward lies in its backward

    def put(self, params: dict[str, Any]) -> list[Any]:
        """Every stage's parameters on its device, and sums of gradients beside them."""
        parts = [jax.device_put(self.work.part(params, s), d) for s, d in enumerate(self.devices)]
        self.sums = jax.block_until_ready([jax.device_put(jax.tree.map(jnp.zeros_like, p), d)
                                           for p, d in zip(parts, self.devices, strict=True)])  # fmt: skip
        return parts

    def __call__(self, params: list[Any], batch: dict[str, Any]) -> tuple[list[Any], Any]:
        xs, ys = ([v[j::MICROBATCHES] for j in range(MICROBATCHES)] for v in (batch["x"], batch["y"]))
        sums = self.sums
        loss = jax.device_put(0.0, self.devices[LAST])
        sent: dict[tuple[int, int], Any] = {}  # by the stage that reads it, and microbatch
        kept: list[dict[int, Any]] = [{} for _ in range(STAGES)]
        gone: dict[tuple[int, int], Any] = {}
        for s, forward, j in self.order:
            if s == LAST and not forward:
                ct, loss, sums[s] = self.final(params[s], sent.pop((s, j)), ys[j], sums[s], loss)
                gone[s - 1, j] = jax.device_put(ct, self.devices[s - 1])
            elif forward and s < LAST:
                y, kept[s][j] = self.forward[s](params[s], sent.pop((s, j)) if s else xs[j])
                sent[s + 1, j] = jax.device_put(y, self.devices[s + 1])
                self.peak[s] = max(self.peak[s], len(kept[s]))
            elif not forward:
                ct, sums[s] = self.backward[s](params[s], kept[s].pop(j), gone.pop((s, j)), sums[s])
                if s:
                    gone[s - 1, j] = jax.device_put(ct, self.devices[s - 1])
        self._add_shared()
        new = [self.update(p, g) for p, g in zip(params, sums, strict=True)]
        self.sums = [g for _, g in new]
        return [p for p, _ in new], loss / MICROBATCHES

    def _add_shared(self) -> None:
        """A parameter of the first and the last stage: both get the sum of its gradients."""
        for key in self.shared:
            first, last = self.sums[0][key], self.sums[LAST][key]
            there = jax.device_put((last, first), (self.devices[0], self.devices[LAST]))
            self.sums[0][key] = _add(first, there[0])
            self.sums[LAST][key] = _add(last, there[1])


_add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b))


def _update(params: Any, sums: Any) -> tuple[Any, Any]:
    new = jax.tree.map(lambda p, g: p - RATE * (g / MICROBATCHES), params, sums)
    return new, jax.tree.map(jnp.zeros_like, sums)


def _stashed(fn: Callable) -> tuple[Callable, Callable]:
    """Forward and backward, with what `jax.vjp` saves between them; weights are left out and put back."""
    found: dict[str, Any] = {}

    def forward(params, x):
        floats = jnp.issubdtype(x.dtype, jnp.floating)  # tokens have no gradient
        y, pull = jax.vjp(fn, params, x) if floats else jax.vjp(lambda p: fn(p, x), params)
        leaves, found["tree"] = jax.tree.flatten(pull)
        weights = {id(w): i for i, w in enumerate(jax.tree.leaves(params))}
        found["weights"] = [weights.get(id(v)) for v in leaves]
        return y, [v for v in leaves if id(v) not in weights]

    def backward(params, saved, ct, sums):
        weights, rest = jax.tree.leaves(params), iter(saved)
        pull = jax.tree.unflatten(found["tree"], [next(rest) if i is None else weights[i] for i in found["weights"]])
        grads, *back = pull(ct)
        return (back[0] if back else None), jax.tree.map(jnp.add, sums, grads)

    return forward, backward


def _recomputed(fn: Callable) -> tuple[Callable, Callable]:
    forward, backward = _stashed(fn)

    def again(params, x, ct, sums):
        return backward(params, forward(params, x)[1], ct, sums)

    return (lambda params, x: (fn(params, x), x)), again


def _final(fn: Callable) -> Callable:
    def final(params, x, y, sums, loss):
        value, (grads, back) = jax.value_and_grad(fn, argnums=(0, 1))(params, x, y)
        return back, loss + value, jax.tree.map(jnp.add, sums, grads)

    return final


def one_f1b(stages: int, microbatches: int) -> Iterator[tuple[int, bool, int]]:
    """(stage, is it a forward, microbatch) in one order that has everything after what it reads."""
    rows = []
    for s in range(stages):
        warm = min(stages - s, microbatches)
        row = [(s, True, j) for j in range(warm)]
        for j in range(microbatches):
            row.append((s, False, j))
            if warm + j < microbatches:
                row.append((s, True, warm + j))
        rows.append(row)
    done: set[tuple[int, bool, int]] = set()
    while any(rows):
        for row in rows:
            while row:
                s, forward, j = row[0]
                before = (s - 1, True, j) if forward else (s + 1, False, j) if s < stages - 1 else (s, True, j)
                if before[0] >= 0 and before not in done:
                    break
                done.add(row.pop(0))
                yield s, forward, j
