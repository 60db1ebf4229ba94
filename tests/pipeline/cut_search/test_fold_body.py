"""Folded bodies: the fold is where the gradient begins, and equations are near their readers."""

import jax
import pytest

from tests.pipeline.cut_search.folded import ROWS, STEPS, WIDTHS, measured, traced

pytestmark = pytest.mark.usefixtures("compiled_fast")


@pytest.fixture(params=STEPS)
def program(request):
    with jax.enable_x64(True):
        yield traced(STEPS[request.param])


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
