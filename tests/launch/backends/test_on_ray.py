"""Runs on Ray: the same script in actors. Skipped where Ray is not installed; the extra `ray` brings it."""

import importlib.util
import os

import pytest

from tests.launch.backends.test_on_this_machine import PSUM
from tests.launch.launching import command, environment, script, started

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
pytestmark = needs_ray
LOST = """
c.gather("all", "")
if c.epoch == 0 and c.me == 1:
    os.kill({victim}, 9)
    time.sleep(100)
try:
    c.gather("again", "")
except Exception as error:
    print(error)
    c.rejoin()
    c.gather("all", "")
    c.gather("again", "")
print("end", c.epoch, c.config.restarts)
"""


def run(path, *options):
    more = environment(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")
    words = command(path, "--ray", "--processes", 2, *options)
    with started(words, str(path), env=more) as process:
        out, err = process.communicate(timeout=150)
    return process.returncode, out, err


def test_a_sum_over_two_actors(tmp_path):
    code, out, _ = run(script(tmp_path, PSUM, head=""), "--devices", 2)
    assert (code, out) == (0, "sum 6.0 2 2\n")


@pytest.mark.parametrize(
    ("victim", "why"), [("os.getpid()", "killed by SIGKILL"), ("os.getppid()", "the launcher of its host is lost")]
)
def test_a_lost_process_and_a_lost_actor(tmp_path, victim, why):
    path = script(tmp_path, LOST.format(victim=victim))
    code, out, err = run(path, "--islands", 2, "--restarts", 1)
    assert code == 0
    assert f"process 1 is lost: {why}." in out.splitlines()  # Ray too tells of a lost actor
    assert out.splitlines()[-1] == "end 1 0"
    what = "started again" if "killed" in why else "waiting up to 597 s for its host"
    assert f"process 1 is lost ({why}); {what}, 0 restarts are left\n" in err


def test_no_place_for_so_many(tmp_path):
    path = script(tmp_path, "")
    code, _, err = run(path, "--processes", 10 * (os.cpu_count() or 1), "--deadline", 3)
    assert code == 2
    assert "python -m shardc run: Ray has no place for" in err
