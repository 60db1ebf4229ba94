"""What a call costs beside its work: tiny functions of 1, 16 and 256 arrays. Started by run.py."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import shardc
from benchmarks.measure import Pair, by_turns, report


def add_one(params):
    return jax.tree.map(lambda x: x + 1, params)


def compare(leaves: int, devices: int, turns: int, calls: int) -> Pair:
    mesh = shardc.make_mesh(data=devices)
    placement = {"data": shardc.S(0)}
    params = {f"layer_{i}": {"kernel": np.ones((8, 8), np.float32)} for i in range(leaves)}
    ours = shardc.function(mesh=mesh, in_placements=placement, out_placements=placement)(add_one)
    sharding = shardc.Placement(placement).to_sharding(mesh)
    peer = jax.jit(add_one, in_shardings=(sharding,), out_shardings=sharding)
    params = jax.device_put(params, sharding)
    return by_turns(timed(ours, params, calls), timed(peer, params, calls), turns)


def timed(fn: Callable[[Any], Any], params: Any, calls: int) -> Callable[[], float]:
    """Seconds of a call in a row of them, each of which takes the one before's result."""

    def run() -> float:
        x = params
        start = time.perf_counter()
        for _ in range(calls):
            x = fn(x)
        took = time.perf_counter() - start
        jax.block_until_ready(x)
        return took / calls

    return run


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leaves", type=int, nargs="*", default=[1, 16, 256])
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--calls", type=int, default=10)
    options = parser.parse_args()
    for leaves in options.leaves:
        pair = compare(leaves, options.devices, options.turns, options.calls)
        report(leaves=leaves, devices=options.devices, time=pair)
