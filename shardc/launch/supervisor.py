r"""The supervisor of a run: starts its processes, and again those that are lost, and ends all if one fails for good.

started -> joined -> done -> asked to leave -> ended         all well
         |       \-> asked to end (SIGTERM) -> saves at the common last step -> done
             \-> lost -> started again alone, in the same epoch, if the others run a flow that does without it
                    \-> else its island is killed and started again, in a new epoch, when its host is there
                    \-> cannot be mended -> all start again with fewer processes
                           \-> too few are left: "over", 3 s later all are killed

A *place* is where a process can run: a child of the launcher, or a host with an agent. The processes of the run are
numbered in the order of the places that it has; it may run on fewer places than there are.
"""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Final, TypeAlias

from shardc.errors import ClusterError, all_offenders, number_text
from shardc.launch.activity import COMPUTES, STOPPED
from shardc.launch.failure import DISAGREE, LOST, Failure, Losses, failure_line, failure_of, failure_text, prefixed
from shardc.launch.health.figures import RunHealth
from shardc.launch.health.publish import Publish
from shardc.launch.health.status_line import status_text
from shardc.launch.job import Job
from shardc.launch.lateness import Lateness, LateProcesses, last_calls
from shardc.launch.local_process import ProcessHandle
from shardc.launch.output import Screen
from shardc.launch.restarts import RestartBudget
from shardc.runtime.calls import processes_text
from shardc.runtime.cluster import RUN, RunConfig
from shardc.runtime.store import StoreServer
from shardc.runtime.transport.connection import BEAT

GRACE: Final = 3.0
"""Seconds that processes have to end by themselves after one has failed."""
_INTERRUPT_GRACE: Final = 2.0
_KILL_SECONDS: Final = 10.0
_EARLIER: Final = 3.0
"""Seconds before the deadline at which a lost host is given up: its launcher tries to connect until then."""
_SAY_AGAIN: Final = 60.0
"""Seconds between two lines of progress where there is no terminal."""
INTERRUPTED: Final = 130
TERMINATED: Final = 143

Event: TypeAlias = tuple[Any, ...]
"""`("ended", place, start, code)`, `("report", process, data)`, `("host lost", place, start)`, `("host here", place)`,
`("interrupt",)`; `("terminate",)` by a signal, `("terminate", place)` by one to the launcher of its host."""


@dataclass
class _TakenPlace:
    """A place, with the process that runs there as the supervisor knows it."""

    handle: ProcessHandle
    process: int = -1
    """Its number in the run; -1: the run goes on without this place."""
    start: int = 0
    epoch: int = 0
    began: float = 0.0
    running: bool = False
    joined: bool = False
    ended: Mapping[str, Any] | None = None
    """The calls that its script had made when it ended."""
    saved: int | None = None
    """The step at which its script has saved and ended, because the run was asked to end."""
    joins: bool = False
    """Whether it was started in place of a lost one, while the others went on."""
    told: bool = False
    """Whether the scripts that still run know of its end."""
    killed: bool = False
    """Whether the supervisor has killed it because another process failed."""
    why: str = ""
    """The reason if the supervisor has killed it for a fault of its own."""
    report: dict[str, Any] | None = None
    moved: float = 0.0
    """When it was last seen to compute; until it has joined, when it was last seen not to be stopped."""
    unfit: bool = False
    """Whether its process has failed when no restart was left: nothing is started here any more."""
    leaves: bool = False
    """Whether the launcher of its host was asked to end: nothing is started here until the host comes again."""
    asked: float | None = None
    """When it was asked for its threads, as others wait for it."""


@dataclass
class _WaitForHosts:
    """A restart that waits for hosts.

    Attributes:
      cause: the loss that it mends.
      again: the processes to start.
      until: time at which the run goes on without these hosts, or ends.
      begin: time at which the restart begins at the earliest.
      is_for_hosts: whether a host was away.
    """

    cause: Failure
    again: set[int]
    until: float
    begin: float
    is_for_hosts: bool


@dataclass
class _Ending:
    """An end that was asked for: all processes save at their next common step.

    Attributes:
      until: time at which they are killed.
      is_final: whether the run ends; else it goes on without the hosts whose launchers were asked.
      after: the steps that were begun when it was asked for; None until all processes have said theirs.
    """

    until: float
    is_final: bool
    after: int | None = None


class Supervisor:
    """Watches over the processes of a run until all have ended.

    Args:
      job: of process 0 in epoch 0, for a run on all places; the others' differ in number, links and log.
      handles: of the places, in order.
      screen: where failures and restarts are printed.
      job_of: completes the job of a process at a start in a place, by its number: links and log.
      server: the store; its reports come as events.
      events: what has happened.
      publish: gets the figures of the run, about once a second.
    """

    def __init__(  # noqa: PLR0913  # a run, and who is told of it
        self,
        job: Job,
        handles: Sequence[ProcessHandle],
        screen: Screen,
        job_of: Callable[[Job, int], Job],
        server: StoreServer,
        events: SimpleQueue[Event],
        publish: Publish = lambda figures: None,
    ) -> None:
        self._publish = publish
        self._job, self._screen, self._job_of, self._server, self._events = job, screen, job_of, server, events
        self._places = [_TakenPlace(handle) for handle in handles]
        self._members: list[_TakenPlace] = []
        """The place of each process."""
        self._least = job.config.least or job.config.processes
        self._epoch = 0
        self._budget = RestartBudget(job.config.restarts, job.config.window)
        self._leaving = False
        self._over_at: float | None = None
        """The time at which the remaining processes are killed."""
        self._interrupted = False
        self._signalled = False
        """Whether a signal has asked this launcher to end."""
        self._terminated = False
        """Whether signals have asked the run to end."""
        self._ending: _Ending | None = None
        self._failures: list[Failure] = []
        self._losses = Losses()
        self._wait: _WaitForHosts | None = None
        self._newcomers: set[int] = set()
        """Places whose hosts are there, and that the run takes at its next checkpoint."""
        self._saved: int | None = None
        """The step of the last checkpoint that is known to be complete."""
        self._lateness = Lateness(job.config.deadline)
        self._looked = self._said = monotonic()
        self._health = RunHealth(self._looked)

    # -- the loop

    def run(self) -> int:
        """Start all, watch, and return the exit code of the run."""
        try:
            self._number(self._chosen() or self._places[: self._job.config.processes])
            self._start(range(len(self._members)))
            while not self._finished():
                with suppress(Empty):
                    self._take(self._events.get(timeout=0.2))
                self._look()
        finally:
            self._screen.live("")
            self._kill(p for p in self._places if p.running)
        return self._result()

    def _finished(self) -> bool:
        over = self._over_at is not None or (self._leaving and not self._losses)
        return over and not any(p.running for p in self._places)

    def _take(self, event: Event) -> None:
        match event:
            case "ended", at, start, code:
                if start == self._places[at].start and self._places[at].running:
                    self._ended(self._places[at], code)
            case "report", process, said:
                if 0 <= process < len(self._members) and said.get("start") == self._members[process].start:
                    self._reported(self._members[process], said)
            case "host lost", at, start:
                place = self._places[at]
                self._newcomers.discard(at)
                if start == place.start and place.running:
                    place.why = "the launcher of its host is lost"
                    self._ended(place, -9)
                if self._over_at is None:
                    place.handle.replace()
            case "host here", at:
                self._arrived(at)
            case "terminate", *at:
                self._terminate(self._places[at[0]] if at else None)
            case _:
                self._interrupt()

    def _reported(self, place: _TakenPlace, said: Mapping[str, Any]) -> None:
        match said["what"]:
            case "joined":
                place.joined = True
                if place.joins:
                    self._server.notify_all({"event": "back", "process": place.process})
                self._lateness.begin()  # others have waited for its start
                for member in self._members:
                    member.told = False  # else only those hear of ends that were there
            case "done":
                place.saved = said.get("saved")
                self._ended_well(place, said["calls"])
            case _:
                place.report = dict(said)

    def _ended_well(self, place: _TakenPlace, calls: Mapping[str, Any]) -> None:
        """Handle the end of a script. When all scripts have ended, all processes leave."""
        if place.ended is not None or self._leaving or self._over_at is not None:
            return
        if self._is_behind(place):  # it has not noticed a loss, and those that were started again wait for it
            self._catch_up(Failure(place.process, 0, "its script ended before it noticed a loss"))
            return
        place.ended, place.told = calls, False
        if all(m.ended is not None for m in self._members):
            if self._ending and not self._ending.is_final and place.saved is not None and (chosen := self._chosen()):
                self._ending = None
                self._screen.say(f"all have saved; the run goes on with {number_text(len(chosen), 'process')}")
                self._regroup(chosen)
                return
            self._leaving = True
            self._server.notify_all({"event": "leave"})

    def _tell_ended(self) -> None:
        """Tell the scripts that still run which others have ended: nobody waits for these any more."""
        ended: dict[str, list[int]] = {}
        for member in self._members:
            if member.ended is not None and not member.told:
                member.told = True
                ended.setdefault(json.dumps(member.ended), []).append(member.process)
        for calls, processes in ended.items():
            event = {"event": "done", "processes": processes, "epoch": self._epoch, "calls": json.loads(calls)}
            for member in self._members:
                if member.ended is None:
                    self._server.notify(member.process, event)

    # -- which places the run has

    @property
    def _config(self) -> RunConfig:
        """The configuration of process 0 for the places that the run has."""
        config, processes = self._job.config, len(self._members)
        islands = 1 if config.islands == 1 else processes // config.per_island
        return replace(config, processes=processes, islands=islands, epoch=self._epoch, restarts=self._restarts)

    @property
    def _restarts(self) -> int:
        """How many restarts are left now."""
        return self._budget.left(monotonic())

    def _chosen(self) -> list[_TakenPlace]:
        """The most places that the run can go on with now; none if they are too few. Islands stay whole."""
        there = [p for p in self._places if p.handle.is_here and not (p.unfit or p.leaves)]
        config = self._job.config
        size = 1 if config.islands == 1 else config.per_island
        processes = min(len(there), config.processes) // size * size
        return there[:processes] if processes >= self._least else []

    def _number(self, places: Sequence[_TakenPlace]) -> None:
        """Number the processes of these places. What is still on its way from earlier ones is of earlier starts."""
        latest = max(p.start for p in self._places)
        for place in self._places:
            place.process, place.start = -1, latest
        for process, place in enumerate(places):
            place.process = process
        self._members = list(places)
        self._newcomers.clear()

    def _arrived(self, at: int) -> None:
        """Handle a host that is there, for the first time or again."""
        place = self._places[at]
        place.leaves = False
        if self._wait is not None:
            self._go_on()
        elif place.process < 0 and not place.unfit and self._over_at is None and not self._leaving:
            self._newcomers.add(at)
            is_spare = len(self._members) == self._job.config.processes
            what = ", as a spare" if is_spare else "; the run takes it at its next checkpoint"
            self._screen.say(f"{_host(place)} is there{what}")

    def _regroup(self, places: Sequence[_TakenPlace]) -> None:
        """Go on with these places from the last checkpoint: all processes start again."""
        self._wait = None
        self._kill(p for p in self._places if p.running)
        self._losses.take()
        for process in range(len(self._members)):
            self._server.drop(process)
        self._number(places)
        self._epoch += 1
        self._tell_epoch()
        self._start(range(len(self._members)))

    def _go_on_without(self, cause: Failure, why: str) -> bool:
        """Go on with fewer processes, if enough are left. `why`: the reason that the loss cannot be mended."""
        chosen = self._chosen()
        if not chosen:
            return False
        self._say_failure(cause)
        self._screen.say(
            f"process {cause.process} is lost ({cause.why}), and {why}; the run goes on with "
            f"{number_text(len(chosen), 'process')}"
        )
        self._regroup(chosen)
        return True

    # -- starts

    def _start(self, processes: Iterable[int], joins: bool = False) -> None:
        config = replace(self._config, joins=joins)
        for p in processes:
            place = self._members[p]
            place.start += 1
            place.epoch, place.began, place.running = self._epoch, monotonic(), True
            place.moved = place.began
            place.joined = place.killed = False
            place.joins = joins
            place.why, place.report, place.ended, place.saved, place.asked = "", None, None, None, None
            self._server.drop(p)  # the connection of its last start, if it stays open, says nothing about this one
            job = replace(self._job, config=replace(config, me=p), start=place.start)
            try:
                place.handle.start(self._job_of(job, place.handle.number))
            except (ClusterError, OSError) as error:
                place.running = False
                self._give_up([Failure(p, LOST, f"it cannot be started: {error}", when=monotonic())])

    def _kill(self, places: Iterable[_TakenPlace]) -> None:
        """Kill the processes of places and wait for their ends."""
        killed = list(places)
        for place in killed:
            place.killed = True
            place.handle.kill()
        until = monotonic() + _KILL_SECONDS
        for place in killed:
            place.running = not place.handle.wait(max(0.0, until - monotonic()))

    # -- ends

    def _ended(self, place: _TakenPlace, code: int) -> None:
        place.running = False
        if place.killed:
            return
        if code == 0 and place.report is None:
            self._ended_well(place, {})
            return
        failure = failure_of(place.process, code, place.report, monotonic())
        self._lose(replace(failure, why=place.why, code=LOST) if place.why else failure)

    def _lose(self, failure: Failure) -> None:
        """Record the failure of a process. What follows is decided when its cause has had time to be reported."""
        if self._leaving and self._restarts:
            self._report_late_loss(failure)
        elif self._over_at is not None:
            self._failures.append(failure)
        elif failure.follows and self._is_behind(self._members[failure.process]):
            self._catch_up(failure)  # its cause has been mended already
        else:
            aborted = failure.code == 128 + signal.SIGABRT  # its last lines say whether another process caused it
            self._losses.add(self._with_tail(failure) if aborted else failure)

    def _decide(self) -> None:
        """Mend the losses that have waited for their cause, or end the run."""
        failures = self._losses.take()
        cause = failures[0]
        if self._leaving or cause.final or self._ending:
            self._report_loss(cause)
            self._give_up(failures)
        elif self._wait is not None:
            self._wait.again |= self._with_islands(f.process for f in failures)
        elif self._restarts and self._may_be_replaced(failures):
            self._replace(cause, failures)
        elif self._restarts:
            self._report_loss(cause)
            self._restart(cause, {f.process for f in failures})
        else:
            self._report_loss(cause)
            for failure in failures:
                place = self._members[failure.process]
                place.unfit = place.handle.is_here and (failure is cause or not failure.may_follow)
            if not self._go_on_without(cause, "no restart is left"):
                self._give_up(failures)

    def _may_be_replaced(self, failures: Sequence[Failure]) -> bool:
        """Whether the others go on without these processes until they are there again: their run says who may be lost.
        Not if one that was to join them has raised an error."""
        said = json.loads(self._server.text(f"{self._epoch}/{RUN}") or "{}")
        lost = [self._members[f.process] for f in failures]
        return (
            {m.process for m in lost} <= set(said.get("replaceable", ()))
            and all(m.handle.is_here and m.epoch == self._epoch for m in lost)
            and not any(m.joins and m.report is not None for m in lost)
        )

    def _replace(self, cause: Failure, failures: Sequence[Failure]) -> None:
        """Start lost processes again, while the others go on."""
        self._budget.take(monotonic())
        lost = {f.process for f in failures}
        if not self._stop(cause, lost):
            return
        for failure in failures:
            self._say_restart(failure, "started again, and the others go on")
        for p in sorted(lost):
            self._server.set(f"{self._epoch}/address/{p}", None)
            self._server.notify_all({"event": "away", "process": p, "restarts": self._restarts})
        self._start(sorted(lost), joins=True)

    def _report_loss(self, failure: Failure) -> None:
        self._server.notify_all({"event": "lost", "process": failure.process, "why": failure.why})

    def _report_late_loss(self, failure: Failure) -> None:
        """Report a loss after all scripts have ended: there is nothing to restart."""
        self._screen.say(f"process {failure.process} is lost ({failure.why}); all scripts had ended")
        if self._over_at is None:
            self._over_at = monotonic() + GRACE

    def _is_behind(self, place: _TakenPlace) -> bool:
        """Whether a process was started before the last loss, and has not begun the epoch since."""
        return place.epoch < self._epoch and not self._is_in(place.process)

    def _is_in(self, process: int) -> bool:
        """Whether a process has begun the present epoch."""
        return self._server.text(f"{self._epoch}/address/{process}") is not None

    def _with_islands(self, processes: Iterable[int]) -> set[int]:
        """These processes and the others of their islands, which cannot go on without them."""
        return {p for process in processes for p in self._config.island(process)}

    def _restart(self, cause: Failure, lost: set[int]) -> None:
        """Mend a loss: start again the lost processes, and all that cannot go on without them."""
        self._epoch += 1
        pause = self._budget.take(monotonic())
        ended = {m.process for m in self._members if m.ended is not None}
        again = self._with_islands(lost | ended)
        if not self._stop(cause, again):
            return
        self._use_spares(again)
        are_here, config = all(self._members[p].handle.is_here for p in again), self._job.config
        if are_here and not pause:
            self._say_restart(cause, "started again")
            self._begin(again)
            return
        seconds = config.silence if self._least < len(self._places) else max(1.0, config.deadline - _EARLIER)
        begin = monotonic() + pause
        self._wait = _WaitForHosts(cause, again, begin + seconds, begin, not are_here)
        what = f"started again in {pause:g} s" if are_here else f"waiting up to {seconds:g} s for its host"
        self._say_restart(cause, what)

    def _use_spares(self, processes: Iterable[int]) -> None:
        """Let places at which nothing runs take those of processes whose hosts are away."""
        for p in processes:
            lost = self._members[p]
            free = (s for s in self._places if s.process < 0 and s.handle.is_here and not (s.unfit or s.leaves))
            if not lost.handle.is_here and (spare := next(free, None)) is not None:
                self._screen.say(f"{_host(spare)} takes the place of {_host(lost)}")
                spare.start = max(place.start for place in self._places)
                spare.process, lost.process = p, -1
                self._members[p] = spare
                self._newcomers.discard(self._places.index(spare))

    def _catch_up(self, failure: Failure) -> None:
        """Start a process again that has not noticed the last restart. This is no loss of its own."""
        again = self._with_islands([failure.process])
        if self._wait is not None:
            self._wait.again |= again
            return
        if any(self._is_in(p) for p in again):
            self._epoch += 1  # all, or the islands would take turns in failing for each other
            again = set(range(len(self._members)))
        self._losses.take(again)
        if self._stop(failure, again):
            self._begin(again)

    def _stop(self, failure: Failure, again: set[int]) -> bool:
        """Kill processes that are to be started again. If one cannot be killed the run ends."""
        self._kill(m for p in sorted(again) if (m := self._members[p]).running)
        stuck = [p for p in sorted(again) if self._members[p].running]
        if stuck:
            self._give_up([replace(failure, why=f"{failure.why}; process {stuck[0]} cannot be killed")])
        return not stuck

    def _begin(self, again: set[int]) -> None:
        self._tell_epoch()
        self._start(sorted(again))

    def _tell_epoch(self) -> None:
        self._health.goodput.begin(self._epoch)
        self._server.notify_all({"event": "epoch", "epoch": self._epoch, "restarts": self._restarts}, newcomers=True)

    def _go_on(self) -> None:
        """Begin the restart that waits for hosts, if they are there; without them when they have not come in time."""
        wait = self._wait
        assert wait is not None
        if monotonic() < wait.begin:
            return
        absent = [p for p in sorted(wait.again) if not self._members[p].handle.is_here]
        if not absent:
            self._wait = None
            host, started = _host(self._members[wait.cause.process]), number_text(len(wait.again), "process")
            if wait.is_for_hosts:
                self._screen.say(f"{host} is there; {started} started")
            if self._stop(wait.cause, wait.again):
                self._begin(wait.again)
        elif monotonic() > wait.until:
            self._wait = None
            why = "its host does not come back"
            if not self._go_on_without(wait.cause, why):
                self._give_up([replace(wait.cause, why=f"{wait.cause.why}, and {why}")])

    def _say_failure(self, failure: Failure) -> None:
        if failure.text:
            self._screen.say(failure_text(self._with_tail(failure), len(self._members)))

    def _say_restart(self, failure: Failure, what: str) -> None:
        self._say_failure(failure)
        left = self._budget.text(monotonic())
        self._screen.say(f"process {failure.process} is lost ({failure.why}); {what}, {left}")

    def _give_up(self, failures: Sequence[Failure]) -> None:
        """End the run. Its processes have GRACE seconds to end by themselves."""
        self._failures += [*failures, *self._losses.take()]
        self._wait = None
        if self._over_at is None:
            self._over_at = monotonic() + GRACE
            why = f"process {failures[0].process} failed: {failures[0].why}"
            self._server.notify_all({"event": "over", "why": why}, newcomers=True)
            self._kill(p for p in self._places if p.running and not p.joined)

    def _interrupt(self) -> None:
        """Handle Ctrl-C: interrupt all processes; the second time kill them."""
        self._over_at = monotonic() + (0 if self._interrupted else _INTERRUPT_GRACE)
        self._interrupted = True
        self._failures += self._losses.take()
        self._kill(p for p in self._places if p.running and not p.joined)
        for place in self._places:
            if place.running:
                place.handle.interrupt()

    # -- an end that is asked for

    def _terminate(self, place: _TakenPlace | None) -> None:
        """Handle SIGTERM to this launcher, or to that of another host: all processes save at the next common step.

        The second one to this launcher kills them. They are interrupted if nothing would be saved.
        """
        again = self._signalled and place is None
        self._signalled = self._signalled or place is None
        is_final = place is None or self._least == len(self._places)
        self._terminated = self._terminated or is_final
        if self._ending and not again:
            self._ending.is_final |= is_final
        elif self._over_at is None and not (again or self._leaving or self._losses or self._wait) and all(
            m.joined and m.running for m in self._members
        ):  # fmt: skip
            grace = self._job.config.grace
            self._ending = _Ending(monotonic() + grace, is_final)
            who = f"the launcher of {_host(place)} was" if place else "this run was"
            self._screen.say(f"{who} asked to end: all processes save at their next step, within {grace:g} s")
            self._server.notify_all({"event": "end soon"})
        elif is_final:
            self._interrupted = self._interrupted or again
            self._interrupt()
        if place is not None and not is_final:
            place.leaves = True
            if self._ending is None:
                place.handle.interrupt()

    def _look_at_last_step(self, ending: _Ending, now: float) -> None:
        """Name the last step once all have said how many they have begun. End the run if they cannot save."""
        members = [m.process for m in self._members]
        begun = [json.loads(self._server.text(f"{self._epoch}/begun/{p}") or '""') for p in members]
        without = [p for p, steps in zip(members, begun, strict=True) if steps is None]
        if now > ending.until:
            late = [m.process for m in self._members if m.ended is None]
            self._screen.say(f"{processes_text(late)} did not end within {self._job.config.grace:g} s")
            self._interrupted = True
            self._interrupt()
        elif "" in begun:
            return  # not all have said it
        elif without:
            self._screen.say(f"{processes_text(without)} {'has' if len(without) == 1 else 'have'} no loop that saves")
            self._interrupt()
        elif ending.after is None:
            ending.after = max(begun)
            self._server.notify_all({"event": "end after", "steps": ending.after})

    # -- time

    def _look(self) -> None:
        """Do what is due at this time."""
        now = monotonic()
        if self._over_at is not None:
            if now > self._over_at:
                self._kill(p for p in self._places if p.running)
        elif self._losses.is_due(now):
            self._decide()
        elif self._wait is not None:
            self._go_on()
        elif self._ending and not self._leaving:
            self._look_at_last_step(self._ending, now)
        if now - self._looked >= BEAT:
            paused = now - self._looked > 3 * BEAT
            self._look_at_activity(now, paused)
            self._looked = now
            self._look_for_silence(now)
            self._look_for_late(paused)
            self._tell_ended()
            self._look_at_progress(now)
        elif any(m.asked is not None for m in self._members):
            self._look_for_late(paused=False)

    def _look_at_activity(self, now: float, paused: bool) -> None:
        """Note which processes compute or are stopped. `paused`: this process was stopped itself, which counts for
        nobody."""
        for place in (p for p in self._places if p.running):
            doing = place.handle.activity()
            if paused or doing == COMPUTES or (doing != STOPPED and not place.joined):
                place.moved = now
            elif doing == STOPPED and place.joined:
                place.moved = -math.inf

    def _look_for_silence(self, now: float) -> None:
        silence, deadline = self._job.config.silence, self._job.config.deadline
        members = range(len(self._members))
        mute = [p for p in self._server.silent(min(2 * BEAT, silence / 2)) if p in members]
        quiet = [p for p in mute if now - self._members[p].moved <= silence]
        if quiet:  # they compute without a sign of life: others wait for them
            self._server.notify_all({"event": "computes", "processes": quiet})
        for p in self._server.silent(silence):
            if p < 0:
                self._server.drop(p)  # its end comes as an event
            elif p in members and p not in quiet:
                self._condemn(p, f"no sign of life for {silence:g} s")
        for p in (p for p in self._server.silent(deadline) if p in members):
            self._condemn(p, f"no sign of life for {deadline:g} s")
        for p, place in enumerate(self._members):
            if place.running and not place.joined:
                if now - place.moved > silence:
                    self._condemn(p, f"it was stopped for {silence:g} s before it had joined the run")
                if now - place.began > deadline:
                    self._condemn(p, f"it did not join the run within {deadline:g} s")

    def _look_for_late(self, paused: bool) -> None:
        """Look for processes that others have waited for too long. They are asked for their threads, and lost when they
        have answered, or could have."""
        if self._over_at is not None or self._wait is not None or self._losses or self._leaving:
            return
        at, heard = self._server.heard()
        ended = {m.process for m in self._members if m.ended is not None}
        late = self._lateness.look(at, self._epoch, heard, ended, paused)
        named = [] if late is None else [m for m in self._members if m.process in (late.processes or heard)]
        named = [m for m in named if m.running and m.joined and m.ended is None and not m.why]
        for member in self._members:
            if member not in named:
                member.asked = None  # it has come
            elif member.asked is None:
                member.asked = monotonic()
                self._server.notify(member.process, {"event": "show", "key": _threads_key(member)})
        answers = [self._server.text(_threads_key(m)) for m in named]
        waited = all(m.asked is not None and monotonic() - m.asked > 3 * BEAT for m in named)
        if late is not None and named and (None not in answers or waited):
            self._lose_late(late, named, answers, heard)

    def _lose_late(
        self,
        late: LateProcesses,
        named: Sequence[_TakenPlace],
        answers: Sequence[str | None],
        heard: Mapping[int, str],
    ) -> None:
        """Say what the run knows of late processes, and lose them. If all wait for one another, the run ends."""
        deadline = self._job.config.deadline
        said = processes_text([m.process for m in named])
        head = f"after {deadline:g} s {said} {'have' if len(named) > 1 else 'has'} not come: {late.why}"
        if not late.processes:
            head = f"for {deadline:g} s {late.why}"
        lines = last_calls(heard, range(len(self._members)))
        self._screen.say(all_offenders(head, lines))
        for member, text in zip(named, answers, strict=True):
            threads = text or "it does not say what it does: it is stopped, or holds Python's lock"
            self._screen.say(prefixed(member.process, threads.splitlines()))
            member.asked = None
        if late.processes:
            for member in named:
                self._condemn(member.process, f"it has not come for {deadline:g} s; {late.why}")
        else:
            self._give_up(
                [Failure(named[0].process, DISAGREE, late.why, f"DisagreementError: {late.why}\n", final=True)]
            )

    def _condemn(self, p: int, why: str) -> None:
        place = self._members[p]
        if place.running and not place.killed and not place.why:
            place.why = why
            place.handle.kill(why)

    def _look_at_progress(self, now: float) -> None:
        running = sum(p.running for p in self._places)
        texts, ages = self._server.statuses(), self._server.ages()
        heard = {p: (text, ages[p]) for p, text in texts.items() if p in ages}
        figures, said = self._health.look(now, heard, self._epoch, running, self._budget.taken)
        self._publish(figures)
        line, first = status_text(figures, said), said.get(0, {})
        self._screen.live(line)
        if figures.step is not None and now - self._said >= _SAY_AGAIN and not self._screen.is_terminal(2):
            self._said = now
            self._screen.say(line)
        if "saved" in first and first["epoch"] == self._epoch and first["saved"] != self._saved:
            self._saved = first["saved"]
            self._grow()

    def _grow(self) -> None:
        """Take hosts that have come: a checkpoint is complete, so that nothing is lost."""
        chosen = self._chosen()
        ends = self._over_at is not None or self._leaving or any(m.ended is not None for m in self._members)
        if self._newcomers and not (ends or self._ending) and len(chosen) > len(self._members):
            self._screen.say(f"the run goes on with {number_text(len(chosen), 'process')} from its last checkpoint")
            self._regroup(chosen)

    # -- the end

    def _with_tail(self, failure: Failure) -> Failure:
        return replace(failure, tail=self._members[failure.process].handle.tail())

    def _result(self) -> int:
        """Print the failures, the first one in full. Returns the exit code of the run."""
        if text := self._health.goodput.text(monotonic()):
            self._screen.say(text)
        failures = sorted((self._with_tail(f) for f in self._failures), key=lambda f: f.order)
        if self._interrupted:
            for failure in failures:
                if failure.process == 0 and (text := failure_text(failure, 1)):
                    self._screen.say(text)
            return TERMINATED if self._terminated else INTERRUPTED
        if not failures:
            saved = [m.saved for m in self._members if m.saved is not None]
            if len(saved) < len(self._members):  # a script has ended by itself
                return 0
            self._screen.say(f"all processes have saved step {saved[0]}, and ended")
            return TERMINATED
        if text := failure_text(failures[0], len(self._members)):
            self._screen.say(text)
        for failure in failures[1:]:
            self._screen.say(failure_line(failure))
        return TERMINATED if self._terminated else failures[0].code


def _threads_key(place: _TakenPlace) -> str:
    """The key under which a process answers what its threads do."""
    return f"threads of {place.process}, start {place.start}, asked at {place.asked}"


def _host(place: _TakenPlace) -> str:
    name = getattr(place.handle, "host_name", "")
    return f"host {name}" if name else "its host"
