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
from shardc.runtime.window import Window

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

    def __init__(self, net: Network, number: int, tasks: Sequence[Task], window: Window | None) -> None:
        self.net, self.number, self.tasks, self.window = net, number, tasks, window
        self.rewind()

    def rewind(self) -> None:
        self.actor: Actor[Any] = Actor(self.net, self.number, None)
        self.prepared = False
        self.changed = True
        """Whether anything has happened since it could not go on."""

    def must_wait(self, task: Task) -> bool:
        """Whether steps that it launched have to finish before the next one, which is this."""
        w = self.window
        return w is not None and (w.full or (task.settled and len(w) > 0))


class Worker:
    """The thread of one actor or several, and what it needs: nothing of the executor, so that dropping that ends it.

    A thread with several actors runs a step of each in turn. It waits for what was launched, or for mail, only where
    none of them could go on.
    """

    def __init__(
        self,
        net: Network,
        tasks: Mapping[int, Sequence[Task]],
        windows: Mapping[int, Window],
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
        self._parts = [_Part(net, a, mine, windows.get(a)) for a, mine in tasks.items()]
        part_of = {p.number: p for p in self._parts}
        self._takers = {i: part_of[c.target] for i, c in enumerate(net.channels) if c.target in tasks}
        self._givers = {i: part_of[c.source] for i, c in enumerate(net.channels) if c.source in tasks}
        self._ports = ports
        self._moves = moves
        self._reports = reports
        ends = [(c.source, c.target) for c in net.channels]
        self._to = [ports[t] if s in tasks and t not in tasks else None for s, t in ends]
        """By channel where its messages go; None: to an actor of this thread."""
        self._back = [ports[s] if t in tasks and s not in tasks else None for s, t in ends]
        """By channel where its credits go."""
        self._bounded = [c.registers is not None for c in net.channels]

    def deliver(self, message: Message, value: Any) -> None:
        part = self._takers[message[0]]
        part.actor.deliver(message, value)
        part.changed = True

    def credit(self, channel: int, value: Any) -> None:
        part = self._givers[channel]
        part.actor.credit(channel, value)
        part.changed = True

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
        step, task = actor.step, part.tasks[actor.position]
        assert step is not None
        label, source = step.label, task.source
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
            label, source = step.label, task.source
            begin = perf_counter()
            end = self._launch(part, step, task, run)
        except BaseException as error:  # noqa: BLE001 - SystemExit too: the thread has to live on
            self.failures.append((perf_counter(), _task_error(error, part.number, label, source)))
            stop_all(self._ports.values(), run)
            return False
        part.prepared = False
        if record:
            self.spans.append(Span(part.number, step.label, begin, end))
        return True

    def _drain(self, part: _Part) -> None:
        """Nothing runs on behind a run that failed; and what was launched may have failed before."""
        earlier = None if part.window is None else part.window.drain()
        if earlier is not None:
            (label, source), error = earlier
            self.failures.append((float("inf"), _task_error(error, part.number, label, source)))

    def _launch(self, part: _Part, step: Step, task: Task, run: int) -> float:
        """Runs a step. Gives the time before its registers go back: what takes them next starts later."""
        values, _ = part.actor.fire()
        given = list(task.run(values))
        del values  # the registers that were taken
        count = len(step.gives)
        if len(given) < count:
            raise ValueError(f"the task returned {len(given)} values; the step gives {count}.")
        for i, (channel, _) in enumerate(step.gives):
            move = self._moves[channel]
            if move is not None:
                given[i] = move(given[i])
        if part.window is not None:
            part.window.add((step.label, task.source), given[:count], given[count:])
        given = given[:count][::-1]
        for message in step.gives:  # nothing of it is kept: its taker may be through before this thread goes on
            port = self._to[message[0]]
            if port is None:
                self.deliver(message, given.pop())
            else:
                port.message(run, message, given.pop())
        end = perf_counter()
        for channel, _ in step.takes:
            if self._bounded[channel]:
                port = self._back[channel]
                if port is None:
                    self.credit(channel, None)
                else:
                    port.credit(run, channel)
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
