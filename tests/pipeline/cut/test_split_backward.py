"""What the gradient of a stage's input needs, and the rest: together they are what they were."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardc import compat
from shardc.passes.trace.canonicalize import canonicalize
from shardc.pipeline.cut.split_backward import part

pytestmark = pytest.mark.usefixtures("compiled_fast")


def evaluate(eqns, env):
    for eqn in eqns:
        xs = [a.val if compat.is_literal(a) else env[a] for a in eqn.invars]
        env |= dict(zip(eqn.outvars, compat.bind_with(eqn.primitive, eqn.params)(*xs), strict=True))


def layer(x, w):
    return jnp.tanh(x @ w["in"]) @ w["out"] + x


def unrolled(x, ws):
    for i in range(3):
        x = layer(x, jax.tree.map(lambda w, i=i: w[i], ws))
    return x


def scanned(x, ws, block=layer):
    return lax.scan(lambda c, w: (block(c, w), None), x, ws)[0]


def scale_in_the_carry(x, ws):
    def step(carry, w):
        x, scale = carry
        return (layer(x, w) * scale, scale * 0.9), None

    return lax.scan(step, (x, jnp.asarray(1.0, x.dtype)), ws)[0][0]


MODELS = {
    "unrolled": unrolled,
    "scan": scanned,
    "remat": jax.checkpoint(unrolled),
    "scan of remat": lambda x, ws: scanned(x, ws, jax.checkpoint(layer)),
    "remat of scan": jax.checkpoint(scanned),
    "two carries": scale_in_the_carry,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MODELS)
def test_both_parts_make_what_the_whole_made(name):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 8)).astype(np.float32)
    ws = {"in": rng.normal(size=(3, 8, 6)).astype(np.float32), "out": rng.normal(size=(3, 6, 8)).astype(np.float32)}

    def backward(x, ws, ct):
        return jax.vjp(MODELS[name], x, ws)[1](ct)

    jaxpr, _ = canonicalize(jax.make_jaxpr(backward)(x, ws, x))
    first, second = part(jaxpr.eqns, [jaxpr.outvars[0]], jaxpr.outvars[1:])
    assert second, "the gradients of the weights can wait"
    heavy = [[e for e in eqns if e.primitive.name in ("dot_general", "scan")] for eqns in (first, second)]
    assert all(heavy), heavy

    args = [x, ws["in"], ws["out"], x]
    env = dict(zip(jaxpr.invars, args, strict=True))
    evaluate(first, env)
    early = env[jaxpr.outvars[0]]
    assert not all(v in env for v in jaxpr.outvars[1:]), "not all is computed before it has to be"
    evaluate(second, env)
    want = jax.tree.leaves(backward(x, ws, x))
    got = [early, *(env[v] for v in jaxpr.outvars[1:])]
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def dots(eqns):
    found = 0
    for eqn in eqns:
        found += eqn.primitive.name == "dot_general"
        for value in eqn.params.values():
            inner = getattr(getattr(value, "jaxpr", value), "eqns", ())
            found += dots(inner)
    return found


@pytest.mark.parametrize("name", ["unrolled", "scan", "remat", "scan of remat"])
def test_nothing_is_computed_twice(name):
    x, ws = jnp.ones((4, 8)), {"in": jnp.ones((3, 8, 6)), "out": jnp.ones((3, 6, 8))}
    jaxpr, _ = canonicalize(jax.make_jaxpr(lambda x, ws, ct: jax.vjp(MODELS[name], x, ws)[1](ct))(x, ws, x))
    first, second = part(jaxpr.eqns, [jaxpr.outvars[0]], jaxpr.outvars[1:])
    assert dots(first) + dots(second) == dots(jaxpr.eqns)
