"""Map and reduce as dataflows: k-means on a mesh, and word counts whose readers are processes that may be lost.

    python -m examples.map_reduce                # both; a reader kills itself once, and its task is done again alone
    python -m examples.map_reduce --rounds 20    # at most so many rounds of k-means

A map works on a part of the data: `S(0)`. A reduce is a boxing: the parts of a sum, `P("sum")`, become the whole, `B`.
"""

from __future__ import annotations

import argparse
import keyword
import os
import re
import signal
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shardc
from examples import data
from examples.train import fake_cpu_devices, positive

WORDS = sorted(keyword.kwlist)
"""The words that are counted: Python's own, in the source of its library."""
CHUNK = 100_000
"""Bytes of text that a reader counts in a round."""
LOST_IN = 2
"""The round in which a reader is lost."""


def nearest(points_ND: Any, centres_KD: Any) -> Any:
    """The number of the centre that is nearest to each point (N,), and the square of its distance."""
    squares_NK = (centres_KD**2).sum(1) - 2 * points_ND @ centres_KD.T
    return squares_NK.argmin(1), squares_NK.min(1) + (points_ND**2).sum(1)


def move_centres(centres_KD: Any, points_ND: Any) -> Any:
    """A round of k-means: each centre moves to the mean of its points. Gives also the mean squared distance before."""
    number_N, square_N = nearest(points_ND, centres_KD)
    mine_NK = jax.nn.one_hot(number_N, len(centres_KD))
    sums_KD, counts_K = mine_NK.T @ points_ND, mine_NK.sum(0)  # each device those of its points: P("sum")
    moved_KD = sums_KD / jnp.maximum(counts_K, 1)[:, None]
    return jnp.where(counts_K[:, None] > 0, moved_KD, centres_KD), square_N.mean()


def k_means(mesh: Any) -> tuple[Any, Any]:
    """The flow of k-means, whose rounds give the mean squared distance, and the function that it calls."""
    split = {"points_ND": {"data": shardc.S(0)}, "centres_KD": {}}
    step = shardc.function(move_centres, mesh=mesh, in_placements=split, out_placements={})

    @shardc.flow
    def cluster(state):
        centres, square = step(state["centres"], state["points"])
        return {"centres": centres, "points": state["points"]}, square

    return cluster, step


def converged(cluster: Any, state: Any, rounds: int, some: int = 5) -> tuple[Any, list[float]]:
    """Run some rounds, and some more, until they change nothing. The state, and the mean squared distances."""
    squares: list[float] = []
    while len(squares) < rounds and (len(squares) <= some or squares[-1] < squares[-1 - some]):
        state, given = cluster.run(state, rounds=min(some, rounds - len(squares)))
        squares += map(float, given)
    return state, squares


def count(reader: int, round: Any, *, readers: int, limit: int, kill: str = "") -> np.ndarray:
    """How often each word begins in the chunk of a reader, one for each word.

    Args:
      reader, round: say which chunk.
      readers: how many there are.
      limit: bytes of the whole text.
      kill: a file; reader 1 takes it away, and kills itself.
    """
    if kill and reader == 1 and round == LOST_IN and os.path.exists(kill):
        os.remove(kill)
        os.kill(os.getpid(), signal.SIGKILL)
    text = data.text_bytes(limit)
    begin = (int(round) * readers + reader) * CHUNK
    before = min(begin, 1)  # a word that began in the chunk before is not counted again
    near = text[begin - before : begin + CHUNK + 1000].tobytes()
    found = [m[0].decode() for m in re.finditer(rb"\w+", near) if 0 <= m.start() - before < CHUNK]
    return np.array([found.count(word) for word in WORDS], np.int32)


def word_counts(mesh: Any, readers: int, limit: int, where: str, kill: str = "") -> tuple[Any, int]:
    """The flow that counts the words of the text: its state is the counts so far. Gives also the rounds it takes."""
    task = partial(count, readers=readers, limit=limit, kill=kill)
    mapped = shardc.host(task, gives=np.zeros(len(WORDS), np.int32), copies=readers, where=where)

    def add(total_W, counts_RW):
        return total_W + counts_RW.sum(0)  # each device the readers that it has: P("sum"), and then B

    split = {"counts_RW": {"data": shardc.S(0)}}
    reduced = shardc.function(add, mesh=mesh, in_placements=split, out_placements={})

    @shardc.flow
    def counted(total, round):
        return reduced(total, mapped(round)), None

    return counted, -(-len(data.text_bytes(limit)) // (readers * CHUNK))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rounds", type=positive, default=100, help="the most of k-means")
    add("--devices", type=positive, default=4)
    add("--clusters", type=positive, default=10)
    add("--bytes", type=positive, default=2_000_000, help="of the text whose words are counted")
    add("--where", default="process", choices=("thread", "process"), help="where readers run; a process may be lost")
    options = parser.parse_args(argv)
    fake_cpu_devices(options.devices)
    mesh = shardc.make_mesh(data=options.devices)
    images = data.digits(test=1)[0]["image"].reshape(-1, 64)
    cluster, step = k_means(mesh)
    state = {"centres": images[: options.clusters], "points": images}
    print(cluster.plan(state).explain())
    for c in step.plan(state["centres"], state["points"]).collectives:
        print(f"  reduced: {c.value} from {c.src} to B by {c.kind}, {c.bytes} bytes")
    state, squares = converged(cluster, state, options.rounds)
    print(f"{len(squares)} rounds, mean squared distance {squares[0]:.2f} -> {squares[-1]:.2f}\n")

    with tempfile.TemporaryDirectory() as folder:
        (kill := Path(folder) / "kill").touch()
        killed = str(kill) if options.where == "process" else ""
        counted, rounds = word_counts(mesh, options.devices, options.bytes, options.where, killed)
        total = np.zeros(len(WORDS), np.int32)
        print(counted.plan(total, 0).explain())
        total, _ = counted.run(total, range(rounds))
        lost = sum(getattr(n.work, "restarts", 0) for n in counted.plan(total, 0).nodes)
        counted.close()
    best = ", ".join(f"{word} {n}" for n, word in sorted(zip(map(int, total), WORDS, strict=True))[:-6:-1])
    print(f"{rounds} rounds, readers lost: {lost}; {best}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
