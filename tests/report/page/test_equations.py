"""The equations of a plan: their seconds and bytes add up to the plan's, and each stands in its module."""

import jax
import numpy as np
import pytest

import shardc
from shardc.passes.estimate.plan_cost import Time
from shardc.report.page.course import BUCKETS, course_of
from shardc.report.page.equations import program_rows
from shardc.report.page.modules import modules_data, totals_data
from shardc.report.page.page import programs_of
from tests.report.page import plans

PLANS = {
    "spmd": plans.spmd, "with_loops": plans.with_loops, "offloaded": plans.offloaded, "pipeline": plans.pipeline
}  # fmt: skip


@pytest.fixture(scope="module", params=PLANS)
def plan(request):
    return PLANS[request.param]()


def test_seconds_and_bytes_add_up_to_those_of_the_plan(plan):
    programs = programs_of(plan)
    bytes_ = sum(c.bytes * times for _, rows, times in programs for row in rows for c in row.collectives)
    assert bytes_ == sum(c.bytes for c in plan.collectives)
    assert sum(row[3] for row in totals_data(programs)) == bytes_
    data = modules_data(programs)
    assert sum(move[-2] for move in data["moves"]) == bytes_
    if hasattr(plan, "stages"):
        return
    found = sum((row.time for row in programs[0][1]), Time())
    assert (found.computing, found.moving) == pytest.approx((plan.time.computing, plan.time.moving))
    assert found.host == pytest.approx(plan.time.host)
    assert sum(line[-1] for line in data["lines"]) == pytest.approx(found.total, rel=1e-3)


def test_rows_are_the_points_of_the_memory(plan):
    for _, part in plan.parts:
        found = program_rows(part)
        assert len(found.rows) + 1 == len(part.profile().bytes)


def test_modules_stand_before_those_inside_them(plan):
    data = modules_data(programs_of(plan))
    assert data["nodes"][0][1] == -1
    assert all(above < i for i, (_, above) in enumerate(data["nodes"]))
    assert {line[0] for line in data["lines"]} <= set(range(len(data["nodes"])))


def test_scopes_lines_and_reasons():
    rows = program_rows(plans.spmd()).rows
    moved = [row for row in rows if row.collectives]
    assert {row.scopes for row in rows if row.operation == "dot_general"} == {
        (plans.EVIL,), ("down",), ("backward", plans.EVIL), ("backward", "down")
    }  # fmt: skip
    assert all(row.line.startswith("plans.py:") for row in moved)
    sums = [row for row in moved if row.scopes == ("down",) and row.operation == "box"]
    assert sums[0].why == "dot_general leaves it at {model: P(sum)}; integer_pow reads it at B"


def test_a_loop_counts_its_iterations_and_a_branch_that_is_not_the_dearest_nothing():
    rows = program_rows(plans.with_loops()).rows
    products = [row for row in rows if row.operation == "dot_general"]
    assert [row.count for row in products] == [5, 5]
    assert all(row.time.total > 0 for row in products)


def test_moves_between_the_memories_stand_with_the_reader_and_the_maker():
    rows = [row for row in program_rows(plans.offloaded()).rows if row.time.host]
    assert [row.operation for row in rows] == ["move to the device", "move to the host"]
    assert {row.scopes for row in rows} == {("adam",)} and all("(adam)" in row.line for row in rows)


def test_an_einsum_is_a_line_of_the_function_that_calls_it():
    rows = [row for row in program_rows(plans.offloaded()).rows if row.operation == "dot_general"]
    assert {row.scopes for row in rows} == {("adam",), ("backward", "adam")}


@pytest.mark.parametrize("make", [plans.spmd, plans.with_loops, plans.offloaded])
def test_the_course_keeps_time_and_peak(make):
    plan = make()
    found, profile = program_rows(plan), plan.profile()
    course = course_of(found, profile)
    assert sum(course.shares.values()).sum() == pytest.approx(BUCKETS)
    assert course.extent == pytest.approx(plan.time.computing + plan.time.moving + plan.time.host)
    for kind, shares in course.shares.items():
        assert shares.mean() * course.extent == pytest.approx(getattr(plan.time, kind))
    assert course.bytes.max() == profile.bytes[: len(found.rows) + 1].max()
    assert course.bytes[course.peak] == course.bytes.max()


def test_values_at_the_peak_have_names():
    plan = plans.spmd()
    found = program_rows(plan)
    names = [str(found.names[v]) for v, _ in plan.profile().largest()]
    assert f"argument params/{plans.EVIL}" in names
    jaxpr = plan.boxed.jaxpr
    copies = {str(found.names[e.outvars[0]]) for e in jaxpr.eqns if e.primitive.name == "box"}
    assert all(name.startswith("copy of ") for name in copies)


def test_an_empty_program_has_a_page():
    plan = shardc.function(lambda x: x, mesh=shardc.make_mesh(topology="v5p:2x2x1", data=4)).plan(plans.f32(4))
    course = course_of(program_rows(plan), plan.profile())
    assert course.shares == {} and np.isfinite(course.bytes).all()
    assert jax.tree.leaves(modules_data(programs_of(plan))["lines"]) == []
