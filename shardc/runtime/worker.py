"""A thread that runs the steps of one actor or several, and reports how a run ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from time import perf_counter
from typing import Any, TypeAlias

from shardc.errors import PipelineError, PipelineTaskError
from shardc.runtime.actor import Actor, Message, Network, Span, Step
from shardc.runtime.mailbox import ALL_RUNS, Mailbox, Port, Ports, RunStopped, stop_all
from shardc.runtime.window import Launched, LaunchWindow

Transport: TypeAlias = Callable[[Any], Any]


@dataclass(frozen=True)
class Task:
    """The work of a step.

    Attributes:
      run: maps the values of the messages that the step takes to those of the messages that it gives, both in the
        step's order. Tokens may follow, which no step takes: they are held until the window has waited for them. A task
        gives a token if its results may be donated before they are ready.
      prepare: host work that needs no inputs; called with the label before the wait for inputs.
      source: origin of the task, for errors: `model.py:41`.
      settled: whether all steps that its actor launched before must have finished, not only been launched.
    """

    run: Callable[[list[Any]], Sequence[Any]]
    prepare: Callable[[Hashable], object] | None = None
    source: str = ""
    settled: bool = False


class RoundsEnded(Exception):
    """Raised by a task whose source has no more, before it changes its list of values: the run ends as if it had been
    asked for fewer rounds. Actors that are ahead stay where they are.

    Attributes:
      rounds: the rounds that are complete.
    """

    def __init__(self, rounds: int) -> None:
        super().__init__(f"the run ends after {rounds} rounds")
        self.rounds = rounds


@dataclass(frozen=True)
class RunOrder:
    """The order to run a network.

    Attributes:
      run: number of the run.
      record: whether to keep spans.
      rounds: None: one period.
      first: the values of `net.first_messages()` for the actors of the thread, each message's in order. The thread
        empties it.
      begin: the first round.
    """

    run: int
    record: bool = False
    rounds: int | None = None
    first: dict[Message, list[Any]] = field(default_factory=dict[Message, list[Any]])
    begin: int = 0


class _ActorState:
    """The state of one actor in its thread."""

    def __init__(self, net: Network, number: int, window: LaunchWindow | None) -> None:
        self.net, self.number, self.window = net, number, window
        self.routes: list[_StepRoute] = []
        self.rewind()

    def rewind(self, rounds: int | None = None, begin: int = 0) -> None:
        self.actor: Actor[Any] = Actor(self.net, self.number, None, rounds, begin)
        self.prepared = False
        self.changed = True
        """Whether a message or credit has come since the actor was last found stuck."""

    def deliver(self, message: Message, value: Any) -> None:
        self.actor.deliver(message, value)
        self.changed = True

    def credit(self, channel: int, value: Any) -> None:
        self.actor.credit(channel, value)
        self.changed = True

    @property
    def unfinished(self) -> bool:
        """Whether it has steps to run, or its next run lacks messages that this one gives."""
        return self.actor.step is not None or bool(self.actor.owed())

    def must_wait(self, task: Task) -> bool:
        """Whether launched steps have to finish before `task`, the actor's next."""
        w = self.window
        return w is not None and (w.full or (task.settled and len(w) > 0))


@dataclass(frozen=True)
class _StepRoute:
    """A step and the destinations of its messages and registers: actors of the same thread, or ports.

    Attributes:
      label, round: of the step.
      moves: (position, transport) of the given values that have a transport.
      sends: (taker, message) for each given message.
      returns: (giver, channel) for each taken message of a bounded channel: its register goes back to the giver.
    """

    task: Task
    label: Hashable
    round: int
    moves: Sequence[tuple[int, Transport]]
    sends: Sequence[tuple[_ActorState | Port, Message]]
    returns: Sequence[tuple[_ActorState | Port, int]]


@dataclass(frozen=True)
class ThreadShare:
    """The actors of one thread.

    Attributes:
      tasks: the task of each step, by actor.
      windows: the window of each actor; empty if there is no limit.
      mailbox: the queue that the thread reads.
    """

    tasks: Mapping[int, Sequence[Task]]
    windows: Mapping[int, LaunchWindow]
    mailbox: Mailbox


class Worker:
    """The thread of one actor or several. It holds no reference to the executor, so that dropping the executor ends it.

    A thread with several actors runs one step of each in turn. It waits, for a launched step or for mail, only when
    none of its actors can go on.
    """

    def __init__(
        self,
        net: Network,
        share: ThreadShare,
        ports: Ports,
        moves: Sequence[Transport | None],
        reports: SimpleQueue[None],
    ) -> None:
        self.mailbox = share.mailbox
        self.orders: SimpleQueue[RunOrder | None] = SimpleQueue()
        self.thread = threading.Thread()
        self.done = 0
        """The last run that ended; `spans`, `failures` (with their times), `stopped`, `rounds` and `left` are its
        outcome."""
        self.spans: list[Span] = []
        self.failures: list[tuple[float, PipelineTaskError]] = []
        self.stopped = False
        self.ended = False
        """Whether a task has raised `RoundsEnded`."""
        self.rounds = 0
        """The rounds after which the run ended."""
        self.left: dict[Message, list[Any]] = {}
        """The messages that no step has taken, in order."""
        self.abandoned = False
        """Whether the executor has given up waiting for the current run."""
        self.fired = 0
        """The number of steps run so far."""
        self.idle = False
        """Whether the thread waits for messages or credits."""
        self.waits: list[str] = []
        """What each unfinished actor of a stopped run waited for."""
        self._at_work: tuple[_ActorState, _StepRoute, int] | None = None
        self._net = net
        self._moves = moves
        self._states = [_ActorState(net, a, share.windows.get(a)) for a in share.tasks]
        self._ports = ports
        self._reports = reports
        self._here = {p.number: p for p in self._states}
        for state in self._states:
            state.routes += map(self._route, net.actors[state.number], share.tasks[state.number])

    def _route(self, step: Step, task: Task) -> _StepRoute:
        channels = self._net.channels
        moves = [(i, self._moves[c]) for i, (c, _) in enumerate(step.gives)]
        return _StepRoute(
            task, step.label, step.round, [(i, move) for i, move in moves if move is not None],
            [(self._at(channels[m[0]].target, m[0]), m) for m in step.gives],
            [
                (self._at(channels[c].source, c), c)
                for c, _ in step.takes
                if channels[c].registers is not None or c in self._ports.counted
            ],
        )  # fmt: skip

    def _at(self, actor: int, channel: int) -> _ActorState | Port:
        here = None if channel in self._ports.channels else self._here.get(actor)
        return here or self._ports.at(actor, channel)

    def deliver(self, message: Message, value: Any) -> None:
        """Pass a message from the mailbox to its actor."""
        self._here[self._net.channels[message[0]].target].deliver(message, value)

    def credit(self, channel: int, value: Any) -> None:
        """Pass a credit from the mailbox to its actor."""
        self._here[self._net.channels[channel].source].credit(channel, value)

    def takes(self, message: Message) -> bool:
        """Whether an actor of this thread takes a message."""
        return self._net.channels[message[0]].target in self._here

    def start(self, name: str) -> None:
        self.thread = threading.Thread(target=self.loop, name=name, daemon=True)
        self.thread.start()

    def loop(self) -> None:
        """The body of the thread: executes the ordered runs until the order is None."""
        while (order := self.orders.get()) is not None:
            if order.run > self.done:
                self._run(order)
                self._report(order.run)
            del order  # it holds values
        self.stopped = True
        self._report(ALL_RUNS)  # for a caller that waits for a run ordered too late

    def _report(self, run: int) -> None:
        self.done = run
        self.abandoned = False
        self._reports.put(None)

    @property
    def known_rounds(self) -> int:
        """The rounds of the current run, as far as they are known."""
        return min(state.actor.rounds for state in self._states)

    def end(self, rounds: int) -> None:
        """End the current run after fewer rounds."""
        self.ended = True
        for state in self._states:
            state.actor.run_until(min(rounds, state.actor.rounds))

    def _run(self, order: RunOrder) -> None:
        run, record = order.run, order.record
        self._begin(order)
        left = self._states
        while not (self.failures or self.stopped):
            while not self.mailbox.empty:
                self.mailbox.feed(run, self)
            left = [p for p in left if p.unfinished]
            if not left:
                break
            if self.mailbox.why_stopped(run) is not None:
                self.stopped = True
                self.waits = [self._wait_text(p) for p in left]
                break
            ran = False
            for state in left:
                if state.changed:
                    ran |= self._advance(state, run, record, wait=False)
            if not (ran or self.failures or self.stopped):
                self._wait(left, run, record)
        self._finish()

    def _begin(self, order: RunOrder) -> None:
        self.spans, self.failures, self.stopped, self.waits, self.left = [], [], False, [], {}
        self.ended = False
        for state in self._states:
            state.rewind(order.rounds, order.begin)
        while order.first:
            message, values = order.first.popitem()
            values.reverse()
            while values:
                self.deliver(message, values.pop())
        self.mailbox.open(order.run, self)

    def _finish(self) -> None:
        self.rounds = min((p.actor.rounds for p in self._states), default=0)
        for state in self._states:
            if self.stopped or self.failures:
                self._drain(state)
            else:
                self.left |= state.actor.arrived()
            state.actor.drop()

    def _wait(self, states: Sequence[_ActorState], run: int, record: bool) -> None:
        """Wait until one of these stuck actors may go on: for a launched step, else for a message or credit."""
        full = [p for p in states if p.actor.ready()]
        if full:
            self._advance(min(full, key=_since), run, record, wait=True)
        elif (gone := self._gone(states)) is not None and self.mailbox.empty:  # in this order: the end comes last
            stop_all(self._ports.all, ALL_RUNS, gone)
        else:
            self.idle = True
            self.mailbox.feed(run, self)
            self.idle = False

    def _gone(self, states: Sequence[_ActorState]) -> Exception | None:
        """The error of an actor in another process that has left, if one of these stuck actors waits for it."""
        if not self.mailbox.gone:
            return None
        for state in states:
            for actor in self._awaited(state):
                if actor in self.mailbox.gone:
                    return self.mailbox.gone[actor]
        return None

    def _awaited(self, state: _ActorState) -> list[int]:
        """The actors that a stuck one waits for."""
        channels, (messages, full) = self._net.channels, state.actor.missing()
        return [channels[c].source for c, _ in messages] + [channels[c].target for c in full]

    def _wait_text(self, state: _ActorState) -> str:
        """What an actor waits for: `rank 0 at 3B2 for message 2 of "gradient 1->0"`."""
        step = state.actor.step
        channels, (messages, full) = self._net.channels, state.actor.missing()
        parts = [f'message {key} of "{channels[c].name}"' for c, key in messages]
        parts += [f'a free register of "{channels[c].name}"' for c in full]
        place = "its end" if step is None else step.label
        return f"{self._net.name(state.number, 'rank')} at {place}" + (f" for {' and '.join(parts)}" if parts else "")

    def at_work(self) -> str:
        """The step whose task has not returned yet; empty if there is none."""
        work = self._at_work
        if work is None:
            return ""
        state, route, at = work
        actor = "" if self._net.names else f"{self._net.name(state.number, 'rank')} at "
        return f"{actor}{_step_text(route.label, state.actor.rounds, at, route.task.source)}"

    def stuck(self) -> list[tuple[int, Hashable, list[int]]]:
        """For each unfinished actor its number, its next step and the actors that it waits for.

        For another thread, which calls this while this one is idle. If this one goes on meanwhile, the result is void.
        """
        found = [(p, p.actor.step) for p in self._states]
        return [(p.number, step.label, self._awaited(p)) for p, step in found if step is not None]

    def _advance(self, state: _ActorState, run: int, record: bool, wait: bool) -> bool:
        """Run an actor's next step if it can begin. Returns whether it ran. `wait`: wait for earlier steps to end."""
        actor = state.actor
        if self.failures or actor.step is None:
            return False
        route, failing = state.routes[actor.position], None
        task, at = route.task, actor.period * self._net.period + route.round
        try:
            if not state.prepared:
                state.prepared = True
                if task.prepare is not None:
                    task.prepare(route.label)
            state.changed = actor.ready()
            while state.changed and state.must_wait(task):
                assert state.window is not None
                state.changed = wait or state.window.may_go_on
                if state.changed:
                    failing = state.window.oldest
                    state.window.make_room()
            failing = None
            if not state.changed:
                return False
            begin = perf_counter()
            end = self._launch(state, route, run, at)
        except (RoundsEnded, RunStopped) as over:
            self._leave_off(run, at, over)
            return False
        except BaseException as error:  # noqa: BLE001 - SystemExit too: the thread must survive
            self._fail(run, self._task_error(error, state, failing or (route.label, task.source, at)))
            return False
        state.prepared = False
        self.fired += 1
        if record:
            self.spans.append(Span(state.number, route.label, begin, end, at))
        return True

    def _leave_off(self, run: int, at: int, over: RoundsEnded | RunStopped) -> None:
        """End a run after fewer rounds, in all actors; or stop it here. Those of this thread first: the task is not to
        be run again."""
        if isinstance(over, RunStopped):
            self.mailbox.stop(run, over.why)
            self.stopped = True
            return
        rounds = max(0, min(over.rounds, at))
        self.end(rounds)
        for port in self._ports.all:
            port.end(run, rounds)

    def _fail(self, run: int, failure: PipelineTaskError) -> None:
        """Record a failure and stop all actors. Other actors get only its text: the exception would keep the frames of
        the task, and their arrays, alive."""
        self.failures.append((perf_counter(), failure))
        stop_all(self._ports.all, run, PipelineError(str(failure)))

    def _drain(self, state: _ActorState) -> None:
        """Wait for the launched steps of a failed run. One of them may be the first cause."""
        earlier = None if state.window is None else state.window.drain()
        if earlier is not None:
            step, error = earlier
            self.failures.append((float("inf"), self._task_error(error, state, step)))

    def _task_error(self, error: BaseException, state: _ActorState, step: Launched) -> PipelineTaskError:
        """The error of a failed task, without the runtime's frames: they would keep values alive with the error."""
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_globals.get("__package__") == __package__:
            trace = trace.tb_next
        label, source, at = step
        where = _step_text(label, state.actor.rounds, at, source)
        failure = PipelineTaskError(
            f"{self._net.name(state.number)} failed in {where}: {type(error).__name__}: {error}\n"
            f"All actors of the {self._net.kind} have stopped; it can be run again.",
            state.number,
            label,
            source,
            at,
        )
        failure.__cause__ = error.with_traceback(trace)
        return failure

    def _launch(self, state: _ActorState, route: _StepRoute, run: int, at: int) -> float:
        """Run a step. Returns its end, read before the registers go back: their next users start later."""
        values, held = state.actor.fire()
        self._at_work = state, route, at
        try:
            given = route.task.run(values)
        except RoundsEnded:
            state.actor.take_back(values, held)
            raise
        finally:
            self._at_work = None
        del values  # frees the taken registers
        count = len(route.sends)
        if len(given) < count:
            raise ValueError(f"the task returned {len(given)} values; the step gives {count}.")
        tokens, given = list(given[count:]), list(given[:count])
        for i, move in route.moves:
            given[i] = move(given[i])
        if state.window is not None:
            state.window.add((route.label, route.task.source, at), given, tokens)
        given.reverse()
        for reader, message in route.sends:  # keep no reference: the taker may finish before this thread continues
            if isinstance(reader, _ActorState):
                reader.deliver(message, given.pop())
            else:
                reader.message(run, message, given.pop())
        end = perf_counter()
        for giver, channel in route.returns:
            if isinstance(giver, _ActorState):
                giver.credit(channel, None)
            else:
                giver.credit(run, channel)
        return end


def _step_text(label: Hashable, rounds: int, at: int, source: str) -> str:
    """`read of round 3 (train.py:41)`: a step, its round if there are several, and its origin."""
    return f"{label}{f' of round {at}' if rounds > 1 else ''}{f' ({source})' if source else ''}"


def _since(state: _ActorState) -> float:
    return 0.0 if state.window is None else state.window.since
