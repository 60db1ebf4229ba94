"""Saved plans are lowered again as they were, in this and in other processes, or an error says what differs."""

import json
import os
import subprocess
import sys
from random import Random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardc
from shardc import AUTO, S
from shardc.plan.saved_plan import from_json, record, to_json
from tests.mutations import mutated
from tests.report import programs
from tests.report.test_explain import MEGATRON, f32, mlp_params
from tests.report.test_explain_pipeline import MESH, i32, tied, tied_args


@pytest.fixture(scope="module")
def mesh():
    return shardc.make_mesh(data=4, model=2)


def control(w, x):
    def body(h, p):
        return jnp.tanh(h @ p), h.sum()

    h, sums = jax.lax.scan(jax.checkpoint(body), x, w)
    h = shardc.constrain(h, {"data": S(0)})
    h = jax.lax.cond(h.sum() > 0, lambda h: h * 2, lambda h: h @ w[0], h)
    return jax.lax.while_loop(lambda c: c[1].sum() > 3, lambda c: (c[0] + 1, c[1] / 2), (0, h)), sums


def images(x, k):
    y = jax.lax.conv_general_dilated(x, k, (1, 1), "SAME")
    y = jax.lax.reduce_window(y, 0.0, jax.lax.add, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    return jnp.cumsum(y, 1), jax.random.normal(jax.random.key(3), y.shape), jax.lax.top_k(y, 2)


CASES = {
    "a step": (
        programs.mlp_step,
        {"in_placements": {"params": MEGATRON, "batch": {"data": S(0)}}, "donate_argnames": "params"},
        (mlp_params(2), {"x": f32(32, 16), "y": f32(32, 16)}),
    ),
    "control flow": (
        control,
        {"in_placements": {"w": {"model": S(2)}, "x": {"data": S(0), ...: AUTO}}},
        (f32(3, 16, 16), f32(32, 16)),
    ),
    "uneven": (programs.uneven, {"in_placements": {"x": {"data": S(0)}, "w": {}}}, (f32(101, 12), f32(12, 6))),
    "a closure": (programs.closing, {"in_placements": {"x": {"data": S(0)}}}, (f32(16, 12),)),
    "a partial result": (
        lambda x, w: x @ w,
        {"in_placements": ({"model": S(1)}, {"model": S(0)}), "out_placements": {"model": shardc.P}},
        (f32(8, 16), f32(16, 4)),
    ),
    "images": (images, {"in_placements": {"x": {"data": S(2)}}}, (f32(4, 3, 16, 8), f32(3, 3, 3, 3))),
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_a_saved_plan_is_lowered_as_it_was_without_its_pins(mesh, tmp_path, case):
    fn, keywords, args = CASES[case]
    plan = shardc.function(fn, mesh=mesh, **keywords).plan(*args)
    plan.save(tmp_path / "plan.json")
    others = {k: v for k, v in keywords.items() if k == "donate_argnames"}
    step = shardc.function(fn, mesh=mesh, plan=tmp_path / "plan.json", **others)
    again = step.plan(*args)
    assert str(again.boxed.jaxpr) == str(plan.boxed.jaxpr)
    assert again.collectives == plan.collectives
    assert (again.seconds, again.memory, again.gap) == (plan.seconds, plan.memory, plan.gap)
    assert (again.inputs, again.outputs, again.ties) == (plan.inputs, plan.outputs, plan.ties)
    again.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == (tmp_path / "plan.json").read_text()
    exe = step.compile(*args)
    assert exe.audit().ok
    leaves = enumerate(jax.tree.leaves(args))
    values = [np.random.default_rng(i).normal(size=a.shape).astype(a.dtype) for i, a in leaves]
    given = jax.tree.unflatten(jax.tree.structure(args), values)
    want = jax.jit(fn)(*given)
    placed = lambda x: isinstance(x, shardc.PlacedArray)  # noqa: E731
    got = jax.tree.map(np.asarray, step(*given), is_leaf=placed)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-4), got, want)


def test_what_arrives_elsewhere_is_brought_to_where_the_plan_has_it(mesh, tmp_path):
    fn, pins = programs.closing, {"in_placements": {"x": {"data": S(0)}}}
    x = jax.device_put(np.ones((16, 12), np.float32), NamedSharding(mesh, PartitionSpec("model")))
    plan = shardc.function(fn, mesh=mesh, **pins).plan(x)
    plan.save(tmp_path / "moved.json")
    shardc.function(fn, mesh=mesh, **pins).plan(f32(16, 12)).save(tmp_path / "there.json")
    moved, there = (json.loads((tmp_path / name).read_text()) for name in ("moved.json", "there.json"))
    assert moved.pop("seconds") > there.pop("seconds")
    assert moved == there  # what brings it is no part of the program
    step = shardc.function(fn, mesh=mesh, plan=tmp_path / "there.json")
    again = step.plan(x)
    assert again.collectives == plan.collectives
    assert again.gap is None
    assert again.explain(why="x").count("The argument is passed with this placement") == 1
    np.testing.assert_allclose(step(x), np.asarray(x) @ programs.TABLE, rtol=1e-6)


def test_what_arrives_whole_is_cut_where_the_plan_has_it(mesh, tmp_path):
    fn, pins = programs.closing, {"in_placements": {"x": {"data": S(0)}}}
    x = jax.device_put(np.ones((16, 12), np.float32), NamedSharding(mesh, PartitionSpec()))
    plan = shardc.function(fn, mesh=mesh, **pins).plan(x)
    plan.save(tmp_path / "whole.json")
    step = shardc.function(fn, mesh=mesh, plan=tmp_path / "whole.json")
    assert step.plan(x).inputs == plan.inputs
    assert plan.inputs[0] == shardc.Placement()
    np.testing.assert_allclose(step(x), np.asarray(x) @ programs.TABLE, rtol=1e-6)


PROGRAM = """
import sys, shardc
from tests.plan.test_replay import CASES
mesh = shardc.make_mesh(data=4, model=2)
for n, (fn, keywords, args) in enumerate(CASES.values()):
    shardc.function(fn, mesh=mesh, **keywords).plan(*args).save(f"{sys.argv[1]}/{n}.json")
"""


def test_another_process_writes_the_same_files_and_reads_them(mesh, tmp_path):
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    subprocess.run([sys.executable, "-c", PROGRAM, tmp_path], env=environment, check=True)
    for n, (fn, keywords, args) in enumerate(CASES.values()):
        there, here = tmp_path / f"{n}.json", tmp_path / f"{n}_here.json"
        plan = shardc.function(fn, mesh=mesh, **keywords).plan(*args)
        plan.save(here)
        assert there.read_text() == here.read_text()
        assert shardc.function(fn, mesh=mesh, plan=there).plan(*args).collectives == plan.collectives


def test_the_borders_of_a_plan_are_pins(mesh, tmp_path):
    fn, keywords, args = CASES["a step"]
    plan = shardc.function(fn, mesh=mesh, **keywords).plan(*args)
    plan.save(tmp_path / "plan.json")
    saved = shardc.load_plan(tmp_path / "plan.json")
    assert repr(saved) == "SavedPlan(plan.json: mlp_step on data=4, model=2, 6 arguments, 42 operations)"
    pins = {"in_placements": saved.in_placements, "out_placements": saved.out_placements}
    pinned = shardc.function(fn, mesh=mesh, donate_argnames="params", **pins).plan(*args)
    assert (pinned.inputs, pinned.outputs, pinned.collectives) == (plan.inputs, plan.outputs, plan.collectives)
    one, _, (x, w) = CASES["a partial result"]
    plan = shardc.function(one, mesh=mesh, out_placements={"model": shardc.P}).plan(x, w)
    plan.save(tmp_path / "one.json")
    assert str(shardc.load_plan(tmp_path / "one.json").out_placements) == "{model: P(sum)}"


def test_a_pipeline_saves_its_borders(tmp_path):
    plan = tied(MESH).plan(*tied_args(f32, i32))
    plan.save(tmp_path / "plan.json")
    saved = shardc.load_plan(tmp_path / "plan.json")
    assert repr(saved) == "SavedPlan(plan.json: tied_step on pipe=3, data=2, 30 arguments, borders alone)"
    assert set(saved.in_placements) == {"params", "opt_state", "batch"}
    assert str(saved.in_placements["batch"]) == "rules({'x': {data: S(0)}, 'y': {data: S(0)}})"
    with pytest.raises(shardc.PipelineError, match=r"^plan='plan.json': a pipeline is always planned anew. Pin the"):
        shardc.function(programs.mlp_step, mesh=MESH, pipeline=shardc.Pipeline(), plan=saved)
    with pytest.raises(shardc.ArgumentError, match=r"^plan.json holds the borders of a pipeline's plan alone"):
        shardc.function(lambda x: x, mesh=MESH, plan=saved).plan(f32(3))


def step_like(power, grow=0.1):
    def mlp_step(params, batch):
        def loss(params):
            x = batch["x"]
            for layer in params["layers"]:
                x = x + jax.nn.relu(x @ layer["up"]) @ layer["down"]
            return ((x - batch["y"]) ** power).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - grow * g, params, grads), value

    return mlp_step


@pytest.fixture(scope="module")
def saved(mesh):
    keywords = {"in_placements": {"params": MEGATRON, "batch": {"data": S(0)}}}
    return record(shardc.function(step_like(3), mesh=mesh, **keywords).plan(*ARGS))


ARGS = (mlp_params(2), {"x": f32(32, 16), "y": f32(32, 16)})
HEAD = (
    "mlp_step is not a plan of mlp_step as it is called; leave plan= out to plan it anew, and save that with "
    "plan.save(...):\n  "
)


def error(mesh, saved, fn=None, args=ARGS, **keywords):
    with pytest.raises(shardc.ArgumentError) as e:
        shardc.function(fn or step_like(3), mesh=mesh, plan=saved, **keywords).plan(*args)
    return str(e.value)


def test_a_number_in_the_program_may_change(mesh, saved):
    assert shardc.function(step_like(3, grow=0.2), mesh=mesh, plan=saved).plan(*ARGS).gap == saved.gap


def test_all_that_differs_is_in_one_error(mesh, saved):
    other = shardc.make_mesh(data=2, model=4)
    args = (mlp_params(1), {"x": f32(64, 16), "z": f32(64, 16)})

    def fn(params, batch):
        return step_like(3)(params, {"x": batch["x"], "y": jnp.tanh(batch["z"])})

    fn.__name__ = "mlp_step"
    text = error(other, saved, fn, args, in_placements={"batch": {"data": S(1)}})
    assert text.startswith(
        HEAD + "the plan is for the mesh data=4, model=2, this is data=2, model=4.\n"
        "  argument batch/x is f32[64,16], in the plan f32[32,16].\n"
        '  argument batch/z f32[64,16] is not in the plan. Did you mean "batch/y"?\n'
        "  argument params/layers/1/down f32[64,16] is in the plan alone.\n"
    )
    assert "\n  tanh at test_replay.py:" in text
    assert "\n  6 times dot_general is in the plan alone.\n" in text
    assert text.endswith(
        "\n  batch/x is pinned at {data: S(1)} by in_placements: batch, the plan has it at {data: S(0)}."
    )


def test_a_parameter_that_differs_is_named(mesh, saved):
    text = error(mesh, saved, step_like(4))
    assert text.startswith(HEAD + "integer_pow, first at test_replay.py:")
    assert text.endswith("has other parameters, or reads or makes something else, than in the plan.")


def test_what_is_read_by_others_is_another_program(mesh):
    plan = shardc.function(lambda x, y: (x * 2, y), mesh=mesh).plan(f32(8), f32(8))
    text = error(mesh, record(plan), lambda x, y: (y * 2, y), (f32(8), f32(8)))
    assert "mul, first at test_replay.py:" in text
    text = error(mesh, record(plan), lambda x, y: (x * 2, x), (f32(8), f32(8)))
    assert text.endswith("what the function gives back are other values than in the plan.")


def test_the_same_operations_in_another_order(mesh):
    plan = shardc.function(lambda x: (jnp.tanh(x), jnp.sin(x)), mesh=mesh).plan(f32(8))

    def swapped(x):
        sin = jnp.sin(x)
        return jnp.tanh(x), sin

    text = error(mesh, record(plan), swapped, (f32(8),))
    assert "from sin f32[8] -> f32[8] at test_replay.py:" in text
    assert text.endswith("on, the operations are the same in another order.")


NONE = "no plan that shardc saved, or was changed so that it is none"


def a_plan(mesh, at):
    return shardc.function(jnp.tanh, mesh=mesh, in_placements=at, out_placements=at).plan(f32(8, 8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('"shardc plan": 2', '"shardc plan": 1'), "a plan of format 1, and this version of shardc reads format 2;"),
        (('"mesh"', '"mash"'), f"{NONE}: mash, mesh: missing or unknown."),
        (('], ["{data: S(0)}"]]', ']]'), f"{NONE}: zip() argument 2 is shorter than argument 1."),
        (('"{data: S(0)}"', '"{data: Q(0)}"'), f"{NONE}: 'data: Q(0)' in '{{data: Q(0)}}' is not an axis"),
        (("}", "]"), f"{NONE}: Expecting ',' delimiter: line 7"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_plan(mesh, change, message):
    saved = record(a_plan(mesh, {"data": S(0)}))
    text = to_json(saved)
    assert from_json(text, "tanh") == saved and change[0] in text
    assert from_json(text.replace('"recomputed_for_speed"', '"cheaper"'), "tanh") == saved, "its name until 0.1"
    with pytest.raises(shardc.ArgumentError) as e:
        from_json(text.replace(*change), "file")
    assert str(e.value).startswith(f"file is {message}")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES)
def test_a_mutated_file_is_an_error_or_the_same_plan(mesh, tmp_path, case):
    """1,000 in all: never a raw error, never another plan."""
    fn, keywords, args = CASES[case]
    plan = shardc.function(fn, mesh=mesh, **keywords).plan(*args)
    text, path, random, errors = to_json(record(plan)), tmp_path / "plan.json", Random(case), 0
    for _ in range(167):
        path.write_bytes(mutated(text, random))
        try:
            saved = shardc.load_plan(path)
            assert repr(saved) and str(saved.in_placements) and str(saved.out_placements)
            again = shardc.function(fn, mesh=mesh, plan=saved).plan(*args)
        except shardc.ShardcError:
            errors += 1
        else:
            assert str(again.boxed.jaxpr) == str(plan.boxed.jaxpr)
            assert (again.inputs, again.outputs) == (plan.inputs, plan.outputs)
    assert errors > 100


def test_files_that_are_not_there(mesh, tmp_path):
    with pytest.raises(shardc.ArgumentError, match=r"none.json cannot be read as a plan: \[Errno 2\]"):
        shardc.load_plan(tmp_path / "none.json")
    with pytest.raises(shardc.ArgumentError, match=r"none.json cannot be read as a plan"):
        shardc.function(lambda x: x, mesh=mesh, plan=tmp_path / "none.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {
                '["{data: S(0)}"]],\n  ["}", [["{data: S(0)}"]]': '["{data: S(1)}"]],\n  ["}", [["{data: S(1)}"]]',
                '"": ["f32[8,8]", "{data: S(0)}"': '"": ["f32[8,8]", "{data: S(1)}"',
            },
            "tanh cannot be computed at {data: S(0)}, {data: S(1)}.",
        ),
        (
            {'[["{data: S(0)}"]], ["{data: S(0)}"]]': '[["{data: S(1)}"]], ["{data: S(1)}"]]'},
            "a value of argument x is read at {data: S(1)}, and is at {data: S(0)}.",
        ),
        ({',\n  ["}", [["{data: S(0)}"]], []]': ""}, "rows are missing, or operands in one."),
        ({'[["{data: S(0)}"]], [': "[], ["}, "rows are missing, or operands in one."),
    ],
)
def test_placements_that_no_operation_has_are_not_lowered(mesh, change, message):
    text = to_json(record(a_plan(mesh, {"data": S(0)})))
    for old, new in change.items():
        assert old in text
        text = text.replace(old, new)
    assert message in error(mesh, from_json(text, "file"), jnp.tanh, (f32(8, 8),))


def test_axes_that_cut_in_another_order_are_not_the_same_pieces(mesh):
    text = to_json(record(a_plan(mesh, {"data": S(0), "model": S(0)})))
    end, other = '"{data: S(0), model: S(0)}"', '"{model: S(0), data: S(0)}"'
    text = text.replace(f'[{end}]],\n  ["}}", [[{end}]]', f'[{other}]],\n  ["}}", [[{other}]]')
    text = text.replace(f'"": ["f32[8,8]", {end}', f'"": ["f32[8,8]", {other}')
    message = "tanh cannot be computed at {data: S(0), model: S(0)}, {model: S(0), data: S(0)}."
    assert message in error(mesh, from_json(text, "file"), jnp.tanh, (f32(8, 8),))


@pytest.mark.plans_eagerly
def test_the_file(golden, mesh):
    plan = shardc.function(programs.uneven, mesh=mesh, in_placements={"x": {"data": S(0)}, "w": {}})
    golden("plan_json", to_json(record(plan.plan(f32(101, 12), f32(12, 6)))).rstrip())
