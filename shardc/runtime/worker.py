"""A thread of actors: what it does for each step, and what it tells about a run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from time import perf_counter
from typing import Any, Final, TypeAlias

from shardc.errors import PipelineTaskError
from shardc.runtime.actor import Actor, Message, Network, Span, Step
from shardc.runtime.mailbox import Mailbox, Port, stop_all
from shardc.runtime.window import LaunchWindow

ALL_RUNS: Final = 2**63 - 1

Transport: TypeAlias = Callable[[Any], Any]


@dataclass(frozen=True)
class Task:
    """What a step does.

    Attributes:
      run: takes the values of the messages that the step takes, gives those of the messages that it gives, both in
        the step's order. More values may follow: tokens, which nobody takes. They are held until the window has
        waited for them; a task whose results may be donated by others before they are finished gives one.
      prepare: host work that needs no inputs; called with the label before the inputs are waited for.
      source: where the task comes from, for errors: `model.py:41`.
      settled: it begins when all steps that its actor launched before have finished, not only been launched.
    """

    run: Callable[[list[Any]], Sequence[Any]]
    prepare: Callable[[Hashable], object] | None = None
    source: str = ""
    settled: bool = False


class _Part:
    """An actor in its thread: what it runs, and how far it is."""

    def __init__(self, net: Network, number: int, window: LaunchWindow | None) -> None:
        self.net, self.number, self.window = net, number, window
        self.ways: list[_Way] = []
        self.rewind()

    def rewind(self) -> None:
        self.actor: Actor[Any] = Actor(self.net, self.number, None)
        self.prepared = False
        self.changed = True
        """Whether anything has happened since it could not go on."""

    def deliver(self, message: Message, value: Any) -> None:
        self.actor.deliver(message, value)
        self.changed = True

    def credit(self, channel: int, value: Any) -> None:
        self.actor.credit(channel, value)
        self.changed = True

    def must_wait(self, task: Task) -> bool:
        """Whether steps that it launched have to finish before the next one, which is this."""
        w = self.window
        return w is not None and (w.full or (task.settled and len(w) > 0))


@dataclass(frozen=True)
class _Way:
    """A step, and the ways of what it gives: to actors of the same thread, or through ports.

    Attributes:
      who: label and source.
      moves: what moves the values of its messages, by their place.
      sends: for each message that it gives who takes it.
      returns: for each that it takes, of a bounded channel, whom the register goes back to.
    """

    task: Task
    who: tuple[Hashable, str]
    moves: Sequence[tuple[int, Transport]]
    sends: Sequence[tuple[_Part | Port, Message]]
    returns: Sequence[tuple[_Part | Port, int]]


class Worker:
    """The thread of one actor or several, and what it needs: nothing of the executor, so that dropping that ends it.

    A thread with several actors runs a step of each in turn. It waits for what was launched, or for mail, only where
    none of them could go on.
    """

    def __init__(
        self,
        net: Network,
        tasks: Mapping[int, Sequence[Task]],
        windows: Mapping[int, LaunchWindow],
        mailbox: Mailbox,
        ports: Mapping[int, Port],
        moves: Sequence[Transport | None],
        reports: SimpleQueue[None],
    ) -> None:
        self.mailbox = mailbox
        self.orders: SimpleQueue[tuple[int, bool] | None] = SimpleQueue()
        self.thread = threading.Thread()
        self.done = 0
        """The last run that ended; then `spans`, `failures` (with their times) and `stopped` say how."""
        self.spans: list[Span] = []
        self.failures: list[tuple[float, PipelineTaskError]] = []
        self.stopped = False
        self.abandoned = False
        """Nobody waits for what it does now."""
        self._net = net
        self._moves = moves
        self._parts = [_Part(net, a, windows.get(a)) for a in tasks]
        self._ports = ports
        self._reports = reports
        self._here = {p.number: p for p in self._parts}
        for part in self._parts:
            part.ways += map(self._way, net.actors[part.number], tasks[part.number])

    def _way(self, step: Step, task: Task) -> _Way:
        channels = self._net.channels
        moves = [(i, self._moves[c]) for i, (c, _) in enumerate(step.gives)]
        return _Way(
            task, (step.label, task.source), [(i, move) for i, move in moves if move is not None],
            [(self._at(channels[m[0]].target), m) for m in step.gives],
            [(self._at(channels[c].source), c) for c, _ in step.takes if channels[c].registers is not None],
        )  # fmt: skip

    def _at(self, actor: int) -> _Part | Port:
        return self._here.get(actor) or self._ports[actor]

    def deliver(self, message: Message, value: Any) -> None:
        """Hands on a message that came by mail."""
        self._here[self._net.channels[message[0]].target].deliver(message, value)

    def credit(self, channel: int, value: Any) -> None:
        """Hands on a register that came back by mail."""
        self._here[self._net.channels[channel].source].credit(channel, value)

    def loop(self) -> None:
        """The thread: runs what is ordered, until None is."""
        while (order := self.orders.get()) is not None:
            run, record = order
            if run > self.done:
                self._run(run, record)
                self._report(run)
        self.stopped = True
        self._report(ALL_RUNS)  # whoever waits for a run that was ordered too late

    def _report(self, run: int) -> None:
        self.done = run
        self.abandoned = False
        self._reports.put(None)

    def _run(self, run: int, record: bool) -> None:
        self.spans, self.failures, self.stopped = [], [], False
        self.mailbox.open(run, self)
        left = [p for p in self._parts if p.actor.step is not None]
        while left and not self.failures:
            while not self.mailbox.empty:
                self.mailbox.feed(run, self)
            if self.mailbox.stopped >= run:
                self.stopped = True
                break
            ran = False
            for part in left:
                if part.changed:
                    ran |= self._advance(part, run, record, wait=False)
            if not ran and not self.failures:
                self._wait(left, run, record)
            left = [p for p in left if p.actor.step is not None]
        for part in self._parts:
            if self.stopped or self.failures:
                self._drain(part)
            part.rewind()  # of a run that failed it may hold messages

    def _wait(self, parts: Sequence[_Part], run: int, record: bool) -> None:
        """Waits for what keeps one of these actors, none of which can go on: what it launched, or else mail."""
        full = [p for p in parts if p.actor.ready()]
        if full:
            self._advance(min(full, key=_since), run, record, wait=True)
        else:
            self.mailbox.feed(run, self)

    def _advance(self, part: _Part, run: int, record: bool, wait: bool) -> bool:
        """Runs an actor's next step, if it can begin; `wait`: once those before it have ended. Gives whether it ran."""
        actor = part.actor
        way = part.ways[actor.position]
        task = way.task
        label, source = way.who
        if self.failures:
            return False
        try:
            if not part.prepared:
                part.prepared = True
                if task.prepare is not None:
                    task.prepare(label)
            part.changed = actor.ready()
            while part.changed and part.must_wait(task):
                assert part.window is not None
                part.changed = wait or part.window.may_go_on
                if part.changed:
                    label, source = part.window.oldest
                    part.window.make_room()
            if not part.changed:
                return False
            label, source = way.who
            begin = perf_counter()
            end = self._launch(part, way, run)
        except BaseException as error:  # noqa: BLE001 - SystemExit too: the thread has to live on
            self.failures.append((perf_counter(), _task_error(error, part.number, label, source)))
            stop_all(self._ports.values(), run)
            return False
        part.prepared = False
        if record:
            self.spans.append(Span(part.number, label, begin, end))
        return True

    def _drain(self, part: _Part) -> None:
        """Nothing runs on behind a run that failed; and what was launched may have failed before."""
        earlier = None if part.window is None else part.window.drain()
        if earlier is not None:
            (label, source), error = earlier
            self.failures.append((float("inf"), _task_error(error, part.number, label, source)))

    def _launch(self, part: _Part, way: _Way, run: int) -> float:
        """Runs a step. Gives the time before its registers go back: what takes them next starts later."""
        values, _ = part.actor.fire()
        given = way.task.run(values)
        del values  # the registers that were taken
        count = len(way.sends)
        if len(given) < count:
            raise ValueError(f"the task returned {len(given)} values; the step gives {count}.")
        tokens, given = list(given[count:]), list(given[:count])
        for i, move in way.moves:
            given[i] = move(given[i])
        if part.window is not None:
            part.window.add(way.who, given, tokens)
        given.reverse()
        for reader, message in way.sends:  # nothing of it is kept: its taker may be through before this thread goes on
            if isinstance(reader, _Part):
                reader.deliver(message, given.pop())
            else:
                reader.message(run, message, given.pop())
        end = perf_counter()
        for giver, channel in way.returns:
            if isinstance(giver, _Part):
                giver.credit(channel, None)
            else:
                giver.credit(run, channel)
        return end


def _since(part: _Part) -> float:
    return 0.0 if part.window is None else part.window.since


def _task_error(error: BaseException, actor: int, label: Hashable, source: str) -> PipelineTaskError:
    """Without our own frames, which would hold values as long as somebody holds the error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__package__") == __package__:
        trace = trace.tb_next
    where = f" ({source})" if source else ""
    failure = PipelineTaskError(
        f"actor {actor} failed in {label}{where}: {type(error).__name__}: {error}\n"
        "All actors of the pipeline have stopped; it can be run again.",
        actor,
        label,
        source,
    )
    failure.__cause__ = error.with_traceback(trace)
    return failure
