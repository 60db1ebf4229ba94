"""A flow with all that pictures show: a fleet, a delay, a rate."""

from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np

import shardc

SECONDS = {"play": 3e-3, "learn": 2e-3, "test": 5e-3}


def play(copy, params, seed):
    return np.float32(copy + seed) + params[:2]


def test(params):
    return params.sum()


@contextmanager
def trained():
    """Two players one round late, a learner, and a test every three rounds."""
    given = jax.ShapeDtypeStruct((2,), jnp.float32)
    players = shardc.host(play, gives=given, copies=2)
    tests = shardc.host(test, gives=jax.ShapeDtypeStruct((), jnp.float32))

    def learn(params, found):
        return params + found.mean()

    learner = shardc.function(learn, mesh=shardc.make_mesh(data=2), in_placements={"found": {"data": shardc.S(0)}})

    @shardc.flow
    def train(params, seed):
        found = players(shardc.late(params, 1), seed)
        params = learner(params, found)
        return params, {"test": shardc.every(3, tests)(params)}

    try:
        yield train
    finally:
        train.close()
