"""Failures: which one is the cause, and how they are told."""

import signal

from shardc.launch.failure import Failure, failure_line, failure_of, failure_text, why_ended


def first(*failures):
    return min(failures, key=lambda f: f.order).process


def test_exit_codes_are_those_of_a_shell():
    assert (failure_of(1, -9, None, 0.0).code, failure_of(1, 3, None, 0.0).code) == (137, 3)
    assert why_ended(-signal.SIGSEGV) == "killed by SIGSEGV"
    assert why_ended(-35) == "killed by signal 35"
    assert why_ended(3) == "ended with exit code 3"


def test_the_first_failure_is_the_cause():
    assert first(Failure(0, 1, "a", when=2.0), Failure(1, 1, "b", when=1.0)) == 1


def test_a_failure_that_follows_is_no_cause():
    assert first(Failure(0, 1, "PeerLostError", when=1.0, follows=True), Failure(1, 1, "b", when=2.0)) == 1
    fate = "F client.h:86] Terminating process because the JAX distributed service detected fatal errors."
    assert first(Failure(0, 134, "killed by SIGABRT", when=1.0, tail=[fate]), Failure(1, 1, "b", when=2.0)) == 1


def test_others_see_a_death_before_the_launcher_does():
    dead = Failure(1, 137, "killed by SIGKILL", when=1.1)
    assert first(Failure(0, 1, "JaxRuntimeError: connection closed", when=1.0), dead) == 1
    assert first(Failure(0, 1, "ValueError", when=0.5), dead) == 0


def test_texts():
    trace = "Traceback\nValueError: on fire\n"
    failed = Failure(1, 1, "ValueError: on fire", trace, tail=["a warning"])
    assert failure_text(failed, 2) == "process 1| a warning\nprocess 1| Traceback\nprocess 1| ValueError: on fire"
    assert failure_text(Failure(0, 1, "ValueError: on fire", trace, tail=["a warning"]), 2) == trace.rstrip()
    assert failure_text(Failure(0, 7, "ended with exit code 7"), 2) == "process 0 ended with exit code 7."
    assert failure_text(Failure(0, 7, "ended with exit code 7"), 1) == ""
    assert failure_line(failed) == "process 1| ValueError: on fire"
