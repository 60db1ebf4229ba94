"""The list of passes, and the program after each of them."""

from __future__ import annotations

from collections import Counter
from importlib import import_module

import jax
import jax.numpy as jnp
import pytest
from jax import lax

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


def test_each_name_stands_once_and_is_that_of_a_function():
    assert len(set(NAMES)) == len(NAMES)
    for p in PASSES:
        module = import_module(p.module)
        assert p.runs == "in the search" or callable(getattr(module, p.function or p.name))


def test_what_ran_is_in_the_list_in_its_order(plan, pipeline):
    for passed in (plan.program.passed, pipeline.pieces.program.passed, pipeline.stages[0].plan.program.passed):
        numbers = [NAMES.index(name) for name, _ in passed]
        assert numbers == sorted(numbers) and numbers


@pytest.mark.parametrize("name", ["canonicalize", "fold_transposes", "sink_constants", "recompute_residuals"])
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
    ran = (
        "Those that ran are canonicalize, batch_lookups, fold_transposes, fold_reversals, drop_zero_sums, "
        "sink_constants, narrow_products, share_equal, recompute_residuals, insert_boxing."
    )
    with pytest.raises(shardc.ArgumentError, match=r"^after='sink_constant': there is no such pass\. Did you mean"):
        plan.explain(after="sink_constant")
    with pytest.raises(shardc.ArgumentError) as raised:
        plan.explain(after="cut_stages")
    assert str(raised.value) == f"after='cut_stages': it did not run on this plan. {ran}"


def test_the_command_prints_the_list(capsys):
    assert main(["passes"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in NAMES)


CHIPS = shardc.make_mesh(topology="v5p", data=8)
ROWS, COLUMNS = {"data": S(0)}, {"data": S(1)}


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def sums(x):
    """The second sum is always of zeros."""
    return lax.scan(lambda c, row: ((c[0] + row, c[1] + jnp.zeros(())), None), (jnp.zeros(8), jnp.zeros(())), x)[0]


def layers(w, x):
    return lax.scan(lambda x, w: (jnp.sin(jnp.tanh(x @ w)), None), x, w)[0].sum()


WINDOW = {"in_placements": (ROWS,), "out_placements": ROWS}
TRANSFORM = {"in_placements": (ROWS,), "out_placements": COLUMNS}
SPLIT = {"in_placements": ({}, ROWS)}
EXAMPLES = [
    ("canonicalize", lambda x: jax.jit(jnp.tanh)(x), (f32(8, 8),), {}, {"jit": 1}, {"tanh": 1}),
    ("fold_transposes", lambda h, w: h @ w.T, (f32(8, 8), f32(8, 8)), {}, {"transpose": 1}, {}),
    ("fold_reversals", lambda x: jnp.cumsum(x[::-1], 0)[::-1], (f32(8, 8),), {}, {"rev": 2}, {}),
    ("fix_order", lambda x: -x.sum(), (f32(8, 8),), {"deterministic": True}, {"reduce_sum": 1}, {"in_order": 1}),
    ("drop_zero_sums", sums, (f32(8, 8),), {}, {"add": 1}, {}),
    ("share_equal", lambda x: x / x.sum() + x * x.sum(), (f32(8, 8),), {}, {"reduce_sum": 1}, {}),
    (
        "compose_windows", lambda x: jnp.pad(x, ((1, 1), (0, 0), (0, 0)))[2:], (f32(1024, 1024, 256),), WINDOW,
        {"slice": 1, "convert_element_type": 1}, {},
    ),
    (
        "compose_windows", lambda x: jnp.roll(x, 1, 0), (f32(1024, 1024, 256),), WINDOW,
        {"slice": 2, "concatenate": 1}, {"join_ranges": 1},
    ),
    ("chain_transforms", jnp.fft.rfftn, (f32(512, 512, 512),), TRANSFORM, {}, {"fft": 2, "transpose": 4}),
    (
        "recompute_residuals", jax.grad(layers), (f32(8, 512, 512), f32(65536, 512)), SPLIT,
        {}, {"tanh": 1},
    ),
    ("insert_boxing", lambda w, x: x.sum() * w, (f32(8), f32(8, 8)), SPLIT, {}, {"box": 1}),
]  # fmt: skip
"""Of passes over one program: a function, its arguments and options; what goes, and what comes."""


@pytest.mark.parametrize(
    ("name", "fn", "args", "options", "gone", "come"), EXAMPLES, ids=lambda x: x if isinstance(x, str) else ""
)
def test_an_example_of_a_pass(name, fn, args, options, gone, come):
    plan = shardc.function(fn, mesh=CHIPS, **options).plan(*args)
    programs = [("", jax.make_jaxpr(fn)(*args)), *plan.program.passed, ("insert_boxing", plan.boxed.jaxpr)]
    at = [n for n, _ in programs].index(name)
    before, after = (
        Counter(e.primitive.name for e in all_eqns(getattr(j, "jaxpr", j))) for _, j in programs[at - 1 : at + 1]
    )
    assert (before - after, after - before) == (Counter(gone), Counter(come))


def test_the_examples_of_pipelines(pipeline):
    """`y' = stage_boundary y` becomes a send and a receive, forward and backward a task each, the update one."""
    first, second = (s.plan.program.passed for s in pipeline.stages)
    for passed in (first, second):
        names = [e.primitive.name for e in all_eqns(dict(passed)["cut_stages"])]
        assert names.count("send") == names.count("receive") == 1
        assert "stage_boundary" not in names
    tasks = [sum(t.plan is not None for t in s.tasks.all.values() if t.id.in_loop) for s in pipeline.stages]
    assert tasks == [2, 1]  # the last stage's forward and backward are one
    assert all(any(id.kind == "update" for id in s.tasks.all) for s in pipeline.stages)


def test_the_example_of_lower():
    fn = shardc.function(lambda x: x * 2, mesh=shardc.make_mesh(data=8), in_placements=(ROWS,), out_placements={})
    exe = fn.compile(jnp.ones((8, 8)))
    assert [c.kind for c in exe.plan.collectives] == ["all_gather"]
    assert exe.audit().ok
