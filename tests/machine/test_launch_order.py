"""When a launch waits for the program before it. `processes/test_order.py` has the values of real programs."""

from __future__ import annotations

import threading

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from shardc.machine.launch_order import all_ordered_devices, in_launch_order, ordered_devices


class Program:
    """Results of a program that has not ended, and the log of who has waited for it."""

    def __init__(self, name, log, fails=False):
        self.name, self.log, self.fails = name, log, fails

    def block_until_ready(self):
        self.log.append(f"wait for {self.name}")
        if self.fails:
            raise RuntimeError("it failed")


def launch(log, name, devices, fails=False):
    def begin():
        log.append(name)
        return Program(name, log, fails)

    return in_launch_order(devices, begin, lambda out: out)


def elsewhere(run):
    """Run it in another thread."""
    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


@pytest.fixture
def devices():
    return [object() for _ in range(3)]  # no other test has them


def test_programs_that_jax_orders_do_not_wait(devices):
    log = []
    for name in "ab":
        launch(log, name, devices[:1])
    for name in "cd":
        launch(log, name, devices[1:])
    elsewhere(lambda: launch(log, "e", devices[1:]))
    assert log == ["a", "b", "c", "d", "e"]


def test_another_thread_waits(devices):
    log = []
    launch(log, "a", devices[:1])
    elsewhere(lambda: launch(log, "b", devices[:1]))
    elsewhere(lambda: launch(log, "other device", devices[1:2]))
    launch(log, "c", devices[:1])
    launch(log, "d", devices[:1])
    assert log == ["a", "wait for a", "b", "other device", "wait for b", "c", "d"]


def test_another_number_of_devices_waits(devices):
    log = []
    launch(log, "a", devices[:1])
    launch(log, "b", devices[1:2])
    launch(log, "c", devices)
    launch(log, "d", devices[:1])
    launch(log, "e", devices[1:2])
    assert log == ["a", "b", "wait for a", "wait for b", "c", "wait for c", "d", "wait for c", "e"]


def test_a_program_that_failed_holds_nobody_up(devices):
    log = []
    launch(log, "a", devices[:1], fails=True)
    elsewhere(lambda: launch(log, "b", devices[:1]))
    assert log == ["a", "wait for a", "b"]


def test_a_launch_that_fails_frees_the_devices(devices):
    def fails():
        raise ValueError("no such program")

    with pytest.raises(ValueError, match="no such program"):
        in_launch_order(devices, fails, lambda out: out)
    log = []
    elsewhere(lambda: launch(log, "a", devices))
    assert log == ["a"]


def test_without_a_token_programs_end_in_the_launch(devices):
    log = []
    launch(log, "a", devices[:1])
    assert in_launch_order(devices[:1], lambda: launch(log, "b", devices[:1]) and 7) == 7
    launch(log, "c", devices)
    assert log == ["a", "wait for a", "b", "wait for b", "c"]


def test_which_devices_are_ordered():
    class Device:
        def __init__(self, platform, process, number):
            self.platform, self.process_index, self.id = platform, process, number

    def mesh(platform, *processes):
        made = [Device(platform, p, i) for i, p in enumerate(processes)]
        return type("M", (), {"devices": np.array(made)})()

    assert [d.id for d in ordered_devices(mesh("cpu", 0, 1, 0, 1))] == [0, 2]
    assert ordered_devices(mesh("cpu", 0, 0)) == ordered_devices(mesh("gpu", 0, 1)) == ()
    assert ordered_devices(Mesh(jax.devices(), ("data",))) == all_ordered_devices() == ()
