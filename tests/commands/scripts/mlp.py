"""A step on a mesh of 8 devices, with an argument of its own and a function that runs before it."""

import atexit
import sys

import jax
import jax.numpy as jnp
import layers

import shardc
from shardc import S

rows = int(sys.argv[1]) if len(sys.argv) > 1 else 64
mesh = shardc.make_mesh(data=4, model=2)
init = shardc.function(lambda key: {"up": jax.random.normal(key, (32, 128)), "down": jnp.zeros((128, 32))}, mesh=mesh)


@shardc.function(mesh=mesh, in_placements={"batch": {"data": S(0)}}, donate_argnames="params")
def step(params, batch, rate=0.1):
    def loss(params):
        return ((layers.forward(params, batch) - batch) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - rate * g, params, grads), value


if __name__ == "__main__":
    print("a line of the script")
    atexit.register(int)
    params = init(jax.random.key(0))
    with open(sys.argv[2] if len(sys.argv) > 2 else "/dev/null", "w") as log:
        try:
            params, value = step(params, jnp.ones((rows, 32)))
        except ValueError:
            raise AssertionError("the script goes on") from None
        finally:
            log.write("closed")
    layers.double(params["up"])
    raise AssertionError("the script goes on")
