"""Explicit finite differences as people write them: what is sent, and step times beside `jax.jit`.

    python -m benchmarks.stencils [--turns N] [--steps N] [--only /2/]
    python -m benchmarks.stencils --planned           # bytes on 8 and 64 v5p devices, beside a halo by hand

Heat, wave, upwind advection and lattice Boltzmann (Bhatnagar, Gross and Krook 1954) in one, two and three dimensions,
with walls by `.at[].set`, by padding, by `where`, and around by `roll`. The first dimension of space is split.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

import shardc
from benchmarks.measure import Pair, by_turns, fake_cpu
from benchmarks.measure import moved as sent
from benchmarks.tables import new_table
from shardc import Placement, S

DEVICES = 8

WALLS = ("set", "pad", "where", "roll")
EQUATIONS = ("heat", "wave", "advection", "lattice")
GRIDS = {1: (2**20,), 2: (1024, 1024), 3: (128, 128, 64)}
"""Sizes for step times."""
LARGE = {1: (2**24,), 2: (8192, 8192), 3: (1024, 1024, 1024)}
"""Sizes for plans."""


def shifted(u: Any, by: int, d: int, walls: str) -> Any:
    """Element i is u[i - by]; from outside comes the other end (roll, where), zero (pad), or what was (set)."""
    if walls in ("roll", "where"):
        return jnp.roll(u, by, d)
    inner, outer = (slice(None, -by), slice(by, None)) if by > 0 else (slice(-by, None), slice(None, by))
    at = (slice(None),) * d
    if walls == "set":
        return u.at[(*at, outer)].set(u[(*at, inner)])
    return jnp.pad(u, [(max(by, 0), max(-by, 0)) if k == d else (0, 0) for k in range(u.ndim)])[(*at, inner)]


def inside(u: Any) -> Any:
    """A mask: where the array has all neighbours."""
    mask = jnp.ones(u.shape, bool)
    for d, n in enumerate(u.shape):
        i = jnp.arange(n).reshape([n if k == d else 1 for k in range(u.ndim)])
        mask &= (i > 0) & (i < n - 1)
    return mask


def moved(u: Any, change: Callable[[Callable[[int, int], Any]], Any], walls: str) -> Any:
    """u + change(at), where at(d, k) is u moved by k elements along d."""
    middle = [slice(1, -1)] * u.ndim

    def window(q: Any) -> Callable[[int, int], Any]:
        def at(d: int, k: int) -> Any:
            side = list(middle)
            side[d] = slice(1 + k, q.shape[d] - 1 + k)
            return q[tuple(side)]

        return at

    if walls == "set":
        return u.at[tuple(middle)].add(change(window(u)))
    if walls == "pad":
        return u + change(window(jnp.pad(u, 1)))
    new = u + change(lambda d, k: jnp.roll(u, -k, d) if k else u)
    return jnp.where(inside(u), new, u) if walls == "where" else new


def laplacian(at: Callable[[int, int], Any], rank: int) -> Any:
    return sum((at(d, 1) + at(d, -1) - 2 * at(d, 0) for d in range(rank)), start=jnp.zeros(()))


def heat(u: Any, walls: str) -> Any:
    return moved(u, lambda at: 0.1 * laplacian(at, u.ndim), walls)


def wave(state: Any, walls: str) -> Any:
    """Leapfrog: now and before."""
    u, before = state
    return heat(u, walls) + u - before, u


def advection(u: Any, walls: str) -> Any:
    """Upwind."""
    return moved(u, lambda at: -0.1 * sum((at(d, 0) - at(d, -1) for d in range(u.ndim)), start=jnp.zeros(())), walls)


def directions(rank: int) -> list[tuple[int, ...]]:
    """D1Q3, D2Q9, D3Q19."""
    return [c for c in itertools.product((0, 1, -1), repeat=rank) if sum(map(abs, c)) <= 2]


def lattice(f: Any, walls: str) -> Any:
    """Collision, then streaming; `f` has a row for each direction."""
    c = jnp.asarray(directions(f.ndim - 1), f.dtype)
    weights = jnp.asarray([{0: 4.0, 1: 1.0, 2: 0.25}[sum(map(abs, e))] for e in directions(f.ndim - 1)], f.dtype)
    density = f.sum(0)
    speed = jnp.tensordot(c.T, f, 1) / density
    along = jnp.tensordot(c, speed, 1)
    shape = (-1, *[1] * density.ndim)
    rest = (
        (weights / weights.sum()).reshape(shape) * density * (1 + 3 * along + 4.5 * along**2 - 1.5 * (speed**2).sum(0))
    )
    f = f + 0.6 * (rest - f)
    found: list[Any] = []
    for row, e in zip(f, directions(density.ndim), strict=True):
        new = row
        for d, by in enumerate(e):
            new = shifted(new, by, d, walls) if by else new
        found.append(jnp.where(inside(row), new, row) if walls == "where" else new)
    return jnp.stack(found)


@dataclass(frozen=True)
class Case:
    """One stencil."""

    equation: str
    rank: int
    walls: str
    gradient: bool = False

    @property
    def name(self) -> str:
        return f"{self.equation}/{self.rank}/{self.walls}{'/gradient' if self.gradient else ''}"

    def state(self, sizes: tuple[int, ...]) -> Any:
        """Types of the state."""
        field = jax.ShapeDtypeStruct(sizes, jnp.float32)
        if self.equation == "lattice":
            return jax.ShapeDtypeStruct((len(directions(self.rank)), *sizes), jnp.float32)
        return (field, field) if self.equation == "wave" else field

    @property
    def placement(self) -> Any:
        rows = {"data": S(1 if self.equation == "lattice" else 0)}
        return (rows, rows) if self.equation == "wave" else rows

    def step(self, state: Any) -> Any:
        """The next state; or the gradient of half the sum of its squares."""
        forward = {"heat": heat, "wave": wave, "advection": advection, "lattice": lattice}[self.equation]
        if not self.gradient:
            return forward(state, self.walls)
        return jax.grad(lambda s: sum(0.5 * (x**2).sum() for x in jax.tree.leaves(forward(s, self.walls))))(state)

    @property
    def planes(self) -> int:
        """Planes that a device sends by hand: one each way, or for each direction that crosses the cut."""
        once = {"heat": 2, "wave": 2, "advection": 1, "lattice": sum(e[0] != 0 for e in directions(self.rank))}
        return once[self.equation] * (2 if self.gradient else 1)


def cases() -> Iterator[Case]:
    for gradient, equation, rank, walls in itertools.product((False, True), EQUATIONS, (1, 2, 3), WALLS):
        yield Case(equation, rank, walls, gradient)


def planned(case: Case, devices: int, sizes: tuple[int, ...]) -> tuple[int, int]:
    """Bytes that a device sends, planned and by hand."""
    mesh = shardc.make_mesh(topology={8: "v5p:8x1x1", 64: "v5p:4x4x4"}[devices], data=devices)
    step = shardc.function(case.step, mesh=mesh, in_placements=(case.placement,), out_placements=case.placement)
    plan = step.plan(case.state(sizes))
    return plan.bytes_per_device, case.planes * 4 * int(np.prod(sizes[1:], dtype=int))


def measured(case: Case, turns: int, steps: int) -> tuple[Pair, int, int]:
    """Times of a step under shardc and under jit with the same shardings, by turns; bytes that each sends."""
    mesh = shardc.make_mesh(data=DEVICES)
    shardings = jax.tree.map(lambda p: Placement(p).to_sharding(mesh), case.placement, is_leaf=lambda p: "data" in p)
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda a: (1 + 0.1 * rng.random(a.shape)).astype(a.dtype), case.state(GRIDS[case.rank]))
    state = jax.device_put(state, shardings)
    ours = shardc.function(case.step, mesh=mesh, in_placements=(case.placement,), out_placements=case.placement)
    peer = jax.jit(case.step, in_shardings=(shardings,), out_shardings=shardings)
    exe = ours.compile(state)
    assert exe.audit().ok, case.name
    one = jax.tree.map(np.asarray, state)  # operation by operation: XLA:CPU gets `lattice/2/set` wrong under jit
    want = case.step(jax.tree.map(jnp.asarray, one))
    for a, b in zip(jax.tree.leaves(ours(state)), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)

    def timed(fn: Callable[[Any], Any]) -> Callable[[], float]:
        def run() -> float:
            begin = time.perf_counter()
            for _ in range(steps):
                jax.block_until_ready(fn(state))
            return (time.perf_counter() - begin) / steps

        return run

    of_ours, of_peer = (sent(text).total() for text in (exe.hlo(), peer.lower(state).compile().as_text() or ""))
    return by_turns(timed(ours), timed(peer), turns), of_ours, of_peer


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stencils")
    parser.add_argument("--planned", action="store_true", help="bytes of plans for 8 and 64 v5p devices")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--steps", type=int, default=5, help="steps of a turn")
    parser.add_argument("--only", default="", help="names that contain this")
    parser.add_argument("--here", action="store_true", help="in this process, whose CPU is cut already")
    args = parser.parse_args(argv)
    if not (args.here or args.planned):
        command = [sys.executable, "-m", "benchmarks.stencils", *argv, "--here"]
        return subprocess.run(command, env=fake_cpu(DEVICES), check=False).returncode
    found = [c for c in cases() if args.only in c.name]
    if args.planned:
        table = new_table("Stencils: MiB that a v5p device sends", "what", "8", "64", "by hand")
        for c in found:
            (few, hand), (many, _) = (planned(c, n, LARGE[c.rank]) for n in (8, 64))
            table.add_row(c.name, mib(few), mib(many), mib(hand))
    else:
        names = "what", "shardc ms", "jit ms", "ratio", "least-greatest", "shardc MiB", "jit MiB"
        table = new_table(f"Stencils, {DEVICES} devices: cpu", *names)
        for c in found:
            pair, ours, peer = measured(c, args.turns, args.steps)
            times = f"{1e3 * pair.ours:.2f}", f"{1e3 * pair.peer:.2f}", f"{pair.ratio:.2f}"
            table.add_row(c.name, *times, f"{pair.low:.2f}-{pair.high:.2f}", mib(ours), mib(peer))
    Console(width=140).print(table)
    return 0


def mib(n: int) -> str:
    return f"{n / 2**20:.4g}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
