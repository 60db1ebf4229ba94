"""The benchmark of the cost model runs, and counts ranks as it says. No time is looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import cost_step
from benchmarks.cases import Case
from benchmarks.cost_model import MODELS, cases_of, correlation, within, worst
from benchmarks.measure import results
from shardc.machine.topology import TOPOLOGIES


def rows(*pairs: tuple[str, float, float]) -> list[dict[str, Any]]:
    return [{"case": f"{m}/{i}/data=8", "planned": p, "other": o} for i, (m, p, o) in enumerate(pairs)]


def test_ranks() -> None:
    found = rows(("a", 1, 10), ("a", 2, 20), ("a", 3, 30), ("b", 101, 3), ("b", 102, 2), ("b", 103, 1))
    assert within(found) == pytest.approx({"a": 1.0, "b": -1.0})
    assert correlation(found[:3]) == pytest.approx(1)
    assert [r["case"] for r in worst(found)] == ["b/3/data=8", "b/5/data=8"]


def test_there_are_cases_enough() -> None:
    cases = cases_of(MODELS, "")
    assert len(cases) >= 30
    assert {c.model for c in cases} == set(MODELS)
    assert not [c for c in cases if c.plan == "pipeline"]


def test_a_case_is_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "here.json"
    file.write_text(TOPOLOGIES["cpu"].to_json())
    monkeypatch.setattr(cost_step, "SMALL", {"mlp": ({"blocks": 1, "hidden": 64, "classes": 16}, 16)})
    cost_step.main(["cpu", "mlp/data/data=8", "--calibration", str(file), "--turns", "1"])
    (row,) = results(capsys.readouterr().out)
    assert Case.parse(row["case"]) == Case("mlp", "data", (("data", 8),))
    assert row["planned"] > 0
    assert row["other"] > 0
    assert sum(row["parts"].values()) >= (1 - 1e-9) * row["planned"]
