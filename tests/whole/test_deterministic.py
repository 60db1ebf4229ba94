"""`deterministic=True`: results are equal to the bit on every mesh, and the plan counts what the program sends."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardc
from shardc import P, S
from shardc.errors import ArgumentError, MeshError, PipelineError, PlacementError

MESHES: list[dict[str, int]] = [
    {"data": 2, "model": 1}, {"data": 4, "model": 1}, {"data": 8, "model": 1}, {"data": 2, "model": 4},
    {"data": 4, "model": 2}, {"data": 1, "model": 8},
]  # fmt: skip


def loss(params: Any, x: Any, y: Any) -> Any:
    h = x - x.mean(-1, keepdims=True)
    h = h * lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-5) * params["scale"]
    h = jax.nn.gelu(h @ params["up"])
    return ((h @ params["down"] - y) ** 2).mean()


def train(params: Any, x: Any, y: Any) -> Any:
    value, grads = jax.value_and_grad(loss)(params, x, y)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def arguments(dtype: Any) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    params = {
        "up": rng.normal(size=(32, 64)) / 8, "down": rng.normal(size=(64, 32)) / 8, "scale": np.ones(32),
    }  # fmt: skip
    cast = lambda x: jnp.asarray(x, dtype)  # noqa: E731
    return jax.tree.map(cast, params), cast(rng.normal(size=(16, 32))), cast(rng.normal(size=(16, 32)))


def function(sizes: dict[str, int]) -> Any:
    params = {"up": {"model": S(1)}, "down": {"model": S(0)}, "scale": {}}
    pins = {"params": params, "x": {"data": S(0)}, "y": {"data": S(0)}}
    return shardc.function(train, mesh=shardc.make_mesh(**sizes), in_placements=pins, deterministic=True)


def steps(fn: Any, dtype: Any) -> list[bytes]:
    params, x, y = arguments(dtype)
    values: list[Any] = []
    for _ in range(2):
        params, value = fn(params, x, y)
        values.append(value)
    return [np.asarray(v).tobytes() for v in jax.tree.leaves((params, values))]


@cache
def on_one_device(dtype: Any) -> list[bytes]:
    return steps(function({"data": 1, "model": 1}), dtype)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_a_training_loop_is_equal_to_the_bit_on_every_mesh(sizes: dict[str, int], dtype: Any) -> None:
    fn = function(sizes)
    assert steps(fn, dtype) == on_one_device(dtype)
    audit = fn.latest.audit()
    assert audit.ok, str(audit)


def softmax_loss(x: Any) -> Any:
    return (jax.nn.softmax(x[None], -1) ** 2).sum()


OPERATIONS: dict[str, tuple[Any, Any]] = {
    "a product": (lambda x: x @ x.T, S(1)),
    "a product over two dimensions": (lambda x: jnp.einsum("abc,abd->cd", *[x.reshape(8, 4, 24)] * 2), S(0)),
    "a sum": (lambda x: x.sum(0), S(0)),
    "a sum of everything": (lambda x: (x * x).sum(), S(0)),
    "a running sum": (lambda x: jnp.cumsum(x, 0), S(0)),
    "a softmax": (lambda x: jax.nn.softmax(x, 0), S(0)),
    "rows that are added to": (lambda x: jnp.zeros((4, 24)).at[jnp.arange(32) % 3].add(x), S(0)),
    "a softmax's gradient": (lambda x: jax.grad(softmax_loss)(x.reshape(32, 4, 6)), S(0)),
    "a loop": (lambda x: lax.scan(lambda c, row: (c * 0.9 + row, c @ row), x[0], x), S(0)),
    "a convolution": (lambda x: jnp.convolve(x.ravel(), x[0]), S(0)),
    "a product and a sum": (lambda x: x * 1.1 + jnp.tanh(x) * x, S(0)),
    "a transform": (lambda x: jnp.fft.rfft(x, axis=0), S(0)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", list(OPERATIONS))
def test_operations_are_equal_to_the_bit(name: str) -> None:
    fn, split = OPERATIONS[name]
    x = np.random.default_rng(1).normal(size=(32, 24)).astype(np.float32)
    found = [
        shardc.function(fn, mesh=shardc.make_mesh(data=n), in_placements={"x": {"data": split}}, deterministic=True)(x)
        for n in (1, 8)
    ]
    one, eight = [[np.asarray(y).tobytes() for y in jax.tree.leaves(f)] for f in found]
    assert one == eight
    want = jax.tree.leaves(fn(x))
    assert all(np.allclose(y, w, rtol=1e-4, atol=1e-4) for y, w in zip(jax.tree.leaves(found[0]), want, strict=True))


def test_what_is_approximated_is_equal_to_the_bit_in_pieces_of_any_shape() -> None:
    """24 elements, three, and one on a device: in vectors and beside them, XLA computes these in other ways."""
    functions = (jnp.exp, lax.rsqrt, jnp.arctan)
    x = np.random.default_rng(1).uniform(0.01, 0.99, size=(8, 24)).astype(np.float32)

    def fn(x: Any) -> Any:
        return [f(y) for f in functions for y in (x, x[:, :3], x[:, 0])]

    found = [
        shardc.function(fn, mesh=shardc.make_mesh(data=n), in_placements={"x": {"data": S(0)}}, deterministic=True)(x)
        for n in (1, 8)
    ]
    for one, eight, want in zip(*found, fn(x), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(eight).tobytes()
        np.testing.assert_allclose(one, want, rtol=1e-5)


def test_no_value_is_a_partial_sum() -> None:
    plan = function({"data": 4, "model": 2}).plan(*arguments(np.float32))
    assert {c.kind for c in plan.collectives} <= {"all_to_all", "all_gather"}


def total(x: Any) -> Any:
    return (x @ x.T).sum(0)


def summed_in_shard_map(mesh: Any) -> Any:
    def total(x: Any) -> Any:
        return jax.shard_map(lambda x: lax.psum(x, "data"), mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P())(x)

    return total


ERRORS: list[tuple[Any, dict[str, Any], str]] = [
    (MeshError, {"mesh": None}, "mesh of one device"),
    (ArgumentError, {"deterministic": 3}, "power of two"),
    (ArgumentError, {"in_placements": shardc.data_parallel("data")}, "all-reduce"),
    (PipelineError, {"pipeline": shardc.Pipeline(schedule="1f1b")}, "pipeline"),
    (PlacementError, {"in_placements": {"x": {"data": P("sum")}}}, r"x at \{data: P\(sum\)\}"),
    (PlacementError, {"out_placements": {"data": P("sum")}}, r"result at \{data: P\(sum\)\}"),
]


@pytest.mark.parametrize(("kind", "options", "text"), ERRORS, ids=[text for _, _, text in ERRORS])
def test_what_cannot_be_promised_is_an_error(kind: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(kind, match=text):
        shardc.function(total, **{"mesh": shardc.make_mesh(data=4), "deterministic": True} | options).plan(
            np.ones((8, 8), np.float32)
        )


def test_a_shard_map_and_an_outer_jit_are_errors() -> None:
    mesh, x = shardc.make_mesh(data=4), np.ones((8, 8), np.float32)
    with pytest.raises(PlacementError, match="shard_map at"):
        shardc.function(summed_in_shard_map(mesh), mesh=mesh, deterministic=True).plan(x)
    with pytest.raises(ArgumentError, match=r"jax\.jit"):
        jax.jit(shardc.function(total, mesh=mesh, deterministic=True))(x)
