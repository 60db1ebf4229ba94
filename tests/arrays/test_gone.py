"""Arrays that were donated to a call, given to another one: the text names them, and nothing is called lost here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from shardc import S
from shardc.arrays.gone import GoneError

ROWS = np.ones((8, 8), np.float32)
TOOK = "an earlier call took its buffer; pass that call's result instead."


def train(params, x):
    return jax.tree.map(lambda p: p - x.sum(), params)


def evaluate(params, x):
    return (params["a"] * x).sum() + params["b"].sum()


def pipelined(params, batch):
    def loss(params, x):
        return (shardc.stage_boundary(jnp.tanh(x @ params["a"])) @ params["b"]).sum()

    value, grads = jax.value_and_grad(shardc.accumulate(loss, microbatches=2))(params, batch)
    return jax.tree.map(lambda p, g: p - g, params, grads), value


@pytest.fixture
def mesh():
    return shardc.make_mesh(data=8)


@pytest.fixture
def gone(mesh):
    """Parameters that a call took: one a plain array, one a PlacedArray."""
    pins = shardc.rules({"b": {"data": S(0)}})
    params = shardc.put({"a": ROWS, "b": np.ones(9, np.float32)}, mesh, {"a": {}, "b": {"data": S(0)}})
    shardc.function(train, mesh=mesh, in_placements={"params": pins}, donate_argnames="params")(params, ROWS)
    assert params["a"].is_deleted() and params["b"].is_deleted()
    return params


def text_of(call, *args):
    with pytest.raises(GoneError) as caught:
        call(*args)
    assert isinstance(caught.value, shardc.ArgumentError) and caught.value.__suppress_context__
    return str(caught.value)


def lines(head, *paths):
    return "\n".join([head, *(f"  {path}: {TOOK}" for path in paths)])


@pytest.mark.parametrize("calls", [0, 1])
def test_another_function(mesh, gone, calls):
    """Whether its call is a cached one or not; what it donates itself is alive."""
    alive = {"a": ROWS, "b": np.ones(9, np.float32)}
    plain, donating = (shardc.function(evaluate, mesh=mesh, donate_argnames=d) for d in ((), "x"))
    x = jnp.asarray(ROWS)
    for _ in range(calls):
        plain(alive, x), donating(alive, x.copy())
    for f in (plain, donating):
        assert text_of(f, gone, x) == lines("evaluate: arguments that are gone", "params/a", "params/b")
        assert text_of(f.compile(gone, x), gone, x) == text_of(f, gone, x)
    assert not x.is_deleted() and float(plain(alive, x)) == 73


def test_the_same_function(mesh, gone):
    f = shardc.function(train, mesh=mesh, donate_argnames="params")
    assert text_of(f, gone, ROWS) == lines("train: donated arguments that are gone", "params/a", "params/b")


def test_an_argument_that_is_to_be_split_unevenly(mesh):
    x = jnp.ones(9)
    x.delete()
    f = shardc.function(lambda x: x * 2, mesh=mesh, in_placements={"x": {"data": S(0)}})
    assert text_of(f, x) == lines("<lambda>: arguments that are gone", "x")


@pytest.mark.parametrize("donate", ["params", ()])
def test_a_pipeline(donate):
    mesh = shardc.make_mesh(pipe=2, data=4)
    first, other = (
        shardc.function(pipelined, mesh=mesh, pipeline=shardc.Pipeline(), donate_argnames=d) for d in ("params", donate)
    )
    params, _ = first({"a": ROWS, "b": ROWS}, ROWS)
    new, _ = first(params, ROWS)
    for _ in range(2):
        assert text_of(other, params, ROWS) == lines("pipelined: arguments that are gone", "params/a", "params/b")
        other(jax.tree.map(jnp.copy, new), ROWS)


def test_put_and_fetch(mesh, gone):
    assert text_of(shardc.fetch, gone) == lines("shardc.fetch: arrays that are gone", "a", "b")
    assert text_of(shardc.fetch, gone["b"]) == lines("shardc.fetch: arrays that are gone", "the array")
    assert text_of(shardc.put, gone, mesh, {}) == lines("shardc.put: arrays that are gone", "a", "b")


def test_a_flow(mesh, gone):
    evaluated = shardc.function(evaluate, mesh=mesh)

    @shardc.flow
    def passed(params, x):
        return params, evaluated(params, x)

    head = f"passed (test_gone.py:{passed.__wrapped__.__code__.co_firstlineno})"
    assert text_of(passed.run, gone, [ROWS]) == lines(f"{head}: state that is gone", "a", "b")
    alive = {"a": ROWS, "b": np.ones(9, np.float32)}
    with pytest.raises(shardc.RoundFailedError) as caught:
        passed.run(alive, [jnp.asarray(ROWS), gone["a"]])
    assert str(caught.value.__cause__) == lines("item 1: arrays that are gone", "the array")
