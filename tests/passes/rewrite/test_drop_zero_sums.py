"""Scans carry no sums of zeros: the same results, and smaller loops."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import check_jaxpr, jaxpr_as_fun

import shardc
from shardc import compat
from shardc.ir.loop import Loop
from shardc.passes.rewrite.drop_zero_sums import drop_zero_sums
from shardc.passes.trace.canonicalize import canonicalize
from tests.passes.programs import before_after

X = np.linspace(-1.0, 1.0, 12, dtype=np.float32).reshape(4, 3)
Y = np.full((4, 3), 2.0, np.float32)


def carries(jaxpr):
    return [len(Loop.of(e).carries) for e in jaxpr.eqns if e.primitive.name == "scan"]


def check(fn, *args):
    """The number of carries of each scan, before and after."""
    before = canonicalize(jax.make_jaxpr(fn)(*args))[0]
    after = drop_zero_sums(before)
    check_jaxpr(after)
    got = jaxpr_as_fun(compat.close(after))(*args)
    for g, want in zip(got, jax.tree.leaves(fn(*args)), strict=True):
        np.testing.assert_array_equal(g, want)
    return carries(before), carries(after)


def test_the_text(golden):
    def fn(total, x):
        zeros = lax.full((3,), 0.0, jnp.float32)
        return lax.scan(lambda c, row: ((lax.add(c[0], zeros), lax.add(c[1], row)), None), (total, total), x)[0]

    before = canonicalize(jax.make_jaxpr(fn)(X[0], X))[0]
    golden("drop_zero_sums", before_after(before, drop_zero_sums(before)))


def test_the_gradient_of_what_is_frozen():
    def loss(p, x):
        return jnp.mean((x * p["w"] + jax.lax.stop_gradient(p["frozen"])) ** 2)

    grad = shardc.accumulate(jax.grad(loss), microbatches=2)
    assert check(lambda x: grad({"w": jnp.ones(3), "frozen": jnp.ones(3)}, x), X) == ([2], [1])


@pytest.mark.parametrize(
    ("step", "left"),
    [
        (lambda c, z: (c[0] + jnp.zeros((4, 3)), c[1] + 1), 1),
        (lambda c, z: (c[0] + z, c[1] + 1), 1),
        (lambda c, z: (c[0] + -z.T.reshape(4, 3), c[1] + c[0]), 1),
        (lambda c, z: ((c[0] + z) + (z + z), c[1] + 1), 1),
        (lambda c, z: (c[0], c[1] + z), 0),
        (lambda c, z: (c[1] + z, c[0] + z), 2),
        (lambda c, z: (c[0] + z / 0.0, c[1] + 1), 2),
        (lambda c, z: (z + z, c[1] + 1), 2),
    ],
)
def test_what_stays(step, left):
    def fn(x, y):
        zeros = jnp.zeros((4, 3))
        return lax.scan(lambda c, _: (step(c, zeros), c[0].sum()), (x, y), None, length=3)

    with np.errstate(all="ignore"):
        _, after = check(fn, X, Y)
    assert sum(after) == left


def test_zeros_that_begin_a_sum_are_its_result():
    def fn(x):
        zeros, _ = lax.scan(lambda c, _: (c + jnp.zeros_like(c), None), jnp.zeros_like(x), None, length=3)
        (total, more), _ = lax.scan(lambda c, r: ((c[0] + r, c[1] + zeros), None), (x[0], x), x)
        return total, more

    assert check(fn, X) == ([1, 2], [1])
