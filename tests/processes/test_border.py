"""Data in and values out, in 2 and in 3 processes."""

from __future__ import annotations

import pytest

from tests.processes.run import run_tests


@pytest.mark.sampled(0)
@pytest.mark.parametrize(("processes", "devices", "stride"), [(2, 4, 4), (2, 4, 1), (3, 2, 1)])
def test_data_in_and_values_out(processes, devices, stride):
    which = ["tests/processes/border.py", "--stride", str(stride)]
    report = run_tests(which, processes=processes, devices=devices, seconds=300)
    assert not report.bad, report.text()
    assert len(report.outcomes) > 100 / stride
