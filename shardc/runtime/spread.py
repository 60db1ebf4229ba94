"""A network whose actors run in several processes, as one of them sees it.

    actor here --message--> port --frame--> link ... link --> mailbox --> actor there

An actor may run in several processes at once, as the same steps in the same order: then each sends its part of a
message, a message is there when all its parts are, and a register is free when all its readers have given it back.
Values go besides the network too, to `expect`ers: arguments that several stages read, results that all processes get.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any, Protocol
from weakref import WeakValueDictionary

from shardc.errors import ClusterError, PeerLostError, PipelineError
from shardc.runtime.actor import Message, Network
from shardc.runtime.link import Frame, FrameKind, Link, Packed
from shardc.runtime.mailbox import Mailbox, Port, stop_all
from shardc.runtime.worker import ALL_RUNS


class Codec(Protocol):
    """How values become bytes, and bytes values."""

    def is_ready(self, value: Any) -> bool:
        """Whether `pack` would not have to wait for a device."""
        ...

    def pack(self, channel: int, peer: int, value: Any) -> Packed:
        """The part of a message that `peer` needs."""
        ...

    def unpack(self, channel: int, parts: Mapping[int, Packed]) -> Any:
        """The message, from the parts of all sending processes."""
        ...


class Expected:
    """A value that comes from another process."""

    def __init__(self) -> None:
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
        """Wait for it.

        Raises:
          PeerLostError: the process that has it is lost.
          ClusterError: it did not come in time.
        """
        if not self._there.wait(seconds):
            raise ClusterError(f"a value of another process did not come for {seconds:g} s.")
        if isinstance(self._error, PeerLostError):
            raise PeerLostError(str(self._error), self._error.process)
        if self._error is not None:
            raise PipelineError(str(self._error))
        return self._packed


class SpreadNetwork:
    """One process's side of a network of several processes.

    Args:
      net: the network.
      number: it tells the frames of this network from those of others, and is the same in all processes.
      places: for each actor the processes that run it.
      links: to all other processes that run actors.
      codec: for values.

    Attributes:
      mine: the actors of this process.
      ports: for `Executor`, of all other actors.
    """

    def __init__(
        self, net: Network, number: int, places: Sequence[Sequence[int]], links: Mapping[int, Link], codec: Codec
    ) -> None:
        self.net, self.number, self.places, self.links, self.codec = net, number, places, links, codec
        me = {link.me for link in links.values()}
        self.mine = [a for a, ps in enumerate(places) if me & set(ps)]
        self.ports: dict[int, Port] = {
            a: _FarPort(self, [links[p] for p in ps]) for a, ps in enumerate(places) if not me & set(ps)
        }
        self._mailboxes: Mapping[int, Mailbox] = {}
        self._closed = False
        self._changed = threading.Condition()
        self._opened: set[int] = set()
        self._lost: PeerLostError | None = None
        self._parts: dict[tuple[int, int, int], dict[int, Packed]] = {}
        self._credits: dict[tuple[int, int], dict[int, int]] = {}
        self._values: dict[tuple[int, int], Expected] = {}
        self._awaited: WeakValueDictionary[tuple[int, int], Expected] = WeakValueDictionary()

    def open(self, mailboxes: Mapping[int, Mailbox], seconds: float) -> None:
        """Meet the other processes: from now on any of them may send.

        Raises:
          PeerLostError: one of them is lost.
          ClusterError: one of them did not come.
        """
        self._mailboxes = mailboxes
        for link in self.links.values():
            link.add(self.number, self)
            link.send(Frame(FrameKind.OPEN, self.number))
        with self._changed:
            until = monotonic() + seconds
            while len(self._opened) < len(self.links):
                if self._lost is not None:
                    raise PeerLostError(str(self._lost), self._lost.process)
                if not self._changed.wait(until - monotonic()):
                    missing = sorted(self.links.keys() - self._opened)
                    who = ", ".join(map(str, missing))
                    raise ClusterError(f"process{'es' if len(missing) > 1 else ''} {who} did not open the pipeline "
                                       f"within {seconds:g} s. Each process has to make the same calls in the same "
                                       "order; if it only takes longer, give `--deadline` more seconds.")  # fmt: skip

    def close(self) -> None:
        """Take no more messages. Values that somebody still waits for arrive."""
        self._mailboxes = {}
        self._closed = True
        self._remove_if_done()

    def _remove_if_done(self) -> None:
        with self._changed:
            if any(not v.is_there for v in self._awaited.values()):
                return
        for link in self.links.values():
            link.remove(self.number)

    # -- frames

    def receive(self, peer: int, frame: Frame) -> None:
        """Take a frame. Runs in the link's thread."""
        if self._closed:
            if frame.kind is FrameKind.VALUE and (value := self._awaited.get((frame.run, frame.channel))) is not None:
                value.put((frame.about, frame.buffers))
                self._remove_if_done()
            return
        try:
            match frame.kind:
                case FrameKind.MESSAGE:
                    self._message(peer, frame)
                case FrameKind.CREDIT:
                    self._credit(peer, frame)
                case FrameKind.VALUE:
                    self._value(frame.run, frame.channel).put((frame.about, frame.buffers))
                case FrameKind.OPEN:
                    with self._changed:
                        self._opened.add(peer)
                        self._changed.notify_all()
                case _:
                    self._stop(peer, frame)
        except Exception as error:  # noqa: BLE001 - the thread must survive, and the run must not
            self.fail(frame.run, error)

    def _message(self, peer: int, frame: Frame) -> None:
        channel = self.net.channels[frame.channel]
        sources, value = self.places[channel.source], None
        parts = {peer: (frame.about, frame.buffers)}
        if len(sources) > 1:
            at = frame.run, frame.channel, frame.key
            known = self._parts.setdefault(at, {})  # links have threads of their own, but a dict's steps are atomic
            known |= parts
            with self._changed:
                if len(known) < len(sources) or self._parts.pop(at, None) is None:
                    return
            parts = known
        if any(about or buffers for about, buffers in parts.values()):
            value = self.codec.unpack(frame.channel, parts)
        self._mailboxes[channel.target].message(frame.run, (frame.channel, frame.key), value)

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
        self._mailboxes[channel.source].credit(frame.run, frame.channel)

    def _stop(self, peer: int, frame: Frame) -> None:
        said = json.loads(frame.about)
        if "lost" in said:
            self.lose(PeerLostError(said["text"], said["lost"]))
            return
        why = PipelineError(f"process {peer}: {said['text']}")
        stop_all(self._mailboxes.values(), frame.run, why)
        with self._changed:
            waiting = [v for (run, _), v in self._awaited.items() if run == frame.run]
        for value in waiting:
            value.fail(why)

    def lose(self, error: PeerLostError) -> None:
        """Take notice that a process is lost: no run of this network ends any more. Tells the other processes."""
        with self._changed:
            if self._lost is not None:
                return
            self._lost = error
            waiting = [*self._values.values(), *self._awaited.values()]
            self._changed.notify_all()
        for value in waiting:
            value.fail(error)
        stop_all(self._mailboxes.values(), ALL_RUNS, error)
        about = json.dumps({"lost": error.process, "text": str(error)}).encode()
        for peer, link in self.links.items():
            if peer != error.process:
                link.send(Frame(FrameKind.STOP, self.number, ALL_RUNS, about=about))

    def fail(self, run: int, error: Exception) -> None:
        """Stop a run in all processes."""
        why = PipelineError(f"{type(error).__name__}: {error}")
        stop_all(self._mailboxes.values(), run, why)
        for link in self.links.values():
            link.send(self.stop_frame(run, why))

    def stop_frame(self, run: int, why: Exception) -> Frame:
        return Frame(FrameKind.STOP, self.number, run, about=json.dumps({"text": str(why)}).encode())

    # -- values besides the network

    def _value(self, run: int, number: int) -> Expected:
        with self._changed:
            found = self._awaited.get((run, number))
            return found if found is not None else self._values.setdefault((run, number), Expected())

    def expect(self, run: int, number: int) -> Expected:
        """The value `number` of a run, which another process sends. It is kept only as long as the caller keeps it."""
        with self._changed:
            found = self._values.pop((run, number), None) or Expected()
            self._awaited[run, number] = found
            if self._lost is not None:
                found.fail(self._lost)
        return found

    def forget(self, run: int) -> None:
        """Drop the values of a run, and of those before it, that nobody has asked for."""
        with self._changed:
            self._values = {at: v for at, v in self._values.items() if at[0] > run}
            self._credits = {at: counts for at, counts in self._credits.items() if at[0] > run}
        for at in [at for at in list(self._parts) if at[0] <= run]:
            self._parts.pop(at, None)

    def send_value(self, run: int, number: int, peer: int, pack: Callable[[], Packed]) -> None:
        """Send a value besides the network. `pack` may wait for a device: it runs in a thread of the link."""

        def frame() -> Frame:
            try:
                about, buffers = pack()
            except Exception as error:  # noqa: BLE001 - of the computation that makes the value
                self.fail(run, error)
                return self.stop_frame(run, error)
            return Frame(FrameKind.VALUE, self.number, run, number, 0, about, buffers)

        self.links[peer].send_when_packed(frame)


class _FarPort:
    """The port of an actor that runs in other processes."""

    def __init__(self, network: SpreadNetwork, links: Sequence[Link]) -> None:
        self._network, self._links = network, links

    def message(self, run: int, message: Message, value: Any) -> None:
        net, (channel, key) = self._network, message
        assert isinstance(key, int)

        def frame(peer: int) -> Frame:
            try:
                about, buffers = net.codec.pack(channel, peer, value)
            except Exception as error:  # noqa: BLE001 - of the computation that makes the value
                net.fail(run, error)
                return net.stop_frame(run, error)
            return Frame(FrameKind.MESSAGE, net.number, run, channel, key, about, buffers)

        for link in self._links:
            if value is None:
                link.send(Frame(FrameKind.MESSAGE, net.number, run, channel, key))
            elif net.codec.is_ready(value):
                link.send(frame(link.peer))
            else:
                link.send_when_packed(lambda peer=link.peer: frame(peer))

    def credit(self, run: int, channel: int) -> None:
        for link in self._links:
            link.send(Frame(FrameKind.CREDIT, self._network.number, run, channel))

    def stop(self, run: int, why: Exception) -> None:
        for link in self._links:
            link.send(self._network.stop_frame(run, why))
