"""Rounds: nodes, names, and where each value comes from. `tests/test_flows.py` has the rounds that are errors."""

from __future__ import annotations

import jax
import pytest

from shardc.dataflow.round import Fixed, Round, outside, traced_round
from shardc.dataflow.value import LateOrigin, RoundValue
from tests.dataflow.random_flows import AVAL, StubWork


def late(x, rounds, first=None):
    return RoundValue(x.aval, LateOrigin(x, rounds, first), x.round, "late")


def traced(body, state):
    round = Round("train", "train (train.py:7)")
    inputs = round.add("inputs", StubWork(None, results=1), [None], [AVAL])

    def call(name, *args, every=1):
        work = StubWork(None)
        return round.values_of(round.add(name, work, args, work.results, every, "train.py:9"))

    round.trace(lambda s, x: body(call, s, x), state, inputs, jax.tree.structure(0))
    return round


def test_nodes_are_numbered_and_named_in_the_order_of_calls():
    round = traced(lambda call, s, x: (call("f", s, *call("g", x), *call("f", s))[0], {}), AVAL)
    assert [(n.number, n.name) for n in round.nodes] == [(0, "inputs"), (1, "g"), (2, "f"), (3, "f[1]")]


def test_where_a_value_comes_from():
    first = object()

    def body(call, s, x):
        made, other = call("f", s["w"])
        state = {"old": s["w"], "older": s["old"], "stays": s["stays"], "w": made}
        return state, [x, made, late(s["w"], 2), late(other, 3, first), late(late(other, 1, first), 2), s["stays"]]

    round = traced(body, dict.fromkeys(["old", "older", "stays", "w"], AVAL))
    old, older, stays, w = range(4)

    def told(v):
        o = round.origin(v)
        begins = ["first" if isinstance(f, Fixed) and f.array is first else f for f in o.first]
        return o.node and o.node.name, o.index, o.delay, begins

    assert [told(v) for v in round.state] == [
        ("f", 0, 2, [old, w]), ("f", 0, 3, [older, old, w]), (None, stays, 0, [stays]), ("f", 0, 1, [w]),
    ]  # fmt: skip
    assert [told(v) for v in round.outs] == [
        ("inputs", 0, 0, []), ("f", 0, 0, []), ("f", 0, 3, [w, w, w]), ("f", 1, 3, ["first"] * 3),
        ("f", 1, 3, ["first"] * 3), (None, stays, 0, [stays]),
    ]  # fmt: skip


@pytest.mark.parametrize(("giver", "delay", "taker", "fits"), [
    (1, 0, 1, True), (1, 3, 2, True), (2, 0, 4, True), (2, 2, 4, True), (2, 1, 4, False), (2, 0, 3, False),
    (2, 0, 1, False),
])  # fmt: skip
def test_rates_that_fit(giver, delay, taker, fits):
    def body(call, s, x):
        made = call("f", x, every=giver)[0]
        call("g", late(made, delay, 0) if delay else made, every=taker)
        return s, None

    if fits:
        traced(body, AVAL)
    else:
        with pytest.raises(ValueError, match="is called in rounds without its values"):
            traced(body, AVAL)


def test_a_round_is_traced_by_one_thread_at_a_time():
    seen = []

    def body(call, s, x):
        seen.append(traced_round())
        with outside():
            seen.append(traced_round())
        return s, None

    round = traced(body, AVAL)
    assert seen == [round, None]
    assert traced_round() is None
