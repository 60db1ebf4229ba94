"""Processes that are killed or stopped: the run ends as if nothing had happened, or with an error that names them.

This is a sample of `python -m tests.processes.faults`. Each run is under a watchdog, and leaves no process behind.
"""

import json
import re
import signal
import time

import pytest

from shardc.launch.failure import LOST
from tests.processes.faults import PHASES, Case, Fault, case_of, losses_of, reference, run_case
from tests.processes.launched import KINDS, Launched, Options

TWO = KINDS["2 stages"]


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Compiled programs, by kind of runs: what the first run of a kind has compiled, the others find."""
    return tmp_path_factory.mktemp("programs")


def ends_as_without(programs, kind, form, *faults, cold=False):
    outcome = run_case(Case("sample", kind, form, faults, cold), programs / kind.replace(" ", "-"))
    assert not outcome.problems, "\n".join([str(outcome), *outcome.problems, outcome.output])
    assert not outcome.missed and outcome.restarts >= 1, f"{outcome}\n{outcome.output}"


@pytest.mark.sampled(0)
def test_spmd_killed_in_a_step(programs):
    ends_as_without(programs, "spmd", "run", Fault("kill", "step", 1, 0.5, 7))


@pytest.mark.sampled(0)
def test_spmd_killed_while_it_saves(programs):
    ends_as_without(programs, "spmd", "loop", Fault("kill", "save", 0, 0.3, 5))


@pytest.mark.sampled(0)
def test_two_stages_killed_while_they_compile(programs):
    ends_as_without(programs, "2 stages", "loop", Fault("kill", "first step", 0, 0.6), cold=True)


@pytest.mark.sampled(0)
def test_two_stages_stopped_while_they_save(programs):
    ends_as_without(programs, "2 stages", "run", Fault("stop", "save", 1, 0.6, 5))


@pytest.mark.sampled(0)
def test_three_stages_killed_in_a_step_and_while_they_start_again(programs):
    ends_as_without(programs, "3 stages", "run", Fault("kill", "step", 1, 0.1, 8), Fault("kill", "restart", 0, 0.5))


@pytest.mark.sampled(0)
def test_three_stages_killed_while_they_start(programs):
    ends_as_without(programs, "3 stages", "loop", Fault("kill", "start", 2, 0.5))


@pytest.mark.sampled(0)
@pytest.mark.parametrize("kind", ["2 stages", "3 stages"])
def test_a_stage_that_raises(programs, kind):
    """Its neighbours hear of it, and need no restart of their own."""
    ends_as_without(programs, kind, "run", Fault("raise", "step", 1, 0.5, 7))


def test_cases_are_the_same_for_a_seed_and_of_all_kinds():
    cases = [case_of("kill", n, 0) for n in range(100)]
    assert cases == [case_of("kill", n, 0) for n in range(100)] != [case_of("kill", n, 1) for n in range(100)]
    assert {c.kind for c in cases} == set(KINDS) and {c.form for c in cases} == {"run", "loop"}
    assert {f.phase for c in cases for f in c.faults} == set(PHASES)
    assert all(f.process < KINDS[c.kind].processes and f.step < Options().steps for c in cases for f in c.faults)


# -- without restarts


def lost(number, within, code, **options):
    """Lose process 1 in step 4, in which process 0 waits for it. The run ends with this code. Gives what the error of
    process 0 says."""
    with Launched(TWO, Options(restarts=0, watch=True, pause=(1, 4), **options)) as run:
        for p in (0, 1):
            run.wait_for(p, "at 4")
        time.sleep(0.3)
        began = time.time()
        assert run.signal(1, number)
        at = run.wait_for(0, "lost", 30)
        assert at - began < within, f"{at - began:.2f} s"
        assert run.wait(30) and run.launcher.returncode == code, run.output()
        assert run.left() == [] and run.temporary() == []
        said, state = (f for f in run.facts(0) if f.words[0] in ("lost", "state"))
        assert state.what == "state unchanged"
        _, process, text = said.what.split(" ", 2)
        assert process == "1"
        return json.loads(text)


def test_a_death_is_an_error_in_the_neighbour_within_a_second():
    text = lost(signal.SIGKILL, 1.0, 128 + signal.SIGKILL)
    assert text.startswith("process 1 is lost: ")
    assert re.search(r"^  waited: rank 0 at 0B\d for message \d of \"gradient 1->0\"", text, re.MULTILINE), text


@pytest.mark.sampled(0)
def test_a_silence_is_an_error_in_the_neighbour_within_the_deadline_and_a_second():
    text = lost(signal.SIGSTOP, 4.0 + 1.0, LOST, silence=4.0)
    assert text.startswith("process 1 is lost: ")
    assert "rank 0 at 0B" in text


# -- the launcher


def has_the_curve(run, kind="2 stages"):
    losses = {i: found.pop() for i, found in losses_of(run, 0).items()}
    assert losses == {i: loss for i, loss in reference(kind).losses.items() if i in losses}
    return sorted(losses)


@pytest.mark.sampled(0)
def test_a_pipeline_goes_on_while_its_launcher_is_stopped():
    silence = 3.0
    with Launched(TWO, Options(sleep=0.6, silence=silence)) as run:
        run.wait_for(1, "step 1")
        run.launcher.send_signal(signal.SIGSTOP)
        stopped = time.time()
        for p in (0, 1):
            assert run.wait_for(p, "step 10") - stopped > silence
        run.launcher.send_signal(signal.SIGCONT)
        assert run.wait(60) and run.launcher.returncode == 0, run.output()
        assert has_the_curve(run) == list(range(12))
        assert len({f.pid for f in run.facts(0)}) == len({f.pid for f in run.facts(1)}) == 1
        assert run.left() == [] and run.temporary() == []


@pytest.mark.sampled(0)
def test_ctrl_c_ends_all_in_five_seconds_and_a_later_run_goes_on(tmp_path):
    options = Options(sleep=0.2, directory=tmp_path)
    with Launched(TWO, options) as run:
        run.wait_for(1, "step 6")
        began = time.time()
        run.launcher.send_signal(signal.SIGINT)
        assert run.wait(30) and run.launcher.returncode == 130, run.output()
        assert run.left() == [] and run.temporary() == []
        assert run.ended - began < 5
        assert has_the_curve(run)[-1] < 11
    with Launched(TWO, options) as run:
        assert run.wait(120) and run.launcher.returncode == 0, run.output()
        first, *_, last = has_the_curve(run)
        assert first in (3, 6, 9) and last == 11
