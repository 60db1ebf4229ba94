"""Weights handed from a learner to a sampler while processes are killed: every row is written by one whole version."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = "--processes 4 --islands 2 --devices 2 --restarts 4"
SCRIPT = "--config test --rounds 24 --every 4"
LINE = re.compile(r"^round .*$", re.MULTILINE)


def start(checkpoints: Path) -> subprocess.Popen[str]:
    words = [
        "-m",
        "shardc",
        "run",
        *RUN.split(),
        "-m",
        "examples.rlhf",
        *SCRIPT.split(),
        "--checkpoints",
        str(checkpoints),
    ]
    return subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    )


def children(of: int) -> list[int]:
    listed = subprocess.run(["pgrep", "-P", str(of)], capture_output=True, text=True, check=False).stdout.split()
    return list(map(int, listed))


@pytest.mark.sampled(0)
@pytest.mark.parametrize("seed", range(3))
def test_killed_at_any_time_the_versions_and_rewards_are_those_of_one_process(seed, tmp_path):
    alone = subprocess.run(
        [sys.executable, "-m", "examples.rlhf", *SCRIPT.split()], capture_output=True, text=True, cwd=ROOT, check=True
    )
    choose, killed, text = random.Random(seed), 0, ""
    with start(tmp_path) as run:
        assert run.stdout is not None
        for line in run.stdout:
            text += line
            if line.startswith("round") and killed < 2:
                time.sleep(choose.random())
                os.kill(choose.choice(children(run.pid)), signal.SIGKILL)
                killed += 1
    assert run.returncode == 0 and killed == 2, text
    assert sorted(set(LINE.findall(text))) == sorted(LINE.findall(alone.stdout)), text
