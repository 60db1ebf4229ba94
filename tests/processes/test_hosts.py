"""Runs on several hosts, which are network namespaces (`tests/processes/hosts.py`): the losses are those of one
process, over a network that breaks, loses and delays."""

import json
import subprocess
import time

import pytest

from tests.launch.launching import command, environment, wait_for
from tests.processes.hosts import hosts, why_not
from tests.processes.launched import TRAINING

REASON = why_not()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
SAID = {
    "stages": 2, "mesh": {"pipe": 2, "data": 2}, "pipeline": {"schedule": "1f1b"}, "form": "run", "steps": 30,
    "every": 10, "sleep": 0.1, "watch": False, "pause": None,
}  # fmt: skip


def training(folder, name="run"):
    """The script and its arguments."""
    (folder / name / "facts").mkdir(parents=True)
    return TRAINING, json.dumps(SAID), folder / name / "saved", folder / name / "facts"


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """What one process prints."""
    script, *arguments = training(tmp_path_factory.mktemp("alone"))
    words = command(script, "--processes", 1, "--devices", 4, arguments=arguments)
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.splitlines()


def start(h, *more):
    options = ["--hosts", h.names, "--islands", 2, "--devices", 2, "--deadline", 60, *more]
    return h.run(0, *options, *training(h.folder))


def lines(h):
    return h.text("out0").splitlines()


def ends_well(h, run, losses):
    assert run.wait(120) == 0, h.text("err0")
    assert lines(h) == losses
    assert h.text("err0") == ""


def test_a_break_of_three_seconds_costs_three_seconds(tmp_path, losses):
    with hosts(2, tmp_path) as h:
        run = start(h)
        wait_for(lambda: len(lines(h)) > 5, 60)
        with h.broken(1):
            begin = time.monotonic()
            time.sleep(1.0)
            before = len(lines(h))
            time.sleep(2.0)
            assert len(lines(h)) == before, "the network is not broken"
        wait_for(lambda: len(lines(h)) > before + 1, 10)
        assert time.monotonic() - begin < 6
        ends_well(h, run, losses)


def test_a_host_that_is_paused_for_three_seconds_costs_three_seconds(tmp_path, losses):
    with hosts(2, tmp_path) as h:
        run = start(h)
        wait_for(lambda: len(lines(h)) > 5, 60)
        with h.paused(1):
            time.sleep(0.5)
            before = len(lines(h))
            time.sleep(2.5)
            assert len(lines(h)) == before, "the host is not paused"
        wait_for(lambda: len(lines(h)) > before + 1, 3)
        ends_well(h, run, losses)


def test_a_network_that_delays_and_loses(tmp_path, losses):
    with hosts(2, tmp_path) as h:
        h.network.delay, h.network.loss = 0.05, 0.01
        ends_well(h, start(h), losses)
        assert h.network.lost > 0


def test_hosts_that_cannot_take_part_are_named_at_once(tmp_path):
    with hosts(2, tmp_path) as h:
        begin = time.monotonic()
        run = h.run(0, "--hosts", f"{h.names},nowhere,10.99.0.1", "-m", "this")
        assert run.wait(30) == 2 and time.monotonic() - begin < 15
        assert h.text("out0") == ""
        assert h.text("err0") == (
            "python -m shardc run: these hosts cannot take part:\n"
            "  nowhere: ssh: Could not resolve hostname nowhere: Name or service not known\n"
            "  10.99.0.1: ssh: Could not resolve hostname 10.99.0.1: Name or service not known\n"
        )
