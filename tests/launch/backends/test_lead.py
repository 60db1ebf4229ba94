"""What the ways to start processes share: the directory of a launcher, and addresses. Each way is tested as a whole."""

import os
import signal
import subprocess
import sys

import pytest

from shardc.errors import ClusterError
from shardc.launch.backends.lead import interface_address
from tests.launch.launching import named, wait_for


def test_the_directory_of_a_launcher_that_runs_nothing_goes_with_it():
    """As that of another host, which waits."""
    text = (
        "from shardc.launch.backends.lead import private_directory\nimport sys\n"
        "with private_directory() as path:\n    (path / 'x').touch(); print(path, flush=True); sys.stdin.read()"
    )
    for signals in (True, False):
        waits = subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        path = waits.stdout.readline().strip()
        assert os.listdir(path) == ["x"]
        if signals:
            waits.send_signal(signal.SIGKILL)
        waits.communicate(timeout=20)
        wait_for(lambda path=path: not os.path.exists(path), 10)
        wait_for(lambda path=path: named(path) == [], 10)  # nor is there its guard


def test_an_interface_is_an_address():
    assert interface_address("lo") == "127.0.0.1"
    assert interface_address("node1") == "node1"
    with pytest.raises(ClusterError, match=r"--bind 0\.0\.0\.0: others cannot reach this address"):
        interface_address("0.0.0.0")
