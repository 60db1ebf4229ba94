"""A network whose actors run in several processes, as seen by one of them.

    actor here --message--> port --frame--> link ... link --> mailbox --> actor there

An actor may run in several processes at once, as the same steps in the same order: then each sends its part of a
message, a message is there when all its parts are, and a register is free when all its readers have given it back.
Values go besides the network too, to `expect`ers: arguments that several stages read, results that all processes get.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

from shardc.errors import ClusterError, PeerLostError, PipelineError, all_offenders
from shardc.runtime.actor import Message, Network
from shardc.runtime.calls import processes_text
from shardc.runtime.mailbox import ALL_RUNS, Mailbox, Port, stop_all
from shardc.runtime.stalls import Stall
from shardc.runtime.status.waits import Wait
from shardc.runtime.transport.connection import Frame, FrameKind
from shardc.runtime.transport.link import Link, Packed


class Codec(Protocol):
    """Converts values to bytes and back."""

    def is_ready(self, value: Any) -> bool:
        """Whether `pack` returns without waiting for a device."""
        ...

    def pack(self, channel: int, peer: int, value: Any) -> Packed:
        """Pack the part of a message that `peer` needs."""
        ...

    def unpack(self, channel: int, parts: Mapping[int, Packed]) -> Any:
        """Unpack a message from the parts of all sending processes."""
        ...


class Expected:
    """A value that comes from another process.

    Attributes:
      peer: that process, if it is known.
    """

    def __init__(self, peer: int | None = None) -> None:
        self.peer = peer
        self._there = threading.Event()
        self._packed: Packed = (b"", ())
        self._error: Exception | None = None

    def put(self, packed: Packed) -> None:
        self._packed = packed
        self._there.set()

    def fail(self, error: Exception) -> None:
        if not self._there.is_set():
            self._error = error
            self._there.set()

    @property
    def is_there(self) -> bool:
        return self._there.is_set()

    def get(self, seconds: float | None = None) -> Packed:
        """Wait for the value.

        Raises:
          PeerLostError: the process that has it is lost.
          ClusterError: it did not come in time.
        """
        if not self._there.wait(seconds):
            who = "another process" if self.peer is None else f"process {self.peer}"
            raise ClusterError(
                f"a value of {who} did not come for {seconds:g} s, though it is alive. Each process has to make the "
                "same calls in the same order; if it only takes longer, give `--deadline` more seconds."
            )
        if isinstance(self._error, PeerLostError):
            raise PeerLostError(str(self._error), self._error.process)
        if self._error is not None:
            raise PipelineError(str(self._error), getattr(self._error, "process", None))
        return self._packed


class DistributedNetwork:
    """The part of a network of several processes that runs in this one.

    Args:
      net: the network.
      number: identifies the frames of this network; the same in all processes.
      places: for each actor the processes that run it.
      links: to the other processes that run actors: at least to those that this one exchanges messages with.
      codec: for values. A packed value has a description or a buffer; without both it arrives as None.

    Attributes:
      mine: the actors of this process.
      ports: for `Executor`, of all other actors that have links.

    Raises:
      PipelineError: a channel joins actors that share some of their processes but not all.
    """

    def __init__(
        self, net: Network, number: int, places: Sequence[Sequence[int]], links: Mapping[int, Link], codec: Codec
    ) -> None:
        self.net, self.number, self.places, self.links, self.codec = net, number, places, links, codec
        _check_overlaps(net, places)
        me = {link.me for link in links.values()}
        self.mine = [a for a, ps in enumerate(places) if not links or me & set(ps)]
        self.ports: dict[int, Port] = {
            a: _RemotePort(self, [links[p] for p in ps])
            for a, ps in enumerate(places)
            if a not in self.mine and links.keys() >= set(ps)
        }
        self._mailboxes: Mapping[int, Mailbox] = {}
        self._closed = False
        self._changed = threading.Condition()
        self._opened: set[int] = set()
        self._lost: PeerLostError | None = None
        self._left: dict[int, PeerLostError] = {}
        self._stopped: dict[int, Exception] = {}
        """The reasons why runs were stopped."""
        self._reported: set[int] = set()
        """The runs of whose stop the other processes were notified. Kept for ever: each is reported once."""
        self._ends: dict[int, int] = {}
        """The rounds after which runs end, where a task has ended them."""
        self._parts: dict[tuple[int, int, int], dict[int, deque[Packed]]] = {}
        """By run, channel and key the parts that have come from each process, those of later rounds behind."""
        self._joining: set[tuple[int, int, int]] = set()
        """The messages that a thread makes of their parts, one after the other."""
        self._credits: dict[tuple[int, int], dict[int, int]] = {}
        self._values: dict[tuple[int, int], Expected] = {}
        self._awaited: WeakValueDictionary[tuple[int, int], Expected] = WeakValueDictionary()

    def open(self, mailboxes: Mapping[int, Mailbox], seconds: float) -> None:
        """Wait until all other processes have opened the network too. From then on any of them may send.

        Raises:
          PeerLostError: one of them is lost.
          ClusterError: one of them did not come.
        """
        self._mailboxes = mailboxes
        for link in self.links.values():
            link.add(self.number, self)
            link.send(Frame(FrameKind.OPEN, self.number))
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None or len(self._opened) == len(self.links), seconds)
            if self._lost is not None:
                raise PeerLostError(str(self._lost), self._lost.process)
            missing = sorted(self.links.keys() - self._opened)
        if missing:
            raise ClusterError(
                f"{processes_text(missing)} did not open the pipeline "
                f"within {seconds:g} s. Each process has to make the same calls in the same order; if it only takes "
                "longer, give `--deadline` more seconds."
            )

    def close(self) -> None:
        """Accept no more messages. Values that a caller still waits for arrive: other processes may be behind."""
        with self._changed:
            self._closed = True
        stop_all(self._mailboxes.values(), ALL_RUNS, PipelineError("the pipeline was closed."))
        self._mailboxes = {}
        self._remove_if_done()

    def _remove_if_done(self) -> None:
        with self._changed:
            if any(not v.is_there for v in self._awaited.values()):
                return
        for link in self.links.values():
            link.remove(self.number)

    def waits(self, stalls: Sequence[Stall]) -> list[Wait]:
        """The waits of stalled actors of this process, for actors here and elsewhere."""
        name = self._name
        return [
            Wait(
                tuple((p, name(a)) for a in s.awaited for p in self.places[a]),
                f"{self.net.name(s.actor, 'rank')} before {s.label}", s.seconds, name(s.actor),
            )
            for s in stalls
        ]  # fmt: skip

    def _name(self, actor: int) -> str:
        return f"{self.number:x}/{actor}"

    # -- frames

    def receive(self, peer: int, frame: Frame) -> None:
        """Handle a frame. Runs in the reader thread of the link."""
        try:
            if self._closed:
                self._receive_late(frame)
                return
            match frame.kind:
                case FrameKind.MESSAGE:
                    self._message(peer, frame)
                case FrameKind.CREDIT:
                    self._credit(peer, frame)
                case FrameKind.END:
                    self.end(frame.run, frame.key)
                case FrameKind.VALUE:
                    self._value(frame.run, frame.channel).put((frame.about, frame.buffers))
                case FrameKind.OPEN:
                    with self._changed:
                        self._opened.add(peer)
                        self._changed.notify_all()
                case _:
                    self._stop(frame)
        except Exception as error:  # noqa: BLE001 - the thread must survive, and the run must not
            self.fail(frame.run, error)

    def _receive_late(self, frame: Frame) -> None:
        """Handle a frame of a closed network: a value that a caller waits for, or the failure of its run."""
        if frame.kind is FrameKind.STOP:
            self._stop(frame)
        elif frame.kind is FrameKind.VALUE and (value := self._awaited.get((frame.run, frame.channel))) is not None:
            value.put((frame.about, frame.buffers))
        else:
            return
        self._remove_if_done()

    def _message(self, peer: int, frame: Frame) -> None:
        sources = self.places[self.net.channels[frame.channel].source]
        part = frame.about, frame.buffers
        if len(sources) == 1:
            self._deliver(frame, {peer: part})
            return
        at = frame.run, frame.channel, frame.key
        with self._changed:
            known = self._parts.setdefault(at, {p: deque() for p in sources})
            known[peer].append(part)
            if at in self._joining:  # by the thread of another link, which sees this part too
                return
            self._joining.add(at)
        del part
        while (parts := self._whole(at)) is not None:
            self._deliver(frame, parts)

    def _whole(self, at: tuple[int, int, int]) -> dict[int, Packed] | None:
        """The next message of a channel and key, if all its parts are there; else this thread joins no more of them."""
        with self._changed:
            known = self._parts.get(at, {})
            if known and all(known.values()):
                return {p: parts.popleft() for p, parts in known.items()}
            if not any(known.values()):
                self._parts.pop(at, None)
            self._joining.discard(at)
            return None

    def _deliver(self, frame: Frame, parts: dict[int, Packed]) -> None:
        value = None
        if any(about or buffers for about, buffers in parts.values()):
            value = self.codec.unpack(frame.channel, parts)
        mailbox = self._mailbox(self.net.channels[frame.channel].target)
        if mailbox is not None:
            mailbox.message(frame.run, (frame.channel, frame.key), value)

    def _credit(self, peer: int, frame: Frame) -> None:
        channel = self.net.channels[frame.channel]
        readers = self.places[channel.target]
        if len(readers) > 1:
            with self._changed:
                counts = self._credits.setdefault((frame.run, frame.channel), dict.fromkeys(readers, 0))
                before = min(counts.values())
                counts[peer] += 1
                if min(counts.values()) == before:
                    return
        mailbox = self._mailbox(channel.source)
        if mailbox is not None:
            mailbox.credit(frame.run, frame.channel)

    def _mailbox(self, actor: int) -> Mailbox | None:
        """The mailbox of an actor of this process; None if another thread has closed the network meanwhile."""
        found = self._mailboxes.get(actor)
        if found is None and not self._closed:
            raise ClusterError(f"a frame came for actor {actor}, which does not run in this process.")
        return found

    def _stop(self, frame: Frame) -> None:
        said = json.loads(frame.about)
        if "lost" in said:
            self._give_up(PeerLostError(said["text"], said["lost"]))
        else:
            self._stop_all(frame.run, PipelineError(said["text"], said["process"]))

    def lose(self, error: PeerLostError) -> None:
        """Handle the loss of a process: no run of this network can complete. Notifies the other processes.

        If the process has left on purpose, everything it sent has arrived: a run goes on until it waits for more.
        """
        link = self.links.get(error.process)
        if link is None or not link.left or link.lost is not error or error.process not in self._opened:
            self._give_up(error)
            return
        with self._changed:
            self._left[error.process] = error
            waiting = [v for v in (*self._values.values(), *self._awaited.values()) if v.peer in (None, error.process)]
        for value in waiting:
            value.fail(error)
        for mailbox in self._mailboxes.values():
            for actor, processes in enumerate(self.places):
                if error.process in processes:
                    mailbox.leave(actor, error)

    def _give_up(self, error: PeerLostError) -> None:
        with self._changed:
            if self._lost is not None:
                return
            self._lost = error
            self._reported.add(ALL_RUNS)
            self._changed.notify_all()
        self._abandon(ALL_RUNS, error)
        about = json.dumps({"lost": error.process, "text": str(error)}).encode()
        for peer, link in self.links.items():
            if peer != error.process:
                link.send(Frame(FrameKind.STOP, self.number, ALL_RUNS, about=about))

    def fail(self, run: int, error: Exception) -> None:
        """Stop a run in all processes."""
        self.stop(run, PipelineError(f"{type(error).__name__}: {error}"))

    def stop(self, run: int, why: Exception) -> None:
        """Abandon one run in all processes. Each is notified once."""
        if isinstance(why, PeerLostError):
            self._give_up(why)
            return
        self._stop_all(run, why)

    def end(self, run: int, rounds: int) -> None:
        """End a run after fewer rounds, in all processes."""
        with self._changed:
            if self._ends.get(run, rounds + 1) <= rounds:
                return
            self._ends[run] = rounds
        for mailbox in dict.fromkeys(self._mailboxes.values()):
            mailbox.end(run, rounds)
        for link in self.links.values():  # as with a stop: some processes have no link to the first one
            link.send(Frame(FrameKind.END, self.number, run, 0, rounds))

    def stop_frame(self, run: int, why: Exception) -> Frame:
        """The frame that tells others why a run has stopped, and in which process it did."""
        process, text = why.process if isinstance(why, PipelineError) else None, str(why)
        if process is None:
            process = next(iter(self.links.values())).me
            text = f"process {process}: {text}"
        return Frame(FrameKind.STOP, self.number, run, about=json.dumps({"text": text, "process": process}).encode())

    def _stop_all(self, run: int, why: Exception) -> None:
        self._abandon(run, why)
        with self._changed:
            if not self._reported.isdisjoint((run, ALL_RUNS)):
                return
            self._reported.add(run)
        for link in self.links.values():  # each process notifies all that it knows: some have no link to the first one
            link.send(self.stop_frame(run, why))

    def _abandon(self, run: int, why: Exception) -> None:
        """Stop the actors of this process, and fail the values of these runs that callers wait for."""
        with self._changed:
            self._stopped.setdefault(run, why)
            known = *self._values.items(), *self._awaited.items()
            waiting = [v for at, v in known if run in (at[0], ALL_RUNS)]  # those of earlier runs are still on their way
        for value in waiting:
            value.fail(why)
        stop_all(self._mailboxes.values(), run, why)

    # -- values besides the network

    def _value(self, run: int, number: int) -> Expected:
        with self._changed:
            found = self._awaited.get((run, number))
            return found if found is not None else self._values.setdefault((run, number), Expected())

    def expect(self, run: int, number: int, peer: int | None = None) -> Expected:
        """The value `number` of a run, which another process sends. The network holds only a weak reference to it.

        Args:
          peer: the process that sends it. If it is not known, the value counts as lost when any process leaves.
        """
        with self._changed:
            found = self._values.pop((run, number), None) or Expected(peer)
            found.peer = peer
            self._awaited[run, number] = found
            left = self._left.values() if peer is None else [e for p, e in self._left.items() if p == peer]
            error = self._stopped.get(run) or self._stopped.get(ALL_RUNS) or next(iter(left), None)
        if error is not None:
            found.fail(error)
        return found

    def forget(self, run: int) -> None:
        """Drop values of this run and earlier ones that were never requested."""
        with self._changed:
            self._values = {at: v for at, v in self._values.items() if at[0] > run}
            self._credits = {at: counts for at, counts in self._credits.items() if at[0] > run}
            self._stopped = {at: why for at, why in self._stopped.items() if at > run}
            self._parts = {at: parts for at, parts in self._parts.items() if at[0] > run}
            self._ends = {at: rounds for at, rounds in self._ends.items() if at > run}
            self._joining = {at for at in self._joining if at[0] > run}

    def send_value(self, run: int, number: int, peer: int, pack: Callable[[], Packed]) -> None:
        """Send a value outside of channels. `pack` may wait for a device: it runs in a thread of the link."""

        def frame() -> Frame:
            try:
                about, buffers = pack()
            except Exception as error:  # noqa: BLE001 - of the computation that makes the value
                self.fail(run, error)
                return self.stop_frame(run, error)
            return Frame(FrameKind.VALUE, self.number, run, number, 0, about, buffers)

        self.links[peer].send_when_packed(frame)


class _RemotePort:
    """The port of an actor that runs in other processes."""

    def __init__(self, network: DistributedNetwork, links: Sequence[Link]) -> None:
        self._network, self._links = network, links

    def message(self, run: int, message: Message, value: Any) -> None:
        net, (channel, key) = self._network, message
        assert isinstance(key, int)

        def frame(peer: int) -> Frame:
            if value is None:
                return Frame(FrameKind.MESSAGE, net.number, run, channel, key)
            try:
                about, buffers = net.codec.pack(channel, peer, value)
            except Exception as error:  # noqa: BLE001 - of the computation that makes the value
                net.fail(run, error)
                return net.stop_frame(run, error)  # the others know already; the link wants a frame
            return Frame(FrameKind.MESSAGE, net.number, run, channel, key, about, buffers)

        name = net.number, run, message  # those of later rounds do not overtake it
        for link in self._links:
            if link.is_packing(name) or not (value is None or net.codec.is_ready(value)):
                link.send_when_packed(lambda peer=link.peer: frame(peer), name)
            else:
                link.send(frame(link.peer))

    def credit(self, run: int, channel: int) -> None:
        for link in self._links:
            link.send(Frame(FrameKind.CREDIT, self._network.number, run, channel))

    def end(self, run: int, rounds: int) -> None:
        self._network.end(run, rounds)

    def stop(self, run: int, why: Exception) -> None:
        self._network.stop(run, why)


def _check_overlaps(net: Network, places: Sequence[Sequence[int]]) -> None:
    wrong = [
        f'channel "{c.name}" goes from actor {c.source} in {list(places[c.source])} to actor {c.target} in '
        f"{list(places[c.target])}."
        for c in net.channels
        if set(places[c.source]) & set(places[c.target]) and set(places[c.source]) != set(places[c.target])
    ]
    if wrong:
        raise PipelineError(all_offenders("Two actors of a channel share all of their processes or none:", wrong))
