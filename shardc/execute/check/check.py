"""Holds a compiled program against one device, border by border.

    the program                            its results
    the program with its borders           its results, and the pieces before and after each collective
    the pieces of each device, in turn,    what should be before each collective, from what was seen after those
    on one device                          before it

What comes out of a collective is compared with what went in. It may differ by one rounding: XLA may compute what went
in once for the collective and once for the record. What a device computes between two borders is compared with what one
device computes from the same pieces, so errors of one piece do not reach the next. Where they differ by more than a
rounding, the piece is computed twice more, each time with other rounding errors as large as the order of sums allows:
the border is off if it differs by more than four times what these change.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from shardc import compat
from shardc.arrays.fetch import words
from shardc.arrays.place import put_whole
from shardc.errors import MeshError
from shardc.execute.check.compare import (
    Array,
    Coordinates,
    coordinates,
    expected,
    rounding,
    spread,
    unlike,
    valid,
)
from shardc.execute.check.report import CheckReport, Deviation
from shardc.execute.executable import Executable
from shardc.execute.process_group import group_of_mesh
from shardc.machine.mesh import cut_mesh, without_mesh
from shardc.passes.lower.lower import Lowering
from shardc.passes.lower.lower_borders import (
    ROUNDS,
    SIGNS,
    NoisyLowering,
    NoisyReplaying,
    Passage,
    RecordingLowering,
    ReplayingLowering,
)
from shardc.plan.names import Names, names_of

_VARIABLES: Final = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


@dataclass(frozen=True, slots=True)
class _Unlike:
    """Elements of one array of one device that differ from what is expected."""

    at: Coordinates
    wrong: Array
    error: Array
    bound: Any


class Checker:
    """The programs that a check of a compiled program runs; they are compiled at the first check.

    Raises:
      MeshError: the program runs in several processes.
    """

    def __init__(self, executable: Executable) -> None:
        if group_of_mesh(executable.mesh) is not None:
            raise MeshError(
                f"{executable.plan.program.name}: {executable.plan.mesh} has devices of several processes, and a check "
                "reads the pieces of all devices in one; check the function on a mesh of one process."
            )
        self.executable, self.plan = executable, executable.plan
        self.recording = RecordingLowering(self.plan.boxed, self.plan.mesh)

    def check(self, args: Sequence[Any]) -> tuple[CheckReport, list[Any]]:
        """Checks a call.

        Args:
          args: physical arguments, captured ones included. None of them is donated.

        Returns:
          The report, and the physical results of the program itself.
        """
        executable = self.executable
        placed = [put_whole(x, s) for x, s in zip(args, executable.in_shardings, strict=True)]
        found = jax.block_until_ready(executable.run(executable.with_copies(placed)))
        with without_mesh(), jax.debug_nans(False), jax.debug_infs(False):
            return _Check(self, placed).report(found), found

    @cached_property
    def record(self) -> Callable[..., list[Any]]:
        """The program with the arrays at its borders before its results."""
        return self._on_mesh(self.recording)

    @cached_property
    def with_noise(self) -> list[Callable[..., list[Any]]]:
        """The program with other rounding errors."""
        return [self._on_mesh(NoisyLowering(self.plan.boxed, self.plan.mesh, signs)) for signs in _samples()]

    def _on_mesh(self, low: Lowering) -> Callable[..., list[Any]]:
        """A program that gives the pieces of all devices side by side, in a new first dimension."""
        executable = self.executable

        def local(pieces: Sequence[Any]) -> list[Any]:
            if isinstance(low, RecordingLowering):
                low.begin()
            results = [
                jax.device_put(x, jax.memory.Space.Device) if k in self.plan.host_outputs else x
                for k, x in enumerate(executable.local(low, pieces))
            ]
            return [x[None] for x in (*(low.tape if isinstance(low, RecordingLowering) else ()), *map(words, results))]

        program = executable.sharded(local, PartitionSpec(cut_mesh(executable.mesh, self.plan.mesh).axis_names))
        options = dict(executable.xla_options)
        return jax.jit(program, in_shardings=tuple(executable.in_shardings), compiler_options=options or None)

    @cached_property
    def replay(self) -> Callable[..., list[Any]]:
        """The pieces of one device, from its arguments and what it has after each border."""
        return jax.jit(partial(self._on_one_device, None))

    @cached_property
    def replays_with_noise(self) -> list[Callable[..., list[Any]]]:
        run = jax.jit(self._on_one_device)
        return [partial(run, signs) for signs in _samples()]

    def _on_one_device(
        self, signs: Any, at: Mapping[str, Any], pieces: Sequence[Any], given: Sequence[Sequence[Any]]
    ) -> list[Any]:
        boxed, mesh = self.plan.boxed, self.plan.mesh
        low = (
            ReplayingLowering(boxed, mesh, at, given)
            if signs is None
            else NoisyReplaying(boxed, mesh, at, given, signs)
        )
        low.begin()
        results = self.executable.local(low, pieces)
        return [*low.tape, *map(words, results)]


def _samples() -> list[Any]:
    """The signs of two computations with other rounding errors."""
    draw = np.random.default_rng(0)
    return [jnp.asarray(draw.choice(np.array([-1, 1], np.float32), SIGNS)) for _ in range(2)]


class _Check:
    """The check of one call."""

    def __init__(self, programs: Checker, args: Sequence[Any]) -> None:
        self.programs, self.plan, self.args = programs, programs.plan, args
        mesh = programs.executable.mesh
        self.sizes = dict(self.plan.mesh.sizes)
        self.devices = dict(zip(coordinates(self.sizes), mesh.devices.flat, strict=True))
        self.one = mesh.devices.flat[0]
        self.results = len(self.plan.outputs)
        self.kept = list(map(self._pieces, programs.record(*args)))
        met = programs.recording.passages
        self.passages = [met[k] for k in sorted(met)]
        self.starts = list(itertools.accumulate((len(p.ports) + p.results for p in self.passages), initial=0))

    def _pieces(self, x: Any) -> dict[Coordinates, Any]:
        """The piece of each device, of an array with these side by side."""
        by_device = {shard.device: shard.data for shard in x.addressable_shards}
        return {at: by_device[d][0] for at, d in self.devices.items()}

    # -- the report

    def report(self, found: Sequence[Any]) -> CheckReport:
        off: list[tuple[tuple[int, int], Deviation]] = []
        for k, p in enumerate(self.passages):
            if p.is_compared:
                off += [((k, 1), d) for d in self._after(k, p)]
        off += self._pieces_of_one_device()
        borders = [d for _, d in sorted(off, key=lambda item: item[0])]
        alone = [] if self._calls_back else self._alone(found)
        gone = bool(alone) and not borders
        return CheckReport(
            off=(*borders, *alone),
            borders=len(self.passages),
            results=self.results,
            unlike_alone=gone,
            open=tuple(self._open()),
            flags=(
                *((n, v) for n in _VARIABLES if (v := os.environ.get(n))),
                *self.programs.executable.xla_options.items(),
            ),
        )

    @cached_property
    def _calls_back(self) -> bool:
        return any(p.kind == "callback" for p in self.passages)

    def _open(self) -> list[str]:
        lines: list[str] = []
        for p in self.passages:
            if p.kind == "shard_map":
                lines.append(f"the inside of the shard_map at {compat.source_line(p.eqn)}")
            elif p.kind == "callback":
                lines.append(f"what {p.eqn.primitive.name} at {compat.source_line(p.eqn)} returned")
        for k, p in enumerate(self.passages):
            if p.kind == "while" and self._count(k) > ROUNDS:
                lines.append(f"the rounds of the while at {compat.source_line(p.eqn)} from {ROUNDS} on")
        if self._calls_back:
            lines.append("the results of the call itself: its callbacks may give other values when they run again")
        return list(dict.fromkeys(lines))

    def _count(self, k: int) -> int:
        """The most rounds of a `while`."""
        return int(np.max(next(iter(self.kept[self._results_at(k)].values())), initial=0))

    def _results_at(self, k: int) -> int:
        return self.starts[k] + len(self.passages[k].ports)

    def _after(self, k: int, p: Passage) -> list[Deviation]:
        """The faults of a collective."""
        before, after = self._read(self.starts[k]), self._read(self.starts[k] + 1)
        found: list[_Unlike] = []
        for at, (where, want, bound) in expected(p, before, self.sizes).items():
            got = after[at][where]
            if np.array_equal(got, want):
                continue
            bound = bound + rounding(got, want)  # what went in may have been computed twice
            found.append(_Unlike(at, *unlike(got, want, bound), np.broadcast_to(bound, got.shape)))
        return self._deviations(p, found, after=True)

    def _read(self, i: int) -> dict[Coordinates, Array]:
        return {at: np.asarray(x) for at, x in self.kept[i].items()}

    # -- what the devices compute

    def _pieces_of_one_device(self) -> list[tuple[tuple[int, int], Deviation]]:
        """The faults of what devices compute between borders."""
        arrays: list[tuple[int, Any, int]] = [
            (k, port, self.starts[k] + j) for k, p in enumerate(self.passages) for j, port in enumerate(p.ports)
        ]
        last = len(self.passages)
        first = self.starts[-1]
        arrays += [(last, None, first + k) for k in range(self.results)]
        found: dict[int, list[_Unlike]] = {}
        for at, device in self.devices.items():
            given = self._given(at, device)
            made = [np.asarray(x) for x in self.programs.replay(*given)]
            moved: list[list[Array]] | None = None
            for n, (k, port, i) in enumerate(arrays):
                if k < last and self.passages[k].kind == "while" and self._count(k) > ROUNDS:
                    continue
                loops = self.passages[k].loops if k < last else 0
                where = () if port is None else valid(port[0], port[1], self.sizes, at, loops)[1]
                got, want = np.asarray(self.kept[i][at])[where], made[n][where]
                if np.array_equal(got, want):
                    continue
                wrong, error = unlike(got, want, bound := rounding(got, want))
                if wrong.any():
                    if moved is None:
                        moved = [list(map(np.asarray, run(*given))) for run in self.programs.replays_with_noise]
                    bound = bound + spread(want, [m[n][where] for m in moved])
                    wrong, error = unlike(got, want, bound)
                if wrong.any():
                    found.setdefault(n, []).append(_Unlike(at, wrong, error, np.broadcast_to(bound, got.shape)))
        off: list[tuple[tuple[int, int], Deviation]] = []
        for n, each in found.items():
            k, _, i = arrays[n]
            if k == last:
                off.append(((k, i), self._result(i - first, each)))
            else:
                off += [((k, 0), d) for d in self._deviations(self.passages[k], each, after=False)]
        return off

    def _given(self, at: Coordinates, device: Any) -> tuple[Any, ...]:
        """The arguments of the pieces of a device: its coordinates, its arguments, and the arrays after each border."""
        here = {a: jnp.int32(i) for a, i in zip(self.sizes, at, strict=True)}
        pieces = [next(s.data for s in x.addressable_shards if s.device == device) for x in self.args]
        given = [
            [self.kept[self._results_at(k) + j][at] for j in range(p.results)] for k, p in enumerate(self.passages)
        ]
        return jax.device_put((here, pieces, given), self.one)

    # -- the results of the program itself

    def _alone(self, found: Sequence[Any]) -> list[Deviation]:
        """Results of the program that are not those of the program with its borders."""
        first, off = self.starts[-1], list[Deviation]()
        moved: list[list[dict[Coordinates, Any]]] | None = None
        for k in range(self.results):
            shards = {s.device: words(s.data) for s in found[k].addressable_shards}
            each: list[_Unlike] = []
            for at, device in self.devices.items():
                got, want = np.asarray(shards[device]), np.asarray(self.kept[first + k][at])
                if np.array_equal(got, want):
                    continue
                wrong, error = unlike(got, want, bound := rounding(got, want))
                if wrong.any():
                    moved = moved or [list(map(self._pieces, run(*self.args))) for run in self.programs.with_noise]
                    bound = bound + spread(want, [np.asarray(m[k][at]) for m in moved])
                    wrong, error = unlike(got, want, bound)
                if wrong.any():
                    each.append(_Unlike(at, wrong, error, np.broadcast_to(bound, got.shape)))
            if each:
                off.append(self._result(k, each))
        return off

    # -- texts

    @cached_property
    def _names(self) -> Names:
        return names_of(self.plan.boxed, self.plan.program)

    def _result(self, k: int, found: Sequence[_Unlike]) -> Deviation:
        path, placement = self.plan.program.out_paths[k], str(self.plan.whole_outputs[k])
        return Deviation(
            f"result {path}", "", "result", False, (), "", placement, (), *self._figures(found)
        )  # fmt: skip

    def _deviations(self, p: Passage, found: Sequence[_Unlike], after: bool) -> list[Deviation]:
        """The first round of the loops around that is off, on the devices where it is."""
        bad = [u for u in found if u.wrong.any()]
        if not bad:
            return []
        rounds = min(tuple(int(i) for i in np.argwhere(u.wrong)[0][: p.loops]) for u in bad)
        here = [_Unlike(u.at, u.wrong[rounds], u.error[rounds], u.bound[rounds]) for u in bad]
        name = self._names.operations[p.eqn].original
        what = str(name) if p.step is not None else f"the pieces of {name}"
        src, dst = ("", "") if p.step is None else (str(p.step.src), str(p.step.dst))
        return [Deviation(what, name.line, p.kind, after, p.axes, src, dst, rounds, *self._figures(here))]

    def _figures(self, found: Sequence[_Unlike]) -> tuple[tuple[int, ...], int, int, float, float]:
        """The devices where elements are off, how many are, of how many, and error and bound of the worst."""
        bad = [u for u in found if u.wrong.any()]
        worst = max(bad, key=lambda u: np.max(u.error, where=u.wrong, initial=0.0))
        error = np.where(worst.wrong, worst.error, -1.0)
        i = np.unravel_index(int(np.argmax(error)), error.shape)
        count, of = sum(int(u.wrong.sum()) for u in bad), sum(u.wrong.size for u in bad)
        return tuple(self.devices[u.at].id for u in bad), count, of, float(error[i]), float(worst.bound[i])
