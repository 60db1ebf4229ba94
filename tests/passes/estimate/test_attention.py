"""Which attention of a program has its scores in memory, and what the plan says of it."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardc
from shardc import S
from shardc.machine.mesh import view
from shardc.passes.estimate.attention import Attention, find_attention
from tests.attention_on_cpu import traced

HEADS = jax.ShapeDtypeStruct((8, 64, 4, 16), jnp.bfloat16)


def by_hand(q: Any, k: Any, v: Any) -> Any:
    s = jnp.einsum("btnh,bsnh->bnts", q, k).astype(jnp.float32) / 4
    s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s).astype(q.dtype), v)


def by_jax(q: Any, k: Any, v: Any, implementation: Any = None) -> Any:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)


def with_layers(attend: Any, q: Any, k: Any, v: Any) -> Any:
    return jax.lax.scan(jax.checkpoint(lambda x, _: (attend(x, k, v), None)), q, None, 3)[0]


def loss_of(attend: Any) -> Any:
    return lambda q, k, v: jax.value_and_grad(lambda *x: attend(*x).astype(jnp.float32).sum(), (0, 1, 2))(q, k, v)


def planned(fn: Any, topology: str) -> Any:
    mesh = shardc.make_mesh(topology=topology, data=4, model=2)
    pins = {"q": {"data": S(0), "model": S(2)}}
    return shardc.function(fn, mesh=mesh, in_placements=pins).plan(HEADS, HEADS, HEADS)


def found_in(plan: Any) -> list[Attention]:
    return find_attention(plan.parts[0][1].boxed, plan.mesh)


@pytest.mark.parametrize("attend", [by_hand, by_jax])
@pytest.mark.parametrize("topology", ["h100:8", "v5e:2x4"])
def test_products_and_softmax_have_scores_in_memory(attend: Any, topology: str) -> None:
    plan = planned(loss_of(attend), topology)
    (found,) = found_in(plan)
    assert found.count == 1 and found.bytes == 8 * 4 * 64 * 64 * 4 // 8 and found.scores.startswith("f32[")
    assert "two products and a softmax" in plan.explain()


def test_what_is_recomputed_in_a_loop_counts_as_often_as_it_runs() -> None:
    once = found_in(planned(partial(with_layers, by_hand), "h100:8"))
    again = found_in(planned(loss_of(partial(with_layers, by_hand)), "h100:8"))
    assert [a.count for a in once] == [3] and sum(a.count for a in again) == 6


def test_a_kernel_has_none() -> None:
    plan = planned(loss_of(partial(by_jax, implementation="cudnn")), "h100:8")
    (found,) = found_in(plan)
    assert (found.scores, found.bytes, found.count) == ("", 0, 1)
    assert "a kernel" in plan.explain() and not plan.gathered
    assert plan.seconds < planned(loss_of(by_jax), "h100:8").seconds


def test_a_softmax_of_a_loss_is_no_attention() -> None:
    def loss(q: Any, k: Any, v: Any) -> Any:
        logits = jnp.einsum("btnh,bsnh->bnts", q, k).astype(jnp.float32)
        return -(jax.nn.log_softmax(logits)[..., 0].mean()) + v.astype(jnp.float32).sum()

    plan = planned(jax.value_and_grad(loss, (0, 1, 2)), "h100:8")
    assert not found_in(plan) and "Attention" not in plan.explain()


def test_scores_that_are_scaled_by_a_number_are_found() -> None:
    def scaled(q: Any, k: Any, v: Any) -> Any:
        return jnp.einsum("bnts,bsnh->btnh", jnp.exp(0.25 * jnp.einsum("btnh,bsnh->bnts", q, k)), v)

    (found,) = found_in(planned(scaled, "h100:8"))
    assert found.count == 1 and found.scores.startswith("bf16[")


def test_nothing_is_said_of_a_cpu() -> None:
    assert "Attention" not in planned(loss_of(by_hand), "cpu:8").explain()


def test_cudnn_on_other_machines_is_an_error_before_anything_runs() -> None:
    if jax.default_backend() == "gpu":
        pytest.skip("cuDNN is here")
    with pytest.raises(RuntimeError, match="cuDNN is not detected") as error:
        planned(loss_of(partial(by_jax, implementation="cudnn")), "v5e:2x4")
    assert any("runs on GPUs alone" in note for note in error.value.__notes__)


def layer(q: Any, k: Any, v: Any, dy: Any) -> Any:
    y, pull = jax.vjp(partial(by_jax, implementation="cudnn"), q, k, v)
    return y, *pull(dy)


def rows(tokens: int, heads: int, width: int = 128, dtype: Any = jnp.bfloat16) -> Any:
    return jax.ShapeDtypeStruct((1, tokens, heads, width), dtype)


@pytest.mark.parametrize(("tokens", "around"), [(131072, True), (32768, False)])
def test_keys_go_around_a_ring_where_the_kernels_hide_it(tokens: int, around: bool) -> None:
    mesh = shardc.make_mesh(topology="h100:8x8", seq=64)
    pins = ({"seq": S(1)},) * 4
    step = shardc.function(layer, mesh=mesh, in_placements=pins, out_placements=pins)
    plan = step.plan(rows(tokens, 32), rows(tokens, 4), rows(tokens, 4), rows(tokens, 32))
    assert ({c.kind for c in plan.collectives} == {"permute"}) == around
    query, sums, keys = (tokens // 64 * n for n in (32 * 128 * 2, 32 * 4, 2 * 4 * 128 * 2))
    if around:  # rows of queries are dealt out or sent back six times; keys go around, in the gradients with sums
        assert plan.bytes_per_device == 6 * query + 2 * sums + (3 * 64 + 2) * keys
        hidden = [o for o in plan.overlaps if o.kind == "ring"]
        assert [o.bytes for o in hidden] == [63 * keys, 2 * 63 * keys]
        assert sum(o.hidden for o in hidden) == pytest.approx(plan.time.overlapped_rings)
        assert plan.time.overlapped_rings > 0.85 * sum(o.seconds for o in hidden)
        assert plan.memory.peak < 16 * query
        # for each piece half of the rows is chosen, one array forward and three backward, and results are
        # added to a state in float32; keys are copied, and backward their gradients
        moved = 63 * ((2 + 1 + 1) + (2 + 1 + 3)) * query + 128 * (2 + 5) * keys // 2
        rate = view(mesh).topology.memory_rate
        assert moved <= plan.time.memory * rate <= 1.05 * moved


@pytest.mark.sampled(0)
def test_a_ring_on_a_mesh_gives_what_one_device_gives(compiled_fast: None) -> None:
    mesh, pins = shardc.make_mesh(a=2, seq=4), ({"a": S(1), "seq": S(1)},) * 4
    gathers = ["all_gather", "all_reduce", "all_to_all", "reduce_scatter"]
    ours = shardc.function(
        layer, mesh=mesh, in_placements=pins, out_placements=pins, forbid=dict.fromkeys(("a", "seq"), gathers)
    )
    args = [jax.random.normal(jax.random.key(i), (1, 32, n, 8), jnp.float16) for i, n in enumerate((4, 2, 2, 4))]
    with traced():
        got, wanted = ours(*args), jax.jit(layer)(*args)
        assert ours.compile(*args).audit().ok
    for a, b in zip(got, wanted, strict=True):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        assert jnp.abs(a - b).max() <= 0.01 * jnp.abs(b).max()


@pytest.mark.sampled
@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize("mask", [{}, {"is_causal": True}, {"is_causal": True, "local_window_size": (5, 0)}])
@pytest.mark.parametrize(("which", "dim"), [("q", 2), ("q", 1), ("k", 1)])
def test_the_kernel_on_a_mesh_gives_what_one_device_gives(
    heads: int, mask: Any, which: str, dim: int, compiled_fast: None
) -> None:
    def loss(q: Any, k: Any, v: Any) -> Any:
        y = jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **mask)
        return (y.astype(jnp.float32) ** 2).sum()

    step = jax.value_and_grad(loss, (0, 1, 2))
    q, k, v = (
        jax.random.normal(jax.random.key(i), (4, 16, n, 8), jnp.float16) for i, n in enumerate((4, heads, heads))
    )
    pins = {which: {"data": S(0), "model": S(dim)}}
    ours = shardc.function(step, mesh=shardc.make_mesh(data=4, model=2), in_placements=pins)
    with traced():
        got, wanted = ours(q, k, v), jax.jit(step)(q, k, v)
        assert ours.compile(q, k, v).audit().ok
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        assert jnp.abs(a - b).max() <= 0.01 * jnp.abs(b).max()
