"""The figures of a run in a file, and where Prometheus reads them."""

import json
import sys
import threading
import urllib.request

import pytest

from shardc.errors import ClusterError
from shardc.launch.health.figures import RunFigures
from shardc.launch.health.publish import publishing
from shardc.launch.health.stragglers import Slowest
from shardc.launch.prepare import free_port

FIGURES = RunFigures(4, 2, 120, 3.25, 5300.0, 0.9, 0.4, 100, 31.0, Slowest(3, 0.43))


def test_a_file_that_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "status.json"
    with publishing(path, None) as publish:
        publish(RunFigures(4, 0))
        assert json.loads(path.read_text())["step"] is None
        publish(FIGURES)
    said = json.loads(path.read_text())
    assert said.pop("time") > 1e9
    assert said == {
        "processes": 4, "restarts": 2, "step": 120, "loss": 3.25, "tokens_per_second": 5300.0, "goodput": 0.9,
        "last_step_age": 0.4, "checkpoint": 100, "last_checkpoint_age": 31.0,
        "slowest": {"process": 3, "share": 0.43},
    }  # fmt: skip
    assert [p.name for p in tmp_path.iterdir()] == ["status.json"]


def read(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if line[0] != "#")


def test_metrics_for_prometheus():
    pytest.importorskip("prometheus_client")
    port, before = free_port("127.0.0.1"), threading.active_count()
    with publishing(None, f":{port}") as publish:
        assert read(port) == {}
        publish(RunFigures(4, 0))
        assert read(port) == {"shardc_processes": "4.0", "shardc_restarts_total": "0.0"}
        publish(FIGURES)
        found = read(port)
        with pytest.raises(ClusterError, match=r"--metrics :\d+: nobody can listen there \(Address already in use\)"):
            publishing(None, f":{port}").__enter__()
    assert found["shardc_step"] == "120.0" and found["shardc_goodput_ratio"] == "0.9"
    assert found['shardc_slowest_ratio{process="3"}'] == "0.43"
    assert found["shardc_last_checkpoint_age_seconds"] == "31.0"
    assert len(found) == 10
    assert threading.active_count() == before


def test_without_prometheus_client(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ClusterError, match=r"pip install 'shardc\[metrics\]'"), publishing(None, ":0"):
        pass
