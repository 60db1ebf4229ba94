"""What dataflows cost, and whether simulated rounds take as long as measured ones. benchmarks/flows.md has the results.

    python -m benchmarks.flows [--rounds 1000] [--turns 5] [--only overhead rounds]

`overhead`: flows of tiny functions beside a hand-written loop of the same calls, by turns; and the same network with
tasks that do nothing. `rounds`: flows of the shape of the examples whose work is `time.sleep`. Four fake CPU devices.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import shardc
from examples.train import fake_cpu_devices
from shardc.dataflow.moves import giving, on_host, ways_of
from shardc.runtime.executor import Executor, Task

F32 = jax.ShapeDtypeStruct((), np.float32)

# -- overhead


def add_one(x):
    return x + 1


def mean_of(x, xs):
    return x + sum(xs) / len(xs)


def meshes(count: int) -> list[Mesh]:
    return [Mesh(np.array([d]), ("data",)) for d in jax.devices()[:count]]


def chain_of_functions() -> tuple[Any, Callable[[Any], Any]]:
    """Four functions on one mesh."""
    steps = [shardc.function(add_one, mesh=meshes(1)[0]) for _ in range(4)]

    def loop(x):
        for step in steps:
            x = step(x)
        return x

    return loop, loop


def two_meshes() -> tuple[Any, Callable[[Any], Any]]:
    """A function on each of two meshes, and the moves between them."""
    one, two = meshes(2)
    first, second = shardc.function(add_one, mesh=one), shardc.function(add_one, mesh=two)

    def loop(x):
        return shardc.put(second(shardc.put(first(x), two, {})), one, {})

    return lambda x: second(first(x)), loop


def chain_of_host() -> tuple[Any, Callable[[Any], Any]]:
    """Four host functions, each in a thread of its own, that wait for one another."""
    steps = [shardc.host(add_one, gives=F32) for _ in range(4)]

    def loop(x):
        for step in steps:
            x = step(x)
        return x

    return loop, loop


def workers() -> tuple[Any, Callable[[Any], Any]]:
    """Three readers on the host, three workers on meshes of their own, and a server."""
    *mine, server = meshes(4)
    grads = [shardc.function(add_one, mesh=m) for m in mine]
    read, update = shardc.host(np.cos, gives=F32), shardc.function(mean_of, mesh=server)

    def flow(x):
        late = shardc.late(x, 1)
        return update(x, [g(read(late)) for g in grads])

    def loop(x):
        return update(x, [shardc.put(g(read(np.asarray(x))), server, {}) for g in grads])

    return flow, loop


def fleet() -> tuple[Any, Callable[[Any], Any]]:
    """Sixteen simulators on the host and a learner on a mesh."""
    learn = shardc.function(mean_of, mesh=meshes(1)[0])
    play = shardc.host(lambda copy, x: np.cos(x + copy), gives=F32, copies=16)
    alone = [partial(play.fn, i) for i in range(16)]

    def loop(x):
        here = np.asarray(x)
        return learn(x, np.stack([p(here) for p in alone]))

    return lambda x: learn(x, play(shardc.late(x, 1))), loop


SHAPES = (chain_of_functions, two_meshes, chain_of_host, workers, fleet)


def overhead(make: Callable[[], tuple[Any, Any]], rounds: int, turns: int) -> dict[str, Any]:
    """Seconds of a round: the hand-written loop, the flow, the flow's network with empty tasks."""
    body, loop = make()

    @shardc.flow
    def flow(x):
        return body(x), None

    start = np.float32(0)
    plan = flow.plan(start)
    gives = {s.label: [None] * len(s.gives) for row in plan.network.actors for s in row}

    def by_hand() -> None:
        x: Any = start
        for _ in range(rounds):
            x = loop(x)
        jax.block_until_ready(x)

    def as_flow() -> None:
        jax.block_until_ready(flow.run(start, rounds=rounds)[0])

    firsts = {m: [None] * plan.network.first_messages().count(m) for m in plan.network.first_messages()}
    with Executor(plan.network, lambda label: Task(lambda _: gives[label])) as executor:
        empty = partial(executor.run, rounds=rounds, first=firsts)
        took: dict[str, list[float]] = {"hand": [], "flow": [], "empty": []}
        for turn in range(turns + 1):
            for name, run in (("hand", by_hand), ("flow", as_flow), ("empty", empty)):
                begin = time.perf_counter()
                run()
                if turn:
                    took[name].append((time.perf_counter() - begin) / rounds)
    flow.close()
    found = {name: statistics.median(times) for name, times in took.items()}
    nodes = len(plan.nodes) - 1
    return {**found, "nodes": nodes, "actors": len(plan.built.rows), "each": (found["flow"] - found["hand"]) / nodes}


def parts(calls: int) -> dict[str, float]:
    """Seconds of what a step of a flow does besides its call, alone and in one thread."""
    mesh = meshes(1)[0]
    step, read = shardc.function(add_one, mesh=mesh), shardc.host(add_one, gives=F32)

    @shardc.flow
    def flow(x):
        return step(read(x)), None

    plan = flow.plan(np.float32(0))
    reading, stepping = (n.work for n in plan.nodes[1:])
    here, there = np.float32(0), step(np.float32(0))
    moves = [giving(ways_of(e, None, None, False), near=True) for e in plan.edges if e.moves]
    to_host, to_mesh = (next(m for m, e in zip(moves, plan.edges, strict=False) if e.giver.name == n)
                        for n in ("add_one#2", "add_one"))  # fmt: skip

    def x64() -> None:
        with jax.enable_x64(False):
            pass

    measured = {
        "a plain call of the function": partial(step, there),
        "the call as a node": lambda: stepping.run([there], 0),
        "a host function as a node: arguments, and whether the result is as declared": lambda: reading.run([here], 0),
        "JAX's 64-bit setting": x64,
        "host to mesh": lambda: to_mesh((here,)),
        "mesh to host, begun": lambda: to_host((there,)),
        "mesh to host, waited for": lambda: on_host([there]),
    }
    found: dict[str, float] = {}
    for name, run in measured.items():
        for _ in range(2):  # the first time is not counted
            begin = time.perf_counter()
            for _ in range(calls):
                run()
            found[name] = (time.perf_counter() - begin) / calls
    return found


# -- rounds whose work is to sleep


def seconds_of(name: str, copy: int, round: int) -> float:
    """The seconds of a node in a round: the same in the run and in the simulator."""
    rng = np.random.default_rng([sum(map(ord, name)), copy, round])
    tails = {"play": 0.8, "count": 0.4}
    means = {"play": 0.02, "learn": 0.01, "step": 0.02, "count": 0.025, "reduce": 0.01, "evaluate": 0.08}
    if name == "read":
        return 0.05 if round % 4 == 3 else 0.005
    return means[name] * (rng.lognormal(0.0, tails[name]) if name in tails else 1.0)


def sleeper(name: str, **options: Any) -> Any:
    """A host function that sleeps; its last argument is the round."""

    def work(*args: Any) -> np.float32:
        time.sleep(seconds_of(name, int(args[0]) if options.get("copies") else 0, int(args[-1])))
        return np.float32(0)

    work.__name__ = name
    return shardc.host(work, gives=F32, **options)


def rl(late: int) -> Any:
    play, learn = sleeper("play", copies=16), sleeper("learn")
    evaluate = shardc.every(10, sleeper("evaluate"))

    @shardc.flow(credits=max(2, late + 1))
    def train(state, round):
        state = learn(state, play(shardc.late(state, late), round), round)
        return state, evaluate(state, round)

    return train


def loader(credits: int) -> Any:
    read, step = sleeper("read", credits=credits), sleeper("step")
    evaluate = shardc.every(10, sleeper("evaluate"))

    @shardc.flow
    def train(state, round):
        state = step(state, read(round), round)
        return state, evaluate(state, round)

    return train


def map_reduce(copies: int) -> Any:
    count, reduce = sleeper("count", copies=copies), sleeper("reduce")

    @shardc.flow
    def counted(state, round):
        return reduce(state, count(round), round), None

    return counted


FLOWS = {
    "rl, synchronous": (rl, 0),
    "rl, 1 late": (rl, 1),
    "rl, 2 late": (rl, 2),
    "loader, 1 ahead": (loader, 1),
    "loader, 4 ahead": (loader, 4),
    "map_reduce, 4 readers": (map_reduce, 4),
}


def sleeps(plan: Any) -> dict[str, Any]:
    """For each node the seconds of its runs, in order, and those in Python: who sleeps is never there."""

    def runs(name: str, copy: int, every: int) -> Iterator[tuple[float, float]]:
        return ((seconds_of(name, copy, r), 0.0) for r in range(every - 1, 1 << 30, every))

    each: dict[str, Any] = {}
    for node in plan.nodes[1:]:
        name, _, rest = node.name.partition("[")
        if not name.endswith("together"):
            each[node.name] = runs(name, int(rest[:-1] or 0) if rest else 0, node.every).__next__
    return each


def rounds_of(make: Callable[[int], Any], option: int, rounds: int) -> tuple[float, float, float]:
    """Seconds of a round, simulated and measured, and the seconds in which a million rounds are simulated."""
    flow, start = make(option), np.float32(0)
    plan = flow.plan(start, 0)
    flow.run(start, range(2))  # starts the threads
    begin = time.perf_counter()
    flow.run(start, range(rounds))
    measured = (time.perf_counter() - begin) / rounds
    flow.close()
    begin = time.perf_counter()
    plan.seconds_of(1_000_000, seconds={n.name.partition("[")[0]: (0.01, 0.0) for n in plan.nodes[1:]})
    million = time.perf_counter() - begin
    return plan.simulate(rounds, seconds=sleeps(plan)).makespan / rounds, measured, million


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1000, help="without work; a tenth of them where nodes sleep")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=("overhead", "rounds"), default=("overhead", "rounds"))
    options = parser.parse_args()
    fake_cpu_devices(4)
    if "overhead" in options.only:
        print("us a round                nodes  actors   by hand    flow   empty tasks   more for each node")
        for make in SHAPES:
            row = overhead(make, options.rounds, options.turns)
            hand, flow, empty, each = (f"{1e6 * row[k]:9.0f}" for k in ("hand", "flow", "empty", "each"))
            print(f"  {make.__name__:22} {row['nodes']:6} {row['actors']:7} {hand} {flow[2:]} {empty:>13} {each:>20}")
        print("us                          of a step's parts, alone")
        for name, took in parts(2 * options.rounds).items():
            print(f"  {1e6 * took:8.1f}  {name}")
    if "rounds" in options.only:
        print("ms a round                simulated  measured   measured : simulated   ms to simulate a million rounds")
        for name, (make, option) in FLOWS.items():
            simulated, measured, million = rounds_of(make, option, max(20, options.rounds // 10))
            figures = f"{1e3 * simulated:10.2f} {1e3 * measured:9.2f} {measured / simulated:12.3f}"
            print(f"  {name:22} {figures} {1e3 * million:23.1f}")


if __name__ == "__main__":
    main()
