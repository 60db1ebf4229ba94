"""Boxings in the program: the text of a program with them, and one device's numbers of it."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import check_jaxpr, jaxpr_as_fun

from shardc import S, compat
from shardc.ir.walk import all_eqns
from shardc.machine.mesh import make_mesh, view
from shardc.passes.place.insert_boxing import Sources, insert_boxing
from shardc.passes.place.place import place
from shardc.passes.place.problem import Requirement, build_problem
from shardc.passes.trace.canonicalize import canonicalize
from shardc.sbp.placement import Pin, Placement
from tests.passes.programs import before_after

ROWS, COLUMNS = Requirement(Pin(Placement({"data": S(0)}))), Requirement(Pin(Placement({"data": S(1)})))
SHAPES = [(8, 4), (4, 8), (8, 4)]


def two_products(x, w, v):
    return (x @ w) @ v


def boxed(inputs, outputs, partings=()):
    jaxpr = canonicalize(jax.make_jaxpr(two_products)(*(jax.ShapeDtypeStruct(s, np.float32) for s in SHAPES)))[0]
    mesh = view(make_mesh(topology="cpu", data=4))
    problem = build_problem(jaxpr, inputs, outputs, ["x", "w", "v"], ["out"])
    return jaxpr, insert_boxing(problem, place(problem, mesh), mesh, partings)


def test_the_text(golden):
    before, after = boxed([ROWS, COLUMNS, ROWS], [ROWS])
    golden("insert_boxing", before_after(before, after.jaxpr))


def test_on_one_device_a_boxing_is_the_identity():
    before, after = boxed([ROWS, COLUMNS, ROWS], [COLUMNS])
    check_jaxpr(after.jaxpr)
    assert any(e.primitive.name == "box" for e in after.jaxpr.eqns)
    args = [np.arange(np.prod(s), dtype=np.float32).reshape(s) for s in SHAPES]
    (want,), (got,) = (jaxpr_as_fun(compat.close(j))(*args) for j in (before, after.jaxpr))
    np.testing.assert_array_equal(want, got)


def test_every_value_has_one_placement_and_equations_agree_with_it():
    _, after = boxed([ROWS, COLUMNS, ROWS], [COLUMNS])
    for eqn in all_eqns(after.jaxpr):
        assert all(v in after.placements for v in (*compat.variables(eqn.invars), *eqn.outvars))
        if eqn.primitive.name == "box":
            assert after.placements[eqn.invars[0]] == eqn.params["src"] != eqn.params["dst"]
            assert after.placements[eqn.outvars[0]] == eqn.params["dst"]


def test_a_value_without_a_line_has_that_of_its_first_operand():
    jaxpr = jax.make_jaxpr(lambda x: jnp.sin(x) + 1.0)(1.0).jaxpr
    assert Sources(jaxpr, ["argument x"])(jaxpr.invars[0]) == "argument x"
    assert "test_insert_boxing.py" in Sources(jaxpr, ["argument x"])(jaxpr.outvars[0])
