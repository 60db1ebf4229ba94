"""The slowest process of a run: the one that the others wait for at the calls that they make together.

    call 7 of process 0: |........waits........|     gain without process 1: from the second last to the last one
    call 7 of process 1:                       |

Only what the host of a process does before a call is seen. In the program itself all wait for the slowest device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from time import time
from typing import Any


@dataclass(frozen=True)
class Slowest:
    """The slowest process, and the part of the time that the others would gain if it came with the next slowest one."""

    process: int
    share: float


class Stragglers:
    """Compares when processes come to the same calls. Their clocks differ: the quickest of their signs of life say by
    how much."""

    def __init__(self) -> None:
        self._ahead: dict[int, float] = {}
        """By how much the clock of this process is ahead of another one's, at most."""

    def look(self, statuses: Mapping[int, Mapping[str, Any]], ages: Mapping[int, float], epoch: int) -> Slowest | None:
        """Find the slowest process; None if none is known, or the hosts run ahead of their devices.

        Args:
          statuses: what the signs of life of processes say.
          ages: how many seconds ago these came.
          epoch: of the run.
        """
        now = time()
        said = {p: facts for p, facts in statuses.items() if facts.get("arrived") and facts["epoch"] == epoch}
        for p, facts in said.items():
            ahead = now - ages[p] - facts["now"]
            self._ahead[p] = min(self._ahead.get(p, ahead), ahead)
        names = [facts["arrived"][0] for facts in said.values()]
        name = max(names, key=names.count, default=None)
        came = {
            p: {int(number): at + self._ahead[p] for number, at in facts["arrived"][1]}
            for p, facts in said.items()
            if facts["arrived"][0] == name
        }
        return _slowest(came) if len(came) > 1 else None


def _slowest(came: Mapping[int, Mapping[int, float]]) -> Slowest | None:
    """The slowest process, by the times at which each has come to calls."""
    common = sorted(set.intersection(*(set(calls) for calls in came.values())))
    if len(common) < 3:
        return None
    gains = dict.fromkeys(came, 0.0)
    for number in common:
        *_, (second, _), (last, process) = sorted((calls[number], p) for p, calls in came.items())
        gains[process] += (last - second) / len(common)
    first, last = (max(calls[number] for calls in came.values()) for number in (common[0], common[-1]))
    interval = (last - first) / (common[-1] - common[0])
    slowest = max(gains, key=gains.__getitem__)
    return Slowest(slowest, gains[slowest] / interval) if 0 < gains[slowest] <= interval else None
