"""Two faults of JAX by which values that go between processes are wrong without an error.

They pass while JAX has the fault: shardc's ways are built around both, and may be simpler where they are mended.
"""

import json
import socket
import subprocess
import sys
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.processes.jax_faults import DEVICES

SECONDS = 60


def start(*words):
    command = [sys.executable, "-m", "tests.processes.jax_faults", *map(str, words)]
    return subprocess.Popen(
        command, cwd=Path(__file__).parents[2], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def said_by(child):
    """What a process prints, as JSON. Fails, with its errors, if it prints nothing in time."""
    try:
        out, err = child.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        out, err = child.communicate()
    assert out, err
    return json.loads(out.splitlines()[0])


def free_ports(count):
    with ExitStack() as stack:
        opened = [stack.enter_context(closing(socket.create_server(("127.0.0.1", 0)))) for _ in range(count)]
        return [f"127.0.0.1:{s.getsockname()[1]}" for s in opened]


@pytest.fixture
def killed():
    """Processes that end with the test at the latest."""
    children = []
    yield children
    for child in children:
        child.kill()
        child.communicate()


@pytest.mark.sampled(0)
def test_one_device_put_of_a_list_between_processes_gives_values_to_the_wrong_arrays(killed):
    coordinator, *sockets = free_ports(3)
    killed += [start("put", p, coordinator, sockets[p]) for p in (0, 1)]
    in_one, one_by_one = said_by(killed[1])
    assert one_by_one == list(range(DEVICES)), "one call for each pair of devices has to be right: carriers build on it"
    assert in_one != one_by_one, (
        "JAX is mended: jax.device_put of a list between processes gives each array its own value. Carriers may put "
        "all pieces of a message in one call."
    )


@pytest.mark.sampled(0)
def test_a_pull_at_another_sharding_gives_wrong_values(killed):
    killed.append(start("pull", 0))
    killed.append(start("pull", 1, json.loads(killed[0].stdout.readline())))
    same, other = said_by(killed[1])
    assert same, "a pull at the sharding that is offered has to be right"
    assert not other, (
        "JAX is mended: jax.experimental.transfer gives right values at another sharding whose pieces are as large. "
        "Carriers may pull whole arrays, not only pieces."
    )
