"""The autopsy of runs that hang and are killed with their launcher: its first line names the cause."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardc.launch.health.autopsy import cause_of_end, read_flights
from tests.processes.test_hangs import SHAPES

HERE = Path(__file__).parent
LATE = r"process 1 did not come: process 0 waits for it .*"
FAILED = r"process [01] failed: DisagreementError: .*"
KINDS = {
    ("hangs", "spmd", "sleep"): rf"{LATE}; at hangs\.py:\d+, time\.sleep\(1e6\)",
    ("hangs", "spmd", "stop"): r"process 1 gave no sign of life for \d+ s: it was killed or stopped, or held .*",
    ("hangs", "spmd", "every"): rf"{FAILED}every: process 0: 1; process 1: 2",
    ("hangs", "spmd", "fetch"): rf"{FAILED}the call: process 0: shardc\.fetch; process 1: .*",
    ("hangs", "pipeline", "lock"): rf"{LATE}; at hangs\.py:\d+, lock\.acquire\(\)",
    ("hangs", "flow", "reader"): rf"{LATE}; train: .* at hangs\.py:\d+, time\.sleep\(1e6\)",
    ("hangs", "gang", "client"): rf"{LATE}; evaluation at hangs\.py:\d+, time\.sleep\(1e6\)",
    ("mistakes", "spmd", "order"): rf"{FAILED}the call: process 0: train, .*; process 1: evaluate, .*",
    ("mistakes", "pipeline", "end"): rf"{FAILED}process 1's script has ended; process 0 waits for it .*",
    ("mistakes", "spmd", "alone"): rf"{FAILED}the call: process 0: evaluate, .*; process 1: train, .*",
}
STILL = 8.0
"""Seconds in which a process that stands still writes what its threads do."""


@pytest.mark.sampled(0)
@pytest.mark.parametrize("script, shape, fault", KINDS)
def test_the_first_line_names_the_cause(script, shape, fault, tmp_path):
    arguments = [shape, fault, tmp_path / "saved"] if script == "hangs" else [fault, "later", shape]
    words = ["--processes", 2, *SHAPES[shape], "--deadline", 200, "--silence", 100, "--log", tmp_path]
    command = [sys.executable, "-m", "shardc", "run", *words, HERE / f"{script}.py", *arguments, tmp_path / "fault"]
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC", "PJRT_NPROC", "JAX_PLATFORMS")}
    with (tmp_path / "err").open("wb") as err:
        made = subprocess.Popen(
            list(map(str, command)), env=env, stdout=err, stderr=err, start_new_session=True
        )  # fmt: skip
        try:
            until = time.monotonic() + 120
            while not (tmp_path / "fault").exists() and made.poll() is None and time.monotonic() < until:
                time.sleep(0.1)
            until = time.monotonic() + STILL
            while made.poll() is None and time.monotonic() < until:
                time.sleep(0.1)
        finally:
            if made.poll() is None:
                os.killpg(made.pid, signal.SIGKILL)
            made.wait()
    found, _ = cause_of_end(read_flights(tmp_path))
    assert re.fullmatch(KINDS[script, shape, fault], found), f"{found}\n{(tmp_path / 'err').read_text()[-2000:]}"
