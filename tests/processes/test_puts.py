"""Values that JAX carries between processes: runs of `tests.processes.puts`, and flows with this carrier."""

import pytest

from tests.processes.test_pipelines import run

CASES = [
    "values", "opposite_orders", "a_hundred_in_flight", "launched_before_computed_and_donated_after",
    "a_value_that_cannot_be_had_is_not_sent", "a_pipeline",
]  # fmt: skip
PUT = "--carrier", "put"


@pytest.mark.sampled(0)
def test_values_of_two_processes():
    run(CASES, islands=1, devices=4, module="tests.processes.puts", words=PUT)


@pytest.mark.sampled(0)
def test_a_third_process_counts_too():
    run(["opposite_orders", "a_pipeline", "values"], 3, 1, "tests.processes.puts", 4, PUT)


@pytest.mark.sampled(0)
def test_flows_of_two_processes():
    names = ["a_learner_of_two_processes", "a_failure_is_one_error_in_all", "checkpoints", "random-0-8"]
    run(names, islands=1, devices=4, module="tests.processes.wide_flows", words=PUT)


@pytest.mark.sampled(0)
def test_islands_of_two_processes():
    run(["a_learner_of_two_processes", "random_keys_and_uneven_arrays"], 4, 2, "tests.processes.wide_flows", 2, PUT)
