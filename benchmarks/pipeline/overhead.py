"""What an action of a pipeline costs beside its work, part by part: `python -m benchmarks.pipeline.overhead 1f1b`.

Started by tables.py with four fake devices. The pipeline is that of the tanh MLP, 8 wide, so that there is nothing to
compute. Parts are added one after the other, all of them measured by turns; a part costs the difference.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import shardc
from benchmarks.measure import report
from benchmarks.pipeline import models
from benchmarks.pipeline.by_hand import ByHand
from benchmarks.pipeline.models import HAND, MICROBATCHES, STAGES
from shardc.execute.pipeline_executable import THREADS, PipelineExecutable
from shardc.runtime.actor import Channel
from shardc.runtime.deadlock import run_without_time
from shardc.runtime.executor import Executor, Task, Threads


class Partly(PipelineExecutable):
    """The pipeline with programs that give arrays that were there before, and, if `moves` is not set, no copies."""

    def __init__(self, plan: Any, meshes: Any, moves: bool) -> None:
        super().__init__(plan, meshes)
        self.moves = moves
        self._executables = {key: Ready(e) for key, e in self._executables.items()}  # type: ignore[assignment]

    def _transport(self, channel: Channel) -> Callable[[Any], Any]:
        return super()._transport(channel) if self.moves else lambda values: values


class Ready:
    """An executable that launches nothing."""

    def __init__(self, executable: Any) -> None:
        self.compiled = self.lowered = None
        self.plan = executable.plan
        avals, shardings = executable.plan.program.out_avals, executable._out_shardings
        out = [jax.device_put(jnp.zeros(a.shape, a.dtype), s) for a, s in zip(avals, shardings, strict=True)]
        self.out = [*out, jnp.zeros(0, bool)]  # the last is the token

    def run(self, args: Any) -> list[Any]:
        del args
        return self.out


def measure(schedule: str, turns: int, calls: int) -> None:
    models.WIDTH = 8
    work = models.mlp()
    step = work.step(lambda _, x: shardc.stage_boundary(x))
    mesh = shardc.make_mesh(pipe=STAGES)
    fn = shardc.function(step, mesh=mesh, donate_argnames=("params",), pipeline=shardc.Pipeline(schedule=schedule))
    state = [fn(work.params, work.batch)[0]]
    real: PipelineExecutable = fn.compile(state[0], work.batch).executable
    net, plan = real.plan.network, real.plan
    gives = {s.label: [None] * len(s.gives) for row in net.actors for s in row}
    loop = ByHand(work)
    parts = [loop.put(work.params)]
    leaves = jax.tree.leaves((state[0], work.batch))
    still, moving = (Partly(plan, _ranks(real), moves) for moves in (False, True))

    def call() -> None:
        state[0], loss = fn(state[0], work.batch)
        jax.block_until_ready((state[0], loss))

    def by_hand() -> None:
        parts[0], loss = loop(parts[0], work.batch)
        jax.block_until_ready((parts[0], loss))

    with Executor(net, lambda label: Task(lambda _: gives[label]), threads=Threads(THREADS)) as nothing:
        parts_of = {
            "the actors' state machine": lambda: run_without_time(net),
            "threads and mailboxes": nothing.run,
            "picking a task's values, handing its results out": lambda: still.launch(leaves),
            "copies to the next stage": lambda: moving.launch(leaves),
            "launching programs, and the call around it": call,
            HAND: by_hand,
        }
        times = by_turns(parts_of, turns, calls)
    crosses = [
        c.source != c.target and r is not None for c, r in zip(net.channels, plan.built.channel_values, strict=True)
    ]
    report(
        schedule=schedule,
        actions=sum(map(len, net.actors)),
        programs=sum(t.plan is not None for t in plan.built.tasks.values()),
        copies=sum(crosses[c] for row in net.actors for s in row for c, _ in s.gives),
        hand_programs=(2 * STAGES - 1) * MICROBATCHES + STAGES,
        parts=times,
    )  # fmt: skip


def _ranks(executable: PipelineExecutable) -> list[Any]:
    """The mesh of each rank."""
    return [executable.meshes[next(s.number for s in executable.plan.stages if s.rank == r)] for r in range(STAGES)]


def by_turns(calls: dict[str, Callable[[], Any]], turns: int, repeat: int) -> dict[str, dict[str, float]]:
    """Median and least seconds of each call, and the median of the processor's (all threads), one turn not counted."""
    walls: dict[str, list[float]] = {name: [] for name in calls}
    cpus: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns + 1):
        for name, call in calls.items():
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(repeat):
                call()
            walls[name].append((time.perf_counter() - wall) / repeat)
            cpus[name].append((time.process_time() - cpu) / repeat)
    return {
        name: {"median": statistics.median(walls[name][1:]), "least": min(walls[name][1:]),
               "cpu": statistics.median(cpus[name][1:]), "least_cpu": min(cpus[name][1:])}
        for name in calls
    }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("schedule", nargs="?", default="1f1b")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--calls", type=int, default=3, help="in a turn")
    options = parser.parse_args()
    measure(options.schedule, options.turns, options.calls)
