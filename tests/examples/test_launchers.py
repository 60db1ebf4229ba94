"""The same script has the same losses, whoever starts its processes."""

import functools
import importlib.util
import re
import subprocess

import pytest

from tests.launch.backends.test_under_a_cluster import Tasks, ompi, slurm
from tests.launch.launching import command, environment, started

SCRIPT = "import sys\nfrom examples.train import main\nsys.exit(main())\n"
MODES = {
    "one mesh": (1, "--mesh data=2,model=2 --plan data_tensor"),
    "stages": (2, "--mesh pipe=2,data=2 --plan pipeline --microbatches 4"),
}
SECONDS = 200


def losses_of(text):
    found = re.findall(r'^{"step": \d+, "loss": (.*)}$', text, re.MULTILINE)
    assert len(found) == 3, text
    return found  # as text: to the last bit


def arguments(mode):
    return ["--model", "mlp", "--config", "test", *MODES[mode][1].split(), "--steps", "3", "--loss-log", "-"]


def options(mode):
    return "--devices", 2, "--islands", MODES[mode][0]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("launchers") / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def plain(path):
    """`plain(mode)`: the losses under the launcher that starts all processes here."""

    @functools.cache
    def run(mode):
        return losses_of(output(command(path, "--processes", 2, *options(mode), arguments=arguments(mode)), path))

    return run


def output(words, path, **more):
    with started(words, str(path), env=environment(**more), stderr=subprocess.STDOUT) as process:
        text, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, text
    return text


@pytest.mark.sampled(0)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [slurm, ompi])
def test_under_a_cluster(kind, mode, path, plain, tmp_path):
    with Tasks(kind, tmp_path, path, *options(mode), arguments=arguments(mode)) as tasks:
        (code, out, err), other = (
            (t.returncode, *ends) for t, ends in ((t, t.communicate(timeout=SECONDS)) for t in tasks.tasks)
        )
    assert (code, other) == (0, (0, "", "")), err
    assert losses_of(out) == plain(mode)


@pytest.mark.sampled(0)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.parametrize("mode", MODES)
def test_under_ray(mode, path, plain):
    words = command(path, "--ray", "--processes", 2, *options(mode), arguments=arguments(mode))
    text = output(words, path, RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")
    assert losses_of(text) == plain(mode)
