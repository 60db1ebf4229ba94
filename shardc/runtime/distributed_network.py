"""A network whose actors run in several processes, as seen by one of them.

    actor here --message--> port --frame--> link ... link --> mailbox --> actor there

An actor may run in several processes at once, as the same steps in the same order: then each sends its part of a
message, a message is there when all its parts are, and a register is free when all its readers have given it back. A
process that runs both ends of a channel sends a part to itself, which does not leave it.
Values go besides the network too, to `expect`ers: arguments that several stages read, results that all processes get.
"""

from __future__ import annotations

import json
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any, Protocol
from weakref import WeakValueDictionary

from shardc.errors import ClusterError, PeerLostError, PipelineError
from shardc.runtime.actor import Message, Network
from shardc.runtime.calls import processes_text
from shardc.runtime.mailbox import ALL_RUNS, Mailbox, Port, RunStopped, stop_all
from shardc.runtime.replaced.successors import Successors
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
      crossing: the channels between actors of the same several processes whose parts go to all of these; a message of
        the others stays in each process.
      senders: for channels whose values do not go over links, the function that sends a frame to a process: its link
        delivers it there.

    Attributes:
      mine: the actors of this process.
      ports, channels, others: for `Executor`, of all other actors that have links, of the channels whose parts come
        from here and from other processes, and to stop runs there.
    """

    def __init__(  # noqa: PLR0913  # a network, and where it runs
        self, net: Network, number: int, places: Sequence[Sequence[int]], links: Mapping[int, Link], codec: Codec,
        crossing: Collection[int] = (), senders: Mapping[int, Callable[[int, Frame], None]] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.net, self.number, self.places, self.links, self.codec = net, number, places, dict(links), codec
        self.senders = senders
        self.me = next((link.me for link in links.values()), places[0][0] if places else 0)
        self.mine = [a for a, ps in enumerate(places) if not links or self.me in ps]
        self.ports: dict[int, Port] = {
            a: _RemotePort(self, ps, ps)
            for a, ps in enumerate(places)
            if a not in self.mine and links.keys() >= set(ps)
        }
        self.channels: dict[int, Port] = {
            i: _RemotePort(self, places[c.target], places[c.source])
            for i, c in enumerate(net.channels)
            if {c.source, c.target} <= {*self.mine}
            and (i in crossing or set(places[c.source]) != set(places[c.target]))
        }
        self.others: Port | None = _RemotePort(self, (), ()) if links else None
        self._packers: dict[int, _Packer] = {}
        """Of each actor, for parts that wait for a device."""
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
        self._came: dict[tuple[int, int], Counter[int]] = {}
        """By run and actor the steps that each process has come to."""
        self._quit: set[tuple[int, int]] = set()
        """The runs that other processes have stopped."""
        self._values: dict[tuple[int, int], Expected] = {}
        self._awaited: WeakValueDictionary[tuple[int, int], Expected] = WeakValueDictionary()
        self.successors = Successors(self)

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

    # -- for successors of lost processes

    @property
    def lost(self) -> PeerLostError | None:
        """Why no run of this network can complete; None: all is well."""
        return self._lost

    def join(self, mailboxes: Mapping[int, Mailbox], look: Callable[[], object], seconds: float) -> int:
        """Do `open` in the successor of a process, for a run that goes on. Returns the first round that it runs.

        Raises:
          PeerLostError, ClusterError: as `Successors.join`.
        """
        self._mailboxes = mailboxes
        first = self.successors.join(look, seconds)
        with self._changed:
            self._opened |= self.links.keys()
        return first

    def empty_frame(self, run: int, channel: int, peer: int, round: int) -> Frame:
        """A message without values."""
        about, buffers = self.codec.pack(channel, peer, ())
        return Frame(FrameKind.MESSAGE, self.number, run, channel, round % self.net.period, about, buffers)

    def last_frames(self, run: int) -> list[Frame]:
        """The frames that tell that a run ends, or was stopped."""
        with self._changed:
            end, why = self._ends.get(run), self._why_stopped(run)
        ends = [] if end is None else [Frame(FrameKind.END, self.number, run, 0, end)]
        return ends if why is None else [*ends, self.stop_frame(run, why)]

    def close(self) -> None:
        """Accept no more messages. Values that a caller still waits for arrive: other processes may be behind."""
        with self._changed:
            self._closed = True
        stop_all(self._mailboxes.values(), ALL_RUNS, PipelineError("the pipeline was closed."))
        for packer in self._packers.values():
            packer.close()
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
                case FrameKind.OPEN if frame.about:
                    self.successors.hear(peer, frame)
                case FrameKind.OPEN:
                    with self._changed:
                        self._opened.add(peer)
                        self._changed.notify_all()
                case _:
                    self._stop(frame)
                    with self._changed:  # after its mailboxes: who waits for the peer finds them stopped
                        self._quit.add((frame.run, peer))
                        self._changed.notify_all()
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
        if not self.successors.is_new(peer, frame):
            return
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

    def send(self, frame: Frame, link: Link) -> None:
        """Send a part of a message, or why there is none, to the process of a link."""
        carried = frame.kind is FrameKind.MESSAGE and bool(frame.buffers)
        sender = self.senders.get(frame.channel) if carried else None
        (link.send if sender is None else partial(sender, link.peer))(frame)

    def packer(self, actor: int) -> _Packer:
        """The thread that packs what an actor gives: in the order of its steps, which is the same in all processes of
        the actor, so that no part waits for a device behind one that another process makes later."""
        with self._changed:
            if actor not in self._packers:
                self._packers[actor] = _Packer(f"shardc network {self._name(actor)} packs")
            return self._packers[actor]

    def _credit(self, peer: int, frame: Frame) -> None:
        if frame.channel >= len(self.net.channels):
            with self._changed:
                self._came.setdefault((frame.run, frame.channel - len(self.net.channels)), Counter())[peer] += 1
                self._changed.notify_all()
            return
        channel = self.net.channels[frame.channel]
        if not self.successors.is_new(peer, frame) or channel.registers is None:
            return
        self.free(frame.run, frame.channel, peer)

    def free(self, run: int, number: int, peer: int) -> None:
        """Count a credit of one reader of a channel: a register is free when all of them have given it back."""
        channel = self.net.channels[number]
        readers = self.places[channel.target]
        if len(readers) > 1:
            with self._changed:
                counts = self._credits.setdefault((run, number), dict.fromkeys(readers, 0))
                before = min(counts.values())
                counts[peer] += 1
                if min(counts.values()) == before:
                    return
        mailbox = self._mailbox(channel.source)
        if mailbox is not None:
            mailbox.credit(run, number)

    def _mailbox(self, actor: int) -> Mailbox | None:
        """The mailbox of an actor of this process; None if another thread has closed the network meanwhile."""
        found = self._mailboxes.get(actor)
        if found is None and not self._closed:
            raise ClusterError(f"a frame came for actor {actor}, which does not run in this process.")
        return found

    def _stop(self, frame: Frame) -> None:
        said = json.loads(frame.about)
        if "lost" in said:
            self.give_up(PeerLostError(said["text"], said["lost"]))
        else:
            self._stop_all(frame.run, PipelineError(said["text"], said["process"]))

    def lose(self, error: PeerLostError) -> None:
        """Handle the loss of a process: no run of this network can complete. Notifies the other processes.

        If the process has left on purpose, everything it sent has arrived: a run goes on until it waits for more.
        """
        link = self.links.get(error.process)
        if self.successors.lose(error):
            return
        if link is None or not link.left or link.lost is not error or error.process not in self._opened:
            self.give_up(error)
            return
        with self._changed:
            self._left[error.process] = error
            self._changed.notify_all()
            waiting = [v for v in (*self._values.values(), *self._awaited.values()) if v.peer in (None, error.process)]
        for value in waiting:
            value.fail(error)
        for mailbox in self._mailboxes.values():
            for actor, processes in enumerate(self.places):
                if error.process in processes:
                    mailbox.leave(actor, error)

    def give_up(self, error: PeerLostError) -> None:
        """End all runs here and in the other processes."""
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
            self.give_up(why)
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

    # -- steps that several processes take together

    def together(self, run: int, actor: int) -> None:
        """Wait until all processes of an actor have come to its next step. Then all of them take it, though the run may
        be stopped meanwhile: a program that one of them does not launch never ends in the others.

        Raises:
          RunStopped: the run was stopped in one of them before it came.
        """
        processes, channel = self.places[actor], len(self.net.channels) + actor
        with self._changed:
            if (why := self._why_stopped(run)) is not None:
                raise RunStopped(why)
            came = self._came.setdefault((run, actor), Counter())
            came[self.me] += 1
            step = came[self.me]
            for p in processes:
                if p != self.me:
                    self.links[p].send(Frame(FrameKind.CREDIT, self.number, run, channel))
            late = lambda: [p for p in processes if came[p] < step]  # noqa: E731
            gone = lambda p: (run, p) in self._quit or (ALL_RUNS, p) in self._quit or p in self._left  # noqa: E731
            self._changed.wait_for(lambda: not late() or self._lost is not None or any(map(gone, late())))
            if late():
                why = self._lost or next((self._left[p] for p in late() if p in self._left), None)
                raise RunStopped(why or self._why_stopped(run) or PipelineError("another process has stopped the run."))

    def _why_stopped(self, run: int) -> Exception | None:
        return self._lost or self._stopped.get(run) or self._stopped.get(ALL_RUNS)

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
            error = self._why_stopped(run) or next(iter(left), None)
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
            self._came = {at: counts for at, counts in self._came.items() if at[0] > run}
            self._quit = {at for at in self._quit if at[0] > run}

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


class _Packer:
    """A thread that sends parts in order, each when it is computed."""

    def __init__(self, name: str) -> None:
        self._left = 0
        self._lock = threading.Lock()
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._name = name
        self._thread: threading.Thread | None = None

    def do(self, send: Callable[[], None], ready: bool) -> None:
        """Send at once if nothing waits for a device, and no part before does. One thread at a time calls this."""
        with self._lock:
            at_once = ready and not self._left
            self._left += not at_once
            if not at_once and self._thread is None:
                self._thread = threading.Thread(target=self._send, name=self._name, daemon=True)
                self._thread.start()
        if at_once:
            send()
        else:
            self._queue.put(send)

    def _send(self) -> None:
        while (send := self._queue.get()) is not None:
            send()
            del send
            with self._lock:
                self._left -= 1

    def close(self) -> None:
        self._queue.put(None)


class _RemotePort:
    """The port of an actor that runs in other processes, or of a channel whose ends run here and there.

    Args:
      takers, givers: the processes that messages go to, and credits.
    """

    def __init__(self, network: DistributedNetwork, takers: Sequence[int], givers: Sequence[int]) -> None:
        self._network, self._takers, self._givers = network, takers, givers

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

        source = net.net.channels[channel].source
        if net.me in self._takers or len(net.places[source]) > 1 or channel in net.senders:
            ready = value is None or net.codec.is_ready(value)
            net.packer(source).do(lambda: self._send(run, channel, frame), ready)
            return

        def send(link: Link) -> None:
            # those of later rounds do not overtake it
            name = net.number, run, message if net.successors.replay(run, link.peer) is None else channel
            if link.is_packing(name) or not (value is None or net.codec.is_ready(value)):
                link.send_when_packed(lambda: frame(link.peer), name)
            else:
                link.send(frame(link.peer))

        for p in self._takers:
            net.successors.post(run, p, channel, send)

    def _send(self, run: int, channel: int, frame: Callable[[int], Frame]) -> None:
        net = self._network
        for p in self._takers:  # the part for this process last: others wait for theirs
            if p != net.me:
                net.successors.post(run, p, channel, partial(net.send, frame(p)))
        if net.me in self._takers:
            net.receive(net.me, frame(net.me))

    def credit(self, run: int, channel: int) -> None:
        frame = Frame(FrameKind.CREDIT, self._network.number, run, channel)
        for p in self._givers:
            if p == self._network.me:
                self._network.receive(p, frame)
            else:
                self._network.successors.give_back(run, p, channel)

    def end(self, run: int, rounds: int) -> None:
        self._network.end(run, rounds)

    def stop(self, run: int, why: Exception) -> None:
        self._network.stop(run, why)
