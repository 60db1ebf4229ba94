"""Flows over processes: a run of `tests.processes.flows`, which compares with a plain loop."""

from tests.processes.test_pipelines import run


def test_flows_in_three_processes():
    names = [
        "late_parameters", "a_run_goes_on_from_a_state_that_lives_elsewhere", "a_failure_is_one_error_in_all_processes",
        "shared_states", "checkpoints", "what_processes_begin_with_is_compared",
        "arrays_that_calls_close_over_are_compared",
    ]  # fmt: skip
    run(names, processes=3, module="tests.processes.flows")
