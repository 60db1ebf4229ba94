"""DiLoCo (Douillard et al. 2023, "Distributed Low-Communication Training of Language Models") for the small GPT-2.

    python -m examples.diloco --slow-learner 0.5 --compare

Each of four learners takes H steps of AdamW on its own text, with its own optimizer state, and pushes how far it came.
What three or four of them push is averaged and is one outer step of Nesterov's momentum (section 2). Nobody waits for a
learner that is slow: what it pushes late is in the next outer step.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardc
from examples import gpt2
from examples.data import Batch, text_batches, text_bytes
from examples.train import fake_cpu_devices, positive

LEARNERS, QUORUM = 4, (3, 4)
ROWS = 4  # of a learner's batch
TEST = 100_000  # bytes of text that nobody learns from


def inner_steps(params, opt, batches, cfg: gpt2.Config):
    """H steps. Returns the optimizer's state, the way from the new parameters to the old ones, and the mean loss."""
    _, step = gpt2.make_step(cfg)

    def one(carry, batch):
        *carry, loss = step(*carry, batch)
        return tuple(carry), loss

    (new, opt), losses = jax.lax.scan(one, (params, opt), batches)
    return opt, jax.tree.map(jnp.subtract, params, new), losses.mean()


def texts(cfg: gpt2.Config, steps: int) -> list[Iterator[Batch]]:
    """The batches of each learner: `steps` of them at once (H, B, T)."""

    def stacked(batches):
        while True:
            some = [next(batches) for _ in range(steps)]
            yield {name: np.stack([b[name] for b in some]) for name in some[0]}

    text = text_bytes()[TEST:]
    return [stacked(text_batches(text, ROWS, cfg.seq, seed=i)) for i in range(LEARNERS)]


def make(cfg: gpt2.Config, steps: int, grace: float, slow: float = 0.0):
    """The outer state, the flow, and the state to begin with. Learner 0 takes `slow` seconds more for a round."""
    devices = jax.devices()
    *meshes, server = (jax.sharding.Mesh(np.array([d]), ("data",)) for d in devices[: LEARNERS + 1])
    params, opt = gpt2.make_step(cfg)[0](jax.random.key(0))
    outer = optax.sgd(0.7, momentum=0.5, nesterov=True)
    held = shardc.shared({"params": params, "opt": outer.init(params)}, on=server)
    batches = texts(cfg, steps)

    def next_batches(learner, round):
        time.sleep(0 if learner else slow)
        return next(batches[int(learner)])

    def outer_step(state, way):
        updates, opt = outer.update(way, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

    shape = jax.ShapeDtypeStruct((steps, ROWS, cfg.seq), jnp.int32)
    read = shardc.host(next_batches, gives={"inputs": shape, "targets": shape})

    def learn(params, opt, batches):
        return inner_steps(params, opt, batches, cfg)

    learners = [shardc.function(learn, mesh=m, donate_argnames="opt") for m in meshes]

    @shardc.flow
    def train(state, k):
        new, losses = [], []
        for i, (learner, mine) in enumerate(zip(learners, state, strict=True)):
            opt, way, loss = learner(mine["params"], mine["opt"], read(i, k))
            seen = held.change(outer_step, way, quorum=QUORUM, grace=grace)
            new.append({"params": seen["params"], "opt": opt})
            losses.append(loss)
        return new, {"loss": losses}

    return held, train, [{"params": params, "opt": opt}] * LEARNERS


def synchronous(cfg: gpt2.Config, steps: int, rounds: int):
    """The parameters after training on the same text, each step on the batches of all learners together."""
    init, step = gpt2.make_step(cfg)
    state, step, batches = init(jax.random.key(0)), jax.jit(step), texts(cfg, steps)
    for _ in range(rounds):
        found = [next(b) for b in batches]
        together = {name: np.concatenate([f[name] for f in found], axis=1) for name in found[0]}
        for h in range(steps):
            *state, _ = step(*state, {name: x[h] for name, x in together.items()})
    return state[0]


def test_loss(params, cfg: gpt2.Config) -> float:
    """The mean loss on text that nobody has learned from."""
    some = text_batches(text_bytes()[:TEST], 32, cfg.seq, seed=99)
    loss = jax.jit(partial(gpt2.loss, cfg=cfg))
    return float(np.mean([loss(params, next(some)) for _ in range(8)]))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.diloco", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="tiny", choices=("tiny", "test"))
    parser.add_argument("--inner", type=positive, default=10, help="H: steps between two outer steps")
    parser.add_argument("--rounds", type=positive, default=20)
    parser.add_argument("--grace", type=float, default=0.05, help="seconds for which three wait for the fourth")
    parser.add_argument("--slow-learner", type=float, default=0.0, help="seconds by which learner 0 is slower")
    parser.add_argument("--compare", action="store_true", help="train once more, synchronously, on as many tokens")
    options = parser.parse_args(argv)
    if jax.config.jax_platforms in (None, "", "cpu"):
        fake_cpu_devices(LEARNERS + 1)
    cfg = gpt2.CONFIGS[options.config]
    held, train, state = make(cfg, options.inner, options.grace, options.slow_learner)
    print(train.plan(state, 0).explain())
    _, given = train.run(state, range(options.rounds))
    train.close()
    for k, round in enumerate(given):
        print(f"round {k + 1:4}  losses {'  '.join(f'{float(x):.4f}' for x in round['loss'])}")
    print(f"{held.changes} outer steps; test loss {test_loss(held.value['params'], cfg):.4f}")
    if options.compare:
        print(f"synchronous: test loss {test_loss(synchronous(cfg, options.inner, options.rounds), cfg):.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
