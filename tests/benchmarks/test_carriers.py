"""The prototype of a carrier by JAX's own transfers: it checks all values that it carries. No time is looked at."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.carriers import CASES


@pytest.mark.sampled(0)
def test_all_values_arrive():
    words = ["shardc", "run", "--processes", "2", "--devices", "4", "benchmarks/carriers.py"]
    command = [sys.executable, "-m", *words, "--rounds", "1", "--sizes", "1024"]
    ended = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=90, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert all(case in ended.stdout for case in CASES)
