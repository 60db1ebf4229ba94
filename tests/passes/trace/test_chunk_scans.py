"""Associative scans over split time: each device scans its own steps, with one device's numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardc
from shardc import B, S

pytestmark = pytest.mark.usefixtures("compiled_fast")

AS_JAX_HAS_IT = lax.associative_scan
MESH = shardc.make_mesh(a=4, b=2)


def gates(x: Any, y: Any) -> Any:
    return x[0] * y[0], x[1] * y[0] + y[1]


def min_gru(x: Any, reverse: bool = False, axis: int = 0) -> Any:
    """[time, features]"""
    z = jax.nn.sigmoid(x)
    return lax.associative_scan(gates, (1 - z, z * jnp.tanh(x)), reverse, axis)[1]


def mamba(x: Any) -> Any:
    """States of a diagonal recurrence, of batched time: axis 1 of [features, time, states]."""
    steps = jnp.exp(-jax.nn.softplus(x.T))[:, :, None] * jnp.linspace(0.2, 1.0, 3)
    return lax.associative_scan(gates, (steps, jnp.sin(x.T)[:, :, None] * steps), axis=1)[1].sum((0, 2))


def matrices(x: Any) -> Any:
    """Products that do not commute, by an operator that takes three dimensions."""
    m = jnp.eye(2) + 0.3 * jnp.sin(x[:, :4].reshape(-1, 2, 2))
    return lax.associative_scan(lambda a, b: jnp.einsum("tij,tjk->tik", b, a), m)


def kalman(x: Any) -> Any:
    """The filtering elements of Särkkä and García-Fernández, of a state of one number."""

    def both(one: Any, two: Any) -> Any:
        (a, b, c, j, e), (a2, b2, c2, j2, e2) = one, two
        gain = 1 / (1 + c * j2)
        return (
            a2 * gain * a,
            a2 * gain * (b + c * e2) + b2,
            a2 * gain * c * a2 + c2,
            a * gain * (e2 - j2 * b) + e,
            (a * gain * j2 * a + j),
        )

    def ordered(one: Any, two: Any) -> Any:
        a, b, c, e, j = both((one["a"], one["b"], one["c"], one["j"], one["e"]), tuple(two[k] for k in "abcje"))
        return {"a": a, "b": b, "c": c, "j": j, "e": e}

    u, v, w, z = jnp.sin(x.T)
    found = lax.associative_scan(ordered, {"a": 0.9 * u, "b": v, "c": 0.1 + w**2, "j": 0.2 + z**2, "e": v * z})
    return found["b"], found["c"]


def reversed_matrices(x: Any) -> Any:
    m = jnp.eye(2) + 0.3 * jnp.sin(x[:, :4].reshape(-1, 2, 2))
    return lax.associative_scan(lambda a, b: {"m": b["m"] @ a["m"]}, {"m": m}, reverse=True)["m"]


def in_layers(x: Any) -> Any:
    """In the body of a scan with remat, under vmap and jit."""
    one = jax.jit(jax.vmap(min_gru, 1, 1))
    return lax.scan(lambda x, w: (jax.checkpoint(lambda x: one(x[:, :, None])[:, :, 0] * w)(x), x[0]), x, jnp.ones(3))


SCANS: dict[str, Callable[[Any], Any]] = {
    "minGRU": min_gru,
    "minGRU, reverse": lambda x: min_gru(x, True),
    "minGRU, last axis": lambda x: min_gru(x.T, axis=-1).T,
    "minGRU, reverse, gradient": jax.grad(lambda x: jnp.sum(min_gru(x, True) ** 2)),
    "minGRU, tangent": lambda x: jax.jvp(min_gru, (x,), (jnp.cos(x),)),
    "mamba, gradient": jax.grad(lambda x: jnp.sum(mamba(x) ** 2)),
    "matrices": matrices,
    "matrices, reverse": reversed_matrices,
    "Kalman": kalman,
    "layers": in_layers,
    "sums": lambda x: lax.associative_scan(jnp.add, jnp.round(4 * x).astype(int)),
}


def operand(n: int, features: int = 4) -> Any:
    return jax.random.normal(jax.random.key(1), (n, features))


def check(f: Callable[[Any], Any], x: Any, mesh: Any, where: Any) -> shardc.Plan:
    """The plan of a call, whose results and transfers are checked."""
    g = shardc.function(f, mesh=mesh, in_placements=(where,))
    for got, want in zip(jax.tree.leaves(g(x)), jax.tree.leaves(jax.jit(f)(x)), strict=True):
        np.testing.assert_allclose(np.asarray(got), want, 1e-4, 1e-5)
    assert g.compile(x).audit().ok
    return g.plan(x)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "n"), [(name, (13, 16)[i % 2]) for i, name in enumerate(SCANS)])
def test_values(name: str, n: int) -> None:
    plan = check(SCANS[name], operand(n), MESH, {"a": S(0)})
    assert {chunks for _, chunks in plan.program.scans} == {4}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("n", "devices"), [(9, 8), (21, 8)])
def test_values_on_other_meshes(n: int, devices: int) -> None:
    check(lambda x: (min_gru(x), min_gru(x, True)), operand(n), shardc.make_mesh(a=devices), {"a": S(0)})


@pytest.mark.sampled(0)
def test_a_device_sends_one_summary() -> None:
    mesh = shardc.make_mesh(topology="v5p:2x2x2", a=8)
    x = jax.ShapeDtypeStruct((65_536, 512), jnp.float32)
    for f, most in ((min_gru, 0.06), (jax.grad(lambda x: jnp.sum(min_gru(x) ** 2)), 0.1)):
        plan = shardc.function(f, mesh=mesh, in_placements=({"a": S(0)},), out_placements={"a": S(0)}).plan(x)
        assert plan.bytes_per_device <= most * 2**20
        assert len(plan.collectives) <= 4


@pytest.mark.parametrize("where", [{"a": S(1)}, {"a": B}, {"a": S(1), "b": S(2)}])
def test_a_scan_over_whole_time_stays(where: Any) -> None:
    f = shardc.function(lambda x: min_gru(x, axis=0), mesh=MESH, in_placements=(where,))
    assert f.plan(jax.ShapeDtypeStruct((64, 8, 4), jnp.float32)).program.scans == ()


def test_only_the_split_one_of_two_scans_is_in_chunks() -> None:
    f = shardc.function(lambda x: min_gru(min_gru(x, axis=1)), mesh=MESH, in_placements=({"a": S(1)},))
    assert f.plan(jax.ShapeDtypeStruct((8, 8), jnp.float32)).program.scans == (("f32[8,8] f32[8,8] along 1", 4),)


@pytest.mark.parametrize(("n", "reverse"), [pytest.param(13, True, marks=pytest.mark.sampled(0)), (16, False)])
def test_only_neighbours_are_combined(n: int, reverse: bool) -> None:
    """The combination of others, as of the first chunk with what is before it, is not finite, nor is its gradient."""

    def joined(a: Any, b: Any) -> Any:
        (begin, _, length), (_, end, more) = a, b
        return begin, end, length + more + jnp.sqrt(b[0] - a[1])

    def f(x: Any) -> Any:
        x = jnp.flip(x) if reverse else x
        return jnp.sum(lax.associative_scan(joined, (x, x + 0.5, 0.0 * x), reverse)[2])

    with jax.debug_nans(True):
        check(jax.value_and_grad(f), jnp.arange(1.0, n + 1), MESH, {"a": S(0)})


def test_the_pin_may_be_inside() -> None:
    def f(x: Any, w: Any) -> Any:
        return min_gru(shardc.constrain(x, {"a": S(0)}) @ w)

    plan = shardc.function(f, mesh=MESH).plan(operand(16), operand(4))
    assert plan.program.scans == (("f32[16,4] f32[16,4] along 0", 4),)
    assert "Associative scans over a split dimension: f32[16,4] f32[16,4] along 0, in 4 chunks." in plan.explain()


def test_an_argument_may_arrive_split() -> None:
    x = jax.device_put(operand(16), jax.NamedSharding(MESH, jax.P("a")))
    assert shardc.function(min_gru, mesh=MESH).plan(x).program.scans
    assert not shardc.function(min_gru, mesh=MESH).plan(operand(16)).program.scans


def test_in_a_pipeline_under_accumulate() -> None:
    """[batch, time, features], of which time is split."""

    def loss(w: Any, x: Any) -> Any:
        x = shardc.stage_boundary(jnp.tanh(x @ w))
        return jnp.mean(min_gru(x, axis=1) ** 2)

    step, w, x = shardc.accumulate(jax.value_and_grad(loss), microbatches=2), operand(4), operand(32).reshape(2, 16, 4)
    f = shardc.function(
        step, mesh=shardc.make_mesh(pipe=2, a=4), in_placements=({}, {"a": S(1)}), pipeline=shardc.Pipeline(axis="pipe")
    )
    for got, want in zip(jax.tree.leaves(f(w, x)), jax.tree.leaves(jax.jit(step)(w, x)), strict=True):
        np.testing.assert_allclose(np.asarray(got), want, 1e-4, 1e-5)
    assert [chunks for _, chunks in f.look(w, x)[0].scans] == [4]


def test_what_jit_keeps_is_not_mixed() -> None:
    """A jitted function that was traced before is traced in chunks here, and not there."""
    inner, x = jax.jit(lambda x: 1.0 * min_gru(x)), operand(16)
    before = str(jax.make_jaxpr(inner)(x))
    assert check(inner, x, MESH, {"a": S(0)}).program.scans
    assert str(jax.make_jaxpr(inner)(x)) == before


def test_other_threads_and_later_calls_have_the_original() -> None:
    seen: list[str] = []
    plain = str(jax.make_jaxpr(min_gru)(operand(16)))

    def f(x: Any) -> Any:
        other = threading.Thread(target=lambda: seen.append(str(jax.make_jaxpr(lambda x: min_gru(x))(operand(16)))))
        other.start()
        other.join()
        return min_gru(x)

    assert shardc.function(f, mesh=MESH, in_placements=({"a": S(0)},)).plan(operand(16)).program.scans
    assert seen == [plain] * len(seen)
    assert lax.associative_scan is AS_JAX_HAS_IT

    def fails(x: Any) -> Any:
        scan: Any = lax.associative_scan
        return scan(None, x)

    with pytest.raises(TypeError, match="fn argument should be callable"):
        shardc.function(fails, mesh=MESH).plan(operand(16))
    assert lax.associative_scan is AS_JAX_HAS_IT


def test_a_saved_plan_of_a_scan_in_chunks(tmp_path: Any) -> None:
    x = operand(16)
    f = shardc.function(min_gru, mesh=MESH, in_placements=({"a": S(0)},))
    f.plan(x).save(tmp_path / "plan.json")
    saved = shardc.load_plan(tmp_path / "plan.json")
    again = shardc.function(min_gru, mesh=MESH, plan=saved)
    assert again.plan(x).collectives == f.plan(x).collectives
    np.testing.assert_array_equal(np.asarray(again(x)), np.asarray(f(x)))
