"""A step that writes to an nnx module, and a function of an equinox-like module."""

import jax.numpy as jnp
from flax import nnx

import shardc
import shardc.equinox
import shardc.flax
from shardc import S

mesh = shardc.make_mesh(data=4)


@shardc.flax.function(mesh=mesh, in_placements={"x": {"data": S(0)}}, donate_argnames="model")
def step(model, x):
    loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    nnx.update(model, nnx.state(model))
    return loss, grads


@shardc.equinox.function(mesh=mesh, in_placements={"x": {"data": S(0)}})
def apply(layer, x):
    return layer["activation"](x @ layer["weight"])


apply({"activation": jnp.tanh, "weight": jnp.ones((8, 8))}, jnp.ones((16, 8)))
step(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), jnp.ones((16, 8)))
