"""The record of one planned collective."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from shardc.sbp.cost import CollectiveKind

UNKNOWN: Final = "unknown"
"""The kind of what may move something that no table knows; its bytes are not a number (nan)."""


Branch: TypeAlias = Literal["", "expected", "other"]


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a plan.

    Attributes:
      kind: which collective; "unknown" for an operation in a user's shard_map that may move what no table knows.
      axes: the mesh axes whose devices take part, in the order in which they count devices; of an unknown one, those
        that it may move something over.
      bytes: sent per device, over all executions in one call of the function; nan if it is unknown.
      count: executions in one call: the trip counts of the loops around it.
      source: line of user code that made the value, as `file.py:12 (function)`.
      value: dtype and logical shape of the value that moves, as `f32[8,128]`; of an unknown one, the operation.
      src, dst: the placements before and after the boxing that this collective is a step of, as text.
      per_iteration: whether it is in a `while`. Then `bytes` and `count` are those of one iteration, or of as many as
        `shardc.trips` gives.
      trips: the iterations that `shardc.trips` gives for one run of all the `while`s around it.
      one_round: whether a `while` around it has no `shardc.trips`, so that it counts one iteration.
      at_most: whether how much moves depends on data. `bytes` is the most.
      branch: where a `cond` has a branch that is expected to run, whether it is in that one or in another one, whose
        bytes a plan does not count; else empty.
    """

    kind: CollectiveKind | Literal["unknown"]
    axes: tuple[str, ...]
    bytes: float
    count: int
    source: str
    value: str = ""
    src: str = ""
    dst: str = ""
    per_iteration: bool = False
    trips: int = 1
    one_round: bool = False
    at_most: bool = False
    branch: Branch = ""

    @property
    def is_known(self) -> bool:
        """Whether its bytes are a number."""
        return self.kind != UNKNOWN


@dataclass(frozen=True)
class Moves:
    """The collectives of an equation, and by kind the seconds of one execution."""

    collectives: Sequence[Collective]
    seconds: Mapping[CollectiveKind, float]


def known_bytes(collectives: Iterable[Collective]) -> int:
    """Bytes of the collectives whose bytes are known, as the expected branches run."""
    return sum(int(c.bytes) for c in collectives if c.is_known and c.branch != "other")


def unknown_among(collectives: Iterable[Collective]) -> list[str]:
    """`ffi_call at model.py:12 (step)` for each that may move what no table knows, without repetitions."""
    return list(dict.fromkeys(f"{c.value} at {c.source}" for c in collectives if not c.is_known))
