"""Scripts in which one process makes other calls than the others: each run ends soon, with words that say which."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("mistakes.py")
SECONDS = 15.0
"""The longest time from a mistake to the end of the run."""
CALL = r"\n(process 1\| )?  the call: process 0: \w+, [\w ]+; process 1: \w+, [\w ]+"
SAYS = {
    "order": CALL,
    "missing": CALL,
    "additional": CALL,
    "alone": CALL,
    "end": r"process 1's script has ended; process 0 waits for it at train, (first call|call \d+|compiled)",
    "other data": r"train, (first call|call \d+): the processes of this run differ in\n.*the value of x: process 0: ",
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("restarts", [0, 2])
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("shape", ["spmd", "pipeline"])
@pytest.mark.parametrize("when", ["first", "later"])
@pytest.mark.parametrize("mistake", SAYS)
def test_a_mistake_ends_the_run_and_is_named(mistake, when, shape, devices, restarts, tmp_path):
    file = tmp_path / "mistake"
    command = [
        sys.executable, "-m", "shardc", "run", "--processes", "2", "--islands", "1" if shape == "spmd" else "2",
        "--devices", str(devices), "--restarts", str(restarts), SCRIPT, mistake, when, shape, file,
    ]  # fmt: skip
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC", "PJRT_NPROC", "JAX_PLATFORMS")}
    made = subprocess.Popen(
        command, env=kept, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        _, errors = made.communicate(timeout=90)
        took = time.time() - float(file.read_text())
    except subprocess.TimeoutExpired:
        os.killpg(made.pid, signal.SIGTERM)
        _, errors = made.communicate(timeout=20)
        raise AssertionError(f"no end:\n{errors}") from None
    assert made.returncode == 76, errors
    assert re.search(SAYS[mistake], errors), errors
    assert "started again" not in errors
    assert took < SECONDS, errors
