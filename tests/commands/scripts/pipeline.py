"""A pipeline of two ranks, as a method of a trainer."""

import jax
import jax.numpy as jnp

import shardc
from shardc import S

mesh = shardc.make_mesh(pipe=2, data=2)
pipelined = shardc.function(
    mesh=mesh, in_placements={"x": {"data": S(0)}}, pipeline=shardc.Pipeline(schedule="1f1b"), donate_argnames="params"
)


class Trainer:
    def __init__(self, scale):
        self.scale = scale

    def loss(self, params, x):
        hidden = jnp.tanh(x @ params["first"])
        return self.scale * ((shardc.stage_boundary(hidden) @ params["second"]) ** 2).mean()

    def step(self, params, x):
        def scaled(params, x):
            grads = shardc.accumulate(jax.value_and_grad(self.loss), microbatches=4)
            value, grads = grads(params, x)
            return jax.tree.map(lambda p, g: p - g, params, grads), value

        scaled.__qualname__ = "Trainer.step"
        return pipelined(scaled)(params, x)


trainer = Trainer(0.5)
trainer.step({"first": jnp.ones((16, 16)), "second": jnp.ones((16, 16))}, jnp.ones((32, 16)))
