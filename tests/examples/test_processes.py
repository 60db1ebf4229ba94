"""The comparison of runs in one process and in several."""

import pytest

from examples import processes
from examples.processes import CASES, Ended, apart, main, table

LOG = """\
model: gpt2
compiled in 1.0 s
audit: {audit}
{{"step": 0, "loss": {first}}}
step 1/2  train  loss 2.0000
{{"step": 1, "loss": 1.5}}
"""
CLEAN = "planned = found (3 collectives, 1.0 KiB)"


def log(first=2.0, audit=CLEAN):
    return LOG.format(first=first, audit=audit)


def test_what_a_run_has_printed():
    ended = Ended(0, [log(), log().replace("audit:", "audit of process 1:")], 3.0)
    assert (ended.losses, ended.audits, ended.ok) == ([[2.0, 1.5], [2.0, 1.5]], [CLEAN, CLEAN], True)


@pytest.mark.parametrize(
    "ended",
    [
        Ended(1, [log(), log()], 3.0),
        Ended(0, [log(), log(first=2.1)], 3.0),
        Ended(0, [log(), log(audit="1 surprise")], 3.0),
        Ended(0, [log(), ""], 3.0),
    ],
)
def test_a_run_that_is_not_clean(ended):
    assert not ended.ok


def test_the_largest_difference():
    assert apart([2.0, 1.5], [2.0, 1.5]) == 0
    assert apart([2.0, 1.0], [2.0, 1.25]) == pytest.approx(0.2)
    assert apart([2.0], [2.0, 1.25]) == apart([], []) == float("inf")


def test_a_run_without_losses_has_a_row():
    assert table([(CASES[0], 1, Ended(1, [""], 1.0), None)]).row_count == 1


@pytest.mark.parametrize(
    ("first", "status", "says"), [(2.0, 0, "the losses are equal"), (2.00001, 1, "FAILED: more than 1e-06 apart")]
)
def test_the_exit_status(monkeypatch, capsys, first, status, says):
    def run(case, count, devices, steps, more):
        assert (devices, steps, more) == (8, 50, ["--seed", "3"])
        return Ended(0, [log(first if count > 1 else 2.0)] * count, 1.0)

    monkeypatch.setattr(processes, "run", run)
    assert main(["--seed", "3"]) == status
    text = capsys.readouterr().out
    assert says in text
    assert text.count(CLEAN) == 6


@pytest.mark.sampled(0)
def test_two_processes_have_the_losses_of_one(monkeypatch, capsys):
    monkeypatch.setattr(processes, "CASES", CASES[1:])  # stages; `test_launchers` has one mesh
    status = main(["--steps", "3", "--config", "test", "--batch", "8", "--microbatches", "4"])
    assert status == 0, capsys.readouterr().out
