"""An LSTM (Hochreiter and Schmidhuber 1997) and a GRU (Cho et al. 2014) that predict bytes, as the zoo has models.

Sizes: N rows, T bytes of a row, H units.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import optax

from examples.zoo import Model, text_batches
from shardc import S, rules

VOCAB = 256


@dataclass(frozen=True)
class Config:
    cell: str
    units: int = 128
    seq: int = 48
    learning_rate: float = 1e-3


def lstm(gates_N4H, state):
    h_NH, c_NH = state
    i, f, g, o = jnp.split(gates_N4H(h_NH), 4, -1)
    c_NH = jax.nn.sigmoid(f) * c_NH + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c_NH), c_NH


def gru(gates_N3H, state):
    h_NH, c_NH = state
    r, z, n = jnp.split(gates_N3H(h_NH), 3, -1)
    z = jax.nn.sigmoid(z)
    return (1 - z) * jnp.tanh(n * jax.nn.sigmoid(r)) + z * h_NH, c_NH


CELLS = {"lstm": (lstm, 4), "gru": (gru, 3)}


def init(key, cfg: Config):
    width = cfg.units * CELLS[cfg.cell][1]
    shapes = {"embed": (VOCAB, cfg.units), "input": (cfg.units, width), "state": (cfg.units, width),
              "output": (cfg.units, VOCAB)}  # fmt: skip
    keys = jax.random.split(key, len(shapes))
    kernels = {n: jax.random.normal(k, s) / cfg.units**0.5 for k, (n, s) in zip(keys, shapes.items(), strict=True)}
    return kernels | {"bias": jnp.zeros(width)}


def loss(params, batch, cfg: Config):
    cell, _ = CELLS[cfg.cell]

    def step(state, x_NH):
        gates = lambda h_NH: x_NH @ params["input"] + h_NH @ params["state"] + params["bias"]  # noqa: E731
        state = cell(gates, state)
        return state, state[0]

    x_TNH = params["embed"][batch["inputs"]].swapaxes(0, 1)
    zero = jnp.zeros(x_TNH.shape[1:])
    h_TNH = jax.lax.scan(step, (zero, zero), x_TNH)[1]
    logits = h_TNH @ params["output"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"].T).mean()


def make_step(cfg: Config, accumulate: Callable = lambda fn: fn):
    optimizer = optax.adam(cfg.learning_rate)

    def init_fn(key):
        params = init(key, cfg)
        return params, optimizer.init(params)

    def step_fn(params, opt_state, batch):
        value, grads = accumulate(jax.value_and_grad(partial(loss, cfg=cfg)))(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return init_fn, step_fn


DONATE = ("params", "opt_state")


def data():
    """Every device holds the model and sees a part of the rows."""
    whole = rules({"*": {}})
    return {"in_placements": {"params": whole, "opt_state": whole, "batch": {"data": S(0)}}, "donate_argnames": DONATE}


def fsdp():
    """The same, with parameters and moments split, and gathered where they are used."""
    split = rules({"*": {"data": S(-1)}})
    moments = rules({"*/mu/*": {"data": S(-1)}, "*/nu/*": {"data": S(-1)}})
    return {
        "in_placements": {"params": split, "opt_state": moments, "batch": {"data": S(0)}},
        "donate_argnames": DONATE,
    }


def tensor():
    """Columns of the gates split: each device computes a part of them, and gathers the state in every step."""
    split = rules({"*input": {"model": S(-1)}, "*state": {"model": S(-1)}, "*bias": {"model": S(-1)}, "*": {}})
    return {"in_placements": {"params": split, "opt_state": split, "batch": {}}, "donate_argnames": DONATE}


PLANS = {plan.__name__: plan for plan in (data, fsdp, tensor)}
RECURRENT = {
    cell: Model(
        configs={"tiny": Config(cell), "test": Config(cell, units=16, seq=8)},
        make_step=make_step,
        batches=text_batches,
        units=lambda cfg: ("bytes", cfg.seq),
        result=lambda cfg, state: "",
        plans=PLANS,
        rows=64,
    )
    for cell in CELLS
}
