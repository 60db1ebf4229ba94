"""Tests of the suite that do not run in several processes, each with its reason."""

from __future__ import annotations

from fnmatch import fnmatchcase

PIPELINE = "pipelines run over independent runtimes, not over one jax.distributed"
IDS = "its expected text has the numbers of devices, which are 0-3 and 2048-2051"
SEEN_IN_ONE = "it looks at what a callback has seen or printed, in the one process that runs it"
OF_ONE_FABRIC = "it names the collectives of the cheapest plan on one fabric; the border makes another plan cheaper"
EXCLUDED: dict[str, str] = {
    "tests/whole/test_control_flow.py::test_device_put_elsewhere": "the line of a device_put is that of the plugin's",
    "*/test_accumulate.py::test_gradients_are_reduced_once_after_the_loop*": OF_ONE_FABRIC,
    "*/test_lookups.py::test_of_a_split_table*": OF_ONE_FABRIC,
    "*/test_windows.py::test_a_shift_sends_its_border_alone": OF_ONE_FABRIC,
    "*/test_windows.py::test_a_dynamic_slice_of_a_split_dimension_is_summed_up": OF_ONE_FABRIC,
    "*/test_windows.py::test_images_split_in_space*": OF_ONE_FABRIC,
    "*/test_function.py::test_numpy_uncommitted_and_committed_arrays_give_the_same": IDS,
    "*/test_host_callback.py::test_they_run_as_on_one_device*": SEEN_IN_ONE,
    "*/test_host_callback.py::test_numbers_of_64_bits_keep_them*": SEEN_IN_ONE,
    "*/test_host_callback.py::test_prints_come_once": SEEN_IN_ONE,
    "*/test_own_errors.py::test_what_is_no_number_in_a_pipeline": PIPELINE,
}
"""Patterns of test ids, and why."""


def reason(test: str) -> str | None:
    """Why a test does not run in several processes; None if it does."""
    return next((why for pattern, why in EXCLUDED.items() if fnmatchcase(test, pattern)), None)
