"""A call that was made before takes the short way; whatever differs sends it the long way."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from shardc import B, P, S
from shardc.errors import ArgumentError, PipelineError
from shardc.passes.trace.trace import Arguments


@pytest.fixture
def mesh():
    return shardc.make_mesh(data=8)


@pytest.fixture
def long_ways(monkeypatch):
    """The calls that were taken apart."""
    taken = []
    original = Arguments.bind

    def bind(self, args, kwargs):
        taken.append(args)
        return original(self, args, kwargs)

    monkeypatch.setattr(Arguments, "bind", bind)
    return taken


def test_the_second_call_is_not_taken_apart(mesh, long_ways):
    f = shardc.function(mesh=mesh, in_placements={"b": {"data": S(0)}})(
        lambda b, a, /, c=3.0, *, d: (a - b) * c + d["x"]
    )
    x = np.arange(16.0, dtype=np.float32)
    first = f(x, 2 * x, d={"x": x})
    taken = len(long_ways)
    again = f(x + 1, 2 * x, d={"x": x})
    assert len(long_ways) == taken
    np.testing.assert_allclose(first, x * 3 + x)
    np.testing.assert_allclose(again, (x - 1) * 3 + x)


def test_a_run_that_failed_is_not_made_again(mesh, monkeypatch):
    """Where stages run in several processes, it would be a run of this one alone."""
    f = shardc.function(mesh=mesh)(lambda x: x + 1)
    x = np.ones(8, np.float32)
    f(x)
    (executable,) = f._executables.values()
    launched = []

    def launch(args):
        launched.append(args)
        raise PipelineError("process 1: a task failed")

    monkeypatch.setattr(executable, "launch", launch)
    with pytest.raises(PipelineError, match="process 1"):
        f(x)
    assert len(launched) == 1


def test_a_loop_is_fed_its_own_uneven_results(mesh, long_ways):
    f = shardc.function(mesh=mesh, in_placements={"data": S(0)}, out_placements={"data": S(0)})(lambda x: x + 1)
    x = f(np.arange(13.0, dtype=np.float32))
    x = f(x)
    taken = len(long_ways)
    x = f(x)
    assert len(long_ways) == taken and isinstance(x, shardc.PlacedArray)
    np.testing.assert_array_equal(np.asarray(x), np.arange(13.0) + 3)
    np.testing.assert_array_equal(np.asarray(f(np.zeros(13, np.float32))), np.ones(13))


def test_other_shapes_dtypes_and_weak_types_are_planned_anew(mesh):
    f = shardc.function(mesh=mesh)(lambda x, y: x * y)
    x = jnp.arange(8, dtype=jnp.bfloat16)
    for a, b in [(x, 2.0), (x, np.float32(2)), (x, 2), (x[:4], 2.0), (x.astype(float), 2.0), (x, 3.0), (x, True)] * 2:
        want = jnp.multiply(a, b)
        got = f(a, b)
        assert (got.dtype, got.shape, got.weak_type) == (want.dtype, want.shape, want.weak_type)
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


def test_what_arrives_elsewhere_is_boxed_by_a_plan_of_its_own(mesh):
    f = shardc.function(mesh=mesh, in_placements={"x": {"data": S(0)}})(lambda x: x + 1)
    x = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    for placement in ({"data": S(0)}, {"data": S(1)}, {"data": B}) * 2:
        there = shardc.put(x, mesh, shardc.Placement(placement))
        np.testing.assert_array_equal(f(there), x + 1)
        kinds = [c.kind for c in f.plan(there).collectives]
        assert kinds == (["all_to_all"] if placement == {"data": S(1)} else [])


def test_constants_are_compared(mesh):
    f = shardc.function(mesh=mesh, static_argnames="n")(lambda x, n, how: x * n if how == "times" else x + n)
    x = np.arange(8.0, dtype=np.float32)
    for n, how in [(2, "times"), (3, "times"), (2, "plus"), (2, "times"), (3, "plus")]:
        np.testing.assert_array_equal(f(x, n, how), x * n if how == "times" else x + n)


def test_settings_are_looked_at(mesh):
    f = shardc.function(mesh=mesh)(lambda x: x / 3)
    x = np.arange(8.0)
    assert f(x).dtype == np.float32
    with jax.enable_x64(True):
        assert f(x).dtype == np.float64
        assert f(x).dtype == np.float64
    assert f(x).dtype == np.float32


def test_arguments_are_narrowed_after_a_call_with_wide_ones(mesh):
    f = shardc.function(mesh=mesh)(lambda x: x / 3)
    for _ in range(200):  # JAX forgets it in 3 calls of 100
        x = np.arange(8.0)
        with jax.enable_x64(True):
            f(x)
        np.testing.assert_allclose(f(x), x.astype(np.float32) / 3, rtol=1e-6)


def test_inside_a_trace_it_is_the_plain_function(mesh):
    f = shardc.function(mesh=mesh)(lambda x: (x * x).sum())
    x = np.arange(8.0, dtype=np.float32)
    f(x), f(x)
    np.testing.assert_allclose(jax.grad(f)(x), 2 * x)
    np.testing.assert_allclose(jax.vmap(f)(x[:, None]), x * x)


def test_a_partial_argument_takes_plain_values_again(mesh):
    f = shardc.function(mesh=mesh, in_placements={"x": {"data": P}}, out_placements={"data": S(0)})(lambda x: 2 * x)
    x = np.arange(8.0, dtype=np.float32)
    for scale in (1, 2, 3):
        np.testing.assert_allclose(f(scale * x), 2 * scale * x)


def test_a_compiled_call_refuses_others(mesh):
    f = shardc.function(mesh=mesh)(lambda x: x + 1)
    compiled = f.compile(np.zeros(8, np.float32))
    for _ in range(3):
        np.testing.assert_array_equal(compiled(np.zeros(8, np.float32)), np.ones(8))
    message = r"not the call that was compiled:\n  x: planned for float32\[8\], got float32\[9\]"
    with pytest.raises(ArgumentError, match=message):
        compiled(np.zeros(9, np.float32))


def test_a_compiled_call_refuses_other_constants(mesh):
    """It ran with those that it was compiled for."""

    def scaled(x, by, sign, tree):
        return x * by * (-1 if sign == "-" else 1)

    f = shardc.function(mesh=mesh, static_argnames="by")(scaled)
    x = np.ones(8, np.float32)
    compiled = f.compile(x, 2, "-", {"a": x})
    np.testing.assert_array_equal(compiled(x, 2, "-", {"a": x}), -2 * x)
    head = "scaled: not the call that was compiled:"
    with pytest.raises(ArgumentError) as error:
        compiled(x, 3, "+", {"a": x})
    assert str(error.value) == (
        f"{head}\n  sign: another constant than it was compiled for.\n  by: another constant than it was compiled for."
    )
    with pytest.raises(ArgumentError, match=f"{head}\n  the arguments have another structure: compiled for PyTreeDef"):
        compiled(x, 2, "-", {"b": x})


def test_arguments_of_a_plan_stand_in_the_order_of_the_function(mesh):
    f = shardc.function(mesh=mesh, in_placements={"b": {"data": S(0)}})(lambda b, a: b * a.sum())
    plan = f.plan(np.zeros(8), np.zeros(8))
    assert plan.in_placements.names == ("b", "a")
    b, _ = shardc.put((np.zeros(8), np.zeros(8)), mesh, plan.in_placements)
    assert b.sharding.spec == jax.sharding.PartitionSpec("data")


def test_a_result_takes_the_buffer_of_the_argument_that_it_replaces(mesh):
    """JAX would give each result the first donated buffer of its shape, and XLA copy what is crossed."""

    def step(state, momentum, batch):
        momentum = [0.9 * m + x.sum() for m, x in zip(momentum, batch, strict=True)]
        return [x - 0.1 * m for x, m in zip(state, momentum, strict=True)], momentum, batch[0] + 1

    f = shardc.function(mesh=mesh, in_placements={"data": S(0)}, donate_argnames=("state", "momentum"))(step)
    values = [np.arange(8.0 * k, 8.0 * k + 8, dtype=np.float32) for k in range(3)]
    compiled = f.compile(values, values, values)
    aliases = re.findall(r"\{(\d+)\}: \((\d+), \{\}", compiled.hlo().splitlines()[0])
    assert len(aliases) == 6 and all(result == argument for result, argument in aliases)
    state, momentum = (shardc.put(values, mesh, shardc.Placement({"data": S(0)})) for _ in range(2))
    got, want = f(state, momentum, values), step(values, values, values)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-5), got, want)
    assert all(x.is_deleted() for x in [*state, *momentum])
