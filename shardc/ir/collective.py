"""The record of one planned collective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardc.sbp.cost import CollectiveKind


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a plan.

    Attributes:
      kind: which collective.
      axes: the mesh axes whose devices take part, in the order in which they count devices.
      bytes: sent per device, over all executions in one call of the function.
      count: executions in one call: the trip counts of the loops around it.
      source: line of user code that made the value, as `file.py:12 (function)`.
      value: dtype and logical shape of the value that moves, as `f32[8,128]`.
      src, dst: the placements before and after the boxing that this collective is a step of, as text.
      per_iteration: whether it is in a `while`. Then `bytes` and `count` are those of one iteration, or of as many as
        `shardc.trips` gives.
      trips: the iterations that `shardc.trips` gives for one run of all the `while`s around it.
      one_round: whether a `while` around it has no `shardc.trips`, so that it counts one iteration.
    """

    kind: CollectiveKind
    axes: tuple[str, ...]
    bytes: int
    count: int
    source: str
    value: str = ""
    src: str = ""
    dst: str = ""
    per_iteration: bool = False
    trips: int = 1
    one_round: bool = False


@dataclass(frozen=True)
class Moves:
    """The collectives of an equation, and by kind the seconds of one execution."""

    collectives: Sequence[Collective]
    seconds: Mapping[CollectiveKind, float]
