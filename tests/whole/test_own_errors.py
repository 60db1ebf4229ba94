"""Errors in the user's own function: as readable as under jax.jit."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from shardc import S

MESH = shardc.make_mesh(data=8)
ROWS = {"data": S(0)}
X = np.ones((16, 4), np.float32)
OURS = str(Path(shardc.__file__).parent)


def branch(model, x):
    return x if x.sum() > 0 else model["off"]


def flag(model, x):
    return x if model["off"] else -x


def listed(model, x):
    return x if model["layers"][1] else -x


def number(model, x):
    return x * float(x.mean())


def numpys(model, x):
    return np.tanh(x)


def shapes(model, x):
    return x @ jnp.ones((5, 3))


def keywords(model, *xs, scale=1.0, **rest):
    return xs[0] if rest["flag"] else xs[1]


def looped(model, x):
    def body(c, row):
        return (c if c > 0 else -c), row

    return jax.lax.scan(body, 0.0, x)


MODEL = {"off": np.True_, "layers": [np.True_, np.False_]}
CALLS = {fn: ((MODEL, X), {}) for fn in (branch, flag, listed, number, numpys, shapes, looped)}
CALLS[keywords] = (MODEL, X, X), {"flag": np.True_}
WAYS = {
    "call": lambda fn: shardc.function(fn, mesh=MESH),
    "plan": lambda fn: shardc.function(fn, mesh=MESH).plan,
    "compile": lambda fn: shardc.function(fn, mesh=MESH).compile,
    "accumulate": lambda fn: shardc.function(shardc.accumulate(fn, microbatches=2), mesh=MESH),
}


def failing(call, args, kwargs):
    with pytest.raises(Exception) as caught:
        call(*args, **kwargs)
    every = traceback.extract_tb(caught.value.__traceback__)
    frames = [f for f in every if (f.filename, f.name) != (__file__, "failing")]
    return caught.value, frames


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fn", CALLS, ids=lambda fn: fn.__name__)
def test_it_reads_as_under_jit(fn, way):
    if way == "accumulate" and fn is keywords:
        pytest.skip("by position alone")
    args, kwargs = CALLS[fn]
    want, their_frames = failing(jax.jit(fn), args, kwargs)
    got, frames = failing(WAYS[way](fn), args, kwargs)
    assert type(got) is type(want)
    same = lambda e: re.sub(r"for (jit|shardc.function)|\[\d+,4\]", "", str(e))  # noqa: E731
    assert same(got) == same(want)
    assert [(f.filename, f.name) for f in frames] == [(f.filename, f.name) for f in their_frames]
    assert not [f for f in frames if f.filename.startswith(OURS)]


def test_errors_of_shardc_have_the_users_frames_alone():
    f = shardc.function(lambda x: x, mesh=MESH, in_placements=({"dta": S(0)},))
    for call in (f, f.plan, f.compile):
        _, frames = failing(call, (X,), {})
        assert frames == []
    _, frames = failing(lambda: shardc.function("step"), (), {})
    assert [f.name for f in frames] == ["<lambda>"]
    jax.config.update("jax_traceback_filtering", "off")
    try:
        _, frames = failing(f, (X,), {})
        assert [f for f in frames if f.filename.startswith(OURS)]
    finally:
        jax.config.update("jax_traceback_filtering", "auto")


def roots(w, x):
    def body(c, row):
        c = c + jnp.sqrt(row - 2).sum()  # here
        return c, row

    return jax.lax.scan(body, w, x)[0]


def chosen(w, x):
    return jax.lax.cond(x.sum() > 0, lambda x: jnp.log(-x), lambda x: x, x).sum() + w  # here


def quotient(w, x):
    return w + (1 / (x - 1)).sum()  # here


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (roots, "(nan) encountered in sqrt"),
        (chosen, "(nan) encountered in log"),
        (quotient, "(inf) encountered in div"),
    ],
)
def test_what_is_no_number_is_named_with_its_line(fn, says):
    w = shardc.put(np.float32(0), MESH, {})
    f = shardc.function(fn, mesh=MESH, in_placements=({}, ROWS), donate_argnums=0)
    lines = Path(__file__).read_text().splitlines()
    first = fn.__code__.co_firstlineno
    line = next(i for i, text in enumerate(lines, 1) if i >= first and text.endswith("# here"))
    with jax.debug_nans("nan" in says), jax.debug_infs("inf" in says):
        with pytest.raises(FloatingPointError) as caught:
            f(w, X)
        assert str(caught.value).startswith(f"invalid value {says} at test_own_errors.py:{line} (")
        assert caught.value.__context__ is None
        assert float(w) == 0  # nothing is taken
        if fn is not chosen:
            np.testing.assert_allclose(f(w, X + 5), jax.jit(fn)(np.float32(0), X + 5), rtol=1e-6)


def test_what_is_no_number_in_a_pipeline():
    def loss(p, x):
        x = shardc.stage_boundary(x @ p[0])
        return jnp.log(-((x @ p[1]) ** 2)).mean()

    step = shardc.accumulate(loss, microbatches=2)
    mesh = shardc.make_mesh(pipe=2, data=2)
    f = shardc.function(step, mesh=mesh, pipeline=shardc.Pipeline())
    before = jax.config.jax_debug_nans
    jax.config.update("jax_debug_nans", True)
    try:
        with pytest.raises(shardc.StepFailedError, match=r"encountered in log at test_own_errors.py:\d+ \(loss\)"):
            f([np.eye(4, dtype="f")] * 2, X)
    finally:
        jax.config.update("jax_debug_nans", before)


def test_without_jit_it_is_the_plain_function_on_one_device():
    seen = []

    def step(p, key, x):
        seen.append(x)
        return p - (x * jax.random.normal(key, x.shape)).sum()

    f = shardc.function(step, mesh=MESH, in_placements={"x": ROWS}, donate_argnames="p")
    p, key = shardc.put((np.float32(1), jax.random.key(3)), MESH, {})
    rows = shardc.put(np.ones((16, 2), np.float32), MESH, ROWS)
    uneven = shardc.put(np.ones((13, 2), np.float32), MESH, ROWS)
    with jax.disable_jit():
        for x in (rows, uneven, np.asarray(rows)):
            got = f(p, key, x)
            assert not isinstance(seen[-1], jax.core.Tracer) and seen[-1].shape == x.shape
            want = step(np.float32(1), jax.random.key(3), jnp.asarray(np.asarray(x)))
            np.testing.assert_allclose(got, want, rtol=1e-6)
        assert len(got.sharding.device_set) == 1
        with pytest.raises(shardc.ArgumentError, match="missing a required argument: 'x'"):
            f(p, key)
    want = step(got, jax.random.key(3), jnp.ones((16, 2)))
    np.testing.assert_allclose(f(got, key, rows), want, rtol=1e-5)


@pytest.mark.parametrize("way", ["jit", "call", "accumulate"])
def test_a_leaked_tracer(way):
    """JAX lists the frames in which it was made: no file of shardc is among them."""
    leaked = []

    def leaking(x):
        leaked.append(x * 2)
        return x.sum()

    (jax.jit(leaking) if way == "jit" else shardc.function(
        leaking if way == "call" else shardc.accumulate(leaking, microbatches=2), mesh=MESH
    ))(X)  # fmt: skip
    with pytest.raises(jax.errors.UnexpectedTracerError) as caught:
        _ = leaked[0] + 1
    text = str(caught.value)
    assert OURS not in text and f"{__file__}:{leaking.__code__.co_firstlineno + 1}" in text
