"""Plans whose pages are looked at, and their names, which are hard to quote: in a file of their own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import shardc
from shardc import S
from tests.report import pipelines

EVIL = "</script><img src=x onerror=alert(1)>&\"'"
"""A key of an argument, and the name of a scope."""


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, np.float32)


def step(params, x):
    def loss(params):
        with jax.named_scope(EVIL):
            h = jax.nn.relu(x @ params[EVIL])
        with jax.named_scope("down"):
            return ((h @ params["down"]) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


@functools.cache
def spmd():
    """A plan with uneven splits of two axes over one dimension, and partial sums."""
    mesh = shardc.make_mesh(topology="v5p:2x2x2", data=4, model=2)
    pins = {"params": shardc.rules({"down": {"model": S(0)}, "*": {"model": S(1)}}), "x": {"data": S(0)}}
    f = shardc.function(step, mesh=mesh, in_placements=pins, donate_argnames="params")
    return f.plan({EVIL: f32(16, 63), "down": f32(63, 5)}, f32(30, 16))


def looped(x, ws):
    def body(x, w):
        return jax.lax.cond(x.sum() > 0, lambda x: jnp.tanh(x @ w) @ w, lambda x: x, x), None

    return jax.lax.scan(body, x, ws)[0]


@functools.cache
def with_loops():
    """A plan of a loop with branches in it."""
    f = shardc.function(
        looped, mesh=shardc.make_mesh(topology="v5p:2x2x1", data=2, model=2),
        in_placements={"x": {"data": S(0)}, "ws": {"model": S(2)}},
    )  # fmt: skip
    return f.plan(f32(64, 32), f32(5, 32, 32))


@functools.cache
def offloaded(topology="v5p:2x2x1"):
    """A plan whose optimizer state lives on the host; `topology` None: of the devices that there are."""

    def adam(w, opt_state, x):
        value, grad = jax.value_and_grad(lambda w: jnp.einsum("bi,io->bo", x, w).sum() ** 2)(w)
        mu = 0.9 * opt_state["mu"] + grad
        return w - 0.1 * mu, {"mu": mu}, value

    mesh = shardc.make_mesh(topology=topology, data=2, model=2)
    pins = {"x": {"data": S(0)}, "w": {"model": S(1)}}
    f = shardc.function(
        adam, mesh=mesh, in_placements=pins, donate_argnames=("w", "opt_state"), offload=["opt_state/*"]
    )
    return f.plan(f32(64, 32), {"mu": f32(64, 32)}, f32(16, 64))


@functools.cache
def pipeline():
    """The plan of a pipeline of four ranks."""
    mesh = shardc.make_mesh(topology="v5p:4x2x2", pipe=4, data=2, model=2)
    f = shardc.function(
        pipelines.deep_step, mesh=mesh, in_placements={"batch": {"data": S(0)}}, donate_argnames="params",
        pipeline=shardc.Pipeline(),
    )  # fmt: skip
    layers = [{"up": f32(16, 64), "down": f32(64, 16)} for _ in range(4)]
    return f.plan({"layers": layers}, {"x": f32(96, 16), "y": f32(96, 16)})
