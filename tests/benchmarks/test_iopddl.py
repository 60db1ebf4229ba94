"""The reader of contest problems, on one written by hand, and what the benchmark reports."""

import gzip
import json
from pathlib import Path

import numpy as np

from benchmarks.iopddl import measure, measure_milp, read
from tests.benchmarks.test_memory_limited import minimum

TINY = Path(__file__).parent / "data" / "tiny.json"


def test_a_problem_is_read():
    tiny = read(TINY)
    assert tiny.name == "tiny"
    assert [u.tolist() for u in tiny.unary] == [[1, 5], [2, 0, 7], [3, 1], [0, 4]]
    assert tiny.pairwise[0, 1].tolist() == [[0, 2, 1e18], [3, 0, 1]]
    # (2, 1) is turned, and (1, 2) added to it
    assert tiny.pairwise[1, 2].tolist() == [[4 + 1, 1 + 0], [0 + 0, 6 + 2], [2 + 0, 0 + 0]]
    assert tiny.memory.limit == 9
    assert [(v, begin, end, u.tolist()) for v, begin, end, u in tiny.memory.uses] == [
        (0, 0, 4, [8, 2]), (1, 2, 6, [6, 6, 1]), (2, 4, 9, [5, 3]),
    ]  # fmt: skip


def test_a_packed_problem_is_the_same(tmp_path):
    packed = tmp_path / "tiny.json.gz"
    packed.write_bytes(gzip.compress(TINY.read_bytes()))
    assert all(np.array_equal(t, read(TINY).pairwise[pair]) for pair, t in read(packed).pairwise.items())


def test_what_is_reported_is_true():
    tiny = read(TINY)
    row, peer = measure(tiny, 1e8), measure_milp(tiny, 10.0)
    assert {"name", "cost", "cost_unlimited", "bound", "gap", "feasible", "seconds"} <= row.keys()
    assert row["feasible"]
    assert row["bound"] - 1e-9 <= minimum(tiny.unary, tiny.pairwise, tiny.memory) <= row["cost"]
    assert row["cost_unlimited"] == minimum(tiny.unary, tiny.pairwise)
    assert peer["cost"] == minimum(tiny.unary, tiny.pairwise, tiny.memory)
    json.dumps(row)
