"""One training step of a pipeline beside its peers, by turns: `python -m benchmarks.pipeline.peers mlp`.

Started by tables.py with four fake devices. Before the clock starts, each side has done one step from the same
parameters, and its new ones are compared with those of one device.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shardc
from benchmarks.measure import report, seconds
from benchmarks.pipeline.by_hand import ByHand
from benchmarks.pipeline.models import HAND, MICROBATCHES, STAGES, WORKLOADS, Workload
from benchmarks.pipeline.torch_peer import TorchPeer, flat
from shardc.pipeline.schedule.simulate import peak_activations

SCHEDULES = ("1f1b", "zb-h1", "gpipe")


@dataclass
class Side:
    """Who takes part.

    Attributes:
      name: in the table.
      step: runs so many steps, all of them waited for only at the end, and gives the seconds of one.
      first: seconds of the first call, with all that is compiled in it.
      params, loss: after that call, from the same start.
      peak: microbatches whose activations live at once, for each stage.
    """

    name: str
    step: Callable[[int], float]
    first: float
    params: dict[str, np.ndarray]
    loss: float
    peak: list[int]


class Training:
    """A step that is fed its own results."""

    def __init__(self, step: Callable[[Any, Any], tuple[Any, Any]], params: Any, batch: Any) -> None:
        self.step, self.params, self.batch = step, params, batch
        self.loss: Any = None

    def __call__(self, steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            self.params, self.loss = self.step(self.params, self.batch)
        jax.block_until_ready((self.params, self.loss))
        return (time.perf_counter() - start) / steps

    def side(self, name: str, join: Callable[[Any], Any], peak: Callable[[], list[int]]) -> Side:
        first, _ = seconds(lambda: self(1))
        new = jax.tree.map(np.asarray, join(self.params))
        return Side(name, self, first, flat(new), float(self.loss), peak())


def by_shardc(work: Workload, schedule: str) -> Side:
    step = work.step(lambda _, x: shardc.stage_boundary(x))
    mesh = shardc.make_mesh(pipe=STAGES)
    fn = shardc.function(step, mesh=mesh, donate_argnames=("params",), pipeline=shardc.Pipeline(schedule=schedule))

    def peak() -> list[int]:
        plan = fn.plan(work.params, work.batch)
        return list(peak_activations(plan.schedule, plan.simulate()))

    return Training(fn, work.params, work.batch).side(f"shardc {schedule}", dict, peak)


def by_hand(work: Workload, recompute: bool) -> Side:
    loop = ByHand(work, recompute)
    name = f"{HAND}, recompute" if recompute else HAND
    training = Training(loop, loop.put(work.params), work.batch)
    return training.side(name, lambda parts: {k: v for part in parts for k, v in part.items()}, lambda: loop.peak)


def by_jit(work: Workload, microbatches: int) -> Side:
    step = jax.jit(work.step(microbatches=microbatches), donate_argnums=0)
    name = f"one device, jit, {microbatches} microbatch{'es' if microbatches > 1 else ''}"
    training = Training(step, jax.tree.map(jnp.array, work.params), work.batch)
    return training.side(name, dict, lambda: [MICROBATCHES // microbatches])


@contextmanager
def by_torch(work: Workload, model: str, python: str | None) -> Iterator[list[Side]]:
    if python is None:
        yield []
        return
    with tempfile.TemporaryDirectory() as folder:
        peer = TorchPeer(python, model, work, Path(folder))
        try:
            first, params, loss = peer.first()
            yield [Side("torch 1F1B", peer.run, first, params, loss, peer.peak())]
        finally:
            peer.close()


def measure(model: str, turns: int, steps: int, python: str | None) -> None:
    work = WORKLOADS[model]()
    for device in jax.devices():
        jax.block_until_ready(jax.device_put(jnp.ones(1), device) + 1)
    want, loss = jax.jit(work.step())(work.params, work.batch)
    want = flat(jax.tree.map(np.asarray, want))
    sides = [by_shardc(work, s) for s in SCHEDULES]
    sides += [by_hand(work, recompute) for recompute in (False, True)]
    sides += [by_jit(work, m) for m in (MICROBATCHES, 1)]
    with by_torch(work, model, python) as more:
        sides += more
        times = by_rounds(sides, turns, steps)
    hand = next(i for i, s in enumerate(sides) if s.name == HAND)
    for i, side in enumerate(sides):
        waited, row = ([t[i] for t in times[n]] for n in (1, steps))
        ratios, row_ratios = ([t[i] / t[hand] for t in times[n]] for n in (1, steps))
        report(
            model=model, side=side.name, first=side.first, peak=side.peak,
            waited=statistics.median(waited), waited_ratio=statistics.median(ratios),
            row=statistics.median(row), ratio=statistics.median(row_ratios), low=min(row_ratios), high=max(row_ratios),
            difference=max(float(np.max(np.abs(side.params[n] - a))) for n, a in want.items()),
            loss_difference=abs(side.loss - float(loss)),
        )  # fmt: skip


def by_rounds(sides: list[Side], turns: int, steps: int) -> dict[int, list[list[float]]]:
    """For one step waited for and for several in a row: in each round the seconds of every side.

    Each round begins with another side; the first is not counted.
    """
    found: dict[int, list[list[float]]] = {1: [], steps: []}
    gc.collect()
    gc.disable()
    for turn in range(turns + 1):
        for n, rounds in found.items():
            took = {i: sides[i].step(n) for i in (*range(turn % len(sides), len(sides)), *range(turn % len(sides)))}
            rounds.append([took[i] for i in range(len(sides))])
    gc.enable()
    return {n: rounds[1:] for n, rounds in found.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=WORKLOADS)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--steps", type=int, default=5, help="in a row")
    parser.add_argument("--torch-python", help="a Python that has torch")
    options = parser.parse_args()
    measure(options.model, options.turns, options.steps, options.torch_python)
