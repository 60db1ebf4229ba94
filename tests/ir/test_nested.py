"""How the values of nested equations are linked with those outside."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from shardc.ir.nested import REMAT, nested_bodies, with_nested


def scanned(w, c, xs):
    return lax.scan(lambda c, x: (c * w + x, c), c, xs)


def looped(w, c, xs):
    return lax.while_loop(lambda s: s[0] < w.sum(), lambda s: (s[0] + 1, s[1] * xs.sum()), (0.0, c))


def branched(w, c, xs):
    return lax.cond(w[0] > 0, lambda a, b: (a, b.sum(0)), lambda a, b: (a * 2, b.max(0)), c, xs)


def remat(w, c, xs):
    return jax.checkpoint(lambda a, b: jnp.sin(a) * b)(w, c)


def eqn_of(fn, name):
    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((4,), (4,), (3, 4))]
    return next(e for e in jax.make_jaxpr(fn)(*shapes).jaxpr.eqns if e.primitive.name in name)


@pytest.mark.parametrize(
    ("fn", "name", "counts"),
    [
        (scanned, ["scan"], [(1, 1, 3, False)]),
        (looped, ["while"], [(1, 2, 1, True), (1, 2, 1, False)]),
        (branched, ["cond"], [(2, 0, 1, False)] * 2),
        (remat, REMAT, [(2, 0, 1, False)]),
    ],
)
def test_each_input_is_linked_with_its_operand(fn, name, counts):
    eqn = eqn_of(fn, name)
    bodies = nested_bodies(eqn)
    assert [(b.fixed, b.carries, b.trips, b.decides) for b in bodies] == counts
    for b in bodies:
        for i, (v, a) in enumerate(b.given(eqn)):
            assert v.aval.shape == (a.aval.shape[1:] if i >= b.rows_at else a.aval.shape)
        starts = [eqn.invars[n].aval.shape for n in b.carried]
        assert b.decides or starts == [v.aval.shape for v in b.jaxpr.outvars[: b.carries]]
        assert b.unchanged(eqn) == b.given(eqn)[: b.fixed]
    same = with_nested(eqn, [b.jaxpr for b in bodies], [b.fixed for b in bodies], bodies[-1].carries)
    again = zip(nested_bodies(eqn.replace(params=same)), bodies, strict=True)
    assert all((a.fixed, a.carries, [*a.operands]) == (b.fixed, b.carries, [*b.operands]) for a, b in again)


def test_another_equation_has_none():
    assert nested_bodies(jax.make_jaxpr(jnp.sin)(1.0).jaxpr.eqns[0]) == []
