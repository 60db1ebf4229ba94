"""One actor's thread: what it does for each step, and what it tells about a run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from time import perf_counter
from typing import Any, Final, TypeAlias

from shardc.errors import PipelineTaskError
from shardc.runtime.actor import Actor, Network, Span, Step
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


class Worker:
    """One actor's thread and what it needs: nothing of the executor, so that dropping that ends the thread."""

    def __init__(
        self,
        net: Network,
        number: int,
        tasks: Sequence[Task],
        mailbox: Mailbox,
        ports: Mapping[int, Port],
        moves: Sequence[Transport | None],
        reports: SimpleQueue[None],
        window: Window | None,
    ) -> None:
        self.number = number
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
        self._tasks = tasks
        self._ports = ports
        self._moves = moves
        self._reports = reports
        self._window = window
        ends = [(c.source, c.target) for c in net.channels]
        self._to = [ports[t] if s == number != t else None for s, t in ends]
        """By channel where its messages go; None: to this actor."""
        self._back = [ports[s] if t == number != s else None for s, t in ends]
        """By channel where its credits go."""
        self._bounded = [c.registers is not None for c in net.channels]

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
        actor: Actor[None] = Actor(self._net, self.number, None)
        self.spans, self.failures, self.stopped = [], [], False
        self.mailbox.open(run, actor)
        for step, task in zip(self._net.actors[self.number], self._tasks, strict=True):
            label, source = step.label, task.source
            try:
                if task.prepare is not None:
                    task.prepare(label)
                while not actor.ready() and self.mailbox.stopped < run:
                    self.mailbox.feed(run, actor)
                if self.mailbox.stopped >= run:
                    self.stopped = True
                    break
                while self._window is not None and (self._window.full or (task.settled and len(self._window))):
                    label, source = self._window.oldest
                    self._window.make_room()
                label, source = step.label, task.source
                begin = perf_counter()
                end = self._launch(actor, step, task, run)
                if record:
                    self.spans.append(Span(self.number, step.label, begin, end))
            except BaseException as error:  # noqa: BLE001 - SystemExit too: the thread has to live on
                self.failures.append((perf_counter(), _task_error(error, self.number, label, source)))
                stop_all(self._ports.values(), run)
                break
        if self._window is not None and (self.stopped or self.failures):
            earlier = self._window.drain()  # nothing runs on; and what was launched may have failed before
            if earlier is not None:
                (label, source), error = earlier
                self.failures.append((float("inf"), _task_error(error, self.number, label, source)))

    def _launch(self, actor: Actor[Any], step: Step, task: Task, run: int) -> float:
        """Runs a step. Gives the time before its registers go back: what takes them next starts later."""
        values, _ = actor.fire()
        given = list(task.run(values))
        del values  # the registers that were taken
        count = len(step.gives)
        if len(given) < count:
            raise ValueError(f"the task returned {len(given)} values; the step gives {count}.")
        for i, message in enumerate(step.gives):
            channel = message[0]
            move = self._moves[channel]
            if move is not None:
                given[i] = move(given[i])
            port = self._to[channel]
            if port is None:
                actor.deliver(message, given[i])
            else:
                port.message(run, message, given[i])
        end = perf_counter()
        for channel, _ in step.takes:
            if self._bounded[channel]:
                port = self._back[channel]
                if port is None:
                    actor.credit(channel, None)
                else:
                    port.credit(run, channel)
        if self._window is not None:
            self._window.add((step.label, task.source), given[:count], given[count:])
        return end


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
