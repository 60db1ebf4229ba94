"""Tools that walk programs and read equations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardc.ir.walk import all_eqns, bytes_of, executions, itemsize_of, operation_of, setting_of, short_aval, work_dtype
from shardc.sbp.placement import REPLICATED, Placement


def _jaxpr(fn, *args):
    return jax.make_jaxpr(fn)(*args).jaxpr


def test_equations_of_nested_bodies_follow_their_equation():
    def body(c, x):
        return lax.cond(x > 0, jnp.sin, jnp.cos, c), None

    names = [e.primitive.name for e in all_eqns(_jaxpr(lambda xs: lax.scan(body, 1.0, xs)[0], np.ones(3, np.float32)))]
    assert names.index("scan") < names.index("cond") < names.index("cos") < names.index("sin")


def test_how_often_equations_run():
    def outer(c, x):
        return lax.scan(lambda c, y: (jnp.sin(c) * y, None), c, jnp.ones(5))[0] + jnp.cos(x), None

    runs = {
        e.primitive.name: n for e, n in executions(_jaxpr(lambda xs: jnp.exp(lax.scan(outer, 1.0, xs)[0]), np.ones(3)))
    }
    assert (runs["exp"], runs["cos"], runs["sin"], "scan" in runs) == (1, 3, 15, False)


def test_sizes():
    jaxpr = _jaxpr(lambda x, k: (x, k), np.ones((2, 3), np.float16), jax.random.split(jax.random.key(0), 4))
    x, keys = jaxpr.invars
    assert (itemsize_of(x.aval), bytes_of(x)) == (2, 12)
    assert (itemsize_of(keys.aval), bytes_of(keys)) == (8, 32)
    assert short_aval(x.aval) == "f16[2,3]"


def test_an_equation_as_a_rule_sees_it():
    jaxpr = _jaxpr(lambda x: x * np.float32(2.0), np.ones((8, 3), np.float32))
    (eqn,) = jaxpr.eqns
    op = operation_of(eqn)
    assert op.name == "mul"
    assert [tuple(a.shape) for a in (*op.operands, *op.results)] == [(8, 3), (), (8, 3)]
    split = Placement.parse("{a: S(0)}")
    setting = setting_of(eqn, {jaxpr.invars[0]: split, eqn.outvars[0]: split}, {"a": 4, "one": 1})
    assert setting.operands == (split, REPLICATED)  # a literal has no placement
    assert setting.results == (split,)
    assert setting.sizes == {"a": 4}
    assert work_dtype(eqn) == np.float32


def test_an_operation_without_operands_computes_in_the_type_of_its_result():
    (eqn,) = _jaxpr(lambda: lax.iota(np.int32, 4)).eqns
    assert work_dtype(eqn) == np.int32
