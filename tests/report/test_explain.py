"""What `plan.explain()` prints, word for word. `pytest --update-golden` writes the texts anew."""

import math
import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardc
from shardc import S
from shardc.machine.mesh import view
from shardc.plan.plan import Unlimited
from shardc.report.explain import BOUND, compared_text, sections_of
from shardc.report.tables import bytes_text, report_text
from tests.report import programs

pytestmark = pytest.mark.plans_eagerly


@pytest.fixture(scope="module")
def mesh():
    return shardc.make_mesh(data=4, model=2)


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, np.float32)


def mlp_params(layers=3):
    return {"layers": [{"up": f32(16, 64), "down": f32(64, 16)} for _ in range(layers)]}


MEGATRON = shardc.rules({"*/up": {"model": S(1)}, "*/down": {"model": S(0)}})


def test_mlp_data_and_tensor_parallel(mesh, golden):
    step = shardc.function(
        programs.mlp_step,
        mesh=mesh,
        in_placements={"params": MEGATRON, "batch": {"data": S(0)}},
        donate_argnames="params",
    )
    plan = step.plan(mlp_params(), {"x": f32(32, 16), "y": f32(32, 16)})
    golden("mlp", plan.explain())


def test_seconds_without_elementwise_work_are_at_least(mesh):
    file = replace(view(mesh).topology, kind="mine", vector=0.0, shape=(), layout=()).to_json()
    mine = shardc.make_mesh(topology=file, data=4, model=2)
    lacking, whole = (shardc.function(jnp.tanh, mesh=m).plan(f32(64, 32)).explain() for m in (mine, mesh))
    assert re.search(r"; at least .*s; proved optimal but for what is unknown\.\n", lacking)
    assert 'Elementwise work takes no time here: topology mine has no "vector" (operations per second).\n' in lacking
    assert re.search(r"; about .*s; proved optimal\.\n", whole) and "takes no time" not in whole


def test_an_operation_without_a_rule(mesh, golden):
    f = shardc.function(programs.ruleless, mesh=mesh, in_placements={"x": {"data": S(0)}, "w": {"model": S(1)}})
    golden("ruleless", f.plan(f32(64, 32), f32(32, 16)).explain())


def test_an_uneven_split(golden):
    mesh = shardc.make_mesh(topology="v5e:4x2", data=8)
    f = shardc.function(programs.uneven, mesh=mesh, in_placements={"x": {"data": S(0)}, "w": {}})
    golden("uneven", f.plan(f32(1001, 12), f32(12, 6)).explain())


def test_closures_and_arguments_that_arrive_elsewhere(mesh, golden):
    f = shardc.function(programs.closing, mesh=mesh, in_placements={"x": {"model": S(1), ...: shardc.AUTO}})
    x = jax.device_put(np.ones((16, 12), np.float32), NamedSharding(mesh, PartitionSpec("data", "model")))
    closing = f.plan(x).explain()
    g = shardc.function(programs.closing, mesh=mesh, in_placements={"x": {"model": S(0)}})
    golden("closures", closing + "\n\n\n" + g.plan(x).explain())


def test_loops_and_notes(mesh, golden):
    rules = shardc.rules({"*s": {"model": S(-1)}, "ws*": {}})
    f = shardc.function(programs.repeated, mesh=mesh, in_placements={"params": rules, "x": {"data": S(0)}})
    golden("loop", f.plan({"ws": f32(5, 16, 16), "bs": f32(5, 16)}, f32(32, 16)).explain())


def test_the_text_is_the_same_whatever_the_terminal(mesh, monkeypatch):
    f = shardc.function(programs.closing, mesh=mesh, in_placements={"x": {"data": S(0)}})
    plain = f.plan(f32(16, 12)).explain()
    for name, value in {"FORCE_COLOR": "1", "COLUMNS": "20", "TERM": "dumb", "TTY_COMPATIBLE": "1"}.items():
        monkeypatch.setenv(name, value)
    again = f.plan(f32(16, 12)).explain()
    assert again == plain
    assert "\x1b" not in plain and "…" not in plain


@pytest.mark.parametrize(("times", "said"), [(0.5, False), (2.0, True)])
def test_a_cheaper_plan_that_takes_longer_is_explained(mesh, times, said):
    plan = shardc.function(mesh=mesh)(lambda x: x.sum()).plan(f32(64, 64))
    plan = replace(plan, unlimited=Unlimited(times * plan.seconds, 1 << 20))
    line = next(line for line in plan.explain().splitlines() if "Memory decided" in line)
    assert line.endswith("does not model communication that overlaps with computation") == said


def test_the_numbers_of_the_head_are_those_of_the_rows(mesh):
    step = shardc.function(programs.mlp_step, mesh=mesh, in_placements={"params": MEGATRON, "batch": {"data": S(0)}})
    plan = step.plan(mlp_params(), {"x": f32(32, 16), "y": f32(32, 16)})
    moves = plan.explain().split("Moves")[1].split("Totals")[0]
    times = [int(n) for n in re.findall(r"  (\d+)  +[\d.]+ (?:bytes?|KiB)  ", moves)]
    assert sum(times) == sum(c.count for c in plan.collectives if c.bytes)


@pytest.mark.parametrize("topology", ["cpu", "v5p"])
def test_the_table_of_arguments_adds_up_to_the_memory_of_arguments(topology):
    mesh = shardc.make_mesh(topology=topology, data=4)
    shapes = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((24, 8), (7,), ())]
    plan = shardc.function(lambda x, y, z: x.sum() + y.sum() + z, mesh=mesh).plan(*shapes)
    assert f"Arguments: 3 arrays, {bytes_text(plan.memory.arguments)} per device" in plan.explain()


def test_the_text_is_one_printer_of_the_sections(mesh):
    plan = shardc.function(lambda x: (x * 2).sum(), mesh=mesh, in_placements={"x": {"data": S(0)}}).plan(f32(8, 4))
    sections = sections_of(plan)
    assert report_text(sections) == plan.explain()
    tables = {s.title.partition(":")[0]: s for s in sections if s.rows}
    assert all(len(row) == len(s.columns) for s in tables.values() for row in s.rows)
    path, aval, placement, why, size = tables["Arguments"].rows[0]
    assert (path, aval, placement, why, size) == ("x", "f32[8,4]", "{data: S(0)}", "pinned", "32 bytes")


def test_of_what_a_plan_is_proved():
    """A pin makes no plan faster that is proved optimal: light arithmetic is split without it."""

    def chain(x, pin):
        d = ((x[:, None] - x[None]) ** 2).sum(-1)
        for _ in range(10):
            d = jnp.sin(d)
        return shardc.constrain(d.sum(1), {"a": shardc.S(0)}) if pin else d.sum(1)

    def plan_of(pin):
        mesh = shardc.make_mesh(a=8)
        return shardc.function(lambda x: chain(x, pin), mesh=mesh, in_placements=({},), out_placements={}).plan(
            jax.ShapeDtypeStruct((512, 3), jnp.float32)
        )

    plan = plan_of(False)
    assert plan.gap == 0.0 and plan.seconds == pytest.approx(plan_of(True).seconds)
    assert "; proved optimal." in plan.explain()
    assert f"{BOUND} No other plan was timed." in plan.explain()


@pytest.mark.parametrize(
    ("trials", "unlimited", "uneven", "text"),
    [
        ([], None, None, "no other plan was timed"),
        ([(1.0, 2.0)], None, None, "1 other plan was timed, none is faster"),
        ([(3.0, 1.0), (math.inf, 1.0)], 4.0, None, "2 other plans were timed, none is faster"),
        (
            [(3.0, 1.0)],
            0.5,
            None,
            "2 other plans were timed, that without the memory limit takes fewer seconds: 500 ms",
        ),
        ([], 0.5, 0.25, "2 other plans were timed, that with uneven results takes fewer seconds: 250 ms"),
    ],
)
def test_plans_that_were_timed(trials, unlimited, uneven, text):
    plan = SimpleNamespace(
        seconds=1.0, trials=[SimpleNamespace(seconds=a, before=b) for a, b in trials],
        unlimited=unlimited and SimpleNamespace(seconds=unlimited), uneven=uneven and SimpleNamespace(seconds=uneven),
    )  # fmt: skip
    assert compared_text(plan) == text
