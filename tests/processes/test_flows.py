"""Flows over processes: runs of `tests.processes.flows` and `wide_flows`, which compare with a plain loop."""

import pytest

from tests.processes.test_pipelines import run

CASES = [
    "a_learner_of_two_processes", "a_run_goes_on", "two_meshes_of_several_processes", "a_failure_is_one_error_in_all",
    "checkpoints", "random_keys_and_uneven_arrays",
]  # fmt: skip


@pytest.mark.sampled(0)
def test_flows_in_three_processes():
    names = [
        "late_parameters", "a_run_goes_on_from_a_state_that_lives_elsewhere", "a_failure_is_one_error_in_all_processes",
        "shared_states", "checkpoints", "what_processes_begin_with_is_compared",
        "arrays_that_calls_close_over_are_compared",
    ]  # fmt: skip
    run(names, processes=3, module="tests.processes.flows")


@pytest.mark.sampled(0)
def test_a_mesh_of_two_processes_of_one_runtime():
    run([*CASES, "what_stays_in_each_process", "random-0-8"], islands=1, devices=4, module="tests.processes.wide_flows")


@pytest.mark.sampled(0)
def test_a_mesh_of_an_island_and_others_elsewhere():
    run(CASES, processes=4, islands=2, module="tests.processes.wide_flows")


@pytest.mark.sampled(0)
def test_checkpoints_of_some_processes_of_one_runtime():
    names = ["checkpoints", "checkpoints_of_arrays_of_some_processes"]
    run(names, processes=4, islands=1, module="tests.processes.wide_flows")


@pytest.mark.sampled(0)
@pytest.mark.parametrize("first", range(8, 208, 50))
def test_random_flows_in_two_processes(first):
    run([f"random-{first}-{first + 50}"], islands=1, devices=4, module="tests.processes.wide_flows")


@pytest.mark.sampled(0)
@pytest.mark.parametrize(("processes", "islands", "first"), [(3, 1, 0), (3, 3, 0), (4, 2, 0), (4, 1, 0)])
def test_random_flows_with_pipelines_in_more_processes(processes, islands, first):
    names = [f"random-{first}-{first + 30}"]
    run(names, processes=processes, islands=islands, devices=8, module="tests.processes.wide_flows")
