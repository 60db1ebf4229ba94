"""The benchmark of one GPU runs on a CPU, with tiny sizes, and reports what fails. No time is looked at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

from benchmarks.gpu import machine, memory, pipeline, programs, sections, steps, values
from benchmarks.gpu.__main__ import chosen, environment, groups
from benchmarks.gpu.batch import Batch
from benchmarks.gpu.batches import BATCHES, Draw
from benchmarks.gpu.sections import SECTIONS
from benchmarks.gpu.tables import failures, notes, to_markdown, to_rich
from shardc.machine.topology import TOPOLOGIES

ENV = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def ended(batch: Batch) -> Batch:
    while batch.step():
        time.sleep(0.02)
    return batch


def no_constant(name: str) -> Any:
    raise AssertionError(f"{name} is no JSON")


@pytest.mark.sampled(0)
def test_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--tiny", "--out", str(tmp_path), "--jobs", "1"]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu.json").read_text(), parse_constant=no_constant)
    rows = {name: found["sections"][name]["rows"] for name in SECTIONS}
    assert found["tiny"]
    assert found["machine"]["rows"][0]["card"] == "cpu"
    assert found["machine"]["rows"][0]["jax"] == jax.__version__
    assert all(rate > 0 for rate in found["machine"]["rows"][1]["flops"].values())
    for result in found["sections"].values():
        assert result["ok"] and not result["errors"]
        assert 0 < result["seconds"] < result["budget"]

    assert {r["what"] for r in rows["steps"]} == {"GPT-2 124M", *(f"dispatch, {n} arrays" for n in steps.LEAVES)}
    for row in rows["steps"]:
        assert row["ratio"] == pytest.approx(row["ours"] / row["peer"])
        assert 0 < row["low"] <= row["high"]
    model = rows["steps"][0]
    assert model["audit"] and model["apart"] < 1e-3
    assert model["losses"][1] < model["losses"][0], "it learns"

    assert [r["program"] for r in rows["memory"]] == list(programs.TINY[:2])
    for row in rows["memory"]:
        assert row["planned"] >= row["planned_arguments"] > 0
        assert 0.5 < row["planned"] / row["xla"] < 2
        assert row["measured"] is None
        assert row["note"] == "not measured: the backend has no memory statistics"
    assert found["sections"]["memory"]["summary"]["planned : measured"] == memory.NOT_MEASURED

    assert [r["program"] for r in rows["seconds"]] == list(programs.TINY)
    assert all(r["planned"] > 0 and r["measured"] > 0 for r in rows["seconds"])
    assert -1 <= found["sections"]["seconds"]["summary"]["Spearman's rank correlation"] <= 1

    assert [r["schedule"] for r in rows["pipeline"]] == list(pipeline.TINY)
    assert all(r["ok"] and r["apart"] <= pipeline.TOLERANCE for r in rows["pipeline"])
    assert {r["stages"] for r in rows["pipeline"]} == {2, 4}

    assert [r["check"] for r in rows["values"]] == [*values.CHECKS, values.DONATION]
    assert all(r["ok"] for r in rows["values"])
    assert all(r["calls"] for r in rows["values"] if "callback" in r["check"])

    text = (tmp_path / "gpu.md").read_text()
    assert all(f"### {s.title}" in text for s in SECTIONS.values())
    assert "| GPT-2 124M | ms |" in text
    assert "FAILED" not in text


@pytest.mark.sampled(0)
def test_what_fails_is_told(tmp_path: Path) -> None:
    """By the process that fails, and by the exit status of one that can say nothing; the others are measured."""
    args = ("--tiny", "--out", str(tmp_path))
    batch = ended(Batch("memory", ("no such program", "matmuls"), 100, args=args, env=ENV))
    assert [r["program"] for r in batch.rows] == ["matmuls"]
    (error,) = batch.errors
    assert (error["job"], error["type"], error["message"]) == ("no such program", "KeyError", "'no such program'")
    assert "Traceback" in error["stderr"]
    silent = ended(Batch("memory", ("matmuls",), 100, args=("--no-such-option",), env=ENV))
    assert not silent.rows
    assert (silent.errors[0]["type"], silent.errors[0]["message"]) == ("Exit", "exit status 2")


def test_time_is_limited() -> None:
    batch = ended(Batch("memory", ("mlp", "matmuls"), 0.3, env=ENV))
    assert batch.took < 10
    assert [e["type"] for e in batch.errors] == ["Timeout", "Timeout"]
    assert batch.errors[1]["message"] == "not started: the section's 0 s are over"


@pytest.mark.sampled(0)
def test_programs_take_turns_at_the_device(tmp_path: Path) -> None:
    """A program that cannot be made is a row with its error, and the others of its process are measured."""
    (tmp_path / machine.FILE).write_text(TOPOLOGIES["cpu"].to_json())
    args = ("--tiny", "--out", str(tmp_path))
    jobs = ("no such program,matmuls", "elementwise")
    batch = ended(Batch("seconds", jobs, 200, at_once=2, in_turn=True, args=args, env=ENV))
    assert not batch.errors
    rows = {r["program"]: r for r in batch.rows}
    assert set(rows) == {"no such program", "matmuls", "elementwise"}
    assert rows["no such program"]["error"]["type"] == "KeyError"
    assert rows["matmuls"]["measured"] > 0 and rows["elementwise"]["measured"] > 0
    assert all(r["alone"] for r in batch.rows), "all were compiled before the first was measured"


def test_seconds_want_a_calibration(tmp_path: Path) -> None:
    batch = ended(Batch("seconds", ("matmuls",), 100, in_turn=True, args=("--out", str(tmp_path)), env=ENV))
    assert [e["type"] for e in batch.errors] == ["MeshError"]
    assert machine.FILE in batch.errors[0]["message"]


FAILED: Mapping[str, Any] = {
    "title": "", "ok": False, "seconds": 1.0, "budget": 2.0, "summary": {"checks": 2, "equal": 1, "none": None},
    "rows": [
        {"job": "all", "check": "rbg bits", "ok": True, "here": 0.0, "cpu": "not equal", "calls": 0},
        {"job": "all", "check": "debug | callback", "ok": False, "error": {"type": "Wrong", "message": "no\n  call"}},
    ],
    "errors": [{"job": "all", "type": "Exit", "message": "exit status -9", "stderr": "..."}],
}  # fmt: skip


def test_tables_show_failures() -> None:
    section = SECTIONS["values"]
    assert [where for where, _ in failures(FAILED)] == ["all", "debug | callback"]
    assert list(notes(FAILED)) == [
        "checks: 2; equal: 1",
        "FAILED: all: Exit: exit status -9",
        "FAILED: debug | callback: Wrong: no call",
    ]
    text = to_markdown({"machine": {"ok": False}, "sections": {"values": FAILED, "steps": {"state": "not run"}}})
    assert text.startswith("The machine did not say what it is.")
    assert f"### {SECTIONS['steps'].title}\n\nNot run." in text
    assert "| rbg bits | equal | 0e+00 | not equal | 0 |" in text
    assert "| debug \\| callback | WRONG | - | - | - |" in text
    console = Console(width=120)
    with console.capture() as printed:
        console.print(to_rich(section, FAILED))
    assert "WRONG" in printed.get()


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_without_rows_has_a_table(name: str) -> None:
    section = SECTIONS[name]
    empty = {"ok": False, "rows": [], "errors": [], "summary": section.summary([])}
    assert section.title in to_markdown({"machine": {}, "sections": {name: empty}})
    assert not list(to_rich(section, empty).rows)


def test_figures_of_memory_and_time() -> None:
    found = [{"planned": p, "measured": m, "note": ""} for p, m in ((100, 100), (300, 200), (80, 100))]
    hidden = {"planned": 1, "measured": 100, "note": memory.HIDDEN}
    assert sections.peaks([hidden]) == {"programs": 0, "hidden by the compiler's own peak": 1}
    assert sections.peaks([hidden, *found])["programs"] == 3
    assert sections.peaks(found)["median planned : measured"] == 1
    assert (sections.peaks(found)["least"], sections.peaks(found)["greatest"]) == (0.8, 1.5)
    assert sections.ranks(found)["Spearman's rank correlation"] == pytest.approx(0.866, abs=1e-3)
    assert sections.ranks(found)["median relative error"] == pytest.approx(0.2)


def test_there_are_twenty_programs() -> None:
    assert len(programs.PROGRAMS) == 20
    assert set(programs.TINY) <= set(programs.PROGRAMS)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", programs.MODELS)
def test_a_step_takes_its_batch_and_gives_its_state_anew(name: str) -> None:
    init_fn, step_fn, batch = programs.training(name, tiny=False)
    state = jax.eval_shape(init_fn, jax.random.key(0))
    *after, loss = jax.eval_shape(step_fn, *state, batch)
    assert jax.tree.map(np.shape, tuple(after)) == jax.tree.map(np.shape, state)
    assert loss.shape == ()


SIZES = {"GPT-2 124M": 124, "Llama 350M": 355, "ResNet-50": 25.6, "ViT-B": 86.6}


@pytest.mark.parametrize(("name", "millions"), SIZES.items())
def test_models_of_the_steps_have_their_sizes(name: str, millions: float) -> None:
    module, cfg, _ = steps.MODELS[name]
    params, *_ = jax.eval_shape(programs.MODULES[module].make_step(cfg)[0], jax.random.key(0))
    assert sum(x.size for x in jax.tree.leaves(params)) == pytest.approx(1e6 * millions, rel=0.02)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("name", steps.MODELS)
def test_models_of_the_steps_compute_in_bfloat16(name: str) -> None:
    module, cfg, rows = steps.MODELS[name]
    init_fn, step_fn = programs.MODULES[module].make_step(cfg)
    state = jax.eval_shape(init_fn, jax.random.key(0))
    traced = jax.make_jaxpr(step_fn)(*state, BATCHES[module](cfg, rows, Draw()))
    products = [line for line in str(traced).splitlines() if "dot_general[" in line or "conv_general_dilated[" in line]
    assert len(products) > 10
    assert all("bf16[" in line.split("=")[0] for line in products)


def test_sections_are_named_by_word_or_letter() -> None:
    assert [s.name for s in chosen("c,memory")] == ["memory", "seconds"]
    with pytest.raises(Exception, match="no section speed; there are steps, memory, seconds, pipeline, values"):
        chosen("speed,steps")


def test_what_measures_time_runs_apart() -> None:
    names = [[s.name for s in part] for part in groups(list(SECTIONS.values()), 4)]
    assert names == [["memory", "pipeline", "values"], ["steps"], ["seconds"]]
    assert all(len(part) == 1 for part in groups(list(SECTIONS.values()), 1))


def test_processes_do_not_take_all_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    env = environment()
    assert env["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert env["JAX_PLATFORMS"] == "cuda,cpu"
    asks = "import benchmarks.gpu.__main__; from jax._src.xla_bridge import backends_are_initialized as f; print(f())"
    done = subprocess.run([sys.executable, "-c", asks], env=ENV, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False", "the command itself leaves the device alone"
