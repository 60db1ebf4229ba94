"""What several processes cost and gain: the same programs in one process and in two.

    python -m benchmarks.processes [--turns 8] [--json FILE]

Three runs are alive at the same time and take turns, so that each turn sees the same load:

- one: one process with 8 CPU devices;
- runtimes: two processes with 4 devices each and a JAX runtime each (`run --islands 2`);
- distributed: the same under one `jax.distributed`.

Each measures the step of a pipeline of two stages on 2 devices each, in tasks that take next to nothing and in tasks of
some milliseconds; psums on devices of its own process and of both; what its agreements take in a call; and, while the
others wait, its first step: plan, compile, run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console

import shardc
from benchmarks.measure import fake_cpu
from benchmarks.tables import new_table
from shardc import S
from shardc.runtime.cluster import current

RUNS = {"one": (1, 1), "runtimes": (2, 2), "distributed": (2, 1)}
"""Processes and JAX runtimes of each."""
DEVICES = 8
WIDTHS = {"step, tiny tasks": (8, 8, 1), "step, tasks of some ms": (384, 256, 2)}
"""Width, rows of a microbatch, layers of a stage."""
MICROBATCHES = 4
SIZES = {"4 KB": 1 << 10, "1 MB": 1 << 18}
"""Floats of a psum's operand on each device."""


# -- in each process of a run


def pipeline(width: int, rows: int, layers: int) -> tuple[Callable[[], float], float]:
    """`step()`, which gives the loss, and the seconds of its first call."""

    def loss_of(params: Any, x: Any) -> Any:
        for i in range(2 * layers):
            x = jnp.tanh(x @ params[f"w{i}"])
            x = shardc.stage_boundary(x) if i == layers - 1 else x
        return jnp.mean(x**2)

    def step(params: Any, x: Any) -> Any:
        loss, grads = shardc.accumulate(jax.value_and_grad(loss_of), microbatches=MICROBATCHES)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    rng = np.random.default_rng(0)
    state = {f"w{i}": (rng.normal(size=(width, width)) / width**0.5).astype(np.float32) for i in range(2 * layers)}
    x = rng.normal(size=(MICROBATCHES * rows, width)).astype(np.float32)
    mesh = shardc.make_mesh(pipe=2, data=2)
    places = {"params": {}, "x": {"data": S(0)}}
    fn = shardc.function(mesh=mesh, pipeline=shardc.Pipeline(), in_placements=places, donate_argnames="params")(step)
    held = [state]

    def call() -> Any:
        held[0], loss = fn(held[0], x)
        return loss

    begin = time.perf_counter()
    float(call())
    return call, time.perf_counter() - begin


def psum(devices: list[Any], floats: int) -> Callable[[], Any]:
    mesh = Mesh(np.asarray(devices), ("d",))
    rows = NamedSharding(mesh, PartitionSpec("d"))
    x = jax.make_array_from_callback((len(devices), floats), rows, lambda _: np.ones((1, floats), np.float32))
    fn = jax.jit(
        jax.shard_map(lambda v: jax.lax.psum(v, "d"), mesh=mesh, in_specs=rows.spec, out_specs=PartitionSpec())
    )
    return lambda: fn(x)


def agreements(floats: int) -> Callable[[], Any] | None:
    """What all processes of a run exchange in a call with a whole value; None in one process."""
    from shardc.execute.process_group import group_of_run, value_facts  # noqa: PLC0415 not in one process

    group, x = group_of_run(), np.ones(floats, np.float32)
    return None if group is None else lambda: group.compare("a call", value_facts(["x"], [x]))


def seconds_of(fn: Callable[[], Any], calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        out = fn()
    if out is not None:
        np.asarray(out)
    return (time.perf_counter() - begin) / calls


def cases_of() -> tuple[dict[str, tuple[Callable[[], Any], int]], dict[str, list[float]]]:
    """What a run measures, each with its number of calls, and the seconds of the first steps."""
    cases: dict[str, tuple[Callable[[], Any], int]] = {}
    found: dict[str, list[float]] = {}
    for what, size in WIDTHS.items():
        call, first = pipeline(*size)
        cases[what] = call, 20 if size[0] < 100 else 5
        found[f"first {what}"] = [first]
    for size, floats in SIZES.items():
        for n in (2, 4):
            cases[f"psum {size}, {n} devices of a process"] = psum(jax.local_devices()[:n], floats), 30
        if jax.process_count() > 1:
            devices = shardc.make_mesh(d=4).devices.ravel().tolist()
            cases[f"psum {size}, 4 devices of 2 processes"] = psum(devices, floats), 30
        if checks := agreements(floats):
            cases[f"agreement in a call, batch of {size}"] = checks, 50
    return cases, found


def work(folder: Path, name: str, turns: int) -> None:
    """Measure in turns; process 0 of the run writes what it has found."""
    cases, found = cases_of()
    run = current()
    first = run is None or run.me == 0
    for turn in range(turns + 1):
        if first:
            (folder / f"{name} waits {turn}").touch()
        while not (folder / f"{name} goes {turn}").exists():
            time.sleep(0.01)
        for what, (fn, calls) in cases.items():
            took = seconds_of(fn, calls)
            if turn:  # the first turn warms up
                found.setdefault(what, []).append(took)
    if first:
        (folder / f"{name}.part").write_text(json.dumps(found))
        (folder / f"{name}.part").rename(folder / f"{name}.json")


# -- the process that starts them


def command(name: str, folder: Path, turns: int) -> list[str]:
    processes, islands = RUNS[name]
    words = ["-m", "benchmarks.processes", "--work", name, "--folder", str(folder), "--turns", str(turns)]
    if processes > 1:
        each = f"--processes {processes} --devices {DEVICES // processes} --islands {islands}"
        words = ["-m", "shardc", "run", *each.split(), *words]
    return [sys.executable, *words]


def wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    while not path.exists():
        if process.poll() is not None:
            raise SystemExit(f"{path.name}: the run ended with exit code {process.returncode}")
        time.sleep(0.01)


def measure(turns: int) -> dict[str, Any]:
    running: dict[str, subprocess.Popen[bytes]] = {}
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        try:
            for name, (processes, _) in RUNS.items():
                env = fake_cpu(DEVICES // processes)
                running[name] = subprocess.Popen(command(name, folder, turns), env=env)
                wait_for(folder / f"{name} waits 0", running[name])
            for turn in range(turns + 1):
                for name in RUNS if turn % 2 else reversed(RUNS):
                    (folder / f"{name} goes {turn}").touch()
                    after = f"{name} waits {turn + 1}" if turn < turns else f"{name}.json"
                    wait_for(folder / after, running[name])
            return {name: json.loads((folder / f"{name}.json").read_text()) for name in RUNS}
        finally:
            for process in running.values():
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()


def show(found: Mapping[str, Mapping[str, list[float]]], console: Console) -> None:
    table = new_table("ms: median (least)", "what", *RUNS)
    for what in dict.fromkeys(w for each in found.values() for w in each):
        cells = [
            f"{1e3 * statistics.median(times):.2f} ({1e3 * min(times):.2f})"
            if (times := found[name].get(what))
            else "-"
            for name in RUNS
        ]
        table.add_row(what, *cells)
    console.print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--json", type=Path, help="write the seconds to this file")
    parser.add_argument("--work", choices=list(RUNS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.folder, options.work, options.turns)
        sys.exit()
    result = measure(options.turns)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    show(result, Console(width=120))
