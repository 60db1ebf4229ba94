"""The actors of a network in real time: threads that run Python callables.

A thread runs the steps of its actors in order. It prepares a step (host work that needs no inputs), waits for the
inputs, runs the task, and posts the results. On an asynchronous device the task only launches the work. With one thread
for each actor the host work of all actors overlaps. If tasks only launch, fewer threads spend less time on waking each
other. Actors run ahead of the device as far as registers and the launch limit allow.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Final, TypeAlias

from shardc.errors import PeerLostError, PipelineError, PipelineTaskError, all_offenders
from shardc.runtime.actor import Channel, Message, Network, Span
from shardc.runtime.deadlock import find_deadlock
from shardc.runtime.mailbox import ALL_RUNS, Mailbox, Port, Ports, stop_all
from shardc.runtime.stalls import StallWatch
from shardc.runtime.window import LaunchLimit, LaunchWindow
from shardc.runtime.worker import RoundsEnded, RunOrder, Task, ThreadShare, Transport, Worker

__all__ = ["Executor", "LaunchLimit", "ProcessShare", "RoundsEnded", "Task", "Tasks", "Threads"]

_log: Final = logging.getLogger("shardc")
_SOON: Final = 1.0
"""Seconds after which a run that is to end says what it waits for."""

Tasks: TypeAlias = Mapping[Hashable, Task] | Callable[[Hashable], Task]


@dataclass(frozen=True)
class ProcessShare:
    """The actors that this process runs.

    Attributes:
      mine: numbers of these actors.
      ports: the port of each actor that runs in another process. Its replies go to `Executor.mailboxes`.
      patience: seconds that a run may wait for other processes without running a step.
      look: called about once a second while a run waits. An error that it raises ends the run in all processes.
      channels: the port of each channel whose ends run both here and in other processes; as in `Ports`.
      others: to stop and end runs in other processes.
      counted: as in `Ports`.
    """

    mine: Collection[int]
    ports: Mapping[int, Port] = field(default_factory=dict[int, Port])
    patience: float = math.inf
    look: Callable[[], object] | None = None
    channels: Mapping[int, Port] = field(default_factory=dict[int, Port])
    others: Port | None = None
    counted: Collection[int] = ()


@dataclass(frozen=True)
class Threads:
    """The threads of an executor: how many share its actors (None: one for each actor), and their name."""

    count: int | None = None
    name: str = "pipeline"


class Executor:
    """The threads of a network, which can be run any number of times.

    Close it, or use it as a context manager; dropping it closes it too.

    Args:
      net: a network without a deadlock.
      tasks: the task of each label of the actors that run here: a mapping, or a function of the label.
      transports: for a channel, a function that moves a value to its consumer (`jax.device_put`). It is called in the
        giver's thread as soon as the value is there, so that the move overlaps with the next steps. None: values stay.
      limit: the launched, unfinished steps that each actor may have. None: no limit.
      threads: number and name of the threads.
      share: the actors of this process. None: all actors.

    Raises:
      PipelineError: the network deadlocks, a label has no task, or an actor of another process has no port.

    Examples:
      >>> from shardc.runtime.actor import Step
      >>> net = Network(((Step("make", (), ((0, 0),)),), (Step("show", ((0, 0),)),)), (Channel("c", 0, 1, 1),))
      >>> seen = []
      >>> tasks = {"make": Task(lambda _: [42]), "show": Task(lambda values: seen.extend(values) or [])}
      >>> with Executor(net, tasks) as executor:
      ...     _ = executor.run()
      >>> seen
      [42]
    """

    def __init__(
        self,
        net: Network,
        tasks: Tasks,
        *,
        transports: Callable[[Channel], Transport] | None = None,
        limit: LaunchLimit | None = None,
        threads: Threads = Threads(),
        share: ProcessShare | None = None,
    ) -> None:
        deadlock = find_deadlock(net)
        if deadlock is not None:
            raise PipelineError(str(deadlock))
        share = share or ProcessShare(range(len(net.actors)))
        here = sorted(set(share.mine))
        _check_places(net, here, share.ports)
        found = _resolve(net, here, tasks)
        shares = [_share_of(actors, found, limit) for actors in _split(here, threads.count)]
        self.mailboxes: dict[int, Mailbox] = {a: s.mailbox for s in shares for a in s.tasks}
        """The mailbox of each actor, to which other processes post messages and credits."""
        self._ports = Ports({**share.ports, **self.mailboxes}, share.channels, share.others, share.counted)
        self._reports: SimpleQueue[None] = SimpleQueue()
        moves = [None if transports is None else transports(c) for c in net.channels]
        self._workers = [Worker(net, s, self._ports, moves, self._reports) for s in shares]
        self._net = net
        self._patience, self._look = share.patience, share.look
        self.runs = 0
        """The number of the last run."""
        self._late = {late.message: late for a in here for late in net.late[a]}
        self.rounds = 0
        """The rounds that the last run has run here: fewer than asked for if a task has raised `RoundsEnded`."""
        self.left: dict[Message, list[Any]] = {}
        """The messages that the last run left in delayed channels to actors of this process, each one's in order. After
        whole periods they are the first ones of a run that goes on. After `RoundsEnded`, an actor that was ahead has
        left what it had then."""
        self._running = threading.Lock()
        for w, s in zip(self._workers, shares, strict=True):
            w.start(f"{threads.name}: actor{'s' if len(s.tasks) > 1 else ''} {', '.join(map(str, s.tasks))}")
        self._finalizer = weakref.finalize(self, _close, self._workers)

    def run(
        self,
        *,
        record: bool = False,
        rounds: int | None = None,
        first: Mapping[Message, Sequence[Any]] | None = None,
        begin: int = 0,
    ) -> list[Span]:
        """Run all steps of the actors of this process, and return when the last one is launched.

        Args:
          record: whether to keep the times of all steps.
          rounds: to run, unless a task ends the run before with `RoundsEnded`. None: one period.
          first: the values of `net.first_messages()` for actors of this process, each message's in order. Those for
            others are ignored.
          begin: the first round. Those before, another process has run in place of this one.

        Returns:
          with `record`, the host times of all steps by actor, in seconds of `time.perf_counter`: from the arrival of
          the inputs to the posting of the results. Else an empty list.

        Raises:
          PipelineTaskError: a task failed; all actors have stopped, and the executor can be run again.
          PeerLostError: another process is lost. Every later run raises it too.
          PipelineError: the executor is closed or already running, a task failed in another process, or no message
            came from there for `ProcessShare.patience` seconds.
        """
        if not self._running.acquire(blocking=False):
            raise PipelineError("Executor.run: it is already running, in another thread or in one of its own tasks.")
        try:
            if not self._finalizer.alive:
                raise PipelineError("Executor.run: the executor is closed.")
            given = self._first_of(first or {}, rounds, begin)
            del first  # the values go as they are taken
            self.left, self.rounds = {}, self._net.period if rounds is None else rounds
            self.runs += 1
            return self._run([RunOrder(self.runs, record, rounds, f, begin) for f in given])
        finally:
            self._running.release()

    def _first_of(
        self, first: Mapping[Message, Sequence[Any]], rounds: int | None, begin: int
    ) -> list[dict[Message, list[Any]]]:
        """The first messages of each thread."""
        wrong = [f"rounds={rounds}; it has to be 0 or more."] if rounds is not None and rounds < 0 else []
        counts = {m: late.taken(late.delay) for m, late in self._late.items()}
        wrong += [
            f'first has {len(first.get(m, ()))} values of message {m[1]!r} of "{self._net.channels[m[0]].name}"; a run '
            f"begins with {n}."
            for m, n in counts.items()
            if len(first.get(m, ())) != n
        ]
        if wrong:
            raise PipelineError(all_offenders("Executor.run:", wrong))
        over = {m: late.taken(begin) for m, late in self._late.items()}
        return [{m: list(first[m][over[m] :]) for m, n in counts.items() if n and w.takes(m)} for w in self._workers]

    def abandon(self, run: int, error: BaseException) -> None:
        """Count a run, also one that did not begin here, as failed, and stop it in all processes: the next run then has
        the same number in all. Does nothing while a run is going on.

        Args:
          run: the next run, or the last one.
          error: the cause, which is sent to the others.
        """
        if not self._running.acquire(blocking=False):
            return
        try:
            self.runs = max(self.runs, run)
            interrupted = not isinstance(error, Exception)
            text = f"the run was interrupted: {error!r}." if interrupted else f"{type(error).__name__}: {error}"
            stop_all(self._ports.all, run, PipelineError(text))
        finally:
            self._running.release()

    def _run(self, orders: Sequence[RunOrder]) -> list[Span]:
        interrupt = self._wait_for_workers(orders)
        spans, failed, stopped = self._collect()
        try:
            if interrupt is not None:
                raise interrupt
            if failed:
                for later in failed[1:]:
                    failed[0].add_note(f"After it {later}".partition("\n")[0])
                raise failed[0]
            if stopped:
                raise self._why_stopped()
        finally:
            del failed, interrupt  # this frame and the exception would hold each other
        return spans

    def _why_stopped(self) -> Exception:
        if not self._finalizer.alive:
            closed = PipelineError("Executor.run: the executor was closed while it ran.")
            stop_all(self._ports.all, self.runs, closed)
            return closed
        reasons = (w.mailbox.why_stopped(self.runs) for w in self._workers if w.stopped)
        why = next((r for r in reasons if r is not None), "one of its threads has ended.")
        waits = "".join(f"\n  waited: {text}" for w in self._workers for text in w.waits)
        if isinstance(why, PeerLostError):
            return PeerLostError(f"{why}{waits}", why.process)
        return PipelineError(f"{why}{waits}", why.process if isinstance(why, PipelineError) else None)

    def _wait_for_workers(self, orders: Sequence[RunOrder]) -> BaseException | None:
        """Order a run and wait until it has ended in all threads. Returns the exception that interrupted the wait."""
        run = self.runs
        interrupt: BaseException | None = None
        ordered = False
        try:
            while True:
                try:
                    if not ordered:  # a worker ignores an order that comes twice
                        for w, order in zip(self._workers, orders, strict=True):
                            w.orders.put(order)
                        ordered = True
                    self._wait_patiently(run, interrupt is not None)
                    return interrupt
                except BaseException as error:  # KeyboardInterrupt, at any line
                    if interrupt is not None:  # the second one: the user does not wait for a task that hangs
                        for w in self._workers:
                            w.abandoned = w.done < run
                        raise
                    interrupt = error
                    stop_all(self._ports.all, run, PipelineError(f"the run was interrupted: {error!r}."))
        finally:
            del interrupt  # this frame and the exception would hold each other

    def _wait_patiently(self, run: int, interrupted: bool) -> None:
        """Wait until all threads have ended a run. Stop it if nothing has come from other processes for too long."""
        fired, since = -1, monotonic()
        pause = None if self._patience == math.inf and self._look is None else min(1.0, self._patience)
        is_said = False
        while any(w.done < run for w in self._workers):
            ends = not is_said and self.is_stopping()
            with suppress(Empty):
                self._reports.get(timeout=_SOON if ends else pause)
                continue
            if ends:
                is_said = True
                self._say_who_is_awaited(run, interrupted)
            if self._look is not None:
                self._look()
            now = sum(w.fired for w in self._workers)
            if now != fired or not all(w.idle or w.done >= run for w in self._workers):
                fired, since = now, monotonic()
            elif monotonic() - since > self._patience:
                text = f"nothing came from the other processes for {self._patience:g} s, though they are alive."
                stop_all(self._ports.all, run, PipelineError(text))
                since = monotonic()

    def _say_who_is_awaited(self, run: int, interrupted: bool) -> None:
        """Log why the run ends, and which tasks have not returned yet."""
        awaited = [text for w in self._workers if w.done < run and (text := w.at_work())]
        if awaited:
            failures = sorted((f for w in self._workers if w.done >= run for f in w.failures), key=lambda f: f[0])
            reasons = (w.mailbox.why_stopped(run) for w in self._workers)
            why = failures[0][1] if failures else next(r for r in reasons if r is not None)
            again = "again" if interrupted else "twice"
            _log.warning(
                "%s\nThe run ends when what has begun has returned: %s. Ctrl-C %s ends it at once.",
                str(why).partition("\n")[0], ", ".join(awaited), again,
            )  # fmt: skip

    def _collect(self) -> tuple[list[Span], list[PipelineTaskError], bool]:
        """The outcome of a run, taken from the workers: spans, failures, and whether the run was stopped."""
        workers = self._workers
        spans = [span for w in workers for span in w.spans]
        failed = _first_cause(self._net, sorted((f for w in workers for f in w.failures), key=lambda f: f[0]))
        stopped = any(w.stopped for w in workers)
        self.rounds = min([self.rounds, *(w.rounds for w in workers)])
        left = {m: values for w in workers for m, values in w.left.items()}
        if not failed and not stopped:
            counts = ((m, late.waiting(self.rounds)) for m, late in self._late.items())
            self.left = {m: left[m][:n] for m, n in counts if n and m in left}
        for w in workers:
            w.spans, w.failures, w.left = [], [], {}
            if failed or stopped or w.ended:
                w.mailbox.clear(self.runs)
        return spans, failed, stopped

    def is_stopping(self) -> bool:
        """Whether the current run is being abandoned: for a task that waits for something else than messages."""
        return any(w.mailbox.why_stopped(self.runs) is not None for w in self._workers)

    def known_rounds(self) -> int:
        """The rounds of the current run, as far as they are known: fewer once a task has raised `RoundsEnded`."""
        return min(w.known_rounds for w in self._workers)

    def busy(self) -> int:
        """How many threads run a step or may go on: those of the current run that do not wait for messages."""
        return sum(w.done < self.runs and not (w.idle and w.mailbox.empty) for w in self._workers)

    def watch(self) -> StallWatch:
        """A watch that finds stalled actors. It does not keep the executor alive."""
        return StallWatch(self._workers)

    def close(self) -> None:
        """End all threads and wait for them. Stops a run in another thread. May be called twice."""
        self._finalizer()

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _share_of(actors: Sequence[int], tasks: Mapping[int, Sequence[Task]], limit: LaunchLimit | None) -> ThreadShare:
    windows = {} if limit is None else {a: LaunchWindow(limit) for a in actors}
    return ThreadShare({a: tasks[a] for a in actors}, windows, Mailbox())


def _split(actors: Sequence[int], threads: int | None) -> list[list[int]]:
    """The actors of each thread. A thread gets neighbours, because they exchange most."""
    count = len(actors) if threads is None else min(max(1, threads), len(actors))
    ends = [i * len(actors) // count for i in range(count + 1)] if count else [0]
    return [list(actors[a:b]) for a, b in pairwise(ends)]


def _close(workers: Sequence[Worker]) -> None:
    for w in workers:
        w.mailbox.stop(ALL_RUNS, PipelineError("Executor.run: the executor is closed."))
        w.orders.put(None)
    for w in workers:
        if w.thread is not threading.current_thread() and not w.abandoned:
            w.thread.join()


def _first_cause(net: Network, failed: Sequence[tuple[float, PipelineTaskError]]) -> list[PipelineTaskError]:
    """The failures, with one first that no other failure precedes in the network.

    When tasks are only launched, a step that reads the result of a failed step can fail, and be reported, before it.
    """
    errors = [error for _, error in failed]
    for _ in failed:
        earlier = [e for e in errors[1:] if _is_before(net, e, errors[0])]
        if not earlier:
            break
        errors.remove(earlier[0])
        errors.insert(0, earlier[0])
    return errors


def _is_before(net: Network, one: PipelineTaskError, other: PipelineTaskError) -> bool:
    """Whether the step of `one` has to end before the step of `other` begins.

    Steps are counted from the first period. What `other` needs of the periods before that of `one` is left out.
    """
    giver = {m: (a, i) for a, steps in enumerate(net.actors) for i, s in enumerate(steps) for m in s.gives}
    late = {x.message: x.taken(x.delay) for found in net.late for x in found}  # periods between giver and taker
    looked = [one.round // net.period * len(steps) for steps in net.actors]
    needed = list(looked)  # the number of steps of each actor that `other` needs
    needed[other.actor] = max(needed[other.actor], _place(net, other) + 1)
    while looked != needed:
        news = [(a, i) for a, (n, m) in enumerate(zip(looked, needed, strict=True)) for i in range(n, m)]
        looked = list(needed)
        for a, i in news:
            period, at = divmod(i, len(net.actors[a]))
            for m in net.actors[a][at].takes:
                b, j = giver[m]
                needed[b] = max(needed[b], (period - late.get(m, 0)) * len(net.actors[b]) + j + 1)
    return _place(net, one) < needed[one.actor] - (one.actor == other.actor)


def _place(net: Network, error: PipelineTaskError) -> int:
    """The number of steps of its actor before a failed one."""
    period, at = divmod(error.round, net.period)
    steps = net.actors[error.actor]
    return period * len(steps) + next(i for i, s in enumerate(steps) if (s.label, s.round) == (error.label, at))


def _check_places(net: Network, here: Sequence[int], ports: Mapping[int, Port]) -> None:
    strange = [a for a in here if not 0 <= a < len(net.actors)]
    if strange:
        raise PipelineError(f"Executor: share.mine has {strange}; the network has actors 0 to {len(net.actors) - 1}.")
    lost = sorted(
        {
            f'channel "{c.name}" joins actor {a}, which runs here, and actor {b}, which runs elsewhere without a port.'
            for c in net.channels
            for a, b in ((c.source, c.target), (c.target, c.source))
            if a in here and b not in here and b not in ports
        }
    )
    if lost:
        raise PipelineError(
            all_offenders("Executor: ProcessShare.ports needs a port for each actor of another process:", lost)
        )


def _resolve(net: Network, here: Sequence[int], tasks: Tasks) -> dict[int, list[Task]]:
    """The task of each step of each actor that runs here."""
    steps = [(a, step.label) for a in here for step in net.actors[a]]
    if not callable(tasks):
        missing = [f"actor {a}: {label}" for a, label in steps if label not in tasks]
        if missing:
            raise PipelineError(all_offenders("Executor: no task for these steps:", missing))
    found: dict[int, list[Task]] = {a: [] for a in here}
    for a, label in steps:
        found[a].append(tasks(label) if callable(tasks) else tasks[label])
    return found
