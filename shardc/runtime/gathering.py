"""A gathering: each member has a text, and all get the texts of all, in rounds (Bruck's all-gather).

    round k: member i sends the texts of members i, i - 1, ..., i - 2^k + 1 to member i + 2^k   (counted modulo n)

A member sends as soon as it has these texts, so log2(n) rounds take log2(n) messages of each, over as many links. Equal
texts travel once, with a mask of the members that have them: bit i for the i-th one. Who waits for a late member shares
what it has beyond the rounds, so that all know who is missing. Nothing here knows sockets or threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Texts: TypeAlias = Mapping[str, int]
"""Texts, each with the mask of the members that have it."""
Verdict: TypeAlias = Callable[[Mapping[int, str]], None]
"""Raises ClusterError if the texts of some processes, by process, cannot be right. Not all need to have come."""


def _no_verdict(texts: Mapping[int, str]) -> None:
    """Accept any texts."""


@dataclass
class Repeats:
    """Calls in a row that are like one that was gathered. Nothing is sent for them, unless another process gathers at
    the number of one of them, or ends before it.

    Attributes:
      last: the number of the last of them, or of the gathering.
      begin: gives the gathering of one of them, by its number.
    """

    name: str
    last: int
    begin: Callable[[int], Gathering]


class Gathering:
    """A gathering, as one of its members has it.

    Args:
      key: the name of what is gathered, and how many of this name were before it.
      members: the processes that take part.
      me: this process, one of them.
      text: of this process.
      why: the purpose, for errors: `at step, call 3`.
      verdict: looks at texts that have come.

    Attributes:
      looks, refused: how often it was looked at before it was finished, and how often in a row with an error.
    """

    def __init__(
        self,
        key: tuple[str, int],
        members: Sequence[int],
        me: int,
        text: str,
        why: str,
        verdict: Verdict | None = None,
    ) -> None:
        self.key, self.members, self.why = key, members, why
        self._verdict = verdict or _no_verdict
        self.looks = self.refused = 0
        n, at = len(members), members.index(me)
        self._full = (1 << n) - 1
        steps = [1 << k for k in range((n - 1).bit_length())]
        self._windows = {members[(at + s) % n]: self._window(at, s) for s in steps}
        """For each process that this one sends to the members whose texts it sends."""
        self._owed = {members[at - s]: self._window(at - s, s) for s in steps}
        """For each process that sends to this one the members whose texts it sends."""
        self._sent = dict.fromkeys(self._windows, 0)
        self._texts: dict[str, int] = {}
        self.add({text: 1 << at})

    def _window(self, at: int, size: int) -> int:
        """The mask of `size` members, of which the one at `at` is the last."""
        n = len(self.members)
        mask = ((1 << size) - 1) << ((at - size + 1) % n)
        return (mask | mask >> n) & self._full

    @property
    def neighbours(self) -> list[int]:
        """The processes that this one has to have a link to, in ascending order."""
        return sorted({*self._windows, *self._owed})

    def add(self, texts: Texts) -> None:
        """Add texts that have come."""
        for text, mask in texts.items():
            self._texts[text] = self._texts.get(text, 0) | mask

    @property
    def _known(self) -> int:
        known = 0
        for mask in self._texts.values():
            known |= mask
        return known

    def due(self, reachable: Callable[[int], bool], early: bool = False) -> dict[int, Texts]:
        """The texts that are to be sent now, by process; none is given twice.

        Args:
          reachable: whether there is a link to a process.
          early: whether what is known is shared before a round is complete.
        """
        found, known = dict[int, Texts](), self._known
        for peer, window in self._windows.items():
            ready = known if early else window if window & ~known == 0 else 0
            new = ready & ~self._sent[peer]
            if new and reachable(peer):
                self._sent[peer] |= new
                found[peer] = {text: mask & new for text, mask in self._texts.items() if mask & new}
        return found

    def forget(self, process: int) -> None:
        """Forget what was sent to a process: its successor has nothing of it."""
        if process in self._sent:
            self._sent[process] = 0

    @property
    def is_complete(self) -> bool:
        return self._known == self._full

    @property
    def differs(self) -> bool:
        """Whether texts that have come differ."""
        return len(self._texts) > 1

    @property
    def missing(self) -> list[int]:
        """The processes whose texts have not come."""
        known = self._known
        return [p for i, p in enumerate(self.members) if not known >> i & 1]

    def owes(self, process: int) -> bool:
        """Whether this process needs a message of another one to be complete."""
        return bool(self._owed.get(process, 0) & ~self._known)

    @property
    def texts(self) -> dict[int, str]:
        """The texts that have come, by process, in the order of the members."""
        known = list(self._texts.items())
        if len(known) == 1 and known[0][1] == self._full:
            return dict.fromkeys(self.members, known[0][0])
        return {p: text for i, p in enumerate(self.members) for text, mask in known if mask >> i & 1}

    def judge(self) -> None:
        """Raise ClusterError if the verdict on the texts that have come is one."""
        if self.differs:
            self._verdict(self.texts)
