"""Data in and values out, in 2 and in 3 processes."""

from __future__ import annotations

import pytest

from tests.processes.run import run_tests


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "devices"), [(2, 4), (3, 2)])
def test_data_in_and_values_out(processes, devices):
    report = run_tests(["tests/processes/border.py"], processes=processes, devices=devices, seconds=300)
    assert not report.bad, report.text()
    assert len(report.outcomes) > 100
