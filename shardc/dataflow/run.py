"""A planned flow on its devices: the tasks of its actors, and runs of many rounds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from time import thread_time
from typing import Any, Final, TypeAlias

import jax

from shardc.dataflow.beginning import Beginning, array_of
from shardc.dataflow.moves import LeafMove, copied, giving, on_host, stay, taking, ways_of
from shardc.dataflow.network import Edge, NodeStep
from shardc.dataflow.plan import PlannedFlow
from shardc.dataflow.remote import (
    FlowProcesses,
    RunFacts,
    agree_on_run,
    digest_of,
    replaceable_processes,
    run_facts,
    values_of_nodes,
    values_of_state,
)
from shardc.dataflow.results import Rounds, RunResults
from shardc.dataflow.round import FlowNode
from shardc.dataflow.shared import Shared, pots_of, read_only_what_is_used, shared_works
from shardc.dataflow.timing.resources import devices_of
from shardc.dataflow.value import RoundValue
from shardc.dataflow.work import FunctionWork, HostWork
from shardc.errors import FlowError, PeerLostError, PipelineError, PipelineTaskError, RoundFailedError
from shardc.execute.agreement import known_calls
from shardc.execute.network_run import NetworkRun, is_first_call, joins_others
from shardc.execute.pipeline_executable import IN_FLIGHT, FlowOfPipeline
from shardc.execute.process_group import group_of_run
from shardc.execute.recording import Recording
from shardc.execute.ways import Ways, WaysCodec
from shardc.machine.devices import me
from shardc.passes.trace.trace import settings, under
from shardc.runtime.actor import Message, Span, Step
from shardc.runtime.executor import Executor, LaunchLimit, RoundsEnded, Task, Threads
from shardc.runtime.gang import calling_client

ENDLESS: Final = 1 << 62
"""Rounds of a run that only its inputs end."""


_Keep: TypeAlias = Callable[[Any], Any]


class _Now:
    """The run that goes on."""

    run: RunResults | None = None


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
        self._processes = plan.built.processes
        self._here = frozenset(n for n in plan.nodes if me() in self._processes[plan.built.actor[n]])
        self._is_of_several = {p for ps in self._processes for p in ps} != {me()}
        self._remote: FlowProcesses | None = None
        self._ways: list[Ways] = []
        self._take: list[LeafMove] = []
        self._steps = {s.label: s for row in plan.network.actors for s in row}
        self._beginning = Beginning(plan, self._here)
        works = shared_works(plan.nodes)
        self._shared = list(dict.fromkeys(w.shared for _, w in works))
        for node, work in works:
            work.locks = self._locks(node)
        self._pots = pots_of(plan.nodes)
        for node in plan.nodes:
            if isinstance(node.work, FunctionWork) and node.work.is_wide:
                node.work.flow = FlowOfPipeline(plan.name, plan.built.whole[node])
        read_only_what_is_used(plan.built)

    # -- opening

    def _opened(self, facts: Callable[[], Mapping[str, str]] | None) -> Executor:
        if self._remote is not None and self._remote.run.is_over:
            self.close()
        if self._executor is None:
            wide = bool(settings()[0])
            self._ways = [ways_of(e, *self._ends(e), wide) for e in self._built.edges]
            self._take = [self._taking(channel) for channel in range(len(self._ways))]
            network = self._network_run() if self._is_of_several else None
            self._remote = None if network is None else FlowProcesses(self.plan, network)
            for node in self.plan.nodes:
                if self.is_here(node):
                    node.work.begin()
            actors = len(self._built.rows)
            numbers = {id(c): channel for channel, c in enumerate(self.plan.network.channels)}
            self._executor = Executor(
                self.plan.network,
                self._task,
                transports=lambda c: self._giving(numbers[id(c)]),
                limit=LaunchLimit(max(2, IN_FLIGHT // actors), _wait, _is_ready),
                threads=Threads(None, self.plan.name),
                share=None if network is None else network.share,
            )
            if network is not None:
                network.open(self._executor, facts)
        return self._executor

    def _network_run(self) -> NetworkRun:
        plan = self.plan
        crossing = [c for c in range(len(self._ways)) if not self._stays_near(c)]
        what = f"{plan.round.where}: its nodes"
        return NetworkRun(plan.network, digest_of(plan), self._processes, WaysCodec(self._ways), what, crossing,
                          replaceable_processes(plan))  # fmt: skip

    def _stays_near(self, channel: int) -> bool:
        """Whether each process hands the values of a channel to itself."""
        edge = self._built.edges[channel]
        giver, taker = (self._built.processes_of(n) for n in (edge.giver, edge.taker))
        return giver == taker and (len(giver) == 1 or self._ways[channel].are_here)

    def _ends(self, edge: Edge) -> tuple[int | None, int | None]:
        """The processes of an edge's nodes that have its values on the host; None if all nodes are in this one."""
        if not self._is_of_several:
            return None, None
        return self._built.processes_of(edge.giver)[0], self._built.processes_of(edge.taker)[0]

    def is_here(self, node: FlowNode) -> bool:
        """Whether a node runs in this process."""
        return node in self._here

    def _locks(self, node: FlowNode) -> list[Any]:
        """The locks of shared states on a node's devices: programs begin in one order on all of them."""
        mine = {d for m in node.work.meshes for d in devices_of(m)}
        return [s.lock for s in self._shared if mine & devices_of(s.mesh)]

    def _giving(self, channel: int) -> LeafMove:
        """The function that the giver's thread calls with a channel's messages."""
        edge = self._built.edges[channel]
        if not self.is_here(edge.giver):
            return stay
        return _locked(self._locks(edge.giver), giving(self._ways[channel], self._stays_near(channel)))

    def _taking(self, channel: int) -> LeafMove:
        """The function that makes of a channel's messages the leaves that its taker has, in the taker's thread."""
        edge, ways = self._built.edges[channel], self._ways[channel]
        if not self.is_here(edge.taker):
            return stay
        return taking(edge, ways, _locked(self._locks(edge.taker), ways.arrive))

    def close(self) -> None:
        """End the threads and the processes of host functions."""
        remote, self._remote = self._remote, None
        if remote is not None:
            remote.run.close()
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.close()
        for node in self.plan.nodes:
            node.work.end()

    def _task(self, label: Any) -> Task:
        assert isinstance(label, NodeStep)
        node, step = self.plan.nodes[label.node], self._steps[label]
        return Task(self._runner(node, step), source=node.source)

    def _runner(self, node: FlowNode, step: Step) -> Callable[[list[Any]], list[Any]]:
        """The function that a step runs: it picks the node's arguments, runs it, and hands out its results."""
        edges, work, on_mesh = self._built.edges, node.work, bool(node.work.meshes)
        fill = self._filling(step)
        gives = [[m.output for m in edges[c].moves] for c, _ in step.gives]
        logged, held = self._kept(node)
        together = self._together(node)
        again = [
            at for at in work.donated if not isinstance(node.given[at], RoundValue) or at in self._built.constants[node]
        ]
        token = self._token(node) if on_mesh else None
        known = settings()  # the actor's thread lacks those of this thread
        may_end = node in self._built.ends
        start = work.run if work.actor is not None else _locked(self._locks(node), work.run)
        period, at, now = self.plan.network.period, step.round, self._now
        in_python = type(work) is HostWork and work.where == "thread"

        def run(values: list[Any]) -> list[Any]:  # it holds no FlowRun: dropping that one ends the threads
            current = now.run
            assert current is not None
            together(current.number)
            given = list(current.given[node])
            for argument in again:
                given[argument] = copied(given[argument])
            round = current.fired[step.label] * period + at
            with under(known), current.turns(), known_calls():
                fill(given, values)
                try:
                    begin = thread_time()
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
                    if in_python:
                        current.python[node.name].append(thread_time() - begin)
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

    def _filling(self, step: Step) -> Callable[[list[Any], Sequence[Any]], None]:
        """The function that puts the leaves of a step's messages among the arguments of its node."""
        slots = [(self._take[c], [m.argument for m in self._built.edges[c].moves]) for c, _ in step.takes]

        def fill(given: list[Any], values: Sequence[Any]) -> None:
            for (take, arguments), message in zip(slots, values, strict=True):
                for argument, x in zip(arguments, take(message), strict=True):
                    given[argument] = x

        return fill

    def _together(self, node: FlowNode) -> Callable[[int], None]:
        """The function that waits, in a run, until all processes of a node have come to its next step."""
        if self._remote is None or len(self._built.processes_of(node)) == 1:
            return lambda run: None
        network, actor = self._remote.run.network, self._built.actor[node]
        return lambda run: network.together(run, actor)

    def _kept(self, node: FlowNode) -> tuple[list[tuple[int, _Keep]], list[tuple[int, _Keep]]]:
        """The results that are returned, and those that are parts of the state, with what is kept of each: a copy if
        another node may overwrite it before."""
        built = self._built
        late: dict[int, int] = {}
        for o in built.state:
            if o.node is node:
                late[o.index] = max(o.delay, late.get(o.index, 0))
        logged = sorted({o.index for o in built.outs if o is not None and o.node is node})
        return (
            [(i, copied if built.is_donated(node, i) else stay) for i in logged],
            [(i, copied if built.is_donated(node, i, rounds) else stay) for i, rounds in late.items()],
        )

    def _token(self, node: FlowNode) -> tuple[int, bool] | None:
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
            return self._run(state, items, rounds, pending, record)
        finally:
            self._now.run = None
            for shared in taken:
                shared.in_use.release()
            self._lock.release()

    def _run(
        self, state: Sequence[Any], items: Any, rounds: int, pending: Any, record: bool
    ) -> tuple[list[Any], Rounds]:
        late = self._beginning.late
        made = late.of(pending)
        facts = partial(self._facts, state, rounds, None if made is None else pending)
        is_first = is_first_call()
        if not (joins := joins_others()):
            self._agree(state, items, rounds, None if made is None else pending)
        executor, remote = self._opened(facts if is_first else None), self._remote
        if remote is not None and not joins:
            made = None if made is None else remote.brought_late(late, made)
            state = remote.brought(state)
            remote.run.begin_replaceable(facts)
        state = self._beginning.own(state)
        first, past = self._beginning.first(state, made), self._beginning.past(state, made)
        self._now.run = current = RunResults(self.plan, self._here, state, items, late, past)
        current.record, current.number = record, executor.runs + 1
        if remote is not None:
            current.begin_with(remote.run.first)
        if (client := calling_client()) is not None:
            current.turns = client.calling
        for pot in self._pots:
            pot.begin(executor.known_rounds, executor.is_stopping, lambda: self._busy(executor))
        spans = self._executed(executor, rounds, first, current)
        complete = executor.rounds
        if remote is not None:
            complete = remote.agreed(executor.runs, complete)
            current.share_logs(remote)
        left = self._beginning.left(executor.left, complete, self._take) | current.past(complete)
        if remote is not None:
            left = remote.known_late(late, left)
        executor.left = {}
        times = self._of_all(spans) if record else ()
        given = Rounds(current.given_in(complete), late.named(left), self.plan, times, current.python)
        given.writes = remote is None or not remote.cluster.me
        if remote is None:
            return current.state(complete - 1), given
        return remote.last_state(lambda i: current.leaf(i, complete - 1), list(map(array_of, state))), given

    def _agree(self, state: Sequence[Any], items: Any, rounds: int, pending: Any) -> None:
        """Agree with the other processes on the run, before its first round.

        Raises:
          DisagreementError: they begin another one.
        """
        group = group_of_run()
        if group is None or not self._is_of_several:
            return
        values = values_of_state(self.plan, state, pending)
        if self._executor is None:
            values |= values_of_nodes(self.plan, self._shared)
        count, first = (None, []) if items is None else (items.count, items.first)
        agree_on_run(self.plan, group, RunFacts(None if rounds == ENDLESS else rounds, count, first, values))

    def _facts(self, state: Sequence[Any], rounds: int, pending: Any) -> dict[str, str]:
        """The facts of a run that all processes know."""
        values = values_of_state(self.plan, state, pending) | values_of_nodes(self.plan, self._shared)
        return run_facts(self.plan, None if rounds == ENDLESS else rounds, values)

    def _executed(
        self, executor: Executor, rounds: int, first: Mapping[Message, Sequence[Any]], current: RunResults
    ) -> list[Span]:
        """Run the actors.

        Raises:
          RoundFailedError: a node failed, here or in another process.
        """
        try:
            begin = 0 if self._remote is None else self._remote.run.first
            return executor.run(record=current.record, rounds=rounds, first=first, begin=begin)
        except PipelineTaskError as error:
            raise self._failure(error, current) from error.__cause__
        except PeerLostError:
            raise
        except PipelineError as error:
            if self._remote is None:
                raise FlowError(f"{self.plan.round.where} was closed while it ran.") from None
            raise self._remote.failure("", 0, str(error)) from None  # another process has stopped the run
        except BaseException as error:
            executor.abandon(executor.runs, error)
            raise

    def _of_all(self, spans: Sequence[Span]) -> Sequence[Span]:
        """The times of the nodes of all processes, on one clock."""
        if self._remote is None:
            return spans
        return Recording(spans, 0.0, None).gathered(self.plan.network, self._remote.cluster).spans

    def _busy(self, executor: Executor) -> int:
        """The actors that run, or could: all but those that wait, for messages or in a change for others."""
        return executor.busy() - sum(p.waiting for p in self._pots)

    def _failure(self, error: PipelineTaskError, current: RunResults) -> RoundFailedError:
        assert isinstance(error.label, NodeStep)
        node = self.plan.nodes[error.label.node]
        if self._remote is not None:
            return self._remote.failure(str(node), error.round, f"{type(error.__cause__).__name__}: {error.__cause__}")
        complete, leaves = current.last_complete()
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
