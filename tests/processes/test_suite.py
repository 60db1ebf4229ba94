"""A sample of the suite in 2 processes of 4 devices; `make processes` runs all of it."""

from __future__ import annotations

import pytest

from tests.processes.run import run_tests
from tests.processes.suite import SAMPLE


@pytest.mark.sampled(0)
def test_a_sample_of_the_suite():
    report = run_tests([*SAMPLE, "--stride", "16"], seconds=600)
    assert not report.bad, report.text()
    assert sum(row[0] == "passed" for row in report.outcomes.values()) > 25
