"""What the system knows of a process."""

import signal
import subprocess
import sys
import time

import pytest

from shardc.launch.activity import COMPUTES, STOPPED, Activity
from tests.launch.launching import wait_for


@pytest.fixture
def start():
    made = []

    def call(code):
        made.append(subprocess.Popen([sys.executable, "-S", "-c", code]))
        return made[-1], Activity(made[-1].pid)

    yield call
    for process in made:
        process.kill()
        process.wait()


def test_a_process_that_computes_sleeps_and_is_stopped(start):
    process, activity = start("import time\nwhile time.process_time() < 1: pass\ntime.sleep(100)")
    time.sleep(0.3)
    assert activity.look() == COMPUTES
    wait_for(lambda: time.sleep(0.3) or activity.look() == "")
    process.send_signal(signal.SIGSTOP)
    wait_for(lambda: activity.look() == STOPPED, 5)
    process.send_signal(signal.SIGCONT)
    wait_for(lambda: activity.look() != STOPPED, 5)


def test_another_thread_computes(start):
    code = "import threading, time\ndef f():\n    while True: pass\nthreading.Thread(target=f).start()\ntime.sleep(100)"
    _, activity = start(code)
    time.sleep(0.5)
    activity.look()
    time.sleep(0.5)
    assert activity.look() == COMPUTES


def test_a_process_that_has_ended(start):
    process, activity = start("")
    process.wait()
    assert activity.look() == ""
