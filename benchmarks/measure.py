"""Two sides of one comparison: calls by turns, and what moves in their compiled programs."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from shardc.passes.audit.hlo import parse_collectives

MIB = 2**20


@dataclass(frozen=True)
class Pair:
    """Times of two sides that were called by turns.

    Attributes:
      ours, peer: median seconds of a call.
      ratio: median of the ratios within each turn; low and high are the least and the greatest of them.
    """

    ours: float
    peer: float
    ratio: float
    low: float
    high: float


def by_turns(ours: Callable[[], float], peer: Callable[[], float], turns: int) -> Pair:
    """Calls both sides `turns` times, A B then B A, after one turn that is not counted. A side gives its seconds."""
    ours(), peer()
    times: list[tuple[float, float]] = []
    for i in range(turns):
        if i % 2:
            late = peer()
            times.append((ours(), late))
        else:
            times.append((ours(), peer()))
    return pair_of(times)


def pair_of(times: Iterable[tuple[float, float]]) -> Pair:
    ours, peer = zip(*times, strict=True)
    ratios = [a / b for a, b in zip(ours, peer, strict=True)]
    return Pair(*map(statistics.median, (ours, peer, ratios)), min(ratios), max(ratios))


class Loop:
    """A training step that is fed its own results. Calling it runs it `steps` times and gives the seconds of one."""

    def __init__(self, step: Callable[..., tuple], state: Iterable[Any], batch: Any, steps: int = 1) -> None:
        self.step, self.state, self.batch, self.steps = step, tuple(state), batch, steps
        self.losses: list[Any] = []

    def __call__(self) -> float:
        import jax  # noqa: PLC0415 the environment is set before JAX is imported

        start = time.perf_counter()
        for _ in range(self.steps):
            *state, loss = self.step(*self.state, self.batch)
            self.state = tuple(state)
            self.losses.append(loss)
        jax.block_until_ready((self.state, loss))
        return (time.perf_counter() - start) / self.steps


def losses_of(loop: Loop) -> np.ndarray:
    return np.asarray([float(x) for x in loop.losses])


def moved(hlo: str) -> Counter[str]:
    """Bytes that a device sends in one call of a compiled program, by kind of collective."""
    found: Counter[str] = Counter()
    for op in parse_collectives(hlo):
        found[op.kind] += op.bytes * (op.trips or 1)
    return found


def operations(hlo: str) -> Counter[str]:
    """Collectives that one call of a compiled program executes, by kind. XLA has combined what it could."""
    found: Counter[str] = Counter()
    for op in parse_collectives(hlo):
        found[op.kind] += op.trips or 1
    return found


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


# --- what a process of a benchmark tells the one that started it ----------------------------------------------------

MARK = "benchmark result: "


def report(**values: Any) -> None:
    """Prints values for the process that prints the tables."""
    print(MARK + json.dumps(values, default=asdict), flush=True)


def results(output: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix(MARK)) for line in output.splitlines() if line.startswith(MARK)]


def fake_cpu(devices: int) -> Mapping[str, str]:
    """The environment in which JAX cuts this machine's CPU in `devices`."""
    flags = os.environ.get("XLA_FLAGS", "")
    return os.environ | {
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={devices}".strip(),
        "NPROC": str(2 * devices),  # fewer threads, and collectives wait for each other for ever
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH", "")))),
    }


def warn(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
