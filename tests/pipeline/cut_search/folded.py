"""A model with unequal layers, a tied table and a skip, and its folded body with the points of cuts."""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

import shardc
from shardc.machine.mesh import TOPOLOGIES, MeshView
from shardc.passes.estimate.plan_cost import whole_seconds
from shardc.passes.trace.trace import Arguments, trace
from shardc.pipeline.cut.cut_loop import find_loop
from shardc.pipeline.cut_search.cut_points import find_points
from shardc.pipeline.cut_search.fold_body import fold_body
from shardc.pipeline.cut_search.owners import find_owned

WIDTHS = (8, 16, 8, 12, 8)
CPU = MeshView((("data", 1),), TOPOLOGIES["cpu"])


def init():
    rng = np.random.default_rng(0)
    layers = [rng.normal(size=(a, b)) for a, b in pairwise(WIDTHS)]
    return {"layers": layers, "table": rng.normal(size=(10, 8)), "bias": np.zeros(8)}


ROWS = 64
BATCH = {"x": np.arange(ROWS) % 10, "late": np.arange(ROWS)[::-1] % 10, "y": np.arange(ROWS) % 10}


def loss(params, batch, block=lambda f: f):
    """Unequal layers, a tied table, a skip over two cuts, and a value that is made early and used late."""
    late = params["table"][batch["late"]] + params["bias"]
    x = skip = params["table"][batch["x"]]
    for w in params["layers"]:
        x = block(lambda x, w: jnp.tanh(x @ w))(x, w)
    x = x + skip * late
    logits = x @ params["table"].T
    return -jax.nn.log_softmax(logits)[jnp.arange(len(x)), batch["y"]].mean()


def traced(step):
    arguments = Arguments(step, ())
    return trace(arguments, arguments.bind((init(), BATCH), {}), marks=True)


def value_and_gradient(fn, params, batch):
    return shardc.accumulate(jax.value_and_grad(fn), microbatches=2)(params, batch)


STEPS = {
    "value_and_grad": partial(value_and_gradient, loss),
    "jit inside": partial(value_and_gradient, jax.jit(loss)),
    "remat": partial(value_and_gradient, partial(loss, block=jax.checkpoint)),
    "grad outside": jax.grad(shardc.accumulate(loss, microbatches=2)),
}


def measured(program):
    loop = find_loop(program, "step")
    body = fold_body(loop)
    owners = {}
    for v, owned in find_owned(program, loop).items():
        for j in owned.sums:
            owners.setdefault(j, []).append(v)
    seconds = np.asarray([whole_seconds(e, CPU) for e in body.eqns])
    return body, find_points(body, seconds, owners), seconds
