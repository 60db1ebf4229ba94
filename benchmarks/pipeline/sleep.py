"""Fake devices that sleep 20 ms a task, against the simulator: `python -m benchmarks.pipeline.sleep`.

Started by tables.py with four fake devices. Every schedule by its plain chain of stages, tasks in Python; then a real
function through `shardc.function`, whose forward, input gradient and weight gradient call back and sleep.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

import shardc
from benchmarks.measure import report
from shardc.pipeline.schedule.costs import StageCosts
from shardc.pipeline.schedule.credits import auto_credits
from shardc.pipeline.schedule.methods import METHODS
from shardc.pipeline.schedule.network import network
from shardc.pipeline.schedule.simulate import simulate
from shardc.runtime.actor import Network
from shardc.runtime.executor import Executor, Task

NAP = 0.02
"""Seconds of a task."""
RANKS, MICROBATCHES = 4, 16
COMPILED = ("1f1b", "zb-h1")


def best(call: Callable[[], Any], turns: int) -> list[float]:
    times: list[float] = []
    for _ in range(turns):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


# --- tasks in Python -------------------------------------------------------------------------------------------------


def by_executor(name: str, turns: int) -> None:
    """Registers are the fewest that keep the best time."""
    method = METHODS[name]
    schedule = method.orders(RANKS, MICROBATCHES, method.chunks, StageCosts())
    net = network(schedule)
    net = net.with_registers(auto_credits(net, lambda _: NAP, lambda _: (0.0, 0.0)))
    planned = simulate(net, lambda _: NAP).makespan
    with Executor(net, lambda label: sleeping(net, label)) as executor:
        times = best(executor.run, turns)
        ran = executor.run(record=True)
    expected = [label for row in simulate(net, lambda _: NAP).order() for label in row]
    assert [span.label for span in ran] == expected, name
    report(what="tasks in Python", schedule=name, planned=planned, times=times, actions=len(expected))


def sleeping(net: Network, label: Any) -> Task:
    gives = next(len(step.gives) for row in net.actors for step in row if step.label == label)

    def run(_: list[Any]) -> list[None]:
        time.sleep(NAP)
        return [None] * gives

    return Task(run)


# --- compiled tasks --------------------------------------------------------------------------------------------------


def nap(x):
    """x, after a while: the host sleeps as a device would compute."""

    def called(x):
        time.sleep(NAP)
        return np.asarray(x)

    return jax.pure_callback(called, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@jax.custom_vjp
def layer(w, x):
    return nap(x) * w


def forward(w, x):
    return layer(w, x), (w, x)


def backward(saved, ct):
    w, x = saved
    return nap(x * ct).sum(0), nap(ct) * w


layer.defvjp(forward, backward)


def by_function(name: str, turns: int) -> None:
    def loss(params, x):
        for i, w in enumerate(params):
            x = layer(w, x)
            x = shardc.stage_boundary(x) if i < RANKS - 1 else x
        return x.mean()

    def step(params, x):
        value, grads = shardc.accumulate(jax.value_and_grad(loss), microbatches=MICROBATCHES)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    mesh = shardc.make_mesh(pipe=RANKS)
    fn = shardc.function(step, mesh=mesh, pipeline=shardc.Pipeline(schedule=name))
    args = [jnp.ones(4) for _ in range(RANKS)], jnp.ones((MICROBATCHES, 4))
    plan = fn.plan(*args)

    def cost(label: Any) -> float:
        task = plan.built.task(label)
        return 0.0 if task is None or task.plan is None else NAP * naps(task.plan.boxed.jaxpr)

    planned = simulate(plan.network, cost).makespan
    jax.block_until_ready(fn(*args))
    times = best(lambda: jax.block_until_ready(fn(*args)), turns)
    report(
        what="compiled tasks", schedule=name, planned=planned, times=times,
        actions=sum(len(row) for row in plan.schedule.rows),
    )  # fmt: skip


def naps(jaxpr: Any) -> int:
    """Callbacks in a program."""
    inner = sum(map(naps, (j for e in jaxpr.eqns for j in jax.extend.core.jaxprs_in_params(e.params))))
    return inner + sum(e.primitive.name == "pure_callback" for e in jaxpr.eqns)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5, help="of which the best counts")
    parser.add_argument("--only", nargs="*", default=list(METHODS))
    options = parser.parse_args()
    for name in options.only:
        by_executor(name, options.turns)
    for name in COMPILED:
        if name in options.only:
            by_function(name, options.turns)
