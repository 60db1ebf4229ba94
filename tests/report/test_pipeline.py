"""What a pipeline's plan and executable show."""

import json
import re

import jax
import numpy as np
import pytest

import shardc
from shardc import S
from shardc.errors import PipelineError
from shardc.pipeline.plan import HOST_SECONDS
from shardc.pipeline.schedule.methods import make_schedule
from shardc.pipeline.schedule.recorded import recorded
from shardc.report.stage_text import cut_grid, pairs_text, ranges_text, stems, stems_text
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


def test_sixteen_stages_on_eight_ranks_stay_readable(deep, golden):
    text = deep.explain()
    golden("pipeline_deep", text)
    assert len(text.splitlines()) < 120 and max(map(len, text.splitlines())) < 220


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
    launched = sum(n * max(0.0, HOST_SECONDS - p.seconds) for p, n in runs)
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
    assert text in plan.explain()


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


# -- the executable


def zeros(*shape):
    return np.zeros(shape, np.float32)


def ints(n):
    return np.arange(n, dtype=np.int32)


@pytest.fixture(scope="module")
def exe():
    f = tied(shardc.make_mesh(pipe=3, data=2))
    made = f.compile(*tied_args(zeros, ints))
    yield made
    made.executable.close()


def slices_of(path):
    events = json.loads(path.read_text())["traceEvents"]
    pids = {e["args"]["name"].split(" ")[0]: e["pid"] for e in events if e["name"] == "process_name"}
    return {name: [e for e in events if e["ph"] == "X" and e["pid"] == pid] for name, pid in pids.items()}


def test_the_last_call_beside_the_plan(exe, tmp_path):
    with pytest.raises(PipelineError, match=r"there was no call yet; call it, or measure"):
        exe.trace(tmp_path / "step.json")
    exe(*tied_args(zeros, ints))
    exe.trace(tmp_path / "step.json")
    shown = slices_of(tmp_path / "step.json")
    assert [(e["tid"], e["name"]) for e in shown["planned"]] == [(e["tid"], e["name"]) for e in shown["measured"]]
    assert all(e["ts"] > 0 for e in shown["measured"])
    assert "measured (launches by the host): " in exe.timeline()


def test_measuring_waits_for_every_task_and_gives_what_the_call_gives(exe, tmp_path):
    plain = exe(*tied_args(zeros, ints))
    measured = exe.measure(*tied_args(zeros, ints))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), plain, measured)
    assert "measured (every task waited for): " in exe.timeline()
    exe.draw(tmp_path / "step.svg")
    assert "every task waited for" in (tmp_path / "step.svg").read_text()
    exe(*tied_args(zeros, ints))
    assert "launches by the host" in exe.timeline()


def test_measured_registers_are_never_more_than_the_credits(exe):
    last = []
    for call in [exe, exe.measure, exe]:
        call(*tied_args(zeros, ints))
        recording = exe.executable._last
        last.append(recording.timeline(exe.plan.network))
    for timeline in last:
        assert timeline.order() == exe.plan.simulate().order()
        for channel, peak in zip(exe.plan.network.channels, timeline.peaks, strict=True):
            assert channel.registers is None or peak <= channel.registers


def test_measuring_another_call_is_refused(exe):
    params, state, batch = tied_args(zeros, ints)
    with pytest.raises(shardc.errors.ShardcError, match="not the call that was compiled"):
        exe.measure(params, state, {k: v[:8] for k, v in batch.items()})


def test_what_is_no_pipeline_says_so(tmp_path):
    f = shardc.function(lambda x: x * 2, mesh=shardc.make_mesh(data=2))
    compiled = f.compile(zeros(4))
    for look in (
        lambda: compiled.timeline(),
        lambda: compiled.trace(tmp_path / "x.json"),
        lambda: compiled.measure(zeros(4)),
    ):
        with pytest.raises(PipelineError, match=r"is one program, no pipeline.*jax\.profiler\.trace"):
            look()


def test_spans_that_are_not_those_of_the_network_are_refused(plan):
    with pytest.raises(PipelineError, match="recorded: 0 spans of actor 0"):
        recorded(plan.network, [], 0.0)


# -- words


def test_ranges():
    assert ranges_text([5, 0, 1, 2, 2]) == "0-2, 5"
    assert ranges_text([]) == ""


@pytest.mark.parametrize(
    ("pairs", "text"),
    [
        ([(0, 1)], "0 -> 1"),
        ([(0, 1), (1, 2), (2, 3)], "0 -> 1 -> 2 -> 3"),
        ([(i + 1, i) for i in range(7)], "7 -> 6 -> ... -> 0"),
        ([(0, t) for t in range(1, 8)], "0 -> 1-7"),
        ([(2, 0), (1, 0)], "1-2 -> 0"),
        ([(0, 1), (1, 2), (0, 3)], "0 -> 1 -> 2, 0 -> 3"),
    ],
)
def test_pairs(pairs, text):
    assert pairs_text(pairs) == text


def test_stems_tell_what_lives_where():
    found = stems({"l/0/w": 0, "l/0/b": 0, "l/1/w": 0, "l/2/w": 1, "head": 1})
    assert found == {0: ["l/0", "l/1"], 1: ["l/2", "head"]}
    assert stems_text(found[0]) == "l/0-1"
    assert stems_text(["l/2", "head", "a", "b", "c"]) == "l/2, head, and 3 more"


def test_a_wide_grid_is_cut_in_its_middle():
    schedule = make_schedule("1f1b", 4, 32)
    whole, nothing = cut_grid(schedule, 1000)
    assert nothing == "" and whole == "\n".join(str(schedule).splitlines()[1:])
    cut, left_out = cut_grid(schedule, 80)
    assert max(map(len, cut.splitlines())) <= 80 and " ... " in cut
    assert left_out.startswith("columns ") and left_out.endswith(" left out")
    first = cut.splitlines()[0].split(" ... ")
    assert whole.splitlines()[0].startswith(first[0].rstrip())
    assert whole.splitlines()[0].rstrip().endswith(first[1].strip())
