"""The memory of a pipeline as data: bytes per device of each rank, over the time of a call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Final

from shardc.errors import all_offenders

KINDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "arguments": "what the call is given, on the stage where it lives",
        "copies": "arguments on the other stages that read them",
        "sums": "what microbatches are added to or stacked in, and what else is kept beside the loop",
        "results": "what the call gives and does not put in the place of an argument",
        "registers": "what other stages have sent",
        "stash": "what a task leaves for a later one of the same microbatch",
        "leaving": "what is sent to another rank, until it has moved",
        "working": "what lives inside the running task",
    }
)
"""What memory is taken for. A value that is there for several reasons counts for the first of them."""


@dataclass(frozen=True)
class Holding:
    """One value of a stage, or several that have one name.

    Attributes:
      kind: one of `KINDS`.
      name: as every report prints it.
      line: of the user's code that makes the value; empty for an argument.
      value: dtype and logical shape of one.
      bytes: of all, per device.
      count: how many: of a value that every microbatch has, the microbatches that are there.
    """

    kind: str
    stage: int
    name: str
    line: str
    value: str
    bytes: int
    count: int


@dataclass(frozen=True)
class RankMemory:
    """Bytes on each device of a rank during a call: the most that any timing can bring about.

    Attributes:
      rank: its number.
      capacity: bytes that a device has.
      times: when each step begins and when it ends, one after the other, in simulated seconds.
      parts: for each of `KINDS` the bytes from each of `times` to the next.
      labels: of the steps.
      arguments, results: of all that the rank's stages read and give; a result that takes the place of an argument
        counts in both.
      holdings: what is there at the peak, the largest first; of the running task its inputs and outputs only.
    """

    rank: int
    capacity: int
    times: tuple[float, ...] = field(repr=False)
    parts: Mapping[str, tuple[int, ...]] = field(repr=False)
    labels: tuple[object, ...] = field(repr=False)
    arguments: int
    results: int
    holdings: tuple[Holding, ...] = field(repr=False)

    @cached_property
    def bytes(self) -> tuple[int, ...]:
        """In all, from each of `times` to the next."""
        return tuple(map(sum, zip(*self.parts.values(), strict=True)))

    @cached_property
    def peak(self) -> int:
        return max(self.bytes, default=0)

    @property
    def fullness(self) -> float:
        """The peak, as a part of what a device has."""
        return self.peak / max(self.capacity, 1)

    @property
    def peak_label(self) -> object:
        """The step that runs at the peak."""
        return self.labels[self.bytes.index(self.peak) // 2]

    @property
    def peak_parts(self) -> dict[str, int]:
        """The bytes at the peak, by kind."""
        at = self.bytes.index(self.peak)
        return {kind: sizes[at] for kind, sizes in self.parts.items()}

    @property
    def live_peak(self) -> int:
        """The most that is there at once of whole arrays: without what lives inside a task."""
        return self.peak_without("working")

    def peak_without(self, kind: str) -> int:
        """The most that is there at once besides what is taken for `kind`."""
        return max((b - w for b, w in zip(self.bytes, self.parts[kind], strict=True)), default=0)


@dataclass(frozen=True)
class PipelineMemory:
    """Memory of a pipeline. What `Memory` says of one program is here said of the rank whose devices are fullest."""

    ranks: tuple[RankMemory, ...]

    @property
    def worst(self) -> RankMemory:
        return max(self.ranks, key=lambda r: (r.fullness, -r.rank))

    @property
    def arguments(self) -> int:
        return self.worst.arguments

    @property
    def results(self) -> int:
        return self.worst.results

    @property
    def temporaries(self) -> int:
        """The most that is there besides the arguments."""
        return self.peak - self.arguments

    @property
    def peak(self) -> int:
        return self.worst.peak

    @property
    def too_full(self) -> tuple[RankMemory, ...]:
        """The ranks that want more than their devices have."""
        return tuple(r for r in self.ranks if r.peak > r.capacity)


LARGEST: Final = 5
"""How many of the largest values an error names."""


def too_large(memory: PipelineMemory) -> str:
    """The error text of ranks that do not fit: the bytes by kind, and how to reduce them."""
    lines: list[str] = []
    for r in memory.too_full:
        parts = ", ".join(f"{_mib(b)} {kind}" for kind, b in sorted(r.peak_parts.items(), key=lambda p: -p[1]) if b)
        lines.append(
            f"rank {r.rank}: {_mib(r.peak)} at {r.peak_label}, its devices have {_mib(r.capacity)} "
            f"({r.fullness:.2f} times as much): {parts}"
        )
        lines += [
            f"    {_mib(h.bytes)}  {h.kind}: {h.name} {h.value}{times} (stage {h.stage}){made}"
            for h in r.holdings[:LARGEST]
            for times, made in [(f" x {h.count}" * (h.count > 1), f", made at {h.line}" * bool(h.line))]
        ]
    worst = memory.worst.peak_parts
    fixes: list[str] = []
    if worst["working"] >= worst["arguments"]:
        fixes.append("smaller microbatches: a larger `microbatches` in shardc.accumulate")
    if worst["stash"] + worst["registers"] >= worst["arguments"]:
        fixes.append('a schedule with fewer microbatches in flight ("1f1b", "v-min"), or recompute="full"')
    if worst["results"]:
        fixes.append("donate_argnames for what the step replaces")
    fixes.append("more ranks, or an axis within the stages that splits what they hold")
    return all_offenders(
        "the pipeline does not fit; bytes on each device at the worst time of a call:",
        [*lines, "What would help: " + "; ".join(fixes) + "."],
    )


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"
