"""A planned flow on its devices: the tasks of its actors, and runs of many rounds."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final

import jax

from shardc.dataflow.moves import copied, mover, on_host, to_place
from shardc.dataflow.network import Call, Edge, devices_of
from shardc.dataflow.plan import PlannedFlow
from shardc.dataflow.round import Fixed, Node, Origin
from shardc.dataflow.shared import Shared, pots_of, read_only_what_is_used, shared_works
from shardc.dataflow.value import Value
from shardc.dataflow.work import Place
from shardc.errors import FlowError, PipelineTaskError, RoundFailedError
from shardc.passes.trace.trace import settings
from shardc.runtime.actor import Message, Span, Step
from shardc.runtime.executor import Executor, LaunchLimit, RoundsEnded, Task, Threads

IN_FLIGHT: Final = 32
"""The most programs that are launched and not finished, on all meshes together: XLA:CPU's threads hang with more."""

ENDLESS: Final = 1 << 62
"""Rounds of a run that only its inputs end."""


class Rounds(list[Any]):
    """What each round of a run gave, in order.

    Attributes:
      pending: what delayed channels hold at the end, as a pytree of arrays; for `run(..., pending=)` to go on from.
      spans: the times of all nodes, if the run recorded them.
      seconds: the mean seconds of each node, of a run that recorded them.
    """

    def __init__(self, given: Iterable[Any], pending: Any, spans: Sequence[Span]) -> None:
        super().__init__(given)
        self.pending = pending
        self.spans = list(spans)

    @property
    def seconds(self) -> dict[str, float]:
        each: dict[str, list[float]] = {}
        for span in self.spans:
            each.setdefault(str(span.label), []).append(span.end - span.start)
        return {name: sum(times) / len(times) for name, times in each.items()}


class FlowRun:
    """A planned flow on its devices. It keeps its threads between runs; close it, or drop it.

    Args:
      plan: the plan.
    """

    def __init__(self, plan: PlannedFlow) -> None:
        self.plan = plan
        self._built = plan.built
        self._current: _Current | None = None
        self._executor: Executor | None = None
        self._lock = threading.Lock()
        self._steps = {s.label: s for row in plan.network.actors for s in row}
        built, nodes = plan.built, plan.nodes
        self._kept_outs: dict[Node, list[int]] = {n: [] for n in nodes}
        for origin in (*built.outs, *built.state):
            if origin is not None and origin.node is not None and origin.index not in self._kept_outs[origin.node]:
                self._kept_outs[origin.node].append(origin.index)
        logged = {(o.node, o.index) for o in built.outs if o is not None}
        self._copied = {(n, i) for n, i in logged if n is not None and built.is_donated(n, i)}
        works = shared_works(nodes)
        self._shared = list(dict.fromkeys(w.shared for _, w in works))
        for node, work in works:
            work.locks = self._locks(node)
        self._pots = pots_of(nodes)
        self._rounds = 0
        """The rounds of the current run, as far as they are known."""
        read_only_what_is_used(built)
        self._in_state = {(o.node, o.index) for o in built.state if o.node is not None}

    # -- opening

    def _opened(self) -> Executor:
        if self._executor is None:
            for node in self.plan.nodes:
                node.work.begin()
            actors = len(self._built.rows)
            edges = {id(c): e for c, e in zip(self.plan.network.channels, self._built.edges, strict=True)}
            self._executor = Executor(
                self.plan.network,
                self._task,
                transports=lambda c: self._mover(edges[id(c)]),
                limit=LaunchLimit(max(2, IN_FLIGHT // actors), _wait, _is_ready),
                threads=Threads(None, self.plan.name),
            )
        return self._executor

    def _locks(self, node: Node) -> list[Any]:
        """The locks of shared states on a node's devices: programs begin in one order on all of them."""
        mine = {d for m in node.work.meshes for d in devices_of(m)}
        return [s.lock for s in self._shared if mine & devices_of(s.mesh)]

    def _mover(self, edge: Edge) -> Callable[[Any], Any]:
        move = mover(edge)
        if move is None:
            return _stay
        wide = bool(settings()[0])  # the actor's thread lacks this setting

        def moved(values: Any) -> Any:
            with jax.enable_x64(wide):
                return move(values)

        return _under(self._locks(edge.giver), moved)

    def close(self) -> None:
        """End the threads and the processes of host functions."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.close()
        for node in self.plan.nodes:
            node.work.end()

    def _task(self, label: Any) -> Task:
        assert isinstance(label, Call)
        node, step = self.plan.nodes[label.node], self._steps[label]
        return Task(self._runner(node, step), source=node.source)

    def _runner(self, node: Node, step: Step) -> Callable[[list[Any]], list[Any]]:
        """The function that a step runs: it picks the node's arguments, runs it, and hands out its results."""
        edges, work, on_mesh = self._built.edges, node.work, bool(node.work.meshes)
        slots = [(k, i, m.argument) for k, (c, _) in enumerate(step.takes) for i, m in enumerate(edges[c].moves)]
        gives = [[m.output for m in edges[c].moves] for c, _ in step.gives]
        kept = [(i, (node, i) in self._copied, (node, i) in self._in_state) for i in self._kept_outs[node]]
        token = self._token(node) if on_mesh else None
        wide = bool(settings()[0])  # the actor's thread lacks this setting
        may_end = node in self._built.ends
        start = work.run if work.actor is not None else _under(self._locks(node), work.run)
        period, at = self.plan.network.period, step.round

        def run(values: list[Any]) -> list[Any]:
            current = self._current
            assert current is not None
            given = list(current.given[node])
            for k, i, argument in slots:
                given[argument] = values[k][i]
            round = current.fired[step.label] * period + at
            with jax.enable_x64(wide):
                try:
                    made = start(given if on_mesh else on_host(given), round)
                except StopIteration:
                    if may_end:
                        self._rounds = min(self._rounds, round)
                        raise RoundsEnded(round) from None
                    raise FlowError(
                        f"{node} has no more in round {round}, and no new state needs it: let it return a value in "
                        "each round, or end the inputs."
                    ) from None
                del given
                current.fired[step.label] += 1
                for i, copy, state in kept:
                    current.keep(node, i, round, copied(made[i]) if copy else made[i], state)
                sent: list[Any] = [tuple(made[i] for i in give) for give in gives]
                if token is not None:
                    sent.append(copied(made[token[0]]) if token[1] else made[token[0]])
            return sent

        return run

    def _token(self, node: Node) -> tuple[int, bool] | None:
        """The result that says whether a node has ended: a small one that nobody overwrites, or a copy."""
        sizes = sorted((v.size, i) for i, v in enumerate(node.results))
        safe = next((i for _, i in sizes if not self._built.is_donated(node, i)), None)
        return (safe, False) if safe is not None else (sizes[0][1], True) if sizes else None

    # -- running

    def run(
        self, state: Sequence[Any], items: Any, rounds: int, pending: Any, record: bool
    ) -> tuple[list[Any], Rounds]:
        """Run rounds.

        Args:
          state: the state's leaves.
          items: gives the leaves of each round's item; None: rounds have none.
          rounds: the most rounds.
          pending: what the run before left, or None.
          record: whether to keep the times of all nodes.

        Returns:
          the state's leaves after the last round, and what each round gave.
        """
        if not self._lock.acquire(blocking=False):
            raise FlowError(f"{self.plan.round.where} is running already.")
        taken: list[Shared] = []
        try:
            for shared in self._shared:
                shared.take(self.plan.round.where)
                taken.append(shared)
            executor = self._opened()
            self._current = current = _Current(self, state, items)
            first = self._first(state, pending)
            self._rounds = rounds
            for pot in self._pots:
                pot.begin(lambda: self._rounds, executor.is_stopping, lambda: self._busy(executor))
            try:
                spans = executor.run(record=record, rounds=rounds, first=first)
            except PipelineTaskError as error:
                raise self._failure(error, current, state) from error.__cause__
            complete = min(current.rounds_of(n) for n in self._built.ends)
            left = self._pending(executor.left, complete)
            executor.left = {}
            return current.state(complete - 1, state), Rounds(current.given_in(complete), left, spans)
        finally:
            self._current = None
            for shared in taken:
                shared.in_use.release()
            self._lock.release()

    def _busy(self, executor: Executor) -> int:
        """The actors that run, or could: all but those that wait, for messages or in a change for others."""
        return executor.busy() - sum(p.waiting for p in self._pots)

    def _pending(self, left: Mapping[Message, Sequence[Any]], rounds: int) -> dict[str, list[Any]]:
        """What delayed channels hold after so many rounds, by channel, in the order in which it would be taken."""
        period = self.plan.network.period
        found: dict[int, list[tuple[int, Any]]] = {}
        for (channel, key), values in left.items():
            assert isinstance(key, int)
            later = (key - rounds) % period
            found.setdefault(channel, []).extend((later + k * period, x) for k, x in enumerate(values))
        names = self.plan.network.channels
        return {names[c].name: [x for _, x in sorted(xs, key=_turn)] for c, xs in found.items()}

    def _first(self, state: Sequence[Any], pending: Mapping[str, Sequence[Any]] | None) -> dict[Message, list[Any]]:
        """What delayed channels hold when a run begins."""
        found: dict[Message, list[Any]] = {}
        count: Counter[int] = Counter()
        entries = [[self._entry(e, i) for i in range(len(e.moves))] if e.delay else [] for e in self._built.edges]
        messages = self.plan.network.first_messages()
        if pending is not None:
            self._check_pending(messages, pending)
        for message in messages:
            channel, turn = message[0], count[message[0]]
            count[channel] += 1
            if pending is not None:
                found.setdefault(message, []).append(pending[self.plan.network.channels[channel].name][turn])
                continue
            edge = self._built.edges[channel]
            late = (turn + 1) * edge.taker.every - 1  # the round in which it is taken
            values = zip(edge.moves, entries[channel], strict=True)
            found.setdefault(message, []).append(tuple(to(_known(m.first[late], state)) for m, to in values))
        return found

    def _check_pending(self, messages: Sequence[Message], pending: Mapping[str, Sequence[Any]]) -> None:
        names = self.plan.network.channels
        wanted = Counter(names[c].name for c, _ in messages)
        if wanted != {name: len(values) for name, values in pending.items()}:
            period = self.plan.network.period
            rule = f", or the run that left it was no multiple of {period} rounds" if period > 1 else ""
            raise FlowError(f"{self.plan.round.where}: pending= is not what a run of this flow has left{rule}.")

    def _entry(self, edge: Edge, i: int) -> Callable[[Any], Any]:
        """The function that puts a value which is there when a run begins where a node takes it."""
        move = edge.moves[i]
        place, aval = edge.taker.work.takes[move.argument], edge.giver.results[move.output]
        to = _entering(place, aval)
        return (lambda x: to(copied(x))) if move.copied else to

    def _failure(self, error: PipelineTaskError, current: _Current, state: Sequence[Any]) -> RoundFailedError:
        assert isinstance(error.label, Call)
        node = self.plan.nodes[error.label.node]
        complete, leaves = current.last_complete(state)
        kept = None if leaves is None else self.plan.round.state_tree.unflatten(leaves)
        cause = error.__cause__
        known = (
            f"the state after {complete} rounds is kept in `error.state`" if kept is not None
            else "parts of the state are lost, as their buffers were donated: go on from a checkpoint"
        )  # fmt: skip
        line = f", called in {node.source}" if node.source else ""
        text = (
            f"{self.plan.round.where}: {node} failed in round {error.round}{line}: {type(cause).__name__}: {cause}\n"
            f"All actors have stopped; {known}."
        )
        return RoundFailedError(text, str(node), error.round, complete, kept, current.given_in(complete))


class _Current:
    """What one run of a flow keeps: arguments that do not change, results that are returned.

    Attributes:
      given: the arguments of each node that are known from the start.
      fired: how often each step has run.
    """

    def __init__(self, run: FlowRun, state: Sequence[Any], items: Any) -> None:
        self._plan, self._built = run.plan, run.plan.built
        self.fired = dict.fromkeys((s.label for row in run.plan.network.actors for s in row), 0)
        self.given: dict[Node, list[Any]] = {}
        for node in run.plan.nodes:
            leaves = [None if isinstance(x, Value) else x for x in node.given]
            for at, i in run.plan.built.constants[node].items():
                leaves[at] = _entering(node.work.takes[at], node.given[at].aval)(state[i])
            self.given[node] = leaves
        inputs = run.plan.nodes[0]
        if items is not None:
            self.given[inputs] = [items]
        self._logs: dict[tuple[Node, int], list[Any]] = {}
        self._state: dict[tuple[Node, int], dict[int, Any]] = {}
        for origin in run.plan.built.outs:
            if origin is not None and origin.node is not None:
                self._logs[origin.node, origin.index] = []
        for origin in run.plan.built.state:
            if origin.node is not None:
                self._state[origin.node, origin.index] = {}
        self._first_state = list(state)
        self._newest = dict.fromkeys(self._state, -1)
        self._behind = max((o.delay - 1 for o in run.plan.built.state if o.node is not None), default=0)
        self._lock = threading.Lock()

    def keep(self, node: Node, index: int, round: int, value: Any, state: bool) -> None:
        """Record a result: of the state, what the last rounds gave that all of its parts have."""
        key = node, index
        if key in self._logs:
            self._logs[key].append(value)
        if state:
            with self._lock:
                self._state[key][round] = value
                self._newest[key] = round
                whole = min(self._newest.values()) - self._behind
                for k, kept in self._state.items():
                    least = whole if self._built.apart is not None else self._newest[k]
                    for r in [r for r in kept if r < least]:
                        del kept[r]

    def rounds_of(self, node: Node) -> int:
        """The rounds in which a node has given something, of one that runs in each."""
        return sum(n for label, n in self.fired.items() if isinstance(label, Call) and label.node == node.number)

    def state(self, round: int, first: Sequence[Any]) -> list[Any]:
        """The state after a round; -1: before the first one."""
        return [self._leaf(i, o, round, first) for i, o in enumerate(self._built.state)]

    def _leaf(self, i: int, origin: Origin, round: int, first: Sequence[Any]) -> Any:
        """Leaf i after a round: its origin is what the next round takes."""
        if origin.node is None:
            return first[origin.index]
        made = round + 1 - origin.delay
        if made < 0:
            return _known(origin.first[round + 1], first)
        kept = self._state[origin.node, origin.index]
        return kept[made] if self._built.apart == 0 else kept.get(made, kept[max(kept)])

    def last_complete(self, first: Sequence[Any]) -> tuple[int, list[Any] | None]:
        """The last rounds of which the whole state is there: their number, and the state; None if a part is lost."""
        newest = min(self._newest.values(), default=-1)
        try:
            leaves = self.state(newest, first)
        except KeyError:
            return newest + 1, None
        lost = any(isinstance(x, jax.Array) and x.is_deleted() for x in leaves)
        return newest + 1, None if lost else leaves

    def given_in(self, rounds: int) -> Iterator[Any]:
        """What each of the first rounds gave; None for a node that did not run in it."""
        round, built = self._plan.round, self._built
        for r in range(rounds):
            leaves = [x if o is None else self._out(o, r) for x, o in zip(round.outs, built.outs, strict=True)]
            yield round.out_tree.unflatten(leaves)

    def _out(self, origin: Origin, r: int) -> Any:
        if origin.node is None:
            return self._first_state[origin.index]
        made = r - origin.delay
        if made < 0:
            return _known(origin.first[r], self._first_state)
        every = origin.node.every
        if (made + 1) % every:
            return None
        logs = self._logs[origin.node, origin.index]
        return logs[made // every] if made // every < len(logs) else None


def _under(locks: Sequence[Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """A call that is made under locks."""
    if not locks:
        return call

    def locked(*args: Any) -> Any:
        with ExitStack() as held:
            for lock in locks:
                held.enter_context(lock)
            return call(*args)

    return locked


def _stay(values: Any) -> Any:
    return values


def _turn(dated: tuple[int, Any]) -> int:
    return dated[0]


def _known(first: int | Fixed, state: Sequence[Any]) -> Any:
    return first.array if isinstance(first, Fixed) else state[first]


def _entering(place: Place, aval: Any) -> Callable[[Any], Any]:
    return (lambda x: x) if place.mesh is None else to_place(place, aval)


def _wait(values: list[Any]) -> None:
    """Wait for values; those that a later program has taken over have been waited for."""
    for x in values:
        if isinstance(x, jax.Array):
            try:
                x.block_until_ready()
            except RuntimeError:
                if not x.is_deleted():
                    raise


def _is_ready(x: Any) -> bool:
    return not hasattr(x, "is_ready") or x.is_deleted() or x.is_ready()
