"""Rounds whose nodes share a device, a link or an interpreter, simulated and measured; see benchmarks/turns.md.

    python -m benchmarks.turns [--rounds 20] [--turns 3] [--scale 1]

The devices are fake ones that sleep, so that they do not share the cores of this machine; calls of Python sleep without
giving up the interpreter. The nodes of `sparse` do more than sleep: their seconds are recorded with one worker. Links
are not measured, because fake devices have none: their rows are arithmetic.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import shardc
from examples import dlrm, ps_sparse
from examples.train import fake_cpu_devices
from shardc.machine.mesh import view

F32 = jax.ShapeDtypeStruct((), np.float32)
DEVICES = 8
SECONDS = {"change": 0.02, "work": 0.03, "play": 0.02, "pull": 0.01, "grad": 0.03, "push": 0.02}


def nap(x: Any, seconds: float) -> Any:
    """x, after a while: the host sleeps as a device would compute."""

    def called(x: Any) -> Any:
        time.sleep(seconds)
        return np.asarray(x)

    return jax.pure_callback(called, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def one(number: int) -> Mesh:
    return Mesh(np.array(jax.devices()[number : number + 1]), ("data",))


def named(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    fn.__name__ = name
    return fn


def server(n: int, scale: float) -> Any:
    """Workers that read a state on one device, compute, and change it; nobody is more than a round ahead."""
    held = shardc.shared(jnp.zeros(()), on=one(DEVICES - 1))
    change = named("change", lambda w, g: w + nap(g, scale * SECONDS["change"]))
    work = [shardc.function(named("work", lambda w: nap(w, scale * SECONDS["work"])), mesh=one(k)) for k in range(n)]

    @shardc.flow
    def train(state: Any, round: Any) -> Any:
        for f in work:
            held.change(change, f(held.read(stale=1)), stale=1)
        return state, None

    return train


def fleet(n: int, scale: float) -> Any:
    """Calls in threads that never give up the interpreter."""
    usleep = ctypes.PyDLL(None).usleep  # a PyDLL keeps the interpreter, as Python does

    def play(copy: int, round: Any) -> np.float32:
        usleep(int(1e6 * scale * SECONDS["play"]))
        return np.float32(copy)

    played = shardc.host(play, gives=F32, copies=n)

    @shardc.flow
    def train(state: Any, round: Any) -> Any:
        return state, played(round)

    return train


def sparse(n: int, scale: float) -> Any:
    """examples/ps_sparse.py with one more sleep in each of its functions."""

    @jax.custom_vjp
    def slow(x: Any) -> Any:
        return nap(x, scale * SECONDS["grad"])

    slow.defvjp(lambda x: (slow(x), None), lambda _, ct: (ct,))

    def slowed(name: str, state: Any) -> Any:
        return {**state, "table": state["table"].at[0, 0].add(0 * nap(state["table"][0, 0], scale * SECONDS[name]))}

    functions = {
        "pull": named("pull", lambda state, ids: slowed("pull", ps_sparse.pull(state, ids))),
        "push": named("push", lambda state, grads, ids: slowed("push", ps_sparse.push(state, grads, ids))),
        "loss": lambda params, batch: slow(ps_sparse.loss(params, batch)),
    }
    make: Any = FunctionType(ps_sparse.make.__code__, {**vars(ps_sparse), **functions})
    return make(dlrm.CONFIGS["tiny"], n, 2, 64, 256)[1]


PROGRAMS: dict[str, tuple[Callable[[int, float], Any], tuple[int, ...]]] = {
    "server": (server, (1, 2, 4, 6)),
    "python": (fleet, (1, 2, 4, 8)),
    "sparse": (sparse, (1, 2, 3)),
}


def names_of(plan: Any) -> set[str]:
    return {str(node).partition("[")[0] for node in plan.nodes}


def alone_of(make: Callable[[int, float], Any], scale: float) -> dict[str, float]:
    """The seconds of each node in a recorded run of one worker."""
    flow = make(1, scale)
    flow.run((), range(3))
    _, given = flow.run((), range(8), record=True)
    flow.close()
    return given.seconds


def rounds_of(
    make: Callable[[int, float], Any], n: int, rounds: int, turns: int, scale: float, alone: dict[str, float]
) -> tuple[float, float, str]:
    """Seconds of a round, simulated, and measured in the best of some runs; and what the plan calls busiest.

    Args:
      make, n, scale: the flow.
      rounds, turns: of a run, and how many.
      alone: the seconds of nodes that do more than sleep, as recorded with one worker.
    """
    flow = make(n, scale)
    plan = flow.plan((), 0)
    seconds = alone if make is sparse else {name: scale * SECONDS[name] for name in SECONDS if name in names_of(plan)}
    line = plan.timeline(seconds=seconds).splitlines()[1]
    busiest = line.partition(" rounds; ")[2].partition(" is busiest")[0]
    flow.run((), range(3))
    measured: list[float] = []
    for _ in range(turns):
        begin = time.perf_counter()
        flow.run((), range(rounds))
        measured.append((time.perf_counter() - begin) / rounds)
    flow.close()
    return plan.simulate(rounds, seconds=seconds).makespan / rounds, min(measured), busiest


def links(n: int) -> tuple[float, float]:
    """n devices that each send 16 MiB to another one in a round: simulated seconds, and bytes over bandwidth."""
    large = jax.ShapeDtypeStruct((1 << 22,), jnp.float32)
    make = [shardc.function(lambda x: x + 1, mesh=one(k)) for k in range(n)]
    take = shardc.function(lambda xs: sum(x[0] for x in xs), mesh=one(DEVICES - 1))

    @shardc.flow
    def train(state: Any) -> Any:
        state = [f(x) for f, x in zip(make, state, strict=True)]
        return state, take(state)

    plan = train.plan([large] * n)
    quick = dict.fromkeys((str(node) for node in plan.nodes), 0.0)
    return plan.seconds_of(200, seconds=quick) / 200, n * (16 << 20) / view(one(0)).link.bandwidth


def rows(rounds: int, turns: int, scale: float, only: list[str]) -> Iterator[tuple[str, int, float, float, str]]:
    """For each program and size: name, size, simulated and measured seconds of a round, what is busiest."""
    for name in only:
        make, sizes = PROGRAMS[name]
        alone = alone_of(make, scale) if make is sparse else {}
        for n in sizes:
            yield name, n, *rounds_of(make, n, rounds, turns, scale, alone)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--turns", type=int, default=3, help="runs, of which the best counts")
    parser.add_argument("--scale", type=float, default=1.0, help="of all sleeps: longer ones on a busy machine")
    parser.add_argument("--only", nargs="*", choices=tuple(PROGRAMS), default=tuple(PROGRAMS))
    options = parser.parse_args()
    fake_cpu_devices(DEVICES)
    print("ms a round            n   simulated  measured   measured : simulated   busiest")
    for name, n, simulated, measured, busiest in rows(options.rounds, options.turns, options.scale, options.only):
        figures = f"{1e3 * simulated:11.1f} {1e3 * measured:9.1f} {measured / simulated:14.3f}"
        print(f"  {name:18} {n:2} {figures}           {busiest}", flush=True)
    print("ms a round            n   simulated  bytes : bandwidth")
    for n in (1, 2, 4, 6):
        simulated, exact = links(n)
        print(f"  {'links':18} {n:2} {1e3 * simulated:11.1f} {1e3 * exact:9.1f}")


if __name__ == "__main__":
    main()
