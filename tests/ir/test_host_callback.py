"""Host callbacks run once, with whole values, on any mesh; their results are distributed as planned."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import shardc
from shardc import S

MESHES = [shardc.make_mesh(a=8), shardc.make_mesh(a=4, b=2), shardc.make_mesh(a=1)]
X = np.arange(21.0, dtype=np.float32).reshape(7, 3)
SEEN: list[float] = []


def note(x):
    SEEN.append(float(np.asarray(x).sum()))
    return np.asarray(x) * 2


def like(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def debug(x):
    jax.debug.callback(note, x)
    return x * 2


def pure(x):
    return jax.pure_callback(note, like(x), x) + 1


def io(x):
    return io_callback(note, like(x), x) + 1


def of_several_types(x):
    def look(x):
        note(x)
        return np.asarray(x) > 5, np.asarray(x).astype(np.int32), np.asarray(x)[0] + 1j

    shapes = (jax.ShapeDtypeStruct(x.shape, bool), jax.ShapeDtypeStruct(x.shape, np.int32))
    return jax.pure_callback(look, (*shapes, jax.ShapeDtypeStruct((3,), np.complex64)), x)


def of_nothing(x):
    io_callback(lambda: SEEN.append(1), None)
    return x + 1


def in_a_scan(x):
    def body(c, row):
        jax.debug.callback(note, row)
        return c + jax.pure_callback(note, like(row), row), row

    return lax.scan(body, jnp.zeros(3), x)


def in_a_branch(x):
    return lax.cond(x.sum() > 0, lambda x: (jax.debug.callback(note, x), x)[1], lambda x: x * 2, x)


def in_a_while(x):
    def body(c):
        return c[0] + 1, c[1] + io_callback(note, like(x), c[1])

    return lax.while_loop(lambda c: (c[0] < 3) & (c[1].sum() < 1e9), body, (0, x))


def in_a_vmap(x):
    rows = jax.vmap(lambda r: jax.pure_callback(note, like(r), r, vmap_method="sequential"))(x)
    return jax.vmap(lambda r: (jax.debug.callback(note, r), r)[1])(rows)


def in_a_gradient(x):
    return jax.grad(jax.checkpoint(lambda x: (jax.debug.callback(note, x), jnp.square(x).sum())[1]))(x)


def in_order(x):
    for i in range(4):
        io_callback(lambda v: (note(v), None)[1], None, x + i, ordered=True)
    return lax.fori_loop(0, 3, lambda i, c: c + io_callback(note, like(i), i, ordered=True), x)


PROGRAMS = [
    debug, pure, io, of_several_types, of_nothing, in_a_scan, in_a_branch, in_a_while, in_a_vmap, in_a_gradient,
    in_order,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_they_run_as_on_one_device(program):
    def seen_by(f):
        SEEN.clear()
        out = jax.block_until_ready(f(X))
        jax.effects_barrier()
        return out, SEEN.copy()

    want, told = seen_by(jax.jit(program))
    for mesh in MESHES:
        f = shardc.function(program, mesh=mesh, in_placements={"x": {"a": S(0)}})
        got, found = seen_by(f)
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(np.asarray(g), w)
        assert found == told if program is in_order else sorted(found) == sorted(told)
        exe = f.compile(X)
        assert exe.audit().ok, str(exe.audit())
        assert not exe.plan.gathered


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mesh", MESHES, ids=lambda m: str(dict(m.shape)))
@pytest.mark.parametrize("dtype", ["float64", "int64", "uint64", "complex128"])
def test_numbers_of_64_bits_keep_them(dtype, mesh):
    """x64 may be on in this thread alone: another thread runs the callback, as an argument is not ready yet."""
    with jax.enable_x64(True):
        x = np.asarray([[2**53 + 1, 5, 1], [7, 2**40 + 3, 0]], np.int64).astype(dtype) * np.asarray(3, dtype)

        def look(v, n):
            assert v.dtype == dtype and n.dtype == np.int32
            return np.asarray(v) + 1, np.asarray(v)[0, 0]

        def program(x, y):
            shapes = (like(x), jax.ShapeDtypeStruct((), x.dtype))
            jax.debug.callback(lambda v: seen.append(np.asarray(v)), x)
            return jax.pure_callback(look, shapes, x, jnp.int32(1)), io_callback(look, shapes, x, jnp.int32(2)), y

        seen = []
        f = shardc.function(program, mesh=mesh, in_placements={"x": {"a": S(1)}})
        compiled = f.compile(x, np.float64(0))
        late = jax.jit(lambda y: lax.fori_loop(0, 50, lambda _, y: y @ y / 1000, jnp.ones((1000, 1000)))[0, 0])
        *got, _ = jax.block_until_ready(compiled(x, late(1.0)))
        jax.effects_barrier()
        np.testing.assert_array_equal(seen, [x])
        for whole, first in got:
            np.testing.assert_array_equal(np.asarray(whole), x + 1)
            assert np.asarray(first) == x[0, 0] and first.dtype == dtype


def test_prints_come_once(capfd):
    def noisy(x):
        jax.debug.print("sum {s}", s=x.sum())
        return x

    jax.block_until_ready(shardc.function(noisy, mesh=MESHES[1], in_placements={"x": {"a": S(0)}})(X[:4]))
    jax.effects_barrier()
    assert capfd.readouterr().out == "sum 66.0\n"


def test_large_values_and_jax_inside():
    """A callback may compute with JAX: that does not wait for devices that wait for the callback."""
    x = np.ones((50000, 4), np.float32)

    def heavy(x):
        return jax.pure_callback(lambda v: np.asarray(jnp.asarray(v) @ jnp.ones((4, 4))), like(x), x) + x.sum()

    f = shardc.function(heavy, mesh=MESHES[0], in_placements={"x": {"a": S(0)}})
    np.testing.assert_array_equal(np.asarray(f(x)), np.full((50000, 4), 200004, np.float32))


def test_a_callback_that_names_a_device():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[2])
    f = shardc.function(lambda x: jax.pure_callback(note, like(x), x, sharding=sharding), mesh=MESHES[0])
    np.testing.assert_array_equal(np.asarray(f(X)), X * 2)


def test_numbers_from_a_state_are_the_same_everywhere():
    """`rng_uniform` draws from a state of each device: all devices get the number of the first."""
    f = shardc.function(lambda: lax.rng_uniform(0.0, 1.0, (4, 2)), mesh=MESHES[0], out_placements={})
    copies = [np.asarray(s.data) for s in f().addressable_shards]
    assert all((c == copies[0]).all() for c in copies) and (copies[0] > 0).all() and (copies[0] < 1).all()
    assert [c.kind for c in f.plan().collectives] == ["all_reduce"]


def trap(x):
    raise KeyError("caught")


FAILING = {
    "pure": lambda x: jax.pure_callback(trap, like(x), x) + 1,
    "io": lambda x: io_callback(trap, like(x), x).sum(),
    "debug": lambda x: (jax.debug.callback(trap, x), x.sum())[1],
    "shape": lambda x: jax.pure_callback(lambda x: x[0], like(x), x).sum(),
    "loop": lambda x: lax.scan(lambda c, r: (c + jax.pure_callback(trap, like(r), r), None), x[0], x)[0],
}


@pytest.mark.parametrize("kind", FAILING)
def test_what_they_raise_comes_out(kind):
    """No device waits for the one that failed, and the next call is not affected."""
    says = "Incorrect output shape" if kind == "shape" else "caught"
    for mesh in MESHES[:2]:
        f = shardc.function(FAILING[kind], mesh=mesh, in_placements={"x": {"a": S(0)}})
        for _ in range(2):
            with pytest.raises(jax.errors.JaxRuntimeError, match=says):
                f(X)
    jax.effects_barrier()
