"""The name of each value of a program, and who reads it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from shardc import S
from shardc.plan.names import ValueName, names_of
from tests.report.page import plans


def layer(w, x):
    return jnp.einsum("bi,io->bo", x, w)


def loss(w, x):
    with jax.named_scope("block"):
        h = jnp.tanh(layer(w, x))
    return (layer(w, h) ** 2).sum()


@pytest.fixture(scope="module")
def plan():
    mesh = shardc.make_mesh(topology="v5p", data=4)
    step = shardc.function(jax.value_and_grad(loss), mesh=mesh, in_placements={"x": {"data": S(0)}})
    return step.plan(plans.f32(64, 64), plans.f32(256, 64))


def test_an_operation_has_the_name_of_its_modules_or_else_of_its_function(plan):
    names = names_of(plan.boxed, plan.program)
    found = {str(name) for name in names.operations.values() if name.word == "dot_general"}
    assert found == {f"{back}{name}/dot_general" for back in ("", "backward/") for name in ("block", "layer")}
    assert {str(names.values[v]) for v in plan.boxed.jaxpr.invars} == {"argument w", "argument x"}
    assert [str(use.reader) for use in names.results] == ["result 0", "result 1"]


def test_names_of_scopes_as_jax_has_them_are_known_too(plan):
    for older in ("block/bi,io->bo/dot_general", "backward/bi,io->bo/dot_general", "bi,io->bo/dot_general", "tanh"):
        assert plan.explain(why=older).partition(":")[0].rpartition("/")[2] in ("dot_general", "tanh")
    with pytest.raises(shardc.ArgumentError, match="There are w, x, "):
        plan.explain(why="qqq")


def test_a_boxing_makes_a_copy_that_is_read_where_its_value_is(plan):
    names = names_of(plan.boxed, plan.program)
    copies = [e.outvars[0] for e in plan.boxed.jaxpr.eqns if e.primitive.name == "box"]
    assert copies and all(str(names.values[v]) == f"copy of {names.values[v].original}" for v in copies)
    for v in copies:
        for use in names.uses[v]:
            assert use.value == names.values[v].original and use.way and use.at == plan.boxed.placements[v]


def test_the_input_of_a_body_has_the_name_of_what_it_is_given_and_its_end_is_a_reader():
    plan = plans.with_loops()
    names = names_of(plan.boxed, plan.program)
    w = plan.boxed.jaxpr.invars[1]
    assert str(names.values[w]) == "argument ws"
    assert {str(u.reader) for u in names.uses[w]} >= {"looped/scan", "body/cond", "body/dot_general"}
    ends = {str(u.reader) for uses in names.uses.values() for u in uses if u.reader.kind == "the end of"}
    assert ends == {"the end of looped/scan", "the end of body/cond"}


def test_names_that_are_known_stay(plan):
    x = plan.boxed.jaxpr.invars[1]
    known = {x: ValueName("value", "dot_general", "model.py:3 (before)")}
    names = names_of(plan.boxed, plan.program, known)
    assert str(names.values[x]) == "before/dot_general"
    assert np.all([str(u.value) == "before/dot_general" for u in names.uses[x]])
