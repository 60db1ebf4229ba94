"""Data in and values out, in 2 processes of 4 devices."""

from __future__ import annotations

import pytest

from tests.processes.run import run_tests


@pytest.mark.slow
def test_data_in_and_values_out():
    report = run_tests(["tests/processes/border.py"], seconds=300)
    assert not report.bad, report.text()
    assert len(report.outcomes) > 100
