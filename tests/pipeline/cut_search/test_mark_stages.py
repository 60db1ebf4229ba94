"""Marks put into a folded body: where each equation is then placed."""

import jax
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from shardc import compat
from shardc.ir.boundary import stage_boundary_p
from shardc.pipeline.cut.cut_loop import find_loop, place_body
from shardc.pipeline.cut_search.mark_stages import mark_stages
from tests.pipeline.cut_search.folded import BATCH, STEPS, init, measured, traced


@pytest.fixture(params=STEPS)
def program(request):
    with jax.enable_x64(True):
        yield traced(STEPS[request.param])


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
            (task,) = where[eqn.outvars[0]]
            assert task.stage == stage, eqn
            assert ahead or task.kind == "B"
    for s in range(stages):
        assert any(stage == s for stage in wanted.values())
    ends = any(e.primitive is stage_boundary_p for e in find_loop(program, "step").body.eqns)
    assert placed.fused == (not ends)


@pytest.mark.sampled(2)
def test_a_marked_program_gives_the_same_numbers(program):
    body, points, _ = measured(program)
    marked = mark_stages(program, body, points, [3, 5])
    values = [*jax.tree.leaves((init(), BATCH)), *program.captured]
    run = lambda p: jaxpr_as_fun(compat.close(p.jaxpr))(*values)  # noqa: E731
    for a, b in zip(run(program), run(marked), strict=True):
        np.testing.assert_array_equal(a, b)
