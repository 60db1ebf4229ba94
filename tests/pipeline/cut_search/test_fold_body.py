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


def test_a_sum_is_work_of_the_stage_that_makes_its_terms(program):
    """JAX adds the gradients of all layers after the backward, where the first stage ends."""
    body, _, _ = measured(program)
    at = {body.eqns[t]: place for t, place in enumerate(body.worked)}
    made = {v: e for e in body.eqns for v in e.outvars}
    gradients = [(c, terms) for c, terms in zip(body.loop.carries, body.terms, strict=True) if c.after.aval.shape]
    assert gradients
    for carry, terms in gradients:
        assert at[made[carry.after]] == max(body.made[v] for v in terms)
    assert any(place != t and body.eqns[t] in body.sums for t, place in enumerate(body.worked))


def test_a_cheap_value_is_work_of_the_stage_that_reads_it(program):
    """So there is no work between two points between which only cheap values are made."""
    body, _, _ = measured(program)
    cheap = {t for t, e in enumerate(body.eqns) if all(v in body.cheap for v in e.outvars) and e not in body.sums}
    unread = {t for t in cheap if body.worked[t] == t}
    assert cheap - unread and not any(v in body.reads for t in unread for v in body.eqns[t].outvars)
    assert not cheap & {body.worked[t] for t in cheap - unread}
    assert all(body.worked[t] == t for t, e in enumerate(body.eqns) if t not in cheap and e not in body.sums)
