"""What a pipeline's plan and executable show."""

import json
import re

import jax
import numpy as np
import pytest

import shardc
from shardc import S
from shardc.report.explain import sections_of
from tests.report import pipelines


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, np.float32)


def i32(*shape):
    return jax.ShapeDtypeStruct(shape, np.int32)


MESH = shardc.make_mesh(topology="v5p:2x2x2", pipe=3, data=2)


def tied_params(zeros):
    return {"l": [{"w": zeros(16, 16), "b": zeros(16)} for _ in range(4)], "emb": zeros(32, 16)}


def tied_args(zeros, ints):
    params = tied_params(zeros)
    state = jax.eval_shape(pipelines.OPTIMIZER.init, params)
    state = jax.tree.map(lambda s: zeros(*s.shape) if s.shape else np.zeros(s.shape, s.dtype), state)
    return params, state, {"x": ints(16), "y": ints(16)}


def tied(mesh, **how):
    return shardc.function(
        pipelines.tied_step,
        mesh=mesh,
        in_placements={"batch": {"data": S(0)}},
        donate_argnames=("params", "opt_state"),
        pipeline=shardc.Pipeline(**how),
    )


@pytest.fixture(scope="module")
def plan():
    return tied(MESH).plan(*tied_args(f32, i32))


@pytest.fixture(scope="module")
def deep():
    mesh = shardc.make_mesh(topology="v5p:4x4x4", pipe=8, data=2, model=2)
    tensor = shardc.rules({"*/up": {"model": S(1)}, "*/down": {"model": S(0)}})
    f = shardc.function(
        pipelines.deep_step,
        mesh=mesh,
        in_placements={"params": tensor, "batch": {"data": S(0)}},
        donate_argnames="params",
        pipeline=shardc.Pipeline(schedule="interleaved", chunks=2),
    )
    layers = [{"up": f32(256, 1024), "down": f32(1024, 256)} for _ in range(16)]
    batch = {"x": f32(24 * 64, 256), "y": f32(24 * 64, 256)}
    return f.plan({"layers": layers}, batch)


# -- explain


def test_tied_embedding(plan, golden):
    golden("pipeline_tied", plan.explain())


def test_sections_of_a_pipeline_are_data_too(plan):
    tables = {s.title.partition(":")[0]: s for s in sections_of(plan) if s.rows}
    assert {"Stages", "Arguments", "Results"} <= tables.keys()
    assert all(len(row) == len(s.columns) for s in tables.values() for row in s.rows)
    assert tables["Results"].columns[-2:] == ("stages", ">bytes per device")


def test_sixteen_stages_on_eight_ranks_stay_readable(deep, golden):
    text = deep.explain()
    golden("pipeline_deep", text)
    assert len(text.splitlines()) < 130 and max(map(len, text.splitlines())) < 220


def test_the_numbers_of_the_text_are_those_of_the_plan(deep):
    text = deep.explain()
    timeline = deep.simulate()
    totals = text.split("Totals by axis and kind")[1].split("\n\n")[0]
    counts = [int(n) for n in re.findall(r"  (\d+)  +[\d.]+ (?:bytes?|KiB|MiB|GiB)  ", totals)]
    assert sum(counts) == sum(c.count for c in deep.collectives if c.bytes)
    rows = text.split("Moves within stages")[1].split("\n\n")[0].splitlines()[3:]
    found = [re.match(r"  ([\d, -]*\d)  +.*  (\d+)  +[\d.]+ (?:bytes?|KiB|MiB|GiB)(?:  |$)", row) for row in rows]
    assert sum(len(_numbers(m[1])) * int(m[2]) for m in found) == sum(counts)
    assert f"{100 * timeline.bubble / timeline.makespan:.0f}%" in text


@pytest.mark.parametrize("which", ["plan", "deep"])
def test_the_time_of_each_rank_is_split_by_what_it_goes_to(which, request):
    plan = request.getfixturevalue(which)
    timeline, times = plan.simulate(), plan.rank_times
    assert len(times) == plan.schedule.ranks
    for time, busy in zip(times, timeline.busy, strict=True):
        assert time.total == pytest.approx(plan.seconds, rel=1e-12)
        assert time.wait == pytest.approx(timeline.makespan - busy, rel=1e-12)
    assert plan.time.wait == min(t.wait for t in times) and plan.compute_seconds == plan.time.computing
    runs = [(p, n) for s in plan.stages for p, n in plan._runs(s)]
    for part in ("compute", "memory", "all_gather", "all_reduce", "reduce_scatter", "overlapped"):
        each = sum(n * getattr(p.time, part) for p, n in runs)
        assert sum(getattr(t, part) for t in times) == pytest.approx(each, rel=1e-12)
    launched = sum(n * max(0.0, plan.mesh.topology.dispatch - p.seconds) for p, n in runs)
    assert sum(t.launch for t in times) == pytest.approx(launched, rel=1e-12) and launched > 0


def _numbers(text):
    ends = [part.split("-") for part in text.split(", ")]
    return [n for part in ends for n in range(int(part[0]), int(part[-1]) + 1)]


@pytest.mark.parametrize(
    ("recompute", "text"),
    [
        ("none", "1f1b, 4 microbatches.\n"),
        ("full", "; every stage recomputes its forward pass in its backward pass.\n"),
        (("full", "none", "none"), "; stage 0 recomputes its forward pass in its backward pass.\n"),
        (("full", "full", "none"), "; each of stages 0-1 recomputes its forward pass in its backward pass.\n"),
    ],
)
def test_recompute_is_said(recompute, text):
    plan = tied(MESH, recompute=recompute).plan(*tied_args(f32, i32))
    said = plan.explain()
    assert text in said
    assert any(time.recompute for time in plan.rank_times) is (recompute != "none")
    assert ("of it recomputing" in said) is (recompute != "none")


def test_only_the_kinds_that_occur_are_explained():
    title = tied(MESH, schedule="zb-h1").plan(*tied_args(f32, i32)).explain().split("Schedule: ")[1].split("\n")[0]
    assert title.startswith("stage, task (F forward, I input gradient, W weight gradient), microbatch")


# -- the plan's own pictures


def test_a_plan_draws_what_it_simulates(plan, tmp_path):
    assert plan.timeline(100).splitlines()[0] == "tied_step on pipe=3, data=2 on v5p: 1f1b, 4 microbatches"
    plan.trace(tmp_path / "plan.json")
    events = json.loads((tmp_path / "plan.json").read_text())["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    spans = [s for row in plan.simulate().spans for s in row]
    assert [(e["ts"], e["dur"]) for e in slices] == [(s.start * 1e6, (s.end - s.start) * 1e6) for s in spans]
    assert {e["name"] for e in slices} >= {"L", "F0", "B3", "U"}


def test_a_plan_is_drawn_into_a_file(plan, tmp_path):
    plan.draw(tmp_path / "plan.svg")
    assert "tied_step" in (tmp_path / "plan.svg").read_text()
