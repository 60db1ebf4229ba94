"""Programs of several processes that are in flight on the same devices have the values of one device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("order.py")


def errors(shapes, *options):
    """The largest error of each shape."""
    words = [sys.executable, "-m", "shardc", "run", *options, SCRIPT, *shapes]
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC", "PJRT_NPROC", "JAX_PLATFORMS")}
    done = subprocess.run(list(map(str, words)), env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return {name: float(error) for name, error in map(str.split, done.stdout.splitlines())}


def check(shapes, *options):
    found = errors(shapes, *options)
    assert list(found) == shapes and max(found.values()) < 1e-5, found


@pytest.mark.sampled(0)
def test_threads_of_one_process():
    check(["gang", "threads", "callables", "refused"], "--processes", 2, "--devices", 1)


@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    "shape, options",
    [
        ("meshes", ["--processes", 2, "--devices", 2]),
        ("pipeline", ["--processes", 4, "--islands", 2, "--devices", 1]),
    ],
)
def test_programs_of_different_devices(shape, options):
    check([shape], *options)
