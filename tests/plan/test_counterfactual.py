"""What another placement of a value costs, and a pin: the same as a plan that is made with it, or without."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from shardc import AUTO, S
from shardc.report.find_values import find_values, values_of
from shardc.sbp.placement import Placement


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, np.float32)


def two_matmuls(x, w, v):
    with jax.named_scope("mlp"):
        h = jnp.tanh(x @ w)
        with jax.named_scope("down"):
            return h @ v


SHAPES = (f32(64, 16), f32(16, 32), f32(32, 8))


@pytest.fixture(scope="module")
def mesh():
    return shardc.make_mesh(topology="cpu", data=4)


def plan_of(mesh, out=AUTO, **pins):
    return shardc.function(two_matmuls, mesh=mesh, in_placements=pins or AUTO, out_placements=out).plan(*SHAPES)


def named(plan, pattern):
    found = find_values(values_of(plan.program, plan.counterfactuals[0].problem, plan.boxed), pattern)
    assert len(found) == 1, [str(v.name) for v in found]
    return found[0]


@pytest.mark.sampled(by=lambda pins, name: {str(pins), name})
@pytest.mark.parametrize("pins", [{}, {"x": {"data": S(0)}}, {"x": {"data": S(0)}, "w": {"data": S(1)}}])
@pytest.mark.parametrize("name", ["x", "w", "v"])
def test_the_best_plans_with_an_argument_elsewhere_are_those_that_are_made_with_it_pinned_there(mesh, pins, name):
    plan = plan_of(mesh, **pins)
    value = named(plan, name)
    others = list(plan.counterfactuals[0].others(value.node, value.port, 9))
    assert len(others) == 2  # three placements fit a jax.Array, and the plan has one of them
    for other in others:
        assert other.proved
        assert other.placement != value.placement
        made = plan_of(mesh, **{**pins, name: other.placement})
        assert other.plan.seconds == pytest.approx(made.seconds, rel=1e-9)
        assert other.plan.inputs[plan.program.in_paths.index(name)] == other.placement


def test_the_best_plan_with_a_value_made_elsewhere_is_no_better_than_one_that_brings_it_there(mesh):
    plan = plan_of(mesh, x={"data": S(0)})
    value = named(plan, "down/dot_general")
    assert value.placement == Placement({"data": S(0)})
    others = {o.placement: o.plan for o in plan.counterfactuals[0].others(value.node, value.port, 9)}

    def constrained(x, w, v):
        return shardc.constrain(two_matmuls(x, w, v), {"data": S(1)})

    brought = shardc.function(constrained, mesh=mesh, in_placements={"x": {"data": S(0)}}).plan(*SHAPES)
    assert plan.seconds < brought.seconds <= others[Placement({"data": S(1)})].seconds


@pytest.mark.parametrize("pinned", ["x", "w", "v", "result"])
def test_a_plan_without_a_pin_is_that_which_is_made_without_it(mesh, pinned):
    pins = {"x": {"data": S(0)}, "w": {"data": S(1)}, "v": {"data": S(1)}}
    plan = plan_of(mesh, out={"data": S(1)}, **pins)
    without = plan.counterfactuals[0].without([named(plan, pinned).node])
    left = {name: pin for name, pin in pins.items() if name != pinned}
    made = plan_of(mesh, out=AUTO if pinned == "result" else {"data": S(1)}, **left)
    assert without.plan.seconds == pytest.approx(made.seconds, rel=1e-9)
    assert without.plan.seconds <= plan.seconds


def test_the_state_that_is_read_off_a_plan_is_the_plan(mesh):
    def step(w, x):
        def body(h, p):
            return jnp.tanh(h @ p), h.sum()

        h, sums = jax.lax.scan(jax.checkpoint(body), x, w)
        h = jax.lax.cond(h.sum() > 0, lambda h: h * 2, lambda h: h @ w[0], h)
        return jax.lax.while_loop(lambda c: c[1].sum() > 3, lambda c: (c[0] + 1, c[1] / 2), (0, h)), sums

    mesh = shardc.make_mesh(topology="cpu", data=4, model=2)
    pins = {"w": {"model": S(2)}, "x": {"data": S(0), ...: AUTO}}
    plan = shardc.function(step, mesh=mesh, in_placements=pins).plan(f32(3, 16, 16), f32(32, 16))
    same = plan.counterfactuals[0].without([])
    assert same.plan.collectives == plan.collectives
    assert same.plan.seconds == plan.seconds


def test_values_are_named_by_paths_scopes_and_lines(mesh):
    plan = plan_of(mesh)
    values = values_of(plan.program, plan.counterfactuals[0].problem, plan.boxed)
    assert [str(v.name) for v in values] == [
        "argument x", "argument w", "argument v", "mlp/dot_general", "mlp/tanh", "mlp/down/dot_general", "result"
    ]  # fmt: skip
    line = values[3].name.line.partition(" ")[0]
    for pattern, names in {
        "x": ["argument x"],
        "argument x": ["argument x"],
        "copy of argument x": ["argument x"],
        "argument {x,w}  x2": ["argument x", "argument w"],
        "argument *": ["argument x", "argument w", "argument v"],
        "mlp/*": ["mlp/dot_general", "mlp/tanh", "mlp/down/dot_general"],
        "do*n/*": ["mlp/down/dot_general"],
        "dot_general": ["mlp/dot_general", "mlp/down/dot_general"],
        "mlp": ["mlp/dot_general", "mlp/tanh", "mlp/down/dot_general"],
        line: ["mlp/dot_general", "mlp/tanh"],
    }.items():
        assert [str(v.name) for v in find_values(values, pattern)] == names, pattern


def test_backward_passes_and_bodies_of_loops_have_the_names_around_them(mesh):
    def loss(w, x):
        with jax.named_scope("layers"):
            return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0].sum()

    plan = shardc.function(jax.grad(loss), mesh=mesh).plan(f32(3, 16, 16), f32(32, 16))
    names = [str(v.name) for v in values_of(plan.program, plan.counterfactuals[0].problem, plan.boxed)]
    assert "layers/dot_general" in names
    assert "backward/layers/dot_general" in names
    readers = [str(u.reader) for u in named(plan, "w").uses]
    assert readers[:2] == ["layers/scan", "layers/dot_general"]


def test_a_value_without_a_name_is_an_error_with_near_names(mesh):
    plan = plan_of(mesh)
    head = (
        r"no value of the plan has that name. Values are named by the path of an argument or result, by the modules "
        r"and the primitive of the operation that makes them, or by its line, model.py:12; `\*` matches any text."
    )
    with pytest.raises(shardc.ArgumentError, match=rf"^why='mlp/tan': {head} Near are mlp/tanh\.(\n|$)"):
        plan.explain(why="mlp/tan")
    with pytest.raises(shardc.ArgumentError, match=r"Near are mlp/down/dot_general, mlp/dot_general\.(\n|$)"):
        plan.explain(why="down/dot_generale")
    with pytest.raises(shardc.ArgumentError, match=r"There are x, w, v\.(\n|$)"):
        plan.explain(why="qqq")
    with pytest.raises(shardc.ArgumentError, match=r"Near are test_counterfactual.py:\d+"):
        plan.explain(why="test_counterfactual.py:1")
