"""Runs that are killed or stopped at random times, and have to end as if nothing had happened.

    python -m tests.processes.faults --kills 100 --stops 20 [--seed 0] [--only spmd] [--jobs 2]

A fault is a signal, SIGKILL or SIGSTOP, to a process at a random time of a phase: while it starts, in the first step,
which is planned and compiled, in a later step, while a checkpoint is written, after the last step, or while what an
earlier fault has ended is started again. How long these phases are is measured in a run without faults of the same
kind, which also gives the losses and the state that every other run has to end with.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np

from shardc.checkpoint.restore import restore
from shardc.checkpoint.steps import last_complete
from tests.processes.launched import KINDS, Launched, Options
from tests.processes.training import init

SECONDS = 240.0
"""The longest time of a run, after which all of it is killed."""
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "raise": signal.SIGUSR2}
PHASES = {"start": 1, "first step": 1, "step": 3, "save": 3, "end": 1, "restart": 2}
"""The phases of a run, and how often each is chosen. `restart` is a fault in a step or a save, and another one soon."""


@dataclass(frozen=True)
class Fault:
    """A signal to a process.

    Attributes:
      how: `kill`, `stop`, or `raise`: an exception in the script, wherever it is.
      phase: a key of `PHASES`.
      process: its number.
      part: how much of the phase has passed, from 0 to 1, by the time that it took without faults; at the latest at its
        end.
      step: of the phases `step` and `save`.
    """

    how: str
    phase: str
    process: int
    part: float
    step: int = 0

    def __str__(self) -> str:
        where = f"{self.phase} {self.step}" if self.phase in ("step", "save") else self.phase
        return f"{self.how} {self.process} in {where} at {self.part:.2f}"


@dataclass(frozen=True)
class Case:
    """A run with faults. `cold`: it shares no compiled programs with other runs."""

    name: str
    kind: str
    form: str
    faults: tuple[Fault, ...]
    cold: bool = False

    @property
    def options(self) -> Options:
        stops = any(f.how == "stop" for f in self.faults)
        starts = stops and any(f.phase in ("start", "restart") for f in self.faults)
        return Options(self.form, silence=4.0 if stops else 10.0, deadline=30.0 if starts else 120.0)


def case_of(how: str, number: int, seed: int, kinds: Sequence[str] = tuple(KINDS)) -> Case:
    """A case of this number: the kinds in turn, all else at random."""
    k = random.Random(f"{seed} {how} {number}")
    kind, last = kinds[number % len(kinds)], Options().steps - 1
    phase = k.choices(list(PHASES), list(PHASES.values()))[0]
    process, part = k.randrange(KINDS[kind].processes), k.random()
    saved = [i for i in range(1, last) if (i + 1) % Options().every == 0]
    at = k.choice(saved) if phase == "save" else k.randint(1, last)
    first = Fault(how, "step" if phase == "restart" else phase, process, part, at)
    more = (Fault(how, "restart", k.randrange(KINDS[kind].processes), k.random()),) if phase == "restart" else ()
    return Case(f"{how} {number}", kind, k.choice(["run", "loop"]), (first, *more), phase == "first step")


# -- what a run has to give


@dataclass(frozen=True)
class Reference:
    """A run without faults.

    Attributes:
      losses: of each step, to the last bit.
      state: at its end.
      seconds: by phase, how long it took.
    """

    losses: Mapping[int, str]
    state: Sequence[np.ndarray]
    seconds: Mapping[str, float]


_meeting = {kind: threading.Lock() for kind in KINDS}
_reading = threading.Lock()


def reference(kind: str) -> Reference:
    """The run without faults of a kind; made once."""
    with _meeting[kind]:
        return _reference(kind)


@cache
def _reference(kind: str) -> Reference:
    options = Options(deadline=120.0)
    with Launched(KINDS[kind], options) as run:
        begun = {p: run.wait_for(p, "begin", SECONDS) for p in range(KINDS[kind].processes)}
        assert run.wait(SECONDS), f"the run without faults of {kind} does not end\n{run.output()}"
        assert run.launcher.returncode == 0, run.output()
        facts, last = run.facts(0), options.steps - 1
        losses = losses_of(run, 0)
        assert sorted(losses) == list(range(options.steps))
        steps = [f.time for f in facts if f.words[0] == "step"]
        manifest = run.directory / str(last) / "0.json"
        return Reference(
            losses={i: found.pop() for i, found in losses.items()},
            state=state_of(run.directory, last),
            seconds={
                "start": min(begun.values()) - run.began,
                "first step": steps[0] - begun[0],
                "step": statistics.median(b - a for a, b in pairwise(steps)),
                "save": max(0.02, manifest.stat().st_mtime - steps[-1]),
                "end": run.ended - steps[-1],
                "restart": (steps[0] - run.began) / 2,  # no launcher starts, and less is compiled
            },
        )


def losses_of(run: Launched, process: int) -> dict[int, set[str]]:
    """By step, all the losses that a process has said; a step is done again after a loss."""
    found: dict[int, set[str]] = {}
    for fact in run.facts(process):
        if fact.words[0] == "step":
            found.setdefault(int(fact.words[1]), set()).add(fact.words[2])
    return found


def state_of(directory: Path, step: int) -> list[np.ndarray]:
    """The leaves of the last checkpoint, which has to be that of a step."""
    with _reading:
        found, _ = last_complete(directory)
        assert found is not None and found.step == step, f"the last checkpoint is {found and found.step}, not {step}"
        parts = restore(found, init())
    return [x for part in parts for _, x in sorted(part.items())]


# -- a run with faults


@dataclass
class Outcome:
    """A run with faults, when it has ended.

    Attributes:
      case: it.
      problems: what is wrong with it; empty if it is as without faults.
      seconds: of the run.
      recovery: seconds from the last fault to the next step of that process; None if it had done all of them.
      restarts: how often processes were started again.
      late: faults that came when all scripts had ended.
      missed: faults that came after the end of the run.
    """

    case: Case
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    recovery: float | None = None
    restarts: int = 0
    late: int = 0
    missed: int = 0
    output: str = ""

    def __str__(self) -> str:
        case = self.case
        recovered = "" if self.recovery is None else f", next step after {self.recovery:.1f} s"
        faults = " and ".join(map(str, case.faults))
        verdict = "; ".join(p.partition("\n")[0] for p in self.problems) or "same curve"
        missed = "".join(f", {n} {what}" for n, what in ((self.late, "late"), (self.missed, "missed")) if n)
        return (
            f"{case.name:8} {case.kind:11} {case.form:4} {faults:60} {self.seconds:5.1f} s, "
            f"{self.restarts} restarts{recovered}{missed}: {verdict}"
        )


def run_case(case: Case, programs: Path | None = None, seconds: float = SECONDS) -> Outcome:
    """Run a case, under a watchdog."""
    wanted, outcome = reference(case.kind), Outcome(case)
    with Launched(KINDS[case.kind], replace(case.options, cache=None if case.cold else programs)) as run:
        fired = _fire(run, case, wanted, time.time() + seconds)
        in_time = run.wait(max(0.0, run.began + seconds - time.time()))
        if not in_time:
            outcome.problems.append(f"it did not end within {seconds:g} s")
            run.show_threads()
        outcome.seconds = (run.ended or time.time()) - run.began
        outcome.missed = len(case.faults) - len(fired)
        outcome.restarts = run.errors().count("started again, ")
        outcome.late = run.errors().count("; all scripts had ended")
        outcome.recovery = _recovery(run, case, fired)
        outcome.problems += _left_behind(run) if in_time else []
        outcome.problems += _unlike(run, case, wanted)
        outcome.problems += _started_again(run, case, fired)
        if outcome.restarts > len(fired):
            outcome.problems.append(f"{len(fired)} faults are mended by {outcome.restarts} restarts")
        outcome.output = run.output()
    return outcome


def _fire(run: Launched, case: Case, wanted: Reference, until: float) -> list[float]:
    """Send the signals of a case when they are due. Gives the times."""
    fired: list[float] = []
    for fault in case.faults:
        begin = None
        while run.launcher.poll() is None and time.time() < until:
            begin = begin or _begin(run, fault, fired)
            is_due = begin and time.time() >= begin + fault.part * wanted.seconds[fault.phase]
            if (is_due or _is_over(run, fault, fired)) and run.signal(fault.process, SIGNALS[fault.how]):
                fired.append(time.time())
                break
            time.sleep(0.002 if fault.phase in ("step", "save") else 0.02)
    return fired


def _begin(run: Launched, fault: Fault, fired: Sequence[float]) -> float | None:
    """The time at which the phase of a fault began."""
    match fault.phase:
        case "start":
            return time.time() if run.pid(fault.process) is not None else None
        case "first step":
            return run.at(fault.process, "begin")
        case "step":
            return run.at(fault.process, f"at {fault.step}")
        case "save":
            return run.at(fault.process, f"step {fault.step}")
        case "end":
            return run.at(fault.process, f"step {run.options.steps - 1}")
        case _:
            return fired[-1] if fired else time.time()


def _is_over(run: Launched, fault: Fault, fired: Sequence[float]) -> bool:
    """Whether the phase of a fault has ended: this run is quicker than that without faults was."""
    match fault.phase:
        case "start":
            return run.at(fault.process, "begin") is not None
        case "first step":
            return run.at(fault.process, "step 0") is not None
        case "step":
            return run.at(fault.process, f"step {fault.step}") is not None
        case "save":
            owner = fault.process // len(run.kind.island(0))
            return (run.directory / str(fault.step) / f"{owner}.json").exists()
        case "restart" if fired:
            facts = [f for p in range(run.kind.processes) for f in run.facts(p) if f.time > fired[-1]]
            again = {f.pid for f in facts if f.what == "begin"}
            return any(f.pid in again and f.words[0] == "step" for f in facts)
        case _:
            return False


def _recovery(run: Launched, case: Case, fired: Sequence[float]) -> float | None:
    if len(fired) < len(case.faults):
        return None
    facts = run.facts(case.faults[-1].process)
    began = next((f for f in facts if f.what == "begin" and f.time > fired[-1]), None)
    if began is None:
        return None
    return next((f.time - fired[-1] for f in facts if f.words[0] == "step" and f.pid == began.pid), None)


def _left_behind(run: Launched) -> list[str]:
    found = []
    time.sleep(0.05)
    if left := run.left():
        found.append(f"processes {left} are left behind")
    if folders := run.temporary():
        found.append(f"directories {folders} are left behind")
    return found


def _unlike(run: Launched, case: Case, wanted: Reference) -> list[str]:
    """How a run differs from that without faults."""
    found = []
    if run.launcher.poll() != 0:
        found.append(f"it ended with {run.launcher.poll()}")
    for p in range(run.kind.processes):
        wrong = {i: said for i, said in losses_of(run, p).items() if said != {wanted.losses[i]}}
        if wrong:
            found.append(f"process {p} has other losses: {wrong}")
    lines = {f"{i} {float.fromhex(loss)!r}" for i, loss in wanted.losses.items()}
    if other := lines.symmetric_difference(run.shown().splitlines()):
        found.append(f"shown, but not without faults, or the other way round: {sorted(other)}")
    try:
        state = state_of(run.directory, run.options.steps - 1)
        if not all(np.array_equal(a, b) for a, b in zip(state, wanted.state, strict=True)):
            found.append("the state at the end is another one")
    except (AssertionError, OSError, ValueError) as error:
        found.append(f"the state at the end cannot be read: {error}")
    return found


def _started_again(run: Launched, case: Case, fired: Sequence[float]) -> list[str]:
    """Processes that `saved.run` should have let go on in place, but that were started again or compiled again."""
    fault, last = case.faults[0], run.options.steps - 1
    if case.form != "run" or len(fired) != 1 or fault.phase not in ("step", "save") or run.kind.islands == 1:
        return []
    found = []
    for p in set(range(run.kind.processes)) - set(run.kind.island(fault.process)):
        at = run.at(p, f"step {last}")
        if at is not None and at < fired[0]:
            continue  # it was done
        facts = run.facts(p)
        if len({f.pid for f in facts}) > 1:
            found.append(f"process {p} was started again")
        counts = Counter(f.what for f in facts if f.what.startswith("compiled jit(step"))
        if again := [what for what, n in counts.items() if n > 1]:
            found.append(f"process {p} {again} again")
    return found


# -- many of them


def summary(outcomes: Sequence[Outcome]) -> str:
    """A table: by signal and kind, how many runs ended as without faults, and how soon they went on."""
    lines = []
    groups = sorted({(o.case.faults[0].how, o.case.kind) for o in outcomes})
    for how, kind in [*groups, *sorted({(how, "all") for how, _ in groups})]:
        of = [o for o in outcomes if o.case.faults[0].how == how and kind in (o.case.kind, "all")]
        took = [o.recovery for o in of if o.recovery is not None]
        again = f"{statistics.median(took):.1f} s, at most {max(took):.1f} s" if took else "-"
        phases = Counter(o.case.faults[-1].phase for o in of)
        lines.append(
            f"{how:4} {kind:11} {len(of):3} runs, {sum(not o.problems for o in of):3} as without faults; "
            f"next step after {again}; {sum(o.restarts for o in of)} restarts, "
            f"{sum(o.late for o in of)} late, {sum(o.missed for o in of)} missed; "
            + ", ".join(f"{n} {phase}" for phase, n in sorted(phases.items()))
        )
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.processes.faults")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--stops", type=int, default=20)
    parser.add_argument("--raises", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="number of the first case of each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=KINDS, help="a kind of runs")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--show", action="store_true", help="show the output of runs that are not as without faults")
    options = parser.parse_args(words)
    numbers = {"kill": options.kills, "stop": options.stops, "raise": options.raises}
    cases = [
        case
        for how, count in numbers.items()
        for n in range(options.first, options.first + count)
        if options.only in (None, (case := case_of(how, n, options.seed)).kind)
    ]
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="faults-") as folder, ThreadPoolExecutor(options.jobs) as pool:
        caches = {kind: Path(folder) / kind.replace(" ", "-") for kind in KINDS}
        running = [pool.submit(run_case, case, caches[case.kind]) for case in cases]
        for outcome in (done.result() for done in as_completed(running)):
            outcomes.append(outcome)
            print(outcome, flush=True)
            if outcome.problems and options.show:
                print("\n".join(outcome.problems), outcome.output, sep="\n", flush=True)
    print(summary(outcomes))
    return int(any(o.problems for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
