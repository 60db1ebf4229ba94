"""Large models have the sizes that were published, one cut short is planned, and XLA's cycles are counted by trips."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from benchmarks import large, large_step
from benchmarks.large_models import LARGE, size_of
from benchmarks.measure import results
from benchmarks.xla_seconds import CLOCK, cycle_seconds, repeated
from examples import gpt2


@pytest.mark.parametrize("name", LARGE)
def test_models_are_as_large_as_published(name: str) -> None:
    model = LARGE[name]
    params, *_ = model.arguments()
    assert size_of(params) == pytest.approx(model.published, rel=0.015)


@pytest.mark.parametrize("name", LARGE)
def test_slices_have_as_many_chips_as_meshes_and_three_axes(name: str) -> None:
    model = LARGE[name]
    assert len(model.mesh) == 3
    assert 256 <= model.devices <= 4096
    assert large_step.planned_for(model).size == model.devices


@pytest.mark.parametrize("name", LARGE)
def test_each_pattern_of_a_plan_finds_a_leaf(name: str) -> None:
    model = LARGE[name]
    params, *_ = model.arguments()
    for pins in model.plans.values():
        for pattern, _ in pins["params"].patterns if "params" in pins else ():
            assert size_of(params, pattern), pattern


def test_work_is_six_for_each_parameter_and_twelve_for_each_pair() -> None:
    cfg = gpt2.Config(layers=2, d_model=8, heads=2, seq=4, vocab=16)
    params, *_ = replace(LARGE["gpt3"], config=cfg).arguments()
    block = 12 * 8 * 8 + 13 * 8
    assert LARGE["gpt3"].work(cfg, params) == 6 * 4 * (2 * block + 2 * 8 + 16 * 8) + 12 * 2 * 4 * 4 * 8


@pytest.mark.parametrize(("name", "active"), [("mixtral", 39e9), ("deepseek", 37e9)])
def test_only_the_experts_of_a_token_work(name: str, active: float) -> None:
    model = LARGE[name]
    params, *_ = model.arguments()
    alone = model.work(replace(model.config, seq=1), params)  # one token that looks at nothing but itself
    assert alone == pytest.approx(6 * active, rel=0.015)


def test_a_truncated_model_is_planned(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = {"d_model": 256, "heads": 8, "seq": 256, "vocab": 1024}
    small = replace(LARGE["gpt3"], config=replace(LARGE["gpt3"].config, **narrow), rows=64, chips=(2, 2, 1))
    monkeypatch.setitem(large_step.LARGE, "gpt3", replace(small, mesh={"data": 1, "fsdp": 2, "model": 2}))  # type: ignore[arg-type]
    large_step.measure("gpt3/hand", compiled=False, layers=2)
    (row,) = results(capsys.readouterr().out)
    assert row["case"] == "gpt3/hand"
    assert row["devices"] == 4
    assert sum(row["by_kind"].values()) == row["bytes"] > 0
    assert 0 < row["utilization"] < 1
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([row, row | {"case": "gpt3/batch", "misfit": "too small"}]))
    large.main(["--read", str(file)])
    printed = capsys.readouterr().out
    assert "data=1,fsdp=2,model=2" in printed
    assert "gpt3/batch: too small" in printed


def test_cases_are_named_by_model_or_plan() -> None:
    assert large.chosen(["gpt3"]) == ["gpt3/batch", "gpt3/fsdp", "gpt3/hand"]
    assert large.chosen(["gpt3/fsdp", "dlrm1t"]) == ["gpt3/fsdp", "dlrm1t/batch", "dlrm1t/rows", "dlrm1t/grid"]
    with pytest.raises(SystemExit):
        large.main(["gpt4"])


TRIPS = 'backend_config={"known_trip_count":{"n":"6"}}'
LOOPS = """HloModule jit_f, num_partitions=8

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]) parameter(0)
  %x = f32[8]{0} get-tuple-element(%p), index=1
  %y = f32[8]{0} add(%x, %x), backend_config={"window_config":{"estimated_cycles":"100"}}
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %t = (s32[], f32[8]) tuple(%i, %y)
}

%condition (p: (s32[], f32[8])) -> pred[] {
  %p = (s32[], f32[8]) parameter(0)
  ROOT %c = pred[] constant(true)
}

%fused (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  ROOT %b = f32[8]{0} add(%a, %a), backend_config={"window_config":{"estimated_cycles":"7"}}
}

ENTRY %main (x: f32[8]) -> (s32[], f32[8]) {
  %x = f32[8]{0} parameter(0)
  %z = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused, backend_config={"window_config":{"estimated_cycles":"300"}}
  %zero = s32[] constant(0)
  %init = (s32[], f32[8]) tuple(%zero, %z)
  ROOT %w = (s32[], f32[8]) while(%init), condition=%condition, body=%body, TRIPS
}
""".replace("TRIPS", TRIPS)


def test_cycles_of_bodies_count_as_often_as_they_run() -> None:
    assert repeated(LOOPS) == (300 + 6 * 100) / (300 + 100)
    assert cycle_seconds(LOOPS) == pytest.approx(900 / CLOCK)
    no_estimate = LOOPS.replace('"300"', f'"{2**62}"')
    assert repeated(no_estimate) == 6
    with pytest.raises(ValueError, match="the trips of w are not known"):
        repeated(LOOPS.replace(TRIPS, ""))


def test_a_program_without_cycles_runs_once() -> None:
    text = jax.jit(lambda x: x + 1).lower(1.0).compile().as_text()
    assert repeated(text) == 1
