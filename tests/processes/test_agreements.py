"""What processes have to agree on, in 2 processes of 4 devices."""

from __future__ import annotations

import pytest

from tests.processes.run import run_tests


@pytest.mark.sampled(0)
def test_agreements():
    report = run_tests(["tests/processes/agreements.py"], seconds=300)
    assert not report.bad, report.text()
    assert len(report.outcomes) >= 20
