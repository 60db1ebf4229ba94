"""Transforms of several dimensions: the values of one device in pieces, and an exchange instead of a gather."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex

import shardc
from shardc import S
from shardc.compat import close
from shardc.passes.rewrite.chain_transforms import chain_transforms

pytestmark = pytest.mark.usefixtures("compiled_fast")

RNG = np.random.default_rng(0)
REAL = RNG.normal(size=(5, 6, 7, 8))
MESHES = ({"data": 2}, {"data": 8}, {"data": 4, "model": 2})
TRANSFORMS = {
    "fft": lambda x, axes: jnp.fft.fftn(x, axes=axes),
    "ifft": lambda x, axes: jnp.fft.ifftn(x, axes=axes),
    "rfft": lambda x, axes: jnp.fft.rfftn(x.real, axes=axes),
    "irfft": lambda x, axes: jnp.fft.irfftn(x, axes=axes),
    "norm": lambda x, axes: jnp.fft.ifftn(jnp.fft.fftn(x, axes=axes, norm="ortho"), axes=axes, norm="forward"),
}


KINDS = itertools.product([(2, 3), (1, 2, 3), (0, 2)], TRANSFORMS)
CASES = list(zip(KINDS, itertools.cycle(MESHES), itertools.cycle(["complex64", "complex128"]), strict=False))


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("what", "sizes", "dtype"), CASES, ids=str)
def test_values(what, sizes, dtype):
    """The chain, whether the search would take it or not."""
    axes, kind = what
    with jax.enable_x64(dtype == "complex128"):
        x = (REAL + 1j * RNG.permutation(REAL)).astype(dtype)
        fn = lambda x: TRANSFORMS[kind](x, axes)  # noqa: E731
        mesh, pin = shardc.make_mesh(**sizes), dict(zip(sizes, (S(axes[0]), S(axes[-1])), strict=False))
        whole = shardc.function(fn, mesh=mesh, in_placements=(pin,)).plan(x)
        chain = chain_transforms(whole.request.program, whole.request.context)
        assert all(len(e.params.get("fft_lengths", "1")) == 1 for e in chain.jaxpr.eqns)
        one_device = lambda x: jex.jaxpr_as_fun(close(chain.jaxpr))(x, *chain.captured)  # noqa: E731
        f = shardc.function(one_device, mesh=mesh, in_placements=(pin,))
        assert f.compile(x).audit().ok
        tolerance = 1e-4 if dtype == "complex64" else 1e-10
        for (got,) in (f(x), one_device(x)):
            np.testing.assert_allclose(np.asarray(got), jax.jit(fn)(x), rtol=tolerance, atol=tolerance)


def round_trip(x):
    return jnp.fft.ifftn(jnp.fft.fftn(x) * 2)


def real_round_trip(x):
    return jnp.fft.irfftn(jnp.fft.rfftn(x) * 2, s=x.shape)


def energy(x):
    return jax.grad(lambda x: jnp.sum(jnp.abs(jnp.fft.fftn(x)) ** 2))(x)


def in_a_loop(x):
    return jax.lax.scan(lambda x, _: (round_trip(x), None), x, None, length=1)[0]


def pinned_inside(x):
    return round_trip(shardc.constrain(2 * x, {"data": S(1)}))


VOLUME = jax.ShapeDtypeStruct((256,) * 3, np.complex64)
PART = VOLUME.size * 8 // 8
SPLIT = [
    (round_trip, S(0), 2),
    (round_trip, S(1), 2),
    (round_trip, S(2), 2),
    (in_a_loop, S(0), 2),
    (jnp.fft.fftn, S(1), 1),
]


@pytest.mark.parametrize(("fn", "split", "exchanges"), SPLIT)
def test_a_split_volume_is_exchanged_and_not_gathered(fn, split, exchanges):
    """7 of 8 parts of it were sent to every device, and each held all of it."""
    mesh = shardc.make_mesh(topology="v5p:2x2x2", data=8)
    plan = shardc.function(lambda x: fn(x), mesh=mesh, in_placements=({"data": split},)).plan(VOLUME)
    assert [(c.kind, c.bytes) for c in plan.collectives] == [("all_to_all", PART * 7 // 8)] * exchanges
    assert plan.memory.peak < 9 * PART and "chain_transforms" in dict(plan.program.passed)


@pytest.mark.parametrize("fn", [real_round_trip, energy])
def test_real_transforms_too(fn):
    mesh = shardc.make_mesh(topology="v5p:2x2x2", data=8)
    x = jax.ShapeDtypeStruct(VOLUME.shape, np.float32)
    plan = shardc.function(fn, mesh=mesh, in_placements=({"data": S(0)},)).plan(x)
    assert [c.kind for c in plan.collectives] == ["all_to_all"] * 2


def test_a_pin_inside_orders_the_chain():
    mesh = shardc.make_mesh(topology="v5p:2x2x2", data=8)
    plan = shardc.function(pinned_inside, mesh=mesh).plan(VOLUME)
    assert len(plan.collectives) == 2


def test_pencils():
    """Split along two dimensions, a volume is exchanged within rows and columns of the mesh."""
    mesh = shardc.make_mesh(topology="v5p:2x2x2", data=4, model=2)
    plan = shardc.function(round_trip, mesh=mesh, in_placements=({"data": S(0), "model": S(1)},)).plan(VOLUME)
    assert {c.kind for c in plan.collectives} == {"all_to_all"} and plan.bytes_per_device < 4 * PART


def test_a_chain_is_not_taken_where_nothing_is_split():
    """It transposes, which one transform of two dimensions does not."""
    mesh = shardc.make_mesh(topology="v5p:2x2x2", data=8)
    images = jax.ShapeDtypeStruct((64, 256, 256), np.complex64)
    plan = shardc.function(lambda x: jnp.fft.fft2(x), mesh=mesh, in_placements=({"data": S(0)},)).plan(images)
    assert [(t.name, t.taken) for t in plan.trials] == [("chain_transforms", False)]
    assert "chain_transforms" not in dict(plan.program.passed)


def test_other_programs_stay_as_they_are():
    plan = shardc.function(lambda x: jnp.fft.fft(x), mesh=shardc.make_mesh(data=2)).plan(np.ones((4, 4)))
    assert not plan.trials


def test_a_saved_plan_keeps_the_chain(tmp_path):
    mesh, pins, x = shardc.make_mesh(data=8), ({"data": S(0)},), RNG.normal(size=(65, 64, 66))
    plan = shardc.function(round_trip, mesh=mesh, in_placements=pins).plan(x)
    plan.save(tmp_path / "plan.json")
    again = shardc.function(round_trip, mesh=mesh, in_placements=pins, plan=tmp_path / "plan.json")
    assert again.plan(x).digest == plan.digest and "chain_transforms" in dict(plan.program.passed)
    np.testing.assert_allclose(np.asarray(again(x)), 2 * x, atol=1e-5)
