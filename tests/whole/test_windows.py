"""Operations whose pieces read what other devices hold, on a mesh: one device's numbers, and no move unplanned."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardc
from shardc import S

pytestmark = pytest.mark.usefixtures("compiled_fast")

MESH, LINE = shardc.make_mesh(a=4, b=2), shardc.make_mesh(a=8)
WIDE = 64
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "next": lambda x: x[1:],
    "differences": lambda x: x[1:] - x[:-1],
    "roll": lambda x: jnp.roll(x, 3, 0),
    "every_third": lambda x: x[2::3],
    "flip": lambda x: jnp.flip(x, 0),
    "pad": lambda x: jnp.pad(x, ((2, 3), (0, 0)), constant_values=7),
    "spread": lambda x: lax.pad(x, jnp.float32(1), ((1, 0, 2), (0, 0, 0))),
    "join": lambda x: jnp.concatenate([x, 2 * x, x[:3]], 0),
    "parts": lambda x: jnp.split(x, [3, 11]),
    "update": lambda x: lax.dynamic_update_slice(x, -x[:5], (jnp.int32(x.shape[0] - 7), 0)),
}  # fmt: skip


@pytest.mark.sampled(by=lambda name, rows, axes: {name, (rows, axes)})
@pytest.mark.parametrize("axes", [("a",), ("b", "a")])
@pytest.mark.parametrize("rows", [32, 29])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_split_along_the_dimension(name: str, rows: int, axes: tuple[str, ...]) -> None:
    fn = FUNCTIONS[name]
    x = np.arange(rows * WIDE, dtype=np.float32).reshape(rows, WIDE)
    rows_split = dict.fromkeys(axes, S(0))
    want = fn(jnp.asarray(x))
    placed = shardc.function(
        fn, mesh=MESH, in_placements=(rows_split,), out_placements=jax.tree.map(lambda _: rows_split, want)
    )
    jax.tree.map(lambda whole, got: np.testing.assert_array_equal(np.asarray(got), whole), want, placed(x))
    audit = placed.compile(x).audit()
    assert audit.ok, audit
    assert not audit.missing, audit


def test_a_shift_sends_its_border_alone() -> None:
    x = jax.ShapeDtypeStruct((1024, 64), np.float32)
    rows = {"a": S(0)}
    plan = shardc.function(FUNCTIONS["roll"], mesh=MESH, in_placements=(rows,), out_placements=rows).plan(x)
    border = 3 * WIDE * 4
    assert [(c.kind, c.bytes) for c in plan.collectives] == [("permute", border)]  # those that wrap around are in it
    row = next(line for line in plan.explain().splitlines() if line.startswith("  permute "))
    assert re.search(r"f32\[3,64\] +\{a: S\(0\)\} +join_ranges's window", row), row


def test_a_dynamic_slice_of_a_split_dimension_is_summed_up() -> None:
    x, at = np.arange(4000.0).reshape(2000, 2), np.int32(498)
    fn = shardc.function(
        lambda x, at: lax.dynamic_slice_in_dim(x, at, 4), mesh=MESH, in_placements=({"a": S(0)}, {}), out_placements={}
    )
    np.testing.assert_array_equal(fn(x, at), x[498:502])
    assert fn.plan(x, at).bytes_per_device < 4 * 2 * 4 * 2


def convolve(x: Any, kernel: Any, stride: int = 1) -> Any:
    return lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def loss(kernels: Any, x: Any, place: Any = None) -> Any:
    """A small net of images; with `place`, every layer's result lies so."""
    keep = (lambda y: shardc.constrain(y, place)) if place else (lambda y: y)
    x = keep(jax.nn.relu(convolve(x, kernels[0])))
    x = keep(jax.nn.relu(convolve(x, kernels[1], 2)))
    x = keep(lax.reduce_window(x, -np.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME"))
    x = keep(convolve(x, kernels[2]))
    x = keep(lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "SAME"))
    return jnp.sum(keep(jnp.tanh(convolve(x, kernels[3]))) ** 2)


IMAGES: list[dict[str, Any]] = [{"a": S(1)}, {"a": S(1), "b": S(2)}]


@pytest.mark.sampled(1)
@pytest.mark.plans_eagerly
@pytest.mark.parametrize("size", [(32, 32), (29, 23)])
@pytest.mark.parametrize("place", IMAGES, ids=str)
def test_images_split_in_space(place: dict[str, Any], size: tuple[int, int]) -> None:
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        kernels = [rng.normal(size=s) / 4 for s in ((3, 3, 3, 4), (3, 3, 4, 4), (5, 3, 4, 4), (1, 1, 4, 2))]
        x = rng.normal(size=(2, *size, 3))
        want = jax.value_and_grad(loss, (0, 1))(kernels, x)
        step = shardc.function(
            jax.value_and_grad(lambda k, x: loss(k, x, place), (0, 1)), mesh=MESH, in_placements=({}, place),
            out_placements=({}, ({}, place)),
        )  # fmt: skip
        close = {"rtol": 1e-10, "atol": 1e-10}
        jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(b), a, **close), want, step(kernels, x))
        plan, audit = step.plan(kernels, x), step.compile(kernels, x).audit()
    assert audit.ok, audit
    sent = [c for c in plan.collectives if c.kind == "permute"]
    assert {c.axes for c in sent} == {(axis,) for axis in place}
    twice = [(c.axes, c.value, c.source) for c in sent]  # XLA sends once what a layer and its gradient both read
    assert all(twice.count((c.axes, c.value, c.source)) > 1 for c in audit.missing), audit
    assert not plan.gathered


def test_a_convolution_sends_rows_of_its_border_alone() -> None:
    rows, images = {"a": S(1)}, jax.ShapeDtypeStruct((4, 256, 200, 16), np.float32)

    def plan(size: int, stride: int) -> Any:
        kernel = jax.ShapeDtypeStruct((size, size, 16, 16), np.float32)
        fn = lambda x, k: convolve(x, k, stride)  # noqa: E731
        return shardc.function(fn, mesh=LINE, in_placements=(rows, {}), out_placements=rows).plan(images, kernel)

    assert {c.kind for c in plan(5, 1).collectives} == {"permute"}
    assert type(plan(5, 1).bytes_per_device) is int
    assert plan(5, 1).bytes_per_device == 2 * 2 * (4 * 200 * 16) * 4
    assert plan(1, 2).bytes_per_device == 0


def test_the_gradient_of_a_kernel_is_a_sum_over_pieces_of_the_image() -> None:
    images, kernel = (jax.ShapeDtypeStruct(s, np.float32) for s in ((4, 256, 200, 16), (3, 3, 16, 16)))
    fn = jax.grad(lambda k, x: jnp.sum(convolve(x, k) ** 2))
    plan = shardc.function(fn, mesh=LINE, in_placements=({}, {"a": S(1)}), out_placements={}).plan(kernel, images)
    halo = 2 * (4 * 200 * 16) * 4
    assert plan.bytes_per_device <= 2 * halo + 4 * kernel.size * 4
