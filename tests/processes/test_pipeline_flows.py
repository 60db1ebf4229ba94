"""Flows with a pipeline in several processes: runs of `tests.processes.pipeline_flows`, which compares with a loop."""

import pytest

from tests.processes.test_pipelines import run

CASES = ["a_layer_to_each_process", "a_run_goes_on", "a_failure_is_one_error_in_all"]
MORE = ["layers_of_a_scan", "checkpoints", "a_pipeline_outside_of_a_flow_too"]


@pytest.mark.sampled(0)
def test_a_pipeline_of_two_processes_as_a_node():
    run(CASES, processes=3, module="tests.processes.pipeline_flows")


@pytest.mark.sampled(0)
@pytest.mark.parametrize("islands", [1, 3])
def test_more_of_a_pipeline_of_two_processes(islands):
    cases = [c for c in CASES + MORE if islands > 1 or c != "checkpoints"]
    run(cases, processes=3, islands=islands, module="tests.processes.pipeline_flows")
