"""What the machinery of pipelines costs: overhead per action in its parts, and the simulator on a million actions.

    python -m benchmarks.actors [--turns 20] [--actions 1000000]

Tasks do nothing, so all that is measured is ours (and Python's threads'). Prints lines of its own; needs no devices.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

from shardc.pipeline.schedule.costs import StageCosts
from shardc.pipeline.schedule.methods import METHODS
from shardc.pipeline.schedule.network import network
from shardc.pipeline.schedule.simulate import simulate
from shardc.runtime.actor import Network
from shardc.runtime.deadlock import find_deadlock, run_without_time
from shardc.runtime.executor import Executor, Task
from shardc.runtime.mailbox import Mailbox


def one_f1b(ranks: int, microbatches: int) -> Network:
    schedule = METHODS["1f1b"].orders(ranks, microbatches, 1, StageCosts())
    stash = [ranks - i for i in range(ranks)]
    return network(schedule, registers={"stash": stash, "activation": 2, "gradient": 2})


def per_call(call: Callable[[], object], turns: int, calls: int) -> tuple[float, float]:
    """Median and least seconds of `call`, divided by `calls`."""
    times: list[float] = []
    for _ in range(turns + 1):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times[1:]), min(times[1:])


def overhead(net: Network, turns: int) -> tuple[float, float]:
    gives = {step.label: [None] * len(step.gives) for row in net.actors for step in row}
    actions = sum(map(len, net.actors))
    with Executor(net, lambda label: Task(lambda _: gives[label])) as executor:
        return per_call(executor.run, turns, actions)


def post(mailbox: Mailbox, messages: int) -> None:
    """What goes through a mailbox that nobody waits at."""
    for i in range(messages):
        mailbox.credit(1, i)
    mailbox.clear(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--actions", type=int, default=1_000_000)
    options = parser.parse_args()
    net = one_f1b(4, 64)
    rows = {
        "the machine, no threads (4 ranks, 64 microbatches)": per_call(
            lambda: run_without_time(net), options.turns, 512
        ),
        "one message through a mailbox": per_call(lambda: post(Mailbox(), 1000), options.turns, 1000),
        "executor, 1 actor": overhead(one_f1b(1, 256), options.turns),
        "executor, 4 actors, 64 microbatches": overhead(net, options.turns),
        "executor, 4 actors, 1 microbatch: every action wakes a thread": overhead(one_f1b(4, 1), options.turns),
    }
    print("us per action          median   least")
    for name, (middle, least) in rows.items():
        print(f"  {middle * 1e6:8.2f} {least * 1e6:8.2f}  {name}")
    start = time.perf_counter(), time.process_time()
    big = one_f1b(8, options.actions // 16)
    built = time.perf_counter(), time.process_time()
    timeline = simulate(big, StageCosts(), lambda _: (0.5, 0.1))
    ran = time.perf_counter(), time.process_time()
    assert timeline.makespan
    assert find_deadlock(big) is None
    proved = time.perf_counter(), time.process_time()
    print(f"s for {sum(map(len, big.actors))} actions      wall     CPU")
    for name, a, b in (("order and network", start, built), ("simulate", built, ran), ("find_deadlock", ran, proved)):
        print(f"  {b[0] - a[0]:8.2f} {b[1] - a[1]:8.2f}  {name}")


if __name__ == "__main__":
    main()
