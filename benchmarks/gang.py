"""What a turn of a gang costs: the turn alone, and calls of a tiny program and of one of some milliseconds.

    python -m benchmarks.gang [--turns 9] [--calls 100]

"alone" is one client beside the bare function, "four" is the time of a program when four clients call at once. Prints
lines of its own.
"""

from __future__ import annotations

import argparse
import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import shardc
from benchmarks.measure import by_turns, fake_cpu
from shardc.runtime.gang import Scheduler

CLIENTS, IN_FLIGHT = 4, (1, 2, 8)


def work(x, products):
    for _ in range(products):
        x = x @ x / jnp.sum(x)
    return x / jnp.sum(x)


def loop(step, x, calls: int) -> float:
    """Seconds of a call in a row of them, until the last one has finished."""
    start = time.perf_counter()
    for _ in range(calls):
        x = step(x)
    jax.block_until_ready(x)
    return (time.perf_counter() - start) / calls


def empty_turn(calls: int) -> float:
    gang = Scheduler()
    client = gang.client("a")
    start = time.perf_counter()
    for _ in range(calls):
        with gang.turn(client, 1.0):
            pass
    return (time.perf_counter() - start) / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--calls", type=int, default=100)
    options = parser.parse_args()
    os.environ.update(fake_cpu(8))  # JAX has not started yet
    print(f"a turn alone: {min(empty_turn(1000) for _ in range(options.turns)) * 1e6:.1f} us")
    mesh = shardc.make_mesh(data=8)
    places = {"data": shardc.S(0)}
    x = shardc.put(np.ones((256, 256), np.float32), mesh, places)
    print("program  in flight  bare us  alone us  alone/bare  four us")
    for name, products in (("tiny", 0), ("4 matmuls", 4)):
        fn = shardc.function(
            partial(work, products=products), mesh=mesh, in_placements=(places,), out_placements=places
        )
        fn(x)
        for most in IN_FLIGHT:
            gang = shardc.Gang(in_flight=most)
            steps = [gang.share(fn, name=str(i)) for i in range(CLIENTS)]
            alone, bare = (partial(loop, step, x, options.calls) for step in (steps[0], fn))
            pair = by_turns(alone, bare, options.turns)
            start = time.perf_counter()
            with ThreadPoolExecutor() as threads:
                list(threads.map(lambda step: loop(step, x, options.calls), steps))
            four = (time.perf_counter() - start) / CLIENTS / options.calls
            row = f"{pair.peer * 1e6:8.0f}  {pair.ours * 1e6:8.0f}  {pair.ratio:10.2f}  {four * 1e6:7.0f}"
            print(f"{name:9}  {most:7}  {row}")


if __name__ == "__main__":
    main()
