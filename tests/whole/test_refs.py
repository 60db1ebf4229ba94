"""`jax.new_ref` inside a function: as jax.jit runs it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as Spec

import shardc
from shardc import S
from shardc.errors import ArgumentError, TracingError
from shardc.ir.walk import all_eqns

MESH = shardc.make_mesh(data=4, model=2)
X = np.linspace(-1.0, 2.0, 128, dtype=np.float32).reshape(16, 8)


def plain(x):
    r = jax.new_ref(x * 1.0)
    r[...] += 1
    return r[...]


def some_rows(x):
    r = jax.new_ref(x * 1.0)
    r[2:4] *= 3
    r[0, 1] = 7.0
    return r[...].sum(0), r[1]


def made_in_a_scan(x):
    def body(c, row):
        r = jax.new_ref(row)
        r[...] += c
        return c + r[...], r[0]

    return lax.scan(body, jnp.zeros(8), x)


def closed_over_by_a_scan(x):
    r = jax.new_ref(jnp.zeros(8))

    def body(c, row):
        r[...] += row
        return c, r[0]

    _, rows = lax.scan(body, 0, x)
    return r[...] * 2, rows


def frozen_after_a_loop(x):
    r = jax.new_ref(jnp.zeros(8))

    def body(i, _):
        r[...] += x[i]

    lax.fori_loop(0, 16, body, None)
    return jax.freeze(r)


def in_a_while(x):
    r = jax.new_ref(x * 1.0)

    def body(i):
        r[i] = r[i] * 2
        return i + 1

    lax.while_loop(lambda i: i < 5, body, 0)
    return r[...]


def in_a_cond(x):
    r = jax.new_ref(x * 1.0)

    def grow():
        r[...] += 1

    def double():
        r[...] *= 2

    lax.cond(x[0, 0] > 0, grow, double)
    return r[...]


def in_a_jit(x):
    r = jax.new_ref(x * 1.0)

    @jax.jit
    def add(y):
        r[...] += y
        return r[0]

    return add(x), r[...]


def in_a_gradient(x):
    def loss(x):
        r = jax.new_ref(jnp.zeros(8))

        def body(_, row):
            r[...] += jnp.sin(row)
            return None, None

        lax.scan(body, None, x)
        return (jax.freeze(r) ** 2).sum()

    return jax.value_and_grad(loss)(x)


def in_a_vmap(x):
    def one(row):
        r = jax.new_ref(row)
        r[0] = r[1] * 2
        return r[...]

    return jax.vmap(one)(x)


def in_a_remat(x):
    @jax.checkpoint
    def one(x):
        r = jax.new_ref(x)
        r[...] = jnp.sin(r[...])
        return jax.freeze(r).sum()

    return jax.grad(one)(x)


def in_a_shard_map(x):
    def body(x):
        r = jax.new_ref(x * 1.0)
        r[...] += lax.psum(x.sum(), "data")
        return r[...]

    return jax.shard_map(body, mesh=MESH, in_specs=Spec("data"), out_specs=Spec("data"), check_vma=False)(x)


def in_microbatches(x):
    def one(w, rows):
        r = jax.new_ref(w)
        r[...] *= rows.sum()
        return jax.freeze(r)

    return shardc.accumulate(one, microbatches=4)(jnp.ones(8), x)


PROGRAMS = [
    plain, some_rows, made_in_a_scan, closed_over_by_a_scan, frozen_after_a_loop, in_a_while, in_a_cond, in_a_jit,
    in_a_gradient, in_a_vmap, in_a_remat, in_a_shard_map, in_microbatches,
]  # fmt: skip


@pytest.mark.sampled(6)
@pytest.mark.parametrize("fn", PROGRAMS)
def test_equals_jit(fn, compiled_fast):
    pins = {"x": {"data": S(0), "model": S(1)}}
    exe = shardc.function(fn, mesh=MESH, in_placements=pins).compile(X)
    for got, want in zip(jax.tree.leaves(exe(X)), jax.tree.leaves(jax.jit(fn)(X)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert exe.audit().ok


def test_the_program_is_pure_and_keeps_its_lines():
    plan = shardc.function(closed_over_by_a_scan, mesh=MESH).plan(X)
    eqns = all_eqns(plan.program.jaxpr)
    assert not any(e.effects for e in eqns)
    assert not {e.primitive.name for e in eqns} & {"new_ref", "get", "swap", "addupdate", "freeze"}
    assert {shardc.compat.source_line(e).partition(" ")[2] for e in eqns} <= {"(closed_over_by_a_scan)", "(body)"}


def test_a_ref_from_outside_is_refused():
    r = jax.new_ref(jnp.zeros(8))

    def given(x, r):
        return x + r[...]

    def held(x):
        r[...] += x.sum(0)
        return x

    with pytest.raises(ArgumentError, match=r"r: a Ref is written to where it lives; pass its value, r\[\.\.\.\], and"):
        shardc.function(given, mesh=MESH).plan(X, r)
    with pytest.raises(TracingError, match=r"held .* reads or writes Refs that were made outside of it; .*\n  Ref"):
        shardc.function(held, mesh=MESH).plan(X)
