"""The files of the suite that run in several processes too: `make processes` runs all of them, the suite a sample."""

from __future__ import annotations

from typing import Final

OWN: Final = ("tests/processes/border.py", "tests/processes/agreements.py")
"""Tests of what only several processes have. `test_border.py` and `test_agreements.py` run them in the suite."""
FILES: Final = (
    "tests/whole/test_function.py",
    "tests/whole/test_control_flow.py",
    "tests/whole/test_random.py",
    "tests/whole/test_lookups.py",
    "tests/whole/test_windows.py",
    "tests/whole/test_once_wrong.py",
    "tests/whole/test_own_errors.py",
    "tests/whole/test_optimizer_state.py",
    "tests/whole/test_properties.py",
    "tests/whole/test_parity.py",
    "tests/ir/test_host_callback.py",
    "tests/passes/audit/test_audit.py",
    "tests/passes/lower/test_lower_boxing.py",
    "tests/passes/place/test_insert_boxing.py",
    "tests/passes/accumulate/test_accumulate.py",
    "tests/examples/test_zoo_parity.py",
)
SAMPLE: Final = (
    "tests/whole/test_function.py",
    "tests/whole/test_control_flow.py",
    "tests/whole/test_random.py",
    "tests/whole/test_lookups.py",
    "tests/whole/test_once_wrong.py",
    "tests/ir/test_host_callback.py",
    "tests/passes/audit/test_audit.py",
    "tests/passes/lower/test_lower_boxing.py",
    "tests/passes/accumulate/test_accumulate.py",
)
"""Of these the suite runs some tests of each."""
