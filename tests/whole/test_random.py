"""Random numbers at any placement are those of one device, bit for bit; a device makes only its piece of them."""

from __future__ import annotations

import zlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from shardc import B, S

pytestmark = pytest.mark.usefixtures("compiled_fast")

MESHES = [shardc.make_mesh(a=8), shardc.make_mesh(a=4, b=2), shardc.make_mesh(a=2, b=2, c=2)]
SHAPES = [(13,), (8,), (1,), (6, 5), (8, 4), (3, 16), (4, 3, 5), (2, 8, 4), (1, 7, 2)]


def dropout(key, shape):
    return jnp.where(jax.random.bernoulli(key, 0.7, shape), 1.0, 0.0)


def keys_of_a_batch(key, shape):
    keys = jax.random.split(key, shape)
    return jax.random.key_data(keys) if jnp.issubdtype(keys.dtype, jax.dtypes.prng_key) else keys


def folded(key, shape):
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(shape[0]))
    return jax.vmap(lambda k: jax.random.uniform(k, shape[1:]))(keys)


def for_each_key(key, shape):
    return jax.vmap(lambda k: jax.random.normal(k, shape[1:]))(jax.random.split(key, shape[0]))


PROGRAMS = {
    "normal": jax.random.normal,
    "uniform": partial(jax.random.uniform, minval=-2, maxval=3),
    "half": partial(jax.random.normal, dtype=jnp.bfloat16),
    "bits_8": partial(jax.random.bits, dtype=np.uint8),
    "bits_of_floats": lambda key, shape: jax.random.uniform(key, shape, dtype=float),
    "dropout": dropout,
    "truncated": lambda key, shape: jax.random.truncated_normal(key, -2, 2, shape),
    "initializer": lambda key, shape: jax.nn.initializers.lecun_normal()(key, (*shape, 4)),
    "categorical": lambda key, shape: jax.random.categorical(key, jnp.log(jnp.arange(1.0, 6)), shape=shape),
    "permutation": lambda key, shape: jax.random.permutation(key, jnp.arange(np.prod(shape)).reshape(shape)),
    "randint": lambda key, shape: jax.random.randint(key, shape, -5, 99),
    "choice": lambda key, shape: jax.random.choice(key, 50, shape),
    "exponential": jax.random.exponential,
    "gamma": lambda key, shape: jax.random.gamma(key, jnp.linspace(0.4, 3, int(np.prod(shape))).reshape(shape)),
    "split": keys_of_a_batch,
    "fold_in": folded,
    "for_each_key": for_each_key,
}


ROUNDED = "exponential", "for_each_key", "gamma", "half", "initializer", "normal", "truncated"
"""Their floats come of elementary functions, whose last bits may differ with the number of elements."""


def at_shape(program, shape):
    return lambda key: program(key, shape=shape)


def placement(rng, mesh, rank):
    """A random one, axes in random order."""
    sbps = [B, *map(S, range(rank)), *map(S, range(rank))]
    return {str(a): sbps[rng.integers(len(sbps))] for a in rng.permutation(mesh.axis_names)}


def check(fn, *args, where, mesh, exact=True):
    want = jax.tree.leaves(jax.jit(fn)(*args))
    exe = shardc.function(fn, mesh=mesh, out_placements=where).compile(*args)
    got = jax.tree.leaves(exe(*args), is_leaf=lambda x: isinstance(x, shardc.PlacedArray))
    for g, w in zip(got, want, strict=True):
        g, w = np.asarray(g), np.asarray(w)
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        np.testing.assert_array_equal(g, w, str(where)) if exact else np.testing.assert_allclose(g, w, rtol=2e-6)
    assert exe.audit().ok, str(exe.audit())
    return exe.plan


@pytest.mark.sampled(by=lambda name, x64: {name, x64})
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
def test_they_are_those_of_one_device(name, x64):
    rng = np.random.default_rng(zlib.crc32(f"{name}{x64}".encode()))
    with jax.enable_x64(x64):
        for typed in (True, False):
            key = (jax.random.key if typed else jax.random.PRNGKey)(int(rng.integers(1000)))
            shape, mesh = SHAPES[rng.integers(len(SHAPES))], MESHES[rng.integers(len(MESHES))]
            fn = at_shape(PROGRAMS[name], shape)
            rank = len(jax.eval_shape(fn, key).shape)
            check(fn, key, where=placement(rng, mesh, rank), mesh=mesh, exact=name not in ROUNDED)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["normal", "split", "fold_in", "for_each_key"])
@pytest.mark.parametrize("generator", ["rbg", "unsafe_rbg", "threefry4x32"])
def test_of_every_generator(generator, name):
    rng = np.random.default_rng(zlib.crc32(f"{name}{generator}".encode()))
    key, fn = jax.random.key(5, impl=generator), at_shape(PROGRAMS[name], (6, 5))
    where = placement(rng, MESHES[1], len(jax.eval_shape(fn, key).shape))
    check(fn, key, where=where, mesh=MESHES[1], exact=name not in ROUNDED)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["normal", "bits_8", "split", "for_each_key", "permutation"])
def test_of_threefry_that_does_not_count(name):
    with jax.threefry_partitionable(False):
        check(
            at_shape(PROGRAMS[name], (6, 5)),
            jax.random.key(5),
            where={"a": S(0), "b": S(1)},
            mesh=MESHES[1],
            exact=name not in ROUNDED,
        )


def test_keys_that_live_in_uneven_pieces():
    keys = jax.random.split(jax.random.key(0), 10)
    fn = lambda k: (jax.random.split(k[0], (5, 3)), k[::-1], jax.vmap(jax.random.normal)(k))  # noqa: E731
    f = shardc.function(fn, mesh=MESHES[0], in_placements={"k": {"a": S(0)}}, out_placements={"a": S(0)})
    exe = f.compile(keys)
    (split, back, drawn), want = exe(keys), jax.jit(fn)(keys)
    assert split.shape == (5, 3) and back.placement == shardc.Placement({"a": S(0)})
    read = shardc.function(lambda a, b: (jax.random.key_data(a), jax.random.key_data(b)), mesh=MESHES[0])
    for g, w in zip(read(split, back), want, strict=False):
        np.testing.assert_array_equal(np.asarray(g), jax.random.key_data(w))
    np.testing.assert_array_equal(np.asarray(drawn), want[2])
    assert exe.audit().ok, str(exe.audit())


@pytest.mark.parametrize("where", [{"a": S(0)}, {"a": S(1)}, {"a": S(0), "b": S(1)}, {"a": S(0), "b": S(0)}])
def test_nothing_moves_and_nothing_is_made_twice(where):
    """Each device makes its piece: the program has no random number more than that."""
    f = shardc.function(lambda key: jax.random.bits(key, (16, 8)), mesh=MESHES[1], out_placements=where)
    exe = f.compile(jax.random.key(0))
    assert not exe.plan.collectives and not exe.plan.gathered
    (eqn,) = [e for e in exe.plan.boxed.jaxpr.eqns if e.primitive.name == "random_bits"]
    assert exe.plan.boxed.placements[eqn.outvars[0]] == shardc.Placement(where)
    assert f"u32[{16 * 8}]" not in exe.hlo() and "u32[16,8]" not in exe.hlo()


def test_keys_of_a_batch_are_split_with_it():
    def noisy(keys, x):
        return x + jax.vmap(lambda k: jax.random.normal(k, x.shape[1:]))(keys)

    keys, x = jax.random.split(jax.random.key(1), 8), jnp.ones((8, 3))
    f = shardc.function(noisy, mesh=MESHES[0], in_placements={"x": {"a": S(0)}, "keys": {"a": S(0)}})
    np.testing.assert_allclose(np.asarray(f(keys, x)), noisy(keys, x), rtol=1e-5)
    assert not f.plan(keys, x).collectives
