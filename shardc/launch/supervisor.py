r"""The supervisor of a run: starts its processes, and again those that are lost, and ends all if one fails for good.

started -> joined -> done -> asked to leave -> ended         all well
             \-> lost -> its island is killed and started again, in a new epoch
                    \-> no restart is left: "over", 3 s later all are killed
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Final, TypeAlias

from shardc.errors import ClusterError
from shardc.launch.activity import COMPUTES, STOPPED
from shardc.launch.failure import Failure, failure_line, failure_of, failure_text
from shardc.launch.job import Job
from shardc.launch.local_process import ProcessHandle
from shardc.launch.output import Screen
from shardc.launch.status_line import status_text
from shardc.runtime.connection import BEAT
from shardc.runtime.store import StoreServer

GRACE: Final = 3.0
"""Seconds that processes have to end by themselves after one has failed."""
_INTERRUPT_GRACE: Final = 2.0
_CAUSE_SECONDS: Final = 3.0
"""Seconds that a failure which follows from another one waits for that one."""
_KILL_SECONDS: Final = 10.0
_EARLIER: Final = 3.0
"""Seconds before the deadline at which a process that has not joined counts as lost. At the deadline those that wait
for it would fail as well."""
INTERRUPTED: Final = 130

Event: TypeAlias = tuple[Any, ...]
"""`("ended", process, start, code)`, `("report", process, data)`, `("host lost", process, start)`, `("interrupt",)`."""


@dataclass
class _State:
    """A process as the supervisor knows it."""

    handle: ProcessHandle
    start: int = 0
    epoch: int = 0
    began: float = 0.0
    running: bool = False
    joined: bool = False
    ended: Mapping[str, Any] | None = None
    """The event that its script has ended."""
    killed: bool = False
    """Whether the supervisor has killed it because another process failed."""
    why: str = ""
    """The reason if the supervisor has killed it for a fault of its own."""
    report: dict[str, Any] | None = None
    moved: float = 0.0
    """When it was last seen to compute; until it has joined, when it was last seen not to be stopped."""


class Supervisor:
    """Watches over the processes of a run until all have ended.

    Args:
      job: of process 0 in epoch 0; the others' differ in number, links and log.
      handles: of the processes, in order.
      screen: where failures and restarts are printed.
      job_of: completes the job of a process at a start: links and log.
      server: the store; its reports come as events.
      events: what has happened.
    """

    def __init__(
        self,
        job: Job,
        handles: Sequence[ProcessHandle],
        screen: Screen,
        job_of: Callable[[Job], Job],
        server: StoreServer,
        events: SimpleQueue[Event],
    ) -> None:
        self._job, self._screen, self._job_of, self._server, self._events = job, screen, job_of, server, events
        self._states = [_State(handle) for handle in handles]
        self._epoch, self._restarts = 0, job.config.restarts
        self._leaving = False
        self._over_at: float | None = None
        """The time at which the remaining processes are killed."""
        self._interrupted = False
        self._failures: list[Failure] = []
        self._followers: list[Failure] = []
        """Failures that wait for their cause."""
        self._looked = monotonic()

    # -- the loop

    def run(self) -> int:
        """Start all, watch, and return the exit code of the run."""
        try:
            self._start(range(len(self._states)))
            while not self._finished():
                with suppress(Empty):
                    self._take(self._events.get(timeout=0.2))
                self._look()
        finally:
            self._screen.live("")
            self._kill(p for p, s in enumerate(self._states) if s.running)
        return self._result()

    def _finished(self) -> bool:
        over = self._leaving or self._over_at is not None
        return over and not any(s.running for s in self._states)

    def _take(self, event: Event) -> None:
        match event:
            case "ended", p, start, code:
                if start == self._states[p].start:
                    self._ended(p, code)
            case "report", p, said:
                if p >= 0 and said.get("start") == self._states[p].start:
                    self._reported(p, said)
            case "host lost", p, start:
                if start == self._states[p].start and self._states[p].running:
                    self._states[p].why = "the launcher of its host is lost"
                    self._ended(p, -9)
            case _:
                self._interrupt()

    def _reported(self, p: int, said: Mapping[str, Any]) -> None:
        state = self._states[p]
        match said["what"]:
            case "joined":
                state.joined = True
                for ended in (s.ended for s in self._states if s.ended is not None):
                    self._server.notify(p, ended)  # else only those hear of it that were there
            case "done":
                self._ended_well(p, said["calls"])
            case _:
                state.report = dict(said)

    def _ended_well(self, p: int, calls: Mapping[str, Any]) -> None:
        """Handle the end of a script. When all scripts have ended, all processes leave."""
        state = self._states[p]
        if state.ended is not None or self._leaving or self._over_at is not None:
            return
        if self._is_behind(p):  # it has not noticed a loss, and those that were started again wait for it
            self._restart(Failure(p, 0, "its script ended before it noticed a loss"), counts=False)
            return
        state.ended = {"event": "done", "process": p, "epoch": self._epoch, "calls": calls}
        self._server.notify_all(state.ended)  # nobody waits for it any more
        if all(s.ended is not None for s in self._states):
            self._leaving = True
            self._server.notify_all({"event": "leave"})

    # -- starts

    def _start(self, processes: Iterable[int]) -> None:
        for p in processes:
            state = self._states[p]
            state.start += 1
            state.epoch, state.began, state.running = self._epoch, monotonic(), True
            state.moved = state.began
            state.joined = state.killed = False
            state.why, state.report, state.ended = "", None, None
            self._server.drop(p)  # the connection of its last start, if it stays open, says nothing about this one
            config = replace(self._job.config, me=p, epoch=self._epoch, restarts=self._restarts)
            try:
                state.handle.start(self._job_of(replace(self._job, config=config, start=state.start)))
            except (ClusterError, OSError) as error:
                state.running = False
                self._give_up(Failure(p, 1, f"it cannot be started: {error}", when=monotonic()))

    def _kill(self, processes: Iterable[int]) -> None:
        """Kill processes and wait for their ends."""
        killed = [self._states[p] for p in processes]
        for state in killed:
            state.killed = True
            state.handle.kill()
        until = monotonic() + _KILL_SECONDS
        for state in killed:
            state.running = not state.handle.wait(max(0.0, until - monotonic()))

    # -- ends

    def _ended(self, p: int, code: int) -> None:
        state = self._states[p]
        state.running = False
        if state.killed:
            return
        if code == 0 and state.report is None:
            self._ended_well(p, {})
            return
        failure = failure_of(p, code, state.report, monotonic())
        self._lose(replace(failure, why=state.why) if state.why else failure)

    def _lose(self, failure: Failure) -> None:
        """Decide about the failure of a process."""
        if self._leaving and self._restarts:
            self._report_late_loss(failure)
        elif self._over_at is not None:
            self._failures.append(failure)
        elif self._is_stale(failure):
            self._restart(failure, counts=False)
        elif failure.follows and monotonic() < failure.when + _CAUSE_SECONDS:
            self._followers.append(failure)
        elif self._leaving or failure.final or not self._restarts:
            self._report_loss(failure)
            self._give_up(failure)
        else:
            self._report_loss(failure)
            self._restart(failure, counts=True)

    def _report_loss(self, failure: Failure) -> None:
        self._server.notify_all({"event": "lost", "process": failure.process, "why": failure.why})

    def _report_late_loss(self, failure: Failure) -> None:
        """Report a loss after all scripts have ended: there is nothing to restart."""
        self._screen.say(f"process {failure.process} is lost ({failure.why}); all scripts had ended")
        if self._over_at is None:
            self._over_at = monotonic() + GRACE

    def _is_stale(self, failure: Failure) -> bool:
        """Whether a process failed because of a loss after which its cause has been restarted already."""
        return failure.follows and self._is_behind(failure.process)

    def _is_behind(self, p: int) -> bool:
        """Whether a process was started before the last loss, and has not begun the epoch since."""
        return self._states[p].epoch < self._epoch and not self._is_in(p)

    def _is_in(self, p: int) -> bool:
        """Whether a process has begun the present epoch."""
        return self._server.text(f"{self._epoch}/address/{p}") is not None

    def _restart(self, failure: Failure, counts: bool) -> None:
        """Restart the island of a lost process, and all processes that cannot continue with it."""
        again = set(self._job.config.island(failure.process))
        if counts:
            self._epoch += 1
            for p in (
                *(f.process for f in self._followers),
                *(p for p, s in enumerate(self._states) if s.ended is not None),
            ):
                again |= set(self._job.config.island(p))
        elif any(self._is_in(p) for p in again):
            self._epoch += 1  # all, or the islands would take turns in failing for each other
            again = set(range(len(self._states)))
        self._followers = [f for f in self._followers if f.process not in again]
        self._restarts -= counts
        self._kill(p for p in sorted(again) if self._states[p].running)
        stuck = [p for p in sorted(again) if self._states[p].running]
        if stuck:
            self._give_up(replace(failure, why=f"{failure.why}; process {stuck[0]} cannot be killed"))
            return
        self._server.notify_all({"event": "epoch", "epoch": self._epoch, "restarts": self._restarts}, newcomers=True)
        if counts:
            self._report_restart(failure)
        self._start(sorted(again))

    def _report_restart(self, failure: Failure) -> None:
        if failure.text:
            self._screen.say(failure_text(self._with_tail(failure), len(self._states)))
        left = f"{self._restarts} restarts are" if self._restarts != 1 else "1 restart is"
        self._screen.say(f"process {failure.process} is lost ({failure.why}); started again, {left} left")

    def _give_up(self, failure: Failure) -> None:
        """End the run. Its processes have GRACE seconds to end by themselves."""
        self._failures += [failure, *self._followers]
        self._followers.clear()
        if self._over_at is None:
            self._over_at = monotonic() + GRACE
            why = f"process {failure.process} failed: {failure.why}"
            self._server.notify_all({"event": "over", "why": why}, newcomers=True)
            self._kill(p for p, s in enumerate(self._states) if s.running and not s.joined)

    def _interrupt(self) -> None:
        """Handle Ctrl-C: interrupt all processes; the second time kill them."""
        self._over_at = monotonic() + (0 if self._interrupted else _INTERRUPT_GRACE)
        self._interrupted = True
        self._kill(p for p, s in enumerate(self._states) if s.running and not s.joined)
        for state in self._states:
            if state.running:
                state.handle.interrupt()

    # -- time

    def _look(self) -> None:
        """Do what is due at this time."""
        now = monotonic()
        if self._over_at is not None and now > self._over_at:
            self._kill(p for p, s in enumerate(self._states) if s.running)
        due = [f for f in self._followers if now >= f.when + _CAUSE_SECONDS]
        for failure in due:
            if failure in self._followers:  # else a restart has taken it
                self._followers.remove(failure)
                self._lose(failure)
        if now - self._looked >= BEAT:
            self._look_at_activity(now, now - self._looked > 3 * BEAT)
            self._looked = now
            self._look_for_silence(now)
            self._screen.live(status_text(self._server.statuses()))

    def _look_at_activity(self, now: float, paused: bool) -> None:
        """Note which processes compute or are stopped. `paused`: this process was stopped itself, which counts for
        nobody."""
        for state in (s for s in self._states if s.running):
            doing = state.handle.activity()
            if paused or doing == COMPUTES or (doing != STOPPED and not state.joined):
                state.moved = now
            elif doing == STOPPED and state.joined:
                state.moved = -math.inf

    def _look_for_silence(self, now: float) -> None:
        silence, deadline = self._job.config.silence, self._job.config.deadline
        mute = [p for p in self._server.silent(min(2 * BEAT, silence / 2)) if p >= 0]
        quiet = [p for p in mute if now - self._states[p].moved <= silence]
        if quiet:  # they compute without a sign of life: others wait for them
            self._server.notify_all({"event": "computes", "processes": quiet})
        for p in self._server.silent(silence):
            if p < 0:
                self._server.drop(p)  # its end comes as an event
            elif p not in quiet:
                self._condemn(p, f"no sign of life for {silence:g} s")
        for p in (p for p in self._server.silent(deadline) if p >= 0):
            self._condemn(p, f"no sign of life for {deadline:g} s")
        joining = max(deadline / 2, deadline - _EARLIER)
        for p, state in enumerate(self._states):
            if state.running and not state.joined:
                if now - state.moved > silence:
                    self._condemn(p, f"it was stopped for {silence:g} s before it had joined the run")
                if now - state.began > joining:
                    self._condemn(p, f"it did not join the run within {joining:g} s")

    def _condemn(self, p: int, why: str) -> None:
        state = self._states[p]
        if state.running and not state.killed and not state.why:
            state.why = why
            state.handle.kill()

    # -- the end

    def _with_tail(self, failure: Failure) -> Failure:
        return replace(failure, tail=self._states[failure.process].handle.tail())

    def _result(self) -> int:
        """Print the failures, the first one in full. Returns the exit code of the run."""
        failures = sorted((self._with_tail(f) for f in self._failures), key=lambda f: f.order)
        if self._interrupted:
            for failure in failures:
                if failure.process == 0:
                    self._screen.say(failure_text(failure, 1))
            return INTERRUPTED
        if not failures:
            return 0
        if text := failure_text(failures[0], len(self._states)):
            self._screen.say(text)
        for failure in failures[1:]:
            self._screen.say(failure_line(failure))
        return failures[0].code
