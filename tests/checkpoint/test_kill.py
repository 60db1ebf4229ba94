"""Processes that are killed while they write: the next one goes on from the last complete step, to the last bit."""

import random
import time

import pytest

from shardc.checkpoint.steps import folders_in, read_checkpoint
from tests.checkpoint.worker import Worker


def check_kills(directory, seeds, steps=10**6):
    """Kill a process at a random time of its loop, again and again, but not before a first checkpoint is complete. Each
    one checks what it finds: see `worker`."""

    def complete_steps():
        return [s for s, folder in folders_in(directory).items() if read_checkpoint(folder).is_complete]

    starts = []
    for seed in seeds:
        with Worker("alone", directory, steps, 1, devices=1) as worker:
            starts.append(int(worker.line()))
            while not starts[-1] and not complete_steps():
                assert worker.process.poll() is None
                time.sleep(0.01)
            time.sleep(random.Random(seed).uniform(0.0, 0.6))
            worker.kill()
    complete = complete_steps()
    with Worker("alone", directory, complete[0] + 3, 1, devices=1) as worker:
        starts.append(int(worker.line()))
        worker.end()
    assert starts == sorted(starts) and starts[-1] == complete[0] + 1
    left = sorted(p.relative_to(directory).as_posix() for p in directory.glob("*/*"))
    assert left == sorted(f"{s}/{name}" for s in (starts[-1], starts[-1] + 1) for name in ("0", "0.json"))
    assert not list(directory.rglob("*tmp*"))
    return starts


def test_a_few_kills(tmp_path):
    starts = check_kills(tmp_path, range(3))
    assert starts[0] == 0 and starts[-1] > 0


@pytest.mark.sampled(0)
@pytest.mark.parametrize("first", [100, 107, 114])
def test_many_kills(tmp_path, first):
    check_kills(tmp_path, range(first, first + 7))
