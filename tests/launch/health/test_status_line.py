"""The live line of a run."""

import json

import pytest

from shardc.launch.health.figures import RunHealth
from shardc.launch.health.status_line import status_text
from shardc.launch.health.stragglers import Slowest


def line(statuses):
    texts = {p: s if isinstance(s, str) else json.dumps({"epoch": 0, **s}) for p, s in statuses.items()}
    return status_text(*RunHealth(0.0).look(1.0, {p: (text, 0.0) for p, text in texts.items()}, 0, 2, 0))


def test_one_line():
    said = {
        0: {"step": 12, "loss": 3.2, "tokens": 5300.0, "waits": "process 1"},
        1: {"step": 13, "waits": None},
        2: "",
    }
    assert line(said) == "step 12 | loss 3.20 | 5,300 tokens/s | process 0 waits for process 1"


def test_nothing_is_said():
    assert line({}) == line({0: "", 1: "{}"}) == ""


def test_the_lowest_process_that_knows():
    assert line({1: {"loss": 1.0}, 0: {"step": 3}}) == "step 3 | loss 1.00"


def test_a_status_that_failed_is_shown():
    assert line({0: {"step": 3}, 1: "TypeError: no number"}) == "step 3 | process 1: TypeError: no number"


@pytest.mark.parametrize("share, text", [(0.43, " | all wait for process 3, 43% of the time"), (0.05, "")])
def test_the_slowest_process_is_named_if_it_matters(monkeypatch, share, text):
    health = RunHealth(0.0)
    monkeypatch.setattr(health._stragglers, "look", lambda said, ages, epoch: Slowest(3, share))
    assert status_text(*health.look(1.0, {0: (json.dumps({"step": 3}), 0.0)}, 0, 2, 0)) == f"step 3{text}"
