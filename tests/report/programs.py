"""The functions whose plans are golden: in a file of their own, for their lines are in the texts."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

mystery_p = Primitive("mystery")
mystery_p.def_abstract_eval(lambda x: x)

TABLE = np.linspace(0, 1, 12 * 6, dtype=np.float32).reshape(12, 6)


def mlp_step(params, batch):
    def loss(params):
        x = batch["x"]
        for layer in params["layers"]:
            x = x + jax.nn.relu(x @ layer["up"]) @ layer["down"]
        return ((x - batch["y"]) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def ruleless(x, w):
    return mystery_p.bind(jnp.tanh(x)) @ w


def uneven(x, w):
    return jax.nn.relu(x @ w).sum(0)


def closing(x):
    return x @ jnp.asarray(TABLE)


def repeated(params, x):
    return jax.lax.scan(lambda x, p: (jnp.tanh(x @ p["ws"] + p["bs"]), x.sum()), x, params)
