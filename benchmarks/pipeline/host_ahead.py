"""Whether the host works for all stages at once: `python -m benchmarks.pipeline.host_ahead`. Started by tables.py.

Every actor has h seconds of host work in a step and the devices nothing to do. The work is a sleep, so that it needs
no processor: what Python computes itself holds the GIL, and no runtime in one process can do that for two at a time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from benchmarks.measure import report
from shardc.pipeline.schedule.costs import StageCosts
from shardc.pipeline.schedule.credits import auto_credits
from shardc.pipeline.schedule.methods import METHODS
from shardc.pipeline.schedule.network import network
from shardc.runtime.actor import Network
from shardc.runtime.executor import Executor, Task

HOST, MICROBATCHES = 0.2, 16
"""Seconds of host work of an actor in a step."""


def one_f1b(stages: int) -> Network:
    net = network(METHODS["1f1b"].orders(stages, MICROBATCHES, 1, StageCosts()))
    return net.with_registers(auto_credits(net, lambda _: 1.0, lambda _: (0.0, 0.0)))


def step(stages: int, where: str, turns: int) -> float:
    """Seconds of a step, with the host work before the inputs are waited for (`prepare`) or after (`run`)."""
    net = one_f1b(stages)
    gives = {s.label: [None] * len(s.gives) for row in net.actors for s in row}
    nap = HOST / len(net.actors[0])

    def work(_: Any) -> None:
        time.sleep(nap)

    def run(label: Any) -> Any:
        def launch(values: list[Any]) -> list[None]:
            if where == "run":
                work(values)
            return gives[label]

        return launch

    with Executor(net, lambda label: Task(run(label), work if where == "prepare" else None)) as executor:
        executor.run()
        times: list[float] = []
        for _ in range(turns):
            start = time.perf_counter()
            executor.run()
            times.append(time.perf_counter() - start)
    return statistics.median(times)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=9)
    options = parser.parse_args()
    for stages in (1, 2, 4, 8):
        found = {where: step(stages, where, options.turns) for where in ("prepare", "run")}
        report(stages=stages, host=HOST, **found)
