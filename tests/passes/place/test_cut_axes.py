"""Axes that are cut in sub-axes: nothing moves where a reshape makes a dimension shorter than an axis."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from shardc import S
from shardc.errors import ForbiddenMoveError
from shardc.passes.place.cut_axes import _costs

RNG = np.random.default_rng(0)
TURN = np.array([[0.6, -0.8], [0.8, 0.6]], "float32")


def groups(x):
    """Four groups of rows, each less its mean."""
    y = x.reshape(4, -1, x.shape[1])
    return (y - jnp.tanh(y) * 0.5).reshape(x.shape)


def gate(x):
    """A gate on the second qubit of a flat state."""
    return jnp.einsum("ij,ajb->aib", TURN, x.reshape(2, 2, -1)).reshape(x.shape)


def repeated_heads(x):
    """Four query heads for each of two key heads, of x[rows, heads, features]."""
    q = x.reshape(x.shape[0], 2, 4, x.shape[2])
    return (q * jnp.tanh(q.mean(2, keepdims=True))).reshape(x.shape)


def halves(x):
    """The two halves of the rows, added."""
    return x.reshape(2, -1, x.shape[1]).sum(0)


def norms(x):
    """The norm of each of four groups of rows. To sum all rows of a group, each device could read all rows."""
    return jnp.linalg.norm(x.reshape(4, -1, x.shape[1]), axis=(1, 2))


def sixths(x):
    """Six groups of rows, each less its mean."""
    y = x.reshape(6, -1, x.shape[1])
    return jnp.sin(y - y.mean(1, keepdims=True)).reshape(x.shape)


ROWS = {"a": S(0)}
BOTH = {"a": S(0), "b": S(0)}
PROGRAMS = [
    (groups, (64, 16), {"a": 8}, ROWS, ROWS, 0),
    (groups, (64, 16), {"a": 2, "b": 4}, BOTH, BOTH, 0),
    (gate, (1024,), {"a": 8}, ROWS, ROWS, 512),  # the local half, of 128 numbers, sent once
    (gate, (1024,), {"a": 4, "b": 2}, BOTH, BOTH, 512),
    (repeated_heads, (4, 8, 16), {"a": 8}, {"a": S(1)}, {"a": S(1)}, 384),
    (repeated_heads, (4, 8, 16), {"a": 2, "b": 4}, {"a": S(1), "b": S(1)}, {"a": S(1), "b": S(1)}, 384),
    (norms, (4096, 32), {"a": 8}, ROWS, {}, 28),
    (norms, (4096, 32), {"a": 2, "b": 4}, BOTH, {}, 28),
    (sixths, (6144, 64), {"a": 8}, ROWS, ROWS, 294912),  # three quarters of a device's rows, there and back
    (halves, (64, 16), {"a": 8}, ROWS, {}, None),
    (jnp.sin, (1024, 1024), {"a": 4, "b": 2}, {"b": S(0), "a": S(1)}, {"a": S(0), "b": S(1)}, 3 * 2**18),
]  # fmt: skip


def made(fn, axes, pin, out, **options):
    return shardc.function(fn, mesh=shardc.make_mesh(**axes), in_placements=(pin,), out_placements=out, **options)


@pytest.mark.parametrize(("fn", "shape", "axes", "pin", "out", "most"), PROGRAMS)
def test_values_and_bytes_are_those_of_hand(fn, shape, axes, pin, out, most):
    x = RNG.normal(size=shape).astype("float32")
    f = made(fn, axes, pin, out)
    compiled = f.compile(x)
    assert most is None or compiled.plan.bytes_per_device <= most
    assert "planned = found" in str(compiled.audit())
    np.testing.assert_allclose(f(x), jax.jit(fn)(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("fn", "shape", "axes", "pin", "out", "most"), [PROGRAMS[k] for k in (0, 3, 6, 8)])
def test_gradients_are_those_of_one_device(fn, shape, axes, pin, out, most):
    x = RNG.normal(size=shape).astype("float32")
    gradient = jax.grad(lambda x: (fn(x) ** 3).sum())
    f = made(gradient, axes, pin, pin)
    assert f.plan(x).mesh.cuts
    np.testing.assert_allclose(f(x), jax.jit(gradient)(x), rtol=1e-4, atol=1e-5)


def test_borders_are_those_of_the_users_mesh():
    f = made(groups, {"data": 8}, {"data": S(0)}, shardc.AUTO)
    x = RNG.normal(size=(64, 16)).astype("float32")
    plan, y = f.plan(x), f(x)
    assert plan.mesh.cuts == (("data", ("data[0]", "data[1]")),)
    assert plan.in_placements[0] == plan.out_placements == shardc.Placement({"data": S(0)})
    assert y.sharding.mesh.shape == {"data": 8}
    assert f.plan(y).in_placements[0] == plan.in_placements[0]
    np.testing.assert_allclose(f(f(x)), jax.jit(lambda x: groups(groups(x)))(x), rtol=1e-5)


def test_an_axis_that_splits_an_uneven_dimension_stays_whole():
    """Nine rows in blocks of two: not those of two halves of five."""
    x, y = RNG.normal(size=(64, 16)).astype("float32"), RNG.normal(size=(9, 3)).astype("float32")

    def fn(x, y):
        return groups(x), y * 2

    f = shardc.function(
        fn, mesh=shardc.make_mesh(data=8), in_placements=({"data": S(0)}, {"data": S(0)}),
        out_placements=({"data": S(0)}, {"data": S(0)}),
    )  # fmt: skip
    assert not f.plan(x, y).mesh.cuts
    for got, want in zip(f(x, y), fn(x, y), strict=True):
        np.testing.assert_allclose(shardc.fetch(got), want, rtol=1e-5)
    free = shardc.function(fn, mesh=shardc.make_mesh(data=8), in_placements=({"data": S(0)}, {}))
    assert free.plan(x, y).mesh.cuts
    np.testing.assert_allclose(free(x, y)[1], y * 2)


def test_pins_inside_keep_their_meaning():
    x = RNG.normal(size=(1024,)).astype("float32")

    def fn(x):
        return shardc.constrain(gate(shardc.constrain(gate(x), {"data": S(0)})), {})

    f = made(fn, {"data": 8}, {"data": S(0)}, {})
    plan = f.plan(x)
    assert plan.mesh.cuts and ("data",) in {c.axes for c in plan.collectives}
    assert f.compile(x).audit().ok
    np.testing.assert_allclose(f(x), jax.jit(lambda x: gate(gate(x)))(x), rtol=1e-5, atol=1e-6)


def test_what_is_forbidden_on_an_axis_is_so_on_its_parts():
    x = RNG.normal(size=(1024,)).astype("float32")
    with pytest.raises(ForbiddenMoveError, match=r"over data\[1\]"):
        made(gate, {"data": 8}, {"data": S(0)}, {"data": S(0)}, forbid="data")(x)
    f = made(groups, {"data": 8}, {"data": S(0)}, {"data": S(0)}, forbid="data")
    x = RNG.normal(size=(64, 16)).astype("float32")
    np.testing.assert_allclose(f(x), groups(x), rtol=1e-5)


def test_a_saved_plan_keeps_its_sub_axes(tmp_path):
    f = made(groups, {"data": 8}, {"data": S(0)}, {"data": S(0)})
    x = RNG.normal(size=(64, 16)).astype("float32")
    f.plan(x).save(tmp_path / "plan.json")
    again = made(groups, {"data": 8}, {"data": S(0)}, {"data": S(0)}, plan=str(tmp_path / "plan.json"))
    assert again.plan(x).mesh.cuts == f.plan(x).mesh.cuts
    assert not again.plan(x).bytes_per_device
    np.testing.assert_allclose(again(x), groups(x), rtol=1e-5)
    saved = shardc.load_plan(tmp_path / "plan.json")
    assert saved.in_placements == {"x": shardc.Placement({"data": S(0)})}


def test_a_user_reads_the_names_of_the_axes():
    f = made(gate, {"data": 8}, {"data": S(0)}, {"data": S(0)})
    plan = f.plan(np.zeros(1024, "float32"))
    text = plan.explain()
    assert "<lambda>" not in text and "gate on data=8: 8 cpu devices" in text
    assert "Axes in parts (sub-axes), the outermost first: data is data[0]=2 x data[1]=2 x data[2]=2" in text
    assert text.count("{data: S(0)}") == 2  # the argument and the result
    assert "data[" not in plan.explain(why="x") and plan.explain(pins=True).count("{data: S(0)}") == 4


def test_an_axis_that_is_longer_than_every_dimension_divides_two_of_them():
    """Regression: four of eight devices sorted, and nothing asked for more, as nothing is moved."""
    rows = jax.ShapeDtypeStruct((4, 4, 2**16), "float32")
    in_parts, with_two = (
        made(lambda x: jnp.sort(x).mean(-1), axes, {}, {}).plan(rows) for axes in ({"a": 8}, {"a": 4, "b": 2})
    )
    assert in_parts.mesh.cuts and in_parts.seconds <= 1.01 * with_two.seconds


def test_of_two_branches_the_dearer_counts():
    """Regression: what asks for sub-axes was the sum of both, and could be more than the time of a call."""
    moved = lambda x: jnp.sort(x, 0) * jnp.sort(x, 1)  # noqa: E731
    fn = made(lambda x: jax.lax.cond(x[0, 0] > 0, moved, lambda x: moved(x + 1), x), {"a": 8}, ROWS, ROWS)
    plan = fn.plan(jax.ShapeDtypeStruct((4096, 4096), "float32"))
    ((_, part),) = plan.parts
    assert 0 < sum(_costs(part.boxed.jaxpr, part.mesh).values()) <= plan.seconds


def test_a_program_that_asks_for_none_is_not_planned_again():
    plan = made(lambda x: x.reshape(8, -1).sum(0), {"a": 8}, ROWS, {}).plan(np.zeros((64, 4), "float32"))
    assert plan.collectives and not plan.trials


@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=["", "deterministic"])
def test_a_plan_on_sub_axes_is_checked_and_differs_from_itself_in_nothing(options):
    def step(x, w):
        y = jnp.tanh(x.reshape(4, -1, x.shape[-1]) @ w)
        return (y - y.mean(1, keepdims=True)).reshape(x.shape[0], -1)

    x, w = (np.random.default_rng(0).normal(size=(n, 256)).astype("float32") for n in (4096, 256))
    rows = {"data": S(0)}
    f = shardc.function(
        step, mesh=shardc.make_mesh(data=8), in_placements={"x": rows, "w": {}}, out_placements=rows, **options
    )
    compiled = f.compile(x, w)
    assert "data[1]" in compiled.plan.explain()
    assert compiled.check(x, w).ok
    assert compiled.plan.in_placements.x == shardc.Placement({"data": S(0)})
