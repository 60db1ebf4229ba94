"""The actors of a network under the real clock: threads that run Python callables.

A thread runs its actors' steps in their order. It prepares a step (host work that needs no inputs), waits for the
inputs, runs the task, which on an asynchronous device only launches it, and posts the results. With a thread for each
actor the host work of all overlaps; where launching is all that tasks do, fewer threads spend less on waking each
other. Actors run ahead of the device as far as registers and window allow.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from queue import SimpleQueue
from typing import Any, TypeAlias

from shardc.errors import PipelineError, PipelineTaskError, all_offenders
from shardc.runtime.actor import Channel, Network, Span
from shardc.runtime.deadlock import find_deadlock
from shardc.runtime.mailbox import Mailbox, Port, stop_all
from shardc.runtime.window import LaunchWindow
from shardc.runtime.worker import ALL_RUNS, Task, Transport, Worker

__all__ = ["Executor", "Task", "Tasks"]

Tasks: TypeAlias = Mapping[Hashable, Task] | Callable[[Hashable], Task]


class Executor:
    """Runs a network, again and again. Close it, or use it as a context manager; dropping it closes it too.

    Args:
      net: one that `find_deadlock` finds nothing in.
      tasks: the task of each label of the actors that run here: a mapping, or a function of the label.
      transports: for a channel a function that moves a value to its consumer, called in the giver's thread as soon as
        the value is there, so that the move overlaps with what comes next (`jax.device_put`). Not given: values stay.
      wait, window: at most `window` launched, unfinished steps for each actor; `wait` blocks until the values that it
        is given are there (`jax.block_until_ready`). Not given: no bound.
      finished: whether a token is there; saves waiting for those that are.
      threads: how many the actors of this process are dealt out to; not given: each has its own.
      mine: the actors that this process runs; all, if not given.
      ports: for each actor that runs elsewhere how to post to it. What comes back goes to `mailboxes`.
      name: of the threads.

    Raises:
      PipelineError: the network deadlocks, a label has no task, or an actor elsewhere no port.

    Example:
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
        wait: Callable[[list[Any]], object] | None = None,
        finished: Callable[[Any], bool] | None = None,
        window: int | None = None,
        threads: int | None = None,
        mine: Iterable[int] | None = None,
        ports: Mapping[int, Port] | None = None,
        name: str = "pipeline",
    ) -> None:
        deadlock = find_deadlock(net)
        if deadlock is not None:
            raise PipelineError(str(deadlock))
        here = sorted(range(len(net.actors)) if mine is None else set(mine))
        _check_places(net, here, ports or {})
        if (window is None) != (wait is None) or (window is not None and window < 1):
            raise PipelineError(f"Executor: window={window} and wait={wait}: give both, and a window of 1 or more.")
        found = _resolve(net, here, tasks)
        shares = _shares(here, len(here) if threads is None else max(1, threads))
        boxes = [Mailbox() for _ in shares]
        self.mailboxes: dict[int, Mailbox] = {a: box for share, box in zip(shares, boxes, strict=True) for a in share}
        """Where messages and credits from elsewhere are to be posted, by actor."""
        self._ports: dict[int, Port] = {**(ports or {}), **self.mailboxes}
        self._reports: SimpleQueue[None] = SimpleQueue()
        moves = [None if transports is None else transports(c) for c in net.channels]
        windows = {a: LaunchWindow(window, wait, finished) for a in here if window is not None and wait is not None}
        self._workers = [
            Worker(
                net, {a: found[a] for a in share}, windows, box, self._ports, moves, self._reports,
            )
            for share, box in zip(shares, boxes, strict=True)
        ]  # fmt: skip
        self._net = net
        self._runs = 0
        self._running = threading.Lock()
        for w, share in zip(self._workers, shares, strict=True):
            who = f"actor{'s' if len(share) > 1 else ''} {', '.join(map(str, share))}"
            w.thread = threading.Thread(target=w.loop, name=f"{name}: {who}", daemon=True)
            w.thread.start()
        self._finalizer = weakref.finalize(self, _close, self._workers)

    def run(self, *, record: bool = False) -> list[Span]:
        """Runs all steps of the actors that are here, and returns when the last was launched.

        Returns:
          if asked to record, the host's times of all steps by actor: from when the inputs were there to when the
          results were posted. Seconds of `time.perf_counter`.

        Raises:
          PipelineTaskError: a task failed; all actors have stopped, and the executor can be run again.
          PipelineError: the executor is closed, or running already, or an actor elsewhere stopped the run.
        """
        if not self._running.acquire(blocking=False):
            raise PipelineError("Executor.run: it is running already, in another thread or in a task of its own.")
        try:
            if not self._finalizer.alive:
                raise PipelineError("Executor.run: the executor is closed.")
            self._runs += 1
            return self._run(self._runs, record)
        finally:
            self._running.release()

    def _run(self, run: int, record: bool) -> list[Span]:
        interrupt: BaseException | None = None
        ordered = False
        while True:
            try:
                if not ordered:  # an order that comes twice is ignored
                    for w in self._workers:
                        w.orders.put((run, record))
                    ordered = True
                while any(w.done < run for w in self._workers):
                    self._reports.get()
                break
            except BaseException as error:  # KeyboardInterrupt, wherever it hits
                if interrupt is not None:  # a second one: whoever sits there will not wait for a task that hangs
                    for w in self._workers:
                        w.abandoned = w.done < run
                    raise
                interrupt = error
                stop_all(self._ports.values(), run)
        spans = [span for w in self._workers for span in w.spans]
        failed = _first_cause(self._net, sorted((f for w in self._workers for f in w.failures), key=lambda f: f[0]))
        stopped = any(w.stopped for w in self._workers)
        for w in self._workers:
            w.spans, w.failures = [], []
            if failed or stopped:
                w.mailbox.clear(run)
        try:
            if interrupt is not None:
                raise interrupt
            if failed:
                for later in failed[1:]:
                    failed[0].add_note(f"After it {later}".partition("\n")[0])
                raise failed[0]
            if stopped and not self._finalizer.alive:
                raise PipelineError("Executor.run: the executor was closed while it ran.")
            if stopped:
                raise PipelineError(
                    "Executor.run: an actor of another process stopped the run; the error stands there."
                )
        finally:
            del failed, interrupt  # or this frame and the exception would hold each other
        return spans

    def close(self) -> None:
        """Ends all threads and waits for them; a run in another thread is stopped. Closing twice is nothing."""
        self._finalizer()

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _shares(actors: Sequence[int], threads: int) -> list[list[int]]:
    """The actors of each thread: neighbours, which exchange most."""
    count = min(threads, len(actors))
    ends = [i * len(actors) // count for i in range(count + 1)] if count else [0]
    return [list(actors[a:b]) for a, b in pairwise(ends)]


def _close(workers: Sequence[Worker]) -> None:
    for w in workers:
        w.mailbox.stop(ALL_RUNS)
        w.orders.put(None)
    for w in workers:
        if w.thread is not threading.current_thread() and not w.abandoned:
            w.thread.join()


def _first_cause(net: Network, failed: Sequence[tuple[float, PipelineTaskError]]) -> list[PipelineTaskError]:
    """The failures, before all others one that none of them comes before in the network.

    Where tasks are only launched, a step that reads what a failed one made can fail, and be heard of, before that one.
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
    """Whether the step of one failure has to end before that of another begins."""
    place = {e: next(i for i, s in enumerate(net.actors[e.actor]) if s.label == e.label) for e in (one, other)}
    giver = {m: (a, i) for a, steps in enumerate(net.actors) for i, s in enumerate(steps) for m in s.gives}
    needed = [0] * len(net.actors)  # of each actor's steps, before the other
    looked = [0] * len(net.actors)
    needed[other.actor] = place[other]
    takes = [giver[m] for m in net.actors[other.actor][place[other]].takes]
    while True:
        for a, i in takes:
            needed[a] = max(needed[a], i + 1)
        takes = [giver[m] for a, steps in enumerate(net.actors) for s in steps[looked[a] : needed[a]] for m in s.takes]
        if looked == needed:
            return place[one] < needed[one.actor]
        looked = list(needed)


def _check_places(net: Network, here: Sequence[int], ports: Mapping[int, Port]) -> None:
    strange = [a for a in here if not 0 <= a < len(net.actors)]
    if strange:
        raise PipelineError(f"Executor: mine has {strange}; the network has actors 0 to {len(net.actors) - 1}.")
    lost = sorted(
        {
            f'channel "{c.name}" joins actor {a}, which is here, and actor {b}, which is elsewhere and has no port.'
            for c in net.channels
            for a, b in ((c.source, c.target), (c.target, c.source))
            if a in here and b not in here and b not in ports
        }
    )
    if lost:
        raise PipelineError(all_offenders("Executor: give a port for each actor that runs elsewhere:", lost))


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
