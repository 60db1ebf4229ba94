"""How the successor of a lost process joins a run that goes on.

    successor --joins--> each other one --what is missing of it--> successor --begins with round 7--> each other one

Of several successors the one with the lowest number begins first; those after it ask it then as they ask the others.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any, Final, Protocol

from shardc.errors import ClusterError, PeerLostError
from shardc.runtime.actor import Network
from shardc.runtime.calls import processes_text
from shardc.runtime.replaced.replay import Replaceable, Replay, Send
from shardc.runtime.transport.connection import Frame, FrameKind
from shardc.runtime.transport.link import Link, Receiver

_log: Final = logging.getLogger("shardc")
_LOOK: Final = 0.5
"""Seconds between two looks of a successor: whether the run still goes on."""


class NetworkPart(Receiver, Protocol):
    """The part of a network that runs in one process: what successors need of it.

    Attributes:
      net, number, places, links, me: as of `DistributedNetwork`.
      lost: why no run can complete; None: all is well.
    """

    net: Network
    number: int
    places: Any
    links: dict[int, Link]
    me: int

    @property
    def lost(self) -> PeerLostError | None: ...
    def give_up(self, error: PeerLostError) -> None:
        """End all runs here and in the other processes."""
        ...

    def free(self, run: int, number: int, peer: int) -> None:
        """Count a credit of one reader of a channel."""
        ...

    def empty_frame(self, run: int, channel: int, peer: int, round: int) -> Frame:
        """A message without values."""
        ...

    def last_frames(self, run: int) -> list[Frame]:
        """The frames that tell that a run ends, or was stopped."""
        ...


class Successors:
    """The processes of a network that may be replaced in a run: what this one keeps for them, and whether it is one."""

    def __init__(self, part: NetworkPart) -> None:
        self._part = part
        self._run = 0
        self._replays: dict[int, Replay] = {}
        self._changed = threading.Condition()
        """Guards what a successor knows. Nothing else is locked under it."""
        self._joins = False
        """Whether this process is a successor that has not begun."""
        self._answers: dict[int, Mapping[str, Any]] = {}
        self._later: dict[int, Frame] = {}
        """Successors with a higher number, and what they ask: they are answered when this one has begun."""

    def begin(self, run: int, replaceable: Replaceable) -> None:
        """From now on processes may be replaced in a run, of which no message has come yet."""
        part = self._part
        self._run = run
        self._replays = {
            p: Replay(part.net, part.places, p, part.me, replaceable.empty)
            for p in replaceable.processes
            if p != part.me
        }

    def end(self) -> None:
        """From now on no process may be replaced.

        Raises:
          PeerLostError: one of them is lost, and its successor has not come.
        """
        replays, self._replays = self._replays, {}
        for peer, replay in replays.items():
            if not replay.present:
                self._part.give_up(PeerLostError(f"process {peer} is lost, and all others have ended the run.", peer))
        _raise_lost(self._part)

    def replay(self, run: int, peer: int) -> Replay | None:
        """What is kept for a process; None if it cannot be replaced in this run."""
        return self._replays.get(peer) if run == self._run else None

    # -- messages and credits

    def post(self, run: int, peer: int, channel: int, send: Send) -> None:
        """Send a message to another process, or keep it for the successor of that one."""
        replay, links = self.replay(run, peer), self._part.links
        if replay is None:
            send(links[peer])
            return
        with replay.lock:
            replay.keep(channel, send)
            if replay.present:
                send(links[peer])

    def give_back(self, run: int, peer: int, channel: int) -> None:
        """Tell another process that a register of a channel from there is free."""
        replay = self.replay(run, peer)
        if replay is not None:
            with replay.lock:
                if not replay.takes(channel):
                    return
        self._part.links[peer].send(Frame(FrameKind.CREDIT, self._part.number, run, channel))

    def is_new(self, peer: int, frame: Frame) -> bool:
        """Whether a message or a credit has not come before, from a process that has been replaced since."""
        replay = self.replay(frame.run, peer)
        if replay is None:
            return True
        with replay.lock:
            if frame.kind is FrameKind.CREDIT:
                return replay.frees(frame.channel)
            if replay.comes(frame.channel):
                return True
            is_free = replay.was_taken(frame.channel)
        if is_free:
            self._part.links[peer].send(Frame(FrameKind.CREDIT, self._part.number, frame.run, frame.channel))
        return False

    # -- losses, and who comes instead

    def lose(self, error: PeerLostError) -> bool:
        """Whether a lost process may be replaced. From now on nothing is sent to it."""
        replay, link = self._replays.get(error.process), self._part.links.get(error.process)
        if replay is None or link is None or link.lost is not error:
            return False
        with replay.lock:
            replay.present = False
        return True

    def welcome(self, link: Link) -> None:
        """Take the link to the successor of a process."""
        if link.peer not in self._replays:
            return
        self._part.links[link.peer] = link
        link.add(self._part.number, _Newest(self._part, link))
        if self._joins:
            link.send(self._saying(self._run, {"joins": True}))

    def join(self, look: Callable[[], object], seconds: float) -> int:
        """Join the run, as a successor. Returns the first round of which something of this process has not come to
        another one.

        Args:
          look: raises if the run does not go on.
          seconds: to wait for the others.

        Raises:
          PeerLostError: another process is lost.
          ClusterError: one has not answered, or has ended the run.
        """
        part, answers, self._joins = self._part, self._answers, True
        for link in part.links.values():
            link.add(part.number, part)
            link.send(self._saying(self._run, {"joins": True}))
        until = monotonic() + seconds
        missing = lambda: sorted(part.links.keys() - answers.keys() - self._later.keys())  # noqa: E731
        while missing() and part.lost is None and monotonic() < until:
            look()
            with self._changed:
                self._changed.wait_for(lambda: not missing(), _LOOK)
        _raise_lost(part)
        late, over = missing(), sorted(p for p, a in answers.items() if a["over"])
        if late or over:
            who = processes_text(late or over)
            why = f"no answer came from {who} within {seconds:g} s" if late else f"it is over in {who}"
            raise ClusterError(f"process {part.me} was started again and cannot join the run: {why}.")
        first = min(r for answer in answers.values() for r in answer["missing"])
        for replay in self._replays.values():
            with replay.lock:
                replay.begin_here(first)
        for link in part.links.values():
            link.send(self._saying(self._run, {"begins": first}))
        with self._changed:
            self._joins, later = False, list(self._later.items())
        for peer, frame in later:
            self._answer(peer, frame)
        return first

    def hear(self, peer: int, frame: Frame) -> None:
        """Handle what a successor says, or what this process is answered as one."""
        said, replay = json.loads(frame.about), self.replay(frame.run, peer)
        if "missing" in said:
            with self._changed:
                self._answers[peer] = said
                self._changed.notify_all()
        elif "joins" in said:
            with self._changed:
                joins = self._joins
                if joins and peer > self._part.me:
                    self._later[peer] = frame
                    self._changed.notify_all()
            if not joins:
                self._answer(peer, frame)
        elif replay is not None:
            self._begin_with(replay, peer, frame.run, said["begins"])

    def _saying(self, run: int, said: Mapping[str, Any]) -> Frame:
        return Frame(FrameKind.OPEN, self._part.number, run, about=json.dumps(said).encode())

    def _answer(self, peer: int, frame: Frame) -> None:
        """Answer a successor what is missing here of its predecessor."""
        replay, missing = self.replay(frame.run, peer), list[int]()
        if replay is not None:
            with replay.lock:
                replay.present, missing = False, replay.first_missing
        self._part.links[peer].send(self._saying(frame.run, {"missing": missing, "over": replay is None}))

    def _begin_with(self, replay: Replay, peer: int, run: int, first: int) -> None:
        """Send a successor what it takes since its first round."""
        part = self._part
        link = part.links[peer]
        with replay.lock:
            try:
                again, credits = replay.begin(first)
            except LookupError as error:
                why = PeerLostError(f"process {peer} is lost, and cannot be replaced: {error}.", peer)
                again, credits = [], {}
            else:
                why = None
            for channel, count in credits.items():
                for _ in range(count if part.net.channels[channel].registers is not None else 0):
                    part.free(run, channel, peer)
            for channel, round, send in again:
                if send is not None:
                    send(link)
                else:
                    link.send(part.empty_frame(run, channel, peer, round))
        if why is not None:
            part.give_up(why)
        for frame in part.last_frames(run):
            link.send(frame)
        if part.me == 0:
            _log.warning(
                "process %d goes on with round %d: its calls since then are made again; results of rounds before that "
                "only it had are lost.", peer, first,
            )  # fmt: skip


class _Newest:
    """The receiver of what comes over a link to a successor, as long as it is the last one."""

    def __init__(self, part: NetworkPart, link: Link) -> None:
        self._part, self._link = part, link

    def receive(self, peer: int, frame: Frame) -> None:
        if self._part.links.get(peer) is self._link:
            self._part.receive(peer, frame)

    def lose(self, error: PeerLostError) -> None:
        if self._part.links.get(error.process) is self._link:
            self._part.lose(error)


def _raise_lost(part: NetworkPart) -> None:
    if (lost := part.lost) is not None:
        raise PeerLostError(str(lost), lost.process)
