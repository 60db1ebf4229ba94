"""Folded bodies, and marks put into them: the fold, what crosses, where each equation is then placed."""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import shardc
from shardc import compat
from shardc.ir.boundary import stage_boundary_p
from shardc.machine.mesh import TOPOLOGIES, MeshView
from shardc.passes.estimate.plan_cost import whole_seconds
from shardc.passes.trace.trace import Arguments, trace
from shardc.pipeline.cut.cut_loop import find_loop, place_body, stage_of
from shardc.pipeline.points.cut_points import find_points
from shardc.pipeline.points.fold_body import fold_body
from shardc.pipeline.points.mark_stages import mark_stages
from shardc.pipeline.points.owners import find_owned

WIDTHS = (8, 16, 8, 12, 8)
CPU = MeshView((("data", 1),), TOPOLOGIES["cpu"])


def init():
    rng = np.random.default_rng(0)
    layers = [rng.normal(size=(a, b)) for a, b in pairwise(WIDTHS)]
    return {"layers": layers, "table": rng.normal(size=(10, 8)), "bias": np.zeros(8)}


ROWS = 64
BATCH = {"x": np.arange(ROWS) % 10, "late": np.arange(ROWS)[::-1] % 10, "y": np.arange(ROWS) % 10}


def loss(params, batch, block=lambda f: f):
    """Unequal layers, a tied table, a skip over two cuts, and a value that is made early and used late."""
    late = params["table"][batch["late"]] + params["bias"]
    x = skip = params["table"][batch["x"]]
    for w in params["layers"]:
        x = block(lambda x, w: jnp.tanh(x @ w))(x, w)
    x = x + skip * late
    logits = x @ params["table"].T
    return -jax.nn.log_softmax(logits)[jnp.arange(len(x)), batch["y"]].mean()


def traced(step):
    arguments = Arguments(step, ())
    return trace(arguments, arguments.take_apart((init(), BATCH), {}), marks=True)


def value_and_gradient(fn, params, batch):
    return shardc.accumulate(jax.value_and_grad(fn), microbatches=2)(params, batch)


STEPS = {
    "value_and_grad": partial(value_and_gradient, loss),
    "jit inside": partial(value_and_gradient, jax.jit(loss)),
    "remat": partial(value_and_gradient, partial(loss, block=jax.checkpoint)),
    "grad outside": jax.grad(shardc.accumulate(loss, microbatches=2)),
}


@pytest.fixture(params=STEPS)
def program(request):
    with jax.enable_x64(True):
        yield traced(STEPS[request.param])


def measured(program):
    loop = find_loop(program, "step")
    body = fold_body(loop)
    owners = {}
    for v, owned in find_owned(program, loop).items():
        for j in owned.sums:
            owners.setdefault(j, []).append(v)
    seconds = np.asarray([whole_seconds(e, CPU) for e in body.eqns])
    return body, find_points(body, seconds, owners), seconds


def test_the_fold_is_where_the_gradient_begins(program):
    body, _, _ = measured(program)
    forward, backward = body.eqns[: body.fold], body.eqns[body.fold :]
    shapes = lambda eqns: [e.outvars[0].aval.shape for e in eqns if e.primitive.name == "dot_general"]  # noqa: E731
    rows = ROWS // 2
    assert shapes(forward) == [*((rows, w) for w in WIDTHS[1:]), (rows, 10)]
    assert any(e.primitive.name == "exp" for e in forward)
    assert not any(e.primitive.name in ("log", "exp") for e in backward)


def test_what_depends_on_inputs_alone_stands_by_its_reader():
    body, _, _ = measured(traced(STEPS["value_and_grad"]))
    gathers = [t for t, e in enumerate(body.eqns) if e.primitive.name == "gather"]
    layers = [t for t, e in enumerate(body.eqns) if e.primitive.name == "dot_general"]
    assert gathers[0] < layers[0] < layers[3] < gathers[1] < layers[4]


def test_points_lie_where_little_crosses():
    body, points, _ = measured(traced(STEPS["value_and_grad"]))
    assert (np.diff(points.ahead) > 0).all()
    rows = ROWS // 2
    skip, item = rows * 8, 4
    for width in WIDTHS[1:4]:
        at = points.activation == (rows * width + skip) * item
        assert at.any()
        assert points.gradient[at].min() <= (rows * width + skip) * item
    table = body.loop.body.invars[[v.aval.shape for v in body.loop.body.invars].index((10, 8))]
    head = next(t for t, e in enumerate(body.eqns) if e.outvars[0].aval.shape == (rows, 10))
    tied = (points.ahead > body.reads[table][0]) & (points.ahead <= head)
    assert tied.any() and (points.once[tied] >= np.prod(table.aval.shape) * item).all()


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_marks_place_each_equation_on_its_stage(program, stages):
    body, points, _ = measured(program)
    cuts = np.linspace(0, len(points.ahead) - 1, stages + 1).astype(int)[1:-1]
    marked = mark_stages(program, body, points, cuts)
    placed = place_body(find_loop(marked, "step"), stages, "step")
    where = {}
    for p, eqn in placed.eqns:
        where.setdefault(eqn.outvars[0], set()).add(p)
    wanted = {}
    for t, eqn in enumerate(body.eqns):
        ahead = t < body.fold
        stage = sum(points.ahead[cuts] <= t) if ahead else sum(points.back[cuts] > t)
        wanted[eqn.outvars[0]] = stage
        heavy = eqn.primitive.name in ("dot_general", "tanh", "remat2")
        if heavy and eqn.outvars[0] in where:
            (position,) = where[eqn.outvars[0]]
            assert stage_of(position, stages) == stage, eqn
            assert ahead or position >= stages
    for s in range(stages):
        assert any(stage == s for stage in wanted.values())
    ends = any(e.primitive is stage_boundary_p for e in find_loop(program, "step").body.eqns)
    assert placed.fused == (not ends)


def test_a_marked_program_gives_the_same_numbers(program):
    body, points, _ = measured(program)
    marked = mark_stages(program, body, points, [3, 5])
    values = [*jax.tree.leaves((init(), BATCH)), *program.captured]
    run = lambda p: jaxpr_as_fun(compat.close(p.jaxpr))(*values)  # noqa: E731
    for a, b in zip(run(program), run(marked), strict=True):
        np.testing.assert_array_equal(a, b)
