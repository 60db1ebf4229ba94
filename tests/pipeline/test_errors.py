"""Bad input to a pipeline: each mistake is an error before anything runs, by its full text."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from shardc import S, accumulate, make_mesh, stage_boundary
from shardc.errors import ArgumentError, MeshError, PipelineError, PlacementError
from shardc.pipeline.schedule.methods import METHODS
from tests.pipeline.pipelines import batch, chain, dense, error, layers
from tests.pipeline.schedule.methods.test_methods import with_chunks

HERE = "test_errors.py"


def line_of(fn, text):
    """Where in `fn` a line stands that has this text: `file:line (function)`."""
    lines, first = inspect.getsourcelines(fn)
    (at,) = [i for i, line in enumerate(lines) if text in line]
    return f"{HERE}:{first + at}"


def step_of(loss, m=4):
    def step(params, batch):
        return accumulate(jax.value_and_grad(loss), microbatches=m)(params, batch)

    return step


STEP = f"step ({HERE}:{step_of(None).__code__.co_firstlineno})"


def cut_at(*cuts):
    return lambda params, batch: error(chain(params, batch["x"], cuts), batch)


def refused(step, *args, kind=PipelineError, mesh=None, pipeline=None, **options):
    """The text of the error that planning gives."""
    function = shardc.function(step, mesh=mesh or make_mesh(pipe=2), pipeline=pipeline or shardc.Pipeline(), **options)
    with pytest.raises(kind) as caught:
        function.plan(*(args or (layers(3), batch(8))))
    assert type(caught.value) is kind
    return str(caught.value)


# boundaries

UNROLL = (
    'which runs as a whole on one stage; unroll the loop over layers at the boundaries, or let stages="auto" cut it.'
)


def in_scan(params, batch):
    def body(x, layer):
        return stage_boundary(dense(layer, x)), None  # scan

    x, _ = jax.lax.scan(body, batch["x"], jax.tree.map(lambda *xs: jnp.stack(xs), *params))  # the scan
    return error(x, batch)


def in_remat_in_scan(params, batch):
    def body(x, layer):
        return stage_boundary(dense(layer, x)), None  # scan

    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *params)
    x, _ = jax.lax.scan(jax.checkpoint(body), batch["x"], stacked)  # the scan
    return error(x, batch)


def in_while(params, batch):
    def body(carry):
        return stage_boundary(dense(params[0], carry[0])), carry[1] + 1  # while

    x, _ = jax.lax.while_loop(lambda carry: carry[1] < 3, body, (batch["x"], 0))  # the while
    return error(jax.lax.stop_gradient(x), batch)


def in_cond(params, batch):
    def yes(x):
        return stage_boundary(dense(params[0], x))  # cond

    return error(jax.lax.cond(batch["x"].sum() > 0, yes, lambda x: x, batch["x"]), batch)  # the cond


@pytest.mark.parametrize("loss", [in_scan, in_remat_in_scan, in_cond])
def test_a_boundary_inside_a_loop_body(loss):
    what = "scan" if "scan" in loss.__name__ else "cond"
    inner = "body" if what == "scan" else "yes"
    assert refused(step_of(loss)) == (
        f"{STEP}: stage boundaries in places that cannot be cut\n"
        f"  {line_of(loss, f'# {what}')} ({inner}): inside the body of a {what} "
        f"({line_of(loss, f'# the {what}')} ({loss.__name__})), {UNROLL}"
    )


def test_a_boundary_inside_a_while():
    def step(params, batch):
        return accumulate(in_while, microbatches=4)(params, batch)

    assert refused(step) == (
        f"step ({line_of(step, 'def step')}): stage boundaries in places that cannot be cut\n"
        f"  {line_of(in_while, '# while')} (body): inside the body of a while "
        f"({line_of(in_while, '# the while')} (in_while)), {UNROLL}"
    )


def test_boundaries_outside_of_the_loop():
    def step(params, batch):
        batch = {"x": stage_boundary(batch["x"]), "y": batch["y"]}  # before
        grads = accumulate(jax.grad(cut_at(0)), microbatches=4)(params, batch)
        return stage_boundary(grads[0]["b"])  # after

    outside = "outside of the loop over microbatches; move it into the function that shardc.accumulate takes."
    assert refused(step) == (
        f"step ({line_of(step, 'def step')}): stage boundaries in places that cannot be cut\n"
        f"  {line_of(step, '# before')} (step): {outside}\n"
        f"  {line_of(step, '# after')} (step): {outside}"
    )


WRITE = 'Write x = shardc.stage_boundary(x) between the stages and use its result from there on, or set stages="auto".'


def test_too_few_boundaries():
    def one(params, batch):
        x = stage_boundary(dense(params[0], batch["x"]))  # one
        return error(dense(params[1], x), batch)

    assert refused(step_of(one), mesh=make_mesh(pipe=3)) == (
        f"{STEP}: 3 stages need 2 stage boundaries, the loop has 1 ({line_of(one, '# one')} (one)). {WRITE}"
    )
    assert refused(step_of(cut_at())) == f"{STEP}: 2 stages need 1 stage boundary, the loop has none. {WRITE}"


def test_a_boundary_whose_result_is_not_used():
    def lost(params, batch):
        x = dense(params[0], batch["x"])
        stage_boundary(x)
        return error(dense(params[1], x), batch)

    assert refused(step_of(lost)) == f"{STEP}: 2 stages need 1 stage boundary, the loop has none. {WRITE}"


def test_a_boundary_of_nothing():
    with pytest.raises(ArgumentError) as caught:
        stage_boundary(())
    assert str(caught.value) == (
        "stage_boundary: there is no array in (); pass the values that the next stage reads, and "
        "continue with the result: x = shardc.stage_boundary(x)."
    )


def test_too_many_boundaries():
    def three(params, batch):
        x = stage_boundary(dense(params[0], batch["x"]))  # first
        x = stage_boundary(dense(params[1], x))  # second
        return error(stage_boundary(dense(params[2], x)), batch)  # third

    lines = ", ".join(f"{line_of(three, f'# {n}')} (three)" for n in ("first", "second", "third"))
    assert refused(step_of(three)) == (
        f"{STEP}: 2 stages need 1 stage boundary, the loop has 3 ({lines}). Remove 2, or use more stages: a longer "
        "pipe axis, or more chunks. (One further boundary is allowed after the loss.)"
    )


ONCE = (
    "a boundary in a function that JAX traces once and that is called several times (jax.jit, jax.checkpoint) is one "
    "boundary. Call shardc.stage_boundary outside of that function, on its result."
)


@pytest.mark.parametrize("transform", [jax.jit, jax.checkpoint])
def test_a_boundary_that_is_traced_once_and_passed_twice(transform):
    @transform
    def block(layer, x):
        return stage_boundary(dense(layer, x))  # here

    def loss(params, batch):
        return error(dense(params[2], block(params[1], block(params[0], batch["x"]))), batch)

    here = f"{line_of(block, '# here')} (block)"
    assert refused(step_of(loss), mesh=make_mesh(pipe=3)) == (
        f"{STEP}: 3 stages need 2 stage boundaries, the loop has 1 ({here}); {ONCE}"
    )
    text = refused(step_of(loss))
    assert text.startswith(f"{STEP}: stage boundaries out of order\n  {here}: ")
    assert "traced once" in text.splitlines()[1] or ONCE in text.splitlines()[1]
    assert ONCE in text


def test_stages_without_work():
    def first(params, batch):
        x = stage_boundary(batch["x"])  # a
        return error(dense(params[0], x), batch)

    def middle(params, batch):
        x = stage_boundary(dense(params[0], batch["x"]))  # a
        x = stage_boundary(x)  # b
        return error(dense(params[1], x), batch)

    def last(params, batch):
        return stage_boundary(error(dense(params[0], batch["x"]), batch))  # a

    idle = f"{STEP}: stages without work\n  stage"
    assert refused(step_of(first)) == (
        f"{idle} 0: nothing is computed before the boundary at {line_of(first, '# a')} (first); remove one boundary."
    )
    assert refused(step_of(middle), mesh=make_mesh(pipe=3)) == (
        f"{idle} 1: nothing is computed between the boundaries at {line_of(middle, '# a')} (middle) and "
        f"{line_of(middle, '# b')} (middle); remove one boundary."
    )
    assert refused(step_of(last)) == (
        f"{idle} 1: nothing is computed after the boundary at {line_of(last, '# a')} (last); remove one boundary."
    )


# the loop

HOW = (
    "Write the gradient as shardc.accumulate(jax.value_and_grad(loss), microbatches=m)(params, batch), or jax.grad of "
    "an accumulate of the loss."
)


def test_no_loop_over_microbatches():
    def step(params, batch):
        return jax.value_and_grad(cut_at(0))(params, batch)

    where = f"step ({line_of(step, 'def step')})"
    assert refused(step) == f"{where}: a pipeline runs over one loop of microbatches, found none. {HOW}"


def test_two_loops_over_microbatches():
    def step(params, batch):
        value = accumulate(cut_at(0), microbatches=4)(params, batch)  # a
        return value, accumulate(jax.grad(cut_at(0)), microbatches=2)(params, batch)  # b

    assert refused(step) == (
        f"step ({line_of(step, 'def step')}): a pipeline runs over one loop of microbatches, found 2 "
        f"({line_of(step, '# a')} (step), {line_of(step, '# b')} (step)). Put each loop into its own function, or "
        "merge them into one loop."
    )


def test_a_loop_inside_a_loop():
    def step(params, batch):
        def once(params, _):
            grads = accumulate(jax.grad(cut_at(0)), microbatches=4)(params, batch)
            return jax.tree.map(jnp.subtract, params, grads), None

        return jax.lax.scan(once, params, None, length=3)  # scan

    assert refused(step) == (
        f"step ({line_of(step, 'def step')}): a pipeline runs over one loop of microbatches, found it inside the body "
        f"of a scan ({line_of(step, '# scan')} (step)). Make the function one step, and call it in a loop."
    )


def test_a_gradient_of_the_whole_loop():
    def step(params, batch):
        rows = accumulate(lambda p, b: chain(p, b["x"]).mean(0), microbatches=4)
        return jax.grad(lambda p: rows(p, batch).sum())(params)  # here

    assert refused(step) == (
        f"step ({line_of(step, 'def step')}): a pipeline runs over one loop of microbatches, but the gradient is taken "
        f"of the whole loop ({line_of(step, '# here')} (step)), which makes a second one. Take it inside the loop, as "
        "shardc.accumulate(jax.value_and_grad(loss), microbatches=m)(params, batch), or as jax.grad of an accumulate "
        "of a function that returns one float."
    )


def test_a_batch_that_microbatches_do_not_divide():
    assert refused(step_of(cut_at(0), 3), kind=ArgumentError) == (
        f"accumulate: <lambda> ({line_of(cut_at, 'lambda')}): batches that cannot be split into microbatches\n"
        "  argument batch/x: dimension 0 has 8 rows, which 3 microbatches do not divide. Take a divisor, or pad the "
        "batch.\n"
        "  argument batch/y: dimension 0 has 8 rows, which 3 microbatches do not divide. Take a divisor, or pad the "
        "batch."
    )


def test_outputs_that_cannot_be_averaged():
    def step(params, batch):
        count = lambda p, b: (cut_at(0)(p, b), jnp.int32(len(b["x"])))  # noqa: E731
        return accumulate(count, microbatches=4)(params, batch)

    assert refused(step, kind=ArgumentError) == (
        f"accumulate: <lambda> ({line_of(step, 'count = ')}): say in `reduce` how to combine\n"
        '  result 1, i32[], is no float, so its mean over microbatches is not of its type; "sum", "stack" or "last".'
    )


# schedules


def scheduled(schedule, m=2, stages=2, **how):
    mesh = make_mesh(pipe=2)
    args = layers(stages), batch(2 * m)
    return refused(
        step_of(cut_at(*range(stages - 1)), m), *args, mesh=mesh, pipeline=shardc.Pipeline(schedule=schedule, **how)
    )


SECOND = "rank 1 | 1F0 1B0 1F1 1B1"
NAMES = ", ".join([*METHODS, "auto"])


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            f"rank 0 | 0F0 0F1 0B0\n{SECOND}",
            'Schedule "schedule" is not valid:\n'
            "  rank 0, column 1: 0B1 (full backward, or I and W) is missing, but 0F1 is here.\n"
            "    rank 0 | 0F0 [0F1] 0B0",
        ),
        (
            f"rank 0 | 0F0 0F1 0F1 0B0 0B1\n{SECOND}",
            'Schedule "schedule" is not valid:\n'
            "  rank 0, column 2: 0F1 again, after rank 0, column 1.\n"
            "    rank 0 | 0F0 0F1 [0F1] 0B0 0B1",
        ),
        (
            f"rank 0 | 0F0 0X1 0B0 0B1\n{SECOND}",
            'Schedule "schedule" has cells that are not actions:\n'
            '  rank 0, column 1: "0X1" is not an action; write <stage><F|B|I|W><microbatch>, such as 2F0.\n'
            "    rank 0 | 0F0 [0X1] 0B0 0B1",
        ),
        (
            f"rank 0 | 0F0 0B0 0F1 0B1\n{SECOND.replace('1B0 1F1', '1F1 1B0')}",
            "The pipeline deadlocks: actors 0 and 1 wait for each other; 2 of 2 actors never end.\n"
            '  actor 0 is at 0B0 and waits for message 0 of "gradient 1->0", which actor 1 gives in 1B0, 1 step after '
            "1F1.\n"
            '  actor 1 is at 1F1 and waits for message 1 of "activation 0->1", which actor 0 gives in 0F1, 1 step '
            "after 0B0.\n"
            "Order of the actions; [brackets] mark the stuck ones, actions before them are done:\n"
            "  actor 0 |  load 0    0F0     [0B0]     0F1      0B1    update 0\n"
            "  actor 1 |  load 1    1F0     [1F1]     1B0      1B1    update 1\n"
            "No number of registers helps: change the order, so that the awaited messages come first.",
        ),
        ("1f1bb", f'Unknown schedule "1f1bb"; there are {NAMES}. Did you mean "1f1b"?'),
        ("zbh1", f'Unknown schedule "zbh1"; there are {NAMES}. Did you mean "zb-h1"?'),
        (
            None,
            'schedule=None is not a schedule; write a name such as "1f1b", the text of a grid, a Schedule, or a '
            "function of (ranks, microbatches, chunks, costs) that returns a Schedule.",
        ),
        (
            max,
            "The schedule function max returned StageCosts(stages=((1.0, 1.0, 1.0),)); it has to return a Schedule, "
            "such as Schedule.parse(text).",
        ),
    ],
    ids=["missing", "doubled", "no action", "deadlock", "typo", "typo of a dash", "None", "a function of another kind"],
)
def test_schedules_that_cannot_be(schedule, message):
    if schedule is max:
        schedule = lambda p, m, v, costs: costs  # noqa: E731
        message = message.replace("max", "<lambda>")
    assert scheduled(schedule) == f"{STEP}: {message}"


def test_a_schedule_function_of_other_arguments():
    assert scheduled(lambda ranks, microbatches: None) == (
        f"{STEP}: The schedule function <lambda> is called with (ranks, microbatches, chunks, costs): too many "
        "positional arguments."
    )


def test_a_schedule_for_another_pipeline():
    text = f"rank 0 | 0F0 0F1 0B0 0B1\n{SECOND}"
    assert scheduled(text, m=4) == (
        f'{STEP}: Schedule "schedule" is for another pipeline: it has 2 microbatches, not 4.'
    )
    assert scheduled(text, chunks=2) == f'{STEP}: Schedule "schedule" is for another pipeline: it has 1 chunks, not 2.'


def test_a_schedule_that_cannot_have_these_stages_or_microbatches():
    assert scheduled("dualpipe-v", m=3, stages=4) == (
        f'{STEP}: Schedule "dualpipe-v" does not support 2 ranks and 3 microbatches: it needs at least 2·ranks = 4 '
        "microbatches, to fill the V from both ends; zb-v needs fewer."
    )
    assert scheduled("zb-v", chunks=3) == (
        f'{STEP}: Schedule "zb-v" has 2 stages on each rank, not 3: set chunks=2, or use {with_chunks(3)}.'
    )
    assert scheduled("1f1b", chunks=2) == (
        f'{STEP}: Schedule "1f1b" has 1 stage on each rank, not 2: set chunks=1, or use {with_chunks(2)}.'
    )


@pytest.mark.parametrize("chunks", [0, -1, "2", 2.0, True])
def test_chunks_that_are_no_number(chunks):
    assert scheduled("interleaved", chunks=chunks) == (
        f"{STEP}: make_schedule: ranks=2, microbatches=2, chunks={chunks!r}; each has to be 1 or more."
    )


# the other options


def with_option(**option):
    return refused(step_of(cut_at(0)), pipeline=shardc.Pipeline(**option))


@pytest.mark.parametrize("credits", [0, -1, True, "fewest", [1, 2], 1.5, None])
def test_credits_that_are_none(credits):
    assert with_option(credits=credits) == (
        f'{STEP}: credits={credits!r}; write "auto", or a number of registers for each channel, 1 or more.'
    )


def test_credits_too_few_to_make_progress():
    text = with_option(credits=1).replace("    update", "  update")
    assert text == (
        f"{STEP}: The pipeline deadlocks: actor 0 waits for itself; 2 of 2 actors never end.\n"
        '  actor 0 is at 0F1 and waits for a register of "stash 0": its only one holds message 0; actor 0 takes the '
        "first in 0B0, 1 step after 0F1.\n"
        "Order of the actions; [brackets] mark the stuck ones, actions before them are done:\n"
        "  actor 0 |           load 0    0F0     [0F1]     0B0      0F2      0B1      0F3      0B2      0B3  update 0\n"
        "  actor 1 |  load 1    1F0      1B0     [1F1]     1B1      1F2      1B2      1F3      1B3  update 1\n"
        'It ends if you give more registers: 2 to "stash 0" (now 1). Or change the order so that they are free earlier.'
    )


@pytest.mark.parametrize("recompute", ["some", "ful", ["full"], ["full", "no"], None, True, 3])
def test_recompute_that_is_none(recompute):
    assert with_option(recompute=recompute) == (
        f'{STEP}: recompute={recompute!r}; write "none", "full" or "auto", or a sequence of 2 of them, one for each '
        "stage."
    )


@pytest.mark.parametrize("stages", ["atuo", None, 2])
def test_stages_that_are_none(stages):
    assert with_option(stages=stages) == (
        f'{STEP}: stages={stages!r}; write "marked", to cut at shardc.stage_boundary, or "auto".'
    )


@pytest.mark.parametrize("given", ["1f1b", {"schedule": "1f1b"}, 4])
def test_a_pipeline_that_is_none(given):
    with pytest.raises(ArgumentError) as caught:
        shardc.function(step_of(cut_at(0)), mesh=make_mesh(pipe=2), pipeline=given)
    assert str(caught.value) == f'pipeline={given!r} is no Pipeline; write pipeline=shardc.Pipeline(schedule="1f1b").'


# meshes and placements


@pytest.mark.parametrize(("axes", "has"), [({"data": 2}, "data."), ({"pip": 2}, 'pip. Did you mean "pip"?')])
def test_a_mesh_without_the_pipelines_axis(axes, has):
    with pytest.raises(MeshError) as caught:
        shardc.function(step_of(cut_at(0)), mesh=make_mesh(**axes), pipeline=shardc.Pipeline())
    assert str(caught.value) == (
        f'The mesh has no axis "pipe" to run a pipeline along; it has {has} Name one in shardc.Pipeline(axis=...), or '
        "make the mesh with one: shardc.make_mesh(pipe=4, ...)."
    )


TAKEN = "axis 'pipe' is the pipeline's and cannot be in a placement: a value is on the stages that use it; write"


@pytest.mark.parametrize("axes", [{}, {"data": 2}], ids=str)
def test_the_pipelines_axis_in_a_placement(axes):
    mesh = make_mesh(pipe=2, **axes)
    where = f"{STEP}, mesh {'data=2' if axes else 'pipe=1'} on cpu:\n  "
    with jax.enable_x64(False):
        args = jax.tree.map(np.float32, (layers(2), batch(8)))
        pinned = {"pipe": S(0), **({"data": S(1)} if axes else {})}
        rest = "{'data': S(1)}" if axes else "{}"
        assert refused(step_of(cut_at(0)), *args, mesh=mesh, kind=PlacementError, in_placements={"batch": pinned}) == (
            f"{where}in_placements: batch/x f32[8,4], batch/y f32[8,4]: {pinned!r}: {TAKEN} {rest}."
        )
        results = refused(step_of(cut_at(0)), *args, mesh=mesh, kind=PlacementError, out_placements={"pipe": S(0)})
        assert f"{{'pipe': S(0)}}: {TAKEN} {{}}." in results

        def constrained(params, batch):
            x = shardc.constrain(batch["x"], {"pipe": S(0)})  # here
            return cut_at(0)(params, {**batch, "x": x})

        assert refused(step_of(constrained), *args, mesh=mesh, kind=PlacementError) == (
            f"{where}shardc.constrain of f32[2,4] at {line_of(constrained, '# here')} (constrained): "
            f"{{'pipe': S(0)}}: {TAKEN} {{}}."
        )


def test_meshes_of_ranks_that_cannot_be():
    devices = np.array(jax.devices())
    one, two = (jax.sharding.Mesh(d, ("data",)) for d in (devices[:4], devices[2:6]))
    other = jax.sharding.Mesh(devices[4:], ("model",))

    def text(*meshes):
        with pytest.raises(MeshError) as caught:
            shardc.function(step_of(cut_at(0)), mesh=make_mesh(pipe=2), pipeline=shardc.Pipeline(meshes=meshes))
        return str(caught.value)

    wants = f"{STEP}: Pipeline(meshes=...) wants a mesh for each rank,"
    write = "write meshes=[jax.sharding.Mesh(devices[:4], ('data',)), jax.sharding.Mesh(devices[4:6], ('data',))]."
    assert text() == f"{wants} got none; {write}"
    assert text(one, 3) == f"{wants} meshes[1] is 3; {write}"
    assert text(one, other) == (
        f"{STEP}: the meshes of a pipeline's ranks have the same axes, of whatever size, as one placement is for all "
        "of them; these have data; model. Add axes of size 1."
    )
    names = ", ".join(sorted(map(str, devices[2:4])))
    assert text(one, two).startswith(f"{STEP}: ranks 0 and 1 of the pipeline share {names}; collectives of two")
