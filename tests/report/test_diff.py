"""`plan.diff(other)`: the differences between two plans, word for word."""

import pytest

import shardc
from tests.report.test_explain import f32
from tests.report.test_explain_pipeline import MESH, i32, tied, tied_args
from tests.report.test_explain_why import mlp_plan


@pytest.fixture(scope="module")
def mesh():
    return shardc.make_mesh(data=4, model=2)


@pytest.fixture(scope="module")
def mlp(mesh):
    return mlp_plan(mesh)


def test_plans_are_compared(mesh, mlp, golden):
    data = shardc.make_mesh(topology="cpu", data=8)
    others = [mlp_plan(mesh, params={}), mlp_plan(mesh, layers=2), mlp_plan(data, params={})]
    stages, filled = (tied(MESH, schedule=name).plan(*tied_args(f32, i32)) for name in ("1f1b", "gpipe"))
    golden("diff", "\n\n\n".join([*map(mlp.diff, others), stages.diff(filled)]))
    same = "The plans are the same: they have equal placements and equal moves."
    assert mlp.diff(mlp_plan(mesh)) == same
    assert stages.diff(stages) == same
