"""The report of a flow, as golden text."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp

import shardc
from tests.dataflow.test_plan import STATE, flow_of


def without_lines(text):
    """A report without line numbers of this folder."""
    return re.sub(r"\.py:\d+ *", ".py", text)


def test_a_parameter_server(golden):
    golden("parameter_server", without_lines(flow_of().plan(STATE, 0).explain()))


def test_a_flow_without_items(golden):
    pair = jax.ShapeDtypeStruct((4,), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)

    @shardc.host(gives=pair, copies=2)
    def sample(number, w):
        return w * number, number

    @shardc.function(mesh=shardc.make_mesh(data=2, topology="v5p:2x2x1"))
    def learn(w, seen):
        return w + seen[0].sum() + seen[1].sum()

    @shardc.flow(credits=1)
    def act_and_learn(w):
        seen = sample(shardc.late(w, 1))
        return learn(w, seen), None

    golden("fleet", without_lines(act_and_learn.plan(jnp.zeros(4)).explain()))
