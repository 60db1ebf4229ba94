"""Published runs become steps that are planned as published, and saved plans become tables and a fit."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.measure import results
from benchmarks.published import plan_run
from benchmarks.published.__main__ import main
from benchmarks.published.fit import Shares, fit, grid, seconds
from benchmarks.published.machines import family, topology
from benchmarks.published.machines import grid as slice_grid
from benchmarks.published.rank import rank
from benchmarks.published.runs import Run, read
from benchmarks.published.show import rivals
from shardc.passes.estimate.plan_cost import Time

RUNS = {run.name: run for run in read()}


def small(name: str, **sizes: int) -> Run:
    """A run with few and narrow layers, its mesh cut down to two devices an axis."""
    run = RUNS[name]
    axes = {axis: min(2, getattr(run, axis)) for axis in ("data", "fsdp", "tensor", "pipe")}
    narrow = {"hidden": 64, "ffn": 128, "heads": 8, "kv_heads": 4, "head_dim": 8, "vocab": 256, "seq": 32}
    count = math.prod(axes.values())
    return replace(run, **{**axes, **narrow, "layers": 4, "batch": 8, "devices": count, **sizes})


def test_rows_have_a_machine_and_as_many_devices_as_their_mesh() -> None:
    for name, run in RUNS.items():
        assert math.prod(run.mesh.values()) == run.devices, name
        assert sum(run.stages) == run.layers, name
        assert family(run), name
        peak = topology(run).peak_in(run.narrow or "bfloat16")
        assert 0.05 < run.model_flops / run.seconds / run.devices / peak < 0.95, name


@pytest.mark.parametrize(
    ("name", "billions"), [("vtrain-multi-1", 3.6), ("vtrain-multi-88", 175), ("torchtitan-L8-8-8192-414", 8.03)]
)
def test_models_are_as_large_as_published(name: str, billions: float) -> None:
    assert RUNS[name].parameters == pytest.approx(1e9 * billions, rel=0.03)


def test_sides_of_a_slice() -> None:
    assert [slice_grid(n, d) for n, d in ((512, 3), (128, 3), (32, 2))] == [(8, 8, 8), (4, 4, 8), (4, 8)]


def planned(run: Run, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    plan_run.measure(run)
    (row,) = results(capsys.readouterr().out)
    assert row["planned"] == pytest.approx(Time(**row["parts"]).total, rel=1e-6)  # parts add up
    assert row["reached"] > row["planned"]
    return row


def test_a_tensor_parallel_layer_has_the_collectives_of_megatron(capsys: pytest.CaptureFixture[str]) -> None:
    run = small("korthikanti-22b-selective")
    row = planned(run, capsys)
    stream = 2 * run.batch * run.seq * run.hidden // 2  # bytes that a device sends of the residual stream
    assert row["by_kind"]["reduce_scatter"] == pytest.approx(stream * (4 * run.layers + 2), rel=0.05)
    # what products read is kept whole, or gathered anew for the gradients of weights
    assert 4 * run.layers + 2 <= row["by_kind"]["all_gather"] / stream <= 6 * run.layers + 3


def test_a_pipeline_and_its_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    row = planned(small("vtrain-multi-42", microbatches=2), capsys)
    assert row["parts"]["wait"] > 0
    assert row["memory"] > 0
    file = tmp_path / "rows.json"
    scaled = [row["planned"] * (1 + 0.1 * i) for i in range(4)]
    others = [
        row | {"run": f"vtrain-multi-{i}", "planned": x, "reached": x, "published": 2 * x} for i, x in enumerate(scaled)
    ]
    file.write_text(json.dumps(others))
    assert main(["--read", str(file)]) == 0
    said = capsys.readouterr().out
    assert "vtrain-multi-3" in said
    assert "Time by family" in said


def test_configurations_of_one_model_are_ranked_by_their_fastest_runs() -> None:
    row = {"machine": "a100", "model": "gpt", "devices": 8, "model_flops": 4.0, "peak_flops": 2.0}
    rows = [row | {"planned": p, "published": t} for p, t in ((1.0, 3.0), (1.0, 2.0), (2.0, 4.0), (3.0, 1.0))]
    other = [row | {"planned": p, "published": 9.0, "model_flops": 5.0} for p in (1.5, 2.5)]
    assert rivals([*rows, *other]) == {"gpt, 8 a100": [rows[2], rows[1], rows[3]]}


@pytest.mark.sampled(0)
def test_the_candidates_of_tune_are_beside_the_published_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    run = small("vtrain-multi-42", devices=8, microbatches=2)
    runs = [replace(run, data=4 // t, tensor=t, seconds=t) for t in (1, 2)]
    monkeypatch.setattr("benchmarks.published.rank.read", lambda: runs)
    said = io.StringIO()
    rank(runs[0].model, 12, Console(file=said, width=120))
    assert re.search(r"the fastest published is number \d+ of \d+; \d+ more", said.getvalue())


def test_a_fit_finds_the_shares_that_made_the_times() -> None:
    parts = dict.fromkeys(("all_reduce", "reduce_scatter", "all_to_all", "permute", "overlapped", "wait"), 0.0)
    rows = [
        {"parts": {**parts, "compute": c, "memory": m, "all_gather": g}, "planned": c + m + g, "layers": 10.0,
         "microbatches": 4, "attention": 0.1 * c * c}
        for c, m, g in ((1.0, 0.1, 0.2), (0.5, 0.5, 0.1), (0.2, 0.3, 0.6), (0.7, 0.1, 0.1))
    ]  # fmt: skip
    tried = grid("A100", "three, kernels")
    true = next(s for s in tried if s.kernels < s.compute and s.memory < 0.75 and s.links < 0.55)
    took = seconds(rows, [true])[0]
    assert fit([row | {"published": t} for row, t in zip(rows, took, strict=True)], tried) == true
    assert seconds(rows, [Shares()])[0] == pytest.approx([row["planned"] for row in rows])
