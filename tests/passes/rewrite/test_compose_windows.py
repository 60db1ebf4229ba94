"""Composed windows: the numbers of one device, and arrays of another length never exist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import check_jaxpr, jaxpr_as_fun

import shardc
from benchmarks.stencils import LARGE, Case, cases, heat, planned
from shardc import S, compat
from shardc.ir.walk import all_eqns
from shardc.passes.rewrite.windows.compose_windows import composed
from shardc.passes.trace.canonicalize import canonicalize
from tests.passes.programs import before_after

pytestmark = pytest.mark.usefixtures("compiled_fast")

MESHES = [shardc.make_mesh(data=8), shardc.make_mesh(data=4, model=2)]
CHIPS = shardc.make_mesh(topology="v5p:8x1x1", data=8), shardc.make_mesh(topology="v5p:4x4x4", data=64)
ROWS = {"data": S(0)}
PLANE = 4 * 1024 * 1024


def both(fn: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """The canonical program of `fn`, and the one with composed windows, after their results were compared."""
    before, captured = canonicalize(jax.make_jaxpr(fn)(*args))
    after = composed(before)
    check_jaxpr(after)
    programs = [jaxpr_as_fun(compat.close(j)) for j in (before, after)]
    want, got = jax.jit(lambda *xs: [p(*xs) for p in programs])(*jax.tree.leaves(args), *captured)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-5)
    return before, after


def sizes(jaxpr: Any) -> set[int]:
    """The sizes of dimension 0 of all values of rank 2."""
    return {v.aval.shape[0] for e in all_eqns(jaxpr) for v in e.outvars if len(v.aval.shape) == 2}


def numbers(*shape: int, seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def second(q: Any) -> Any:
    return q[2:] + q[:-2] - 2 * q[1:-1]


def padded(mode: str) -> Callable[[Any], Any]:
    return lambda u: second(jnp.pad(u, ((1, 1), (0, 0)), mode=mode))


def walls(u: Any) -> Any:
    return jnp.concatenate([jnp.ones((1, 3)), u, 2 * jnp.ones((1, 3))])


def repeated_ends(v: Any) -> Any:
    return jnp.concatenate([v[:1], v, v[-1:]])


def far(q: Any) -> Any:
    return q[4:] | q[:-4] if q.dtype == bool else q[4:] + q[:-4]


def near(q: Any) -> Any:
    return q[2:] + q[:-2]


def convolved(mode: str, by: int = 1) -> Callable[[Any], Any]:
    """A convolution of padded rows, which has the size of `u` again."""

    def step(u: Any) -> Any:
        q = jnp.pad(u, ((by, by), *[(1, 1)] * (u.ndim - 1)), mode=mode)[None, None]
        ones, valid = (1,) * u.ndim, [(0, 0)] * u.ndim
        return lax.conv_general_dilated(q, jnp.ones((1, 1, *[3] * u.ndim)), ones, valid, None, (by, *ones[1:]))[0, 0]

    return step


def laplacian(mode: str) -> Callable[[Any], Any]:
    """The sum of all neighbours in an array that is padded along all dimensions at once."""

    def step(u: Any) -> Any:
        q, middle = jnp.pad(u, 1, mode=mode), (slice(1, -1),) * u.ndim
        ends = (slice(2, None), slice(None, -2))
        return sum(q[(*middle[:d], side, *middle[d + 1 :])] for d in range(u.ndim) for side in ends) - 6 * u

    return step


def unlike_neighbours(mode: str) -> Callable[[Any], Any]:
    """The sum of the nine neighbours in a plane, each with a weight of its own."""

    def step(u: Any) -> Any:
        if mode == "roll":
            shifts = [jnp.roll(u, (i - 1, j - 1), (0, 1)) for i in range(3) for j in range(3)]
        else:
            q = jnp.pad(u, ((1, 1), (1, 1), *[(0, 0)] * (u.ndim - 2)), mode=mode)
            shifts = [q[i : len(u) + i, j : u.shape[1] + j] for i in range(3) for j in range(3)]
        return sum((0.1 * k + 0.1) * v if k % 2 else v / (k + 1.0) for k, v in enumerate(shifts))

    return step


STEPS: dict[str, Callable[[Any], Any]] = {
    "set": lambda u: u.at[1:-1].set(0.5 * (u[2:] + u[:-2])),
    "set in two dimensions": lambda u: u.at[1:-1, 1:].set(jnp.exp(u[2:, 1:] + u[:-2, :-1])),
    "set another array": lambda u: u.at[2:].set(jnp.cumsum(u[2:], 0)),
    "set a constant": lambda u: u.at[1:-1].set(0.5),
    "add a constant in two dimensions": lambda u: u.at[1:, :-1].add(2.0) ** 2,
    "add": lambda u: u.at[1:-1].add(u[2:] * u[:-2]),
    "add in a loop": lambda u: lax.fori_loop(0, 3, lambda _, u: u.at[1:-1].add(0.1 * second(u)), u),
    "multiply": lambda u: u.at[1:-1].multiply(u[2:]),
    "max": lambda u: u.at[:-1].max(u[1:]),
    "dynamic_update_slice": lambda u: lax.dynamic_update_slice(u, u[2:] + u[:-2], (1, 0)),
    "clamped": lambda u: lax.dynamic_update_slice(u, u[2:] + u[:-2], (7, 0)),
    "dynamic_slice": lambda u: jnp.pad(lax.dynamic_slice(u, (9, 0), (len(u) - 1, 3)), ((0, 1), (0, 0))),
    "zeros around": lambda u: jnp.pad(jnp.cos(u[2:] + u[:-2]), ((1, 1), (0, 0))),
    "zeros around a write": lambda u: second(jnp.zeros((len(u) + 2, 3)).at[1:-1].set(u)),
    "padding": padded("constant"),
    "padding by ones": lambda u: second(jnp.pad(u, ((1, 1), (0, 0)), constant_values=1.0)),
    "edges": padded("edge"),
    "around": padded("wrap"),
    "reflected": padded("reflect"),
    "edges along all dimensions": laplacian("edge"),
    "around along all dimensions": lambda u: jnp.tanh(laplacian("wrap")(jnp.sin(u))),
    "a function of edges": lambda u: second(jnp.sin(jnp.pad(u, ((1, 1), (0, 0)), mode="edge")) ** 2),
    "convolution of edges": convolved("edge"),
    "convolution of wide edges": convolved("edge", 2),
    "convolution around": convolved("wrap"),
    "convolution of what is reflected": convolved("symmetric", 2),
    "walls": lambda u: second(walls(u)),
    "walls, then a function": lambda u: second(jnp.exp(walls(u))),
    "walls of it": lambda u: jnp.concatenate([u[:1], u[1:-1] + u[2:] * u[:-2], u[-1:]]),
    "Neumann walls": lambda u: repeated_ends(u[2:] - u[:-2]),
    "thick walls": lambda u: far(jnp.concatenate([u[:2], jnp.tanh(u), u[3:5]])),
    "difference": lambda u: jnp.diff(u, axis=0, append=0),
    "difference of differences": lambda u: jnp.diff(jnp.diff(u, axis=0, append=1), axis=0, prepend=2),
    "roll": lambda u: jnp.roll(u, 3, 0),
    "roll in two dimensions": lambda u: jnp.roll(u, (1, -1), (0, 1)),
    "rolls": lambda u: jnp.roll(jnp.roll(u, 1, 0), 2, 0) * u,
    "unlike neighbours": unlike_neighbours("constant"),
    "unlike neighbours with edges": unlike_neighbours("edge"),
    "unlike neighbours around": unlike_neighbours("roll"),
    "transposed": lambda u: jnp.pad((u[2:] + u[:-2]).T[None], ((0, 0), (0, 0), (1, 1)))[0].T,
    "strided": lambda u: jnp.pad(u, ((1, 1), (0, 0)))[2:, ::2],
    "reversed": lambda u: jnp.pad(u, ((1, 1), (0, 0)))[:1:-1] + u,
    "integers": lambda u: second(jnp.pad(jnp.round(u).astype(jnp.int8), ((1, 1), (0, 0)))),
    "booleans": lambda u: far(jnp.pad(u > 0, ((2, 2), (0, 0)))),
    "logarithm": lambda u: u.at[1:-1].set(jnp.log(u[2:] ** 2 + u[:-2] ** 2)),
}  # fmt: skip


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", STEPS)
def test_values(name: str) -> None:
    u, step = numbers(13, 3), STEPS[name]
    before, after = both(step, u)
    assert after is not before
    if name != "reversed":
        assert not {14, 15, 17} & sizes(after)
    if jnp.issubdtype(jax.eval_shape(step, u).dtype, jnp.floating):
        both(jax.grad(lambda u: (step(u) ** 2).sum()), u)


KEPT: dict[str, Callable[[Any], Any]] = {
    "slices alone": lambda u: jnp.diff(u[1:], axis=0),
    "a constant row written": lambda u: u.at[0].set(0.0),
    "a row written": lambda u: u.at[0].set(jnp.sin(u[0])),
    "padding alone": lambda u: jnp.pad(u, 1),
    "halves turned": lambda u: jnp.concatenate([-u[8:], u[:8]]),
    "a place that is not known": lambda u: lax.dynamic_update_slice(u, u[2:], (u[0, 0].astype(int), 0)),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_has_nothing_to_compose_stays_the_same_object(name: str) -> None:
    before, after = both(KEPT[name], numbers(16, 3))
    assert after is before


def test_the_text(golden: Callable[[str, str], None]) -> None:
    def step(u: Any) -> Any:
        q = lax.pad(u, np.float32(0), [(1, 1, 0), (0, 0, 0)])
        ends = [lax.slice_in_dim(u, 7, 8), lax.slice_in_dim(u, 0, 7)]
        return lax.slice_in_dim(q, 2, 10), lax.slice_in_dim(q, 0, 8), lax.concatenate(ends, 0)

    before = canonicalize(jax.make_jaxpr(step)(numbers(8, 3)))[0]
    golden("compose_windows", before_after(before, composed(before)))


def test_bodies() -> None:
    def heat(u: Any) -> Any:
        step = jax.checkpoint(lambda u: u + 0.1 * padded("wrap")(u))
        u = lax.scan(lambda u, _: (step(u), None), u, None, length=3)[0]
        u = lax.while_loop(lambda c: c[1] < 2, lambda c: (STEPS["set"](c[0]), c[1] + 1), (u, 0))[0]
        return lax.cond(u[0, 0] > 0, STEPS["walls"], STEPS["roll"], u)

    _, after = both(heat, numbers(13, 3))
    assert not {14, 15} & sizes(after)


def test_nothing_leaks_from_what_is_masked() -> None:
    u = jnp.zeros((13, 3)).at[4:9].set(1.0)
    for fn in (lambda u: u.at[1:-1].set(1 / u[2:]), lambda u: jnp.pad(jnp.log(u[3:7]), ((5, 4), (0, 0)))):
        want = fn(u)
        got = jaxpr_as_fun(compat.close(composed(canonicalize(jax.make_jaxpr(fn)(u))[0])))(u)[0]
        np.testing.assert_array_equal(got, want)


def test_zeros_around_copies_stay_zeros_whatever_these_are_scaled_by() -> None:
    """Weights that are infinite, or not numbers, when the program runs; of two, both are copies of the gradient."""

    def sums(u: Any, a: Any, b: Any) -> Any:
        q = jnp.pad(u, ((1, 1), (0, 0)))
        return q[:-2] * a + q[2:] / b

    u, before = numbers(13, 3), None
    for a, b in ((np.inf, 2.0), (2.0, 0.0), (np.nan, np.nan)):
        grad = lambda u, a, b: jax.vjp(lambda u: sums(u, a, b), u)[1](jnp.ones_like(u))  # noqa: E731
        args = (u, jnp.float32(a), jnp.float32(b))
        before, _ = canonicalize(jax.make_jaxpr(grad)(*args))
        after = composed(before)
        want, got = (jaxpr_as_fun(compat.close(j))(*args)[0] for j in (before, after))
        assert after is not before and np.isfinite(want).any() == (a == 2.0 or b == 2.0)
        np.testing.assert_array_equal(got, want)


def random_step(rng: np.random.Generator, u: Any) -> Any:
    """A random composition of slices, padding, joins, rolls, writes and elementwise work, of about the size of `u`."""
    n, values = len(u), [u]
    for _ in range(8):
        x = values[rng.integers(max(0, len(values) - 3), len(values))]
        a, b = sorted(rng.integers(0, 4, 2).tolist())
        match int(rng.integers(9)):
            case 0:
                x = x[a : len(x) - b]
            case 1:
                x = jnp.pad(x, ((a, b), (0, 0)), mode=["constant", "edge", "wrap"][rng.integers(3)])
            case 2:
                x = jnp.concatenate([x[: a + 1], x[a:], 2 * u[:b]])
            case 3:
                x = jnp.roll(x, a - 2, 0)
            case 4:
                y = values[rng.integers(len(values))]
                k = min(len(x), len(y))
                x = x[len(x) - k :] * 0.5 + jnp.tanh(y[:k])
            case 5:
                x = x.at[a : len(x) - b].add(0.5 * x[b : len(x) - a])
            case 6:
                x = x.at[a].set(x[b + 1])
            case 7:
                x = x.at[a : len(x) - b].set(0.5)
            case _:
                x = lax.pad(x, np.float32(1), ((-a, b, 0), (0, 1, 0)))[:, 1:]
        if n - 6 <= len(x) <= n + 6:
            values.append(x)
    return [v for v in values[-3:] if v is not u] or [u]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(8))
def test_random_compositions(seed: int) -> None:
    u = numbers(20, 2, seed=seed)
    both(lambda u: random_step(np.random.default_rng(seed), u), u)
    loss = lambda u: sum((v**2).sum() for v in random_step(np.random.default_rng(seed), u))  # noqa: E731
    both(jax.grad(loss), u)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("seed", range(8, 60))
def test_many_random_compositions(seed: int) -> None:
    test_random_compositions(seed)


SENT: dict[str, tuple[int, Callable[[Any], Any]]] = {
    "write": (2, lambda u: u.at[1:-1].set(0.5 * (u[2:] + u[:-2]))),
    "dynamic_update_slice": (2, lambda u: lax.dynamic_update_slice(u, u[2:] + u[:-2], (1, 0, 0))),
    "add": (2, lambda u: u.at[1:-1].add(u[2:] + u[:-2])),
    "zeros around": (2, lambda u: jnp.pad(0.5 * (u[2:] + u[:-2]), ((1, 1), (0, 0), (0, 0)))),
    "last row": (2, lambda u: u.at[-1].set(u[-2])),  # written in place, and sent to all: less than a pass over all of u
    "difference": (1, lambda u: jnp.diff(u, axis=0, append=0)),
    "difference of differences": (2, lambda u: jnp.diff(jnp.diff(u, axis=0, append=0), axis=0, prepend=0)),
    "dilated convolution": (4, lambda u: lax.conv_general_dilated(
        jnp.pad(u, 2)[None, ..., None], jnp.ones((3, 3, 3, 1, 1)), (1, 1, 1), "VALID", rhs_dilation=(2, 2, 2),
        dimension_numbers=("NDHWC", "DHWIO", "NDHWC"),
    )[0, ..., 0]),
    "roll": (1, lambda u: jnp.roll(u, 1, 0)),
    "edges along all dimensions": (2, laplacian("edge")),
    "nine neighbours": (2, lambda u: sum(
        jnp.pad(u, ((1, 1), (1, 1), (0, 0)))[i : len(u) + i, j : u.shape[1] + j] for i in range(3) for j in range(3)
    )),
    "unlike neighbours": (2, unlike_neighbours("constant")),
    "unlike neighbours around": (2, unlike_neighbours("roll")),
} | {
    mode: (2, lambda u, mode=mode: near(jnp.pad(u, ((1, 1), (0, 0), (0, 0)), mode=mode)) - 2 * u)
    for mode in ("constant", "edge", "wrap")
}  # fmt: skip


@pytest.mark.sampled(by=lambda name, mesh: {name, mesh})
@pytest.mark.parametrize("name", SENT)
@pytest.mark.parametrize("mesh", CHIPS, ids=["8", "64"])
def test_what_is_sent_is_the_halo(mesh: Any, name: str) -> None:
    planes, step = SENT[name]
    u = jax.ShapeDtypeStruct((1024, 1024, 1024), "float32")
    grad = jax.grad(lambda u: (step(u) ** 2).sum())
    for fn, times in ((step, 1), (grad, 2)):
        plan = shardc.function(fn, mesh=mesh, in_placements=(ROWS,), out_placements=ROWS).plan(u)
        assert plan.bytes_per_device <= times * planes * PLANE


def test_a_constant_is_written_by_each_device_into_its_rows() -> None:
    """A scatter into split rows takes all of the constant on each device, which costs more than to split columns."""
    u = jax.ShapeDtypeStruct((8192, 8192), "float32")
    step = lambda u: u.at[1:-1].set(0.0)  # noqa: E731
    for fn in (step, jax.grad(lambda u: (step(u) ** 2).sum())):
        plan = shardc.function(fn, mesh=CHIPS[1], in_placements=(ROWS,), out_placements=ROWS).plan(u)
        assert plan.bytes_per_device == 0


@pytest.mark.parametrize("mode", ["edge", "symmetric", "wrap"])
def test_a_convolution_of_padded_rows_sends_their_halo(mode: str) -> None:
    u = jax.ShapeDtypeStruct((256, 256, 256), "float32")
    fn = shardc.function(convolved(mode, 2), mesh=CHIPS[0], in_placements=(ROWS,), out_placements=ROWS)
    assert fn.plan(u).bytes_per_device <= 4 * 4 * 258**2


def test_ghost_cells() -> None:
    u = jax.ShapeDtypeStruct((1026, 1024, 1024), "float32")
    for mesh in CHIPS:
        fn = shardc.function(STEPS["set"], mesh=mesh, in_placements=(ROWS,), out_placements=ROWS)
        assert fn.plan(u).bytes_per_device == 2 * PLANE


ON_MESHES = (
    "set", "dynamic_update_slice", "edges along all dimensions", "convolution of wide edges", "around", "walls of it",
    "difference of differences", "rolls", "unlike neighbours around", "set a constant", "add in a loop",
)  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", ON_MESHES)
def test_on_a_mesh(name: str, mesh: Any) -> None:
    with jax.enable_x64(True):
        u = jnp.asarray(np.random.default_rng(0).normal(size=(13, 4)))
        both_of = lambda u: (STEPS[name](u), jax.grad(lambda u: (STEPS[name](u) ** 2).sum())(u))  # noqa: E731
        fn = shardc.function(both_of, mesh=mesh, in_placements=(ROWS,), out_placements=(ROWS, ROWS))
        for got, want in zip(fn(u), both_of(u), strict=True):
            np.testing.assert_allclose(np.asarray(got), want, rtol=1e-10, atol=1e-10)
        assert fn.compile(u).audit().ok


SOME = [c for c in cases() if c.rank == 2 and (not c.gradient or (c.equation, c.walls) == ("lattice", "set"))]


@pytest.mark.parametrize("case", SOME, ids=lambda c: c.name)
def test_stencils(case: Case) -> None:
    for devices in (8, 64):
        sent, by_hand = planned(case, devices, LARGE[2])
        assert sent <= 1.3 * by_hand


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", [c for c in cases() if c not in SOME], ids=lambda c: c.name)
def test_more_stencils(case: Case) -> None:
    for devices in (8, 64):
        sent, by_hand = planned(case, devices, LARGE[case.rank])
        assert sent <= 1.3 * by_hand


@pytest.mark.parametrize("mesh", CHIPS, ids=["8", "64"])
def test_the_gradient_of_a_loop_sends_the_halos_of_its_steps(mesh: Any) -> None:
    """JAX takes the position of a window out of the loop: it sinks into the body, where the composition reads it."""
    u = jax.ShapeDtypeStruct((8192, 8192), "float32")
    fn = jax.grad(lambda u: (lax.fori_loop(0, 3, lambda _, u: heat(u, "set"), u) ** 2).sum())
    plan = shardc.function(fn, mesh=mesh, in_placements=(ROWS,), out_placements=ROWS).plan(u)
    assert plan.bytes_per_device <= 3 * 2 * 2 * 4 * 8192


def test_a_long_chain_of_views_needs_no_recursion() -> None:
    """Two thousand steps on n - 1 rows between two arrays of n rows."""

    def fn(u: Any) -> Any:
        x = u[1:]
        for _ in range(2000):
            x = x + 1.0
        return jnp.pad(x, ((1, 0),))

    u = np.arange(16.0)
    jaxpr, _ = canonicalize(jax.make_jaxpr(fn)(u))
    (got,) = jaxpr_as_fun(compat.close(composed(jaxpr)))(u)
    np.testing.assert_allclose(got, fn(u))
