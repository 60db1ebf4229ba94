"""The report of a flow, as golden text."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np

import shardc
from shardc import P, S
from shardc.dataflow.explain import flow_sections
from shardc.report.tables import seconds_text
from tests.dataflow.flows import trained
from tests.dataflow.test_plan import STATE, flow_of


def without_lines(text):
    """A report without line numbers of this folder."""
    return re.sub(r"\.py:\d+ *", ".py", text)


def test_a_parameter_server(golden):
    golden("parameter_server", without_lines(flow_of().plan(STATE, 0).explain()))


def test_meshes_of_one_shape_are_told_apart_by_their_devices():
    devices = np.array(jax.devices())
    at = [jax.sharding.Mesh(devices[i], ("data",)) for i in ([4, 5], [2, 3], [7, 6], [0, 1, 2, 3])]
    step = [shardc.function(lambda x: x + 1, mesh=mesh, in_placements={"x": {"data": S(0)}}) for mesh in at]
    pair = jax.ShapeDtypeStruct((8,), jnp.float32)

    def cells(flow, title, *columns):
        section = next(s for s in flow_sections(flow.plan(pair)) if s is not None and s.title.startswith(title))
        return [tuple(row[section.columns.index(c)] for c in columns) for row in section.rows]

    @shardc.flow
    def alike(x):
        return step[2](step[1](step[0](x))), None

    assert cells(alike, "Nodes", "node", "where") == [("<lambda>  x3", "data=2 (devices 4, 5; 2, 3; 7, 6)")]
    assert cells(alike, "What", "how", "made") == [
        ("to data=2 (devices 4, 5) at {data: S(0)}", "1 round before"),
        ("to data=2 (devices 2, 3; 7, 6) at {data: S(0)}", ""),
    ]

    @shardc.flow
    def same(x):
        return step[3](step[0](step[0](x))), None

    assert {where for _, where in cells(same, "Nodes", "node", "where")} == {"data=2", "data=4"}


def test_all_placements_of_a_message_are_named():
    two = shardc.function(lambda x: (x, x + 1), mesh=shardc.make_mesh(data=2))
    other = jax.sharding.Mesh(np.array(jax.devices()[4:6]), ("rows",))
    mixed = shardc.function(lambda a, b: a.sum() + b, mesh=other, in_placements=({"rows": S(0)}, {}))

    @shardc.flow
    def train(x):
        return mixed(*two(x)), None

    plan = train.plan(jax.ShapeDtypeStruct((8,), jnp.float32))
    assert "to rows=2 at B and {rows: S(0)}" in plan.explain()


def test_a_recorded_run_says_first_what_it_took():
    with trained() as flow:
        plan = flow.plan(jnp.zeros(4), 0)
        lines = flow_sections(plan)[0].lines
        assert lines[1] == f"A round takes at least {seconds_text(plan.seconds)}, averaged over rounds"
        assert lines[2] == (
            "The time of play, test is unknown: shardc.host(..., seconds=) says it, run(..., record=True) measures it"
        )
        _, given = flow.run(jnp.zeros(4), range(6), record=True)
        line = flow_sections(plan, given.chart)[0].lines[1]
    times = [seconds_text(track.timeline.makespan / 6) for track in given.chart.tracks]
    assert line == (
        f"A round took {times[1]}, averaged over 6 recorded rounds with each node waited for; planned: {times[0]}, "
        "host functions as measured"
    )


def test_a_flow_without_items(golden):
    pair = jax.ShapeDtypeStruct((4,), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)

    @shardc.host(gives=pair, copies=2)
    def sample(number, w):
        return w * number, number

    @shardc.function(mesh=shardc.make_mesh(data=2, topology="v5p:2x2x1"))
    def learn(w, seen):
        return w + seen[0].sum() + seen[1].sum()

    @shardc.flow(credits=1)
    def act_and_learn(w):
        seen = sample(shardc.late(w, 1))
        return learn(w, seen), None

    golden("fleet", without_lines(act_and_learn.plan(jnp.zeros(4)).explain()))


def test_what_is_boxed_on_the_way_is_listed_apart():
    parts = shardc.function(lambda x: x + 1, mesh=shardc.make_mesh(data=2), out_placements={"data": P})
    other = jax.sharding.Mesh(np.array(jax.devices()[4:6]), ("rows",))
    total = shardc.function(lambda x: x * 2, mesh=other, in_placements={"x": {"rows": S(0)}})

    @shardc.flow
    def train(x):
        return total(parts(x)), None

    plan = train.plan(jax.ShapeDtypeStruct((1024,), jnp.float32))
    section = next(s for s in flow_sections(plan) if s is not None and s.title.startswith("What"))
    rows = [dict(zip(section.columns, row, strict=True)) for row in section.rows]
    assert [(row[">bytes"], row[">boxing"]) for row in rows if row["how"].startswith("to rows")] == [
        ("4.0 KiB", "2.0 KiB")
    ]
    assert any(line.startswith("boxing: ") for line in section.lines)
