"""A flow of two functions, run over three items."""

import jax.numpy as jnp

import shardc
from shardc import S

mesh = shardc.make_mesh(data=4)


@shardc.function(mesh=mesh, in_placements={"x": {"data": S(0)}})
def grad(weights, x):
    return weights * x.sum(0)


class Learner:
    @shardc.function(mesh=mesh, static_argnames="self")
    def update(self, weights, grads):
        return weights - grads


learner = Learner()


@shardc.flow
def train(weights, x):
    weights = learner.update(weights, grad(weights, x))
    return weights, {"weights": weights}


train.run(jnp.ones(8), [jnp.ones((16, 8))] * 3)
