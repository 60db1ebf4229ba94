"""The list of passes, and the program after each of them."""

from __future__ import annotations

from importlib import import_module

import jax
import jax.numpy as jnp
import pytest

import shardc
from shardc import S
from shardc.__main__ import main
from shardc.ir.walk import all_eqns
from shardc.passes import PASSES

NAMES = [p.name for p in PASSES]


def loss(params, x):
    for w in params[:2]:
        x = jnp.tanh(x @ w)
    x = shardc.stage_boundary(x)
    for w in params[2:]:
        x = jnp.tanh(x @ w)
    return (x**2).mean()


def step(params, x):
    value, grads = shardc.accumulate(jax.value_and_grad(loss), microbatches=4)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


SHAPES = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 4, jax.ShapeDtypeStruct((16, 8), jnp.float32)


@pytest.fixture(scope="module")
def plan():
    mesh = shardc.make_mesh(topology="v5p", data=2)
    return shardc.function(step, mesh=mesh, in_placements={"x": {"data": S(0)}}).plan(*SHAPES)


@pytest.fixture(scope="module")
def pipeline():
    mesh = shardc.make_mesh(topology="v5p", pipe=2, data=2)
    options = {"in_placements": {"x": {"data": S(0)}}, "pipeline": shardc.Pipeline()}
    return shardc.function(step, mesh=mesh, **options).plan(*SHAPES)


def test_each_name_stands_once_and_in_a_module_that_is_there():
    assert len(set(NAMES)) == len(NAMES)
    for p in PASSES:
        assert import_module(p.module)


def test_what_ran_is_in_the_list_in_its_order(plan, pipeline):
    for passed in (plan.program.passed, pipeline.pieces.program.passed, pipeline.stages[0].plan.program.passed):
        numbers = [NAMES.index(name) for name, _ in passed]
        assert numbers == sorted(numbers) and numbers


@pytest.mark.parametrize("name", ["canonicalize", "drop_zero_sums", "sink_constants", "recompute_residuals"])
def test_the_program_after_a_pass(plan, name):
    text = plan.explain(after=name)
    assert text.startswith(f"# After {name}\n") and "dot_general" in text and "box" not in text


def test_boxings_are_in_the_program_after_insert_boxing(plan):
    text = plan.explain(after="insert_boxing")
    assert text.count("= box[") == sum(e.primitive.name == "box" for e in all_eqns(plan.boxed.jaxpr)) > 0


def test_stages_and_tasks_have_programs_of_their_own(pipeline):
    assert [line for line in pipeline.explain(after="cut_stages").splitlines() if line.startswith("#")] == [
        "# stage 0 after cut_stages",
        "# stage 1 after cut_stages",
    ]
    assert pipeline.explain(after="split_tasks").count("\n# ") > 3
    assert "stage_boundary" in pipeline.explain(after="canonicalize")


def test_a_name_that_is_none_and_a_pass_that_did_not_run_are_errors(plan):
    ran = "Those that ran are canonicalize, drop_zero_sums, sink_constants, recompute_residuals, insert_boxing."
    with pytest.raises(shardc.ArgumentError, match=r"^after='sink_constant': there is no such pass\. Did you mean"):
        plan.explain(after="sink_constant")
    with pytest.raises(shardc.ArgumentError) as raised:
        plan.explain(after="cut_stages")
    assert str(raised.value) == f"after='cut_stages': it did not run on this plan. {ran}"


def test_the_command_prints_the_list(capsys):
    assert main(["passes"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in NAMES)
