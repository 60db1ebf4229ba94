"""Bytes that live on each device at most, beside those of the plan: `python -m benchmarks.pipeline.memory mlp`.

Started by tables.py with four fake devices. `jax.live_arrays` is asked after every launch and every copy; what lived
before the call and is no argument of it is not counted. The plan's figure is that without what lives inside a task.
"""

from __future__ import annotations

import argparse
import math
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax

import shardc
from benchmarks.measure import report
from benchmarks.pipeline.models import STAGES, WORKLOADS
from shardc.execute.executable import Executable
from shardc.execute.pipeline_executable import PipelineExecutable
from shardc.runtime.actor import Channel

SCHEDULES = ("gpipe", "1f1b", "zb-h1")


def live() -> Counter[Any]:
    """Bytes on each device."""
    found: Counter[Any] = Counter()
    for x in jax.live_arrays():
        size = math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        found.update(dict.fromkeys(x.sharding.device_set, size))
    return found


class Watched(PipelineExecutable):
    """The pipeline, stopping to look at what lives."""

    def __init__(self, plan: Any, meshes: Any) -> None:
        super().__init__(plan, meshes)
        self.most: Counter[Any] = Counter()
        self.looking = threading.Lock()
        self._watch.run = self._launch

    def look(self) -> None:
        with self.looking:
            self.most |= live()  # the greater of both, device by device

    def _launch(self, _: Any, executable: Executable, given: list[Any]) -> list[Any]:
        made = executable.run(given)
        self.look()
        return made

    def _transport(self, channel: Channel) -> Callable[[Any], Any]:
        move = super()._transport(channel)

        def run(values: Any) -> Any:
            out = move(values)
            self.look()
            return out

        return run


def measure(model: str, schedule: str) -> None:
    work = WORKLOADS[model]()
    mesh = shardc.make_mesh(pipe=STAGES)
    fn = shardc.function(
        work.step(lambda _, x: shardc.stage_boundary(x)), mesh=mesh, donate_argnames=("params",),
        pipeline=shardc.Pipeline(schedule=schedule),
    )  # fmt: skip
    params, _ = fn(work.params, work.batch)
    real: PipelineExecutable = fn.compile(params, work.batch).executable
    plan = real.plan
    watched = Watched(plan, [next(m for s, m in zip(plan.stages, real.meshes, strict=True) if s.rank == r)
                             for r in range(STAGES)])  # fmt: skip
    _ = watched.compiled
    jax.block_until_ready(params)
    before = live()
    before.subtract(_on_devices(params))
    out = watched.launch(jax.tree.leaves((params, work.batch)))
    jax.block_until_ready(out)
    for rank in plan.memory.ranks:
        device = jax.devices()[rank.rank]
        report(
            model=model, schedule=schedule, rank=rank.rank,
            live=watched.most[device] - before[device], planned=rank.live_peak, planned_peak=rank.peak,
        )  # fmt: skip


def _on_devices(tree: Any) -> Counter[Any]:
    found: Counter[Any] = Counter()
    for x in jax.tree.leaves(tree):
        found.update(dict.fromkeys(x.sharding.device_set, x.nbytes))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=WORKLOADS)
    options = parser.parse_args()
    for schedule in SCHEDULES:
        measure(options.model, schedule)
