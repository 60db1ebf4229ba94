"""Attention whose tokens are split: keys that are repeated, or whole, and the numbers of one device."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from shardc import S
from shardc.ir.walk import all_eqns
from tests.attention_on_cpu import traced

MiB = 2**20
WHOLE = ("all_gather", "all_reduce", "all_to_all")
CAUSAL = {"is_causal": True, "implementation": "cudnn"}


def gradients(loops: int = 0, **options: Any) -> Any:
    def loss(q: Any, k: Any, v: Any) -> Any:
        def attend(q: Any, _: Any = None) -> tuple[Any, None]:
            return jax.nn.dot_product_attention(q, k, v, **CAUSAL, **options), None

        y = jax.lax.scan(attend, q, None, loops)[0] if loops else attend(q)[0]
        return (y.astype(jnp.float32) ** 2).sum()

    return lambda q, k, v: jax.grad(loss, (0, 1, 2))(q, k, v)


def heads(tokens: int, queries: int, keys: int, width: int = 128) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((1, tokens, n, width), jnp.bfloat16) for n in (queries, keys, keys)]


def over_tokens(fn: Any, mesh: Any, **options: Any) -> Any:
    pin = dict.fromkeys(mesh.axis_names, S(1))
    return shardc.function(fn, mesh=mesh, in_placements=(pin,) * 3, out_placements=(pin,) * 3, **options)


def keys_of(plan: Any) -> set[int]:
    """The heads of keys that attention sees."""
    eqns = [e for e in all_eqns(plan.program.jaxpr) if "dot_product_attention" in e.primitive.name]
    return {e.invars[1].aval.shape[2] for e in eqns}


@pytest.mark.parametrize(("keys", "seen", "most"), [(4, 8, 336), (2, 8, 336), (8, 8, 336), (1, 1, 336)], ids=str)
def test_heads_are_exchanged_for_tokens(keys: int, seen: int, most: int) -> None:
    mesh = shardc.make_mesh(topology="h100:8", seq=8)
    plan = over_tokens(gradients(), mesh).plan(*heads(131072, 32, keys))
    assert keys_of(plan) == {seen} and plan.bytes_per_device <= most * MiB


def test_queries_are_split_where_heads_do_not_reach() -> None:
    mesh = shardc.make_mesh(topology="h100:8x8", seq=64)
    plan = over_tokens(gradients(), mesh).plan(*heads(131072, 32, 4))
    assert keys_of(plan) == {4} and plan.bytes_per_device < 873 * MiB and plan.memory.peak < 0.25 * 1024 * MiB
    whole = shardc.function(gradients(), mesh=shardc.make_mesh(topology="h100:8", seq=8)).plan(*heads(131072, 32, 4))
    assert plan.seconds < whole.seconds / 4.5


def test_a_window_sends_the_keys_in_front_of_a_block() -> None:
    mesh = shardc.make_mesh(topology="h100:8", seq=8)
    plan = over_tokens(gradients(local_window_size=(1023, 0)), mesh).plan(*heads(131072, 32, 4))
    assert {c.kind for c in plan.collectives} == {"permute"} and plan.bytes_per_device < 40 * MiB


def test_keys_are_repeated_in_a_loop() -> None:
    mesh = shardc.make_mesh(topology="h100:8", seq=8)
    plan = over_tokens(gradients(loops=2), mesh).plan(*heads(131072, 32, 4))
    assert keys_of(plan) == {8}


def test_nothing_is_repeated_for_few_devices() -> None:
    mesh = shardc.make_mesh(topology="h100:8", data=2, seq=4)
    fn = shardc.function(gradients(), mesh=mesh, in_placements=({"seq": S(1), "data": S(0)},) * 3)
    pairs = [jax.ShapeDtypeStruct((2, *x.shape[1:]), x.dtype) for x in heads(65536, 32, 4)]
    plan = fn.plan(*pairs)
    assert keys_of(plan) == {4}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("tokens", "queries", "keys", "sizes", "options", "forbid"),
    [
        (1024, 8, 2, {"seq": 8}, {}, None),
        (1024, 4, 2, {"a": 2, "b": 4}, {}, None),
        (1024, 2, 1, {"seq": 8}, {}, {"seq": "all_to_all"}),
        (128, 2, 1, {"a": 2, "b": 4}, {"local_window_size": (5, 0)}, {"a": WHOLE, "b": WHOLE}),
        (100, 2, 1, {"seq": 8}, {"local_window_size": (5, 0)}, {"seq": WHOLE}),
    ],
    ids=str,
)
def test_values(tokens: int, queries: int, keys: int, sizes: Any, options: Any, forbid: Any) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=x.shape), jnp.float16) for x in heads(tokens, queries, keys, 8))
    fn = gradients(**options)
    with traced():
        exe = over_tokens(fn, shardc.make_mesh(**sizes), forbid=forbid).compile(q, k, v)
        want = jax.jit(fn)(q, k, v)
    assert exe.audit().ok
    assert (forbid is not None) == ("permute" in {c.kind for c in exe.plan.collectives})
    for x, y in zip(shardc.fetch(exe(q, k, v)), want, strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        np.testing.assert_allclose(x, y, rtol=1e-2, atol=4e-3 * np.abs(y).max())


def test_the_values_of_a_forward_pass() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=x.shape), jnp.float16) for x in heads(2048, 2, 1, 8))
    fn = partial(jax.nn.dot_product_attention, **CAUSAL)
    pin = {"seq": S(1)}
    options: dict[str, Any] = {"in_placements": (pin,) * 3, "out_placements": pin, "forbid": {"seq": "all_to_all"}}
    step = shardc.function(fn, mesh=shardc.make_mesh(seq=8), **options)
    with traced():
        exe, want = step.compile(q, k, v), fn(q, k, v)
    assert exe.audit().ok and "permute" in {c.kind for c in exe.plan.collectives}
    np.testing.assert_allclose(np.asarray(exe(q, k, v), np.float32), np.asarray(want, np.float32), atol=5e-3)


def test_a_saved_plan_has_the_same_keys(tmp_path: Path) -> None:
    step = over_tokens(gradients(), shardc.make_mesh(topology="h100:8", seq=8))
    plan = step.plan(*heads(131072, 32, 4))
    plan.save(tmp_path / "plan.json")
    again = over_tokens(gradients(), shardc.make_mesh(topology="h100:8", seq=8), plan=tmp_path / "plan.json")
    assert again.plan(*heads(131072, 32, 4)).digest == plan.digest


def test_sums_in_one_order_keep_tokens_whole() -> None:
    step = over_tokens(gradients(), shardc.make_mesh(topology="h100:8", seq=8), deterministic=True)
    assert "permute" not in {c.kind for c in step.plan(*heads(4096, 8, 2)).collectives}
