"""The runner's command line, and what it says to JAX before JAX starts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from examples.train import fake_cpu_devices, parse


def test_options():
    options = parse(["--model", "gpt2", "--mesh", "data=4,model=2", "--plan", "zero1", "--devices", "8", "--scan"])
    assert (options.mesh, options.plan, options.devices, options.scan) == ({"data": 4, "model": 2}, "zero1", 8, True)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--mesh", "data"], "'data' is not a mesh; write data=4,model=2"),
        (["--mesh", "data=0"], "'data=0' is not a mesh; write data=4,model=2"),
        (["--mesh", "data=2,data=4"], "'data=2,data=4' names an axis twice"),
        (["--steps", "0"], "0 is not a positive number"),
        (["--model", "mlp", "--remat"], "--vocab, --scan and --remat are for gpt2, llama, moe"),
        (["--every", "5"], "--every is for --checkpoints"),
        (["--vocab", "100"], "--vocab 100: the text is made of bytes, which want at least 256"),
    ],
)
def test_wrong_options(argv, message, capsys):
    with pytest.raises(SystemExit) as error:
        parse(argv)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_fake_devices_keep_what_the_environment_says(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=dump")
    monkeypatch.setenv("NPROC", "64")
    fake_cpu_devices(8)
    assert os.environ["XLA_FLAGS"] == "--xla_dump_to=dump --xla_force_host_platform_device_count=8"
    assert os.environ["NPROC"] == "64"
    monkeypatch.delenv("NPROC")
    fake_cpu_devices(8)
    assert os.environ["NPROC"] == "16"


def test_the_runner_does_not_import_jax_before_it_has_set_the_environment():
    code = "import sys, examples.train; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
