"""Resources that steps and messages of a simulated run hold by turns: devices, links, interpreters."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace

from shardc.runtime.actor import Network


class PartlyHeld(float):
    """Seconds of a step that holds its resources only for the first of them.

    Attributes:
      held: the seconds for which it holds them.

    Examples:
      >>> wait = PartlyHeld(0.5, 0.125)
      >>> wait + 1, wait.held
      (1.5, 0.125)
    """

    held: float

    def __new__(cls, seconds: float, held: float) -> PartlyHeld:
        made = super().__new__(cls, seconds)
        made.held = held
        return made

    def __getnewargs__(self) -> tuple[float, float]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return float(self), self.held


class Turns:
    """The resources of a run.

    Attributes:
      held: for how long each resource of the network was held.
    """

    def __init__(self, net: Network) -> None:
        users: list[set[tuple[int, bool]]] = [set() for _ in net.resources]
        for a, row in enumerate(net.actors):
            for r in {r for step in row for r in step.uses}:
                users[r].add((a, True))
        for channel in net.channels:
            for r in channel.uses if channel.source != channel.target else ():
                users[r].add((channel.source, False))
        contended = {r for r, (who, x) in enumerate(zip(users, net.resources, strict=True)) if len(who) > x.units}
        ways = [c.uses for c in net.channels if c.source != c.target]
        while more := {r for uses in ways if contended & set(uses) for r in uses} - contended:
            contended |= more  # a message that waits holds up those behind it
        self._contended = frozenset(contended)
        self._users = [{a for a, _ in who} for who in users]
        self.actors = frozenset(a for r in self._contended for a in self._users[r])
        """The actors that may have to wait for others, or others for them."""
        self._free = [[0.0] * r.units for r in net.resources]
        self.held = [0.0] * len(net.resources)

    def add(self, actor: int) -> int:
        """A new resource, which an actor has for itself: its link to another one."""
        self._users.append({actor})
        self._free.append([0.0])
        self.held.append(0.0)
        return len(self._free) - 1

    def contended(self, uses: Sequence[int]) -> tuple[int, ...]:
        """Those of some resources for which somebody may have to wait."""
        return tuple(r for r in uses if r in self._contended)

    def free(self, uses: Sequence[int], time: float) -> float:
        """The first time, from this one on, at which a unit of each is free."""
        for r in uses:
            time = max(time, self._free[r][0])
        return time

    def take(self, uses: Sequence[int], until: float) -> None:
        """Hold a unit of each until then."""
        for r in uses:
            heapreplace(self._free[r], until)

    def state(self, ends: Sequence[float], soonest: float) -> list[float]:
        """When each unit is free. A time before anybody can ask for it is as good as that.

        Args:
          ends: of each actor's last step.
          soonest: when the first of those asked who wait for a turn now; infinity if nobody waits.
        """
        floors = (min([soonest, *(ends[a] for a in who)]) for who in self._users)
        return [max(t, floor) for free, floor in zip(self._free, floors, strict=True) for t in sorted(free)]
