"""What `plan.explain(why=...)`, `plan.explain(pins=True)` and `plan.diff(other)` print, word for word."""

import jax
import numpy as np
import pytest

import shardc
from shardc import AUTO, S
from tests.report import loops, programs
from tests.report.test_explain import MEGATRON, f32, mlp_params
from tests.report.test_explain_pipeline import MESH, i32, tied, tied_args


@pytest.fixture(scope="module")
def mesh():
    return shardc.make_mesh(topology="cpu", data=4, model=2)


def mlp_plan(mesh, params=MEGATRON, layers=3, rows=32):
    step = shardc.function(
        programs.mlp_step,
        mesh=mesh,
        in_placements={"params": params, "batch": {"data": S(0)}},
        donate_argnames="params",
    )
    return step.plan(mlp_params(layers), {"x": f32(rows, 16), "y": f32(rows, 16)})


@pytest.fixture(scope="module")
def mlp(mesh):
    return mlp_plan(mesh)


def test_why_an_argument_an_operation_and_a_result_lie_where_they_do(mlp, golden):
    names = ("params/layers/0/up", "programs.py:18", "result 1", "batch/*")
    golden("why", "\n\n\n".join(f"why={name!r}\n\n{mlp.explain(why=name)}" for name in names))


def test_why_in_loops_and_behind_constraints(mesh, golden):
    f = shardc.function(loops.held, mesh=mesh, in_placements={"ws": {"model": S(2)}, "x": {"data": S(0), ...: AUTO}})
    plan = f.plan(f32(3, 16, 16), f32(32, 16))
    names = ("ws", "constrain", "layer")
    golden("why_loop", "\n\n\n".join(f"why={name!r}\n\n{plan.explain(why=name)}" for name in names))


def test_what_pins_cost(mesh, mlp, golden):
    f = shardc.function(
        loops.held, mesh=mesh, in_placements={"ws": {"model": S(2)}, "x": {"data": S(0), ...: AUTO}},
        out_placements={"model": S(1)},
    )  # fmt: skip
    texts = [plan.explain(pins=True) for plan in (mlp, f.plan(f32(3, 16, 16), f32(32, 16)))]
    assert texts[0].startswith(mlp.explain())
    nothing = shardc.function(loops.held, mesh=mesh).plan(f32(3, 16, 16), f32(32, 16)).explain(pins=True)
    golden("pins", "\n\n\n".join(text[text.index("Pins: ") :] for text in (*texts, nothing)))


def test_pins_may_cut_in_different_orders(mesh):
    x = {"x": shardc.Placement({"model": S(0), "data": S(0)}), "y": shardc.Placement({"data": S(0), "model": S(0)})}
    plan = shardc.function(lambda x, y: x + y, mesh=mesh, in_placements=x).plan(f32(32, 16), f32(32, 16))
    pins = plan.explain(pins=True)
    assert pins.count("{data: S(0), model: S(0)}") and pins.count("{model: S(0), data: S(0)}")
    assert all("It is pinned by" in plan.explain(why=name) for name in "xy")


def test_an_argument_that_arrives(golden):
    mesh = shardc.make_mesh(data=4, model=2)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("model"))
    x = jax.device_put(np.ones((16, 12), np.float32), sharding)
    plain = shardc.function(programs.closing, mesh=mesh).plan(x)
    moved = shardc.function(programs.closing, mesh=mesh, in_placements={"x": {"data": S(0)}}).plan(x)
    golden("why_arrives", plain.explain(why="x") + "\n\n\n" + moved.explain(why="x"))


def test_why_on_the_stages_of_a_pipeline(golden):
    plan = tied(MESH).plan(*tied_args(f32, i32))
    pins = plan.explain(pins=True)
    golden("why_pipeline", plan.explain(why="params/emb") + "\n\n\n" + pins[pins.index("Stage 0. Pins") :])
