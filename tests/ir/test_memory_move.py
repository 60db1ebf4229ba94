"""Moves between the memories of a device and its host: the identity, and which values they leave on the host."""

import jax
import jax.numpy as jnp
import numpy as np

from shardc.ir.memory_move import host_values, is_memory_move, memory_move_p


def move(x, to):
    return memory_move_p.bind(x, to=to, source="here")


def stacked(x):
    y, rows = jax.lax.scan(lambda c, _: (c * 2, move(c, "host")), x, length=3)
    return jax.lax.scan(lambda c, row: (c + move(row, "device"), None), y, rows)[0]


def test_it_is_the_identity():
    np.testing.assert_array_equal(move(jnp.arange(3), "host"), np.arange(3))
    np.testing.assert_array_equal(jax.jit(stacked)(jnp.ones(2)), np.full(2, 8 + 1 + 2 + 4))


def test_values_on_the_host():
    closed = jax.make_jaxpr(lambda x, y: (move(move(x, "device") + y, "host"), y))(1.0, 2.0)
    jaxpr = closed.jaxpr
    assert host_values(jaxpr) == {jaxpr.invars[0], jaxpr.outvars[0]}
    assert [is_memory_move(e) for e in jaxpr.eqns] == [True, False, True]


def test_the_stack_of_rows_on_the_host_is_there_too():
    jaxpr = jax.make_jaxpr(stacked)(jnp.ones(2)).jaxpr
    first, second = jaxpr.eqns
    found = host_values(jaxpr)
    assert first.outvars[1] in found and first.outvars[0] not in found
    assert second.invars[1] in found
    (row,) = [v for v in second.params["jaxpr"].jaxpr.invars if v in found]
    assert row.aval.shape == (2,)
