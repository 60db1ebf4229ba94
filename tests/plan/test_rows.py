"""Rows hold all of a boxed program: the placements at the ports of its problem, and the ways of its boxings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from shardc import S
from shardc.passes.place.insert_boxing import insert_boxing
from shardc.passes.place.place import place
from shardc.plan.borders import problem_of
from shardc.plan.rows import BEGIN, END, ports_in, rows_before_placing, rows_of

F32 = jax.ShapeDtypeStruct((8, 8), np.float32)


def product(x, w):
    return jnp.tanh(x @ w), w


def loop(x, w):
    return jax.lax.scan(lambda h, row: (jnp.tanh(h @ w) + row, h.sum()), x, x)


def branches(x, w):
    h = jax.lax.cond(x.sum() > 0, lambda h: h @ w, lambda h: h * 2, x)
    return jax.lax.while_loop(lambda c: c.sum() > 3, lambda c: c / 2, h)


@pytest.fixture(scope="module", params=[product, loop, branches])
def plan(request):
    f = shardc.function(request.param, mesh=shardc.make_mesh(data=4, model=2), in_placements=({"data": S(0)}, None))
    return f.plan(F32, F32)


def rows_of_plan(boxed):
    return rows_of(boxed.jaxpr.eqns, boxed.jaxpr.outvars, boxed.placements)


def test_a_row_for_each_operation_and_border_of_a_body(plan):
    rows = rows_of_plan(plan.boxed)
    before = rows_before_placing(plan.program.jaxpr)
    assert [(r.text, len(r.reads), len(r.makes)) for r in rows] == [
        (r.text, len(r.reads), len(r.makes)) for r in before
    ]
    assert all(len(path) == 1 for row in before for path in row.reads)
    assert [r.text for r in rows].count(END) == [r.text for r in rows].count(BEGIN) + 1
    assert [r.text for r in rows if not r.is_operation][-1] == rows[-1].text == END


def test_the_ports_of_a_solution_are_read_off_its_program(plan):
    problem = problem_of(plan.request, plan.ties)
    placed = place(problem, plan.mesh)
    boxed = insert_boxing(problem, placed, plan.mesh)
    ports = ports_in(problem, [placed.ports[n][-1] for n in problem.sources], rows_of_plan(boxed))
    assert {n.kind for n in problem.nodes if n not in ports} <= {"hold", "sink"}  # the condition of a while is a sink
    assert ports.keys() >= {*problem.sources, *problem.sinks}
    for node, known in ports.items():
        avals = dict(enumerate(node.avals)) | {-1: node.avals[-1]}
        assert all(placed.ports[node][port] == p for port, p in known.items() if avals[port] is not None), node.kind


def test_boxings_go_the_ways_of_the_rows(plan):
    problem = problem_of(plan.request, plan.ties)
    placed = place(problem, plan.mesh)
    boxed = insert_boxing(problem, placed, plan.mesh)
    ways = [path for row in rows_of_plan(boxed) for path in row.reads]
    assert max(map(len, ways)) > 1
    assert str(insert_boxing(problem, placed, plan.mesh, paths=ways).jaxpr) == str(boxed.jaxpr)
