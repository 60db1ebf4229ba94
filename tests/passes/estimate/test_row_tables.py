"""Arrays that are padded row by row on TPU, compared with the memory of XLA:TPU for the same steps, compiled alone."""

from __future__ import annotations

from collections import defaultdict

import jax
import jax.numpy as jnp
import pytest

from shardc.passes.estimate.backend import GPU, TPU
from shardc.passes.estimate.live_ranges import live_ranges
from shardc.passes.estimate.memory import profile_memory
from shardc.passes.estimate.sizes import filled_bytes, tiled_bytes
from shardc.passes.trace.canonicalize import canonicalize
from shardc.sbp.placement import REPLICATED


def update(table, mean, rows, given):
    grad = jax.grad(lambda table: jnp.sum(jnp.tanh(table[rows]) * given))(table)
    mean = 0.9 * mean + 0.1 * grad
    return table - mean, mean


def traced(f, rows, columns, many):
    table, ids = jax.ShapeDtypeStruct((rows, columns), jnp.float32), jax.ShapeDtypeStruct((many,), jnp.int32)
    return canonicalize(jax.make_jaxpr(f)(table, table, ids, jax.ShapeDtypeStruct((many, columns), jnp.float32)))[0]


@pytest.mark.parametrize(
    ("rows", "columns", "many", "mib", "above"),
    [
        (2**20 + 8, 64, 65536, 2064, 1.1),  # gathered and scattered row by row, moments too
        (2**20, 64, 65536, 1073, 1.4),  # twice as much, which it fills for the gather alone
        (2**19, 64, 65536, 561, 1.4),
        (523520, 64, 4096, 1024, 1.1),  # so, too, but less than 128 MiB are wasted
        (2**18, 64, 4096, 513, 1.1),
        (2**20, 65, 4096, 2113, 1.1),
        (2**20 + 1, 130, 4096, 4162, 1.1),
        (2**20, 127, 4096, 1540, 1.1),  # that is how it lies anyway
        (350720, 32, 4096, 129, 1.1),  # columns side by side: more than 128 MiB would be wasted
        (348160, 32, 4096, 596, 1.1),
        (2**20 + 3, 32, 65536, 393, 1.2),
    ],
)
def test_never_below_what_xla_takes(rows, columns, many, mib, above):
    """`peak_memory_in_bytes` for one chip of v5p, libtpu 0.0.42; table and mean are donated."""
    jaxpr = traced(update, rows, columns, many)
    placements = defaultdict(lambda: REPLICATED)
    found = profile_memory(jaxpr, placements, {}, ties={0: 0, 1: 1}, backend=TPU)
    assert 1.0 <= found.peak / (mib * 2**20) <= above


def test_what_is_a_table():
    jaxpr = traced(update, 100, 64, 10)
    found = live_ranges(jaxpr, {0: 0, 1: 1}, TPU)
    made = {e.primitive.name: e.outvars[0] for e in jaxpr.eqns}
    grad = made["scatter-add"]
    tables = {t.value: t for t in found.tables}
    table, mean, *_ = jaxpr.invars
    assert {table, mean, made["gather"], grad} < set(tables)
    assert tables[table].gathered and tables[table].copied and not tables[grad].copied
    assert tables[mean].copied and tables[grad].begin < tables[mean].begin < tables[grad].end
    assert tables[table].begin < tables[grad].begin <= tables[mean].end <= tables[table].end
    assert not live_ranges(jaxpr, {}, GPU).tables


def test_not_where_columns_are_taken():
    def f(x, *_):
        return jnp.take(x, jnp.arange(3), axis=1), x[:, 2]

    assert not live_ranges(traced(f, 100, 64, 10), {}, TPU).tables


@pytest.mark.parametrize(
    ("shape", "itemsize", "want"),
    [
        ((100, 64), 4, 104 * 128 * 4),
        ((100, 1, 64), 4, 104 * 128 * 4),  # dimensions of 1 do not count
        ((100, 1), 4, tiled_bytes((100, 1), 4)),
        ((3, 100, 64), 2, 3 * 112 * 128 * 2),
        ((100, 128), 4, tiled_bytes((100, 128), 4)),
        ((2**21, 32), 4, tiled_bytes((2**21, 32), 4)),
        ((0, 64), 4, 0),
    ],
)
def test_filled(shape, itemsize, want):
    assert filled_bytes(shape, itemsize, gathered=False) == want
