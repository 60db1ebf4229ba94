"""Small HTML of plans, compiled functions, placements, audits, tunings and flows."""

import xml.etree.ElementTree as ET

import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from shardc import P, S
from shardc.sbp.placement import Placement
from tests.dataflow.flows import trained
from tests.report.page import plans


def texts(made):
    """The texts of well-formed HTML."""
    return [t.strip() for t in ET.fromstring(f"<div>{made}</div>").itertext() if t.strip()]


@pytest.mark.plans_eagerly
def test_a_plan_and_what_is_compiled_from_it():
    def step(w, x):
        return (x @ w).sum()

    ones = np.ones((8, 8), np.float32)
    f = shardc.function(step, mesh=shardc.make_mesh(data=4), in_placements={"x": {"data": S(0)}})
    made = f.compile(ones, ones)
    found = texts(made._repr_html_())
    assert found == texts(made.plan._repr_html_())
    assert found[0] == "step on data=4 on cpu"
    assert {"Time of a call", "Peak memory", made.plan.moves[0][1].kind} <= set(found)
    assert made.audit()._repr_html_() == f"<pre>{made.audit()}</pre>"


def test_a_plan_with_names_that_are_hard_to_quote():
    assert "<img" not in plans.spmd()._repr_html_()


def test_a_placement():
    assert texts(Placement({"data": S(0), "<m>": P("sum")})._repr_html_()) == [
        "{data: S(0), <m>: P(sum)}", "along data dimension 0 is split; along <m> the sum is the value"
    ]  # fmt: skip
    assert texts(Placement()._repr_html_()) == ["{}", "every device holds all of it"]


def test_a_tuning():
    found = shardc.tune(lambda x: x @ x.T, plans.f32(64, 64), devices=4, topology="v5p", tries=2)
    assert {"mesh", "time", "memory"} <= set(texts(found._repr_html_()))


def test_a_flow():
    with trained() as train:
        assert {"node", "learn"} <= set(texts(train.plan(jnp.zeros(4), 0)._repr_html_()))
