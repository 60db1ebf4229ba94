"""PPO on CartPole as a dataflow: simulators in plain Python play, a learner on a mesh learns, an evaluation looks on.

    python -m examples.rl                              # 16 simulators, the learner one round behind
    python -m examples.rl --late 0 --where process     # synchronous; each simulator in a process of its own
    python -m examples.rl --long-tail                  # games of very different lengths: what staleness is worth

The model is that of examples/ppo.py. Parameters that are `--late 1` are the value of one round ago, whatever the speed
of anything: two runs are the same.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

import shardc
from examples import ppo
from examples.train import fake_cpu_devices, positive

SLEEP, SPREAD = 0.01, 1.0
"""--long-tail: median seconds of a game, and the spread of their logarithms."""


def seconds_of_a_game(rng: np.random.Generator) -> float:
    return SLEEP * rng.lognormal(0.0, SPREAD)


class Simulators:
    """Carts in plain NumPy, so many for each simulator. Each simulator keeps its own."""

    def __init__(self, cfg: ppo.Config, carts: int, sleeps: bool = False) -> None:
        self.cfg, self.carts, self.sleeps = cfg, carts, sleeps
        self.at: dict[int, Any] = {}

    def play(self, simulator: int, params: Any, round: int) -> Any:
        """What the carts of a simulator live through in a round, and where they are at its end."""
        rng, cfg = np.random.default_rng([simulator, int(round)]), self.cfg
        at_NO, moves_N = self.at.get(simulator) or (self.start(rng), np.zeros(self.carts, np.int32))
        lived: list[Any] = []
        for _ in range(cfg.times):
            logits_NA, value_N = (ppo.mlp(params[name], at_NO, np) for name in ("policy", "value"))
            chances_NA = logits_NA - np.log(np.exp(logits_NA).sum(1, keepdims=True))
            action_N = (rng.random(self.carts) < np.exp(chances_NA[:, 1])).astype(np.int32)
            next_NO, moves_N = ppo.move(at_NO, action_N, np).astype(np.float32), moves_N + 1
            fell_N = (abs(next_NO[:, 0]) > ppo.FAR) | (abs(next_NO[:, 2]) > ppo.TILTED)
            over_N = fell_N | (moves_N >= cfg.limit)
            more_N = cfg.discount * ppo.mlp(params["value"], next_NO, np)[:, 0] * (over_N & ~fell_N)
            chance_N = chances_NA[np.arange(self.carts), action_N]
            lived.append((at_NO, action_N, chance_N, value_N[:, 0], (1 + more_N).astype(np.float32), over_N, fell_N))
            at_NO = np.where(over_N[:, None], self.start(rng), next_NO)
            moves_N = np.where(over_N, 0, moves_N)
        self.at[simulator] = at_NO, moves_N
        if self.sleeps:
            time.sleep(seconds_of_a_game(rng))
        names = ("at", "action", "chance", "value", "reward", "over", "fell")
        return {name: np.stack(x, axis=1) for name, x in zip(names, zip(*lived, strict=True), strict=True)}, at_NO

    def start(self, rng: np.random.Generator) -> np.ndarray:
        return rng.uniform(-0.05, 0.05, (self.carts, 4)).astype(np.float32)

    def gives(self) -> Any:
        """The shapes of what `play` gives: those of a game with new parameters."""
        params = jax.tree.map(np.asarray, ppo.init(jax.random.key(0), replace(self.cfg, hidden=1)))
        return Simulators(self.cfg, self.carts).play(0, params, 0)


@dataclass(frozen=True)
class Settings:
    simulators: int = 16
    late: int = 1
    where: str = "thread"
    every: int = 50
    long_tail: bool = False


def make_flow(cfg: ppo.Config, mesh: Any, how: Settings, tell: Callable[[str], None] = print) -> tuple[Any, Any]:
    """The flow, and the state that it begins with: `state, given = flow.run(state, range(rounds))`."""
    start_fn, learn_fn = ppo.make_learner(cfg)
    games = Simulators(cfg, cfg.carts // how.simulators, how.long_tail)
    play = shardc.host(games.play, gives=games.gives(), copies=how.simulators, where=how.where)

    def learn(state, lived, end):
        lived, end = jax.tree.map(lambda x: x.reshape(cfg.carts, *x.shape[2:]), (lived, end))
        params, opt_state, falls = learn_fn(state["params"], state["opt_state"], lived, end)
        return {"params": params, "opt_state": opt_state}, falls

    split = {"data": shardc.S(0)}
    learner = shardc.function(learn, mesh=mesh, in_placements={"lived": split, "end": split}, donate_argnames="state")
    lives = jax.jit(partial(ppo.lifetimes, cfg=cfg))

    def evaluate(params, round):
        reached = np.float32(np.mean(lives(params)))
        tell(f"round {int(round) + 1:4}: falls after {reached:.0f} of {cfg.limit} moves")
        return reached

    report = shardc.every(how.every, shardc.host(evaluate, gives=jax.ShapeDtypeStruct((), np.float32)))

    @shardc.flow(credits=max(2, how.late + 1))  # so many rounds may be on their way
    def train(state, round):
        lived, end = play(shardc.late(state["params"], how.late), round)
        state, falls = learner(state, lived, end)
        return state, {"falls": falls, "reached": report(state["params"], round)}

    params, opt_state = jax.jit(start_fn)(jax.random.key(0))
    return train, {"params": params, "opt_state": opt_state}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rounds", type=positive, default=100)
    add("--simulators", type=positive, default=16)
    add("--devices", type=positive, default=4, help="of the learner")
    add("--late", type=int, default=1, help="rounds by which parameters are late; 0: synchronous")
    add("--where", default="thread", choices=("thread", "process"))
    add("--long-tail", action="store_true", help="games sleep, some of them long; with --late 0, 1 and 2")
    add("--draw", metavar="FILE", help=".svg or .png of some rounds, planned above measured")
    options = parser.parse_args(argv)
    fake_cpu_devices(options.devices)
    mesh = shardc.make_mesh(data=options.devices)
    cfg = ppo.CONFIGS["test" if options.long_tail else "tiny"]
    for late in (0, 1, 2) if options.long_tail else (options.late,):
        how = Settings(options.simulators, late, options.where, long_tail=options.long_tail)
        train, state = make_flow(cfg, mesh, how)
        print(train.plan(state, 0).explain() if not options.long_tail else f"\nParameters {late} rounds late")
        state, _ = train.run(state, range(2))  # compiles
        begin = time.perf_counter()
        state, given = train.run(state, range(options.rounds))
        took = (time.perf_counter() - begin) / options.rounds
        state, seen = train.run(state, range(8), record=True)
        print(seen.timeline() if options.long_tail else "")
        if options.draw:
            seen.draw(options.draw)
        print(f"{1e3 * took:.1f} ms a round; of a hundred moves {float(given[-1]['falls']):.2f} end with a fall")
        train.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
