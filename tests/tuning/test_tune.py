"""`shardc.tune`: every mesh planned as by hand, ranked by what the plans say; the best of them runs."""

import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from shardc import S
from shardc.errors import ArgumentError, MeshError, PipelineError, PlacementError, ShardcError
from shardc.machine.mesh import view
from shardc.machine.topology import TOPOLOGIES
from shardc.pipelines import PipelinePlan
from tests.pipeline.pipelines import batch, dense, error, layers, training

HALVES = {"x": {"data": S(0)}, "y": {"data": S(0)}}


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, np.float32)


def loss(params, x, y):
    return ((jnp.tanh(x @ params["up"]) @ params["down"] - y) ** 2).mean()


def step(params, x, y):
    value, grads = jax.value_and_grad(loss)(params, x, y)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def shapes(rows=4096, width=1024, hidden=4096):
    return {"up": f32(width, hidden), "down": f32(hidden, width)}, f32(rows, width), f32(rows, width)


def arrays(rows=32, width=8, hidden=16):
    rng = np.random.default_rng(0)
    params = {"up": rng.normal(size=(width, hidden)), "down": rng.normal(size=(hidden, width))}
    x, y = rng.normal(size=(rows, width)), rng.normal(size=(rows, width))
    return jax.tree.map(lambda a: np.asarray(a, np.float32), (params, x, y))


def chain_loss(params, batch):
    x = batch["x"]
    for layer in params:
        x = dense(layer, x)
    return error(x, batch)


def marked_loss(params, batch):
    x = batch["x"]
    for i, layer in enumerate(params):
        x = dense(layer, x)
        x = shardc.stage_boundary(x) if i == 1 else x
    return error(x, batch)


def chain(count, rows, width=4):
    """Parameters and batch."""
    return jax.tree.map(lambda x: np.asarray(x, np.float32), (layers(count, width), batch(rows, width)))


def as_shapes(tree):
    return jax.tree.map(lambda x: f32(*x.shape), tree)


def assert_close(got, want):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        np.testing.assert_allclose(np.asarray(g), w, rtol=1e-5, atol=1e-5)


def sizes_of(candidate):
    return {a: n for a, n in candidate.axes.items() if n > 1}


@pytest.mark.sampled(by=lambda machine, pins: {str(machine), str(pins)})
@pytest.mark.parametrize("pins", [{}, HALVES])
@pytest.mark.parametrize("machine", [{"devices": 8}, {"devices": 16, "topology": "v5p"}, {"topology": "h100:4x2"}])
def test_candidates_are_planned_and_ranked_as_by_hand(machine, pins):
    found = shardc.tune(step, *shapes(), **machine, in_placements=pins, donate_argnames="params", tries=6)
    whole = {"topology": found.best.mesh.abstract_device.device_kind} if "topology" in machine else {}
    by_hand = []
    for c in found.candidates:
        mesh = shardc.make_mesh(**whole, **c.axes)
        assert mesh == c.mesh
        plan = shardc.function(step, mesh=mesh, in_placements=pins, donate_argnames="params").plan(*shapes())
        assert (plan.seconds, plan.bytes_per_device, plan.gap) == (c.seconds, c.bytes, c.gap)
        assert plan.memory.peak == c.memory
        assert plan.inputs == c.plan.inputs
        by_hand.append(float(f"{plan.seconds:.3g}"))
    assert by_hand == sorted(by_hand)
    assert len({tuple(c.axes.items()) for c in found.candidates}) == len(found.candidates)
    assert found.best is found.candidates[0]
    assert all(c.fits for c in found.candidates)


def test_all_meshes_are_planned_if_there_are_tries_for_them():
    found = shardc.tune(step, *shapes(64, 16, 32), devices=8, in_placements=HALVES, tries=100, pipe=())
    assert found.others == 0
    assert sorted(tuple(sizes_of(c).items()) for c in found.candidates) == [
        (("data", 2), ("fsdp", 2), ("model", 2)), (("data", 2), ("model", 4)), (("data", 4), ("model", 2)),
        (("data", 8),), (("fsdp", 4), ("model", 2)), (("model", 8),),
    ]  # fmt: skip


def test_few_tries_are_for_meshes_of_few_axes_and_what_refines_the_best():
    every = shardc.tune(step, *shapes(), devices=16, topology="v5p", tries=100)
    some = shardc.tune(step, *shapes(), devices=16, topology="v5p", tries=6)
    one = shardc.tune(step, *shapes(), devices=16, topology="v5p", tries=1)
    assert [sizes_of(c) for c in one.candidates] == [{"data": 16}]
    assert len(some.candidates) == 6
    assert one.others == len(every.candidates) - 1
    assert some.others == len(every.candidates) - 6
    known = {str(c.axes): c.seconds for c in every.candidates}
    assert all(c.seconds == known[str(c.axes)] for c in some.candidates)
    assert some.best.seconds <= one.best.seconds
    planned = {frozenset(sizes_of(c).values()) for c in some.candidates}
    three = [sorted(sizes_of(c).values()) for c in some.candidates if len(sizes_of(c)) == 3]
    assert three
    for a, b, c in three:  # two of its axes as one
        assert planned & {frozenset((a * b, c)), frozenset((a, b * c)), frozenset((a * c, b))}


@pytest.mark.parametrize("pins", [{}, HALVES])
def test_the_best_runs_as_it_was_planned(pins):
    args = arrays()
    found = shardc.tune(step, *args, in_placements=pins)
    assert view(found.best.mesh).size == len(jax.devices())
    exe = found.best.function.compile(*args)
    assert exe.plan is found.best.plan
    assert exe.audit().ok
    assert_close(found.best.function(*args), jax.jit(step)(*args))
    again = shardc.function(step, mesh=shardc.make_mesh(**found.best.axes), in_placements=pins)
    assert_close(again(*args), jax.jit(step)(*args))


def test_arguments_may_be_arrays_wherever_they_live():
    args = jax.device_put(arrays(), jax.devices()[3])
    found = shardc.tune(step, *args, devices=4, tries=2)
    assert [c.seconds for c in found.candidates] == [
        c.seconds for c in shardc.tune(step, *as_shapes(args), devices=4, tries=2).candidates
    ]


def test_the_function_is_traced_once():
    traced = []

    def counted(params, x, y):
        traced.append(1)
        return step(params, x, y)

    shardc.tune(counted, *shapes(), devices=8, pipe=())
    assert len(traced) == 1


def test_static_arguments_and_results_are_said_as_always():
    def scaled(x, w, how):
        return x @ w * (2 if how == "twice" else 1)

    found = shardc.tune(
        scaled, f32(64, 32), f32(32, 32), "twice", devices=4, static_argnums=2, out_placements={"model": S(1)},
        axes=("data", "model"),
    )  # fmt: skip
    for c in found.candidates:
        assert str(c.plan.out_placements) == ("{model: S(1)}" if c.axes["model"] > 1 else "{}")


# --- memory ----------------------------------------------------------------------------------------------------------


def peaks():
    found = shardc.tune(step, *shapes(), devices=8, topology="v5p", in_placements=HALVES, tries=50)
    return sorted(c.memory for c in found.candidates if c.plan is not None)


def test_what_does_not_fit_comes_last_and_is_marked():
    room = peaks()[2]
    found = shardc.tune(step, *shapes(), devices=8, topology="v5p", in_placements=HALVES, tries=50, hbm=f"{room}B")
    fits = [c.fits for c in found.candidates]
    assert fits == sorted(fits, reverse=True)
    assert any(fits)
    assert all(c.memory <= room for c in found.candidates if c.fits)
    assert found.best.fits
    late = [c.memory for c in found.candidates if c.plan is not None and not c.fits]
    assert late == sorted(late)
    assert str(found).count("too much") == len(late)


def test_nothing_fits():
    found = shardc.tune(step, *shapes(), devices=8, topology="v5p", tries=3, hbm="1MB")
    assert not any(c.fits for c in found.candidates)
    assert str(found).endswith("No candidate fits in memory.")
    with pytest.raises(MeshError, match=r"step: no candidate fits in the 1000000 bytes of a device"):
        _ = found.best


def test_a_mesh_without_a_plan_is_listed(monkeypatch):
    """A mesh for which planning fails, as where no plan fits in memory."""
    plan = type(found := shardc.function(step, mesh=shardc.make_mesh(data=1))).plan

    def refuse(self, *args, **kwargs):
        if dict(self.mesh.shape)["data"] == 8:
            raise ShardcError("step on data=8: too large\nby far")
        return plan(self, *args, **kwargs)

    monkeypatch.setattr(type(found), "plan", refuse)
    got = shardc.tune(step, *shapes(), devices=8, tries=50)
    assert [sizes_of(c) for c in got.candidates if c.plan is None] == [{"data": 8}]
    assert got.candidates[-1].plan is None and not got.candidates[-1].fits
    assert "Without a plan\n  data=8\n    step on data=8: too large\n    by far\n" in str(got)
    assert len(got.candidates) == 3  # its refinements are planned: they refine another mesh too


def test_the_least_memory_is_said_beside_what_the_fastest_plan_takes():
    """With room for all, gathered weights are kept for the backward pass; within less they are gathered again."""
    wide = [{"w": f32(2048, 2048), "b": f32(2048)}] * 8, {"x": f32(4096, 2048), "y": f32(4096, 2048)}
    pins = {"params": shardc.rules({"*/w": {"data": S(0)}}), "batch": {"data": S(0)}}
    run, options = training(chain_loss, 1), {"in_placements": pins, "donate_argnames": "params"}
    found = shardc.tune(run, *wide, devices=8, topology="v5p", axes="data", pipe=(), **options)
    (c,) = found.candidates
    assert c.least < 0.8 * c.memory
    assert f"{c.least / 2**20:.1f} MiB" in str(found)
    room = (c.least + c.memory) // 2
    less = shardc.function(run, mesh=shardc.make_mesh(topology="v5p:2x2x2", hbm=room, data=8), **options).plan(*wide)
    assert c.least <= less.memory.peak <= room
    assert less.seconds > c.seconds


# --- pipelines -------------------------------------------------------------------------------------------------------


def test_pipelines_are_candidates_of_functions_with_a_loop():
    params, rows = chain(4, 16)
    found = shardc.tune(training(chain_loss, 4), *as_shapes((params, rows)), devices=4, tries=60, pipe=(2, 4))
    assert found.others == 0
    piped = [c for c in found.candidates if c.pipeline is not None and c.plan is not None]
    names = {(c.axes["pipe"], c.pipeline.schedule) for c in piped}
    assert {(2, "1f1b"), (2, "zb-h1"), (4, "1f1b"), (2, "interleaved")} <= names
    assert {c.microbatches for c in piped} == {4}
    assert all(isinstance(c.plan, PipelinePlan) and len(c.plan.stages) >= c.axes["pipe"] for c in piped)
    assert "stages, 1f1b" in str(found.explain(60))


def test_time_of_a_pipeline_is_that_of_its_tasks_plans():
    params, rows = chain(4, 16)
    found = shardc.tune(
        training(chain_loss, 4), *as_shapes((params, rows)), devices=4, topology="v5p", tries=30, pipe=(2,),
        schedules=("gpipe",),
    )  # fmt: skip
    piped = [c for c in found.candidates if c.pipeline is not None]
    assert piped
    for c in piped:  # of tasks as short as these each takes as long as its launch
        assert c.seconds >= 2 * (4 + 1) * TOPOLOGIES["v5p"].dispatch
        assert c.seconds == pytest.approx(c.plan.seconds, rel=1e-3)


def test_time_of_a_pipeline_counts_what_light_operations_read_and_write():
    wide = [{"w": f32(4096, 4096), "b": f32(4096)}] * 4, {"x": f32(65536, 4096), "y": f32(65536, 4096)}
    found = shardc.tune(
        training(chain_loss, 4), *wide, devices=2, topology="v5p", pipe=(2,), schedules=("gpipe",), axes="data"
    )
    (c,) = [c for c in found.candidates if c.pipeline is not None]

    def busiest(seconds):
        """Of the stages, in all microbatches."""
        tasks = [[t.plan for t in s.tasks.all.values() if t.id.in_loop and t.plan is not None] for s in c.plan.stages]
        return max(4 * sum(map(seconds, plans)) for plans in tasks)

    assert busiest(lambda p: p.added_seconds) < busiest(lambda p: p.seconds) < c.seconds == c.plan.seconds


def test_a_pipeline_that_was_chosen_runs():
    params, rows = chain(4, 16)
    fn = training(chain_loss, 4)
    found = shardc.tune(fn, params, rows, devices=4, tries=60, pipe=(2,), schedules=("1f1b",))
    c = next(c for c in found.candidates if c.pipeline is not None and c.axes["data"] == 2)
    want = jax.jit(fn)(params, rows)
    assert_close(c.function(params, rows), want)
    again = shardc.function(fn, mesh=shardc.make_mesh(**c.axes), pipeline=c.pipeline)
    assert_close(again(params, rows), want)


def test_marks_say_how_many_stages():
    params, rows = chain(4, 16)
    found = shardc.tune(training(marked_loss, 4), *as_shapes((params, rows)), devices=8, tries=60)
    piped = [c for c in found.candidates if c.pipeline is not None]
    assert {(c.axes["pipe"], c.pipeline.stages) for c in piped} == {(2, "marked")}
    assert all(c.plan is not None for c in piped)


def test_microbatches_are_tried():
    params, rows = chain(2, 16)
    found = shardc.tune(
        partial(training, chain_loss), *as_shapes((params, rows)), devices=2, microbatches=(1, 4), tries=60, pipe=(2,),
        schedules=("1f1b",),
    )  # fmt: skip
    assert sorted((c.microbatches, c.pipeline is not None) for c in found.candidates) == [
        (1, False), (1, True), (4, False), (4, True),
    ]  # fmt: skip
    assert_close(found.best.function(params, rows), jax.jit(training(chain_loss, 4))(params, rows))


def test_without_a_loop_there_are_no_pipelines():
    found = shardc.tune(step, *shapes(), devices=4)
    assert all(c.pipeline is None for c in found.candidates)
    assert "No pipelines" in str(found)
    assert "No pipelines" not in str(shardc.tune(step, *shapes(), devices=4, pipe=()))
    with pytest.raises(PipelineError, match="runs over one loop of microbatches, found none"):
        shardc.tune(step, *shapes(), devices=4, pipe=(2,))


def test_stages_that_are_too_many_are_told():
    params, rows = chain(1, 16)
    found = shardc.tune(training(chain_loss, 8), *as_shapes((params, rows)), devices=16, topology="v5p", pipe=(16,))
    assert "Without a plan" in str(found)
    assert "16 stages need 15 cuts" in str(found)


# --- what is printed -------------------------------------------------------------------------------------------------


def test_the_table(golden):
    found = shardc.tune(
        step, *shapes(), topology="v5p:4x4x2", in_placements=HALVES, donate_argnames="params", hbm="45MB", tries=12
    )
    golden("tune", str(found))
    assert found.explain(3) in (text := found.explain(3))
    assert "The 3 best" in text


def test_the_table_of_pipelines(golden):
    wide = [{"w": f32(8192, 8192), "b": f32(8192)}] * 4, {"x": f32(8192, 8192), "y": f32(8192, 8192)}
    found = shardc.tune(partial(training, chain_loss), *wide, topology="h100:2x4", microbatches=(4, 8), tries=12)
    golden("tune_pipelines", str(found))


SCRIPT = """
import shardc
from tests.tuning.test_tune import step, shapes, HALVES
print(shardc.tune(step, *shapes(), devices=16, topology="v5p", in_placements=HALVES, tries=5))
"""


def test_the_same_in_each_process():
    text = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": "."}, check=True,
        capture_output=True, text=True,
    ).stdout  # fmt: skip
    here = shardc.tune(step, *shapes(), devices=16, topology="v5p", in_placements=HALVES, tries=5)
    assert text == f"{here}\n"


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"devices": 64}, MeshError, "needs 64 devices, this machine has 8"),
        ({"devices": 0}, ArgumentError, "devices=0; it has to be 1 or more"),
        ({"topology": "v5p"}, MeshError, "has no number of devices"),
        ({"topology": "v5q", "devices": 8}, MeshError, "There is no topology 'v5q'"),
        ({"topology": "v5p:2x2x1", "devices": 8}, MeshError, "devices=8: topology v5p:2x2x1 has 4"),
        ({"topology": "v5p:4x4x4", "devices": 24}, MeshError, "no mesh of 24 devices lies along whole parts"),
        ({"axes": ()}, ArgumentError, "write names that differ"),
        ({"axes": ("data", "data")}, ArgumentError, "write names that differ"),
        ({"axes": ("data", "pipe")}, ArgumentError, '"pipe" is the axis of pipelines'),
        ({"tries": 0}, ArgumentError, "tries=0; it has to be 1 or more"),
        ({"schedules": ("1f1p",)}, PipelineError, 'unknown schedule "1f1p".*Did you mean "1f1b"'),
        ({"pipe": (3,)}, PipelineError, "3 ranks; a number of ranks has to be 2 or more and divide the 8 devices"),
        ({"in_placements": {"z": {"data": S(0)}}}, ArgumentError, "names 'z', which is no argument"),
        ({"in_placements": {"x": {"rows": S(0)}}}, PlacementError, "the mesh has no axis 'rows'"),
        ({"microbatches": (2,)}, ArgumentError, "cannot be called with one number: missing"),
        ({"donate_argnames": "param"}, ArgumentError, "Did you mean"),
    ],
)
def test_errors(options, kind, text):
    with pytest.raises(kind, match=text):
        shardc.tune(step, *shapes(64, 16, 32), **{"devices": 8 if "topology" not in options else None, **options})


def test_arguments_that_do_not_fit():
    with pytest.raises(ArgumentError, match="missing a required argument: 'y'"):
        shardc.tune(step, *shapes()[:2], devices=8)
    with pytest.raises(ArgumentError, match="returns a int"):
        shardc.tune(lambda m: m, f32(8), devices=8, microbatches=(2,))
