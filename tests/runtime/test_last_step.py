"""The last step of a run that is asked to end: the same in all processes, whenever each of them hears of it."""

import random
import signal
import subprocess
import sys
import threading
import time

import pytest

from shardc.runtime.last_step import LastStep, LastStepAlone
from tests.runtime.watchdog import within


@pytest.mark.parametrize("seed", range(6))
def test_all_end_at_one_step(seed):
    """The processes are threads that are up to some steps apart; each hears of it at a time of its own."""
    rng, number = random.Random(seed), 4
    steps = [LastStep() for _ in range(number)]
    reached, at_step = [], threading.Barrier(number) if seed % 2 else None  # a step may wait for the others

    def loop(p, pauses):
        steps[p].open(p)
        for i in range(10**6):
            time.sleep(pauses.uniform(0, 0.004))
            if steps[p].begins():
                reached.append((i, steps[p].saved(p)))
                return
            if at_step is not None:
                at_step.wait(20)

    threads = [
        threading.Thread(target=loop, args=(p, random.Random(f"{seed} {p}")), daemon=True) for p in range(number)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    begun = []
    for one in steps:
        time.sleep(rng.uniform(0, 0.02))
        begun.append(one.ask())
    for one in rng.sample(steps, number):
        time.sleep(rng.uniform(0, 0.02))
        one.end_after(max(begun))
    for thread in threads:
        within(20, thread.join)
    assert reached == [(max(begun), True)] * number


def test_without_a_loop_nobody_waits():
    one = LastStep()
    assert one.ask() is None and one.is_asked
    one.open("loop")
    assert one.ask() == 0
    one.close("loop")
    assert one.ask() is None


def test_of_two_loops_the_last_one_ends_the_process():
    one = LastStep()
    one.open("a")
    one.open("b")
    assert [one.begins() for _ in range(3)] == [False] * 3  # a, b, a
    one.end_after(one.ask())
    assert one.begins() and not one.saved("b")
    assert one.begins() and one.saved("a")


def test_a_run_that_ends_meanwhile_waits_no_longer():
    changed, ends = threading.Condition(), []
    one = LastStep(changed, lambda: bool(ends))
    one.open("loop")
    one.ask()

    def end():
        with changed:
            ends.append(1)
            changed.notify_all()

    threading.Timer(0.1, end).start()
    assert within(5, one.begins) is False


def test_after_a_restart_steps_count_anew():
    one = LastStep()
    one.open("loop")
    one.begins()
    one.end_after(one.ask())
    one.begin_epoch()
    assert one.ask() == 0 and one.is_asked


def test_a_process_alone_hears_of_sigterm_while_a_loop_is_open():
    one = LastStepAlone()
    one.open("loop")
    assert one.begins() is False
    signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # a second one ends it at once
    assert one.begins() is True and one.saved("loop")
    one.close("loop")


def test_a_handler_of_the_script_stays():
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        mine, one = signal.getsignal(signal.SIGTERM), LastStepAlone()
        one.open("loop")
        assert signal.getsignal(signal.SIGTERM) is mine
        one.close("loop")
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_loop_that_ends_well_before_its_next_step_leaves_the_signal_to_the_process():
    text = (
        "import signal\nfrom shardc.runtime.last_step import LastStepAlone\none = LastStepAlone()\n"
        "one.open(1); signal.raise_signal(signal.SIGTERM); one.close(1, failed={})\nprint('on')"
    )
    for failed, code, out in ((False, -signal.SIGTERM, ""), (True, 0, "on\n")):
        done = subprocess.run(
            [sys.executable, "-c", text.format(failed)], capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stdout) == (code, out), done.stderr
