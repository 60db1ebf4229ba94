"""`shardc.fsdp`: placements that are chosen by the shapes of leaves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from shardc import S

MESH = shardc.make_mesh(data=4, model=2)
SHAPES = {
    "conv": (3, 3, 1, 16), "bias": (10,), "scale": (), "empty": (0, 8), "vocab": (50257, 32), "layers": (6, 96, 96),
    "up": (64, 256), "odd": (7, 5),
}  # fmt: skip
LEAVES = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in SHAPES.items()}


def placed(spec, leaves=None, mesh=MESH) -> dict[str, str]:
    """Where each leaf is put that is not whole."""
    f = shardc.function(lambda p: jnp.float32(0), mesh=mesh, in_placements={"p": spec})
    found = f.plan(leaves or LEAVES).in_placements["p"]
    return {name: str(p) for name, p in found.items() if p}


def test_the_largest_dimension_that_divides():
    every = {"conv": "{data: S(3)}", "vocab": "{data: S(1)}", "layers": "{data: S(2)}", "up": "{data: S(1)}"}
    assert placed(shardc.fsdp("data", min_size=0)) == every
    assert placed(shardc.fsdp("data", min_size=145)) == {k: v for k, v in every.items() if k != "conv"}
    assert placed(shardc.fsdp("data")) == {k: v for k, v in every.items() if k != "conv"}
    assert placed(shardc.fsdp("data", min_size=10**9)) == {}


def test_evenly_or_not():
    found = placed(shardc.fsdp("data", min_size=2, only_if_divides=False))
    assert found["bias"] == "{data: S(0)}" and found["vocab"] == "{data: S(0)}" and found["odd"] == "{data: S(0)}"


def test_over_several_axes():
    found = placed(shardc.fsdp(("data", "model"), min_size=0))
    assert found["conv"] == "{data: S(3), model: S(3)}"
    assert "layers" in found and "odd" not in found


def test_beside_other_axes():
    """What they split counts: 256 columns in two parts are more than 64 rows; 32 columns of 2 are not."""
    columns = shardc.rules({"up": {"model": S(-1)}, "down": {"model": S(-2)}})
    leaves = {k: jax.ShapeDtypeStruct(s, "float32") for k, s in {"up": (64, 256), "down": (64, 48), "b": (8,)}.items()}
    found = placed(shardc.fsdp("data", min_size=0, beside=columns), leaves)
    assert found == {"up": "{model: S(1), data: S(1)}", "down": "{model: S(0), data: S(1)}", "b": "{data: S(0)}"}
    per_pattern = shardc.rules({"up": shardc.fsdp("data", beside={"model": S(0)}), "*": {}})
    assert placed(per_pattern, leaves) == {"up": "{model: S(0), data: S(1)}"}
    narrow = {"w": jax.ShapeDtypeStruct((6, 4), "float32")}  # 4 columns in two parts are not to be had by four devices
    assert placed(shardc.fsdp("data", min_size=0, beside={"model": S(1)}), narrow) == {"w": "{model: S(1)}"}


def test_put_and_a_step_come_back_as_arrays():
    """Ten classes and a kernel of 3 x 3: no leaf comes back in pieces that JAX cannot say."""
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(12, 10)), "b": rng.normal(size=10), "up": rng.normal(size=(12, 12))}
    params = jax.tree.map(lambda x: x.astype("float32"), params)
    x, y = rng.normal(size=(16, 12)).astype("float32"), rng.integers(0, 10, 16)

    def step(p, m, x, y):
        def loss(p):
            logits = jnp.tanh(x @ p["up"]) @ p["w"] + p["b"]
            return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(16), y])

        g = jax.grad(loss)(p)
        m = jax.tree.map(lambda m, g: 0.9 * m + g, m, g)
        return jax.tree.map(lambda p, m: p - 0.1 * m, p, m), m

    zeros = jax.tree.map(np.zeros_like, params)
    spec = shardc.fsdp("data", min_size=100)
    f = shardc.function(
        step, mesh=MESH, in_placements={"p": spec, "m": spec, "x": {"data": S(0)}, "y": {"data": S(0)}},
        donate_argnames=("p", "m"),
    )  # fmt: skip
    exe = f.compile(params, zeros, x, y)
    assert exe.audit().ok
    kinds = {c.kind for c in exe.plan.collectives}
    assert {"all_gather", "reduce_scatter"} & kinds
    got = shardc.put((params, zeros), MESH, spec)
    assert got[0]["w"].sharding.spec == jax.P("data")
    want = params, zeros
    for _ in range(2):
        got, want = f(*got, x, y), jax.jit(step)(*want, x, y)
    assert all(isinstance(a, jax.Array) for a in jax.tree.leaves(got, is_leaf=lambda a: hasattr(a, "placement")))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


def test_it_says_what_is_wrong():
    cases = {
        r"the mesh has no axis 'dta'. Did you mean": shardc.fsdp("dta"),
        r"`beside` is for other axes than 'data'": shardc.fsdp("data", beside={"data": S(0)}),
        r"the pattern 'upp' matches no leaf": shardc.fsdp("data", beside=shardc.rules({"upp": {}})),
    }
    for text, spec in cases.items():
        with pytest.raises(shardc.PlacementError, match=text):
            placed(spec)
    with pytest.raises(shardc.ArgumentError, match="min_size=-1 is negative"):
        shardc.fsdp("data", min_size=-1)
    with pytest.raises(shardc.ArgumentError, match="no axis is named"):
        shardc.fsdp(())
    uneven = shardc.fsdp("data", min_size=3, only_if_divides=False)
    assert str(uneven) == "fsdp('data', min_size=3, only_if_divides=False)"
