"""The face of dataflows: options and bad input, each mistake by the full text of its error."""

from __future__ import annotations

import os
import signal
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from shardc import ArgumentError, RoundFailedError, ShardcError
from shardc.errors import FlowError, TracingError

MESH = shardc.make_mesh(data=2)
SHAPE = jax.ShapeDtypeStruct((4,), jnp.float32)
INSIDE = (
    "A round is traced once, before its values exist: do this inside a function that the round calls, a "
    "shardc.function or a shardc.host."
)
X = np.ones(4, np.float32)
VALUE = "state, a value of the round (float32[4])."


@shardc.function(mesh=MESH)
def add(w, x):
    return w + x


@shardc.function(mesh=MESH)
def half(w):
    return w[:2]


@shardc.function(mesh=MESH)
def whole(w):
    return w.astype(jnp.int32)


def run(body, state=X, items=(X, X, X), **options):
    def train(state, item):
        return body(state, item)

    flow = shardc.flow(train)
    try:
        return flow.run(state, items, **options)
    except ShardcError as error:
        raise type(error).__new__(type(error), str(error).replace(flow.where, "HERE")) from error


def text_of(kind, call, *args, **kwargs):
    with pytest.raises(kind) as caught:
        call(*args, **kwargs)
    assert type(caught.value) is kind
    return str(caught.value.args[0])


def set_item(w, x):
    w[0] = x
    return w, None


def branch(w, x):
    return (w if w else x), None


# ---- what a round may not do with its values


USES = {
    "branch": (branch, "a Python branch, or bool(), of"),
    "sum": (lambda w, x: (w + 1, None), "a sum with"),
    "difference": (lambda w, x: (1 - w, None), "a difference with"),
    "product": (lambda w, x: (w @ x, None), "a matrix product with"),
    "logical": (lambda w, x: (w & x, None), "a logical and with"),
    "comparison": (lambda w, x: (w == x, None), "a comparison with"),
    "sign": (lambda w, x: (-w, None), "a sign of"),
    "item": (lambda w, x: (w[0], None), "an item of"),
    "set item": (set_item, "a change of an item of"),
    "loop": (lambda w, x: (list(w), None), "a Python loop over"),
    "in": (lambda w, x: (1 in w, None), "a search in"),
    "float": (lambda w, x: (float(w), None), "float() of"),
    "format": (lambda w, x: (f"{w:.3f}", None), "a formatted number from"),
    "method": (lambda w, x: (w.sum(), None), ".sum of"),
    "transpose": (lambda w, x: (w.T, None), ".T of"),
    "numpy": (lambda w, x: (np.sin(w), None), "a NumPy array of"),
}


@pytest.mark.parametrize("name", USES)
def test_a_use_that_needs_a_number(name):
    body, what = USES[name]
    assert text_of(TracingError, run, body) == f"HERE: {what} {VALUE} {INSIDE}"


@pytest.mark.parametrize("fn", [jnp.sin, jax.jit(lambda x: x)])
def test_an_operation_of_jax_on_a_value(fn):
    text = text_of(TracingError, run, lambda w, x: (fn(w), None))
    assert text.startswith("HERE: ")
    assert text.startswith("HERE: a JAX operation on state, a value of the round (float32[4]).")
    assert text.endswith(INSIDE)


# ---- what a round returns, and where its values are there


def rated(w, x):
    return add(w, shardc.every(2, add)(w, x)), None


MISTAKES = {
    "one thing": (
        lambda w, x: add(w, x),
        "HERE returned one value, add; a round returns two things, its new state and what it gives: "
        "`return state, {'loss': loss}`.",
    ),
    "nothing": (
        lambda w, x: None,
        "HERE returned None; a round returns two things, its new state and what it gives: "
        "`return state, {'loss': loss}`.",
    ),
    "three things": (
        lambda w, x: (w, x, x),
        "HERE returned a tuple of 3; a round returns two things, its new state and what it gives: "
        "`return state, {'loss': loss}`.",
    ),
    "another structure": (
        lambda w, x: ({"w": add(w, x)}, None),
        "HERE: the state that the round returns has another structure than the one that it takes:\n"
        "  takes   PyTreeDef(*)\n  returns PyTreeDef({'w': *})",
    ),
    "another shape": (
        lambda w, x: (half(w), None),
        "HERE: a state that cannot be carried to the next round:\n  state was float32[4] and is float32[2].",
    ),
    "another dtype": (
        lambda w, x: (whole(w), None),
        "HERE: a state that cannot be carried to the next round:\n  state was float32[4] and is int32[4].",
    ),
    "a constant": (
        lambda w, x: (X, None),
        "HERE: a state that cannot be carried to the next round:\n  state is an array that is the same in all rounds; "
        "let it be a part of the state that the round takes, or a result.",
    ),
    "a state at times": (
        lambda w, x: (shardc.every(2, add)(w, x), None),
        "HERE: a state that cannot be carried to the next round:\n  state is made by add, which runs every 2 rounds, "
        "and has no value in the others; let it run every round, or decide inside it.",
    ),
    "a value at times": (
        rated,
        f"HERE: add[1] (test_flows.py:{rated.__code__.co_firstlineno + 1}) is called in rounds without its values:\n"
        "  add is there every 2 rounds, and add[1] runs in each round: call it in shardc.every(2, ...) too, and let "
        "delays be multiples of 2.",
    ),
    "no first value": (
        lambda w, x: (add(w, shardc.late(add(w, x), 1)), None),
        "HERE: shardc.late(add, 1): there is no value of 1 rounds ago in the first round; give it, as "
        "first=jnp.zeros((4,), 'float32').",
    ),
    "a huge common multiple": (
        lambda w, x: (add(w, x), [shardc.every(n, add)(w, x) for n in (97, 89, 83, 79)]),
        "HERE: the rates 79, 83, 89, 97 repeat together only every 56,606,581 rounds; choose rates that divide one "
        "another.",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_round_that_cannot_run(name):
    body, text = MISTAKES[name]
    assert text_of(FlowError, run, body) == text


def test_a_state_whose_leaves_only_change_places():
    body = lambda s, x: ({"a": s["b"], "b": s["a"]}, None)  # noqa: E731
    text = text_of(FlowError, run, body, {"a": X, "b": X})
    assert text == "HERE: state/a only changes places with other leaves of the state."


def test_a_value_of_another_round():
    kept = []
    run(lambda w, x: (add(w, x), kept.append(w)))
    text = text_of(FlowError, run, lambda w, x: (add(w, kept[0]), None))
    assert text == "HERE: Value(float32[4], state) is a value of another round, HERE, and is gone with it."


LATE = {
    "below 0": (lambda w: shardc.late(w, -1), "shardc.late: -1 rounds; it takes a whole number of 0 or more."),
    "a part": (lambda w: shardc.late(w, 1.5), "shardc.late: 1.5 rounds; it takes a whole number of 0 or more."),
    "an array": (
        lambda w: shardc.late(X, 1),
        "shardc.late is for values of a flow's round; got array([1., 1., 1., 1.], dtype=float32).",
    ),
    "another structure": (
        lambda w: shardc.late(w, 1, first=[X]),
        "shardc.late: first= has the structure PyTreeDef([*]), the values have PyTreeDef(*).",
    ),
    "another shape": (
        lambda w: shardc.late(w, 1, first=X[:3]),
        "shardc.late: first= stands for values of another shape or dtype:\n"
        "  state is float32[4], and first= has float32[3].",
    ),
    "another dtype": (
        lambda w: shardc.late(w, 1, first=X.astype(np.int32)),
        "shardc.late: first= stands for values of another shape or dtype:\n"
        "  state is float32[4], and first= has int32[4].",
    ),
    "every 0": (lambda w: shardc.every(0, add), "shardc.every: 0 rounds; it takes a whole number of 1 or more."),
    "every of what": (
        lambda w: shardc.every(2, 3),
        "shardc.every wants a shardc.function or a shardc.host function, got 3.",
    ),
}


@pytest.mark.parametrize("name", LATE)
def test_late_and_every(name):
    make, text = LATE[name]
    assert text_of(ArgumentError, run, lambda w, x: (add(make(w), x), None)) == text


# ---- options


def lone(state):
    return add(state, state), None


def pair(state, item):
    return add(state, item), None


def three(a, b, c):
    return a, b, c


LONE, PAIR = shardc.flow(lone), shardc.flow(pair)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: shardc.flow(three),
            "shardc.flow, {three}: a round takes its state, and the item that each round gets: "
            "`def three(state, item):`, not (a, b, c).",
        ),
        (lambda: shardc.flow(lone, credits=0), "shardc.flow: credits=0; a channel needs a whole number of 1 or more."),
        (lambda: shardc.flow(3), "shardc.flow wants a function of one round, got 3."),
        (lambda: LONE.run(X), "{lone}: nothing ends the run; say how many: run(state, rounds=1000)."),
        (lambda: LONE.run(X, [X]), "{lone} takes no item; write `def lone(state, item):`, or give no inputs."),
        (
            lambda: LONE.plan(X, X),
            "{lone} takes no item; give the state alone, or write `def lone(state, item):`.",
        ),
        (lambda: PAIR.run(X), "{pair} takes an item in each round; give them: run(state, inputs)."),
        (
            lambda: PAIR.run(X, 3),
            "{pair}: inputs are an item for each round, in a list or an iterator; got 3.",
        ),
        (lambda: PAIR.run(X, [X], rounds=-1), "{pair}: rounds=-1 is no whole number of 0 or more."),
        (lambda: PAIR.run(X, [{"of": "a text"}]), "{pair}: leaves that are no arrays:\n  item/of is 'a text'."),
        (
            lambda: PAIR.run([{1, 2}], [X]),
            "{pair}: leaves that are neither arrays nor constants:\n  state/0 is {1, 2}.",
        ),
        (
            lambda: jax.jit(lambda w: PAIR(w, w))(X),
            "{pair}: a flow runs programs of its own, and cannot be part of a jax.jit, jax.grad or jax.vmap; call it "
            "outside, or let the function that it calls be transformed.",
        ),
        (
            lambda: jax.grad(lambda w: PAIR(w, w)[0].sum())(X),
            "{pair}: a flow runs programs of its own, and cannot be part of a jax.jit, jax.grad or jax.vmap; call it "
            "outside, or let the function that it calls be transformed.",
        ),
        (
            lambda: jax.vmap(lambda w: PAIR(w, w)[0])(X[None]),
            "{pair}: a flow runs programs of its own, and cannot be part of a jax.jit, jax.grad or jax.vmap; call it "
            "outside, or let the function that it calls be transformed.",
        ),
        (
            lambda: run(lambda w, x: LONE.run(w, rounds=2)),
            "{lone} is run in a round, where arrays do not exist yet; call it, and its nodes become a part of that "
            "round: state, given = lone(state).",
        ),
    ],
)
def test_options_of_a_flow(call, text):
    where = {fn.__name__: f"{fn.__name__} (test_flows.py:{fn.__code__.co_firstlineno})" for fn in (lone, pair, three)}
    for name, said in where.items():
        text = text.replace(f"{{{name}}}", said)
    assert text_of(ArgumentError, call) == text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"copies": 0}, "copies=0 is no whole number of 1 or more"),
        (
            {"copies": 1.5, "where": "moon"},
            "copies=1.5 is no whole number of 1 or more; where='moon' is none of 'thread', 'process', 'ray'",
        ),
        ({"credits": 0}, "credits=0 is no whole number of 1 or more"),
        ({"deadline": 0}, "deadline=0 is no number of seconds above 0"),
        ({"deadline": "1 s"}, "deadline='1 s' is no number of seconds above 0"),
        ({"seconds": -1}, "seconds=-1 is no number of seconds"),
        ({"gives": 3}, "gives= has 3, which has no shape and dtype; write jax.ShapeDtypeStruct(shape, dtype)"),
    ],
)
def test_options_of_a_host_function(options, text):
    said = f"three (test_flows.py:{three.__code__.co_firstlineno})"
    assert text_of(ArgumentError, shardc.host, three, **options) == f"shardc.host, {said}: {text}."


def log(x):
    return "a text that nobody reads"


def numbered(copy, x):
    return x


NOTHING = (
    "log gives nothing (gives=None), and {}; say what it returns, as "
    "shardc.host(log, gives=jax.ShapeDtypeStruct(shape, dtype))."
)


@pytest.mark.parametrize(
    ("body", "taker"),
    [
        (lambda w, x: (add(w, shardc.host(log)(x)), None), "add takes it"),
        (lambda w, x: (add(w, x=shardc.host(log, deadline=1.0)(x)), None), "add takes it"),
        (lambda w, x: (w, shardc.host(half, gives=SHAPE)({"a": shardc.host(log)(x)})), "half takes it"),
        (lambda w, x: (shardc.every(2, shardc.host(log))(x), None), "the state takes it"),
        (lambda w, x: (shardc.shared(X, on=MESH).change(add, shardc.host(log)(x)), None), "add takes it"),
    ],
)
def test_a_result_of_a_function_that_gives_nothing(body, taker):
    text = text_of(FlowError, run, body)
    assert text == f"HERE: results that are not there:\n  {NOTHING.format(taker)}"


def test_an_operation_on_a_result_that_is_not_there():
    text = text_of(TracingError, run, lambda w, x: (w, 2 * shardc.host(log)(x)))
    assert text == "HERE: " + NOTHING.format("the round takes a product with it")


@pytest.mark.parametrize("options", [{}, {"copies": 2}, {"deadline": 60.0}])
def test_what_a_function_of_gives_none_returns_is_ignored(options):
    fn = numbered if "copies" in options else log
    w, given = run(lambda w, x: (add(w, x), {"log": shardc.host(fn, **options)(x), "more": (w, None)}))
    np.testing.assert_array_equal(w, 4 * X)
    assert [g["log"] for g in given] == [None] * 3


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            lambda w, x: (w, shardc.host(log, gives=SHAPE, copies=8)(x)),
            "HERE calls log (test_flows.py:{log}), which takes (x): too many positional arguments; with copies= the "
            "first argument is the number of the copy.",
        ),
        (
            lambda w, x: (w, shardc.host(numbered, gives=SHAPE)(x)),
            "HERE calls numbered (test_flows.py:{numbered}), which takes (copy, x): missing a required argument: 'x'.",
        ),
        (
            lambda w, x: (w, shardc.host(log, gives=SHAPE)(x, at=x)),
            "HERE calls log (test_flows.py:{log}), which takes (x): got an unexpected keyword argument 'at'.",
        ),
    ],
)
def test_a_call_of_a_host_function_that_does_not_fit(body, text):
    lines = {fn.__name__: fn.__code__.co_firstlineno for fn in (log, numbered)}
    assert text_of(ArgumentError, run, body) == text.format(**lines)


def test_how_a_host_function_a_shared_state_and_a_gang_print():
    line = log.__code__.co_firstlineno
    assert repr(shardc.host(log)) == f"Host(log (test_flows.py:{line}), where='thread')"
    assert repr(shardc.host(log, copies=8, where="process")) == (
        f"Host(log (test_flows.py:{line}), copies=8, where='process')"
    )
    assert repr(shardc.shared({"a": X, "b": X}, on=MESH)) == "Shared(2 arrays on data=2, 0 changes)"
    gang = shardc.Gang(in_flight=3)
    assert repr(gang) == "Gang(no clients, in_flight=3)"
    gang.share(add, weight=2)
    gang.share(half, name="small")
    assert repr(gang) == "Gang(add (weight 2), small (weight 1), in_flight=3)"


def test_an_interrupt_has_no_frames_of_shardc():
    def read(x):
        os.kill(os.getpid(), signal.SIGINT)
        return x

    host = shardc.host(read, gives=SHAPE)
    flow = shardc.flow(lambda w, x: (add(w, host(x)), None))
    for call in (lambda: flow.run(X, [X]), lambda: flow(X, X)):
        with pytest.raises(KeyboardInterrupt) as caught:
            call()
        files = {frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)}
        assert files == {__file__}
    flow.close()


def test_pending_of_another_run():
    text = text_of(FlowError, PAIR.run, X, [X], pending={"a": [X]})
    assert (
        text == f"{PAIR.where}: pending= is not what a run of this flow has left:\n  a is no late value of this flow."
    )


# ---- items


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (X[:3], "item 1 differs from the first one; give all the same shapes:\n  leaf 0: float32[3] after float32[4]."),
        (
            {"a": X},
            "item 1 has another structure than the first one:\n  first PyTreeDef(*)\n  now   PyTreeDef({'a': *})",
        ),
    ],
)
def test_an_item_unlike_the_first(item, text):
    with pytest.raises(RoundFailedError) as caught:
        PAIR.run(X, [X, item])
    error = caught.value
    assert str(error) == (
        f"{PAIR.where}: inputs failed in round 1: FlowError: {text}\n"
        f"All actors have stopped; the state after {error.rounds} rounds is kept in `error.state`."
    )
    np.testing.assert_array_equal(error.state, X + error.rounds * X)


# ---- what a face is used like


def test_a_flow_is_called_for_one_round_and_in_another_round():
    state, given = PAIR(X, 2 * X)
    assert given is None
    np.testing.assert_array_equal(state, 3 * X)

    @shardc.flow
    def twice(state, item):
        state, _ = PAIR(state, item)
        return PAIR(state, item)

    assert [n.name for n in twice.plan(X, X).nodes] == ["inputs", "add", "add[1]"]
    np.testing.assert_array_equal(twice.run(X, [X, X])[0], 5 * X)


def test_a_flow_of_a_round_without_items():
    state, given = LONE.run(X, rounds=3)
    np.testing.assert_array_equal(state, 8 * X)
    assert given == [None] * 3


def test_functions_outside_a_round_run_as_they_are():
    assert shardc.host(lambda x: x + 1, gives=SHAPE)(1) == 2
    np.testing.assert_array_equal(shardc.every(5, add)(X, X), 2 * X)


def test_no_jit_does_not_reach_into_a_round():
    with jax.disable_jit():
        np.testing.assert_array_equal(PAIR.run(X, [X, X])[0], 3 * X)
