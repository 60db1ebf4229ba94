"""A planned flow on its devices: the tasks of its actors, and runs of many rounds."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final, TypeAlias

import jax
from jax.sharding import Mesh

from shardc.arrays.far import FarArray, is_small
from shardc.dataflow.chart import measured_flow_chart, seconds_by_node
from shardc.dataflow.far import FarFlow, process_of_rows, sender
from shardc.dataflow.moves import copied, mover, on_host, to_place
from shardc.dataflow.network import Call, Edge, FlowNetwork, Move, devices_of
from shardc.dataflow.plan import PlannedFlow
from shardc.dataflow.round import Fixed, Node, Origin
from shardc.dataflow.shared import Shared, pots_of, read_only_what_is_used, shared_works
from shardc.dataflow.value import Value
from shardc.dataflow.work import Place
from shardc.errors import FlowError, PeerLostError, PipelineError, PipelineTaskError, RoundFailedError
from shardc.execute.far_values import bring
from shardc.execute.recording import Recording
from shardc.machine.devices import me
from shardc.passes.trace.trace import settings, under
from shardc.report.chart import Chart
from shardc.report.drawn import Drawn
from shardc.runtime.actor import Message, Span, Step
from shardc.runtime.executor import Executor, LaunchLimit, RoundsEnded, Task, Threads

IN_FLIGHT: Final = 32
"""The most programs that are launched and not finished, on all meshes together: XLA:CPU's threads hang with more."""

ENDLESS: Final = 1 << 62
"""Rounds of a run that only its inputs end."""


class Rounds(list[Any], Drawn):
    """What each round of a run gave, in order. A recorded run can be drawn, planned above measured.

    Attributes:
      pending: what delayed channels hold at the end, as a pytree of arrays; for `run(..., pending=)` to go on from.
      spans: the times of all nodes, if the run recorded them.
    """

    def __init__(
        self, given: Iterable[Any], pending: Any, plan: PlannedFlow | None = None, spans: Sequence[Span] = ()
    ) -> None:
        super().__init__(given)
        self.pending = pending
        self.spans = list(spans)
        self._plan = plan

    @property
    def seconds(self) -> dict[str, float]:
        """The mean seconds of each node, of a run that recorded them."""
        return {name: sum(times) / len(times) for name, times in seconds_by_node(self.spans).items()}

    @property
    def chart(self) -> Chart:
        if self._plan is None or not self.spans:
            raise FlowError("Nothing to show: no round was recorded; run(..., record=True) records them.")
        return measured_flow_chart(self._plan, self.spans, len(self))


_Keep: TypeAlias = Callable[[Any], Any]


class FlowRun:
    """A planned flow on its devices. It keeps its threads between runs; close it, or drop it.

    Args:
      plan: the plan.
    """

    def __init__(self, plan: PlannedFlow) -> None:
        self.plan = plan
        self._built = plan.built
        self._now = _Now()
        self._executor: Executor | None = None
        self._lock = threading.Lock()
        self._processes = process_of_rows(plan.built)
        self._here = frozenset(n for n in plan.nodes if self._processes[plan.built.actor[n]] == me())
        self._far: FarFlow | None = None
        self._steps = {s.label: s for row in plan.network.actors for s in row}
        built, nodes = plan.built, plan.nodes
        works = shared_works(nodes)
        self._shared = list(dict.fromkeys(w.shared for _, w in works))
        for node, work in works:
            work.locks = self._locks(node)
        self._pots = pots_of(nodes)
        read_only_what_is_used(built)
        self._taken = {f for e in built.edges for m in e.moves if e.takes_over(m) for f in m.first}

    # -- opening

    def _opened(self) -> Executor:
        if self._far is not None and self._far.epoch != self._far.cluster.epoch:
            self.close()  # other processes were started again
        if self._executor is None:
            several = set(self._processes) != {me()}
            far = self._far = FarFlow(self.plan, self._processes, bool(settings()[0])) if several else None
            for node in self.plan.nodes:
                if self.is_here(node):
                    node.work.begin()
            actors = len(self._built.rows)
            edges = {id(c): e for c, e in zip(self.plan.network.channels, self._built.edges, strict=True)}
            self._executor = Executor(
                self.plan.network,
                self._task,
                transports=lambda c: self._mover(edges[id(c)]),
                limit=LaunchLimit(max(2, IN_FLIGHT // actors), _wait, _is_ready),
                threads=Threads(None, self.plan.name),
                share=None if far is None else far.share,
            )
            if far is not None:
                far.open(self._executor)
        return self._executor

    def is_here(self, node: Node) -> bool:
        """Whether a node runs in this process."""
        return node in self._here

    def _locks(self, node: Node) -> list[Any]:
        """The locks of shared states on a node's devices: programs begin in one order on all of them."""
        mine = {d for m in node.work.meshes for d in devices_of(m)}
        return [s.lock for s in self._shared if mine & devices_of(s.mesh)]

    def _mover(self, edge: Edge) -> Callable[[Any], Any]:
        if not self.is_here(edge.giver):
            return _stay
        if not self.is_here(edge.taker):
            return sender([self._built.is_donated(edge.giver, m.output) for m in edge.moves])
        return _locked(self._locks(edge.giver), _transport(edge))

    def close(self) -> None:
        """End the threads and the processes of host functions."""
        far, self._far = self._far, None
        if far is not None:
            far.close()
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
        logged, held = self._kept(node)
        again = [
            at for at in work.donated if not isinstance(node.given[at], Value) or at in self._built.constants[node]
        ]
        token = self._token(node) if on_mesh else None
        known = settings()  # the actor's thread lacks those of this thread
        may_end = node in self._built.ends
        start = work.run if work.actor is not None else _locked(self._locks(node), work.run)
        period, at, now = self.plan.network.period, step.round, self._now

        def run(values: list[Any]) -> list[Any]:  # it holds no FlowRun: dropping that one ends the threads
            current = now.run
            assert current is not None
            given = list(current.given[node])
            for argument in again:
                given[argument] = copied(given[argument])
            for k, i, argument in slots:
                given[argument] = values[k][i]
            round = current.fired[step.label] * period + at
            with under(known):
                try:
                    made = start(given if on_mesh else on_host(given), round)
                except StopIteration:
                    if may_end:
                        raise RoundsEnded(round) from None
                    raise FlowError(
                        f"{node} has no more in round {round}, and it cannot end the run. The inputs can, and a host "
                        "function that the new state depends on, called in each round before what changes the state. "
                        "Let this one return a value in each round."
                    ) from None
                if current.record:
                    _wait(list(made))
                del given
                current.fired[step.label] += 1
                if logged or held:
                    current.keep(
                        node, round, [(i, keep(made[i])) for i, keep in logged], {i: keep(made[i]) for i, keep in held}
                    )
                sent: list[Any] = [tuple(made[i] for i in give) for give in gives]
                if token is not None:
                    sent.append(copied(made[token[0]]) if token[1] else made[token[0]])
            return sent

        return run

    def _kept(self, node: Node) -> tuple[list[tuple[int, _Keep]], list[tuple[int, _Keep]]]:
        """The results that are returned, and those that are parts of the state, with what is kept of each: a copy if
        another node may overwrite it before."""
        built = self._built
        late: dict[int, int] = {}
        for o in built.state:
            if o.node is node:
                late[o.index] = max(o.delay, late.get(o.index, 0))
        logged = sorted({o.index for o in built.outs if o is not None and o.node is node})
        return (
            [(i, copied if built.is_donated(node, i) else _stay) for i in logged],
            [(i, copied if built.is_donated(node, i, rounds) else _stay) for i, rounds in late.items()],
        )

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
          record: whether to keep the times of all nodes, each waited for.

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
            if self._far is not None:
                state = self._brought(state)
            state = [
                copied(x) if i in self._taken and any(x is y for y in state[:i]) else x for i, x in enumerate(state)
            ]
            first = self._first(state, pending)
            self._now.run = current = _Current(self.plan, self._here, state, items, self._past(state, pending))
            current.record = record
            for pot in self._pots:
                pot.begin(executor.known_rounds, executor.is_stopping, lambda: self._busy(executor))
            try:
                spans = executor.run(record=record, rounds=rounds, first=first)
            except PipelineTaskError as error:
                raise self._failure(error, current, state) from error.__cause__
            except PeerLostError:
                raise
            except PipelineError as error:
                if self._far is None:
                    raise FlowError(f"{self.plan.round.where} was closed while it ran.") from None
                raise self._far_failure("", 0, str(error)) from None  # another process has stopped the run
            except BaseException as error:
                executor.abandon(executor.runs, error)
                raise
            complete = executor.rounds
            if self._far is not None:
                ended = self._far.outcome(complete, None)
                if not isinstance(ended, int):
                    raise self._far_error(*ended)
                complete = ended
                current.share_logs(self._far)
            left = self._pending(executor.left, complete) | current.past(complete)
            executor.left = {}
            given = Rounds(current.given_in(complete), left, self.plan, self._of_all(spans) if record else ())
            given.writes = self._far is None or not self._far.cluster.me
            return self._last_state(current, complete - 1, state), given
        finally:
            self._now.run = None
            for shared in taken:
                shared.in_use.release()
            self._lock.release()

    def _of_all(self, spans: Sequence[Span]) -> Sequence[Span]:
        """The times of the nodes of all processes, on one clock."""
        if self._far is None:
            return spans
        return Recording(spans, 0.0, None).gathered(self.plan.network, self._far.cluster).spans

    def _brought(self, state: Sequence[Any]) -> list[Any]:
        """The state with those leaves here that several processes read when a run begins."""
        readers: dict[int, set[int]] = {}
        for edge in self._built.edges:
            for i in (f for m in edge.moves for f in m.first if isinstance(f, int)):
                readers.setdefault(i, set()).add(self._processes[self._built.actor[edge.taker]])
        for node, constants in self._built.constants.items():
            for i in constants.values():
                readers.setdefault(i, set()).add(self._processes[self._built.actor[node]])
        wanted = [i for i, processes in sorted(readers.items()) if len(processes) > 1]
        found = list(state)
        for i, x in zip(wanted, bring([state[i] for i in wanted]), strict=True):
            found[i] = x
        return found

    def _last_state(self, current: _Current, round: int, first: Sequence[Any]) -> list[Any]:
        """The state after the last round: of what is in another process its value if it is small."""
        far = self._far
        if far is None:
            return current.state(round, first)
        origins = list(enumerate(self._built.state))
        made = {i: o.node for i, o in origins if o.node is not None}
        here = {i: current.leaf(i, self._built.state[i], round, first) for i, n in made.items() if self.is_here(n)}
        avals = {i: v.aval for i, v in enumerate(self.plan.round.state)}
        sent = {(n.number, i): avals[i] for i, n in made.items() if is_small(avals[i]) or not n.work.meshes}
        told = far.exchange({(n.number, i): [here[i]] for i, n in made.items() if i in here}, sent)
        found: list[Any] = []
        for i, origin in origins:
            if origin.node is None:
                found.append(first[origin.index])
            elif i in here:
                found.append(here[i])
            elif (origin.node.number, i) in told:
                found.append(told[origin.node.number, i][0])
            else:
                place = origin.node.work.gives[origin.index]
                assert isinstance(place.mesh, Mesh) and place.placement is not None
                found.append(FarArray(avals[i], place.placement, place.mesh))
        return found

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
        messages = self.plan.network.first_messages()
        if pending is not None:
            self._check_pending(messages, pending)
        for message in messages:
            channel, turn = message[0], count[message[0]]
            count[channel] += 1
            if not self.is_here(self._built.edges[channel].taker):
                continue
            if pending is not None:
                values = pending[self.plan.network.channels[channel].name][turn]
            else:
                edge = self._built.edges[channel]
                values = tuple(self._entered(edge, i, turn, state) for i in range(len(edge.moves)))
            found.setdefault(message, []).append(values)
        return found

    def _past(self, state: Sequence[Any], pending: Mapping[str, Sequence[Any]] | None) -> Mapping[str, Sequence[Any]]:
        """What the first rounds return late, and what becomes state late in them."""
        if pending is not None:
            return pending
        return {
            name: [copied(_known(f, state)) if f in self._taken else _known(f, state) for f in firsts]
            for name, (_, _, firsts) in _late(self._built, self._here).items()
        }

    def _entered(self, edge: Edge, i: int, turn: int, state: Sequence[Any]) -> Any:
        """Leaf i of message `turn` in a delayed channel when a run begins: at its place, and its taker's alone if that
        one overwrites it."""
        move = edge.moves[i]
        first = move.first[(turn + 1) * edge.taker.every - 1]  # by the round in which it is taken
        alone = move.copied or (
            edge.takes_over(move) and (isinstance(first, Fixed) or self._begins_others(edge, move, first))
        )
        place, aval = edge.taker.work.takes[move.argument], edge.giver.results[move.output]
        x = _known(first, state)
        return _entering(place, aval)(copied(x) if alone else x)

    def _begins_others(self, edge: Edge, move: Move, first: int) -> bool:
        """Whether a leaf of the first state is taken in other rounds too, or by others that may find it in the same
        memory."""
        mine = edge.places(move)[1]
        places = [e.places(m)[1] for e in self._built.edges for m in e.moves if m is not move and first in m.first]
        return move.first.count(first) > 1 or any(
            p.mesh is None or None in (p.placement, mine.placement) or devices_of(p.mesh) & devices_of(mine.mesh)
            for p in places
        )

    def _check_pending(self, messages: Sequence[Message], pending: Mapping[str, Sequence[Any]]) -> None:
        names = self.plan.network.channels
        wanted = Counter(names[c].name for c, _ in messages if self.is_here(self._built.edges[c].taker))
        wanted.update({name: len(firsts) for name, (_, _, firsts) in _late(self._built, self._here).items()})
        if wanted != {name: len(values) for name, values in pending.items()}:
            period = self.plan.network.period
            rule = f", or the run that left it was no multiple of {period} rounds" if period > 1 else ""
            raise FlowError(f"{self.plan.round.where}: pending= is not what a run of this flow has left{rule}.")

    def _far_failure(self, node: str, round: int, text: str) -> RoundFailedError:
        """The error of a run that failed in one of several processes; all of them raise it."""
        assert self._far is not None
        failed = self._far.outcome(0, (node, round, text))
        assert not isinstance(failed, int)
        return self._far_error(*failed)

    def _far_error(self, node: str, round: int, text: str) -> RoundFailedError:
        where = f"{node} failed in round {round}, in " if node else ""
        return RoundFailedError(
            f"{self.plan.round.where}: {where}{text}\nThe run has stopped in all processes; go on from a checkpoint.",
            node, round, 0, None, [],
        )  # fmt: skip

    def _failure(self, error: PipelineTaskError, current: _Current, state: Sequence[Any]) -> RoundFailedError:
        assert isinstance(error.label, Call)
        node = self.plan.nodes[error.label.node]
        if self._far is not None:
            return self._far_failure(str(node), error.round, f"{type(error.__cause__).__name__}: {error.__cause__}")
        complete, leaves = current.last_complete(state)
        kept = None if leaves is None else self.plan.round.state_of(leaves)
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
        return RoundFailedError(text, str(node), error.round, complete, kept, list(current.given_in(complete)))


class _Current:
    """What one run of a flow keeps: arguments that do not change, results that are returned.

    Attributes:
      given: the arguments of each node that are known from the start.
      fired: how often each step has run.
      record: whether each node is waited for, so that its times are those of its devices.
    """

    def __init__(
        self, plan: PlannedFlow, here: frozenset[Node], state: Sequence[Any], items: Any,
        past: Mapping[str, Sequence[Any]],
    ) -> None:  # fmt: skip
        self._plan, self._built, self._here, self._past = plan, plan.built, here, past
        self.record = False
        self.fired = dict.fromkeys((s.label for row in plan.network.actors for s in row), 0)
        self.given: dict[Node, list[Any]] = {}
        for node in plan.nodes:
            leaves = [None if isinstance(x, Value) else x for x in node.given]
            for at, i in plan.built.constants[node].items() if node in here else ():
                leaves[at] = _entering(node.work.takes[at], node.given[at].aval)(state[i])
            self.given[node] = leaves
        inputs = plan.nodes[0]
        if items is not None:
            self.given[inputs] = [items]
        self._logs: dict[tuple[Node, int], list[Any]] = {}
        self._state: dict[Node, dict[int, dict[int, Any]]] = {}
        for origin in plan.built.outs:
            if origin is not None and origin.node is not None:
                self._logs[origin.node, origin.index] = []
        for origin in plan.built.state:
            if origin.node is not None:
                self._state[origin.node] = {}
        self._first_state = list(state)
        self._newest = dict.fromkeys(self._state, -1)
        self._behind = max((o.delay - 1 for o in plan.built.state if o.node is not None), default=0)
        self._lock = threading.Lock()

    def keep(self, node: Node, round: int, logged: list[tuple[int, Any]], state: dict[int, Any]) -> None:
        """Record results: of the state, what the last rounds gave that all of its parts have."""
        for i, value in logged:
            self._logs[node, i].append(value)
        if not state:
            return
        with self._lock:
            self._state[node][round] = state
            self._newest[node] = round
            whole = min(self._newest.values()) - self._behind
            for n, kept in self._state.items():
                least = whole if self._built.apart is not None else self._newest[n]
                for r in [r for r in kept if r < least]:
                    del kept[r]

    def share_logs(self, far: FarFlow) -> None:
        """Let all processes know what the rounds gave."""
        types = {(n.number, i): n.results[i] for n, i in self._logs}
        found = far.exchange({(n.number, i): xs for (n, i), xs in self._logs.items()}, types)
        self._logs = {(n, i): found[n.number, i] for n, i in self._logs}

    def past(self, rounds: int) -> dict[str, list[Any]]:
        """What the rounds after so many return late, and what becomes state late in them."""
        outs, state = self._built.outs, self._built.state
        return {
            name: [
                self.leaf(i, state[i], rounds + k, ()) if is_state else self._out(i, outs[i], rounds + k)
                for k in range(len(firsts))
            ]
            for name, (is_state, i, firsts) in _late(self._built, self._here).items()
        }

    def state(self, round: int, first: Sequence[Any]) -> list[Any]:
        """The state after a round; -1: before the first one."""
        return [self.leaf(i, o, round, first) for i, o in enumerate(self._built.state)]

    def leaf(self, i: int, origin: Origin, round: int, first: Sequence[Any]) -> Any:
        """A leaf after a round: its origin is what the next round takes."""
        if origin.node is None:
            return first[origin.index]
        made = round + 1 - origin.delay
        if made < 0:
            return self._past[f"state {i}"][round] if round >= 0 else _known(origin.first[0], first)
        kept = self._state[origin.node]
        return (kept[made] if self._built.apart == 0 else kept.get(made, kept[max(kept)]))[origin.index]

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
            pairs = enumerate(zip(round.outs, built.outs, strict=True))
            leaves = [x if o is None else self._out(i, o, r) for i, (x, o) in pairs]
            yield round.out_tree.unflatten(leaves)

    def _out(self, i: int, origin: Origin | None, r: int) -> Any:
        """Result i of round r."""
        assert origin is not None
        if origin.node is None:
            return self._first_state[origin.index]
        made = r - origin.delay
        if made < 0:
            return self._past[f"returned {i}"][r]
        every = origin.node.every
        if (made + 1) % every:
            return None
        logs = self._logs[origin.node, origin.index]
        return logs[made // every] if made // every < len(logs) else None


def _locked(locks: Sequence[Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """A call that is made under locks."""
    if not locks:
        return call

    def locked(*args: Any) -> Any:
        with ExitStack() as held:
            for lock in locks:
                held.enter_context(lock)
            return call(*args)

    return locked


def _transport(edge: Edge) -> Callable[[Any], Any]:
    """The move of a channel's messages. The giver's thread makes it, which lacks the settings of this thread."""
    move, known = mover(edge), settings()
    if move is None:
        return _stay

    def moved(values: Any) -> Any:
        with under(known):
            return move(values)

    return moved


def _stay(values: Any) -> Any:
    return values


class _Now:
    """The run that goes on."""

    run: _Current | None = None


def _turn(dated: tuple[int, Any]) -> int:
    return dated[0]


def _known(first: int | Fixed, state: Sequence[Any]) -> Any:
    return first.array if isinstance(first, Fixed) else state[first]


def _late(built: FlowNetwork, here: Collection[Node]) -> dict[str, tuple[bool, int, list[int | Fixed]]]:
    """By a name, whether it is a leaf of the state, its number, and what stands for it in the first rounds: for each
    result that is returned late, and each leaf that becomes state late, of nodes that run here."""
    outs = {
        f"returned {i}": (False, i, o.first)
        for i, o in enumerate(built.outs)
        if o is not None and o.first and o.node in here
    }
    return outs | {
        f"state {i}": (True, i, o.first[1:]) for i, o in enumerate(built.state) if o.first[1:] and o.node in here
    }


def _entering(place: Place, aval: Any) -> Callable[[Any], Any]:
    return (lambda x: x) if place.mesh is None else to_place(place, aval)


def _wait(values: list[Any]) -> None:
    """Wait for values; those that a later program has taken over have been waited for."""
    for x in values:
        if isinstance(x, jax.Array):
            try:
                x.block_until_ready()
            except RuntimeError as error:  # while a program takes it over, it is not called deleted yet
                if not x.is_deleted() and "donated" not in str(error):
                    raise


def _is_ready(x: Any) -> bool:
    return not hasattr(x, "is_ready") or x.is_deleted() or x.is_ready()
