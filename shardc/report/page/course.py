"""The course of one call of one program: what its time goes to, and the bytes in memory, from begin to end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardc.passes.estimate.memory import Profile
from shardc.report.page.equations import ProgramRows

KINDS: Final[Mapping[str, tuple[str, str]]] = {
    "compute": ("computing", "#3b76af"),
    "memory": ("reading and writing memory", "#8fa3b8"),
    "all_reduce": ("all_reduce", "#b5482a"),
    "all_gather": ("all_gather", "#e08a3c"),
    "reduce_scatter": ("reduce_scatter", "#8265aa"),
    "all_to_all": ("all_to_all", "#4aa3a2"),
    "permute": ("permute", "#5a9e6f"),
    "host": ("moving to and from host memory", "#a8648a"),
}
"""The parts of a `Time`, with their names and colours."""

BUCKETS: Final = 400
"""The parts into which a call is divided."""


@dataclass(frozen=True)
class Course:
    """One call in equal parts of time. A loop is drawn as one iteration that takes the time of all.

    Attributes:
      extent: seconds of all operations one after the other: with the collectives that overlap.
      shares: by kind of `KINDS`, for each part the share of its time.
      bytes: for each part the most that is in memory.
      first: for each part the number of the row of the program that it begins with.
      peak: the part in which memory is fullest.
    """

    extent: float
    shares: Mapping[str, NDArray[np.float64]]
    bytes: NDArray[np.float64]
    first: NDArray[np.int64]
    peak: int


def course_of(rows: ProgramRows, profile: Profile) -> Course:
    """The course of a program, from its rows and its memory at each of them."""
    times = [row.time for row in rows.rows]
    seconds = {kind: np.array([getattr(t, kind) for t in times] or [0.0]) for kind in KINDS}
    ends = np.add.reduce(list(seconds.values())).cumsum()
    begins = np.concatenate([[0.0], ends])
    extent = float(ends[-1]) or 1.0
    edges = np.linspace(0.0, extent, BUCKETS + 1)
    width = extent / BUCKETS
    shares = {
        kind: np.diff(np.interp(edges, begins, np.concatenate([[0.0], each.cumsum()]))) / width
        for kind, each in seconds.items()
        if each.any()
    }
    first = np.clip(np.searchsorted(begins, edges[:-1], "right") - 1, 0, len(times) - 1)
    held = profile.bytes[: len(begins)]
    part = np.clip(begins[: len(held)] / width, 0, BUCKETS - 1).astype(int)
    most = held[np.minimum(first, len(held) - 1)].copy()
    np.maximum.at(most, part, held)
    return Course(extent, shares, most, first, int(most.argmax()))
