"""Arrays of a softmax in float32 that are materialized on TPU, compared with the peak of XLA:TPU for the same programs,
compiled alone for one chip of v5p."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from shardc import compat
from shardc.passes.estimate.backend import CPU, GPU, TPU, ScheduledEqn, kind_of
from shardc.passes.estimate.live_ranges import live_ranges
from shardc.passes.estimate.memory import profile_memory
from shardc.passes.estimate.softmax import find_scores
from shardc.passes.rewrite.sink_constants import sink_constants
from shardc.passes.trace.canonicalize import canonicalize
from shardc.sbp.placement import REPLICATED, B, Placement, S

WIDTH, HEAD, LAYERS = 1024, 128, 3


def weights_of(scores_T, masked=True):
    T, S = scores_T.shape[-2:]
    scores_T = scores_T.astype(jnp.float32)
    if masked:
        scores_T = jnp.where(jnp.tril(jnp.ones((T, S), bool)), scores_T, -jnp.inf)
    return jax.nn.softmax(scores_T).astype(jnp.bfloat16)


def plain(p, x, masked=True):
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, p[name]) for name in "qkv")
    weights = weights_of(jnp.einsum("bthk,bshk->bhts", q, k) / HEAD**0.5, masked)
    return jnp.einsum("bthk,hkd->btd", jnp.einsum("bhts,bshk->bthk", weights, v), p["out"])


def grouped(p, x, masked=True):
    q = jnp.einsum("btd,dgrk->btgrk", x, p["q"])
    k, v = (jnp.einsum("btd,dgk->btgk", x, p[name]) for name in "kv")
    weights = weights_of(jnp.einsum("btgrk,bsgk->bgrts", q, k) / HEAD**0.5, masked)
    return jnp.einsum("btgrk,grkd->btd", jnp.einsum("bgrts,bsgk->btgrk", weights, v), p["out"])


def summed(p, x, masked=True, shared=True):
    """Scores as the sum of two parts of each query, as in DeepSeek: the second part shares its keys among all heads."""
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, p[name]) for name in "qkv")
    scores_T = jnp.einsum("bthk,bshk->bhts", q[..., :64], k[..., :64])
    if shared:
        scores_T += jnp.einsum("bthk,bsk->bhts", q[..., 64:], k[:, :, 0, 64:])
    else:
        scores_T += jnp.einsum("bthk,bshk->bhts", q[..., 64:], k[..., 64:])
    weights = weights_of(scores_T / HEAD**0.5, masked)
    return jnp.einsum("bthk,hkd->btd", jnp.einsum("bhts,bshk->bthk", weights, v), p["out"])


def no_mask(p, x):
    return summed(p, x, masked=False)


def of_each_head(p, x):
    return summed(p, x, shared=False)


def error(p, x, attention):
    step = jax.checkpoint(lambda x, p: (x + attention(p, x), None), prevent_cse=False)
    return jnp.mean(jnp.square(jax.lax.scan(step, x, p)[0].astype(jnp.float32)))


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def traced(f, *args):
    return sink_constants(canonicalize(jax.make_jaxpr(f)(*args))[0])


@pytest.mark.parametrize(
    ("attention", "rows", "length", "heads", "gradient", "xla"),
    [
        (plain, 4, 4096, (48,), False, 24.21),  # both the scores and the exponentials
        (grouped, 4, 4096, (8, 6), False, 24.15),
        (grouped, 4, 4096, (8, 6), True, 24.62),
        (grouped, 4, 2048, (8, 6), True, 6.40),  # the scores in bfloat16 instead of the exponentials
        (grouped, 16, 1024, (8, 4), True, 4.50),
        (summed, 2, 4096, (48,), True, 15.86),  # the sum in bfloat16, and its gradient twice
        (summed, 4, 2048, (48,), True, 8.36),
        (no_mask, 4, 2048, (48,), True, 8.36),
        (summed, 2, 4096, (48,), False, 12.17),
        (of_each_head, 2, 4096, (48,), True, 12.93),
    ],
)
def test_beside_xla(attention, rows, length, heads, gradient, xla):
    """`xla`: GiB of `peak_memory_in_bytes`, jax 0.10.2."""
    shapes = {"q": (WIDTH, *heads, HEAD), "k": (WIDTH, heads[0], HEAD), "out": (*heads, HEAD, WIDTH)}
    p = {name: array(LAYERS, *shape) for name, shape in {**shapes, "v": shapes["k"]}.items()}

    def f(p, x):
        return error(p, x, attention)

    jaxpr = traced(jax.grad(f) if gradient else f, p, array(rows, length, WIDTH))
    assert 1.0 <= profile_memory(jaxpr, defaultdict(lambda: REPLICATED), {}).peak / 2**30 / xla < 1.15


# --- what is found ---------------------------------------------------------------------------------------------------

KEYS, QUERIES = array(4096, 64), array(16, 2, 64)


def softmax(scores, bias=None):
    scores = scores.astype(jnp.float32) * 0.1
    return jax.nn.softmax(scores if bias is None else scores + bias)


def found(f, *args):
    jaxpr = traced(f, *args)
    steps = [
        ScheduledEqn(e, kind_of(e), [a for a in e.invars if not compat.is_literal(a)], i, i, id(jaxpr))
        for i, e in enumerate(jaxpr.eqns)
    ]
    (exp,) = (s for s in steps if s.eqn.primitive.name == "exp")
    return find_scores(exp, {v: s for s in steps for v in s.eqn.outvars})


BIAS = array(4096, dtype=jnp.float32)


@pytest.mark.parametrize(
    ("equation", "turned"),
    [("sk,trk->rts", True), ("sk,trk->trs", False), ("trk,sk->trs", False), ("trk,sk->rts", True)],
)
def test_a_product_is_turned_if_no_order_of_its_operands_helps(equation, turned):
    args = (KEYS, QUERIES) if equation.startswith("s") else (QUERIES, KEYS)
    scores = found(lambda a, b: softmax(jnp.einsum(equation, a, b)), *args)
    assert scores is not None
    assert (scores.turned, scores.kept.aval.dtype, scores.rows.aval.dtype) == (turned, jnp.bfloat16, jnp.float32)


def test_long_rows_are_written_if_more_than_the_product_is_in_them():
    def f(keys, queries, *bias):
        return softmax(jnp.einsum("trk,sk->trs", queries, keys), *bias)

    assert found(f, KEYS, QUERIES, BIAS).written and not found(f, KEYS, QUERIES).written
    assert not found(f, array(2048, 64), QUERIES, array(2048, dtype=jnp.float32)).written


def test_a_sum_of_products_is_found():
    def both(keys, queries, more, *last):
        sums = jnp.einsum("trk,sk->rts", queries, keys) + jnp.einsum("trk,srk->rts", queries, more) * 0.5
        return softmax(sums - jnp.einsum("trk,sk->rts", queries, *last) if last else sums)

    more = array(4096, 2, 64)
    two, three = found(both, KEYS, QUERIES, more), found(both, KEYS, QUERIES, more, KEYS)
    assert two is not None and three is not None
    assert two.turned and three.turned and len(two.products) == 2 and len(three.products) == 3
    assert two.kept not in two.products and two.kept.aval.dtype == jnp.bfloat16
    alone = found(lambda q, k: softmax(jnp.einsum("trk,srk->rts", q, k) + jnp.einsum("trk,srk->rts", k, q)), more, more)
    assert alone is not None and not alone.turned


def test_what_else_is_not_found():
    wide = array(4096, 64, dtype=jnp.float32), array(16, 64, dtype=jnp.float32)
    narrow = array(4096, 64), array(16, 64)
    assert found(lambda k, q: softmax(q @ k.T), *wide) is None  # the product is as wide
    assert found(lambda k, q: softmax(q @ k.T + (q @ k.T) ** 2), *narrow) is None  # there are two
    assert found(lambda k, q: jnp.exp((q @ k.T).astype(jnp.float32)), *narrow) is None  # nothing is taken away
    assert found(lambda k, q: softmax(jnp.tanh(q) @ k.T), *narrow) is not None
    assert found(lambda k, q: jnp.exp((q @ k.T).astype(jnp.float32) - jnp.zeros((16, 1))), *narrow) is None  # a number


# --- what is counted -------------------------------------------------------------------------------------------------


def shared_keys(keys, queries, values):
    def f(queries):
        weights = softmax(jnp.einsum("sk,trk->rts", keys, queries)).astype(jnp.bfloat16)
        return jnp.einsum("rts,sk->trk", weights, values).astype(jnp.float32).sum()

    return jax.grad(f)(queries)


def test_the_product_is_kept_instead_of_exponentials():
    """But not where its pieces go around, and not elsewhere."""
    jaxpr = traced(shared_keys, array(1024, 128), array(1024, 4, 128), array(1024, 128))
    keys, queries, _ = jaxpr.invars
    (again,) = live_ranges(jaxpr, {}, TPU).recomputed
    assert not any(live_ranges(jaxpr, {}, backend).recomputed for backend in (CPU, GPU))

    def peak(split, backend):
        placements = dict.fromkeys([*jaxpr.invars, *(v for e in jaxpr.eqns for v in e.outvars)], Placement({"m": B}))
        placements |= {v: Placement({"m": S(dim)}) for v, dim in split.items()}
        return profile_memory(jaxpr, placements, {"m": 4}, backend=backend).peak

    before = replace(TPU, materializes_scores=False)
    ring, whole = {keys: 0, queries: 0, again.scores.kept: 1}, {queries: 0, again.scores.kept: 1}
    assert peak(ring, TPU) == pytest.approx(peak(ring, before), rel=1e-3)
    assert peak(whole, TPU) < peak(whole, before)
