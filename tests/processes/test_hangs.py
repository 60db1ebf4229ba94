"""A process that is alive and does not come: it is named, shown and started again, in runs of every shape."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests.processes.hangs import curve

SCRIPT = Path(__file__).with_name("hangs.py")
DEADLINE, SILENCE = 20, 5
SECONDS = 20.0
"""The longest time from the deadline, or from a mistake, to the words about it: processes may share a processor."""
SHAPES = {
    "spmd": ["--devices", "1"],
    "spmd of two devices": ["--devices", "2"],
    "pipeline": ["--devices", "1", "--islands", "2"],
    "flow": ["--devices", "1", "--islands", "2"],
    "gang": ["--devices", "1"],
}
LATE = rf"after {DEADLINE} s process 1 has not come: process 0 waits for it .*"
LOST = rf"process 1 is lost \(it has not come for {DEADLINE} s; .*\); started again, 0 restarts are left"
HANGS = {
    "sleep": [LATE, r"process 1\|     time\.sleep\(1e6\)", LOST],
    "lock": [LATE, r"process 1\|     lock\.acquire\(\)", LOST],
    "reader": [LATE, r"process 1\|     time\.sleep\(1e6\)", LOST],
    "client": [LATE, r"process 1\| evaluation, most recent call last:", r"process 1\|     time\.sleep\(1e6\)", LOST],
    "stop": [rf"process 1 is lost \(no sign of life for {SILENCE} s\); started again, 0 restarts are left"],
}
MISTAKES = {
    "every": [r"(process 1\| )?  every: process 0: 1; process 1: 2"],
    "fetch": [r"(process 1\| )?  the call: process 0: shardc\.fetch.*; process 1: .*"],
}
CASES = [
    (shape, fault)
    for shape in SHAPES
    for fault in [*HANGS, *MISTAKES]
    if (fault != "reader" or shape == "flow") and (fault != "client" or shape == "gang")
]


def run(shape, fault, folder):
    """Exit code, losses, and the lines of standard error, each with its seconds since the fault."""
    words = ["--processes", 2, *SHAPES[shape], "--deadline", DEADLINE, "--silence", SILENCE, "--restarts", 1]
    with (folder / "out").open("wb") as out:
        made = subprocess.Popen(
        [str(w) for w in [sys.executable, "-m", "shardc", "run", *words, SCRIPT, shape.split()[0], fault,
                          folder / "saved", folder / "fault"]],
        env={k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC", "PJRT_NPROC", "JAX_PLATFORMS")},
        stdout=out, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    watchdog = threading.Timer(200, os.killpg, (made.pid, signal.SIGTERM))
    watchdog.start()
    try:
        lines = [(time.time(), line.rstrip("\n")) for line in made.stderr]
        made.wait()
    finally:
        watchdog.cancel()
        made.stderr.close()
    began = float((folder / "fault").read_text())
    losses = [line.split() for line in (folder / "out").read_text().splitlines() if line[:1].isdigit()]
    return made.returncode, losses, [(at - began, line) for at, line in lines]


def says(lines, wanted):
    """The seconds at which each of these lines was said, in this order."""
    found = []
    for line in wanted:
        at = next((at for at, text in lines if re.fullmatch(line, text) and at >= max(found, default=-1e9)), None)
        assert at is not None, "\n".join([f"no {line}", *(text for _, text in lines)])
        found.append(at)
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shape, fault", CASES)
def test_who_does_not_come(shape, fault, tmp_path):
    code, losses, lines = run(shape, fault, tmp_path)
    shown = "\n".join(text for _, text in lines)
    if fault in MISTAKES:
        assert max(says(lines, MISTAKES[fault])) < SECONDS
        assert code == 76 and "DisagreementError" in shown and "started again" not in shown, shown
        return
    begin = says(lines, HANGS[fault])[0]
    limit = SILENCE if fault == "stop" else DEADLINE
    assert limit - 1 < begin < limit + SECONDS
    assert code == 0 and shown.count("started again") == 1, shown
    found = {int(i): float(loss) for i, loss in losses}
    np.testing.assert_allclose([found[i] for i in range(len(curve()))], curve(), rtol=1e-5)
    assert all(found[int(i)] == float(loss) for i, loss in losses)
