"""A pipeline's plan compiled for the devices of its meshes: tasks that are run by actors."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from time import perf_counter
from typing import Any, Final, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from shardc import compat
from shardc.arrays.gone import refuse_gone
from shardc.arrays.place import Place, places
from shardc.arrays.placed import is_placed
from shardc.arrays.remote_array import Arrival, RemoteArray, is_remote, is_small
from shardc.compat import Var
from shardc.errors import MeshError, PeerLostError, PipelineError, PipelineTaskError, ShardcError
from shardc.execute.agreement import Agreement
from shardc.execute.at_work import line_if_long
from shardc.execute.check.check import Checker
from shardc.execute.check.report import CheckReport, merged
from shardc.execute.executable import Executable, OtherCallError, drop, gone_text, report_failure
from shardc.execute.network_run import NetworkRun
from shardc.execute.process_group import group_of_run
from shardc.execute.rank_processes import RankProcesses
from shardc.execute.recording import Recording
from shardc.execute.stage_io import PiecedArrays, channel_ways
from shardc.execute.ways import Ways, WaysCodec
from shardc.ir.host_callback import CALLBACKS
from shardc.ir.walk import all_eqns
from shardc.machine.ahead import is_absent
from shardc.machine.mesh import AnyMesh, note_stages
from shardc.machine.puts import LINKS
from shardc.passes.audit.audit import Audit, audit_all
from shardc.passes.audit.hlo_schedule import Scheduled, read_schedule
from shardc.passes.trace.trace import settings
from shardc.pipeline.cut.split_tasks import INDEX, StageTask
from shardc.pipeline.cut_search.split_scans import Piece
from shardc.pipeline.make import with_schedule
from shardc.pipeline.memory import working_bytes
from shardc.pipeline.place_stages import Stage
from shardc.pipeline.plan import MpmdPlan
from shardc.pipeline.rank_memory import PipelineMemory
from shardc.pipeline.schedule.action import Action, TaskId
from shardc.pipeline.stage_network import done_label
from shardc.pipeline.step_values import StepValues, step_values
from shardc.plan.borders import Border
from shardc.report.chart import Chart, measured_chart
from shardc.runtime.actor import Channel
from shardc.runtime.executor import Executor, LaunchLimit, Task, Threads
from shardc.runtime.worker import Transport

Runner: TypeAlias = Callable[[list[Any]], list[Any]]

IN_FLIGHT: Final = 32
"""The most programs that are launched and not finished, on all meshes together: XLA:CPU's threads hang with more."""


THREADS: Final = max(1, (os.cpu_count() or 1) // 2)
"""Threads that launch programs, at most one for each actor. They do little else, and XLA:CPU needs cores too."""


@dataclass(frozen=True)
class FlowOfPipeline:
    """The flow of which a pipeline is a node: the processes of its ranks run it alone.

    Attributes:
      name: of the flow.
      whole: the numbers of results in pieces that the first process gets whole.
    """

    name: str
    whole: Collection[int]


class _StageState:
    """The values that a stage holds while a call runs: its residents, by variable."""

    def __init__(self, stage: Stage, mesh: Mesh, index: Sequence[jax.Array]) -> None:
        self.index = index
        self.residents: dict[Var, Any] = {}
        self.places = places(stage.program.program.in_avals, mesh, stage.plan.inputs)


class _WatchedTasks:
    """Runs tasks, waits for each one in a measured call, and keeps what each takes first in a checked call.

    It is an object of its own so that no actor's thread keeps the pipeline alive.
    """

    def __init__(self) -> None:
        self.waited: dict[Any, tuple[float, float]] | None = None  # by label, the time on the devices
        self.taken: dict[Executable, list[Any]] | None = None
        self.number = 0  # of the call

    def run(self, label: Any, executable: Executable, given: list[Any]) -> list[Any]:
        waited, taken = self.waited, self.taken
        if taken is not None and executable not in taken:
            taken[executable] = [x.copy() for x in given]  # a later task may take the buffer
        if waited is None:
            return executable.run(given)
        jax.block_until_ready(given)
        begin = perf_counter()
        made = jax.block_until_ready(executable.run(given))
        waited[label] = begin, perf_counter()
        return made


class PipelineExecutable:
    """A compiled pipeline. A call takes the flat arguments that are arrays, and returns the flat results.

    Attributes:
      moves_arguments: True: its stages take an array from wherever it is.
      unchecked: whether the next call is to be checked, because it is the first (`check="first"`).
      absent: whether it is compiled for a machine that is not there.
    """

    moves_arguments = True
    unchecked = False

    def __init__(
        self, plan: MpmdPlan, meshes: Sequence[AnyMesh], known: Mapping[TaskId, Executable] | None = None,
        flow: FlowOfPipeline | None = None,
    ) -> None:  # fmt: skip
        """Compile a plan.

        Args:
          plan: the plan.
          meshes: the mesh of each rank, with devices.
          known: executables of its tasks that exist already.
          flow: what runs it as a node.
        """
        if not all(isinstance(m, Mesh) for m in meshes):
            raise MeshError(
                f"{plan.program.name} is planned for {plan.mesh}, a mesh without devices; make the mesh without "
                "`topology=` to run it."
            )
        self.plan, self._flow = plan, flow
        self.settings = settings()
        self._ranks = tuple(meshes)
        self.places = RankProcesses.of(meshes, plan.program.name)
        self.meshes: list[Any] = [meshes[s.rank] for s in plan.stages]
        for mesh in dict.fromkeys(self.meshes):
            note_stages(mesh, [s.number for s in plan.stages if meshes[s.rank] == mesh])
        self.absent = is_absent(self.meshes[0])
        here = {meshes[r] for r in range(len(meshes)) if self.places.is_here(r) and not self.absent}
        count = plan.cut.loop.length
        numbers = {m: _numbers(count, m) if m in here else [] for m in dict.fromkeys(self.meshes)}
        self._states = [_StageState(s, m, numbers[m]) for s, m in zip(plan.stages, self.meshes, strict=True)]
        pieces = plan.pieces
        self._homes = self._places(plan.in_borders)  # each argument where it lives
        self._entry = self._pieced(pieces.inputs, self._homes)
        self._exits = self._places(plan.out_borders)
        self._exit = self._pieced(pieces.outputs, self._exits)
        known = known or {}
        self._executables: dict[TaskId, Executable] = {
            id: known.get(id) or Executable(task.plan, self.meshes[s.number], token=True)
            for s in plan.stages
            for id, task in s.tasks.all.items()
            if task.plan is not None and self.places.is_here(s.rank)
        }
        self._avals = [(tuple(a.shape), a.dtype) for a in plan.program.in_avals]
        self._captured = list(plan.program.captured)
        self._last: Recording | None = None
        self._watch = _WatchedTasks()
        self._executor: Executor | None = None
        self._remote: NetworkRun | None = None

    def _places(self, borders: Sequence[Border]) -> list[Place]:
        return [Place(b.aval, self.meshes[b.stage], b.placement) for b in borders]

    def _pieced(self, pieces: Sequence[Piece], at: Sequence[Place]) -> PiecedArrays:
        pipeline = self.plan.pipeline
        return PiecedArrays(pieces, at, self.plan.whole_mesh, pipeline.axis if pipeline.meshes is None else None)

    def with_schedule(self, schedule: Any) -> PipelineExecutable:
        """The pipeline with its tasks in another order; compiled tasks are reused. See `PipelinePlan.with_schedule`."""
        return PipelineExecutable(with_schedule(self.plan, schedule), self._ranks, self._executables)

    def remapped(self, rank: int, whole: AnyMesh, meshes: Sequence[AnyMesh]) -> PipelineExecutable:
        """The pipeline with a rank on other devices. Compiled tasks of the other ranks are reused."""
        self.close()
        request = self.plan.request
        pipeline = request.pipeline if request.pipeline.meshes is None else replace(request.pipeline, meshes=meshes)
        plan = replace(self.plan, request=replace(request, whole=whole, meshes=meshes, pipeline=pipeline))
        moved = {id for s in plan.stages if s.rank == rank for id in s.tasks.all}
        return PipelineExecutable(plan, meshes, {i: e for i, e in self._executables.items() if i not in moved})

    @cached_property
    def agreement(self) -> Agreement | None:
        """The agreement on this plan of the processes that run it; None if it runs in one."""
        if not self.places.are_several:
            return None
        plan = self.plan
        return Agreement(plan, group_of_run, lambda: plan.digest, placed=False)  # it does not hold this object

    # -- compiled programs

    def _task_executables(self) -> list[Executable]:
        return list(self._executables.values())

    @property
    def compiled(self) -> Executor:
        """The actors, with all programs compiled. If stages run in several processes, each calls this together."""
        if self._remote is not None and self._remote.is_over:
            self.close()  # what is compiled here is kept
        if self._executor is None:
            self._executor = self._opened()
        return self._executor

    def _opened(self) -> Executor:
        plan, steps = self.plan, self._steps
        remote = None
        if self.agreement is not None:
            digest, codec, what = plan.digest, WaysCodec(self._ways), f"{plan.program.name}: its stages"
            if self._flow is None:
                self.agreement.agree_on_plan()
            else:  # all have compared the flow
                digest = f"{digest} of {self._flow.name} in {self.places.all}"  # others may open a like one
            remote = NetworkRun(
                plan.network, digest, self.places.of_rank, codec, what, self._crossing, inner=self._flow is not None
            )  # fmt: skip
        self.compile_tasks()
        tokens = {s.label: [None] * len(s.gives) for row in plan.network.actors for s in row}
        programs = 3 if any(w is not None and w.boxes for w in self._ways) else 1  # a step's own, before and after it
        window = max(1, IN_FLIGHT // plan.schedule.ranks // programs)
        wide = any(len(ps) > 1 for ps in self.places.of_rank)  # their actors wait for other processes
        executor = Executor(
            plan.network,
            lambda label: self._task(label, steps.get(label), tokens[label], remote),
            transports=self._transport,
            limit=LaunchLimit(window, jax.block_until_ready, _is_ready),
            threads=Threads(THREADS if not (self._calls_back() or wide) else plan.schedule.ranks, plan.program.name),
            share=None if remote is None else remote.share,
        )
        if remote is not None:
            try:
                remote.open(executor)
            except BaseException:
                executor.close()
                raise
        self._remote = remote
        return executor

    def compile_tasks(self) -> None:
        """Compile all programs of this process."""
        executables = self._task_executables()
        with line_if_long(f"compiling the {len(executables)} programs of {self.plan.program.name}"):
            for e in executables:  # in this thread, because JAX's settings are per thread
                _ = e.lowered
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(lambda e: e.compiled, executables))

    @cached_property
    def _steps(self) -> Mapping[Any, StepValues]:
        return step_values(self.plan.built, self.plan.stages)

    # -- what moves

    @cached_property
    def _ways(self) -> list[Ways | None]:
        """The ways of the values of each channel; None for channels that carry nothing."""
        return channel_ways(self.plan, self.places, self._steps)

    def _transport(self, channel: Channel) -> Transport:
        """The function that moves a message of a channel within this process, or readies it for a link."""
        number = next(i for i, c in enumerate(self.plan.network.channels) if c is channel)
        ways = self._ways[number]
        if ways is None or ways.stay or not self.places.is_here(channel.source):
            return _stay
        return ways.leave if number in self._crossing else ways.move

    @cached_property
    def _crossing(self) -> set[int]:
        """The channels whose values go from process to process."""
        ends = enumerate(zip(self.plan.network.channels, self._ways, strict=True))
        return {
            i for i, (c, w) in ends if w is not None and (self.places.are_apart(c.source, c.target) or not w.are_here)
        }  # fmt: skip

    def _calls_back(self) -> bool:
        """Whether a task has callbacks. XLA:CPU runs it while it is launched, so each actor needs a thread."""
        eqns = (e for x in self._task_executables() for e in all_eqns(x.plan.boxed.jaxpr))
        return any(e.primitive.name in CALLBACKS for e in eqns)

    def _task(self, label: Any, step: StepValues | None, tokens: list[None], remote: NetworkRun | None) -> Task:
        if step is not None:
            together = self._together(self.plan.stages[step.task.id.stage].rank, remote)
            return Task(self._runner(label, step, self._arriving[label], together), source=_lines_of(step.task))
        return Task(lambda _: tokens, settled=label in map(done_label, range(self.plan.schedule.ranks)))

    @cached_property
    def _arriving(self) -> dict[Any, list[tuple[int, Ways]]]:
        """For each step the messages that it finishes, and their ways."""
        steps = (s for row in self.plan.network.actors for s in row)
        return {
            s.label: [(i, w) for i, (c, _) in enumerate(s.takes) if (w := self._ways[c]) is not None and w.finishes]
            for s in steps
        }

    def _together(self, rank: int, remote: NetworkRun | None) -> Callable[[], None]:
        """The function that waits, in a call, until all processes of a rank have come to its next step: a program that
        some of them do not launch, because the call is stopped, never ends in the others."""
        if remote is None or len(self.places.of_rank[rank]) == 1:
            return lambda: None
        network, watch = remote.network, self._watch
        return lambda: network.together(watch.number, rank)

    def _runner(
        self, label: Any, step: StepValues, arriving: Sequence[tuple[int, Ways]], together: Callable[[], None]
    ) -> Runner:
        """The function that a step runs: it picks the task's inputs, launches it, and hands out its results."""
        state = self._states[step.task.id.stage]
        residents = state.residents
        index = state.index[label.microbatch] if isinstance(label, Action) else None
        executable, watch = self._executables.get(step.task.id), self._watch
        inputs, incoming, kept, gives, drops = step.inputs, step.incoming, step.kept, step.gives, step.drops
        wide = bool(settings()[0])  # the actor's thread lacks this setting, and callbacks into Python read it

        def run(values: list[Any]) -> list[Any]:
            together()
            for i, ways in arriving:
                values[i] = ways.arrive(values[i])
            for v, (i, j) in incoming:
                residents[v] = values[i][j]
            made: Sequence[Any] = ()
            token: Sequence[Any] = ()
            if executable is not None:
                given = [
                    index if v is INDEX else residents[v] if at is None else values[at[0]][at[1]] for v, at in inputs
                ]
                with jax.enable_x64(wide):
                    *made, last = watch.run(label, executable, given)
                token = (last,)
                for resident, i, v in kept:
                    residents[resident] = residents[v] if i is None else made[i]
            sent = [
                tuple(
                    made[g.output] if g.output is not None
                    else residents[g.var] if g.spot is None
                    else values[g.spot[0]][g.spot[1]]
                    for g in give
                )
                for give in gives
            ]  # fmt: skip
            for v in drops:
                residents.pop(v, None)
            return [*sent, *token]

        return run

    # -- calling it

    def is_plain_input(self, i: int) -> bool:
        """True: a pipeline takes any array and puts it in place."""
        del i
        return True

    def enter(self, i: int, x: Any) -> Any:
        """Argument `i` unchanged: its stages convert it."""
        del i
        return x

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        """Run the plan.

        Raises:
          GoneError: arguments were donated to an earlier call.
          PipelineTaskError: a task failed; all arguments are unchanged.
          StepFailedError: an update failed after donated buffers were taken.
        """
        return self.launch(leaves)

    def measure(self, leaves: Sequence[Any]) -> list[Any]:
        """Run the plan and wait for every task, so that `trace`, `draw` and `timeline` show times on the devices."""
        self._watch.waited = {}
        try:
            return self.launch(leaves)
        finally:
            self._watch.waited = None

    def check(self, leaves: Sequence[Any]) -> tuple[CheckReport, list[Any]]:
        """Run the plan, and hold the first run of each task against one device. Nothing is donated.

        Raises:
          PipelineError: its stages run in several processes.
        """
        name = self.plan.program.name
        if self.places.are_several:
            raise PipelineError(
                f"{name}: its stages run in several processes, and a check reads the pieces of all devices in one; "
                "check it in a run of one process."
            )
        own = [x.copy() if i in self._donated and isinstance(x, jax.Array) else x for i, x in enumerate(leaves)]
        self._watch.taken = {}
        try:
            found = jax.block_until_ready(self.launch(own))
            taken = self._watch.taken
        finally:
            self._watch.taken = None
        reports: list[CheckReport] = []
        while taken:  # what a task took is freed when it is checked
            executable, given = taken.popitem()
            reports.append(replace(Checker(executable).check(given)[0], where=executable.plan.program.name))
        return merged(reports[::-1]), found

    @cached_property
    def _donated(self) -> list[int]:
        return [i for i, b in enumerate(self.plan.in_borders) if b.known.donated]

    def drop_donated(self, leaves: Sequence[Any]) -> None:
        """Delete the donated arguments of a call that ran on copies."""
        drop(leaves, self._donated)

    def launch(self, args: Sequence[Any]) -> list[Any]:
        """Run the plan on the arguments of the flat call."""
        whole = [*args, *self._captured]
        for x, (shape, dtype) in zip(whole, self._avals, strict=True):
            if getattr(x, "shape", ()) != shape or (isinstance(x, jax.Array) and x.dtype != dtype):
                raise TypeError("not the call that was compiled")  # the caller then makes the call without the cache
        executor, remote = self.compiled, self._remote
        begin, run = perf_counter(), executor.runs + 1
        self._watch.number = run
        try:
            try:
                named = zip(self.plan.program.in_paths, args, strict=False)
                refuse_gone(f"{self.plan.program.name}: arguments that are gone", named)
                self._enter(self._entry.split(whole), run)
            except (TypeError, ValueError) as error:  # the cache would make the call again: in this process alone
                if remote is None or isinstance(error, ShardcError):
                    raise
                text = (
                    f"{self.plan.program.name}: its arguments cannot be put in place: {type(error).__name__}: {error}"
                )
                raise PipelineError(text) from error
            try:
                spans = executor.run(record=True)
                self._last = Recording(spans, begin, self._watch.waited)
            except PipelineTaskError as error:
                report_failure(self.plan.program, args, error)
                raise
            except PeerLostError as error:
                raise PeerLostError(f"{error}{gone_text(self.plan.program, args)}", error.process) from None
            return self._results(run)
        except BaseException as error:  # an interrupt too: the other processes are in this run, or will be
            executor.abandon(run, error)
            raise
        finally:
            if remote is not None:
                remote.network.forget(executor.runs)
            for state in self._states:
                state.residents.clear()

    def _enter(self, parts: Sequence[Any], run: int) -> None:
        """Put the arguments, and those that live in another process and are read here, on the stages of this one."""
        plan, remote = self.plan, self._remote
        if remote is not None:
            for i, to in self._shared.items():
                if _lives_on(parts[i], self._homes[i]) and not self._is_told(plan.pieces.program.in_avals[i]):
                    remote.send(run, len(self._exits) + i, parts[i], to)
        near: dict[int, Any] = {}  # what another process sends, it sends once, also to two ranks of this one
        entered: dict[tuple[int, NamedSharding], jax.Array] = {}  # an argument of two stages of a rank is put once
        for stage, state in zip(plan.stages, self._states, strict=True):
            if not self.places.is_here(stage.rank):
                continue
            names = stage.tasks.arguments
            for v, i, place in zip(names, stage.program.arguments, state.places, strict=True):
                key = i, place.sharding
                if key not in entered:
                    if i not in near:
                        near[i] = self._near(parts[i], i, run)
                    entered[key] = place.enter(near[i])
                state.residents[v] = entered[key]

    @cached_property
    def _shared(self) -> dict[int, list[int]]:
        """The arguments that this process sends to others when they live here, and to which ones."""
        found: dict[int, list[int]] = {}
        for stage in self.plan.stages:
            for i in stage.program.arguments:
                home = self.plan.stages[self.plan.homes[i]].rank
                to = set(self.places.of_rank[stage.rank]) - set(self.places.of_rank[home])
                if to and self.places.is_here(home):
                    found[i] = sorted({*found.get(i, ()), *(to if self.places.speaks_for(home) else ())})
        return found

    def _near(self, x: Any, i: int, run: int) -> Any:
        """Argument `i` in a form that a stage of this process can take."""
        if not is_remote(x):
            return x.arriving.wait() if isinstance(x, RemoteArray) and x.arriving is not None else x
        plan, home = self.plan, self._homes[i]
        rank = plan.stages[plan.homes[i]].rank
        if self._remote is not None and x.mesh == home.mesh and not self.places.is_here(rank):
            giver = self.places.of_rank[rank][0]
            return self._remote.receive(run, len(self._exits) + i, plan.pieces.program.in_avals[i], giver)
        raise OtherCallError(
            f"{plan.program.name}: {plan.pieces.program.in_paths[i]} is {x!r}, and rank {rank}, which uses it, runs in "
            f"{self.places.text(rank)}; move it with function.remap({rank}, mesh)(state), or bring its value here with "
            "shardc.fetch."
        )

    def _results(self, run: int) -> list[Any]:
        found: dict[int, Any] = {}
        for stage, state in zip(self.plan.stages, self._states, strict=True):
            for i, v in zip(stage.program.results, stage.tasks.results, strict=True):
                found[i] = self._result(i, v, stage, state, run)
        return self._exit.assemble([found[i] for i in range(len(found))])

    def _is_told(self, aval: Any) -> bool:
        """Whether a result of this type comes to all processes; a flow asks for those that it hands on."""
        return self._flow is None and is_small(aval)

    def _result(self, i: int, v: Any, stage: Stage, state: _StageState, run: int) -> Any:
        exit, aval, remote = self._exits[i], self.plan.pieces.program.out_avals[i], self._remote
        here, first = self.places.is_here(stage.rank), self.places.all[0]
        is_whole = self._flow is not None and self.plan.pieces.outputs[i].number in self._flow.whole
        if compat.is_literal(v):
            value = Arrival(lambda: np.asarray(v.val))
            return exit.enter(v.val) if here else RemoteArray(aval, exit.at, exit.device_mesh, value)
        if here:
            if remote is not None and self._is_told(aval):  # in all processes of the rank: it may take them all
                to = remote.others(self.places.of_rank[stage.rank]) if self.places.speaks_for(stage.rank) else []
                remote.send(run, i, exit.leave(state.residents[v]), to)
            elif remote is not None and is_whole and not self.places.is_of(stage.rank, first):
                x = exit.leave(state.residents[v].copy())  # a later call may take its memory before it is sent
                remote.send(run, i, x, [first] if self.places.speaks_for(stage.rank) else [])
            return state.residents[v]
        assert remote is not None
        if self._is_told(aval) or (is_whole and self.places.me == first):
            return remote.arriving(run, i, aval, exit.at, exit.device_mesh)
        return RemoteArray(aval, exit.at, exit.device_mesh)

    def close(self) -> None:
        """End the actors' threads; the next call starts new ones."""
        if self._remote is not None:
            self._remote.close()
            self._remote = None
        if self._executor is not None:
            self._executor.close()
            self._executor = None

    # -- inspection

    def chart(self) -> Chart:
        """The last call, planned above measured for each rank. Where several processes run, all of them ask for it.

        Measured times are those of the host's launches; after `measure`, those on the devices.

        Raises:
          PipelineError: there was no call yet.
        """
        if self._last is None:
            raise PipelineError(
                f"{self.plan.program.name}: nothing to show, because there was no call yet; call it, or measure(...) "
                "it. The plan shows the planned call: plan.timeline(), plan.draw(...), plan.trace(...)."
            )
        last, net = self._last, self.plan.network
        last = last if self._remote is None else last.gathered(net, self._remote.cluster)
        return measured_chart(self.plan, last.timeline(net), last.note)

    @property
    def measured_waits(self) -> list[float]:
        """For each rank the part of the last call that it waited; empty if that call was not measured, or if other
        processes ran a part of it."""
        if self._last is None or self._last.waited is None or self._remote is not None:
            return []
        timeline = self._last.timeline(self.plan.network)
        return [1 - busy / timeline.makespan for busy in timeline.busy]

    def hlo(self) -> str:
        """The optimized HLO of all tasks, one after the other."""
        return "\n\n".join(e.hlo() for e in self._task_executables())

    def memory_stats(self) -> Any:
        """XLA's memory analysis of each task, by its name."""
        return {e.plan.program.name: e.memory_stats() for e in self._task_executables()}

    @property
    def memory(self) -> PipelineMemory:
        """`plan.memory` with XLA's temporary memory of each task instead of the planner's estimate."""
        return self.plan.memory_with(self._working)

    def _working(self, task: StageTask) -> int:
        there = self._executables.get(task.id)  # None for a task of another process
        found = None if there is None else there.memory_stats()
        return working_bytes(task) if found is None else found.temp_size_in_bytes

    def audit(self) -> Audit:
        """Compare the collectives in the compiled HLO of every task of this process with the plan's, and the bytes that
        the calls so far have sent from mesh to mesh. Links that carry values are measured."""
        whole = audit_all([e.audit() for e in self._task_executables()])
        ways = [w for w in self._ways if w is not None]
        where = f"process {self.places.me}" if self.places.are_several else ""
        crossed, planned = sum(w.sent for w in ways), sum(w.planned for w in ways)
        linked = [i for i, w in enumerate(self._ways) if w is not None and w.carrier == LINKS]
        links = {} if self._remote is None else self._remote.speeds(linked)
        return replace(whole, where=where, crossed=crossed, planned_crossed=planned, links=links)

    def schedule(self) -> list[Scheduled]:
        """The collectives of every task of this process, once each, and what it runs beside them."""
        return read_schedule(e.hlo() for e in self._task_executables())


def _numbers(microbatches: int, mesh: Mesh) -> list[jax.Array]:
    """The numbers of the microbatches as arrays on a mesh."""
    whole = NamedSharding(mesh, jax.sharding.PartitionSpec())
    return [jax.device_put(np.int32(j), whole) for j in range(microbatches)]


def _stay(values: Any) -> Any:
    return values


def _lives_on(x: Any, place: Place) -> bool:
    """Whether an array lives on the mesh of a place, and nowhere else."""
    if is_placed(x):
        return x.mesh == place.mesh
    return isinstance(x, jax.Array) and x.committed and x.sharding.device_set == set(place.devices)


def _lines_of(task: StageTask) -> str:
    """The first and the last source line of a task."""
    lines = [] if task.plan is None else [compat.source_line(e) for e in task.plan.boxed.jaxpr.eqns]
    lines = [line for line in lines if line]
    return "" if not lines else lines[0] if lines[0] == lines[-1] else f"{lines[0]} to {lines[-1]}"


def _is_ready(x: Any) -> bool:
    return x.is_ready()
