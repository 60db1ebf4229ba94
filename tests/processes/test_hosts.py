"""Runs on several hosts, which are network namespaces (`tests/processes/hosts.py`): the losses are those of one
process, over a network that breaks, loses and delays."""

import json
import shutil
import subprocess
import time
from pathlib import Path

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


@pytest.mark.sampled(0)
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


@pytest.mark.sampled(0)
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


@pytest.mark.sampled(0)
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


# -- hosts that are lost


@pytest.mark.sampled(0)
@pytest.mark.parametrize("seconds", [8.0, 20.0])
def test_a_run_waits_for_a_host_that_the_network_has_lost(tmp_path, losses, seconds):
    with hosts(2, tmp_path) as h:
        run = start(h, "--silence", 3, "--restarts", 1)
        wait_for(lambda: len(lines(h)) > 12, 60)
        with h.broken(1):
            time.sleep(seconds)
        back = time.monotonic()
        assert run.wait(120) == 0, h.text("err0")
        assert sorted(set(lines(h))) == sorted(losses)  # some steps are done again
        assert time.monotonic() - back < 60
        err = h.text("err0")
        assert "process 1 is lost (the launcher of its host is lost); waiting up to 57 s for its host" in err
        assert "is there; 1 process started\n" in err and err.count("is lost (") == 1


@pytest.mark.sampled(0)
def test_a_run_ends_when_a_lost_host_does_not_come_back(tmp_path):
    with hosts(2, tmp_path) as h:
        run = start(h, "--silence", 3, "--restarts", 1, "--deadline", 10)
        wait_for(lambda: len(lines(h)) > 5, 60)
        with h.broken(1):
            assert run.wait(40) == 75
        assert "process 1 is lost: the launcher of its host is lost, and its host does not come back." in h.text("err0")


@pytest.mark.sampled(0)
def test_a_run_goes_on_with_fewer_hosts_and_takes_one_back(tmp_path):
    """The losses between are those of a run that was started on the hosts that were left, from that checkpoint."""
    script, saved = Path(__file__).with_name("elastic.py"), tmp_path / "saved"
    with hosts(3, tmp_path) as h:
        options = ["--hosts", h.names, "--processes", "2:3", "--devices", 2, "--silence", 3, "--restarts", 1]
        run = h.run(0, *options, script, saved, 160, 0.1)
        wait_for(lambda: len(lines(h)) > 12, 60)
        with h.broken(2):
            wait_for(lambda: [line for line in lines(h) if " 4 " in line][10:], 60)
        assert run.wait(120) == 0, h.text("err0")
        steps = [(int(i), int(n), loss) for i, n, loss in map(str.split, lines(h))]
        err = h.text("err0")
    first = next(i for i, n, _ in steps if n == 4)
    fewer = [(i, n, loss) for i, n, loss in steps if n == 4]
    assert steps[-1][:2] == (159, 6) and steps[0][:2] == (0, 6) and first % 4 == 0
    assert "its host does not come back; the run goes on with 2 processes\n" in err
    assert "the run goes on with 3 processes from its last checkpoint\n" in err
    assert "goodput" in err.splitlines()[-1]
    for folder in saved.iterdir():
        if not folder.name.isdecimal() or int(folder.name) >= first:
            shutil.rmtree(folder)
    words = command(script, "--processes", 2, "--devices", 2, arguments=[saved, fewer[-1][0] + 1, 0.0])
    alone = subprocess.run(words, env=environment(), capture_output=True, text=True, check=True, timeout=120)
    assert [(int(i), int(n), loss) for i, n, loss in map(str.split, alone.stdout.splitlines())] == fewer
